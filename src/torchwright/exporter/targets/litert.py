# pyright: basic, reportMissingImports=false
"""LiteRT: a .tflite for phones and small machines. Its converter wants an environment of its own; its runtime none."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.export.graph_signature import OutputKind, TensorArgument

from torchwright.core import system
from torchwright.core.errors import ArtifactError, RefusedTechnique, first_line
from torchwright.core.json_file import read_json, typed
from torchwright.core.process import interrupts
from torchwright.exporter.base import GraphTarget, Run, Values, Written
from torchwright.exporter.targets.pt2 import save
from torchwright.exporter.verification.operators import refused_graph
from torchwright.exporter.verification.reference import operator_keys
from torchwright.optimization.engines.compiled.program import ignore_library_warnings
from torchwright.optimization.engines.rewrites.real_constants import real_constants

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

    from torchwright.optimization.engines.dispatch.spec import CallSpec
    from torchwright.optimization.techniques.base import Target

MODEL, OUTPUTS = "model.tflite", "outputs.json"
"""The file of output keys, next to the model: the operators of its outputs, whose tensors have other names."""
PYTHON = "TORCHWRIGHT_LITERT"
"""The variable that names the Python of an environment with litert-torch."""
SCRIPT = Path(__file__).with_name("litert_convert.py")
SECONDS = 1800.0
"""A conversion that takes longer hangs."""
NAMED = re.compile(r"tw/tw_([^;/]+);")
"""The key of an operator in the name of a tensor; where several were fused, the last is what comes out."""
SIGNATURE = "serving_default"
NARROW = {"int64": "int32", "float64": "float32", "bfloat16": "float32"}
"""The converter's replacements for types that small machines lack."""


@dataclass(frozen=True)
class Outputs:
    """Facts about the outputs that the model's file does not hold."""

    keys: tuple[str | None, ...]
    """The key of each output's operator."""


class LiteRt(GraphTarget):
    """LiteRT's .tflite (once TensorFlow Lite) by litert-torch, in float32, for the sizes of the example."""

    name: ClassVar[str] = "litert"
    runtime: ClassVar[str] = "LiteRT"
    libraries: ClassVar[tuple[str, ...]] = ("ai-edge-litert",)
    tolerances: ClassVar[dict[str, float]] = {"fp32": 1e-3}
    fixed: ClassVar[str | None] = "litert-torch 0.10 converts no layer norm, and no view, of a free size"
    named: ClassVar[bool] = True

    @classmethod
    def unavailable(cls) -> str | None:
        if importlib.util.find_spec("ai_edge_litert") is None:
            return "ai_edge_litert cannot be imported: pip install 'torchwright[litert]'"
        return None

    @classmethod
    def unwritable(cls) -> str | None:
        if importlib.util.find_spec("litert_torch") is not None:
            return None
        minor = ".".join(torch.__version__.split(".")[:2])
        install = (
            f"python -m venv litert && litert/bin/pip install 'litert-torch==0.10.*' 'torch=={minor}.*', then "
            f"{PYTHON}=litert/bin/python"
        )
        named = os.environ.get(PYTHON)
        if named is None:
            return f"its converter wants an environment of its own (an older typing_extensions, and jax): {install}"
        return None if which(named) else f"{PYTHON} names {named}, which is no program: {install}"

    @classmethod
    def convert(
        cls, program: ExportedProgram, spec: CallSpec, target: Target, precision: str, folder: Path
    ) -> Written:
        keys = {node.name: key for node, key in operator_keys(program).items()}
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            graph, names = Path(scratch, "graph.pt2"), Path(scratch, "keys.json")
            with ignore_library_warnings():
                real_constants(program)
            save(program, graph)
            names.write_text(json.dumps(keys), encoding="utf-8")
            try:
                said = _converted(graph, names, folder / MODEL)
            except RefusedTechnique as error:
                raise refused_graph(error.summary, program, error.found or "no message") from error
        given = [
            spec.arg for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT
        ]
        named = [keys.get(one.name) for one in given if isinstance(one, TensorArgument)]
        (folder / OUTPUTS).write_text(json.dumps({"keys": named}), encoding="utf-8")
        versions = ", ".join(f"{name} {version}" for name, version in said.items())
        return Written(operators=_operators(folder), notes=(f"converted by {versions}",))

    @classmethod
    def open(cls, folder: Path, spec: CallSpec, threads: int) -> Run:
        interpreter = _interpreter(folder, num_threads=threads)
        runner = interpreter.get_signature_runner(SIGNATURE)
        wanted = runner.get_input_details()
        order = sorted(runner.get_output_details(), key=_number)

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            found = runner(**_given(wanted, tensors))
            return [torch.from_numpy(found[name]) for name in order]

        return run

    @classmethod
    def values(cls, folder: Path, spec: CallSpec, tensors: Sequence[Tensor]) -> Values:
        from ai_edge_litert.interpreter import OpResolverType

        interpreter = _interpreter(
            folder,
            experimental_preserve_all_tensors=True,
            experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        )
        runner = interpreter.get_signature_runner(SIGNATURE)
        answer = runner(**_given(runner.get_input_details(), tensors))
        last: dict[str, int] = {}
        for detail in interpreter.get_tensor_details():
            if tags := NAMED.findall(detail["name"]):
                last[tags[-1].replace(":", ".")] = detail["index"]
        found: Values = {}
        for key, index in last.items():
            try:
                found[key] = torch.from_numpy(interpreter.get_tensor(index))
            except (ValueError, TypeError):  # computed nowhere, or of a type without numbers
                continue
        outputs = typed(read_json(folder / OUTPUTS), Outputs, OUTPUTS)
        for key, name in zip(outputs.keys, sorted(answer, key=_number), strict=True):
            if key is not None:
                found[key] = torch.from_numpy(answer[name])
        return found


