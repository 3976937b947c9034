"""Small tokenizers of every kind, as tokenizer.json has them: a few words, and whatever else as bytes or characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ("Hello", "world", "again", "a", "b")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?"
SPECIAL = ("<unk>", "<s>", "</s>")


def _pieces(marker: str) -> dict[str, int]:
    """Special tokens, bytes, letters, and the words with the marker of a word's beginning."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), marker, *LETTERS]
    for word in WORDS:
        pieces += [(marker + word)[:end] for end in range(2, len(word) + 2)]
    return {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}


def _merges(marker: str) -> list[tuple[str, str]]:
    found = ((word[:end], word[end]) for w in WORDS for word in [marker + w] for end in range(1, len(word)))
    return list(dict.fromkeys(found))


def _sentencepiece() -> Tokenizer:
    """Llama 2's: the marker is put before the text, unknown characters are bytes, the decoder strips one space."""
    model = models.BPE(
        vocab=_pieces("▁"), merges=_merges("▁"), byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def _without_prefix() -> Tokenizer:
    """Gemma's: spaces are markers, and nothing is put before the text."""
    made = Tokenizer(
        models.BPE(vocab=_pieces("▁"), merges=_merges("▁"), byte_fallback=True, unk_token="<unk>")
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def _metaspace(scheme: str) -> Tokenizer:
    """T5's and XLM-R's: pieces with scores, split at spaces."""
    model = models.Unigram([(piece, -len(piece) / 9) for piece in _pieces("▁")], 0, byte_fallback=True)
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return made


def _byte_level() -> Tokenizer:
    """GPT-2's: each byte is a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [("Ġ" + word)[:end] for word in WORDS for end in range(2, len(word) + 2)]
    pieces = dict.fromkeys([*SPECIAL, *alphabet, *words])
    made = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=_merges("Ġ"), unk_token=None)
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _word_piece() -> Tokenizer:
    """BERT's: words, and ends of words."""
    pieces = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS, "😀", "é"]
    made = Tokenizer(models.WordPiece(vocab={piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    return made


KINDS = {
    "sentencepiece": _sentencepiece,
    "without prefix": _without_prefix,
    "metaspace always": lambda: _metaspace("always"),
    "metaspace never": lambda: _metaspace("never"),
    "byte level": _byte_level,
    "word piece": _word_piece,
}


def save(kind: str, folder: Path, **settings: Any) -> Tokenizer:
    """Write a tokenizer into a folder, with what tokenizer_config.json says beside it."""
    made = KINDS[kind]()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made
