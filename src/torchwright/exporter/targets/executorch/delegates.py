# pyright: basic, reportMissingImports=false
"""ExecuTorch's delegates: the packages that lowering to each one needs, and where it runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchwright.exporter.base import Delegate

FIRST = "xnnpack"
STATIC = "Vela compiles for the sizes of the example"


@dataclass(frozen=True, kw_only=True)
class Lowering(Delegate):
    """A delegate of ExecuTorch's."""

    title: str
    backend: str
    """The delegate's name in a runtime that has it."""
    modules: tuple[str, ...] = ()
    """That lowering imports beyond the wheel's own."""
    install: str = ""
    partitioners: Callable[[], list[Any]]
    quantizer: Callable[[], Any] | None = None
    notes: tuple[str, ...] = ()

    def missing(self) -> str | None:
        lacking = [name for name in self.modules if not _importable(name)]
        return f"{', '.join(lacking)} cannot be imported: {self.install}" if lacking else None

    def elsewhere(self) -> str | None:
        from executorch.runtime import Runtime

        there = Runtime.get().backend_registry.registered_backend_names
        return None if self.backend in there else f"this runtime has no {self.title}, but {', '.join(there)}"


def _importable(name: str) -> bool:
    """Check whether a module exists; only the packages around it are imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of a package around it
        return False


def _xnnpack() -> list[Any]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
        XnnpackDynamicallyQuantizedPartitioner,
        XnnpackPartitioner,
    )

    # Of a layer whose inputs are quantized as they come, the general one would take the multiplication alone.
    return [XnnpackDynamicallyQuantizedPartitioner(), XnnpackPartitioner()]


def _xnnpack_quantizer() -> Any:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))


def _core_ml() -> list[Any]:
    import coremltools
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    # Float16 is its own default, and none was asked for.
    wide = CoreMLBackend.generate_compile_specs(compute_precision=coremltools.precision.FLOAT32)
    # A cache in Core ML's own state asks for iOS 18.
    return [CoreMLPartitioner(compile_specs=wide, take_over_mutable_buffer=False)]


def _vulkan() -> list[Any]:
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    return [VulkanPartitioner()]


def _ethos_u(processor: str) -> Lowering:
    def partitioners() -> list[Any]:
        from executorch.backends.arm.ethosu import EthosUCompileSpec, EthosUPartitioner

        return [EthosUPartitioner(EthosUCompileSpec(processor))]

    def quantizer() -> Any:
        from executorch.backends.arm.ethosu import EthosUCompileSpec
        from executorch.backends.arm.quantizer import EthosUQuantizer, get_symmetric_quantization_config

        made = EthosUQuantizer(EthosUCompileSpec(processor))
        return made.set_global(get_symmetric_quantization_config())

    return Lowering(
        title="Ethos-U",
        backend="EthosUBackend",
        precisions=("int8",),
        modules=("tosa_serializer", "ethosu.vela"),
        install="pip install 'executorch[ethos-u]==1.4.*', which takes an older numpy: an environment of its own",
        partitioners=partitioners,
        quantizer=quantizer,
        fixed=STATIC,
        notes=(f"for {processor}",),
    )


DELEGATES: Mapping[str, Lowering] = {
    FIRST: Lowering(
        title="XNNPACK",
        backend="XnnpackBackend",
        precisions=("fp32", "int8", "8da4w"),
        partitioners=_xnnpack,
        quantizer=_xnnpack_quantizer,
    ),
    "coreml": Lowering(
        title="Core ML",
        backend="CoreMLBackend",
        precisions=("fp32",),
        modules=("coremltools",),
        install="pip install 'coremltools==9.0' (for Linux and macOS)",
        partitioners=_core_ml,
    ),
    "vulkan": Lowering(title="Vulkan", backend="VulkanBackend", precisions=("fp32",), partitioners=_vulkan),
    "ethos-u55": _ethos_u("ethos-u55-128"),
    "ethos-u85": _ethos_u("ethos-u85-256"),
}
