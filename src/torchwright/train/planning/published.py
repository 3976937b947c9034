"""Published training configurations with their throughput, against which the planner is checked.

`benchmarks/plan_layout.py` prints them all; `tests/train/test_planning_published.py` holds the planner to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchwright.train.layout import Layout
from torchwright.train.planning.cluster import Cluster, read_device
from torchwright.train.planning.job import Job, Plan, Precision, Recompute
from torchwright.train.planning.models import read_model
from torchwright.train.planning.rank import Candidate, Ranking, evaluate, rank
from torchwright.train.planning.shape import Shape

TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "torchtitan, docs/performance.md (A100)"
TITAN_405B = "torchtitan, docs/performance.md (405B on 128 H100)"
TRAINY = "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
XLA = "PyTorch blog, High-Performance Llama 2 Training and Inference with PyTorch/XLA on Cloud TPUs, table 3"
HERD = "Dubey et al., The Llama 3 Herd of Models, table 4"
CRUSOE = "PyTorch blog, Accelerating Large Scale Training … with PyTorch Float8 Rowwise on Crusoe 2K H200s"


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of a published table."""

    name: str
    source: str
    model: str
    device: str
    nodes: int
    devices_per_node: int = 8
    sequences: int
    """Of a step, over all devices."""
    context: int
    layout: Layout
    micro_batch: int
    recompute: Recompute
    precision: Precision = "bf16"
    compile: bool = True
    interleave: int = 1
    tokens_per_second: float | None = None
    """Of one device."""
    mfu: float | None = None
    """Where throughput is published as MFU alone."""
    gib: float | None = None
    """Peak of reserved memory."""
    fixed: tuple[str, ...] = ()
    """Axes that the source had to itself: degrees that were its subject, or kinds of parallelism that it lacked."""
    chosen: bool = True
    """The layout was chosen for speed; False: to show what a kind of parallelism does."""

    @property
    def job(self) -> Job:
        return Job(
            tokens_per_step=self.sequences * self.context,
            context=self.context,
            precision=self.precision,
            # Adafactor, where TPUs had too little memory for AdamW, keeps hardly anything.
            optimizer="adamw8bit" if self.device == "tpu-v4" else "adamw",
            compile=self.compile,
        )

    @property
    def cluster(self) -> Cluster:
        return Cluster(
            device=read_device(self.device), nodes=self.nodes, devices_per_node=self.devices_per_node
        )

    @property
    def plan(self) -> Plan:
        return Plan(
            layout=self.layout,
            micro_batch=self.micro_batch,
            micro_batches=self.sequences // self.layout.batch_ways // self.micro_batch,
            recompute=self.recompute,
            interleave=self.interleave,
        )

    def predict(self) -> Candidate:
        """What the planner says of just this configuration."""
        return evaluate(Shape(read_model(self.model)), self.job, self.cluster, self.plan)

    def ratio(self) -> float | None:
        """Predicted over published throughput; None where none was published."""
        predicted = self.predict()
        if self.tokens_per_second is not None:
            return predicted.tokens_per_second / self.tokens_per_second
        return None if self.mfu is None else predicted.mfu / self.mfu

    def ranking(self) -> Ranking:
        """All layouts of its job on its cluster, `fixed` axes as published."""
        fixed = {axis: getattr(self.layout, axis) for axis in self.fixed}
        return rank(read_model(self.model), self.job, self.cluster, fixed=fixed)


def _titan(name: str, **values: object) -> Published:
    common = {"source": TITAN, "device": "h100-96gb", "precision": "float8_tensorwise", "context": 8192}
    return Published(name=name, **(common | values))  # type: ignore[arg-type]


def _llama3(name: str, gpus: int, context: int, sequences: int, layout: Layout, tflops: float) -> Published:
    shape = Shape(read_model("llama-3.1-405b"))
    # The paper counts 6 operations for each parameter and, as its FLOPs suggest, masked attention.
    causal = 6 * shape.parameters + 6 * shape.q_width * context * shape.config.layers
    return Published(
        name=name,
        source=HERD,
        model="llama-3.1-405b",
        device="h100",
        nodes=gpus // 8,
        sequences=sequences,
        context=context,
        layout=layout,
        micro_batch=1,
        recompute="none",
        interleave=4,
        tokens_per_second=tflops * 1e12 / causal,
        fixed=("cp", "pp"),
    )


