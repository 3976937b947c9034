# pyright: basic, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
"""List what a process has compiled for a model's calls, and why it was not found in a bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from torchwright.hardware.devices import default_name, get_device
from torchwright.optimization.caches.bundle import Bundle, read, unpack
from torchwright.optimization.caches.place import differences, place_here
from torchwright.optimization.engines.apply import make_target
from torchwright.optimization.engines.compiled.compiler_caches import use_private_caches
from torchwright.optimization.engines.compiled.program import ignore_library_warnings
from torchwright.workloads.base import Case, Workload


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compilations that calls caused."""

    found: int = 0
    """Graphs that were in the cache."""
    missed: int = 0
    """Graphs that were not, and were compiled."""
    passed: int = 0
    """Graphs that torch keeps in no cache."""
    objects: int = 0
    """Files that the C++ compiler made."""

    @property
    def anything(self) -> bool:
        """Check whether anything was compiled."""
        return bool(self.missed or self.passed or self.objects)


@dataclass(frozen=True, kw_only=True)
class Missed:
    """A call that was compiled though there is a bundle."""

    call: str
    compiled: Compiled
    reasons: tuple[str, ...]


def compile_calls(
    workload: Workload, dtype: torch.dtype, each: Callable[[str, Compiled], None] = lambda call, made: None
) -> list[str]:
    """Compile every call of a model with torch.compile; `each` hears what it took. The calls, as texts.

    What torch has compiled in this process is forgotten first.
    """
    torch._dynamo.reset()
    use_private_caches()
    target = make_target(workload, get_device(default_name()).identify())
    model = torch.compile(workload.adapt(target.model.to(dtype)))
    calls: list[str] = []
    for case in workload.cases(dtype):
        with counting() as count, torch.no_grad(), ignore_library_warnings():
            model(*case.args, **case.kwargs)
        calls.append(described(case))
        each(calls[-1], count())
    return calls


def explain(path: str | Path, workload: Workload, dtype: torch.dtype, *, trust: bool = False) -> list[Missed]:
    """Each call of a model that a clean cache with this bundle in it does not answer, with what differs."""
    from torch._inductor.utils import fresh_cache

    missed: list[Missed] = []
    with fresh_cache():
        bundle = unpack(path, trust=trust)

        def note(call: str, compiled: Compiled) -> None:
            if compiled.anything:
                missed.append(Missed(call=call, compiled=compiled, reasons=_reasons(bundle, call, compiled)))

        compile_calls(workload, dtype, note)
    return missed


def differing(path: str | Path) -> list[str]:
    """Return the dependencies of a bundle's code that differ here."""
    return differences(read(path).place, place_here())


def described(case: Case) -> str:
    """Types and shapes of a call's tensors, such as "forward: float32[3, 4, 16]"."""
    tensors = [
        leaf for leaf in pytree.tree_leaves((case.args, case.kwargs)) if isinstance(leaf, torch.Tensor)
    ]
    shapes = ", ".join(
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors
    )
    return f"{case.name}: {shapes}"


@contextmanager
def counting() -> Iterator[Callable[[], Compiled]]:
    """Within it, what torch compiles; the function says it so far."""
    before, objects = _counted(), _objects()

    def so_far() -> Compiled:
        now = _counted()
        graphs = {name: now[name] - before[name] for name in now}
        return Compiled(**graphs, objects=len(_objects() - objects))

    yield so_far


def _counted() -> dict[str, int]:
    counts = torch._dynamo.utils.counters
    whole, graphs = counts["aot_autograd"], counts["inductor"]
    return {
        # A graph that is found with its forward and backward pass is looked for no further.
        "found": max(whole["autograd_cache_hit"], graphs["fxgraph_cache_hit"]),
        "missed": graphs["fxgraph_cache_miss"],
        "passed": graphs["fxgraph_cache_bypass"],
    }


def _objects() -> set[str]:
    """Return the names of the C++ compiler's libraries in Inductor's cache."""
    return {file.name for file in use_private_caches().glob("??/*.so")}


def _reasons(bundle: Bundle, call: str, compiled: Compiled) -> tuple[str, ...]:
    found = differences(bundle.place, place_here())
    if bundle.calls and call not in bundle.calls:
        found.append(
            f"shapes or types: this call is not among the bundle's ({'; '.join(bundle.calls)[:300]})"
        )
    if compiled.passed:
        found.append("torch keeps no graph whose weights are frozen into it")
    return tuple(found) or ("the model's code or its settings: all else is as it was there",)
