"""Seeded faults in the files of ONNX and OpenVINO: the verifier names each, and its layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from export_faults import (
    FROZEN,
    Fault,
    Made,
    every,
    exchange,
    made_or_skipped,
    named,
    negated,
    unshifted,
    weight,
)

from torchwright.exporter.subject import Subject
from torchwright.exporter.targets import onnx_file
from torchwright.exporter.targets.openvino_ir import MODEL
from torchwright.exporter.verification.locate import ERRORS

# --------------------------------------------------------------------------------------------------------- ONNX


def in_onnx(change: Callable[[Any], None]) -> Fault:
    def fault(folder: Path, subject: Subject) -> None:
        import onnx

        model = onnx.load(folder / onnx_file.MODEL)
        change(model)
        onnx.save(model, folder / onnx_file.MODEL)

    return fault


def constant(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def of(model: Any) -> None:
        from onnx import numpy_helper

        (found,) = [one for one in model.graph.initializer if one.name == name]
        value = change(torch.from_numpy(numpy_helper.to_array(found).copy()))
        found.CopyFrom(numpy_helper.from_array(value.numpy(), name))

    return in_onnx(of)


def onnx_replaced(model: Any) -> None:
    node = [node for node in model.graph.node if node.op_type == "Gelu"][1]
    node.op_type = "Sigmoid"
    del node.attribute[:]


def onnx_frozen(model: Any) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor / 2


def narrow(tensor: torch.Tensor) -> torch.Tensor:
    """Of a range that was found when the activations were smaller."""
    return tensor / 8


ONNX: Mapping[str, Mapping[str, tuple[Fault, str]]] = {
    "fp32": {
        "flipped": (constant("val_8", negated), "blocks.1.up"),
        "halved": (constant("blocks.0.norm.weight", halved), "blocks.0.norm"),
        "replaced": (in_onnx(onnx_replaced), "blocks.1"),
        "stale": (unshifted, "norm"),
        "frozen": (in_onnx(onnx_frozen), FROZEN),
    },
    "int8": {
        "flipped": (constant("val_8_quantized", lambda codes: negated(codes)), "blocks.1.up"),
        "halved": (constant("val_4_scale", halved), "blocks.0.down"),
        "replaced": (in_onnx(onnx_replaced), "blocks.1"),
        "stale": (constant("gelu_1_scale", narrow), "blocks.1.down"),
        "frozen": (in_onnx(onnx_frozen), FROZEN),
    },
}


# ----------------------------------------------------------------------------------------------------- OpenVINO


def in_bin(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def fault(folder: Path, subject: Subject) -> None:
        before = weight(subject, name)
        exchange(folder / MODEL / "graph.bin", before, change(before))

    return fault


def before_layer(layer: str, kind: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """Change the constant of a type that lies before a layer in the file's order, nearest to it."""

    def fault(folder: Path, subject: Subject) -> None:
        text = (folder / MODEL / "graph.xml").read_text()
        start = text.index(f'name="{layer}"')
        found = re.findall(rf'element_type="{kind}" shape="[^"]*" offset="(\d+)" size="(\d+)"', text[:start])
        offset, size = map(int, found[-1])
        content = bytearray((folder / MODEL / "graph.bin").read_bytes())
        types = {"i8": torch.int8, "f32": torch.float32}
        value = torch.frombuffer(
            content, dtype=types[kind], offset=offset, count=size // types[kind].itemsize
        )
        value.copy_(change(value.clone()))
        (folder / MODEL / "graph.bin").write_bytes(content)

    return fault


def ir_replaced(folder: Path, subject: Subject) -> None:
    file = folder / MODEL / "graph.xml"
    text = file.read_text()
    start = text.index('type="Gelu"', text.index('type="Gelu"') + 1)
    changed = text[start:].replace('type="Gelu" version="opset7"', 'type="Sigmoid" version="opset1"', 1)
    changed = changed.replace('<data approximation_mode="ERF" />', "", 1)
    file.write_text(text[:start] + changed)


def ir_frozen(folder: Path, subject: Subject) -> None:
    import openvino as ov

    graph, constants = folder / MODEL / "graph.xml", folder / MODEL / "graph.bin"
    model = ov.Core().read_model(graph.read_text(), ov.Tensor(bytearray_of(constants)))
    model.reshape([1, 4, 16])
    ov.save_model(model, graph, compress_to_fp16=False)


def bytearray_of(file: Path) -> Any:
    import numpy as np

    return np.frombuffer(bytearray(file.read_bytes()), dtype=np.uint8)


OPENVINO: Mapping[str, Mapping[str, tuple[Fault, str]]] = {
    "fp32": {
        "flipped": (in_bin("blocks.1.up.weight", negated), "blocks.1.up"),
        "halved": (in_bin("blocks.0.norm.weight", halved), "blocks.0.norm"),
        "replaced": (ir_replaced, "blocks.1"),
        "stale": (unshifted, "norm"),
        "frozen": (ir_frozen, FROZEN),
    },
    "int8": {
        "flipped": (before_layer("linear_2/aten.linear.default/MatMul", "i8", negated), "blocks.1.up"),
        "halved": (before_layer("linear_1/aten.linear.default/MatMul", "f32", halved), "blocks.0.down"),
        "replaced": (ir_replaced, "blocks.1"),
        "stale": (before_layer("gelu_1/aten.gelu.default/Gelu/fq_output_0", "f32", narrow), "blocks.1"),
        "frozen": (ir_frozen, FROZEN),
    },
}


# -------------------------------------------------------------------------------------------------------- both

EVERY = every({"onnx": ONNX, "openvino": OPENVINO})


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    to, precision = request.param
    return made_or_skipped(to, precision, tmp_path_factory.mktemp("made") / "made")


@pytest.mark.parametrize(("made", "spoil", "wanted"), EVERY, indirect=["made"], scope="module")
def test_a_fault_is_named(made: Made, spoil: Fault, wanted: str, tmp_path: Path) -> None:
    if not list(made.folder.rglob(ERRORS)):
        assert made.findings(None, made.folder) == []
    findings = made.findings(spoil, tmp_path / "spoiled")
    if wanted == FROZEN:
        assert any(finding.startswith(FROZEN) for finding in findings), findings
    else:
        assert named(findings) == wanted, findings
