"""GGUF files: logits equal to those of the weights that their blocks stand for, tokenizers, and wrong files."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import gguf_files as files
import pytest
import quantized as made
import torch

from torchwright.core.errors import ModelError
from torchwright.hardware.kernels import ops
from torchwright.hub.gguf.folder import opened
from torchwright.hub.gguf.header import read_gguf
from torchwright.hub.gguf.tokenizer import SPLITS
from torchwright.models.decoder import load_decoder

BUNDLED = Path(__file__).parents[2] / "src/torchwright/workloads/bundled"
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F32")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "cache"))


def letters(**more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary of 96 tokens: bytes of some characters, letters, words."""
    pieces = [("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0)]
    pieces += [(f"<0x{byte:02X}>", 6, 0.0) for byte in (0x0A, 0xC3, 0xA9)]
    words = [
        "▁",
        *"helowrd",
        "▁h",
        "el",
        "lo",
        "ell",
        "▁hell",
        "▁hello",
        "or",
        "wor",
        "▁wor",
        "ld",
        "▁world",
        "he",
    ]
    pieces += [(word, 1, -float(index)) for index, word in enumerate(words)]
    pieces += [("<|tool|>", 4, 0.0)]
    pieces += [(f"[PAD{index}]", 5, 0.0) for index in range(96 - len(pieces))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, _, score in pieces],
        "tokenizer.ggml.token_type": [files.U32(kind) for _, kind, _ in pieces],
        "tokenizer.ggml.bos_token_id": files.U32(1),
        "tokenizer.ggml.eos_token_id": files.U32(2),
        "tokenizer.ggml.unknown_token_id": files.U32(0),
        **more,
    }


EACH = [(kind, list(made.FAMILIES)[at % len(made.FAMILIES)]) for at, kind in enumerate(TYPES)]
ALL = [
    pytest.param(kind, family, marks=() if (kind, family) in EACH else pytest.mark.sweep)
    for kind in TYPES
    for family in made.FAMILIES
]


@pytest.mark.parametrize(("kind", "family"), ALL)
def test_logits_are_those_of_the_weights_that_the_blocks_stand_for(
    kind: str, family: str, tmp_path: Path
) -> None:
    model = made.build(family, num_hidden_layers=1, intermediate_size=256)
    path = files.model_file(tmp_path / "model.gguf", model, lambda name: kind, letters())
    ids_BT = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    loaded = load_decoder(path)
    torch.testing.assert_close(loaded.logits(ids_BT), made.logits(model, ids_BT), rtol=0, atol=1e-4)
    became = "dequantized to" if kind.startswith("Q") else "read as"
    assert loaded.stored == f"GGUF {kind}: {became} float32"


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_integers_that_are_kept_give_the_bits_of_dequantized_ones(kind: str, tmp_path: Path) -> None:
    if ops.fault("cpu"):
        pytest.skip(f"no kernels: {ops.fault('cpu')}")
    model = made.build("llama", num_hidden_layers=1, intermediate_size=256)
    path = files.model_file(tmp_path / "model.gguf", model, lambda name: kind, letters())
    ids_BT = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    kept = load_decoder(path, torch.bfloat16)
    assert kept.stored == f"GGUF {kind}: repacked as {'w4bf16' if kind.startswith('Q4') else 'w8bf16'}"
    wide = load_decoder(path, torch.bfloat16, quantize="none")
    assert torch.equal(kept.logits(ids_BT), wide.logits(ids_BT))


def tiny_file(tmp_path: Path, **metadata: Any) -> Path:
    model = made.build("llama", num_hidden_layers=1, hidden_size=64, intermediate_size=64, head_dim=16)
    return files.model_file(tmp_path / "tiny.gguf", model, lambda name: "F16", letters(), **metadata)


def test_scaled_rotary_embeddings(tmp_path: Path) -> None:
    """Llama 3.1's come as a tensor of factors; linear and yarn as keys."""
    kinds: dict[str, dict[str, Any]] = {
        "llama3": {
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "linear": {"factor": 2.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    }
    ids_BT = torch.randint(3, 96, (1, 60), generator=torch.Generator().manual_seed(1))
    for kind, scaling in kinds.items():
        rope = {"rope_type": kind, "rope_theta": 10_000.0, **scaling}
        model = made.build("llama", num_hidden_layers=1, rope_parameters=rope)
        more: dict[str, Any] = {}
        if kind == "llama3":
            plain = 10_000.0 ** -(torch.arange(0, 64, 2) / 64)
            model.register_buffer("rope_freqs", plain / model.model.rotary_emb.inv_freq)
        else:
            more = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": scaling["factor"]}
            if kind == "yarn":
                more["llama.rope.scaling.original_context_length"] = files.U32(32)
        path = files.model_file(tmp_path / f"{kind}.gguf", model, lambda name: "F32", letters(), **more)
        torch.testing.assert_close(
            load_decoder(path).logits(ids_BT), made.logits(model, ids_BT), rtol=0, atol=2e-4
        )


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.rope.scale_linear": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.type": "linear",
            "llama.rope.scale_linear": 2.0,
        },
    ],
)
def test_linear_scaling_has_an_old_key_and_needs_no_type(keys: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    model = made.build("llama", num_hidden_layers=1, rope_parameters=rope)
    path = files.model_file(tmp_path / "linear.gguf", model, lambda name: "F32", letters(), **keys)
    ids_BT = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        load_decoder(path).logits(ids_BT), made.logits(model, ids_BT), rtol=0, atol=2e-4
    )


