"""Speech as a workload: its calls beside transformers, the metric, native calls and what an artifact keeps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factories import make_recipe
from folders import change_json
from torchwright.core.errors import ArtifactError, WorkloadError
from torchwright.hardware.kernels.cpu import build
from torchwright.models.decoder.precision import Precision
from torchwright.models.speech.bundled import bundled
from torchwright.models.speech.calls import CHUNK, CacheSizes, CalledSpeech, CallsModel
from torchwright.models.speech.load import family, load_speech
from torchwright.models.speech.native_calls import NativeCalls
from torchwright.models.speech.whisper.native import FAMILY
from torchwright.models.speech.workload import NEW_TOKENS, SpeechWorkload, words
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.artifact.load import load
from torchwright.optimization.open_model import open_speech
from torchwright.workloads.accuracy import predictions
from torchwright.workloads.base import Run
from whispers import noise, tiny

NEW = 8


@pytest.fixture(scope="module")
def workload(folder: Path) -> SpeechWorkload:
    return SpeechWorkload(folder, new_tokens=NEW)


@pytest.fixture
def kernels() -> None:
    if missing := build.load_fault():
        pytest.skip(f"no kernels: {missing}")


def run_of(model: Any) -> Run:
    return lambda case: model(*case.args)


def called(folder: Path, model: Any, sizes: CacheSizes, dtype: torch.dtype = torch.float32) -> Any:
    return family(folder)(folder, CalledSpeech(run_of(model), sizes, dtype, "a test"))


def tokens(found: Any) -> list[tuple[int, ...]]:
    return [segment.tokens for segment in found.segments]


def written(folder: Path, out: Path) -> Path:
    """An artifact of the native encoder and decoder, without a search."""
    workload = SpeechWorkload(folder, new_tokens=NEW)
    with artifact.writing(out) as temporary:
        NativeCalls(FAMILY.load_native(folder, torch.bfloat16, Precision())).save(temporary)
        for name, file in workload.files(weights=False).items():
            (temporary / artifact.MODEL).mkdir(exist_ok=True)
            shutil.copy2(file, temporary / artifact.MODEL / name)
        recipe = make_recipe(engine="native_speech", workload=workload.describe(), steps=())
        artifact.finish(temporary, recipe, {"engine": "native_speech", "dtype": "bfloat16"})
    return out


def test_a_window_has_as_many_tokens_as_its_decoder_has_room_for(folder: Path) -> None:
    """The bundled model has room for 16 after a prompt, and is refused nothing that nobody asked for."""
    assert SpeechWorkload(bundled()).new_tokens == 16
    assert SpeechWorkload(bundled()).describe()["new_tokens"] == 16
    assert 1 <= SpeechWorkload(folder).new_tokens <= NEW_TOKENS
    with pytest.raises(WorkloadError, match=r"64\. Allowed: 1 to 16 after a prompt of 32"):
        SpeechWorkload(bundled(), new_tokens=64)


@pytest.mark.slow
def test_the_calls_find_the_words_of_the_model_itself(folder: Path, workload: SpeechWorkload) -> None:
    """Prompts that fill several chunks among them: the text before is the prompt of the second window."""
    samples = noise(9)
    ours = called(folder, CallsModel(workload.build(), workload.cache.positions), workload.cache)
    theirs = load_speech(folder)
    assert tokens(ours.transcribe(samples, language="de")) == tokens(
        theirs.transcribe(samples, language="de")
    )
    with pytest.raises(WorkloadError, match="native_speech"):
        ours.transcribe(samples, language="de", timestamps="word")


@pytest.mark.slow
def test_native_calls_are_the_native_model(
    folder: Path, workload: SpeechWorkload, kernels: None, tmp_path: Path
) -> None:
    """To the bit; also after they were kept and read."""
    samples = noise(9)
    model = NativeCalls(FAMILY.load_native(folder, torch.bfloat16, Precision()))
    wanted = load_speech(folder, torch.bfloat16).transcribe(samples, language="en", timestamps="word")
    ours = called(folder, model, workload.cache, torch.bfloat16)
    assert tokens(ours.transcribe(samples, language="en")) == [s.tokens for s in wanted.segments]
    model.save(tmp_path)
    again = family(folder)(folder, NativeCalls.load(tmp_path, folder).speech)
    assert again.transcribe(samples, language="en", timestamps="word") == wanted
    with torch.inference_mode():
        for case in workload.cases(torch.bfloat16):  # each by itself, as it is timed
            assert all(bool(part.isfinite().all()) for part in model(*case.args))


@pytest.mark.parametrize("name", ["decoder.layers.1.memory.kv.packed", "stem.positions"])
def test_damaged_packed_weights_are_refused(folder: Path, kernels: None, tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    NativeCalls(FAMILY.load_native(folder, torch.bfloat16, Precision())).save(tmp_path)
    tensors = load_file(tmp_path / "speech.safetensors")
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "speech.safetensors")
    with pytest.raises(ArtifactError, match="cannot be read"):
        NativeCalls.load(tmp_path, folder)


@pytest.mark.slow
def test_an_artifact_transcribes(folder: Path, kernels: None, tmp_path: Path) -> None:
    samples, out = noise(5), written(folder, tmp_path / "out")
    wanted = load_speech(folder, torch.bfloat16).transcribe(samples, language="en", timestamps="word")
    assert load(out).model.transcribe(samples, language="en", timestamps="word") == wanted
    assert open_speech(str(out)).transcribe(samples, language="en", timestamps="word") == wanted
    with pytest.raises(WorkloadError, match="has its own"):
        open_speech(str(out), quantize="w8a8")


def test_words_count(folder: Path) -> None:
    def heard(*texts: str) -> dict[str, Any]:
        split = [list(map(ord, text)) for text in texts]
        return {
            "texts": list(texts),
            "tokens": split,
            "language": "en",
            "references": ["red blue", "green black"],
        }

    before, after = heard("red blue", "green"), heard("red blue", "green black")
    assert words(before, before, folder).drop == 0
    assert words(after, before, folder).drop == 0.25
    found = words(before, after, folder)
    assert (found.reference, found.value, found.drop) == (0.25, 0, -0.25)
    assert found.drop_low is not None
    assert found.drop_low <= found.drop <= found.drop_high
    own = words(before | {"references": []}, after, folder)
    assert own.metric == "words other than the original's"
    assert (own.reference, own.drop) == (0, 1 / 3)


def test_predictions_are_the_divergence() -> None:
    one, other = (torch.randn(128, 50).log_softmax(-1) for _ in range(2))
    wanted = torch.nn.functional.kl_div(other.double(), one.double(), log_target=True, reduction="batchmean")
    found = predictions(one, other, 64)
    assert found.drop == pytest.approx(float(wanted.expm1()), rel=1e-4)
    assert predictions(one, one, 64).drop == 0


@pytest.mark.slow
def test_recordings_and_their_words(folder: Path, tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile", reason="sound files are read with soundfile")
    sounds, texts = [], []
    for number in range(4):
        sounds.append(str(tmp_path / f"{number}.wav"))
        texts.append(str(tmp_path / f"{number}.txt"))
        soundfile.write(sounds[-1], noise(1), 16_000)
        Path(texts[-1]).write_text("some words\n")
    workload = SpeechWorkload(folder, new_tokens=NEW, audio=sounds, reference=texts, language="en")
    model = workload.adapt(workload.build())
    with torch.inference_mode():
        seen = workload.observe(run_of(model), torch.float32)
        unseen = workload.unseen()
        assert unseen is not None
        other = unseen.observe(run_of(model), torch.float32)
    assert len(seen["texts"]) == len(other["texts"]) == 2
    assert unseen.sample == range(2, 4)
    found = workload.compare(seen, seen)
    assert (found.metric, found.drop, found.drop_high) == ("word error rate", 0, 0)
    assert found.extras["token_agreement"] == 1
    assert found.extras["error_rate_low"] <= found.value <= found.extras["error_rate_high"]
    with pytest.raises(WorkloadError, match="3 references for 4 sound files"):
        SpeechWorkload(folder, new_tokens=NEW, audio=sounds, reference=texts[:3])
    with pytest.raises(WorkloadError, match="4 references for 0 sound files"):
        SpeechWorkload(folder, new_tokens=NEW, reference=texts)
    Path(texts[0]).write_bytes(b"\xff\xfe")
    with pytest.raises(WorkloadError, match=r"0\.txt cannot be read"):
        SpeechWorkload(folder, new_tokens=NEW, audio=sounds, reference=texts)


def test_what_it_refuses(folder: Path, workload: SpeechWorkload) -> None:
    with pytest.raises(WorkloadError, match="there is no such file"):
        SpeechWorkload(folder, audio=["nowhere.wav"], new_tokens=NEW)
    with pytest.raises(WorkloadError, match="new-tokens 64"):
        SpeechWorkload(folder, new_tokens=64)
    described = workload.describe()
    for wrong in (
        {"cache": {}},
        {"cache": described["cache"] | {"layers": 0}},
        {"window_seconds": "long"},
        {"language": 3},
    ):
        with pytest.raises(ArtifactError):
            SpeechWorkload.check(described | wrong)


def test_english_models_and_folders_without_generation_config(tmp_path: Path) -> None:
    tiny(tmp_path, languages=False)
    (tmp_path / "generation_config.json").unlink()
    change_json(tmp_path / "config.json", begin_suppress_tokens=[])
    workload = SpeechWorkload(tmp_path, new_tokens=NEW)
    model = workload.adapt(workload.build())
    with torch.inference_mode():
        seen = workload.observe(run_of(model), torch.float32)
    assert workload.compare(seen, seen).drop == 0


def test_rates(workload: SpeechWorkload) -> None:
    found = SpeechWorkload.rates(workload.describe(), {"encode": 1.0, "prefill": 0.5, "decode": 0.25})
    assert found["real_time_factor"] == pytest.approx(3.5 / 4)
    assert (found["first_word_s"], found["decoder_s"]) == (1.75, 2.5)
    assert np.isfinite(list(found.values())).all()
    assert workload.cases(torch.float32)[1].args[1].shape == (1, CHUNK)
