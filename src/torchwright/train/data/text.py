"""From files of text and of rows to token shards: tokenized once, kept in the run folder."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import stat
from collections.abc import Generator, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from torchwright.core.paths import file_digest
from torchwright.core.process.files import replacing
from torchwright.core.regular_file import check_regular
from torchwright.core.rows import READERS, dataset_files, is_dataset, is_rows
from torchwright.core.system import try_lock
from torchwright.hub.chat_template import ChatTemplate
from torchwright.hub.folder import find_object
from torchwright.hub.tokenizer import TOKENIZER, open_tokenizer
from torchwright.train.data.documents import (
    ChatEncoder,
    Document,
    FileReport,
    RowsAs,
    check_broken,
    read_documents,
    read_report,
    write_documents,
)
from torchwright.train.data.hold_out import drawn_last
from torchwright.train.data.shards import BARE, CHECKSUMS, DataError, read_checksums

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHARD_SUFFIXES = (".npy", ".safetensors", BARE)
BLOCK_CHARACTERS = 1 << 18
"""Text that is tokenized by one thread at a time; a file is read so many at once as there are processors."""
LOCK = ".lock"
RECORD_BYTES = 1 << 28
"""Text after which the checksums of its shards are written down: after a kill so much is tokenized again."""


def expand(patterns: Sequence[str], folder: Path) -> list[Path]:
    """Return the files that paths and globs name, relative to `folder`, sorted within each, without `checksums.json`.

    Raises `DataError` for a pattern without a file, for a file that is named twice, and for a FIFO or a device.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        base = Path(pattern) if Path(pattern).is_absolute() else folder / pattern
        root = Path(base.anchor) if base.is_absolute() else Path()
        # Browsers name files `part [1].jsonl`: the name of an existing file is not a pattern.
        glob = _is_glob(pattern) and not base.exists()
        matches = sorted(root.glob(str(base.relative_to(root)))) if glob else [base]
        matches = [
            path for path in matches if path.name != CHECKSUMS and (is_dataset(path) or not path.is_dir())
        ]
        if not matches or not matches[0].exists():
            raise DataError(
                f"no file matches '{pattern}'",
                found=f"looked in {base.parent}",
                next="check `data` in the run file; its paths are relative to the file",
            )
        twice = next((path for path in matches if path in found), None)
        if twice:
            raise DataError(
                f"'{pattern}' names {twice} again, which would be read twice in each epoch",
                next="name each file once in `data`",
            )
        for path in matches:
            _check_readable(path)
        found |= dict.fromkeys(matches)
    return list(found)


def _check_readable(path: Path) -> None:
    """Raise `DataError` for a FIFO or a device, which would be waited for without end."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISDIR(mode):  # a folder of a dataset
            check_regular(mode)
    except OSError as error:
        raise DataError(f"{path} cannot be read", found=str(error)) from error


def token_shards(
    files: Sequence[Path],
    text: Sequence[str],
    tokenizer_folder: Path,
    end: int | None,
    cache: Path,
    how: RowsAs | None = None,
) -> list[Path]:
    """Replace every file of text or rows by its shard in `cache`, and return all; `end` follows each text.

    `text` are patterns of the names of files that hold plain text, `how` says how rows are read. A shard's name is a
    digest of the file, the tokenizer, `end` and `how`, so that a change of one makes another shard. Raises `DataError`
    for a file that is neither text nor rows nor a shard, and for what `read_documents` refuses.
    """
    kinds = {path: kind_of(path, text) for path in files}
    made = [path for path, kind in kinds.items() if kind != "ids"]
    if not made:
        return list(files)
    tokenizer_file = tokenizer_folder / TOKENIZER
    if not tokenizer_file.is_file():
        raise DataError(
            f"{made[0]} is text, and there is no tokenizer to read it with",
            found=f"no {TOKENIZER} in {tokenizer_folder}",
            next="set `model.tokenizer` to a folder with a tokenizer.json, or give token shards",
        )
    key = hashlib.sha256(f"{file_digest(tokenizer_file)} {end}".encode())
    shards = {path: cache / _shard_name(path, key.copy()) for path in made if kinds[path] == "text"}
    rows = [path for path in made if kinds[path] == "rows"]
    maker = Maker(tokenizer_folder, end, how or RowsAs())
    if rows:
        key.update(maker.digest().encode())
        shards |= {path: cache / _rows_name(path, key.copy()) for path in rows}
    _tokenize_all(shards, maker, cache)
    for path in rows:
        check_broken(path, read_report(shards[path]), maker.how)
    return [shards.get(path, path) for path in files]


def kind_of(path: Path, text: Sequence[str]) -> Literal["text", "rows", "ids"]:
    """Return what a file holds, by its name. Raises `DataError` for any other name."""
    if any(fnmatchcase(path.name, pattern) for pattern in text):
        return "text"
    if is_rows(path):
        return "rows"
    if path.suffix in SHARD_SUFFIXES:
        return "ids"
    raise DataError(
        f"{path} is neither text nor rows nor a token shard by its name",
        found=f"no reader for '{path.suffix or path.name}'",
        allowed=f"{', '.join(text)} (plain text, all of it trained on), *{', *'.join(READERS)}, folders that "
        f"`datasets` saved (rows), *{', *'.join(SHARD_SUFFIXES)} (token ids)",
        next=f"write its texts to *.txt, its rows to *.jsonl or its ids to *.npy; if it is plain text, add "
        f"'*{path.suffix}' to data.text"
        if path.suffix
        else f"if it is plain text, add '{path.name}' to data.text",
    )


def _shard_name(path: Path, key: hashlib._Hash) -> str:
    key.update(file_digest(path).encode())
    return f"{path.stem[:40]}-{key.hexdigest()[:16]}.npy"


def _rows_name(path: Path, key: hashlib._Hash) -> str:
    for part in dataset_files(path) if path.is_dir() else [path]:
        key.update(file_digest(part).encode())
    return f"{path.stem[:40]}-{key.hexdigest()[:16]}.safetensors"


class Maker:
    """A maker of files' shards, by one tokenizer."""

    def __init__(self, folder: Path, end: int | None, how: RowsAs) -> None:
        self.tokenizer, self.end, self.how = open_tokenizer(folder), end, how
        self.encoder = ChatEncoder(self.tokenizer, ChatTemplate(folder), end, _ends(folder))
        self.kind = np.dtype(np.uint16 if self.tokenizer.get_vocab_size() <= 1 << 16 else np.uint32)

    def digest(self) -> str:
        """Return a digest of what decides the tokens of rows, without the tokenizer."""
        return f"{self.how.digest()} {self.encoder.digest()}"

    def make(self, path: Path, shard: Path) -> str:
        """Write a file's shard under a temporary name, and rename it; return its SHA-256."""
        if shard.suffix == ".npy":
            return write_shard(shard, tokenize(path, self.tokenizer, self.end), self.kind)

        def documents(report: FileReport) -> Iterator[Document]:
            rows = (found for _, found in read_documents(path, self.encoder, self.how, report))
            if self.how.draw is None:
                for found in rows:
                    yield from found
                return
            drawn: dict[str, Any] = {"rows": 0, "documents": []}
            for found, last in drawn_last(rows, self.how.draw):
                drawn["rows"] += 1
                drawn["documents"] += [len(found)] if last else []
                yield from found
            report.drawn = drawn

        with replacing(shard) as new:
            write_documents(new, self.kind, documents)
            return file_digest(new)


