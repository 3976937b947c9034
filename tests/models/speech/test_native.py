"""Whisper on our own layers beside transformers' in float64: logits, words, company, precisions, what is given back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperForConditionalGeneration

from torchwright.core.errors import ModelError, UnknownName
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.cpu import build
from torchwright.models.decoder.cache import CacheFull
from torchwright.models.decoder.plan import plans
from torchwright.models.decoder.precision import read_precision
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.native import NativeSpeech
from torchwright.models.speech.native_family import NativeFamily
from torchwright.models.speech.steps import TransformersSpeech
from torchwright.models.speech.whisper.native import FAMILY
from watched_layers import layers_called
from whispers import SECONDS, noise, tiny

FRAMES, VOCABULARY = SECONDS * 100, 400
PRECISIONS = [
    (torch.float32, None, 1e-5),
    (torch.bfloat16, None, 0.03),
    (torch.bfloat16, "w8a8", 0.06),
    (torch.bfloat16, "encoder=w8a8,decoder=w4a16", 0.3),
]
"""Type, quantization, largest norm of the logits' error over their norm."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    missing = build.load_fault()
    if missing:
        pytest.skip(f"no kernels: {missing}")


@pytest.fixture(params=[*build.architecture(), "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in ops.native.isas():
        pytest.skip(f"this machine has {', '.join(ops.native.isas())}")
    before = ops.native.isa()
    ops.native.use_isa(request.param)
    yield request.param
    ops.native.use_isa(before)


def whisper(folder: Path, **overrides: Any) -> Any:
    """A folder's model in float64, whose norms and biases are none that a new model has."""
    tiny(folder, peaks=4, **overrides)
    model: Any = WhisperForConditionalGeneration.from_pretrained(folder).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.double()


def features() -> torch.Tensor:
    return torch.randn(1, 80, FRAMES)


def ids(count: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(count)]


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@torch.inference_mode()
def near(model: Any, ours: NativeSpeech, tolerance: float) -> None:
    """States, and logits of a prompt, of one token and of a piece of several."""
    heard, tokens = features(), ids(17)
    states = model.get_encoder()(heard.double()).last_hidden_state[0]
    wanted = model(input_features=heard.double(), decoder_input_ids=torch.tensor([tokens])).logits[0]
    assert apart(ours.states(heard), states) < tolerance
    steps = ours.steps(ours.encode(heard))
    hidden = torch.cat([steps.read(part) for part in (tokens[:4], tokens[4:5], tokens[5:])])
    found = ours.logits(hidden)
    assert found.dtype == torch.float32
    assert apart(found, wanted) < tolerance


@pytest.mark.plain(
    "avx2-dtype0-None-1e-05",
    "avx512-dtype1-None-0.03",
    "amx-dtype3-encoder=w8a8,decoder=w4a16-0.3",
    "avx512-dtype2-w8a8-0.06",
)
@pytest.mark.parametrize(("dtype", "quantize", "tolerance"), PRECISIONS)
def test_logits_are_those_of_transformers(
    isa: str, tmp_path: Path, dtype: torch.dtype, quantize: str | None, tolerance: float
) -> None:
    model = whisper(tmp_path)
    near(model, FAMILY.load_native(tmp_path, dtype, read_precision(quantize)), tolerance)


@pytest.mark.parametrize(
    "overrides",
    [
        {"activation_function": "relu"},
        {"tie_word_embeddings": False, "activation_function": "gelu_new"},
        {"encoder_layers": 1, "decoder_layers": 3, "decoder_ffn_dim": 80, "encoder_attention_heads": 1},
        {"num_mel_bins": 80, "d_model": 48, "encoder_attention_heads": 3, "decoder_attention_heads": 1},
    ],
    ids=str,
)
def test_other_shapes(tmp_path: Path, overrides: dict[str, Any]) -> None:
    near(
        whisper(tmp_path, **overrides),
        FAMILY.load_native(tmp_path, torch.float32, read_precision(None)),
        1e-5,
    )


@pytest.mark.plain("avx2_vnni-w8a8", "avx2-None", "avx2_vnni-None", "avx512-w8a8")
@pytest.mark.parametrize("quantize", [None, "w8a8"])
@torch.inference_mode()
def test_a_window_gives_the_same_bits_in_any_company(isa: str, tmp_path: Path, quantize: str | None) -> None:
    """Alone and together, prompts of other lengths beside single tokens; as one operator and layer by layer."""
    whisper(tmp_path)
    ours = FAMILY.load_native(tmp_path, torch.bfloat16, read_precision(quantize))
    heard, texts = [features() for _ in range(5)], [ids(random.randrange(6, 30)) for _ in range(5)]

    def alone(window: int) -> torch.Tensor:
        steps = ours.steps(ours.encode(heard[window]))
        return torch.cat([steps.read(texts[window][:4]), *(steps.read([i]) for i in texts[window][4:])])

    wanted = [alone(window) for window in range(5)]
    plan = plans[ours._cache]
    assert plan.unplanned is None
    with layers_called(ours.decoder):
        assert torch.equal(alone(0), wanted[0])

    steps = [ours.steps(ours.encode(window)) for window in heard]
    rest = [list(text) for text in texts]
    found: list[list[torch.Tensor]] = [[] for _ in steps]
    while any(rest):
        chosen = [i for i, text in enumerate(rest) if text]
        sizes = [random.choice([1, 1, 3]) for _ in chosen]
        parts = ours.read([(steps[i], rest[i][:size]) for i, size in zip(chosen, sizes, strict=True)])
        for i, size, part in zip(chosen, sizes, parts, strict=True):
            found[i].append(part)
            rest[i] = rest[i][size:]
    assert all(torch.equal(torch.cat(mine), theirs) for mine, theirs in zip(found, wanted, strict=True))
    rows = torch.cat(wanted)
    assert torch.equal(ours.logits(rows)[3], ours.logits(rows[3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_where_heads_look(tmp_path: Path, dtype: torch.dtype) -> None:
    model = whisper(tmp_path)
    ours = FAMILY.load_native(tmp_path, dtype, read_precision(None))
    model.set_attn_implementation("eager")
    heard, tokens, heads = features(), ids(17), [(1, 0), (0, 1), (1, 1)]
    out = model(
        input_features=heard.double(), decoder_input_ids=torch.tensor([tokens]), output_attentions=True
    )
    wanted = torch.stack([out.cross_attentions[layer][0, head] for layer, head in heads])
    found = ours.cross_attention(heads, tokens, ours.encode(heard)).softmax(-1)
    assert apart(found, wanted) < (1e-5 if dtype == torch.float32 else 0.1)


@torch.inference_mode()
def test_pages_are_given_back(tmp_path: Path) -> None:
    whisper(tmp_path)
    made = FAMILY.load_native(tmp_path, torch.bfloat16, read_precision(None))
    ours = NativeSpeech(made.stem, made.encoder, made.decoder, "", windows=2)
    heard = [ours.encode(features()) for _ in range(2)]
    with pytest.raises(CacheFull, match="no room"):
        ours.encode(features())
    for _ in range(9):  # attempts at one window
        ours.steps(heard[0]).read(ids(30))
    del heard
    pools = ours._cache.pool, ours._memory._cache.pool
    for pool in pools:
        pool.check_integrity([])


@pytest.mark.slow
def test_words_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; and a machine without kernels takes transformers' modules."""
    tiny(tmp_path)
    samples = noise(2.3 * SECONDS)
    ours = load_speech(tmp_path)
    assert isinstance(ours.model, NativeSpeech)
    found = ours.transcribe(samples, language="en")
    monkeypatch.setattr(NativeFamily, "native_fault", lambda *asked: "no kernels")
    theirs = load_speech(tmp_path)
    assert isinstance(theirs.model, TransformersSpeech)
    wanted = theirs.transcribe(samples, language="en")
    assert [segment.tokens for segment in found.segments] == [segment.tokens for segment in wanted.segments]
    assert "transformers" in theirs.model.description
    with pytest.raises(ModelError, match="no kernels"):
        load_speech(tmp_path, quantize="w8a8")


def test_each_side_has_its_precision(tmp_path: Path) -> None:
    tiny(tmp_path)
    model = load_speech(tmp_path, torch.bfloat16, "decoder=w8a8").model
    assert model.description == "Torchwright's kernels, encoder bfloat16, decoder w8a8"
    assert read_precision("w8a8") == read_precision("decoder=w8a8,encoder=w8a8")
    assert read_precision("none") == read_precision(None)
    assert str(read_precision("decoder=w4a16:group_size=64").decoder) == "w4a16:group_size=64"
    for wrong in ("encoder=w8a8,encoder=w8a8", "ears=w8a8", "encoder=w8a8,w8a8"):
        with pytest.raises(ModelError, match="each of encoder and decoder once"):
            read_precision(wrong)
    for wrong in ("w9", "encoder=w9"):
        with pytest.raises(UnknownName, match="w9"):
            read_precision(wrong)


def test_heads_that_no_kernel_takes_run_on_transformers(tmp_path: Path) -> None:
    tiny(tmp_path, d_model=40)
    assert isinstance(load_speech(tmp_path).model, TransformersSpeech)
    with pytest.raises(ModelError, match="heads of 20"):
        load_speech(tmp_path, quantize="w8a8")
