"""torch.compile and AOTInductor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torchwright.facts import Coverage, DeviceFacts
from torchwright.techniques.base import Phase, Target, Technique


@dataclass(frozen=True, kw_only=True)
class Compile(Technique):
    """Fuse and generate code with Inductor, ahead of time where the model exports as one graph."""

    name: ClassVar[str] = "compile"
    phase: ClassVar[Phase] = Phase.COMPILE
    needs: ClassVar[frozenset[str]] = frozenset({"eager"})
    gives: ClassVar[frozenset[str]] = frozenset({"compiled"})
    removes: ClassVar[frozenset[str]] = frozenset({"eager"})

    engine: Literal["aot", "jit"] = "aot"
    """`aot`: torch.export and AOTInductor, one package per shape; `jit`: torch.compile, which allows graph breaks."""
    freezing: bool = True
    """Treat weights as constants: fold batch norms, pack weights for oneDNN, concatenate linears with one input."""
    dynamic: bool = False
    """One graph for all shapes instead of one per shape."""

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        from torchwright.measure.toolchain import compiler_fault

        return compiler_fault(device)

    def variants(self, target: Target) -> Iterable[Self]:
        exportable = "exportable" in target.properties
        several = "several_shapes" in target.properties
        yield replace(self, engine="aot")
        if not exportable:
            yield replace(self, engine="jit")
            yield replace(self, engine="jit", freezing=False)
        if several:
            yield replace(self, engine="jit", freezing=False, dynamic=True)

    @property
    def required(self) -> frozenset[str]:
        return self.needs | {"exportable"} if self.engine == "aot" else self.needs

    def apply(self, target: Target) -> None:
        settings = target.settings
        settings.engine = self.engine
        settings.dynamic = self.dynamic
        settings.inductor["freezing"] = self.freezing
        if self.freezing and target.device.kind == "cpu":
            settings.inductor["cpp.enable_concat_linear"] = True
        total = sum(1 for _ in target.model.modules())
        kernel = "AOTInductor" if self.engine == "aot" else "torch.compile"
        target.coverage.append(Coverage(technique=self.name, changed=total, total=total, kernel=kernel))