def _ends(folder: Path) -> list[int]:
    """Return the tokens at which a folder's model stops, as its configuration files name them."""
    found: list[Any] = []
    for name in ("config.json", "generation_config.json"):
        told = find_object(folder / name).get("eos_token_id")
        found += told if isinstance(told, list) else [told]
    return [token for token in dict.fromkeys(found) if isinstance(token, int)]


def _tokenize_all(shards: dict[Path, Path], maker: Maker, cache: Path) -> None:
    """Make the shards (text → shard) that are not there yet, each with its checksum."""
    cache.mkdir(parents=True, exist_ok=True)
    known = read_checksums(cache)
    missing = {
        path: shard for path, shard in shards.items() if shard.name not in known or not shard.is_file()
    }
    if not missing:
        return
    with only_writer(cache):
        since = 0
        for path, shard in missing.items():
            known[shard.name] = maker.make(path, shard)
            since += path.stat().st_size
            if since >= RECORD_BYTES:
                write_checksums(cache, known)
                since = 0
        write_checksums(cache, known)


@contextlib.contextmanager
def only_writer(cache: Path) -> Generator[None]:
    """Hold a folder of shards alone, and remove half-written files of processes that were killed in it.

    Raises `DataError` while another process writes there.
    """
    lock = cache / LOCK
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if try_lock(handle) is False:
            raise DataError(
                f"another process tokenizes data into {cache}",
                next="wait for it or stop it, or choose another folder for the run",
            )
        for left in cache.glob(".*"):
            if left != lock and left.is_file():
                left.unlink(missing_ok=True)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows removes no open file
                lock.unlink()
    finally:
        os.close(handle)


def tokenize(
    path: Path, tokenizer: Tokenizer, end: int | None, block_characters: int = BLOCK_CHARACTERS
) -> Iterator[np.ndarray]:
    """Yield the ids of a text file, a block at a time, without special tokens, followed by `end`.

    Raises `DataError` unless it is UTF-8.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:  # Windows editors begin files with a mark
            # Up to the end of a line, so that few words are cut.
            blocks = iter(lambda: file.read(block_characters) + file.readline(block_characters), "")
            while some := list(itertools.islice(blocks, os.cpu_count())):
                for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
                    yield np.array(encoding.ids, dtype=np.int64)
    except (UnicodeDecodeError, OSError) as error:
        raise DataError(
            f"the text {path} cannot be read", found=str(error), allowed="text in UTF-8"
        ) from error
    if end is not None:
        yield np.array([end])


def write_shard(path: Path, pieces: Iterable[np.ndarray], kind: np.dtype) -> str:
    """Write a token shard piece by piece under a temporary name, and rename it; return its SHA-256."""
    with replacing(path) as new:
        with new.open("wb") as file:
            count = 0
            _write_header(file, kind, count)
            for piece in pieces:
                file.write(piece.astype(kind).tobytes())
                count += len(piece)
            file.seek(0)
            _write_header(file, kind, count)
        return file_digest(new)


def write_checksums(folder: Path, known: dict[str, str]) -> None:
    """Write the folder's `checksums.json` under a temporary name, and rename it."""
    with replacing(folder / CHECKSUMS) as beside:
        beside.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")


def _write_header(file: BinaryIO, kind: np.dtype, count: int) -> None:
    """Write the header of a NumPy file: as long for any `count`, since NumPy leaves room for a longer first axis."""
    described = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, described)


def _is_glob(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")
