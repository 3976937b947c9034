"""Encoder-decoder text models beside transformers' in float64: logits, tokens, company, precisions, refusals."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from seq2seqs import MODELS, VOCABULARY, tiny, tokenizer

from folders import change_json
from torchwright.core.errors import ModelError, UnknownName, WorkloadError
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.cpu import build
from torchwright.models.decoder.plan import plans
from torchwright.models.decoder.seq2seq.load import load_seq2seq
from torchwright.models.decoder.seq2seq.stack_weights import buckets_of
from torchwright.models.decoder.seq2seq.translator import LoadedSeq2Seq
from watched_layers import layers_called

PRECISIONS = [(torch.float32, None, 1e-5), (torch.bfloat16, None, 0.03), (torch.bfloat16, "w8a8", 0.15)]
"""Type, quantization, largest norm of the logits' error over their norm."""

PADDING = 1


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


def source(most: int = 100) -> list[int]:
    """Token ids, none of which is padding, and their end."""
    return [*(random.randrange(4, 300) for _ in range(random.randrange(1, most))), 2]


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@torch.inference_mode()
def error(model: Any, ours: LoadedSeq2Seq) -> float:
    """Of the logits of a source and a target, both longer than a page."""
    text, target = source(100), [ours.rules.start, *source(80)]
    wanted = model(input_ids=torch.tensor([text]), decoder_input_ids=torch.tensor([target])).logits[0]
    found = ours.logits(text, target)
    assert found.dtype == torch.float32
    return apart(found, wanted)


@pytest.mark.plain(
    "dtype2-w8a8-0.15-bart-scaled",
    "dtype1-None-0.03-bart-scaled",
    "dtype0-None-1e-05-bart-scaled",
    "dtype1-None-0.03-t5",
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "quantize", "tolerance"), PRECISIONS)
def test_logits_are_those_of_transformers(
    tmp_path: Path, name: str, dtype: torch.dtype, quantize: str | None, tolerance: float
) -> None:
    model = tiny(tmp_path, name)
    assert error(model, load_seq2seq(tmp_path, dtype, quantize)) < tolerance


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_each_instruction_set_computes_them(isa: str, tmp_path: Path, name: str) -> None:
    model = tiny(tmp_path, name)
    assert error(model, load_seq2seq(tmp_path, torch.bfloat16)) < 0.03
    assert error(model, load_seq2seq(tmp_path, torch.bfloat16, kv="int8")) < 0.06


def said(tokens: list[int]) -> list[int]:
    """Tokens before padding, behind which transformers' M2M100 counts places anew; no trained model says it."""
    return tokens[: tokens.index(PADDING)] if PADDING in tokens else tokens


@pytest.mark.plain("t5-1.1", "bart", "marian", "nllb", "pegasus")
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = tiny(tmp_path, name)
    ours, texts = load_seq2seq(tmp_path), [source() for _ in range(3)]
    for text, found in zip(texts, ours.generate(texts, max_new_tokens=20), strict=True):
        # Its cache of a T5 has as many layers as the encoder.
        settings = {"max_new_tokens": 20, "do_sample": False, "num_beams": 1, "use_cache": False}
        wanted = model.generate(torch.tensor([text]), **settings)[0, 1:].tolist()
        assert said(found) == said([token for token in wanted if token != 2])


@pytest.mark.plain("None-t5", "None-t5-1.1", "w8a8-marian", "w8a8-nllb")
@pytest.mark.parametrize("name", ["t5", "t5-1.1", "marian", "nllb"])
@pytest.mark.parametrize("quantize", [None, "w8a8"])
def test_an_answer_is_the_same_in_any_company(tmp_path: Path, name: str, quantize: str | None) -> None:
    """To the token, drawn and greedy; the bits of the logits stand behind draws."""
    tiny(tmp_path, name)
    ours, texts = load_seq2seq(tmp_path, torch.bfloat16, quantize), [source(90) for _ in range(5)]
    for options in ({}, {"temperature": 1.5}):
        together = ours.generate(texts, max_new_tokens=24, seed=[7] * 5, stop=[], **options)
        alone = [ours.generate(text, max_new_tokens=24, seed=[7], stop=[], **options) for text in texts]
        assert together == alone


@torch.inference_mode()
def test_the_encoders_states_are_the_same_bits_in_any_company(tmp_path: Path) -> None:
    tiny(tmp_path, "t5")
    ours, texts = load_seq2seq(tmp_path, torch.bfloat16), [source(90) for _ in range(4)]

    def states(*chosen: list[int]) -> tuple[torch.Tensor, ...]:
        lengths = [len(text) for text in chosen]
        places = torch.cat([torch.arange(length) for length in lengths])
        with ours.on_threads():
            read = ours.embedding(torch.tensor([token for text in chosen for token in text]), places)
            return ours.encoder(read, lengths).split(lengths)

    for text, found in zip(texts, states(*texts), strict=True):
        assert torch.equal(found, states(text)[0])


def test_t5_decodes_by_one_operator_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path, "t5")
    ours, text = load_seq2seq(tmp_path, torch.bfloat16), source()
    cache, target = ours._cache([200]), [ours.rules.start, *source(50)]
    with monkeypatch.context() as patch:
        patch.setattr(ours, "_cache", lambda tokens: cache)
        planned = ours.logits(text, target)
        assert plans[cache].unplanned is None
    with layers_called(ours.decoder):
        assert torch.equal(ours.logits(text, target), planned)


