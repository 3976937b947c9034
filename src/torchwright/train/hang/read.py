"""Flight-recorder dumps from files: NCCL's, gloo's and our own, checked, since they come from anywhere.

PyTorch writes pickles; these are read only where the user trusts them, and even then with nothing but plain data
allowed in them. Everything else is JSON.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchwright.core.regular_file import read_regular
from torchwright.report.wording import clean
from torchwright.train.hang.calls import Dump, DumpError, Frame, RankCall

LARGEST = 256 << 20
"""Bytes of one dump; a ring of 2000 calls with stacks has about 3 million."""
MOST_RANKS = 100_000
MOST_CALLS = 1_000_000
FINISHED = "finished"
"""The folder, in that of the dumps, with those of ranks that came to their end."""
OWN = "torchwright"
"""The key of what our dumps add to PyTorch's."""


def read_dumps(folder: str | Path, *, trust: bool = False) -> tuple[dict[int, Dump], list[str]]:
    """Rank → dump of all files in `folder` whose name ends in a rank, and notes on those left out.

    `trust`: read pickles too. Raises `DumpError` where there is nothing to read or a file is damaged.
    """
    folder = Path(folder)
    paths = numbered_files(folder)
    if not paths:
        raise DumpError(
            f"no flight-recorder dumps in {folder}",
            found="no folder of that name" if not folder.is_dir() else "no file whose name ends in a rank",
            allowed="a file for each rank: rank_0.json, nccl_trace_rank_0, …",
            next="give the folder that `torchwright train` named, or that of TORCH_FR_DUMP_TEMP_FILE",
        )
    if len(paths) > MOST_RANKS:
        raise DumpError(f"too many dumps in {folder}", found=f"{len(paths)}", allowed=f"up to {MOST_RANKS}")
    dumps: dict[int, Dump] = {}
    for path in paths:
        rank = rank_of(path)
        assert rank is not None
        if rank in dumps:
            raise DumpError(
                f"two dumps of rank {rank} in {folder}", found=path.name, next="keep those of one hang"
            )
        dumps[rank] = read_dump(path, rank, trust=trust)
    for path in numbered_files(folder / FINISHED):
        rank = rank_of(path)
        if rank is not None and rank not in dumps:
            dumps[rank] = read_dump(path, rank)
    return _of_one_run(dumps)


def numbered_files(folder: Path) -> list[Path]:
    """Return the files of a folder whose name ends in a rank."""
    return [path for path in sorted(folder.glob("*")) if rank_of(path) is not None and path.is_file()]


def read_dump(path: Path, rank: int, *, trust: bool = False) -> Dump:
    """One rank's dump."""
    if rank >= MOST_RANKS:
        raise _damaged(path, f"rank {rank} in its name, of up to {MOST_RANKS} ranks")
    try:
        data = read_regular(path, LARGEST)
    except ValueError as error:
        raise DumpError(f"the dump {path} is too large", allowed=f"{LARGEST >> 20} MiB") from error
    except OSError as error:
        raise DumpError(f"the dump {path} cannot be read", found=str(error)) from error
    if data[:1] == b"\x80":
        if not trust:
            raise DumpError(
                f"the dump {path} is a pickle",
                allowed="pickles only from where you trust whoever wrote them",
                next="add --trust, or dump JSON",
            )
        content = _plain_pickle(data, path)
    else:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _damaged(path, f"no JSON ({error})") from None
    try:
        return dump_of(content, rank)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None


def dump_of(content: Mapping[str, Any], rank: int) -> Dump:
    """A dump from its plain data, PyTorch's fields and, where they are there, ours."""
    own = content.get(OWN, {})
    since = int(own.get("since_ns", 0))
    entries = [
        entry for entry in content.get("entries") or [] if int(entry.get("time_created_ns") or 0) >= since
    ]
    if len(entries) > MOST_CALLS:
        raise ValueError(f"{len(entries)} calls")
    dump = Dump(
        rank=_count(own.get("rank", rank)),
        calls=[],
        wrapped=_is_wrapped(content.get("entries") or [], since),
        world=None if own.get("world") is None else _count(own["world"]),
        taken=_maybe(own.get("taken_ns")),
        started=_maybe(own.get("started_ns")),
        reason=clean(str(own.get("reason", "")))[:2000],
        failed=bool(own.get("failed", False)),
        finished=bool(own.get("finished", False)),
        stack=_frames(own.get("stack")),
    )
    for entry in entries:
        call = _call(entry)
        (dump.messages if call.peer is not None else dump.calls).append(call)
    dump.calls.sort(key=lambda call: call.created)
    backends = {call.group.partition(" ")[0] for call in dump.calls}
    for key, group in (content.get("pg_config") or {}).items():
        ranks = group.get("ranks") or ""  # a list, or a list as a text
        found = re.findall(r"\d+", ranks) if isinstance(ranks, str) else ranks
        members = tuple(_count(rank) for rank in found)
        if members:
            name = clean(str(group.get("name", key)))
            for backend in backends:
                dump.groups[f"{backend} {name}"] = (
                    clean(str(group.get("desc", ""))),
                    members,
                )
    return dump


