"""The planner held against what others published and against what FSDP2 really takes.

    python benchmarks/plan_layout.py [--published] [--memory] [--processes 4]

Without a choice both are run. `--published` predicts each configuration of `train/planning/published.py`: throughput
over the published one, and the layout's place in the ranking. `--memory` trains small models on the CPU over gloo and
counts the bytes that live. Exit code 1 when a factor of 1.25 (1.7 where the published context parallelism was a ring),
a place in the top three, or 15% of memory is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchwright.train.planning.check import count_steps, eager_step
from torchwright.train.planning.memory import peak_memory
from torchwright.train.planning.models import KNOWN, read_model
from torchwright.train.planning.published import PUBLISHED
from torchwright.train.planning.shape import Shape
from torchwright.train.prove.processes import on_processes

THROUGHPUT, RING, MEMORY, TOP = 1.25, 1.7, 0.15, 3
LIMIT = 600.0
"""Seconds for one model's steps."""
MODELS: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 6, "vocab_size": 1024},
    "deep": {"hidden_size": 192, "intermediate_size": 640, "num_hidden_layers": 16, "vocab_size": 512},
    "wide": {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 3, "vocab_size": 2048},
    "words": {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 2, "vocab_size": 32768},
    "tied": {
        "hidden_size": 128,
        "intermediate_size": 448,
        "num_hidden_layers": 4,
        "vocab_size": 8192,
        "tie_word_embeddings": True,
    },
    "experts": {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "vocab_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
LAYOUTS = {
    2: ("dp_shard=2", "tp=2,dp_shard=1", "cp=2"),
    4: ("dp_shard=4", "dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2", "dp_shard=2,cp=2"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--processes", type=int, default=4, choices=sorted(LAYOUTS))
    chosen = parser.parse_args()
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    both = not (chosen.published or chosen.memory)
    missed = 0
    if chosen.published or both:
        missed += published()
    if chosen.memory or both:
        missed += memory(chosen.processes)
    print(f"{missed} missed" if missed else "all within their bounds")
    return 1 if missed else 0


def published() -> int:
    print(
        "\n| configuration | layout | predicted | published | factor | place | GiB, theirs reserved | source |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    missed = 0
    for row in PUBLISHED:
        predicted, ratio, ranking = row.predict(), row.ratio(), row.ranking()
        place = ranking.place(row.layout)
        limit = RING if row.layout.cp > 2 else THROUGHPUT
        missed += ratio is not None and not 1 / limit < ratio < limit
        missed += row.chosen and (place is None or place > TOP)
        theirs = f"MFU {row.mfu:.0%}" if row.mfu else f"{row.tokens_per_second or 0:,.0f}" if ratio else "–"
        ours = f"MFU {predicted.mfu:.0%}" if row.mfu else f"{predicted.tokens_per_second:,.0f}"
        among = (
            f" ({', '.join(f'{axis}={getattr(row.layout, axis)}' for axis in row.fixed)})"
            if row.fixed
            else ""
        )
        gib = f"{predicted.memory.total / 2**30:.0f}" + (f", {row.gib:.0f}" if row.gib else "")
        print(
            f"| {row.name} | {row.layout} | {ours} | {theirs} | {f'{ratio:.2f}' if ratio else '–'} | "
            f"{place or '–'} of {len(ranking.families)}{among} | {gib} | {row.source} |",
            flush=True,
        )
    return missed


def cases(model: str, processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every layout with two steps in turn: long and short sequences, types and kinds of recomputation."""
    steps = (
        {"precision": "bf16", "recompute": "none", "rows": 2, "context": 192, "micro_batches": 1},
        {"precision": "fp32", "recompute": "none", "rows": 2, "context": 192, "micro_batches": 1},
        {"precision": "bf16", "recompute": "full", "rows": 4, "context": 192, "micro_batches": 1},
        {"precision": "bf16", "recompute": "selective", "rows": 2, "context": 192, "micro_batches": 1},
        {"precision": "bf16", "recompute": "none", "rows": 1, "context": 32, "micro_batches": 2},
    )
    experts = ["dp_shard=4,ep=2"] if model == "experts" and processes == 4 else []
    for place, layout in enumerate([*LAYOUTS[processes], *experts], start=list(MODELS).index(model)):
        for step in (steps[place % len(steps)], steps[(place + 2) % len(steps)]):
            yield layout, step


def memory(processes: int) -> int:
    print(f"\n{processes} processes of gloo on the CPU: peak bytes of one in the second step")
    print(
        "\n| model | layout | batch | estimated MB | counted MB | ratio |\n| --- | --- | --- | --- | --- | --- |"
    )
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
            estimated = peak_memory(Shape(config), *plan, fused_norms=False).total
            missed += abs(estimated / real.peak - 1) > MEMORY
            batch = f"{step['micro_batches']} x {step['rows']} x {step['context']}, "
            batch += f"{step['precision']}, {step['recompute']}"
            print(
                f"| {name} | {layout} | {batch} | {estimated / 1e6:.1f} | {real.peak / 1e6:.1f} | "
                f"{estimated / real.peak:.3f} |",
                flush=True,
            )
    return missed


if __name__ == "__main__":
    sys.exit(main())
