"""Text of a translator or summarizer: sources in, in the language that they are in, answers out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchwright.core.errors import ModelError, WorkloadError, unknown
from torchwright.hub.tokenizer import find_tokenizer
from torchwright.workloads.huggingface import quiet_transformers

LANGUAGE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}|__[a-z]{2,3}__")
"""Tokens that name one: eng_Latn (NLLB), en_XX (mBART), __en__ (M2M100)."""


class SourceTokenizer:
    """The folder's tokenizer.json, or, where it has none (Marian, M2M100), what transformers makes of its files.

    Raises `ModelError` where neither can be read.
    """

    def __init__(self, folder: Path) -> None:
        fast = find_tokenizer(folder)
        self._tokenizer: Any = _Fast(fast) if fast is not None else _Slow(_slow(folder))

    def encode(self, text: str, language: str | None = None) -> list[int]:
        """Token ids with the special tokens that the model expects; `language` is the text's own, where models ask.

        Raises `UnknownName` for a language that the vocabulary does not name.
        """
        ids = list(self._tokenizer.encode(text))
        if language is None:
            return ids
        # Models with language tokens put the source's first, in front of the text and its end; the first mBART behind.
        known, own = set(self.languages().values()), self.language(language)
        if ids[-1:] and ids[-1] in known:
            return [*ids[:-1], own]
        return [own, *(ids[1:] if ids[:1] and ids[0] in known else ids)]

    def plain(self, text: str) -> list[int]:
        """Token ids of a text alone, in the language that is answered in, where the vocabulary differs."""
        return list(self._tokenizer.plain(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def languages(self) -> dict[str, int]:
        """Those that the vocabulary names, and their tokens."""
        return {
            token.strip("_"): number
            for token, number in self._tokenizer.get_vocab().items()
            if LANGUAGE.fullmatch(token)
        }

    def language(self, name: str) -> int:
        """Return a language's token; raises `WorkloadError` for a model without languages, or `UnknownName`."""
        known = self.languages()
        if not known:
            raise WorkloadError("this model's vocabulary names no languages", next="leave the language out")
        if name not in known:
            raise unknown("language", name, sorted(known))
        return known[name]


class _Fast:
    """tokenizers' own, called like transformers'."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.decode = tokenizer, tokenizer.decode

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=True).ids

    def plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)


class _Slow:
    """transformers' own, which may know two vocabularies (Marian)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encode, self.decode, self.get_vocab = tokenizer.encode, tokenizer.decode, tokenizer.get_vocab

    def plain(self, text: str) -> list[int]:
        return self._tokenizer(text_target=text, add_special_tokens=False)["input_ids"]


def _slow(folder: Path) -> Any:
    try:
        with quiet_transformers():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"{folder} has no tokenizer.json, and transformers makes none of its files",
            found=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            next="pip install sentencepiece, or pass token ids instead of text",
        ) from error
