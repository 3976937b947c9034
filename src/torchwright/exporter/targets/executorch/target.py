# pyright: basic, reportMissingImports=false
"""ExecuTorch: a .pte with a delegate, for phones and small machines; language models with their cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torchwright.core.errors import ArtifactError, RefusedTechnique, TorchwrightError, first_line
from torchwright.core.quiet import quiet_libraries
from torchwright.exporter.base import Delegate, ExportTarget, Run, Written
from torchwright.exporter.sizes import widen
from torchwright.exporter.targets.executorch.delegates import DELEGATES, FIRST, Lowering
from torchwright.exporter.targets.executorch.int8 import quantized
from torchwright.exporter.targets.executorch.language import (
    CACHED,
    cached_program,
    keep_tokenizer,
    through_cache,
)
from torchwright.exporter.targets.executorch.read import contents, write_layers
from torchwright.exporter.targets.executorch.times import fallen_back
from torchwright.exporter.verification.operators import refused_graph
from torchwright.optimization.engines.compiled.program import ignore_library_warnings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

    from torchwright.exporter.subject import Subject
    from torchwright.optimization.engines.dispatch.spec import CallSpec

MODEL = "model.pte"
TOGETHER = {"1.4": "2.13", "1.5": "2.14"}
"""Versions of ExecuTorch, and of the torch that each is built for: with another its libraries do not load."""


def version_fault(torch_version: str, executorch: str | None) -> str | None:
    """Return why this version of executorch, or none, does not go with a version of torch; None where it does."""
    here = _minor(torch_version)
    fitting = next((one for one, wanted in TOGETHER.items() if wanted == here), None)
    if fitting is None:
        return (
            f"no release of ExecuTorch is built for torch {here}, but for {', '.join(TOGETHER.values())}: "
            "pip install 'torchwright[executorch]' brings a pair"
        )
    install = f"pip install 'executorch=={fitting}.*'"
    if executorch is None:
        return f"executorch cannot be imported: {install}"
    if _minor(executorch) != fitting:
        return f"executorch {executorch} is not built for torch {here}: {install}"
    return None


class ExecuTorch(ExportTarget):
    """ExecuTorch's .pte with XNNPACK's or another delegate: float32, or 8-bit integers by PT2E; so many rows at most.

    A language model has its cache in it, and linear layers of 4-bit weights by 8-bit inputs as "8da4w".
    """

    name: ClassVar[str] = "executorch"
    runtime: ClassVar[str] = "ExecuTorch"
    libraries: ClassVar[tuple[str, ...]] = ("executorch",)
    tolerances: ClassVar[dict[str, float]] = {"fp32": 1e-3, "int8": 0.1, "8da4w": 0.3}
    formats: ClassVar[dict[str, str]] = {"int8_static": "int8"}
    largest_batch: ClassVar[bool] = True
    largest_context: ClassVar[bool] = True
    delegates: ClassVar[Mapping[str, Delegate]] = DELEGATES
    settings_of_layers: ClassVar[bool] = True

    @classmethod
    def unavailable(cls) -> str | None:
        try:
            found = version("executorch")
        except PackageNotFoundError:
            found = None
        return version_fault(torch.__version__, found)

    @classmethod
    def write(cls, subject: Subject, precision: str, folder: Path) -> Written:
        if subject.language is None or subject.folder is None:
            if subject.context is not None:
                raise RefusedTechnique("a cache is a language model's, from its folder", found=subject.name)
            return _convert(subject, precision, folder, cls.tolerances[precision])
        program, methods, notes = cached_program(subject.language, subject.folder, precision, subject.context)
        written = _lower(program, methods, folder, DELEGATES[subject.delegate or FIRST])
        keep_tokenizer(subject.folder, folder)
        return replace(written, notes=(*notes, *written.notes))

    @classmethod
    def open(cls, folder: Path, spec: CallSpec, threads: int) -> Run:
        try:
            with ignore_library_warnings():
                from executorch.runtime import Runtime

                program = Runtime.get().load_program(folder / MODEL)
                method = program.load_method("forward")
        except RuntimeError as error:
            raise ArtifactError(f"{folder / MODEL} cannot be read", found=first_line(error)) from error
        if method is None:
            raise ArtifactError(f"{folder / MODEL} cannot be read", found="no method 'forward' in it")
        if CACHED in program.method_names:
            return through_cache(method.execute)

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            outputs = method.execute([tensor.contiguous() for tensor in tensors])
            # They lie in the runtime's own memory, which the next call writes to.
            return [output.clone() for output in outputs if isinstance(output, torch.Tensor)]

        return run

    @classmethod
    def settings(cls, folder: Path) -> dict[str, Any]:
        with ignore_library_warnings(), quiet_libraries():
            return contents(folder / MODEL)


def _convert(subject: Subject, precision: str, folder: Path, allowed: float) -> Written:
    """Write anything but a language model with its cache; `allowed` is the tolerated rounding error."""
    if precision == "8da4w":
        raise RefusedTechnique("8da4w is for language models, from their folders")
    lowering, graph = DELEGATES[subject.delegate or FIRST], subject.graph
    if precision != "int8":
        return _lower(graph.program, {}, folder, lowering)
    assert lowering.quantizer is not None
    with ignore_library_warnings(), quiet_libraries(), _refusing(graph.program):
        quantizer = lowering.quantizer()
        program, parting = quantized(graph.program, graph.spec, subject.target, quantizer, allowed)
    return replace(_lower(program, {}, folder, lowering), parting=str(parting or ""))


def _lower(program: ExportedProgram, methods: dict[str, Any], folder: Path, lowering: Lowering) -> Written:
    """Write the program, delegated as far as the delegate goes; `methods` give constants."""
    with ignore_library_warnings(), quiet_libraries(), _refusing(program):
        from executorch.devtools.backend_debug import get_delegation_info
        from executorch.exir import ExecutorchBackendConfig

        widen(program, past=1)  # of a largest of 16, memory is planned for 15
        edge = _edge(program, methods, lowering)
        told = get_delegation_info(edge.exported_program().graph_module)
        seconds, untimed = fallen_back(edge.exported_program())
        widen(edge.exported_program())  # lowering a convolution narrows what memory is planned for
        # A cache is written to where it lies, and not copied for it.
        lowered = edge.to_executorch(ExecutorchBackendConfig(run_reinplace_pass=bool(methods)))
        planned = _planned(lowered)
        if (missing := _without_kernel(lowered)) and lowering is DELEGATES[FIRST]:
            raise refused_graph("ExecuTorch's runtime cannot take this model", program, "; ".join(missing))
        write_layers(folder, lowered)
    (folder / MODEL).write_bytes(lowered.buffer)
    alone = {
        name: rows.non_delegated
        for name, rows in sorted(told.delegation_by_operator.items())
        if rows.non_delegated and name != "getitem"
    }
    return Written(
        operators={
            f"delegated to {lowering.title}": told.num_delegated_nodes,
            "fallen back to portable kernels": sum(alone.values()),
        },
        planned=planned,
        seconds=seconds,
        notes=(
            *lowering.notes,
            *(f"not delegated: {name}, {count} times" for name, count in alone.items()),
            *missing,
            *(f"not delegated, and its time is not known: {name}" for name in untimed),
        ),
    )


def _edge(program: ExportedProgram, methods: dict[str, Any], lowering: Lowering) -> Any:
    """The program in the edge dialect, delegated as far as the delegate goes."""
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    return to_edge_transform_and_lower(
        program,
        partitioner=lowering.partitioners(),
        constant_methods=methods,
        # ExecuTorch's checks take the first tensor of an operator's list for the whole list, and freeze its batch
        # size by counting tensors (1.4.1: split_with_sizes, and so every GRU).
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )


def _without_kernel(program: Any) -> list[str]:
    """Name the operators for which the runtime here has no kernel: it says no more than "error 0x14" when it loads."""
    from executorch.runtime import Runtime

    there = set(Runtime.get().operator_registry.operator_names)
    plans = program.executorch_program.execution_plan
    called = {f"{one.name}.{one.overload}".rstrip(".") for plan in plans for one in plan.operators}
    return [f"no kernel for {name}" for name in sorted(called - there)]


def _planned(program: Any) -> dict[str, int]:
    """Return the memory that the runtime reserves before it runs: per method, and per value with the calls in which
    it lives.

    Values that do not live at once share places, so that they add up to more. A delegate's own memory is not in it.
    """
    found = {
        f"{plan.name}, all of it": sum(plan.non_const_buffer_sizes)
        for plan in program.executorch_program.execution_plan
        if any(plan.non_const_buffer_sizes)
    }
    seen: set[Any] = set()  # what a delegate gives is taken out of its tuple, and is the output in the end
    for node in program.exported_program().graph.nodes:
        specs = node.meta.get("spec")
        for spec in specs if isinstance(specs, list | tuple) else [specs]:
            if getattr(spec, "mem_offset", None) is None or spec.const:
                continue
            begins, ends = spec.lifetime
            if (place := (spec.mem_id, spec.mem_offset, begins, ends)) not in seen:
                seen.add(place)
                found[f"{node.name}, from {begins} to {ends} at {spec.mem_offset}"] = spec.allocated_memory
    return found


@contextlib.contextmanager
def _refusing(program: ExportedProgram) -> Iterator[None]:
    """Raise what ExecuTorch does not know of a graph as a refusal that names the operator."""
    try:
        yield
    except (TorchwrightError, OSError):
        raise
    except Exception as error:
        convert = lambda alone: _edge(alone, {}, DELEGATES[FIRST]).to_executorch()
        raise refused_graph("ExecuTorch cannot take this model", program, error, convert) from error


def _minor(full: str) -> str:
    return ".".join(full.split(".")[:2])