PUBLISHED: tuple[Published, ...] = (
    _titan(
        "8B, 8 GPUs, eager",
        model="llama-3.1-8b",
        nodes=1,
        sequences=16,
        layout=Layout(dp_shard=8),
        micro_batch=2,
        recompute="selective",
        precision="bf16",
        compile=False,
        tokens_per_second=5762,
        gib=82.4,
    ),
    _titan(
        "8B, 8 GPUs",
        model="llama-3.1-8b",
        nodes=1,
        sequences=16,
        layout=Layout(dp_shard=8),
        micro_batch=2,
        recompute="selective",
        precision="bf16",
        tokens_per_second=6667,
        gib=77.0,
    ),
    _titan(
        "8B, 8 GPUs, float8",
        model="llama-3.1-8b",
        nodes=1,
        sequences=16,
        layout=Layout(dp_shard=8),
        micro_batch=2,
        recompute="selective",
        tokens_per_second=8532,
        gib=76.8,
    ),
    _titan(
        "8B, 128 GPUs",
        model="llama-3.1-8b",
        nodes=16,
        sequences=256,
        layout=Layout(dp_shard=128),
        micro_batch=2,
        recompute="selective",
        precision="bf16",
        tokens_per_second=6514,
        gib=62.0,
    ),
    _titan(
        "8B, 128 GPUs, float8",
        model="llama-3.1-8b",
        nodes=16,
        sequences=256,
        layout=Layout(dp_shard=128),
        micro_batch=2,
        recompute="selective",
        tokens_per_second=8380,
        gib=61.8,
    ),
    *(
        _titan(
            f"8B, {context // 1024}K context, cp={cp}",
            model="llama-3.1-8b",
            nodes=1,
            sequences=8 // cp,
            context=context,
            layout=Layout(dp_shard=8 // cp, cp=cp),
            micro_batch=1,
            recompute="full",
            tokens_per_second=published,
            gib=gib,
            chosen=False,
        )
        for context, cp, published, gib in (
            (32768, 1, 3890, 83.9),
            (65536, 2, 2540, 84.2),
            (131072, 4, 1071, 84.0),
            (262144, 8, 548, 84.5),
        )
    ),
    _titan(
        "70B, 256 GPUs, tp=8",
        model="llama-3.1-70b",
        nodes=32,
        sequences=512,
        layout=Layout(dp_shard=32, tp=8),
        micro_batch=16,
        recompute="full",
        tokens_per_second=829,
        gib=71.9,
        fixed=("cp", "pp"),
        chosen=False,
    ),
    _titan(
        "405B, 512 GPUs, 1F1B",
        model="llama-3.1-405b",
        nodes=64,
        sequences=256,
        layout=Layout(dp_shard=8, pp=8, tp=8),
        micro_batch=1,
        recompute="full",
        tokens_per_second=100,
        gib=82.5,
        fixed=("cp", "pp"),
        chosen=False,
    ),
    _titan(
        "405B, 512 GPUs, interleaved",
        model="llama-3.1-405b",
        nodes=64,
        sequences=256,
        layout=Layout(dp_shard=8, pp=8, tp=8),
        micro_batch=1,
        recompute="full",
        interleave=2,
        tokens_per_second=128,
        gib=72.7,
        fixed=("cp", "pp"),
        chosen=False,
    ),
    _titan(
        "405B, 128 GPUs, tp=8",
        source=TITAN_405B,
        model="llama-3.1-405b",
        nodes=16,
        sequences=32,
        layout=Layout(dp_shard=16, tp=8),
        micro_batch=2,
        recompute="full",
        tokens_per_second=177,
        fixed=("cp", "pp"),
    ),
    Published(
        name="8B, 64 A100",
        source=TITAN_A100,
        model="llama-3.1-8b",
        device="a100",
        nodes=8,
        sequences=64,
        context=8192,
        layout=Layout(dp_shard=64),
        micro_batch=1,
        recompute="selective",
        compile=False,
        tokens_per_second=2973,
        fixed=("cp", "pp"),
    ),
    Published(
        name="70B, 64 A100",
        source=TITAN_A100,
        model="llama-3.1-70b",
        device="a100",
        nodes=8,
        sequences=64,
        context=8192,
        layout=Layout(dp_shard=64),
        micro_batch=1,
        recompute="full",
        compile=False,
        tokens_per_second=331,
        fixed=("cp", "pp"),
    ),
    *(
        Published(
            name=f"8B, {nodes * 8} H200, float8",
            source=TRAINY,
            model="llama-3.1-8b",
            device="h200",
            nodes=nodes,
            sequences=nodes * 16,
            context=8192,
            layout=Layout(dp_shard=nodes * 8),
            micro_batch=2,
            recompute="selective",
            precision="float8_tensorwise",
            tokens_per_second=published,
        )
        for nodes, published in ((4, 10938), (8, 10753))
    ),
    *(
        Published(
            name=f"Llama 2 {size}, TPU v4 ({data}, {model})",
            source=XLA,
            model=f"llama-2-{size.lower()}",
            device="tpu-v4",
            nodes=1,
            devices_per_node=data * model,
            sequences=sequences,
            context=1024,
            layout=Layout(dp_shard=data, tp=model),
            micro_batch=sequences // data,
            recompute="full",
            mfu=mfu,
        )
        for size, data, model, sequences, mfu in (
            ("7B", 16, 1, 256, None),
            ("13B", 32, 1, 256, None),
            ("70B", 32, 4, 512, 0.53),
        )
    ),
    _llama3("405B, 8,192 H100", 8192, 8192, 2048, Layout(dp_shard=64, pp=16, tp=8), 430),
    _llama3("405B, 16,384 H100", 16384, 8192, 2048, Layout(dp_shard=128, pp=16, tp=8), 400),
    *(
        Published(
            name=f"70B, 1,920 H200, {precision}",
            source=CRUSOE,
            model="llama-3.1-70b",
            device="h200",
            nodes=240,
            sequences=960,
            context=8192,
            layout=Layout(dp_replicate=15, dp_shard=64, cp=2),
            micro_batch=1,
            recompute="selective",
            precision=precision,
        )
        for precision in ("bf16", "float8_rowwise")
    ),
)
