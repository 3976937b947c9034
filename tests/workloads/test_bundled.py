"""The bundled language model: its files are whole, small, loadable, and as good as its card says."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

import torchwright

FOLDER = Path(torchwright.__file__).parent / "workloads" / "bundled"
SCRIPTS = Path(__file__).parents[2] / "scripts"
BYTES_ALLOWED = 25_000_000
FILES = {
    "LICENSE.txt",
    "README.md",
    "calibration.txt",
    "config.json",
    "eval.txt",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def card() -> str:
    return (FOLDER / "README.md").read_text(encoding="utf-8")


def card_figures(card: str, text: str) -> tuple[int, int, int, float, float]:
    """Window, bytes, tokens, perplexity and bits per byte of one row of the card's first table."""
    row = re.search(rf"^\| {re.escape(text)} \| (.+) \|$", card, re.MULTILINE)
    assert row, f"the card has no row for {text}"
    window, size, tokens, perplexity, bits = (cell.replace(",", "") for cell in row[1].split(" | "))
    return int(window), int(size), int(tokens), float(perplexity), float(bits)


@torch.inference_mode()
def perplexity(model: LlamaForCausalLM, ids: list[int], window: int, begin: int) -> float:
    """Perplexity over windows that do not overlap, each led by the begin token."""
    nll = 0.0
    for start in range(0, len(ids), window):
        part_BT = torch.tensor([[begin, *ids[start : start + window]]])
        logp_BTV = model(part_BT[:, :-1]).logits.log_softmax(-1)
        nll -= logp_BTV.gather(-1, part_BT[:, 1:, None]).sum().item()
    return torch.tensor(nll / len(ids)).exp().item()


def test_every_file_is_there_and_nothing_else():
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} == FILES


def test_the_files_are_small_enough_to_ship():
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) <= BYTES_ALLOWED


def test_model_is_a_llama_in_bfloat16_with_tied_embeddings(model):
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_card_states_the_number_of_parameters(model, card):
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in card


@pytest.mark.parametrize("text", ["def f(x):\n    return x + 1\n", "Grüße, 世界!", "", " \t\n\n  "])
def test_tokenizer_round_trips(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_and_config_agree_on_special_tokens(tokenizer, model):
    assert len(tokenizer) == model.config.vocab_size
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(tokenizer, name) == getattr(model.config, name)
        assert getattr(tokenizer, name) == getattr(model.generation_config, name)


def test_a_short_prompt_goes_on_in_english(model, tokenizer):
    inputs = tokenizer("This function returns the", return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    words = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert re.search(r"[a-z]{3,} [a-z]{2,}", words)


def test_card_states_the_perplexity_of_the_weights(model, tokenizer, card):
    name = "eval.txt, first 8192 bytes"
    window, size, tokens, stated, bits = card_figures(card, name)
    text = (FOLDER / "eval.txt").read_bytes()[:8192].decode(errors="ignore")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (len(text.encode()), len(ids)) == (size, tokens)
    measured = perplexity(model, ids, window, tokenizer.bos_token_id)
    assert measured == pytest.approx(stated, rel=0.01)
    measured_bits = torch.tensor(measured).log2().item() * tokens / size
    assert measured_bits == pytest.approx(bits, rel=0.01)


def test_card_counts_the_bytes_of_the_evaluation_text(card):
    assert card_figures(card, "eval.txt")[1] == (FOLDER / "eval.txt").stat().st_size


def test_evaluation_and_calibration_share_no_longer_paragraph():
    eval_parts, calibration_parts = (
        {
            part.strip()
            for part in (FOLDER / name).read_text(encoding="utf-8").split("\n\n")
            if len(part.strip()) >= 80
        }
        for name in ("eval.txt", "calibration.txt")
    )
    assert not eval_parts & calibration_parts


@pytest.fixture
def corpus(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bundled_corpus")


def test_a_files_role_depends_on_its_name_alone(corpus):
    roles = [corpus.Source("docs", f"library/module{i}.rst.txt", "text").role for i in range(2000)]
    again = [corpus.Source("docs", f"library/module{i}.rst.txt", "another").role for i in range(2000)]
    assert roles == again
    for role, share in corpus.HELD_OUT_PER_MILLE["docs"].items():
        assert roles.count(role) / 2000 == pytest.approx(share / 1000, rel=0.5)


def test_shared_paragraphs_leave_the_training_text(corpus):
    shared = "A paragraph of some length that two files have in common. " * 2
    text = f"First.\n\n{shared}\n\nLast."
    assert corpus.without_shared(text, {shared.strip()}) == "First.\n\nLast."


def test_an_excerpt_ends_with_a_whole_paragraph(corpus):
    assert corpus.excerpt("one\n\ntwo\n\nthree", 11) == "one\n\ntwo\n"
    assert corpus.excerpt("a long first paragraph\n\nnext", 3) == "a long first paragraph\n"
