"""Exports: every target answers as the model does, seeded faults are found and their layers named, bad input."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import (
    Bounded,
    Branches,
    Counts,
    Drowned,
    Gates,
    Logs,
    Remembers,
    Small,
    Sums,
    Unbounded,
    small,
)
from safetensors import SafetensorError
from torch import nn
from torch.export import ExportedProgram

import torchwright as tw
from masked_attention import Attention, causal
from torchwright.cli import main
from torchwright.core.errors import (
    ArtifactError,
    ModelError,
    RefusedTechnique,
    RegressionFound,
    UnknownName,
    WorkloadError,
)
from torchwright.exporter.base import ExportTarget, GraphTarget, exports
from torchwright.exporter.export import check
from torchwright.exporter.package import PACKAGE
from torchwright.exporter.subject import Subject, make_subject
from torchwright.exporter.targets.pt2 import MODEL, Pt2, save
from torchwright.exporter.verification.locate import first_parting, smallest
from torchwright.exporter.verification.reference import PAST, calls_of, graph_values, layers_of
from torchwright.exporter.verification.verify import REFUSED, RIGHT, Tried, _sizes
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of
from torchwright.workloads.accuracy import relative_error
from torchwright.workloads.module import ModuleWorkload


def subject(model: nn.Module | None = None, inputs: Any = None, most: int | None = None) -> Subject:
    made = small() if model is None else (model, inputs)
    return make_subject(ModuleWorkload(*made), most=most)


@pytest.mark.slow
def test_memory_is_planned_for_the_example_at_least() -> None:
    """An example of 256 rows was refused by its own package, planned for 16."""
    model, _ = small()
    for rows, most, largest in ((3, None, 16), (40, None, 40), (40, 8, 8)):
        made = make_subject(ModuleWorkload(model, (torch.randn(rows, 4, 16),)), most=most, ahead=True)
        assert [high for _, high in made.graph.spec.sizes.values()] == [largest]
        assert next(call.sizes for call in calls_of(made)) == {"s77": min(rows, largest)}
    made = make_subject(ModuleWorkload(model, (torch.randn(3, 4, 16),)), most=1, ahead=True)
    assert made.graph.frozen == "one row was asked for"
    assert calls_of(made)[0].outputs[0].shape[0] == 1


GRAPHS = [name for name, cls in exports if issubclass(cls, GraphTarget)]
SLOW = {"aoti", "executorch", "litert"}
"""Compiles C++; takes a quarter of a minute to import and lower, or half a one."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in GRAPHS]
)
def test_a_target_answers_as_the_model_at_any_number_of_rows(name: str, tmp_path: Path) -> None:
    target = available(name)
    made = make_subject(ModuleWorkload(*small()), most=8, fixed=target.fixed)
    precision = target.check_precision(None)
    written = target.write(made, precision, tmp_path)
    assert written.operators
    assert made.graph.frozen == target.fixed
    run = target.open(tmp_path, made.graph.spec, 1)
    for call in calls_of(made):
        if call.name != PAST:
            found = relative_error(call.outputs, run(call.tensors)).value
            assert found <= target.tolerances[precision], call.name


@pytest.mark.parametrize("name", ["pt2", "onnx", "openvino", pytest.param("aoti", marks=pytest.mark.slow)])
def test_a_query_that_sees_no_key_has_zeros_as_in_pytorch(name: str, tmp_path: Path) -> None:
    target, model, x = available(name), Attention(2, None, False).eval(), torch.randn(4, 8, 16)
    made = make_subject(ModuleWorkload(model, (x, causal())))
    target.write(made, target.check_precision(None), tmp_path)
    run = target.open(tmp_path, made.graph.spec, 1)
    for mask in (causal(), causal(padding=3)):
        with torch.no_grad():
            assert relative_error([model(x, mask)], run([x, mask])).value < 1e-5


@pytest.mark.parametrize("name", exports.names())
def test_a_target_says_what_it_is(name: str) -> None:
    target = exports.get(name)
    assert target.__doc__
    assert target.runtime
    assert all(0 < allowed < 1 for allowed in target.tolerances.values())
    with pytest.raises(RefusedTechnique, match=next(iter(target.tolerances))):
        target.check_precision("fp7")
    reason = target.unavailable() or target.unwritable()
    assert reason is None or "install" in reason or "compiler" in reason


def available(name: str) -> type[ExportTarget]:
    target = exports.get(name)
    if reason := target.unavailable() or target.unwritable():
        pytest.skip(reason)
    return target


# ------------------------------------------------------------------------------------------------- seeded faults


def flipped(program: ExportedProgram) -> None:
    program.state_dict["blocks.1.up.weight"].data[:8] *= -1


def halved(program: ExportedProgram) -> None:
    program.state_dict["blocks.0.norm.weight"].data *= 0.5


def stale(program: ExportedProgram) -> None:
    program.state_dict["norm.running_mean"].zero_()


