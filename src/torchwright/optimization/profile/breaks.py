# pyright: basic
"""Graph breaks of a model by the user's own lines, from torch.compile, which compiles nothing here.

Dynamo says every break to a logger, with the stack at it; `torch._dynamo.explain` leaves out those for which it gave a
whole function up. Two things that break no graph are found in the graphs: complex numbers, for which Inductor makes no
code, and NumPy, which torch.export does not trace.
"""

from __future__ import annotations

import linecache
import logging
import re
import sysconfig
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from torchwright.core.errors import first_line
from torchwright.core.quiet import errors_alone
from torchwright.optimization.profile.causes import COMPLEX, TRACED_NUMPY, Cause, cause_of
from torchwright.optimization.profile.values import Breaks, GraphBreak
from torchwright.workloads.base import Case, Run

LOGGERS = ("torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo.convert_frame.__graph_breaks")
SCALARS = "torch._dynamo.variables.tensor"
"""Says at every item() how a user of torch.compile might go on."""
AT = re.compile(r"in user code at (.+):(\d+)$", re.MULTILINE)
FRAME = re.compile(r'File "(.+)", line (\d+)')
REASON = re.compile(r"Graph Break Reason: (.*?)(?:\n\s*User code traceback:|\Z)", re.DOTALL)
GAVE_UP = re.compile(r"Skipping the function|falling back to eager|fall back to eager|skip tracing the frame")
LIBRARIES = (
    Path(torch.__file__).parent,
    Path(numpy.__file__).parent,
    Path(__file__).parents[1] / "techniques",
)
STANDARD = Path(sysconfig.get_path("stdlib"))


def find_breaks(model: nn.Module, calls: Callable[[Any], Run], cases: Sequence[Case]) -> Breaks:
    """Trace every call as torch.compile does; `calls` says how a user calls the model, compiled or not."""
    graphs: list[torch.fx.GraphModule] = []

    def collect(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    failed = None
    quiet = warnings.catch_warnings(action="ignore")
    with _listening() as records, errors_alone(SCALARS), quiet, torch.inference_mode():
        try:
            run = calls(torch.compile(model, backend=collect))
            for case in cases:
                run(case)
        except Exception as error:
            failed = f"{type(error).__name__}: {first_line(error)}"
    torch._dynamo.reset()
    found = [_break(text) for text in records]
    found += [one for graph in graphs for one in (_complex(graph), _numpy(graph)) if one is not None]
    return Breaks(graphs=len(graphs), found=_together(found), failed=failed)


@contextmanager
def _listening() -> Generator[list[str]]:
    """Collect Dynamo's messages about breaks within the block, and keep them from other loggers."""
    records: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [Listener()], False
        logger.setLevel(logging.DEBUG)
    try:
        yield records
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def _break(text: str) -> GraphBreak:
    """One record of Dynamo's."""
    at = AT.search(text)
    frames = [(file, int(line)) for file, line in FRAME.findall(text.rpartition("User code traceback:")[2])]
    places = [*([(at[1], int(at[2]))] if at else []), *reversed(frames)]
    file, line = next((place for place in places if is_users(place[0])), places[0] if places else ("", 0))
    said = REASON.search(text)
    reason = said[1] if said else text
    source = linecache.getline(file, line).strip()
    cause = cause_of(reason, source)
    return GraphBreak(
        cause=cause.name,
        file=file,
        line=line,
        text=source,
        reason=cause.reason,
        cure=cause.cure,
        count=1,
        whole_function=GAVE_UP.search(text) is not None,
        torch_says=_first_words(reason),
    )


def _complex(graph: torch.fx.GraphModule) -> GraphBreak | None:
    """The first line of a graph that makes complex numbers."""
    said = "Torchinductor does not support code generation for complex operators"
    return _first(graph, _is_complex, COMPLEX, said)


def _numpy(graph: torch.fx.GraphModule) -> GraphBreak | None:
    """The first line of a graph that calls NumPy."""
    calls = (
        torch._dynamo.utils.numpy_to_tensor_wrapper,
        torch._dynamo.utils.numpy_method_wrapper,
        torch._dynamo.utils.numpy_operator_wrapper,
    )
    return _first(graph, lambda node: isinstance(node.target, calls), TRACED_NUMPY, "traced as torch._numpy")


def _is_complex(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value", node.meta.get("val"))
    return isinstance(value, torch.Tensor) and value.is_complex()


def _first(
    graph: torch.fx.GraphModule, is_one: Callable[[torch.fx.Node], bool], cause: Cause, torch_says: str
) -> GraphBreak | None:
    """The first line whose node is one, of those that have lines: an input is of the line that uses it."""
    for node in graph.graph.nodes:
        frames = [(file, int(line)) for file, line in FRAME.findall(node.meta.get("stack_trace") or "")]
        if not (frames and is_one(node)):
            continue
        file, line = next((place for place in reversed(frames) if is_users(place[0])), frames[-1])
        return GraphBreak(
            cause=cause.name,
            file=file,
            line=line,
            text=linecache.getline(file, line).strip(),
            reason=cause.reason,
            cure=cause.cure,
            count=1,
            whole_function=False,
            torch_says=torch_says,
        )
    return None


def is_users(file: str) -> bool:
    """Check whether a file belongs to the user: not to torch, NumPy, Python or the rewrites here."""
    path = Path(file)
    installed = {"site-packages", "dist-packages"} & {*path.parts}
    pythons = path.is_relative_to(STANDARD) and not installed
    return not (file.startswith("<") or pythons or any(map(path.is_relative_to, LIBRARIES)))


def _together(found: Sequence[GraphBreak]) -> tuple[GraphBreak, ...]:
    """One for each line and cause, with how often it was met."""
    groups: dict[tuple[str, int, str], list[GraphBreak]] = {}
    for item in found:
        groups.setdefault((item.file, item.line, item.cause), []).append(item)
    return tuple(
        replace(group[0], count=len(group), whole_function=any(item.whole_function for item in group))
        for group in groups.values()
    )


def _first_words(reason: str) -> str:
    """The name that torch gives to a break, without what it was attempting when it met it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    named = [line for line in lines if not line.endswith((":",)) and "Graph break encountered" not in line]
    return (named or lines or [""])[0][:200]
