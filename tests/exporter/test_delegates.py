"""Delegates: what is lowered to one that is not here is never called proved, and what cannot be is refused in words."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from export_models import Drowned, small

from torchwright.cli.export import command
from torchwright.core.errors import RefusedTechnique, UnknownName, WorkloadError
from torchwright.exporter.base import Delegate, exports
from torchwright.exporter.export import check, export
from torchwright.exporter.package import EXPORT, PACKAGE
from torchwright.exporter.targets.aoti import Aoti
from torchwright.exporter.targets.executorch.delegates import DELEGATES
from torchwright.exporter.targets.executorch.target import MODEL, ExecuTorch
from torchwright.exporter.targets.pt2 import Pt2


class There(Delegate):
    def elsewhere(self) -> str | None:
        return "this runtime has no such thing"


def pt2_with(there: Delegate) -> AbstractContextManager[None]:
    """Register a target with a delegate that runs here, and another one."""
    delegates = {"here": Delegate(precisions=("fp32",)), "there": there}
    return exports.adding({"pt2": type("Delegating", (Pt2,), {"delegates": delegates})})


@pytest.fixture
def _two() -> Iterator[None]:
    """A target with a delegate that runs here, and one that does not."""
    with pt2_with(There(precisions=("fp32",), fixed="it is")):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_two")
def test_what_does_not_run_here_is_written_and_not_proved(tmp_path: Path) -> None:
    made = export(*small(), to="pt2", delegate="there", out=tmp_path / "out")
    assert made.report["verdict"] == "not run here"
    assert made.report["findings"] == ["lowered, not run here: this runtime has no such thing"]
    assert made.report["calls"] == []
    assert any("that of the example: it is" in note for note in made.export.notes)
    assert (tmp_path / "out" / EXPORT).is_file()
    for refused in (lambda: check(tmp_path / "out"), lambda: made.run(*small()[1])):
        with pytest.raises(WorkloadError, match=r"lowered to there, and does not run here.*no such thing"):
            refused()
    told = CliRunner().invoke(
        command, ["bundled", "--to", "pt2", "--delegate", "there", "--max-size", "9MB", "--quiet"]
    )
    assert isinstance(told.exception, WorkloadError)
    assert "a budget is kept by what runs here" in str(told.exception)
    with pt2_with(Delegate(precisions=("fp32",))):  # on a machine that has it
        assert check(tmp_path / "out").report["verdict"] == "holds"


@pytest.mark.slow
@pytest.mark.usefixtures("_two")
def test_the_first_delegate_is_taken(tmp_path: Path) -> None:
    made = export(*small(), to="pt2", out=tmp_path / "out")
    assert (made.export.delegate, made.report["verdict"]) == ("here", "holds")


def test_what_cannot_be_lowered_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkloadError, match="aoti has no delegates"):
        Aoti.check_delegate("vulkan")
    with pytest.raises(UnknownName, match="did you mean 'vulkan'"):
        ExecuTorch.check_delegate("vulcan")
    for name in ("fp32", "8da4w"):
        with pytest.raises(RefusedTechnique, match=f"no precision '{name}' for ethos-u55.*int8"):
            ExecuTorch.check_precision(name, "ethos-u55")
    assert ExecuTorch.check_precision(None, "ethos-u85") == "int8"
    monkeypatch.setattr(importlib.util, "find_spec", _no_package)
    with pytest.raises(WorkloadError, match=r"tosa_serializer, ethosu\.vela cannot .*executorch\[ethos-u\]"):
        ExecuTorch.check_delegate("ethos-u55")
    with pytest.raises(WorkloadError, match="coremltools cannot be imported: pip install"):
        ExecuTorch.check_delegate("coreml")


def _no_package(name: str) -> Any:
    if "." in name:
        raise ModuleNotFoundError(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DELEGATES if name != "xnnpack"])
def test_a_model_is_lowered(name: str, tmp_path: Path) -> None:
    if reason := ExecuTorch.unavailable() or DELEGATES[name].missing():
        pytest.skip(reason)
    torch.manual_seed(0)
    made = export(*small(), to="executorch", delegate=name, out=tmp_path / "out")
    title, program = DELEGATES[name].title, (tmp_path / "out" / PACKAGE / MODEL).read_bytes()
    assert DELEGATES[name].backend.encode() in program
    assert b"XnnpackBackend" not in program
    # All but the casts to 8 bits and back, or the convolution in one dimension.
    assert made.export.operators[f"delegated to {title}"] > 8
    alone = made.export.operators["fallen back to portable kernels"]
    assert alone == sum(
        int(note.split(", ")[1].split()[0]) for note in made.export.notes if "not dele" in note
    )
    if reason := DELEGATES[name].elsewhere():
        assert made.report["findings"][0] == f"lowered, not run here: {reason}"
        assert made.report["verdict"] == "not run here"
    else:
        assert made.report["verdict"] == "holds"


@pytest.mark.slow
def test_what_rounding_throws_off_is_told_of_what_is_not_run_either(tmp_path: Path) -> None:
    if reason := ExecuTorch.unavailable() or DELEGATES["ethos-u55"].missing():
        pytest.skip(reason)
    made = export(
        Drowned().eval(), torch.randn(8, 16), to="executorch", delegate="ethos-u55", out=tmp_path / "out"
    )
    assert any("part at last, aten.linear (" in finding for finding in made.report["findings"])
