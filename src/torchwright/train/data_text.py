"""From text files to token shards: tokenized once, kept in the run folder, made again when text or tokenizer change."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from torchwright.paths import file_digest
from torchwright.train.data_shards import CHECKSUMS, DataError

SHARD_SUFFIXES = (".npy", ".safetensors")
BLOCK_CHARACTERS = 1 << 20
"""Text that is tokenized at once."""


def expand(patterns: Sequence[str], folder: Path) -> list[Path]:
    """The files that paths and globs name, relative to `folder`, sorted within each; `checksums.json` is none of them.

    Raises `DataError` for a pattern without a file.
    """
    found: list[Path] = []
    for pattern in patterns:
        base = Path(pattern) if Path(pattern).is_absolute() else folder / pattern
        root = Path(base.anchor) if base.is_absolute() else Path()
        matches = sorted(root.glob(str(base.relative_to(root)))) if _is_glob(pattern) else [base]
        matches = [path for path in matches if path.name != CHECKSUMS and not path.is_dir()]
        if not matches or not matches[0].is_file():
            raise DataError(
                f"no file matches '{pattern}'",
                found=f"looked in {base.parent}",
                next="check `data` in the run file; its paths are relative to the file",
            )
        found += matches
    return found


def token_shards(files: Sequence[Path], tokenizer_folder: Path, end: int | None, cache: Path) -> list[Path]:
    """`files` with every text file replaced by its shard in `cache`; `end` follows each text.

    A shard's name is a digest of the text, the tokenizer and `end`, so that a change of one makes another shard.
    """
    tokenizer_file = tokenizer_folder / "tokenizer.json"
    texts = [path for path in files if path.suffix not in SHARD_SUFFIXES]
    if not texts:
        return list(files)
    if not tokenizer_file.is_file():
        raise DataError(
            f"{texts[0]} is text, and there is no tokenizer to read it with",
            found=f"no tokenizer.json in {tokenizer_folder}",
            next="set `model.tokenizer` to a folder with a tokenizer.json, or give token shards",
        )
    cache.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{file_digest(tokenizer_file)} {end}".encode())
    return [
        path if path.suffix in SHARD_SUFFIXES else _tokenized(path, tokenizer_file, end, cache, key.copy())
        for path in files
    ]


def _tokenized(path: Path, tokenizer_file: Path, end: int | None, cache: Path, key: hashlib._Hash) -> Path:
    key.update(file_digest(path).encode())
    shard = cache / f"{path.stem[:40]}-{key.hexdigest()[:16]}.npy"
    if not shard.is_file():
        write_shard(shard, tokenize(path, tokenizer_file, end))
    return shard


def tokenize(path: Path, tokenizer_file: Path, end: int | None) -> np.ndarray:
    """The ids of a text file, without special tokens, followed by `end`; raises `DataError` unless it is UTF-8."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(
            f"the text {path} cannot be read", found=str(error), allowed="text in UTF-8"
        ) from error
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(_blocks(text)), add_special_tokens=False):
        ids += encoding.ids
    if end is not None:
        ids.append(end)
    small = tokenizer.get_vocab_size() <= 1 << 16
    return np.array(ids, dtype=np.uint16 if small else np.uint32)


def write_shard(path: Path, ids: np.ndarray) -> None:
    """Write a token shard and its checksum, each beside its place and renamed."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    with new.open("wb") as file:
        np.save(file, ids, allow_pickle=False)
    digest = file_digest(new)
    new.replace(path)
    sums = path.parent / CHECKSUMS
    known = json.loads(sums.read_text()) if sums.is_file() else {}
    beside = sums.with_name(f".{CHECKSUMS}.{os.getpid()}.new")
    beside.write_text(json.dumps({**known, path.name: digest}, indent=1, sort_keys=True))
    beside.replace(sums)


def _blocks(text: str) -> list[str]:
    """Pieces of about a million characters that end where a line does, so that few words are cut."""
    blocks, start = [], 0
    while start < len(text):
        stop = text.find("\n", start + BLOCK_CHARACTERS) + 1 or len(text)
        blocks.append(text[start:stop])
        start = stop
    return blocks


def _is_glob(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")
