"""The contract of export targets, for every registered one; a target that cannot run here only gives its reason."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import torchwright as tw
from torchwright.core.errors import ArtifactError, RefusedTechnique, TorchwrightError, UnknownName
from torchwright.exporter.base import ExportTarget, GraphTarget, exports
from torchwright.exporter.export import check
from torchwright.exporter.subject import Subject, make_subject
from torchwright.exporter.verification.reference import PAST, calls_of
from torchwright.testing.examples import example
from torchwright.testing.models import Perceptron
from torchwright.workloads.accuracy import relative_error
from torchwright.workloads.module import ModuleWorkload

NAMES = exports.names()
LONG = {"aoti", "executorch", "litert"}
"""Targets that compile, or import, for ten seconds and more."""
PACKAGED = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in NAMES]
BATCHES = (1, 3, 8)
"""The example has the last one."""


class Branching(torch.nn.Module):
    """A model that no graph describes."""

    def forward(self, x_BE: torch.Tensor) -> torch.Tensor:
        return x_BE * 2 if x_BE.sum() > 0 else x_BE


def available(name: str) -> type[ExportTarget]:
    """Return a target; skip the test where the target cannot run or write here."""
    target = exports.get(name)
    if reason := target.unavailable() or target.unwritable():
        pytest.skip(reason)
    return target


def subject_for(target: type[ExportTarget], folder: Path) -> Subject:
    """Return a perceptron for targets that take graphs, else a small language model in a folder."""
    torch.manual_seed(0)
    workload = (
        ModuleWorkload(Perceptron(), torch.randn(BATCHES[-1], 64))
        if issubclass(target, GraphTarget)
        else example("language", folder)
    )
    return make_subject(workload, most=BATCHES[-1], ahead=target.largest_batch, fixed=target.fixed)


def check_declaration(target: type[ExportTarget]) -> None:
    """Assert that a target describes itself in full, and that its tables agree."""
    assert (target.__doc__ or "").strip()
    assert target.runtime
    assert target.tolerances
    assert all(0 < allowed < 1 for allowed in target.tolerances.values())
    named = {*target.rounding, *target.formats.values()}
    named |= {precision for each in target.delegates.values() for precision in each.precisions}
    assert named <= {*target.tolerances}, "a table names a precision without a tolerance"
    assert all(each.precisions for each in target.delegates.values())
    assert target.fixed is None or len(target.fixed.split()) > 2


def check_reasons(target: type[ExportTarget]) -> None:
    """Assert that a target says in words why it cannot run here, and imports no library to find out."""
    before = {*sys.modules}
    reasons = [target.unavailable(), target.unwritable()]
    own = {name.replace("-", "_") for name in target.libraries}
    assert not own & ({*sys.modules} - before)
    for reason in reasons:
        assert reason is None or len(reason.split()) > 2


def check_choices(target: type[ExportTarget]) -> None:
    """Assert that an unknown precision or delegate is refused with what is allowed."""
    first = next(iter(target.tolerances))
    with pytest.raises(RefusedTechnique) as refused:
        target.check_precision("fp7")
    assert first in str(refused.value)
    with pytest.raises(UnknownName if target.delegates else TorchwrightError):
        target.check_delegate("no such delegate")
    assert target.format_of([]) is None


def check_package(target: type[ExportTarget], folder: Path, precisions: Sequence[str] = ()) -> None:
    """Assert that a package, written and opened again, answers as the model does and leaves its inputs alone.

    Every batch size that the graph allows is asked, in each of `precisions`; without them in the target's first.
    """
    for precision in precisions or (target.check_precision(None, target.check_delegate(None)),):
        made = subject_for(target, folder / f"{precision}-model")
        calls = [call for call in calls_of(made) if call.name != PAST]
        package = folder / precision
        package.mkdir()
        written = target.write(made, precision, package)
        assert any(package.iterdir()), "the package has no file"
        assert all(count >= 0 for count in written.operators.values())
        run = target.open(package, made.graph.spec, threads=1)
        for call in calls:
            given = [tensor.clone() for tensor in call.tensors]
            found = run(call.tensors)
            assert [tensor.shape for tensor in found] == [tensor.shape for tensor in call.outputs]
            error = relative_error(call.outputs, found).value
            assert error <= target.tolerances[precision], f"{precision}, {call.name}: {error:.3g}"
            kept = [tensor.clone() for tensor in found]
            run(calls[0].tensors)
            for tensor, before in zip([*call.tensors, *found], [*given, *kept], strict=True):
                assert torch.equal(tensor, before), "a call changed its inputs, or an earlier answer"


def check_refusal(target: type[ExportTarget], folder: Path) -> None:
    """Assert that a model that no graph describes is refused in words, and that nothing is left of the package."""
    with pytest.raises(TorchwrightError) as refused:
        tw.export(Branching(), torch.randn(4, 8), to=target.name, out=folder / "out")
    assert len(str(refused.value).split()) > 3
    assert not (folder / "out").exists()


def check_verified(target: type[ExportTarget], folder: Path) -> None:
    """Assert that the verifier finds the package right, and that a changed file is refused."""
    model = subject_for(target, folder / "model")
    given = (
        (model.original, model.case.args)
        if issubclass(target, GraphTarget)
        else (str(folder / "model"), None)
    )
    made = tw.export(given[0], given[1], to=target.name, out=folder / "out")
    assert made.report["verdict"] == "holds", made.report["findings"]
    assert check(folder / "out").report["verdict"] == "holds"
    file = max((folder / "out" / "package").rglob("*"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(ArtifactError):
        check(folder / "out")


@pytest.mark.parametrize("name", NAMES)
class TestDeclaration:
    def test_a_target_describes_itself(self, name: str) -> None:
        check_declaration(exports.get(name))

    def test_a_reason_is_in_words_and_imports_nothing(self, name: str) -> None:
        check_reasons(exports.get(name))

    def test_unknown_choices_are_refused_with_what_is_allowed(self, name: str) -> None:
        check_choices(exports.get(name))


@pytest.mark.filterwarnings("ignore")
class TestPackage:
    @pytest.mark.parametrize("name", PACKAGED)
    def test_it_answers_as_the_model_does(self, name: str, tmp_path: Path) -> None:
        try:
            check_package(available(name), tmp_path)
        except RefusedTechnique as refusal:
            pytest.skip(f"{name} refuses this model: {refusal.reason}")

    @pytest.mark.slow
    @pytest.mark.parametrize("name", NAMES)
    def test_it_does_so_in_each_other_precision(self, name: str, tmp_path: Path) -> None:
        target = available(name)
        refused: dict[str, str] = {}
        for precision in target.precisions(target.check_delegate(None))[1:]:
            try:
                check_package(target, tmp_path, (precision,))
            except RefusedTechnique as refusal:
                refused[precision] = refusal.reason
        if refused:
            pytest.skip(f"{name} refuses this model: {refused}")

    @pytest.mark.parametrize("name", PACKAGED)
    def test_a_model_without_a_graph_is_refused_and_leaves_nothing(self, name: str, tmp_path: Path) -> None:
        check_refusal(available(name), tmp_path)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", NAMES)
    def test_the_verifier_finds_it_right_and_damage_is_refused(self, name: str, tmp_path: Path) -> None:
        check_verified(available(name), tmp_path)
