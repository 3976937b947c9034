# pyright: basic
"""Where compiling a model breaks off, by the user's own lines: asked of torch.compile, which compiles nothing here.

Dynamo says every break to a logger, with the stack at it; `torch._dynamo.explain` leaves out those for which it gave a
whole function up. Complex numbers break no graph, but Inductor makes no code for them: those are found in the graphs.
"""

from __future__ import annotations

import linecache
import logging
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwright.errors import first_line
from torchwright.profile.causes import COMPLEX, cause_of
from torchwright.profile.values import Breaks, GraphBreak
from torchwright.workloads.base import Case, Run

LOGGERS = ("torch._dynamo.symbolic_convert.__graph_breaks", "torch._dynamo.convert_frame.__graph_breaks")
AT = re.compile(r"in user code at (.+):(\d+)$", re.MULTILINE)
FRAME = re.compile(r'File "(.+)", line (\d+)')
REASON = re.compile(r"Graph Break Reason: (.*?)(?:\n\s*User code traceback:|\Z)", re.DOTALL)
GAVE_UP = re.compile(r"Skipping the function|falling back to eager|fall back to eager|skip tracing the frame")
LIBRARY = Path(torch.__file__).parent


def find_breaks(model: nn.Module, calls: Callable[[Any], Run], cases: Sequence[Case]) -> Breaks:
    """Trace every call as torch.compile does; `calls` says how a user calls the model, compiled or not."""
    graphs: list[torch.fx.GraphModule] = []

    def collect(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    failed = None
    with _listening() as records, warnings.catch_warnings(action="ignore"), torch.inference_mode():
        try:
            run = calls(torch.compile(model, backend=collect))
            for case in cases:
                run(case)
        except Exception as error:
            failed = f"{type(error).__name__}: {first_line(error)}"
    torch._dynamo.reset()
    found = [_break(text) for text in records]
    found += [found for graph in graphs if (found := _complex(graph)) is not None]
    return Breaks(graphs=len(graphs), found=_together(found), failed=failed)


@contextmanager
def _listening() -> Generator[list[str]]:
    """What Dynamo says of breaks within the block, and says to nobody else."""
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
    file, line = next((place for place in places if _is_users(place[0])), places[0] if places else ("", 0))
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
    for node in graph.graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        if not (isinstance(value, torch.Tensor) and value.is_complex()):
            continue
        frames = [(file, int(line)) for file, line in FRAME.findall(node.meta.get("stack_trace") or "")]
        if not frames:
            continue  # an input, which some line uses
        file, line = next((place for place in reversed(frames) if _is_users(place[0])), frames[-1])
        return GraphBreak(
            cause=COMPLEX.name,
            file=file,
            line=line,
            text=linecache.getline(file, line).strip(),
            reason=COMPLEX.reason,
            cure=COMPLEX.cure,
            count=1,
            whole_function=False,
            torch_says="Torchinductor does not support code generation for complex operators",
        )
    return None


def _is_users(file: str) -> bool:
    """Whether a file is none of torch's own."""
    return not Path(file).is_relative_to(LIBRARY) and not file.startswith("<")


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
