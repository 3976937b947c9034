"""Token shards: one-dimensional files of token ids, memory-mapped as they are read.

A shard is a NumPy file (`*.npy`) or a safetensors file with one tensor, of unsigned 16 or signed or unsigned 32 or 64
bits. `*.bin` files hold bare ids of a type that the run names. A safetensors file of documents has their `tokens`,
whether each is `trained` on (8 bits), and where documents begin (`starts`). `checksums.json` in the folder of shards
maps file names to SHA-256 digests, which are checked.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tokenize import TokenError

import numpy as np

from torchwright.core.errors import DataError as DataError
from torchwright.core.json_file import LARGEST, decode_json
from torchwright.core.paths import file_digest
from torchwright.core.regular_file import read_regular
from torchwright.hub.tensor_header import Stored, read_header

CHECKSUMS = "checksums.json"
SAFETENSORS_TYPES = {"U16": np.uint16, "I32": np.int32, "U32": np.uint32, "I64": np.int64, "U64": np.uint64}
TYPE_OF_PART = {"trained": {"U8": np.uint8}, "starts": {"I64": np.int64}}
TYPES = tuple(np.dtype(kind) for kind in SAFETENSORS_TYPES.values())
LONGEST_HEADER = 1 << 20
DOCUMENTS = ("tokens", "trained", "starts")
"""The tensors of a shard of documents."""
BARE = ".bin"
MAPPED = 128
"""Shards that are mapped at a time; each holds one of the files that a process may have open, often 1,024."""


class Shards:
    """Token ids of several files."""

    def __init__(
        self,
        paths: Sequence[Path],
        vocabulary: int,
        bare: str | None = None,
        *,
        places: Sequence[range] | None = None,
    ) -> None:
        """`bare` is the type of the ids of `*.bin` files; `places` are those that are read of each file, or all.

        Raises `DataError`, naming the file, for one that is missing, damaged or of another type.
        """
        self.paths, self.vocabulary, self._bare = tuple(paths), vocabulary, bare
        self._mapped = functools.lru_cache(MAPPED)(functools.partial(open_shard, bare=bare))
        self._trained = functools.lru_cache(MAPPED)(functools.partial(open_part, name="trained"))
        self._places = list(places or (range(len(self._mapped(path))) for path in self.paths))
        self.sizes = [len(held) for held in self._places]
        self.tokens = sum(self.sizes)

    def part(self, places: Sequence[range]) -> Shards:
        """Return these places of each shard, without the shards that have no such places.

        They begin and end where documents do, in shards that say where; in a stream of text they may also end within
        one.
        """
        kept = [
            (path, range(own.start + held.start, own.start + held.stop))
            for path, own, held in zip(self.paths, self._places, places, strict=True)
            if held
        ]
        return Shards(
            [path for path, _ in kept], self.vocabulary, self._bare, places=[held for _, held in kept]
        )

    @classmethod
    def joined(cls, parts: Sequence[Shards]) -> Shards:
        """Return the shards of several as one."""
        return cls(
            [path for part in parts for path in part.paths],
            parts[0].vocabulary,
            parts[0]._bare,
            places=[held for part in parts for held in part._places],
        )

    def read(self, shard: int, start: int, length: int) -> np.ndarray:
        """`length` ids from place `start` of a shard, int64; raises `DataError` for an id that the model lacks."""
        held = self._places[shard][start : start + length]
        ids = self._mapped(self.paths[shard])[held.start : held.stop].astype(np.int64)
        if len(ids) and (int(ids.max()) >= self.vocabulary or int(ids.min()) < 0):
            wrong = int(np.flatnonzero((ids >= self.vocabulary) | (ids < 0))[0])
            raise DataError(
                f"the token shard {self.paths[shard]} holds an id that the model does not have",
                found=f"{ids[wrong]} at place {start + wrong:,}",
                allowed=f"0 to {self.vocabulary - 1}",
                next="make the shard again with this model's tokenizer; it may be damaged",
            )
        return ids

    def trained(self, shard: int, start: int, length: int) -> np.ndarray:
        """Which of the ids that `read` gives are trained on, bool: of a shard that does not say, all."""
        mask, held = self._trained(self.paths[shard]), self._places[shard][start : start + length]
        return np.ones(len(held), bool) if mask is None else mask[held.start : held.stop] != 0

    def starts(self, shard: int) -> np.ndarray | None:
        """Return where the documents of a shard begin; None if it does not say."""
        starts, trained = (open_part(self.paths[shard], name) for name in ("starts", "trained"))
        if starts is None or trained is None:
            return None
        size, held = len(trained), self._places[shard]
        follow = np.diff(starts, prepend=-1, append=size) > 0
        if not len(starts) or starts[0] or not follow.all() or size != len(self._mapped(self.paths[shard])):
            raise DataError(
                f"the token shard {self.paths[shard]} is damaged",
                found="its documents do not follow each other to its end",
                next="make it again",
            )
        inside = starts[(starts >= held.start) & (starts < held.stop)]
        return inside - held.start

    def digest(self) -> str:
        """Return a digest of the files' names and lengths in their order, and of where their documents begin."""
        listed = json.dumps([[path.name, size] for path, size in zip(self.paths, self.sizes, strict=True)])
        told = hashlib.sha256(listed.encode())
        for shard in range(len(self.paths)):
            starts = self.starts(shard)
            told.update(b"" if starts is None else starts.tobytes())
        return told.hexdigest()[:16]

    def answers(self, shard: int) -> bool:
        """Check whether a shard's documents are prompts with answers, which stay whole and apart.

        The rows that it was made of say so by their form: an answer behind a prompt of one token leaves no other trace.
        """
        starts, size = self.starts(shard), self.sizes[shard]
        if starts is None:
            return False
        told = read_metadata(self.paths[shard]).get("report")
        if told is not None and json.loads(told)["form"] not in (None, "text"):
            return True
        return int(self.trained(shard, 0, size).sum()) < size - len(starts)


