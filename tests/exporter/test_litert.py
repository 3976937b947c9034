"""LiteRT: what its converter's process says, and faults in its real files, each named with its layer."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import small

from torchwright.core.errors import ArtifactError, RefusedTechnique, WorkloadError
from torchwright.exporter.base import exports
from torchwright.exporter.export import export
from torchwright.exporter.subject import Subject, make_subject
from torchwright.exporter.targets import litert
from torchwright.exporter.targets.litert import MODEL, OUTPUTS, LiteRt
from torchwright.exporter.targets.litert_convert import _message
from torchwright.exporter.verification.locate import first_parting
from torchwright.exporter.verification.reference import calls_of, graph_values, layers_of, operator_keys
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of
from torchwright.workloads.accuracy import relative_error
from torchwright.workloads.module import ModuleWorkload


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Subject, Path]:
    """A package, half a minute in the making, and what it is of."""
    if reason := LiteRt.unavailable() or LiteRt.unwritable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("litert")
    torch.manual_seed(0)
    subject = make_subject(ModuleWorkload(*small()), fixed=LiteRt.fixed)
    LiteRt.write(subject, "fp32", folder)
    return subject, folder


def flipped(model: Any, keys: dict[str, str]) -> None:
    """The sign of a weight of the second block."""
    weight = constants(model, keys["linear_2"], (32, 16))[0]
    values = numbers(model, weight)
    values[:128] *= -1
    write(model, weight, values)


def halved(model: Any, keys: dict[str, str]) -> None:
    """The scale of the batch norm."""
    scale = constants(model, keys["batch_norm"], (1, 3, 1))[0]
    write(model, scale, numbers(model, scale) / 2)


def stale(model: Any, keys: dict[str, str]) -> None:
    """What the batch norm adds, of another training."""
    shift = constants(model, keys["batch_norm"], (1, 3, 1))[1]
    write(model, shift, numbers(model, shift) + 1)


def replaced(model: Any, keys: dict[str, str]) -> None:
    """The second block's gelu by a logistic function."""
    from ai_edge_litert import schema_py_generated as schema  # pyright: ignore[reportMissingImports]

    kind: Any = schema.OperatorCodeT()
    kind.builtinCode = kind.deprecatedBuiltinCode = schema.BuiltinOperator.LOGISTIC
    kind.version = 1
    model.operatorCodes.append(kind)
    graph = model.subgraphs[0]
    name = keys["gelu_1"].replace(".", ":")
    of_gelu = [one for one in graph.operators if name in graph.tensors[one.outputs[0]].name.decode()]
    of_gelu[-1].opcodeIndex = len(model.operatorCodes) - 1
    of_gelu[-1].builtinOptionsType, of_gelu[-1].builtinOptions = 0, None


def constants(model: Any, key: str, shape: tuple[int, ...]) -> list[Any]:
    """Tensors of an operator that have values in the file."""
    name = key.replace(".", ":")
    return [
        one
        for one in model.subgraphs[0].tensors
        if name in one.name.decode()
        and tuple(one.shape) == shape
        and model.buffers[one.buffer].data is not None
    ]


def numbers(model: Any, of: Any) -> Any:
    import numpy as np

    return np.frombuffer(bytes(model.buffers[of.buffer].data), np.float32).copy()


def write(model: Any, of: Any, values: Any) -> None:
    model.buffers[of.buffer].data = list(values.tobytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "layer"), [(flipped, "blocks.1.up"), (halved, "norm"), (stale, "norm"), (replaced, "blocks.1")]
)
def test_the_layer_of_a_fault_in_a_file_is_named(
    fault: Callable[[Any, dict[str, str]], None], layer: str, made: tuple[Subject, Path], tmp_path: Path
) -> None:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema  # pyright: ignore[reportMissingImports]

    subject, folder = made
    program, spec, tensors = subject.graph.program, subject.graph.spec, tensors_of(subject.case)
    wanted, layers = graph_values(program, tensors), layers_of(program)
    assert first_parting(wanted, LiteRt.values(folder, spec, tensors), layers, 1e-3, named=True) is None
    model: Any = schema.ModelT.InitFromPackedBuf((folder / MODEL).read_bytes(), 0)
    shutil.copyfile(folder / OUTPUTS, tmp_path / OUTPUTS)
    fault(model, {node.name: key for node, key in operator_keys(program).items()})
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    (tmp_path / MODEL).write_bytes(builder.Output())
    (answer,) = LiteRt.open(tmp_path, spec, 1)(tensors)
    assert relative_error([calls_of(subject)[0].outputs[0]], [answer]).value > 1e-3
    found = first_parting(wanted, LiteRt.values(tmp_path, spec, tensors), layers, 1e-3, named=True)
    assert found is not None
    assert found.module == layer
    assert "export_models.py" in found.line


@pytest.mark.slow
def test_a_file_that_is_none_is_refused(made: tuple[Subject, Path], tmp_path: Path) -> None:
    subject, folder = made
    (tmp_path / MODEL).write_bytes((folder / MODEL).read_bytes()[:100])
    with pytest.raises(ArtifactError, match="cannot be read"):
        LiteRt.open(tmp_path, subject.graph.spec, 1)


def test_a_missing_converter_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with exports.adding({"litert": type("Runs", (LiteRt,), {"unavailable": lambda: None})}):
        monkeypatch.delenv(litert.PYTHON, raising=False)
        with pytest.raises(WorkloadError, match="'litert' cannot run here") as refused:
            export(*small(), to="litert", out=tmp_path / "out")
        assert "litert/bin/pip install 'litert-torch==0.10.*' 'torch==" in str(refused.value)
        monkeypatch.setenv(litert.PYTHON, str(tmp_path / "nowhere"))
        with pytest.raises(WorkloadError, match="is no program"):
            export(*small(), to="litert", out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "raises", "said"),
    [
        ('print(\'{"failed": "KeyError: no such operator"}\')', RefusedTechnique, "no such operator"),
        ("import os; os.kill(os.getpid(), 9)", RefusedTechnique, "ended by signal 9"),
        ("print('out of luck'); raise SystemExit(3)", RefusedTechnique, "exit code 3: out of luck"),
        ("print('{\"errno\": 28}')", OSError, "No space"),
    ],
)
def test_what_the_converters_process_says(
    script: str, raises: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (converter := tmp_path / "converter.py").write_text(script)
    monkeypatch.setenv(litert.PYTHON, sys.executable)
    with pytest.raises(raises, match=said):
        litert._converted(*[tmp_path] * 3, script=converter)  # pyright: ignore[reportPrivateUsage]


def test_an_interrupt_ends_the_converter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    (converter := tmp_path / "converter.py").write_text(script)
    monkeypatch.setenv(litert.PYTHON, sys.executable)

    def check() -> None:
        if (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    monkeypatch.setattr(litert.interrupts, "check", check)
    with pytest.raises(KeyboardInterrupt):
        litert._converted(*[tmp_path] * 3, script=converter)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_the_first_cause_is_told_in_a_line() -> None:
    fault = RuntimeError("outer")
    fault.__cause__ = ValueError("\n  no lowering of aten.foo\nand a stack")
    assert _message(fault) == {"failed": "ValueError: no lowering of aten.foo"}
    assert _message(OSError(28, "full")) == {"errno": 28}
