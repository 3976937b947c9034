# pyright: basic, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""Ahead-of-time packages as calls. Imports nothing of Inductor: loading must be quick.

torch's own wrapper (`torch._inductor.aoti_load_package`) imports the whole compiler (2 s) and parses the packages's
call specification at every call; both are avoided by using the loader beneath it.
"""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ArtifactError, TorchwrightError
from torchwright.core.process.forks import reopen_in_child
from torchwright.hardware.kernels.cpu import build as kernels
from torchwright.hardware.kernels.gpu import operators as gpu
from torchwright.optimization.engines.dispatch.call_dispatcher import CompiledCall
from torchwright.optimization.engines.dispatch.guards import Check, Fallback
from torchwright.optimization.engines.dispatch.results import call_result
from torchwright.optimization.engines.dispatch.spec import CallSpec


class Package:
    """One compiled graph. Raises `ArtifactError` where the file cannot be loaded.

    `layouts` has, for each output tensor, the order of its dimensions in memory where the original's is another than
    the compiled code's, else None. `fallback` makes what answers calls outside the guards of `spec`.
    """

    def __init__(
        self,
        path: Path,
        spec: CallSpec,
        layouts: Sequence[tuple[int, ...] | None] = (),
        fallback: Callable[[], CompiledCall] | None = None,
    ) -> None:
        self.spec = spec
        self._check, self._fallback = Check(spec.guards) if spec.guards else None, Fallback(fallback)
        self._one_at_a_time = threading.Lock()
        _register_operators(path)
        # Linux gives AMX's tiles to a process that has asked. The compiler asks where it compiles, and oneDNN where it
        # is called first: one of Inductor's templates before that is an illegal instruction.
        torch.cpu._init_amx()
        try:
            self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        except RuntimeError as error:
            raise ArtifactError(
                f"the compiled code in {path} cannot be loaded", found=str(error).splitlines()[0]
            ) from error
        self.build = call_result(self._loader.get_call_spec()[1], layouts, spec.results)
        self._lost = False
        reopen_in_child(self)

    def after_fork(self) -> None:
        """Give the child a lock of its own. A loader that another thread was calling stays locked for good."""
        self._lost = self._lost or self._one_at_a_time.locked()
        self._one_at_a_time = threading.Lock()

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Put these in place of the constants of their names; names that the code does not know are left out."""
        known = set(self._loader.get_constant_fqns())
        given = {name: tensor.contiguous() for name, tensor in weights.items() if name in known}
        self._loader.load_constants(given, False, False, False)

    def run(self, tensors: list[torch.Tensor]) -> Any:
        if self._check is None:
            return self.build(self._called(tensors))
        arrays = self._arrays(tensors)
        if self.spec.mutates:  # afterwards they are other numbers
            why = self._check(arrays)
            outputs = self._called(tensors) if why is None else None
        else:
            outputs, why = self._check.guarded(arrays, lambda: self._called(list(tensors)))
        if why is not None:
            return self._fallback.run(tensors, why)
        assert outputs is not None
        return self.build(outputs)

    def _called(self, tensors: list[torch.Tensor]) -> list[Any]:
        # One call runs at a time. The loader sees to that, too, but holds the interpreter's lock while it waits, and
        # the call that runs may need that lock to free a tensor.
        if self._lost:
            raise TorchwrightError(
                "the compiled code cannot run in this process",
                found="another thread was calling it when the parent forked",
                next="load the artifact in the child, or fork when no call is running",
            )
        with self._one_at_a_time:
            return self._loader.boxed_run(tensors)

    def _arrays(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The tensors as dense arrays, without a copy: NumPy has no bfloat16."""
        return [
            (tensor.float() if tensor.dtype == torch.bfloat16 else tensor.detach())
            .permute(spec.order)
            .numpy()
            for tensor, spec in zip(tensors, self.spec.tensors, strict=True)
        ]


def _register_operators(path: Path) -> None:
    """Load Torchwright's own kernels where the compiled code calls them; Inductor lists such calls as JSON."""
    with zipfile.ZipFile(path) as archive:
        listed = [name for name in archive.namelist() if name.endswith(".wrapper.json")]
        text = b"".join(archive.read(name) for name in listed)
    faults = [
        load_fault()
        for namespace, load_fault in (
            (b"torchwright::", kernels.load_fault),
            (b"torchwright_gpu::", gpu.load_fault),
        )
        if namespace in text
    ]
    if missing := next(filter(None, faults), None):
        raise ArtifactError(
            "the compiled code calls Torchwright's kernels, which are not here", found=missing
        )
