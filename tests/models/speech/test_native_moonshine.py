"""Moonshine on our own layers beside transformers' in float64: logits, words, company, what is kept in an artifact."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from moonshines import moonshine

from folders import VOCABULARY
from torchwright.core.errors import ModelError
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.cpu import build
from torchwright.models.decoder.precision import read_precision
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.moonshine.native import FAMILY
from torchwright.models.speech.native import NativeSpeech
from torchwright.models.speech.native_family import NativeFamily
from torchwright.models.speech.packed import read_packed, write_packed
from torchwright.models.speech.steps import TransformersSpeech
from whispers import noise

PRECISIONS = [
    (torch.float32, None, 1e-5),
    (torch.bfloat16, None, 0.03),
    (torch.bfloat16, "w8a8", 0.08),
    (torch.bfloat16, "encoder=w8a8,decoder=w4a16", 0.3),
]
"""Type, quantization, largest norm of the error over the norm, of states and of logits."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    missing = build.load_fault()
    if missing:
        pytest.skip(f"no kernels: {missing}")


@pytest.fixture(params=[*build.architecture(), "portable"])
def isa(request: pytest.FixtureRequest):
    if request.param not in ops.native.isas():
        pytest.skip(f"this machine has {', '.join(ops.native.isas())}")
    before = ops.native.isa()
    ops.native.use_isa(request.param)
    yield request.param
    ops.native.use_isa(before)


def samples(seconds: float) -> torch.Tensor:
    return torch.from_numpy(noise(seconds))[None]


def ids(count: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(count)]


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@torch.inference_mode()
def near(model: Any, ours: NativeSpeech, tolerance: float) -> None:
    """States, and logits of a prompt, of one token and of a piece of several."""
    heard, tokens = samples(random.uniform(0.6, 3.0)), ids(17)
    states = model.get_encoder()(heard.double()).last_hidden_state[0]
    wanted = model(input_values=heard.double(), decoder_input_ids=torch.tensor([tokens])).logits[0]
    assert apart(ours.states(heard), states) < tolerance
    steps = ours.steps(ours.encode(heard))
    hidden = torch.cat([steps.read(part) for part in (tokens[:4], tokens[4:5], tokens[5:])])
    assert apart(ours.logits(hidden), wanted) < tolerance


@pytest.mark.parametrize(("dtype", "quantize", "tolerance"), PRECISIONS)
def test_logits_are_those_of_transformers(
    isa: str, tmp_path: Path, dtype: torch.dtype, quantize: str | None, tolerance: float
) -> None:
    model = moonshine(tmp_path).double()
    near(model, FAMILY.load_native(tmp_path, dtype, read_precision(quantize)), tolerance)


@pytest.mark.parametrize(
    ("head", "part", "overrides"),
    [
        (52, 0.62, {}),  # Moonshine base's
        (36, 0.9, {"decoder_num_hidden_layers": 3}),  # tiny's
        (16, 1.0, {"tie_word_embeddings": False}),
        (20, 0.5, {"encoder_hidden_act": "relu"}),
    ],
)
def test_other_shapes(tmp_path: Path, head: int, part: float, overrides: dict[str, Any]) -> None:
    model = moonshine(tmp_path, head, part, **overrides).double()
    near(model, FAMILY.load_native(tmp_path, torch.float32, read_precision(None)), 1e-5)


@pytest.mark.parametrize("quantize", [None, "w8a8"])
@torch.inference_mode()
def test_a_window_gives_the_same_bits_in_any_company(isa: str, tmp_path: Path, quantize: str | None) -> None:
    moonshine(tmp_path)
    ours = FAMILY.load_native(tmp_path, torch.bfloat16, read_precision(quantize))
    heard, texts = [samples(0.6 + 0.7 * i) for i in range(4)], [ids(9 + 3 * i) for i in range(4)]
    alone = [
        torch.cat([ours.steps(ours.encode(one)).read(text)]) for one, text in zip(heard, texts, strict=True)
    ]
    steps = [ours.steps(ours.encode(one)) for one in heard]
    found = [ours.read([(each, text[:4]) for each, text in zip(steps, texts, strict=True)])]
    found.append(ours.read([(each, text[4:]) for each, text in zip(steps, texts, strict=True)]))
    for i, wanted in enumerate(alone):
        assert torch.equal(torch.cat([part[i] for part in found]), wanted)


def test_words_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; and a machine without kernels takes transformers' modules."""
    moonshine(tmp_path)
    sound = noise(3.1)
    ours = load_speech(tmp_path)
    assert isinstance(ours.model, NativeSpeech)
    found = ours.transcribe(sound)
    monkeypatch.setattr(NativeFamily, "native_fault", lambda *asked: "no kernels")
    theirs = load_speech(tmp_path)
    assert isinstance(theirs.model, TransformersSpeech)
    assert [segment.tokens for segment in found.segments] == [
        segment.tokens for segment in theirs.transcribe(sound).segments
    ]
    with pytest.raises(ModelError, match="no kernels"):
        load_speech(tmp_path, quantize="w8a8")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"attention_bias": True}, "biases"),
        ({"part": 0.6}, "7 dimensions turn"),
        ({"decoder_hidden_act": "relu"}, "a gate of relu"),
    ],
    ids=str,
)
def test_what_our_layers_lack_runs_on_transformers(
    tmp_path: Path, overrides: dict[str, Any], said: str
) -> None:
    moonshine(tmp_path, **overrides)
    assert isinstance(load_speech(tmp_path).model, TransformersSpeech)
    with pytest.raises(ModelError, match=said):
        load_speech(tmp_path, quantize="w8a8")


@torch.inference_mode()
def test_it_is_kept_and_read_again(tmp_path: Path) -> None:
    moonshine(tmp_path)
    ours = FAMILY.load_native(tmp_path, torch.bfloat16, read_precision("w8a8"))
    kept = tmp_path / "kept"
    kept.mkdir()
    write_packed(ours, kept)
    again, heard, tokens = read_packed(kept, tmp_path), samples(1.3), ids(7)
    wanted, found = (each.steps(each.encode(heard)).read(tokens) for each in (ours, again))
    assert torch.equal(wanted, found)
    assert again.description == ours.description
