# pyright: basic
"""A workload on its way to the processes of its trials: its tensors lie in a file that each of them maps.

So no process unpacks the weights from a message. Freeing such large blocks makes glibc keep every smaller freed block
(mallopt(3), M_MMAP_THRESHOLD). The original's activations would then cost no page faults: it was up to twice as fast in
a trial as in its user's process.
"""

from __future__ import annotations

import contextvars
import importlib
import pickle
import sys
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
import torch

from torchwright.core.errors import WorkloadError
from torchwright.workloads.base import Workload

CODE, TENSORS = "workload.pickle", "workload.tensors"
ALIGNED = 64
"""Bytes; as torch's allocator on CPUs aligns."""


def pack(workload: Workload, folder: Path) -> Path:
    """Write the workload into `folder`, for our own processes only. The answer is what `unpack` wants.

    Raises `WorkloadError` where it cannot travel, `OSError` where it cannot be written.
    """
    try:
        with (folder / CODE).open("wb") as code, (folder / TENSORS).open("wb") as tensors:
            _Pickler(code, tensors).dump(workload)
    except OSError:
        raise
    except Exception as error:
        raise WorkloadError(
            "the model cannot be sent to a trial process",
            found=f"{type(error).__name__}: {error}",
            next="keep open files, locks and sockets out of the module, or pass package.module:factory",
        ) from error
    return folder


def unpack(folder: Path) -> Workload:
    """Return the workload that `pack` wrote. Changes of its tensors stay in this process."""
    with (folder / CODE).open("rb") as code:
        return _Unpickler(code, folder / TENSORS).load()


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, with storages in a file of their own, and context variables by the names that hold them.

    transformers' models have hooks, once they were called, that are functions in functions and so travel by value.
    """

    def __init__(self, code: BinaryIO, tensors: BinaryIO) -> None:
        super().__init__(code)
        tensors.write(bytes(ALIGNED))  # nothing cannot be mapped
        self._tensors = tensors
        self._written: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.storage.TypedStorage) or obj._untyped_storage.device.type != "cpu":
            return None
        return self._offset(obj._untyped_storage), obj._untyped_storage.nbytes(), obj.dtype

    def _offset(self, storage: torch.UntypedStorage) -> int:
        """Return the storage's offset in the file; a storage that tensors share is written once."""
        if storage._cdata not in self._written:
            self._tensors.write(bytes(-self._tensors.tell() % ALIGNED))
            self._written[storage._cdata] = storage, self._tensors.tell()
            self._tensors.write(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data)
        return self._written[storage._cdata][1]

    def reducer_override(self, obj: Any) -> Any:
        if _is_of_context(obj) and (where := _holder(obj)) is not None:
            return _held, where
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, code: BinaryIO, tensors: Path) -> None:
        super().__init__(code)
        self._mapped = torch.UntypedStorage.from_file(
            str(tensors), shared=False, nbytes=tensors.stat().st_size
        )
        self._storages: dict[tuple[int, int], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.fx.graph_module":
            # make_fx's graphs name classes of this module when they are built again, and torch 2.13 does not import it.
            importlib.import_module("torch._higher_order_ops.triton_kernel_wrap")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        offset, size, dtype = pid
        if (offset, size) not in self._storages:
            self._storages[offset, size] = self._mapped[offset : offset + size]
        return torch.storage.TypedStorage(
            wrap_storage=self._storages[offset, size], dtype=dtype, _internal=True
        )


def _is_of_context(value: object) -> bool:
    """Check whether the value is a context variable, or a plain object around one."""
    if isinstance(value, contextvars.ContextVar):
        return True
    attributes = getattr(value, "__dict__", None)
    return type(attributes) is dict and any(
        isinstance(item, contextvars.ContextVar) for item in attributes.values()
    )


def _holder(value: object) -> tuple[str, str] | None:
    """The module and the name under which it holds `value`."""
    for name, module in list(sys.modules.items()):
        for key, item in list(getattr(module, "__dict__", {}).items()):
            if item is value:
                return name, key
    return None


def _held(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
