"""torch.compile and AOTInductor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from torchwright.core.records import DeviceFacts, Step
from torchwright.optimization.techniques.base import Phase, Target, Technique
from torchwright.optimization.techniques.shared.for_parts import strange_part
from torchwright.optimization.techniques.shared.wrapping import plain_name


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
    parts: tuple[str, ...] = ()
    """Components of a pipeline whose calls are compiled, by `jit`; the others run as they are. None named is all."""

    @property
    def components(self) -> tuple[str, ...]:
        return self.parts

    @classmethod
    def available(cls, device: DeviceFacts) -> str | None:
        from torchwright.hardware.measure.toolchain import compiler_fault

        return compiler_fault(device)

    def variants(self, target: Target) -> Iterable[Self]:
        exportable = "exportable" in target.properties
        several = "several_shapes" in target.properties
        yield replace(self, engine="aot")
        # The least to compile first: of a pipeline the part that takes the time, then all but what reads the prompt.
        parts = target.workload.parts()
        for chosen in (parts[-2:-1], parts[-2:]):
            if len(parts) > len(chosen) > 0:
                yield replace(self, engine="jit", parts=chosen)
        if not exportable:
            yield replace(self, engine="jit")
            yield replace(self, engine="jit", freezing=False)
        if several:
            yield replace(self, engine="jit", freezing=False, dynamic=True)

    def refuse(self, target: Target) -> str | None:
        if self.parts and self.engine == "aot":
            return "packages ahead of time hold no component that is not compiled: engine=jit with parts"
        return strange_part(self.parts, target)

    @property
    def conversion(self) -> Step | None:
        return self.step() if self.engine == "aot" else None

    @property
    def required(self) -> frozenset[str]:
        return self.needs | {"exportable"} if self.engine == "aot" else self.needs

    def apply(self, target: Target) -> None:
        settings = target.settings
        settings.engine = self.engine
        settings.dynamic, settings.parts = self.dynamic, self.parts
        settings.inductor["freezing"] = self.freezing
        if self.freezing and target.device.kind == "cpu":
            settings.inductor["cpp.enable_concat_linear"] = True
        names = [plain_name(name) for name, _ in target.model.named_modules()]
        changed = sum(not self.parts or name.partition(".")[0] in self.parts for name in names)
        kernel = "AOTInductor" if self.engine == "aot" else "torch.compile"
        self.cover(target, len(names), changed=changed, kernel=kernel)