def _is_wrapped(entries: list[Any], since: int) -> bool:
    """Check whether the ring has lost calls made since `since`."""
    numbered = [entry for entry in entries if "record_id" in entry]
    first = min(numbered, key=lambda entry: int(entry["record_id"]), default=None)
    return (
        first is not None and int(first["record_id"]) > 0 and int(first.get("time_created_ns") or 0) >= since
    )


def _call(entry: Mapping[str, Any]) -> RankCall:
    backend, _, op = clean(str(entry["profiling_name"])).partition(":")
    name = entry["process_group"][0]
    message = re.match(r"(send|recv)\s+(\d+)(?:->|<-)(\d+)", op)
    return RankCall(
        group=f"{backend} {clean(str(name))}",
        seq=int(entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]),
        op=message[1] if message else op,
        shapes=_shapes(entry.get("input_sizes")),
        dtypes=tuple(map(str, entry.get("input_dtypes") or ())),
        outputs=_shapes(entry.get("output_sizes")),
        output_dtypes=tuple(map(str, entry.get("output_dtypes") or ())),
        created=int(entry.get("time_created_ns") or 0),
        done=bool(entry.get("retired")) or entry.get("state") == "completed",
        frames=_frames(entry.get("frames")),
        peer=int(message[3]) if message else None,
    )


def _shapes(sizes: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(length) for length in size) for size in sizes or ())


def _frames(frames: Any) -> tuple[Frame, ...]:
    return tuple(
        Frame(clean(str(frame["filename"])), int(frame["line"]), clean(str(frame["name"])))
        for frame in (frames or ())[:200]
    )


def _of_one_run(dumps: dict[int, Dump]) -> tuple[dict[int, Dump], list[str]]:
    """Without what an earlier run left in the folder: dumps taken before another's process group was made."""
    begun = max((dump.started for dump in dumps.values() if dump.started is not None), default=0)
    old = [rank for rank, dump in dumps.items() if dump.taken is not None and dump.taken < begun]
    if dumps and len(old) == len(dumps):
        raise DumpError(
            "the dumps contradict each other",
            found=f"a run that began at {begun} ns, after the last dump was taken",
            next="keep the files of one hang, as they were written",
        )
    notes = [f"rank {rank}'s dump is from before this run began and is left out" for rank in old]
    return {rank: dump for rank, dump in dumps.items() if rank not in old}, notes


def rank_of(path: Path) -> int | None:
    """Return the number at the end of the name, before any ending."""
    digits = re.search(r"(\d+)(?:\.(?:json|pkl|pickle|pt))?$", path.name)
    return int(digits[1]) if digits and not path.name.startswith(".") else None


def _maybe(value: Any) -> int | None:
    return None if value is None else int(value)


def _count(value: Any) -> int:
    """Return a rank, or a number of ranks. Raises `ValueError` for one that no job has: lists are made of them."""
    number = int(value)
    if not 0 <= number <= MOST_RANKS:
        raise ValueError(f"{number} as a rank, or as the number of ranks")
    return number


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings and numbers, which is all that a flight recorder writes; nothing can be called."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants {module_name}.{global_name}; a dump is plain data")


def _plain_pickle(data: bytes, path: Path) -> Any:
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise _damaged(path, f"no plain pickle ({error})") from None


def _damaged(path: Path, found: str) -> DumpError:
    return DumpError(
        f"the dump {path} cannot be read", found=found, next="leave it out; its rank counts as dead"
    )
