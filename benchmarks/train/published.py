"""Published training configurations with their throughput and memory, against which the planner is checked.

`published_rows.py` lists them. `plan_layout.py` writes them with the planner's answers into
`docs/plan-published.md`, and `tests/train/test_planning_published.py` checks the planner against them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchwright.train.layout import Layout
from torchwright.train.planning.cluster import Cluster, read_device
from torchwright.train.planning.job import Job, LayoutPlan, Precision, Recompute
from torchwright.train.planning.models import read_model
from torchwright.train.planning.rank import RankedLayout, Ranking, evaluate, rank
from torchwright.train.shape import Shape

TIME, MEMORY = 0.25, 0.15
"""Differences of predicted from published throughput and memory that need no explanation."""
EAGER_LOSS = 4
"""Bytes a logit that torchtitan's eager loss reserved beyond the trainer's: its logits in float32, which stayed."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of a published table."""

    name: str
    source: str
    model: str
    device: str
    layout: Layout
    devices_per_node: int = 8
    context: int = 8192
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: Recompute
    precision: Precision = "bf16"
    compile: bool = True
    compile_loss: bool = False
    """torchtitan's loss was eager until 2025, whatever else was compiled."""
    interleave: int = 1
    tokens_per_second: float | None = None
    """Tokens per second of one device."""
    mfu: float | None = None
    """Model FLOP utilization, if the throughput is published only in this form."""
    gib: float | None = None
    """Peak of reserved memory."""
    fixed: tuple[str, ...] = ()
    """Axes that the source had to itself: degrees that were its subject, or kinds of parallelism that it lacked."""
    chosen: bool = False
    """The layout was chosen for speed, not to show what a kind of parallelism does."""
    why: str = ""
    """The explanation of a difference of more than `TIME` or `MEMORY`."""

    @property
    def nodes(self) -> int:
        return self.layout.processes // self.devices_per_node

    @property
    def job(self) -> Job:
        sequences = self.micro_batch * self.micro_batches * self.layout.batch_ways
        return Job(
            tokens_per_step=sequences * self.context,
            context=self.context,
            precision=self.precision,
            # Adafactor, where TPUs had too little memory for AdamW, keeps hardly anything.
            optimizer="adamw8bit" if self.device == "tpu-v4" else "adamw",
            compile=self.compile,
            compile_loss=self.compile_loss,
        )

    @property
    def cluster(self) -> Cluster:
        return Cluster(
            device=read_device(self.device), nodes=self.nodes, devices_per_node=self.devices_per_node
        )

    def predict(self) -> RankedLayout:
        """Return the planner's prediction for just this configuration."""
        plan = LayoutPlan(
            layout=self.layout,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            recompute=self.recompute,
            interleave=self.interleave,
        )
        return evaluate(Shape(read_model(self.model)), self.job, self.cluster, plan)

    def time_ratio(self, predicted: RankedLayout) -> float | None:
        """Predicted over published throughput; None where none was published."""
        if self.tokens_per_second is not None:
            return predicted.tokens_per_second / self.tokens_per_second
        return None if self.mfu is None else predicted.mfu / self.mfu

    def memory_as_theirs(self, predicted: RankedLayout) -> float:
        """Predicted bytes with what torchtitan did otherwise than the trainer.

        Its eager loss, and selective recomputation that keeps every second product: q, v, gate and down, and repeats k,
        o and up.
        """
        total, plan = predicted.memory.total, predicted.plan
        shape, tp, tokens = Shape(read_model(self.model)), plan.layout.tp, plan.tokens(self.job)
        if predicted.memory.logits and not self.compile_loss:
            total += EAGER_LOSS * shape.config.vocabulary / tp * tokens
        if self.recompute == "selective":
            repeated = shape.kv_width + shape.config.model + shape.config.feed_forward
            total -= self.job.width * repeated / tp * tokens * shape.config.layers
        return total

    def memory_ratio(self, predicted: RankedLayout) -> float | None:
        """Predicted, as theirs, over published peak memory; None where none was published."""
        return None if self.gib is None else self.memory_as_theirs(predicted) / (self.gib * 2**30)

    def agrees(self, predicted: RankedLayout) -> bool:
        """Check whether every prediction is so near to the published value that no explanation is needed."""
        time, memory = self.time_ratio(predicted) or 1.0, self.memory_ratio(predicted) or 1.0
        return 1 / (1 + TIME) < time < 1 + TIME and abs(memory - 1) < MEMORY

    def ranking(self) -> Ranking:
        """All layouts of its job on its cluster, `fixed` axes as published."""
        fixed = {axis: getattr(self.layout, axis) for axis in self.fixed}
        return rank(read_model(self.model), self.job, self.cluster, fixed=fixed)
