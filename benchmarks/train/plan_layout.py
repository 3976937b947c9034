"""The planner compared with published runs and with the steps of the trainer itself.

    python -m benchmarks.train.plan_layout [--published [--write]] [--memory] [--processes 4]

Without a choice both are run. `--published` predicts each configuration of `published_rows.py`:
throughput and memory over the published ones, and the layout's place in the ranking. `--write` writes the table into
docs/plan-published.md. `--memory` trains small models on the CPU over gloo and counts the bytes that live. The exit
code is 1 if a difference of 25% in time or 15% in memory has no reason, or if 15% of memory is missed. A layout that
was chosen for speed has to be among the top three.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import run
from benchmarks.train.published import MEMORY, TIME, Published
from benchmarks.train.published_rows import PUBLISHED
from torchwright.train.planning.check import count_steps, eager_step
from torchwright.train.planning.memory import peak_memory
from torchwright.train.planning.models import KNOWN, read_model
from torchwright.train.prove.processes import on_processes
from torchwright.train.shape import Shape

TOP = 3
COLUMNS = (
    *("configuration", "layout", "tok/s", "published", "factor"),
    *("GiB", "as theirs", "published", "factor", "place", "source", "why it differs"),
)
PAGE = run.ROOT / "docs" / "plan-published.md"
HEADER = """<!-- Written by benchmarks/train/plan_layout.py --published --write from published_rows.py, next to it. -->

# Published runs and the planner

What `torchwright plan-layout` answers for configurations that others ran, all rows of torchtitan's benchmarks and
performance pages that could be found among them. tok/s are of one device. "GiB" is the peak that the planner says lives
in `torchwright train`; "as theirs" adds what torchtitan did otherwise, where that can be counted (`memory_as_theirs` in
benchmarks/train/published.py: an eager loss, and selective recomputation of every second product); "published" is what
the allocator reserved at its peak. Where throughput then differs by more than {time:.0%} or memory by more than
{memory:.0%}, the last column says why. "place" is the layout's among families of layouts by speed, with the axes in
brackets held as published. The efficiencies of the H100 with 96 GB were set by two rows, 8B on 8 of them in bfloat16
and in float8; all else is predicted.

"""
LIMIT = 600.0
"""Limit of one model's steps, in seconds."""


def _sizes(hidden: int, intermediate: int, layers: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
    return sizes | {"num_hidden_layers": layers, "vocab_size": vocabulary} | more


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
MODELS = {
    "small": _sizes(128, 448, 6, 1024),
    "deep": _sizes(192, 640, 16, 512),
    "wide": _sizes(512, 1792, 3, 2048),
    "words": _sizes(128, 448, 2, 32768),
    "tied": _sizes(128, 448, 4, 8192, tie_word_embeddings=True),
    "experts": _sizes(128, 256, 4, 1024, **MIXTRAL),
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
LAYOUTS = {
    2: ("dp_shard=2", "tp=2,dp_shard=1", "cp=2"),
    4: ("dp_shard=4", "dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2", "dp_shard=2,cp=2"),
}


def main() -> int:
    count = run.Option(type=int, default=4, choices=sorted(LAYOUTS))
    chosen = run.options(__doc__, json=False, published=False, write=False, memory=False, processes=count)
    run.Rows()
    both = not (chosen.published or chosen.memory)
    missed = 0
    if chosen.published or both:
        missed += published(write=chosen.write)
    if chosen.memory or both:
        missed += memory(chosen.processes)
    print(f"{missed} missed" if missed else "all within their bounds")
    return 1 if missed else 0


def published(*, write: bool) -> int:
    lines = [COLUMNS, ("---",) * len(COLUMNS)]
    sources = list(dict.fromkeys(row.source for row in PUBLISHED))
    missed = 0
    for row in PUBLISHED:
        ranking = row.ranking()
        place = ranking.place(row.layout)
        missed += not (row.why or row.agrees(row.predict()))
        missed += row.chosen and (place is None or place > TOP)
        held = ", ".join(f"{axis}={getattr(row.layout, axis)}" for axis in row.fixed)
        among = f"{place or '–'} of {len(ranking.families)}" + (f" ({held})" if held else "")
        lines.append(
            (row.name, str(row.layout), *figures(row), among, str(sources.index(row.source) + 1), row.why)
        )
    table = "".join(f"{run.line(line)}\n" for line in lines)
    table += "\nSources:\n\n" + "".join(f"{place}. {source}\n" for place, source in enumerate(sources, 1))
    print(table)
    if write:
        PAGE.write_text(HEADER.format(time=TIME, memory=MEMORY) + table, encoding="utf-8")
    return missed


def figures(row: Published) -> tuple[str, ...]:
    """Return throughput predicted, published, and the ratio; then those of memory."""
    predicted = row.predict()
    speeds = (predicted.tokens_per_second, row.tokens_per_second)
    ours, theirs = (
        (f"MFU {mfu:.0%}" for mfu in (predicted.mfu, row.mfu))
        if row.mfu
        else (f"{speed:,.0f}" if speed else "–" for speed in speeds)
    )
    time, memory = row.time_ratio(predicted), row.memory_ratio(predicted)
    return (
        ours,
        theirs,
        f"{time:.2f}" if time else "–",
        f"{predicted.memory.total / 2**30:.1f}",
        f"{row.memory_as_theirs(predicted) / 2**30:.1f}" if row.gib else "–",
        f"{row.gib:.1f}" if row.gib else "–",
        f"{memory:.2f}" if memory else "–",
    )


def cases(model: str, processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every layout with two steps in turn: long and short sequences, types and kinds of recomputation."""
    fields = ("precision", "recompute", "rows", "context", "micro_batches")
    values = (
        ("bf16", "none", 2, 192, 1),
        ("fp32", "none", 2, 192, 1),
        ("bf16", "full", 4, 192, 1),
        ("bf16", "selective", 2, 192, 1),
        ("bf16", "none", 1, 32, 2),
    )
    steps: list[dict[str, Any]] = [dict(zip(fields, each, strict=True)) for each in values]
    experts = ["dp_shard=4,ep=2"] if model == "experts" and processes == 4 else []
    for place, layout in enumerate([*LAYOUTS[processes], *experts], start=list(MODELS).index(model)):
        for step in (steps[place % len(steps)], steps[(place + 2) % len(steps)]):
            yield layout, step


def memory(processes: int) -> int:
    print(f"\n{processes} processes of gloo on the CPU: peak bytes of one in the second step")
    print()
    run.head(("model", "layout", "batch", "estimated MB", "counted MB", "ratio"))
    missed = 0
    for name, fields in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(KNOWN["llama-3.1-8b"] | HEADS | fields))
            config = read_model(str(path))
        steps = list(cases(name, processes))
        planned = [eager_step(layout, **step) for layout, step in steps]
        # Processes of their own for each model: groups of a layout keep their threads as long as a process lives.
        counted = on_processes(processes, count_steps, [(config, *plan) for plan in planned], limit=LIMIT)[0]
        for (layout, step), plan, real in zip(steps, planned, counted, strict=True):
            estimated = peak_memory(Shape(config), *plan, fused=False).total
            missed += abs(estimated / real.peak - 1) > MEMORY
            batch = f"{step['micro_batches']} x {step['rows']} x {step['context']}, "
            batch += f"{step['precision']}, {step['recompute']}"
            figures = (f"{estimated / 1e6:.1f}", f"{real.peak / 1e6:.1f}", f"{estimated / real.peak:.3f}")
            print(run.line((name, layout, batch, *figures)), flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