def test_a_scaling_that_is_switched_off_is_off(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    model = made.build("llama", num_hidden_layers=1)
    path = files.model_file(tmp_path / "none.gguf", model, lambda name: "F32", letters(), **keys)
    ids_BT = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        load_decoder(path).logits(ids_BT), made.logits(model, ids_BT), rtol=0, atol=2e-4
    )


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece, as llama.cpp says it: the neighbours with the best score become one, the first of equals."""
    parts = list(text)
    while True:
        pairs = [
            (scores[a + b], -at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores
        ]
        if not pairs:
            return parts
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    text = load_decoder(path).text
    vocabulary = letters()
    tokens, types = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.token_type"]
    scores = {
        token: score
        for token, kind, score in zip(tokens, types, vocabulary["tokenizer.ggml.scores"], strict=True)
        if kind == 1
    }
    for said in ("hello world", " held  lower", "well", "h"):
        pieces = merged_by_score("▁" + said.replace(" ", "▁"), scores)
        assert text.encode(said) == [1, *(tokens.index(piece) for piece in pieces)], said
        assert text.decode(text.encode(said)) == said
    assert text.encode("hé\n") == [1, *map(tokens.index, ("▁h", "<0xC3>", "<0xA9>", "<0x0A>"))]
    assert text.decode(text.encode("hé\n")) == "hé\n"
    assert tokens.index("<|tool|>") in text.encode("hello<|tool|>")
    assert text.encode("hello</s>")[-1] == 2
    assert "</s>" not in text.decode([*text.encode("hello"), 2])


def test_a_byte_level_tokenizer(tmp_path: Path) -> None:
    """The bundled one, through a GGUF file and back."""
    from tokenizers import Tokenizer

    data = json.loads((BUNDLED / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    special = {token["content"] for token in data["added_tokens"]}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    tokens = sorted(vocabulary, key=vocabulary.get)
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": files.U32(0),
        "tokenizer.ggml.eos_token_id": files.U32(1),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    model = made.build("qwen2", num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=4096)
    folder = opened(files.model_file(tmp_path / "bpe.gguf", model, lambda name: "F16", found))
    ours, theirs = (Tokenizer.from_file(str(at / "tokenizer.json")) for at in (folder, BUNDLED))
    for said in ("Hello, it's 1234 words\n\n  and\tmore", "naïve 漢字 🙂 <|begin|>", ""):
        assert ours.encode(said).ids == theirs.encode(said).ids, said
        assert ours.decode(ours.encode(said).ids) == theirs.decode(theirs.encode(said).ids)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}"


def test_splits_are_those_of_transformers() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    for name, split in mapping.GGUF_PRE_TOKENIZER_SPLITS.items():
        assert SPLITS.get(name, split) == split, name


CUTS = {
    "gpt-4o": ["Hello", "World", " isn't", " ", "123", "45", " (", "a", "/b", ");\n\n", " ", " c"],
    "tekken": ["Hello", "World", " isn", "'t", " ", *"12345", " (", "a", "/b", ");\n\n", " ", " c"],
    "seed-coder": ["HelloWorld", " isn", "'t", " ", *"12345", " (", "a", "/b", ");", "\n\n", " ", " c"],
    "glm4": ["HelloWorld", " isn", "'t", " ", "123", "45", " (", "a", "/b", ");\n\n", " ", " c"],
    "olmo": ["HelloWorld", " isn", "'t", " 12345", " (", "a", "/", "b", ");", "\n\n ", " c"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_cut_into_words(pre: str) -> None:
    from tokenizers import Regex, pre_tokenizers

    cut = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")
    words = [word for word, _ in cut.pre_tokenize_str("HelloWorld isn't 12345 (a/b);\n\n  c")]
    assert words == CUTS[pre]


def test_marks_belong_to_a_word_of_qwen3_5() -> None:
    from tokenizers import Regex, pre_tokenizers

    cut = pre_tokenizers.Split(Regex(SPLITS["qwen35"]), "isolated")
    words = [word for word, _ in cut.pre_tokenize_str("I'm 12 \u0e44\u0e21\u0e48!")]
    assert words == ["I", "'m", " ", "1", "2", " \u0e44\u0e21\u0e48", "!"]


def test_a_file_is_opened_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    folder = opened(path)
    assert opened(path) == folder
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == {"quant_method": "gguf"}
    path.write_bytes(path.read_bytes() + bytes(32))
    assert opened(path) != folder
    assert len(list(folder.parent.iterdir())) == 2
    assert opened(tmp_path) == tmp_path


HUGE = 2**60
WRONG: dict[str, tuple[bytes, str]] = {
    "no version": (b"GGUF", "ends in 'version'"),
    "version 1": (b"GGUF" + struct.pack("<I", 1), "of version 1"),
    "other byte order": (b"GGUF" + struct.pack(">I", 3), "of version 50331648"),
    "tensors": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "1,152,921,504,606,846,976 tensors"),
    "keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "1,152,921,504,606,846,976 keys"),
    "a key's length": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, HUGE) + bytes(64), "a key is 1,152"),
    "a text's length": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + files.text("k") + struct.pack("<IQ", 8, HUGE) + bytes(64),
        "k is 1,152,921,504,606,846,976 bytes long",
    ),
    "a list's length": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + files.text("k")
        + struct.pack("<IIQ", 9, 4, HUGE)
        + bytes(64),
        "1,152,921,504,606,846,976 values of 'k'",
    ),
    "texts in a list": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + files.text("k")
        + struct.pack("<IIQ", 9, 8, HUGE)
        + bytes(64),
        "1,152,921,504,606,846,976 texts of 'k'",
    ),
    "lists in lists": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + files.text("k") + struct.pack("<IIQ", 9, 9, 1) * 1000,
        "a list of values of type 9",
    ),
    "an unknown kind": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + files.text("k") + struct.pack("<I", 99) + bytes(64),
        "of type 99",
    ),
    "a key twice": (
        files.header({"a": True}, []).replace(struct.pack("<QQ", 0, 1), struct.pack("<QQ", 0, 2))
        + files.header({"a": True}, [])[24:],
        "the key 'a' twice",
    ),
    "alignment 0": (files.header({"general.alignment": files.U32(0)}, []), "alignment is 0"),
    "alignment 12": (files.header({"general.alignment": files.U32(12)}, []), "alignment is 12"),
    "extents": (files.header({}, [files.info("t", (1,) * 5, 0, 0)]), "'t' has 5 extents"),
    "extent 0": (files.header({}, [files.info("t", (0,), 0, 0)]), "the extents"),
    "a huge extent": (files.header({}, [files.info("t", (HUGE,), 0, 0)]), "the extents"),
    "a huge product": (files.header({}, [files.info("t", (2**40,) * 3, 0, 0)]), "ends at byte"),
    "an unread type": (files.header({}, [files.info("t", (256,), 10, 0)]), "is Q2_K.*Q4_K"),
    "half a block": (files.header({}, [files.info("t", (48,), 2, 0)]), "rows of 48"),
    "an offset beyond": (files.header({}, [files.info("t", (32,), 0, HUGE)]), "ends at byte"),
    "an offset between": (files.header({}, [files.info("t", (32,), 0, 5)]), "begins at 5"),
    "a tensor twice": (
        files.header({}, [files.info("t", (1,), 0, 0)] * 2) + bytes(64),
        "the tensor 't' twice",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_refused_in_words(case: str, tmp_path: Path) -> None:
    content, message = WRONG[case]
    path = tmp_path / "wrong.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tiny_file(tmp_path)
    whole = path.read_bytes()
    for size in [*range(4, 4000, 97), *range(4000, len(whole) - 1, len(whole) // 20)]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            read_gguf(path)


METADATA: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({"general.architecture": "mamba"}, "'general.architecture'.*'mamba'.*llama, qwen2, qwen3"),
    "split": ({"split.count": files.U32(3)}, "'split.count'"),
    "heads": ({"llama.attention.head_count": files.U32(0)}, "'llama.attention.head_count'"),
    "layers": ({"llama.block_count": files.U32(7)}, "lack the tensor 'model.layers.1"),
    "experts": ({"llama.expert_count": files.U32(8)}, "no 'llama.expert_used_count'"),
    "value heads": ({"llama.attention.value_length": files.U32(99)}, "'llama.attention.value_length'"),
    "rope": ({"llama.rope.scaling.type": "spiral"}, "'llama.rope.scaling.type'.*none, linear or yarn"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "'llama.rope.scaling.factor'"),
    "window": ({"llama.attention.sliding_window": files.U32(9)}, "'llama.attention.sliding_window'"),
    "scale": ({"llama.attention.scale": 0.3}, "'llama.attention.scale'.*off"),
    "causal": ({"llama.attention.causal": False}, "'llama.attention.causal'"),
    "tokenizer": ({"tokenizer.ggml.model": "bert"}, "'tokenizer.ggml.model'.*gpt2 or llama"),
    "splits": (
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd"},
        "'tokenizer.ggml.pre'.*llama-bpe",
    ),
    "scores": ({"tokenizer.ggml.scores": [1.0]}, "a list of 96 numbers"),
    "tokens": ({"tokenizer.ggml.tokens": files.U32(5)}, "a list of texts"),
    "a token beyond": ({"tokenizer.ggml.bos_token_id": files.U32(96)}, "one of the 96 tokens"),
}


@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_cannot_be_used_is_named(case: str, tmp_path: Path) -> None:
    changed, message = METADATA[case]
    with pytest.raises(ModelError, match=message):
        load_decoder(tiny_file(tmp_path, **changed))
    assert not list((tmp_path / "cache").glob("gguf/tmp*"))
