"""Draw the rows of `cpu.py --json FILE`: decode over contexts and batches, and one forward call over its tokens.

python -m benchmarks.llm.plots FILE.json OUT.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes

Row = dict[str, Any]


def main(source: str, target: str) -> None:
    rows: list[Row] = json.loads(Path(source).read_text())["rows"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows if "rows" in row))
    figure, grid = pyplot.subplots(len(shapes), 3, figsize=(13, 3.6 * len(shapes)), squeeze=False)
    for shape, axes in zip(shapes, grid, strict=True):
        here = [row for row in rows if row["shape"] == shape]
        draw(axes[0], here, "context", "tok_s", lambda row: row.get("batch") == 1)
        axes[0].set(title=f"{shape}: decode", xlabel="context, tokens", ylabel="tokens/s")
        draw(axes[1], here, "batch", "tok_s", lambda row: row.get("context") == 128)
        axes[1].set(title="decode at a context of 128", xlabel="sequences", ylabel="tokens/s together")
        draw(axes[2], here, "rows", "prefill_s", lambda row: "rows" in row)
        axes[2].set(title="one forward call", xlabel="tokens", ylabel="seconds", yscale="log")
        axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target)


def draw(axes: Axes, rows: list[Row], x: str, y: str, wanted: Callable[[Row], bool]) -> None:
    """Draw a line for each contender, over a logarithmic axis with the points' own numbers."""
    ticks: set[int] = set()
    for contender in dict.fromkeys(row["contender"] for row in rows):
        points = sorted((row[x], row[y]) for row in rows if row["contender"] == contender and wanted(row))
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", label=contender.removeprefix("torchwright "))
            ticks |= {point[0] for point in points}
    axes.set_xscale("log", base=2)
    shown = [tick for tick in sorted(ticks) if not tick & (tick - 1)]
    axes.set_xticks(shown, [str(tick) for tick in shown])
    if y == "tok_s":
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
