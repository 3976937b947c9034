"""Seeded faults in packages of code: the weight that is another is named, or that it is the code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from export_faults import FROZEN, Fault, Made, exchange_in_archive, made_or_skipped, named, negated, weight

from torchwright.exporter.export import _write
from torchwright.exporter.package import PACKAGE, empty_export
from torchwright.exporter.subject import Subject, make_subject
from torchwright.exporter.targets.aoti import MODEL
from torchwright.workloads.module import ModuleWorkload

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made_or_skipped("aoti", "fp32", tmp_path_factory.mktemp("aoti") / "made")


def of(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def fault(folder: Path, subject: Subject) -> None:
        before = weight(subject, name)
        exchange_in_archive(folder / MODEL, before, change(before))

    return fault


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        (of("blocks.1.up.weight", negated), "blocks.1.up"),
        (of("blocks.0.norm.weight", lambda tensor: tensor / 2), "blocks.0.norm"),
        (of("blocks.0.down.bias", torch.zeros_like), "blocks.0.down"),
    ],
    ids=["flipped", "halved", "stale"],
)
def test_a_weight_of_compiled_code_that_is_another_is_named(
    fault: Fault, wanted: str, made: Made, tmp_path: Path
) -> None:
    assert named([made.parting(fault, tmp_path / "spoiled")]) == wanted


def test_another_operator_in_compiled_code_is_told_from_a_weight(made: Made, tmp_path: Path) -> None:
    def fault(folder: Path, subject: Subject) -> None:
        program = subject.graph.program
        node = [n for n in program.graph.nodes if n.target is torch.ops.aten.gelu.default][1]
        node.target = torch.ops.aten.sigmoid.default
        try:
            _compile(made, subject, folder, tmp_path / "other")
        finally:
            node.target = torch.ops.aten.gelu.default

    assert "part in the code" in made.parting(fault, tmp_path / "spoiled")


def test_a_batch_frozen_in_compiled_code_is_named(made: Made, tmp_path: Path) -> None:
    def fault(folder: Path, subject: Subject) -> None:
        (x,) = subject.case.args
        one = ModuleWorkload(subject.original, (x[:1],))
        _compile(made, make_subject(one, fixed="one row"), folder, tmp_path / "other")

    findings = made.findings(fault, tmp_path / "spoiled")
    assert any(finding.startswith(FROZEN) for finding in findings), findings


def _compile(made: Made, subject: Subject, folder: Path, other: Path) -> None:
    """Put the package of another graph in place of the one in `folder`."""
    _write(empty_export(other), subject, made.target, "fp32", lambda text: None)
    (folder / MODEL).write_bytes((other / PACKAGE / MODEL).read_bytes())
