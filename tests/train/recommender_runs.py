"""Small recommender runs for tests: generated files and a run file over them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from runs import to_toml

sys.path.append(str(Path(__file__).parents[2] / "examples" / "clicks"))
from clicks import Shape, generate

DLRM: dict[str, Any] = {"dim": 4, "bottom": [8], "top": [8], "rows": 50, "tables": {"C3": 400}}
TWO_TOWER: dict[str, Any] = {
    "user": {"user": 300, "country": 20},
    "item": {"item": 200, "kind": 20},
    "dim": 4,
    "hidden": [8],
}


def make_recommender(folder: Path, *, towers: bool = False, **changes: Any) -> Path:
    """A run file in `folder` with a file to train on and one held out; `changes` replace whole fields."""
    folder.mkdir(parents=True, exist_ok=True)
    shape: Shape = "pairs" if towers else "criteo"
    generate(folder / "train.tsv.gz", shape, 300)
    generate(folder / "held.tsv", shape, 101, first=300)
    data = {"train": ["train.tsv.gz"], "validation": ["held.tsv"]}
    run: dict[str, Any] = {
        "kind": "recommender",
        "out": "out",
        "samples": 6 * 64,
        "batch": 64,
        "threads": 1,
        "log_every": 1,
        "data": data | ({"header": True, "hexadecimal": False} if towers else {}),
        "checkpoint": {"every_steps": 2, "keep": 9},
        **({"two_tower": TWO_TOWER} if towers else {"dlrm": DLRM}),
        **changes,
    }
    path = folder / "run.toml"
    path.write_text(to_toml(run))
    return path
