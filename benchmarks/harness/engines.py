"""Third-party engines as their users would call them, in the process that calls."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class ByEngine(nn.Module):
    """A module in a third-party engine, converted from its exported program at the first call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._call: Callable[..., Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            with torch.no_grad():
                program = torch.export.export(self.inner, args, kwargs)
                infer, spec = self.compiled(program), program.call_spec.out_spec
            assert spec is not None

            def call(*args: Any, **kwargs: Any) -> Any:
                found = infer([leaf.numpy() for leaf in tensors(args, kwargs)])
                return pytree.tree_unflatten([torch.from_numpy(array) for array in found], spec)

            self._call = call
        return self._call(*args, **kwargs)

    def compiled(self, program: torch.export.ExportedProgram) -> Callable[[list[Any]], list[Any]]:
        """Return a function of arrays that gives arrays of its own."""
        raise NotImplementedError


def tensors(args: Any, kwargs: Any = None) -> list[torch.Tensor]:
    """Return the tensors of a call in order."""
    return [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]


class ByOpenVino(ByEngine):
    """A module in OpenVINO, in f32, bf16 or int8: NNCF's defaults with these calls to calibrate, the rest in bf16."""

    def __init__(
        self, inner: nn.Module, precision: str, calibration: Sequence[Any] = (), *, transformer: bool = False
    ) -> None:
        super().__init__(inner)
        self.precision, self.calibration, self.transformer = precision, calibration, transformer

    def compiled(self, program: torch.export.ExportedProgram) -> Callable[[list[Any]], list[Any]]:
        import openvino as ov  # pyright: ignore[reportMissingImports]

        model = ov.convert_model(program)
        if self.precision == "int8":
            model = self._quantized(model)
        settings = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "bf16" if self.precision == "int8" else self.precision,
            "PERFORMANCE_HINT": "LATENCY",
        }
        request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()

        def infer(arrays: list[Any]) -> list[Any]:
            answers = request.infer(arrays)
            return [answers[place].copy() for place in range(len(answers))]

        return infer

    def _quantized(self, model: Any) -> Any:
        import nncf  # pyright: ignore[reportMissingImports]

        arrays = [[tensor.numpy() for tensor in tensors(call)] for call in self.calibration]
        return nncf.quantize(
            model,
            nncf.Dataset(arrays, lambda call: dict(enumerate(call))),
            subset_size=len(arrays),
            model_type=nncf.ModelType.TRANSFORMER if self.transformer else None,
        )


class ByOnnxRuntime(ByEngine):
    """A module in ONNX Runtime, in float32."""

    def compiled(self, program: torch.export.ExportedProgram) -> Callable[[list[Any]], list[Any]]:
        import onnxruntime  # pyright: ignore[reportMissingImports]

        file = io.BytesIO()
        exported: Any = torch.onnx.export(program, (), dynamo=True, verbose=False)
        exported.save(file)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(file.getvalue(), options, ["CPUExecutionProvider"])
        names = [each.name for each in session.get_inputs()]
        return lambda arrays: list(session.run(None, dict(zip(names, arrays, strict=True))))
