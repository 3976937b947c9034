"""scripts/results.py: rows that say where they come from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "results.py"
MACHINE = {
    "cpu": "A CPU",
    "threads": 2,
    "python": "3.11",
    "torch": "2.13.0",
    "command": "python benchmarks/x.py",
}


def test_every_row_has_its_date_commit_versions_and_command(tmp_path: Path):
    file = tmp_path / "x.json"
    rows = [{"case": "a|b", "ms": 21170.4}, {"case": "c", "ms": 0.00002, "note": None}]
    file.write_text(json.dumps({"machine": MACHINE, "rows": rows}))
    spec = importlib.util.spec_from_file_location("results", SCRIPT)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    end = "2026-11-23 | abc123 | torch 2.13.0, python 3.11 | `python benchmarks/x.py` |"
    assert module.table(json.loads(file.read_text()), "2026-11-23", "abc123").splitlines() == [
        "## A CPU, 2 threads",
        "",
        "| case | ms | note | date | commit | versions | command |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| a\\|b | 21,170.4 |  | {end}",
        f"| c | 0.00002 |  | {end}",
    ]
