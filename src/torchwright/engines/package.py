# pyright: basic, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""Calling ahead-of-time packages. Imports nothing of Inductor: loading must be quick.

torch's own wrapper (`torch._inductor.aoti_load_package`) imports the whole compiler (2 s) and parses the packages's
call specification at every call; both are avoided by using the loader beneath it.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchwright.errors import ArtifactError, WorkloadError
from torchwright.kernels import build
from torchwright.workloads.base import Case


class Package:
    """One compiled graph, called with the arguments it was exported with."""

    def __init__(self, path: Path) -> None:
        _register_operators(path)
        self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        arguments, result = self._loader.get_call_spec()
        spec = pytree.treespec_loads(arguments)
        self._keywords: list[str] = list(spec.child(1).context)
        self._result = pytree.treespec_loads(result)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ordered = {key: kwargs[key] for key in self._keywords}
        inputs = [leaf for leaf in pytree.tree_leaves((args, ordered)) if isinstance(leaf, torch.Tensor)]
        return pytree.tree_unflatten(self._loader.boxed_run(inputs), self._result)


def _register_operators(path: Path) -> None:
    """Load Torchwright's own kernels where the compiled code calls them; Inductor lists such calls as JSON."""
    with zipfile.ZipFile(path) as archive:
        listed = [name for name in archive.namelist() if name.endswith(".wrapper.json")]
        if not any(b"torchwright::" in archive.read(name) for name in listed):
            return
    missing = build.load()
    if missing:
        raise ArtifactError(
            "the compiled code calls Torchwright's kernels, which are not here", found=missing
        )


class AotRunner:
    """Calls ahead-of-time packages: a language model's by the name of the call, others by the shapes of the inputs."""

    def __init__(self, packages: dict[str, Path], signatures: dict[str, str]) -> None:
        self._packages = {name: Package(path) for name, path in packages.items()}
        self._by_shape = {text: name for name, text in signatures.items()}

    def __call__(self, case: Case) -> Any:
        name = case.name if case.fixed else self._find(case)
        return self._packages[name](*case.args, **case.kwargs)

    def _find(self, case: Case) -> str:
        shape = signature(case.args, case.kwargs)
        if shape not in self._by_shape:
            raise WorkloadError(
                "this model was compiled ahead of time for other inputs",
                found=shape,
                allowed="; ".join(sorted(self._by_shape)),
                next="optimize with a list of inputs that has every shape, or with "
                "techniques=['compile:engine=jit'], which compiles new shapes as they come",
            )
        return self._by_shape[shape]


def signature(args: Any, kwargs: dict[str, Any]) -> str:
    """The types and shapes of a call's tensors, and its other values, as text."""
    parts = [_leaf(value) for value in pytree.tree_leaves(args)]
    for key, value in sorted(kwargs.items()):
        parts.append(f"{key}=" + "+".join(_leaf(leaf) for leaf in pytree.tree_leaves(value)))
    return "(" + ", ".join(parts) + ")"


def _leaf(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
