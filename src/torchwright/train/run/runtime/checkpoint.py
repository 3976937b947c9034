"""Checkpoints: each process's part in the background, whole or not there, checked before they are read, never pickled.

    RUN/checkpoints/step-00000120/shard-00001-model-….safetensors    by torch.distributed.checkpoint, one a process
    RUN/checkpoints/step-00000120/checkpoint.json                    what it is, and each file's SHA-256; written last

A checkpoint is written as `step-….new`, flushed to the disk and renamed, so that a kill at any moment leaves those
before it. torch.distributed.checkpoint plans who writes what and cuts parts anew for another layout; its Hugging Face
format is used because its other formats describe the checkpoint in a pickle.

A run that is asked to leave has seconds: what it still writes of an earlier step is abandoned for its last state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import _TYPES as TYPES  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint import _hf_utils as hugging_face
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from torchwright.core.paths import file_digest
from torchwright.train.run.runtime.described import (
    DESCRIPTION,
    FOLDER,
    FORMAT,
    CheckpointError,
    Described,
    damaged,
    describe,
    whole,
)
from torchwright.train.run.runtime.patience import unlimited_group

DIGEST = ".sha256"
PIECE = 1 << 24
"""Bytes that are written before the next look at whether the checkpoint is still wanted."""
SETTLE_S = 30.0
"""A checkpoint of a few GiB is on the disk by then."""


class Abandoned(Exception):
    """A checkpoint that is no longer wanted: the run leaves, and a later state takes its place."""


class DigestWriter(HuggingFaceStorageWriter):
    """A writer that leaves a digest for each file, and makes the folder a checkpoint once every process has written."""

    def __init__(
        self,
        folder: Path,
        described: Described,
        committed: Callable[[int], None],
        abandoned: threading.Event,
    ) -> None:
        super().__init__(str(folder.with_name(f"{folder.name}.new")), save_distributed=True)
        self.folder, self.described, self.committed = folder, described, committed
        self.abandoned = abandoned

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this process's tensors and their digest in one pass, a piece at a time.

        Raises `Abandoned` between two pieces of a checkpoint that is no longer wanted.
        """
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(self._written(plan, planner) if plan.items else [])
        return done

    def _written(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name = hugging_face._gen_file_name(1, 1, plan.storage_data["shard_index"])
        path, digest = Path(self.path) / name, hashlib.sha256()
        # As safetensors orders tensors: each begins at a multiple of its own size.
        tensors: dict[str, torch.Tensor] = {
            item.index.fqn: cast(torch.Tensor, planner.resolve_data(item)).detach() for item in plan.items
        }
        order = sorted(tensors, key=lambda fqn: (-tensors[fqn].element_size(), fqn))
        with path.open("wb") as file:

            def put(part: bytes | memoryview) -> None:
                if self.abandoned.is_set():
                    raise Abandoned
                digest.update(part)
                file.write(part)

            put(_header(plan, {fqn: tensors[fqn] for fqn in order}))
            for fqn in order:
                # `numpy()` knows no bfloat16, and FSDP cannot free a storage that NumPy has seen: pieces are copies.
                content = tensors[fqn].cpu().contiguous().reshape(-1).view(torch.uint8)
                for piece in content.split(PIECE):
                    put(memoryview(cast(Any, piece.clone().numpy())))
            file.flush()
            os.fsync(file.fileno())
        path.with_name(f"{name}{DIGEST}").write_text(digest.hexdigest(), encoding="utf-8")
        return [
            WriteResult(index=item.index, size_in_bytes=tensors[item.index.fqn].nbytes, storage_data=name)
            for item in plan.items
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first process, after all have written."""
        new = Path(self.path)
        sums = {
            path.name.removesuffix(DIGEST): path.read_text(encoding="utf-8")
            for path in new.glob(f"*{DIGEST}")
        }
        described = {"format": FORMAT, **asdict(self.described), "files": dict(sorted(sums.items()))}
        with (new / DESCRIPTION).open("w", encoding="utf-8") as file:
            json.dump(described, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        for path in new.glob(f"*{DIGEST}"):
            path.unlink()
        _sync(new)
        new.rename(self.folder)
        _sync(self.folder.parent)
        self.committed(self.described.step)


class Checkpoints:
    """The checkpoints of a run: at most one is being written while training goes on."""

    def __init__(self, run_folder: Path, keep: int, committed: Callable[[int], None]) -> None:
        """`committed(step)` is called on the first process, in a thread of its own, when a checkpoint is whole.

        Every process of the run must make one: they agree on a process group for what the background says.
        """
        self.folder, self.keep, self._committed = run_folder / FOLDER, keep, committed
        self._group: Any = unlimited_group()
        self._writing: tuple[int, Future[Any]] | None = None
        self._abandoned = threading.Event()
        self.best: int | None = None
        """The step whose checkpoint is kept in addition to the newest ones."""
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)

    def save(
        self,
        tensors: dict[str, torch.Tensor],
        described: Described,
        *,
        last: bool = False,
        leaving: bool = False,
    ) -> None:
        """Copy `tensors` and begin to write them; waits for a checkpoint that is still being written.

        With `last` nothing changes them from now on, and they are not copied. `leaving` abandons the checkpoint of an
        earlier step, unless it is the best one. Raises `CheckpointError` where the earlier one failed.
        """
        if leaving:
            self._abandon(described.step)
        self.wait()
        folder = _folder(self.folder, described.step)
        if (folder / DESCRIPTION).is_file():  # asked to leave right after a checkpoint
            return
        self._clear(folder)
        writer = DigestWriter(folder, described, self._committed, self._abandoned)
        how: dict[str, Any] = {"storage_writer": writer, "process_group": self._group}
        future: Any
        if last:  # in a thread all the same: the main one answers to signals
            executor = ThreadPoolExecutor(1)
            future = executor.submit(state_dict_saver.save, dict(tensors), **how)
            executor.shutdown(wait=False)
        else:
            future = state_dict_saver.async_save(dict(tensors), **how)
        self._writing = described.step, future

    @property
    def failed(self) -> bool:
        """Check whether the checkpoint being written has failed; never waits."""
        return (
            self._writing is not None and self._writing[1].done() and self._writing[1].exception() is not None
        )

    def wait(self) -> None:
        """Until no checkpoint is being written; then the oldest make room. Raises `CheckpointError` if it failed."""
        if self._writing is None:
            return
        (step, future), self._writing = self._writing, None
        try:
            future.result()
        except (CheckpointException, OSError) as error:
            self._clear(_folder(self.folder, step))
            raise self._unwritten(step, error) from error
        if dist.get_rank() == 0:
            for old in whole(self.folder)[: -self.keep]:
                if self.best is not None and old == _folder(self.folder, self.best):
                    continue
                # Renamed first: a kill while its files go leaves no half checkpoint behind.
                going = old.with_name(f"{old.name}.old")
                old.rename(going)
                shutil.rmtree(going)

    def _abandon(self, step: int) -> None:
        """Stop writing the checkpoint of another step than this one, on all processes; those before stay."""
        if self._writing is None or self._writing[0] in (step, self.best):
            return
        (earlier, future), self._writing = self._writing, None
        self._abandoned.set()
        with contextlib.suppress(CheckpointException, OSError):
            future.result()
        self._abandoned.clear()
        self._clear(_folder(self.folder, earlier))

    def settle(self) -> None:
        """Let what is being written end, well or badly: for a run that an error ends, whose folder is given up.

        Waits `SETTLE_S` at the most: another process that is gone may never answer.
        """
        if self._writing is not None:
            wait([self._writing[1]], timeout=SETTLE_S)

    def _clear(self, folder: Path) -> None:
        """Remove what a failed or killed attempt left, on the first process, before any other writes."""
        if dist.get_rank() == 0:
            for left in (*self.folder.glob("*.old"), folder.with_name(f"{folder.name}.new")):
                shutil.rmtree(left, ignore_errors=True)
        dist.barrier(self._group)

    def _unwritten(self, step: int, error: BaseException) -> CheckpointError:
        last = whole(self.folder)
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder}",
            found=_reason(error),
            allowed=f"the last good one is {last[-1]}" if last else None,
            next="free some space, then start the same command again",
        )


def _header(plan: SavePlan, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the beginning of a safetensors file with these tensors, and what torch's reader wants to know of them."""
    offsets = {
        item.index.fqn: {hugging_face.SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets}
        for item in plan.items
        if item.tensor_data is not None
    }
    header: dict[str, Any] = {
        hugging_face.DEFAULT_EXTRA_METADATA_KEY: {
            hugging_face.CUSTOM_METADATA_KEY: json.dumps(offsets),
            hugging_face.DCP_VERSION_KEY: str(hugging_face.HF_DCP_VERSION),
            hugging_face.FORMAT_KEY: hugging_face.FORMAT_VALUE,
        }
    }
    names, begin = {dtype: name for name, dtype in TYPES.items()}, 0
    for fqn, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[fqn] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _folder(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return folder / f"step-{step:08}"


def load(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors` in place from a checkpoint, by name, whatever the layout that wrote it.

    Every process calls this; each checks its share of the files first. Raises `CheckpointError` for missing or damaged
    files and missing tensors: on all processes, and before anything is changed.
    """
    described = describe(folder)
    mine = sorted(described.files)[dist.get_rank() :: dist.get_world_size()]
    faults: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        faults, next(filter(None, (_fault(folder, described.files, name) for name in mine)), None)
    )
    for fault in faults:
        if fault:
            raise damaged(folder, *fault)
    try:
        state_dict_loader.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        raise CheckpointError(
            f"the checkpoint {folder} does not hold the state of this run", found=_reason(error)
        ) from error


def _fault(folder: Path, files: Mapping[str, str], name: str) -> tuple[str, str] | None:
    path = folder / name
    if not path.is_file():
        return name, "it is not there"
    if file_digest(path) != files[name]:
        return name, f"its SHA-256 is not the one in {DESCRIPTION}"
    return None


def _reason(error: BaseException) -> str:
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(
        f"process {rank}: {type(cause).__name__}: {cause}"
        for rank, (cause, _) in sorted(error.failures.items())
    )


def _sync(folder: Path) -> None:
    """Flush a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
