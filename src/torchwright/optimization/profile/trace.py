"""One file for Perfetto and chrome://tracing from the profiler's own, one stage below the other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchwright.core.process.files import replacing


def write_trace(stages: Iterable[tuple[str, Path]], out: Path) -> None:
    """Write the traces of `stages`, by their names, into one: each a process of its own that begins at zero."""
    merged: list[dict[str, Any]] = []
    for number, (name, path) in enumerate(stages, start=1):
        events = [
            event
            for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
            if event.get("ph") == "X"
        ]
        begin = min((event["ts"] for event in events), default=0.0)
        merged.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        merged.append(
            {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        )
        merged += [{**event, "pid": number, "ts": event["ts"] - begin} for event in events]
    with replacing(out) as beside:
        beside.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": merged}), encoding="utf-8")