def open_shard(path: Path, bare: str | None = None) -> np.ndarray:
    """The ids of one file, mapped and one-dimensional, of a `*.bin` file of type `bare`. Nothing pickled is read."""
    if not path.is_file():
        raise DataError(f"the token shard {path} is not there", next="check `data` in the run file")
    try:
        array = _open_bare(path, bare) if path.suffix == BARE else _open(path)
    except (OSError, EOFError, ValueError, KeyError, TypeError, TokenError) as error:
        raise DataError(
            f"the token shard {path} cannot be read",
            found=str(error),
            allowed="*.npy without objects, *.safetensors with one tensor or of documents, *.bin of data.ids",
            next="make or fetch the shard again; it may have been cut short",
        ) from error
    if array.ndim != 1 or array.dtype not in TYPES or not len(array):
        raise DataError(
            f"the token shard {path} is no list of token ids",
            found=f"{array.dtype} {list(array.shape)}",
            allowed=f"one dimension of {', '.join(str(kind) for kind in TYPES)}",
        )
    return array


def open_part(path: Path, name: str) -> np.ndarray | None:
    """Map a tensor of a shard of documents; return None for a shard of another kind."""
    if path.suffix != ".safetensors" or {*read_header(path, LONGEST_HEADER)} != {*DOCUMENTS}:
        return None
    return _map_tensor(path, read_header(path, LONGEST_HEADER)[name], TYPE_OF_PART[name])


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in the header of a shard in safetensors; empty for other files."""
    if path.suffix != ".safetensors":
        return {}
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return file.metadata() or {}


def verify_shards(paths: Sequence[Path]) -> int:
    """Compare the shards with the `checksums.json` of their folders; return how many it names.

    Raises `DataError` for the first shard whose bytes are not those that were written.
    """
    known = {folder: read_checksums(folder) for folder in {path.parent for path in paths}}
    named = [path for path in paths if path.name in known[path.parent]]
    for path in named:
        if file_digest(path) != known[path.parent][path.name]:
            raise DataError(
                f"the token shard {path} is damaged",
                found=f"its SHA-256 is not the one in {path.parent / CHECKSUMS}",
                next="make or fetch the shard again",
            )
    return len(named)


def read_checksums(folder: Path) -> dict[str, str]:
    """Return file name → SHA-256 of the folder's `checksums.json`; empty if it is missing."""
    path = folder / CHECKSUMS
    if not path.is_file():
        return {}
    try:
        return {str(name): str(digest) for name, digest in decode_json(read_regular(path, LARGEST)).items()}
    except (ValueError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be read", found=str(error), next="remove it or make it again"
        ) from error


def _open(path: Path) -> np.ndarray:
    if path.suffix != ".safetensors":
        return np.load(path, mmap_mode="r", allow_pickle=False)
    header = read_header(path, LONGEST_HEADER)
    if {*header} != {*DOCUMENTS} and len(header) != 1:
        raise ValueError(f"{len(header)} tensors")
    return _map_tensor(path, header.get("tokens") or next(iter(header.values())), SAFETENSORS_TYPES)


def _open_bare(path: Path, kind: str | None) -> np.ndarray:
    if kind is None:
        raise ValueError("bare ids of a type that the file does not say: set data.ids to uint16 or uint32")
    size = np.dtype(kind).itemsize
    if path.stat().st_size % size:
        raise ValueError(f"{path.stat().st_size:,} bytes are no whole number of {kind}")
    return np.memmap(path, kind, "r")


def _map_tensor(path: Path, tensor: Stored, types: Mapping[str, type]) -> np.ndarray:
    kind = np.dtype(types[tensor.dtype])
    if tensor.end - tensor.begin != kind.itemsize * int(np.prod(tensor.shape)):
        raise ValueError(f"{tensor.end - tensor.begin:,} bytes for {list(tensor.shape)} of {tensor.dtype}")
    return np.memmap(path, kind, "r", offset=tensor.begin, shape=tensor.shape)