def test_tokens_that_the_folder_forces_and_bans(tmp_path: Path) -> None:
    model = tiny(tmp_path, "marian")
    settings = {
        "forced_bos_token_id": 17,
        "forced_eos_token_id": 2,
        "bad_words_ids": [[5], [6]],
        "num_beams": 4,
    }
    change_json(tmp_path / "generation_config.json", **settings)
    ours, text = load_seq2seq(tmp_path), source()
    found = ours.generate(text, max_new_tokens=12)
    assert found[0] == 17
    assert len(found) <= 11
    assert ours.rules.not_followed == ("num_beams 4",)
    settings.pop("num_beams")
    wanted = model.generate(torch.tensor([text]), max_new_tokens=12, do_sample=False, num_beams=1, **settings)
    assert found == [token for token in wanted[0, 1:].tolist() if token != 2]
    free = range(7, 12)
    change_json(tmp_path / "generation_config.json", bad_words_ids=[[i] for i in range(400) if i not in free])
    assert set(load_seq2seq(tmp_path).generate(text, max_new_tokens=12)[1:]) <= set(free)


def test_languages_begin_source_and_answer(tmp_path: Path) -> None:
    tiny(tmp_path, "nllb")
    tokenizer(tmp_path, ("eng_Latn", "fra_Latn", "deu_Latn"))
    plain = load_seq2seq(tmp_path)
    ours = load_seq2seq(tmp_path, language="fra_Latn", source_language="deu_Latn")
    names = ours.text.languages()
    assert plain.encode("ab")[0] == names["eng_Latn"]
    assert ours.encode("ab") == [names["deu_Latn"], *plain.encode("ab")[1:]]
    assert ours.generate(ours.encode("ab"), max_new_tokens=3)[0] == names["fra_Latn"]
    with pytest.raises(UnknownName, match="fra_Latm"):
        load_seq2seq(tmp_path, language="fra_Latm")
    tokenizer(tmp_path)
    with pytest.raises(WorkloadError, match="names no languages"):
        load_seq2seq(tmp_path, language="fra_Latn")


def test_a_source_language_stays_where_the_tokenizer_has_it(tmp_path: Path) -> None:
    """The first mBART puts it behind the end of the text."""
    tiny(tmp_path, "mbart")
    tokenizer(tmp_path, ("en_XX", "ro_RO"), behind=True)
    plain, ours = load_seq2seq(tmp_path), load_seq2seq(tmp_path, source_language="ro_RO")
    names = ours.text.languages()
    assert plain.encode("ab")[-2:] == [2, names["en_XX"]]
    assert ours.encode("ab") == [*plain.encode("ab")[:-1], names["ro_RO"]]


@pytest.mark.slow
def test_a_process_that_has_computed_nothing_answers(tmp_path: Path) -> None:
    """Nobody has loaded the kernels there."""
    tiny(tmp_path, "t5")
    code = "import sys, torch, torchwright as tw; m = tw.load_seq2seq(sys.argv[1], torch.bfloat16, 'w8a8'); "
    code += "print(m.generate([9, 8, 2], max_new_tokens=8))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    ours = load_seq2seq(tmp_path, torch.bfloat16, "w8a8")
    assert done.stdout.strip() == str(ours.generate([9, 8, 2], max_new_tokens=8)), done.stderr


def test_distances_fall_into_transformers_buckets() -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-700, 700)
    for both, buckets, furthest in ((True, 32, 128), (False, 32, 128), (True, 8, 20), (False, 8, 20)):
        wanted = T5Attention._relative_position_bucket(distance, both, buckets, furthest)
        assert torch.equal(buckets_of(distance, buckets, furthest, both_ways=both), wanted)


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    tiny(tmp_path, "bart")
    ours = load_seq2seq(tmp_path)
    for text, says in (([], "empty"), ([VOCABULARY], "out of range"), ([5] * 161, "encoder takes")):
        with pytest.raises(WorkloadError, match=says):
            ours.generate([text])
    with pytest.raises(WorkloadError, match="decoder takes"):
        ours.generate([5, 2], max_new_tokens=161)
    change_json(tmp_path / "generation_config.json", forced_bos_token_id=10_000)
    with pytest.raises(ModelError, match="cannot be used"):
        load_seq2seq(tmp_path)


@pytest.mark.parametrize("quantize", [None, "w8a8"])
def test_a_norm_of_what_is_embedded_leaves_answers_the_same_in_any_company(
    tmp_path: Path, quantize: str | None
) -> None:
    tiny(tmp_path, "mbart")
    ours, texts = load_seq2seq(tmp_path, torch.bfloat16, quantize), [source(90) for _ in range(4)]
    together = ours.generate(texts, max_new_tokens=16, seed=[3] * 4, stop=[], temperature=1.2)
    alone = [ours.generate(text, max_new_tokens=16, seed=[3], stop=[], temperature=1.2) for text in texts]
    assert together == alone


@torch.inference_mode()
def test_a_table_of_positions_in_the_file_is_read(tmp_path: Path) -> None:
    """transformers reads what is there, and the sinusoids are no more than what a new model has."""
    model = tiny(tmp_path / "sines", "pegasus").float()
    for side in (model.model.encoder, model.model.decoder):
        side.embed_positions.weight.copy_(torch.randn_like(side.embed_positions.weight))
    model.save_pretrained(tmp_path / "own")
    model = model.double()
    assert error(model, load_seq2seq(tmp_path / "own")) < 1e-5
    assert error(model, load_seq2seq(tmp_path / "sines")) > 0.05