def replaced(program: ExportedProgram) -> None:
    node = [n for n in program.graph.nodes if n.target is torch.ops.aten.gelu.default][1]
    node.target = torch.ops.aten.sigmoid.default


FAULTS: dict[Callable[[ExportedProgram], None], str] = {
    flipped: "blocks.1.up",
    halved: "blocks.0.norm",
    stale: "norm",
    replaced: "blocks.1",
}


@pytest.mark.plain("halved")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_layer_of_a_seeded_fault_is_named(
    fault: Callable[[ExportedProgram], None], tmp_path: Path
) -> None:
    made = subject()
    Pt2.write(made, "fp32", tmp_path)
    spoil(tmp_path, fault)
    tensors = tensors_of(made.case)
    wanted = graph_values(made.graph.program, tensors)
    found = Pt2.values(tmp_path, made.graph.spec, tensors)
    parting = first_parting(wanted, kinds_kept(wanted, found), layers_of(made.graph.program), 1e-3)
    assert parting is not None
    assert parting.module == FAULTS[fault]
    assert parting.before < 1e-4 < 1e-3 < (parting.error or 0)
    assert FAULTS[fault] in str(parting)
    assert "export_models.py" in parting.line


def kinds_kept(wanted: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Values by their place, as a format gives them that keeps the name of what it replaced."""
    return dict(zip(wanted, found.values(), strict=True))


def spoil(folder: Path, fault: Callable[[ExportedProgram], None]) -> None:
    program = torch.export.load(folder / MODEL)
    fault(program)
    torch.export.save(program, folder / MODEL)


def test_the_layer_at_which_8_bits_do_not_suffice_is_named(tmp_path: Path) -> None:
    target = available("onnx")
    outputs, allowed = {}, target.tolerances["int8"]
    for made in (subject(), subject(Drowned().eval(), torch.randn(8, 16))):
        folder = tmp_path / made.name
        folder.mkdir()
        assert target.write(made, "int8", folder).operators["QuantizeLinear"]
        assert len(list(folder.iterdir())) == 1
        tensors = tensors_of(made.case)
        error = relative_error(made.answer(made.case), target.open(folder, made.graph.spec, 1)(tensors)).value
        wanted = graph_values(made.graph.program, tensors)
        values = target.values(folder, made.graph.spec, tensors)
        outputs[made.name] = error, first_parting(wanted, values, layers_of(made.graph.program), allowed)
    (sound, nothing), (drowned, parting) = outputs.values()
    assert sound < allowed < drowned
    assert nothing is None
    assert parting is not None
    assert (parting.module, parting.operator) == ("last", "aten.linear")


def test_what_is_sound_parts_nowhere() -> None:
    made = subject()
    values = graph_values(made.graph.program, tensors_of(made.case))
    assert first_parting(values, values, layers_of(made.graph.program), 0.0) is None


def test_frozen_sizes_are_said() -> None:
    tried = [
        Tried(call="example", sizes={"rows": 3}, outcome=REFUSED, why="ValueError: 3 rows"),
        Tried(call="smallest", sizes={"rows": 1}, outcome=RIGHT, error=0.0),
        Tried(call="largest", sizes={"rows": 9}, outcome=REFUSED, why="ValueError: 9 rows"),
        Tried(call=PAST, sizes={"rows": 10}, outcome=REFUSED, why="ValueError: 10 rows"),
    ]
    first, *others = _sizes(tried)
    assert "frozen: only those of the smallest call" in first
    assert len(others) == 2  # that one past is refused is as it should be


def test_the_fewest_weights_that_make_things_right() -> None:
    names = [f"w{index}" for index in range(7)]
    for wrong in [*itertools.combinations(names, 1), ("w0", "w1"), ("w5", "w6")]:
        found = smallest(names, lambda replaced, wrong=wrong: set(wrong) <= set(replaced))
        assert set(wrong) <= set(found)
        assert len(wrong) > 1 or found == list(wrong)
    assert smallest(names, lambda replaced: False) == []
    assert smallest(names, lambda replaced: True) == []


# ------------------------------------------------------------------------------------------ from end to end


@pytest.mark.slow
def test_a_package_is_verified_and_its_damage_found(tmp_path: Path) -> None:
    model, inputs = small()
    out = tmp_path / "out"
    made = tw.export(model, inputs, to="pt2", out=out)
    report = made.report
    assert report["verdict"] == "holds", report
    assert [row["outcome"] for row in report["calls"]] == [RIGHT] * 4
    assert report["call_s"] > 0 < report["eager_call_s"]
    assert report["size_bytes"] == (out / PACKAGE / MODEL).stat().st_size
    torch.testing.assert_close(made.run(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
    assert json.loads((out / "export.json").read_text())["report"]["verdict"] == "holds"
    spoil(out / PACKAGE, flipped)
    with pytest.raises(ArtifactError, match=r"changed, missing or added: package/model\.pt2"):
        check(out)
    with pytest.raises(RegressionFound, match=r"outputs part at blocks\.1\.up") as caught:
        check(out, trust=True)
    assert caught.value.facts["parting"]["operator"] == "aten.linear"
    with pytest.raises(ArtifactError, match="exists and is not"):
        tw.export(model, inputs, to="pt2", out=out)


@pytest.mark.slow
def test_a_batch_frozen_at_one_is_found(tmp_path: Path) -> None:
    model, (x,) = small()
    out = tmp_path / "out"
    tw.export(model, (x,), to="pt2", out=out)
    torch.export.save(torch.export.export(model, (x[:1],)), out / PACKAGE / MODEL)
    with pytest.raises(RegressionFound, match="sizes are frozen: only those of the smallest call") as caught:
        check(out, trust=True)
    outcomes = {row["call"]: row["outcome"] for row in caught.value.facts["calls"]}
    assert outcomes == {"example": REFUSED, "smallest": RIGHT, "largest": REFUSED, PAST: REFUSED}


# ----------------------------------------------------------------------------------------------- bad input


def test_an_unknown_target_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownName, match="did you mean 'onnx'"):
        tw.export(*small(), to="onxx")
    assert main(["export", "export_models:small", "--to", "onxx", "--quiet"]) == 2
    assert "did you mean 'onnx'" in capsys.readouterr().err
    assert main(["export", "--quiet"]) == 2
    assert main(["export", "--check", "nowhere", "--to", "pt2"]) == 2
    assert main(["export", "--check", "nowhere", "--quiet"]) == 2


def test_a_missing_runtime_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(WorkloadError, match=r"onnx .*pip install 'torchwright\[onnxruntime\]'"):
        tw.export(*small(), to="onnx")


def test_outputs_that_are_no_numbers_are_refused_with_their_module(tmp_path: Path) -> None:
    model, inputs = small()
    model.get_parameter("blocks.1.up.bias").data[0] = float("nan")
    with pytest.raises(ModelError, match=r"NaN of \d+, first in blocks\.1\.up"):
        tw.export(model, inputs, to="pt2", out=tmp_path / "out")
    with pytest.raises(ModelError, match="first in the model itself's own code, before last"):
        tw.export(Logs().eval(), torch.randn(3, 4), to="pt2", out=tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_model_that_changes_a_buffer_is_told_its_line(tmp_path: Path) -> None:
    with pytest.raises(RefusedTechnique, match=r"`self\.seen \+= 1` changes .*give the new one back"):
        tw.export(Sums().eval(), torch.randn(3, 4), to="pt2", out=tmp_path / "out")
    with pytest.raises(RefusedTechnique, match=r"`self\.seen \+= 1` changes"):
        tw.export(Counts().eval(), torch.randn(3, 4), to="pt2", out=tmp_path / "out")


def test_a_model_that_is_no_graph_is_told_its_line_and_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        RefusedTechnique, match=r"export_models\.py, line \d+: `if x\.sum\(\) > 0:.*torch\.cond"
    ):
        tw.export(Branches().eval(), torch.randn(3, 4), to="pt2", out=tmp_path / "out")
    with pytest.raises(RefusedTechnique, match=r"`if x\.mean\(\)\.item\(\) > 0\.1:` \(data-dep.*torch\.cond"):
        tw.export(Gates().eval(), torch.randn(3, 4), to="pt2", out=tmp_path / "out")
    with pytest.raises(RefusedTechnique, match=r"`count = int\(x\[0, 0\]\.item\(\)\)` .*torch\._check"):
        tw.export(Unbounded().eval(), torch.full((3, 4), 5.0), to="pt2", out=tmp_path / "out")
    assert "def forward" not in capsys.readouterr().err  # torch prints its graph there
    torch.export.export(Bounded().eval(), (torch.full((3, 4), 5.0),))
    with pytest.raises(ModelError, match="differently the second time"):
        tw.export(Remembers().eval(), torch.randn(3, 4), to="pt2", out=tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_nothing_is_left_of_an_export_that_was_cut_short(error: BaseException, tmp_path: Path) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise error

    failing = exports.adding({"pt2": type("Failing", (Pt2,), {"convert": fail})})
    with failing, pytest.raises(type(error)):
        tw.export(*small(), to="pt2", out=tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_full_disk_as_safetensors_tells_it_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **more: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("torchwright.optimization.engines.compiled.program.save_file", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as raised:
        tw.export(*small(), to="pt2", out=tmp_path / "out")
    assert raised.value.errno == errno.ENOSPC
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_an_error_and_no_abort() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        save(subject().graph.program, Path("/dev/full"))  # torch's own writer would end this process


def test_a_model_whose_rows_cannot_vary_is_exported_for_its_own() -> None:
    class Flat(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(12)

    made = subject(Flat().eval(), torch.randn(3, 4))
    assert made.graph.frozen is not None
    assert not made.graph.spec.sizes


def test_the_weights_of_the_callers_model_are_left_alone(tmp_path: Path) -> None:
    model = Small().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Pt2.write(subject(model, torch.randn(3, 4, 16)), "fp32", tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
