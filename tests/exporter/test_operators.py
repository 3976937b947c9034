"""A refusal names the operator that another library lacks, and where the model calls it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torchwright.exporter.verification.operators import refused_graph


class Shift(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return (a << 2) + 1


class Bessel(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return torch.special.bessel_j1(a)


def exported(inner: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    model = nn.Sequential(nn.Identity(), nn.Sequential(inner))
    return torch.export.export(model.eval(), (example,))


WHOLE = torch.tensor([1, 2, 3])
HERE = __file__


@pytest.mark.parametrize(
    "text",
    [
        "Check 'false' failed at report.cpp:151:\nSummary:\n-- No conversion rule found for operations: "
        "aten.__lshift__.Scalar",
        "Lowering not found for aten.__lshift__.Scalar",
        "RuntimeError: Missing out variants: {'aten::__lshift__'}",
        "LoweringException: NotImplementedError\n  target: aten.__lshift__.Scalar\n  args[0]: TensorBox",
        "No ONNX function found for <OpOverload(op='aten.__lshift__', overload='Scalar')>. Failure message: none",
    ],
)
def test_the_operator_that_a_library_names_is_found_in_the_model(text: str):
    error = refused_graph("it cannot", exported(Shift(), WHOLE), RuntimeError(text))
    assert error.found is not None
    assert error.found.startswith(f"aten.__lshift__ in 1.0 ({HERE}, line 14): ")
    assert error.next is not None
    assert "pt2" in error.next


def test_the_node_that_a_library_names_is_the_one_of_several():
    program = exported(nn.Sequential(Shift(), Shift()), WHOLE)
    second = [node for node in program.graph.nodes if "lshift" in str(node.target)][1]
    found = refused_graph(
        "it cannot", program, f"Error when translating node %{second.name} : [num_users=1]"
    ).found
    assert found is not None
    assert found.startswith("aten.__lshift__ in 1.0.1 (")


def test_the_innermost_cause_knows_the_operator():
    cause, outer = ValueError("no kernel for aten.__lshift__"), RuntimeError("cannot convert")
    outer.__cause__ = cause
    found = refused_graph("it cannot", exported(Shift(), WHOLE), outer).found
    assert found is not None
    assert "aten.__lshift__ in 1.0" in found


def test_an_operator_under_the_name_of_its_decomposition_is_found_too():
    program = exported(Bessel(), torch.randn(3))
    found = refused_graph("it cannot", program, "No ONNX function found for op='prims.bessel_j1'").found
    assert found is not None
    assert found.startswith("aten.special_bessel_j1 in 1.0")


def test_a_graph_that_is_printed_after_the_reason_blames_nobody():
    text = "out of memory\n%add = call_function[target=torch.ops.aten.add.Tensor](args = (%a, 1))"
    assert refused_graph("it cannot", exported(Shift(), WHOLE), text).found == "out of memory"


def test_a_reason_without_an_operator_stays_as_it_is():
    error = refused_graph("it cannot", exported(Shift(), WHOLE), RuntimeError("error 0x1"))
    assert (error.found, error.next) == ("error 0x1", None)


def test_an_operator_that_no_message_names_is_found_by_converting_each_alone():
    class Inverse(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return torch.linalg.inv(a.relu() + torch.eye(3)) * 2

    asked: list[str] = []

    def convert(program: torch.export.ExportedProgram) -> None:
        (name,) = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        asked.append(name)
        if "linalg_inv" in name:
            raise AttributeError("'WithEffects' object has no attribute '_schema'")

    text = "'WithEffects' object has no attribute '_schema'"
    error = refused_graph("it cannot", exported(Inverse(), torch.randn(3, 3)), AttributeError(text), convert)
    assert error.found is not None
    assert error.found.startswith("aten.linalg_inv")
    assert f" in 1.0 ({HERE}, line " in error.found
    assert error.found.endswith(text)
    assert asked[0].startswith("aten.relu")
