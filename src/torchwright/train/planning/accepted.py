"""Check a plan by `torchwright train`'s own checks, with the plan's values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torchwright.core.errors import TorchwrightError
from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.parallel.apply import check_fits
from torchwright.train.planning.job import Job, LayoutPlan
from torchwright.train.run.config.check import check_run
from torchwright.train.run.config.read import parse_run


def run_fields(job: Job, plan: LayoutPlan) -> dict[str, Any]:
    """A run file that trains as planned; model and data are not in it."""
    pipeline = {"schedule": "interleaved", "pieces": plan.interleave} if plan.interleave > 1 else {}
    return {
        "out": "planned",
        "tokens": job.tokens_per_step,
        "batch_tokens": job.tokens_per_step,
        "context": job.context,
        "micro_batches": plan.micro_batches,
        "precision": job.precision,
        # What lies whole on every device is gathered by nobody.
        "gather": job.gather if plan.layout.dp_shard * plan.layout.cp > 1 else None,
        "recompute": plan.recompute,
        "compile": job.compile,
        "optimizer": {"name": job.optimizer},
        "layout": asdict(plan.layout),
        **({"pipeline": pipeline} if plan.layout.pp > 1 else {}),
        "model": {"config": {}},
        "data": {"train": ["planned"]},
    }


def refusal(config: DecoderConfig, job: Job, plan: LayoutPlan) -> str:
    """Why the trainer does not take the plan, in its own words; empty where it does."""
    try:
        check_run(parse_run(run_fields(job, plan)))
        check_fits(config, plan.layout, plan.interleave)
    except TorchwrightError as error:
        return str(error)
    return ""
