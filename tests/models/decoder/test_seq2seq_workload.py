"""Encoder-decoder text models as a workload: calls beside transformers', what an artifact keeps, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from seq2seqs import MODELS, VOCABULARY, tiny, tokenizer

from folders import change_json
from torchwright.core.errors import ArtifactError, UnknownName, WorkloadError
from torchwright.hardware.kernels.cpu import build
from torchwright.models.decoder.seq2seq.calls import NativeAnswers
from torchwright.models.decoder.seq2seq.load import load_seq2seq
from torchwright.models.decoder.seq2seq.workload import Seq2SeqWorkload

NEW = 6
SOURCES = ["a text", "another one, which is longer than that"]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if missing := build.load_fault():
        pytest.skip(f"no kernels: {missing}")


def opened(folder: Path, name: str = "t5", **options: str) -> Seq2SeqWorkload:
    tiny(folder, name)
    tokenizer(folder, languages=("eng_Latn", "fra_Latn") if options else ())
    return Seq2SeqWorkload(folder, batch=2, tokens=20, new_tokens=NEW, **options)


@pytest.mark.plain("bart-scaled")
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_native_answers_are_those_of_transformers_and_are_kept(tmp_path: Path, name: str) -> None:
    workload = opened(tmp_path / "model", name)
    case = workload.cases(torch.float32)[0]
    wanted = workload.original_run(workload.build())(case)
    native = NativeAnswers(load_seq2seq(tmp_path / "model", torch.bfloat16, "encoder=w8a8"))
    exact = NativeAnswers(load_seq2seq(tmp_path / "model"))
    found = native(*case.args)
    assert wanted.shape == found.shape == (2, NEW, wanted.shape[-1])
    assert float((exact(*case.args) - wanted).norm() / wanted.norm()) < 1e-4
    assert float((found - wanted).norm() / wanted.norm()) < 0.15
    native.save(tmp_path)
    again = NativeAnswers.load(tmp_path, tmp_path / "model")
    assert torch.equal(again(*case.args), found)
    assert again.loaded.generate(SOURCES, max_new_tokens=NEW) == native.loaded.generate(
        SOURCES, max_new_tokens=NEW
    )


@pytest.mark.slow
@torch.inference_mode()
def test_targets_are_what_the_original_answers(tmp_path: Path) -> None:
    """As transformers itself generates them, up to where it stops."""
    workload = opened(tmp_path, "bart")
    ids, mask, target = workload.cases(torch.float32)[0].args
    model = workload.build()
    wanted = model.generate(  # pyright: ignore[reportCallIssue]
        ids, attention_mask=mask, max_new_tokens=NEW - 1, num_beams=1, do_sample=False
    )
    for ours, theirs in zip(target.tolist(), wanted.tolist(), strict=True):
        length = workload._length(ours)
        assert ours[:length] == theirs[:length]


@pytest.mark.slow
def test_languages_are_kept(tmp_path: Path) -> None:
    workload = opened(tmp_path / "model", "nllb", language="fra_Latn", source_language="eng_Latn")
    french = workload.cases(torch.float32)[0].args[2][:, 1]
    assert french.tolist() == [261, 261]
    options = {"language": "fra_Latn", "source_language": "eng_Latn"}
    native = NativeAnswers(load_seq2seq(tmp_path / "model", torch.bfloat16, **options))
    native.save(tmp_path)
    again = NativeAnswers.load(tmp_path, tmp_path / "model").loaded
    assert (again.rules, again.source_language) == (native.loaded.rules, "eng_Latn")
    assert Seq2SeqWorkload(tmp_path / "model", **options).describe()["language"] == "fra_Latn"
    with pytest.raises(UnknownName):
        Seq2SeqWorkload(tmp_path / "model", language="xx")


@pytest.mark.parametrize("name", ["decoder.layers.1.memory.kv.packed", "encoder.embedding"])
def test_damaged_tensors_are_refused(tmp_path: Path, name: str) -> None:
    tiny(tmp_path / "model", "bart")
    NativeAnswers(load_seq2seq(tmp_path / "model", torch.bfloat16)).save(tmp_path)
    tensors = load_file(tmp_path / "seq2seq.safetensors")
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "seq2seq.safetensors")
    with pytest.raises(ArtifactError, match="cannot be read"):
        NativeAnswers.load(tmp_path, tmp_path / "model")


@pytest.mark.parametrize("damage", [{"first": VOCABULARY}, {"source_language": 3}, {"kv": "int3"}])
def test_damaged_descriptions_are_refused(tmp_path: Path, damage: dict[str, object]) -> None:
    tiny(tmp_path / "model", "t5")
    NativeAnswers(load_seq2seq(tmp_path / "model", torch.bfloat16)).save(tmp_path)
    change_json(tmp_path / "seq2seq.json", **damage)
    with pytest.raises(ArtifactError, match="cannot be read"):
        NativeAnswers.load(tmp_path, tmp_path / "model")


def test_what_it_refuses(tmp_path: Path) -> None:
    opened(tmp_path, "bart")
    for options in ({"new_tokens": 161}, {"tokens": 161}, {"batch": 0}):
        with pytest.raises(WorkloadError, match="Allowed"):
            Seq2SeqWorkload(tmp_path, **options)
    short = tmp_path / "short.txt"
    short.write_text("One sentence alone is too little.")
    with pytest.raises(WorkloadError, match="too short"):
        Seq2SeqWorkload(tmp_path, eval_text=short)


def test_rates() -> None:
    described = {"batch": 4, "new_tokens": 32}
    assert Seq2SeqWorkload.rates(described, {"answer": 0.5}) == {"tokens_per_s": 256}
