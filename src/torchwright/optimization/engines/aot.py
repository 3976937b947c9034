# pyright: basic
"""Run packages that AOTInductor has compiled. Imports nothing of AOTInductor until it compiles: loading must be
quick.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torchwright.optimization.engines.base import Engine, Kept, Ready, ShippingForm, engines
from torchwright.optimization.engines.compiled.graphs import graph_in
from torchwright.optimization.engines.compiled.package import Package
from torchwright.optimization.engines.conversion import shared
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher
from torchwright.optimization.engines.dispatch.spec import CallSpec, package_file

if TYPE_CHECKING:
    from torchwright.optimization.techniques.base import Target
    from torchwright.workloads.base import Case


class Aot(Engine):
    """Calls packages of native code, one for each of the workload's calls."""

    name: ClassVar[str] = "aot"
    how: ClassVar[str] = "ahead-of-time package"
    apart: ClassVar[bool] = True

    dispatcher: CallDispatcher

    def __init__(self, calls: tuple[CallSpec, ...]) -> None:
        self.calls = calls

    @classmethod
    def prepare(cls, target: Target, folder: Path | None = None) -> Self:
        from torchwright.optimization.engines.compiled.packaging import build_packages

        assert folder is not None
        return cls(shared(target, folder, lambda: tuple(build_packages(target, folder))))

    @classmethod
    def opened(cls, folder: Path, calls: tuple[CallSpec, ...], device: str) -> Self:
        engine = cls(calls)
        packages = [
            Package(folder / package_file(i), spec, fallback=functools.partial(graph_in, folder, spec.name))
            for i, spec in enumerate(calls)
        ]
        engine.dispatcher = CallDispatcher(packages, strict=True, device=device)
        return engine

    def __call__(self, case: Case) -> Any:
        return self.dispatcher.run(case)

    @classmethod
    def ways(cls, own: ShippingForm) -> dict[ShippingForm, str]:
        return {"package": cls.name}

    @classmethod
    def load(cls, kept: Kept) -> Ready | None:
        if kept.refusal is None:
            return kept.packages(cls.how)
        kept.say(f"compiled code left aside: {kept.refusal}; compiling afresh")
        return kept.graphs(compiled=True)

    @classmethod
    def stand_in(cls) -> type[Engine]:
        return engines.get("jit")
