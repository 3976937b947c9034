# pyright: basic, reportMissingImports=false
"""ONNX Runtime as an engine: an artifact keeps an ONNX file with its weights inside.

An untrusted file is read from memory and checked first: it may not name another file, nor call operators other than
ONNX's own.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch.export import ExportedProgram

from torchwright.core.errors import ArtifactError, RefusedTechnique, first_line
from torchwright.core.json_file import read_bytes
from torchwright.optimization.engines.compiled.program import ignore_library_warnings
from torchwright.optimization.engines.converted import Converted, Infer
from torchwright.optimization.engines.dispatch.spec import CallSpec, NumberDomain
from torchwright.optimization.techniques.onnxruntime import LIBRARIES

if TYPE_CHECKING:
    from torchwright.optimization.techniques.base import Target

LARGEST = 2**31 - 1
"""The largest ONNX file in bytes: protobuf's own limit. A larger model would need separate files for its weights."""
SQUEEZES = ("aten.squeeze.dim", "aten.squeeze.dims")
DOMAINS = ("", "ai.onnx", "pkg.torch", "pkg.onnxscript.torch_lib", "pkg.onnxscript.torch_lib.common")
"""The domains of ONNX's own operators, and of functions that the exporter writes in their terms."""


class OnnxRuntime(Converted):
    """Runs the model by ONNX Runtime, in float32."""

    name: ClassVar[str] = "onnxruntime"
    how: ClassVar[str] = "ONNX Runtime"
    libraries: ClassVar[tuple[str, ...]] = LIBRARIES
    # Sign and Gelu of NaN and infinity are not PyTorch's, and Gather counts negative indices from the end.
    domain: ClassVar[NumberDomain] = NumberDomain(values="finite", checks_indices=False)

    @classmethod
    def convert(cls, program: ExportedProgram, spec: CallSpec, file: Path, target: Target) -> None:
        import torch

        _without_idle_squeezes(program)
        with ignore_library_warnings(), contextlib.redirect_stdout(io.StringIO()):
            exported = torch.onnx.export(program, dynamo=True, verbose=False)
        assert exported is not None
        content = exported.model_proto.SerializeToString()
        if len(content) > LARGEST:
            raise RefusedTechnique("an ONNX file holds two gigabytes", found=f"{len(content):,} bytes")
        if fault := _fault(exported.model_proto, spec):
            raise RefusedTechnique("ONNX has no such graph", found=fault)
        file.write_bytes(content)

    @classmethod
    def reader(cls, file: Path, spec: CallSpec) -> Callable[[int], Infer]:
        import onnx

        content = read_bytes(file, LARGEST)
        try:
            model = onnx.load_model_from_string(content)
            fault = _fault(model, spec)
        except Exception as error:  # of protobuf, at whatever a hostile file makes it stumble over
            raise ArtifactError(f"{file} cannot be read", found=first_line(error)) from error
        if fault:
            raise ArtifactError(f"{file} cannot be read", found=fault)
        names = [value.name for value in model.graph.input]
        sizes = _fixed_sizes(model, spec)
        return lambda threads: _started(content, names, sizes, threads)


def _without_idle_squeezes(program: ExportedProgram) -> None:
    """PyTorch squeezes a dimension that is larger than one into itself; ONNX Runtime refuses a graph that does."""
    graph = program.graph_module.graph
    for node in [node for node in graph.nodes if str(node.target) in SQUEEZES]:
        before, after = node.args[0].meta["val"], node.meta["val"]
        if before.ndim == after.ndim and all(user.op != "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    program.graph_module.recompile()


def _fault(model: Any, spec: CallSpec) -> str | None:
    """Why a file cannot be what a call runs, or would reach outside of itself; None where it is as it should be."""
    if len(model.graph.input) != len(spec.tensors):
        return f"{len(model.graph.input)} inputs where the call has {len(spec.tensors)}"
    if spec.graph_results not in (None, len(model.graph.output)):
        return f"{len(model.graph.output)} results where the call has {spec.graph_results}"
    for message in _messages(model):
        kind = message.DESCRIPTOR.name
        if kind == "TensorProto" and (message.external_data or message.data_location):
            return "weights in another file"
        if kind in ("NodeProto", "FunctionProto") and message.domain not in DOMAINS:
            return f"an operator of {message.domain[:80]!r}"
    return None


def _fixed_sizes(model: Any, spec: CallSpec) -> dict[str, int]:
    """Return the sizes that a graph leaves free and the call does not: known ones are folded into the graph."""
    return {
        dim.dim_param: size
        for value, tensor in zip(model.graph.input, spec.tensors, strict=True)
        for dim, size in zip(value.type.tensor_type.shape.dim, tensor.shape, strict=False)
        if dim.dim_param and isinstance(size, int)
    }


def _messages(message: Any) -> Iterator[Any]:
    """A protobuf message and all that lie in it."""
    left = [message]
    while left:
        message = left.pop()
        yield message
        for field, value in message.ListFields():
            if field.message_type is not None:
                left += [value] if hasattr(value, "ListFields") else list(value)


def _started(content: bytes, names: list[str], sizes: dict[str, int], threads: int) -> Infer:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    for name, size in sizes.items():
        options.add_free_dimension_override_by_name(name, size)
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of its own kind, for whatever is not a model
        raise ArtifactError("ONNX Runtime cannot take the graph", found=first_line(error)) from error

    def infer(arrays: list[Any]) -> list[Any]:
        return list(session.run(None, dict(zip(names, arrays, strict=True))))

    return infer
