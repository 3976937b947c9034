"""The trained models of benchmarks/models/trained beside what their packages answer."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.harness.run import BUNDLED, ROOT
from benchmarks.models.trained import (
    crystals,
    file_types,
    pronunciation,
    sounds,
    speech_or_not,
    transcripts,
)
from benchmarks.models.trained.task import MissingPackage, package_folder


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@contextlib.contextmanager
def skipped_without_package() -> Iterator[None]:
    """Skip with the reason where a package is not installed."""
    try:
        yield
    except MissingPackage as missing:
        pytest.skip(str(missing))


@torch.inference_mode()
def test_silero_hears_what_its_torchscript_hears() -> None:
    with skipped_without_package(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.load
        model = speech_or_not.load()
        file = package_folder("silero_vad") / "data" / "silero_vad.jit"
        original: Any = torch.jit.load(file)
    sound_BS = 0.1 * torch.randn(2, 6 * speech_or_not.WINDOW)
    original.reset_states()
    windows = sound_BS.split(speech_or_not.WINDOW, 1)
    expected_BT = torch.cat([original(window, sounds.RATE) for window in windows], 1)
    context = torch.zeros(2, speech_or_not.CONTEXT)
    torch.testing.assert_close(model(torch.cat([context, sound_BS], 1)), expected_BT, rtol=0, atol=1e-5)


def test_noise_and_pauses_are_not_speech() -> None:
    noise = sounds.pink_noise(3, 4096, torch.Generator().manual_seed(0))
    torch.testing.assert_close(noise.square().mean(1), torch.ones(3))
    power = torch.fft.rfft(noise).abs().square().mean(0)
    octaves = [float(power[low : 2 * low].sum()) for low in (64, 128, 256, 512, 1024)]
    assert max(octaves) < 1.6 * min(octaves)


@torch.no_grad()
def test_chgnet_is_the_package_s_own() -> None:
    with skipped_without_package():
        found = crystals.original()
    graphs = [
        found.graph_converter(each) for each in crystals.crystals(list(crystals.COMPOUNDS)[:3], 3, seed=0)
    ]
    wanted = [max(len(crystals.sizes(graph)[kind]) for graph in graphs) + 3 for kind in range(3)]
    elements = found.composition_model(graphs)
    model = crystals.Chgnet(found)
    for graph, of_elements in zip(graphs, elements, strict=True):
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the package makes a tensor of tensors
            expected = found.predict_graph(graph, task="ef")
        energy, forces_N3 = model(*crystals.filled(graph, wanted))
        assert float(energy + of_elements) == pytest.approx(float(expected["e"]), abs=1e-5)
        torch.testing.assert_close(forces_N3, torch.from_numpy(expected["f"]), rtol=1e-4, atol=1e-4)


def test_moonshine_hears_the_package_s_recording() -> None:
    with skipped_without_package():
        package_folder("onnxruntime")
        package_folder("soundfile")
        whole, tokenizer = transcripts.load()
        sound = sounds.read(package_folder("moonshine_cpp") / "test-data" / "beckett.wav")
    encoder = transcripts.Encoder(whole.model.encoder)
    (text,) = transcripts.transcripts(encoder, [(sound[None],)], whole, tokenizer)
    words = "".join(letter for letter in text.lower() if letter.isalpha() or letter == " ")
    assert words == "ever tried ever failed no matter try again fail again fail better"


def test_g2p_en_spells_unknown_words_as_its_numpy_code_does() -> None:
    with skipped_without_package():
        model = pronunciation.load()
    calls = pronunciation.calls(["activationist", "cat", "zyzzyva"])
    # Of g2p_en 2.1.0, whose import needs NLTK's downloads.
    expected = [
        ["AE2", "K", "T", "IH0", "V", "EY1", "SH", "AH0", "N", "IH0", "S", "T"],
        ["K", "AE1", "T"],
        ["Z", "IH0", "Z", "V", "AY1", "AH0"],
    ]
    assert pronunciation.spelled(model, calls) == expected


@torch.inference_mode()
def test_magika_answers_as_its_onnx_file() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    with skipped_without_package():
        model = file_types.load()
        session = onnxruntime.InferenceSession(file_types.folder() / "model.onnx")
    files = [Path(__file__), ROOT / "pyproject.toml", BUNDLED / "tokenizer.json", BUNDLED / "config.json"]
    seen = torch.tensor([file_types.ends(file.read_bytes()) for file in files])
    (expected,) = session.run(None, {"bytes": seen.int().numpy()})
    found = model(seen).softmax(-1)
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    assert [file_types.labels()[place] for place in found.argmax(-1)] == ["python", "toml", "json", "json"]


def test_what_magika_sees_of_a_short_file_is_padded_between_its_ends() -> None:
    seen = file_types.ends(b"  ab \n")
    assert seen[:4] == [*b"ab \n"]
    assert seen[-4:] == [*b"  ab"]
    assert set(seen[4:-4]) == {file_types.PADDING}
    assert len(seen) == 2 * file_types.SEEN
