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
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from torchwright.train.layout import Layout
from torchwright.train.planning.check import count_step
from torchwright.train.planning.job import Job, Plan
from torchwright.train.planning.memory import peak_memory
from torchwright.train.planning.models import KNOWN, read_model
from torchwright.train.planning.published import PUBLISHED
from torchwright.train.planning.shape import Shape

THROUGHPUT, RING, MEMORY, TOP = 1.25, 1.7, 0.15, 3
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


def cases(processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every model and layout, with long and short sequences, types and kinds of recomputation in turn."""
    turns = (
        ("bf16", "none", 2, 192, 1),
        ("fp32", "none", 2, 192, 1),
        ("bf16", "full", 4, 192, 1),
        ("bf16", "selective", 2, 192, 1),
        ("bf16", "none", 1, 32, 2),
    )
    number = 0
    for model in MODELS:
        layouts = [
            *LAYOUTS[processes],
            *(["dp_shard=4,ep=2"] if model == "experts" and processes == 4 else []),
        ]
        for layout in layouts:
            for turn in (turns[number % len(turns)], turns[(number + 2) % len(turns)]):
                precision, recompute, rows, context, micro_batches = turn
                yield (
                    model,
                    {
                        "layout": layout,
                        "precision": precision,
                        "recompute": recompute,
                        "rows": rows,
                        "context": context,
                        "micro_batches": micro_batches,
                    },
                )
            number += 1


def plan_of(case: dict[str, Any]) -> tuple[Job, Plan]:
    layout = Layout.parse(case["layout"])
    sequences = layout.batch_ways * case["rows"] * case["micro_batches"]
    job = Job(
        tokens_per_step=sequences * case["context"],
        context=case["context"],
        precision=case["precision"],
        compile=False,
    )
    return job, Plan(
        layout=layout,
        micro_batch=case["rows"],
        micro_batches=case["micro_batches"],
        recompute=case["recompute"],
    )


def work(rank: int, processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=120),
    )
    peaks = []
    for model, case in cases(processes):
        peaks.append(count_step(read_model(f"{folder}/{model}.json"), *plan_of(case)).peak)
    if rank == 0:
        (Path(folder) / "peaks.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


def memory(processes: int) -> int:
    print(f"\n{processes} processes of gloo on the CPU: peak bytes of one in the second step")
    print(
        "\n| model | layout | batch | estimated MB | counted MB | ratio |\n| --- | --- | --- | --- | --- | --- |"
    )
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, fields in MODELS.items():
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(KNOWN["llama-3.1-8b"] | HEADS | fields))
        spawn(work, args=(processes, folder), nprocs=processes)
        peaks = json.loads((Path(folder) / "peaks.json").read_text())
        for (model, case), peak in zip(cases(processes), peaks, strict=True):
            shape = Shape(read_model(f"{folder}/{model}.json"))
            estimated = peak_memory(shape, *plan_of(case), fused_norms=False).total
            missed += abs(estimated / peak - 1) > MEMORY
            batch = f"{case['micro_batches']} x {case['rows']} x {case['context']}, "
            batch += f"{case['precision']}, {case['recompute']}"
            print(
                f"| {model} | {case['layout']} | {batch} | {estimated / 1e6:.1f} | {peak / 1e6:.1f} | "
                f"{estimated / peak:.3f} |"
            )
    return missed


if __name__ == "__main__":
    sys.exit(main())
