"""What each process of `test_planning_memory.py` does: counts real steps, and the first one writes what it found."""

from __future__ import annotations

import dataclasses
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchwright.train.layout import Layout
from torchwright.train.planning.check import count_step
from torchwright.train.planning.job import Job, Plan
from torchwright.train.planning.models import read_model

Case = dict[str, Any]
"""config (a path), layout, rows, context, precision, recompute, micro_batches."""


def plan_of(case: Case) -> tuple[Job, Plan]:
    layout = Layout.parse(case["layout"])
    rows = layout.batch_ways * case["rows"] * case["micro_batches"]
    job = Job(
        tokens_per_step=rows * case["context"],
        context=case["context"],
        precision=case["precision"],
        compile=False,
    )
    plan = Plan(
        layout=layout,
        micro_batch=case["rows"],
        micro_batches=case["micro_batches"],
        recompute=case["recompute"],
    )
    return job, plan


def work(rank: int, world: int, folder: str, cases: list[Case]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    counted = [dataclasses.asdict(count_step(read_model(case["config"]), *plan_of(case))) for case in cases]
    if rank == 0:
        (Path(folder) / "counted.json").write_text(json.dumps(counted))
    dist.destroy_process_group()