def _converted(graph: Path, keys: Path, model: Path, script: Path = SCRIPT) -> dict[str, str]:
    """Run the converter `script` in its own environment.

    Raises `RefusedTechnique`, `OSError` as the converter met it, and interrupts.
    """
    python = sys.executable if importlib.util.find_spec("litert_torch") else os.environ.get(PYTHON, "")
    command = [python, "-I", str(script), *map(str, (graph, keys, model))]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, **system.apart()
        )
        try:
            end = time.monotonic() + SECONDS
            while process.poll() is None:
                interrupts.check()
                if time.monotonic() > end:
                    raise RefusedTechnique(f"litert-torch was not done after {SECONDS:.0f} s")
                time.sleep(interrupts.POLL_SECONDS)
        finally:
            if process.poll() is None:
                system.kill_all(process)
                process.wait()
        log.seek(0)
        lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return _answer(process.returncode, lines)


def _answer(code: int, lines: Sequence[str]) -> dict[str, str]:
    """Return the converter's result from its last line."""
    try:
        said: Any = json.loads(lines[-1]) if lines else None
    except ValueError:
        said = None
    if code or not isinstance(said, dict):
        ended = (
            f"its process ended with exit code {code}"
            if code >= 0
            else f"its process was ended by signal {-code}"
        )
        message = lines[-1][:300] if lines else "no message"
        raise RefusedTechnique("litert-torch cannot take this model", found=f"{ended}: {message}")
    if "errno" in said:
        raise OSError(said["errno"], os.strerror(said["errno"]))
    if "failed" in said:
        raise RefusedTechnique("litert-torch cannot take this model", found=str(said["failed"]))
    return {str(name): str(version) for name, version in said.items()}


def _interpreter(folder: Path, **options: Any) -> Any:
    """Raises `ArtifactError`."""
    from ai_edge_litert.interpreter import Interpreter

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that keeping all tensors takes memory
            return Interpreter(str(folder / MODEL), **options)
    except (ValueError, RuntimeError) as error:
        raise ArtifactError(f"{folder / MODEL} cannot be read", found=first_line(error)) from error


def _number(name: str) -> int:
    """Return the position of an input or output; they are named `args_0`, `output_0`."""
    return int(name.rpartition("_")[2])


def _given(wanted: dict[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """A call's tensors by the names of the inputs, in their types; the converter leaves out what nothing reads."""
    found: dict[str, Any] = {}
    for name in wanted:
        tensor = tensors[_number(name)].detach().contiguous()
        narrow = NARROW.get(str(tensor.dtype).removeprefix("torch."))
        found[name] = (tensor if narrow is None else tensor.to(getattr(torch, narrow))).numpy()
    return found


def _operators(folder: Path) -> dict[str, int]:
    """Kinds of the file's own operators, and their numbers; which of them a delegate takes is the machine's to say."""
    from ai_edge_litert import schema_py_generated as schema

    kinds = {value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)}
    model: Any = schema.Model.GetRootAs((folder / MODEL).read_bytes())
    codes = [model.OperatorCodes(index) for index in range(model.OperatorCodesLength())]
    graph = model.Subgraphs(0)
    found = [codes[graph.Operators(index).OpcodeIndex()] for index in range(graph.OperatorsLength())]
    return dict(
        Counter(kinds[max(one.BuiltinCode(), one.DeprecatedBuiltinCode())] for one in found).most_common()
    )
