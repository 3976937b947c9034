"""Seconds of one training step: a roofline for a device's computation, and its collectives with their overlap.

Assumed overlap: a layer's all-gather and reduce-scatter (FSDP) and all-reduce (HSDP) run concurrently with the
computation of the neighbouring layer, and only the excess counts. The step waits for the embedding's
gather before the first layer, and for the gradients of embedding and output layer after the last. It also waits for
tensor-parallel and expert-parallel collectives and for the all-to-all of context parallelism. A ring passes keys on
during its attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torchwright.train.planning.activations import copies, rings
from torchwright.train.planning.cluster import Cluster, RankGroup, axis_groups
from torchwright.train.planning.job import OPTIMIZER_BYTES, Job, LayoutPlan
from torchwright.train.planning.memory import Ends, arriving, held, owned_by
from torchwright.train.shape import Kind, LayerParameters, Shape, Stage

SCORE_BYTES = 24
"""Bytes read and written per score without a fused kernel: scaled, masked, maximum taken, exponentiated, multiplied."""

MX_BYTES = {False: 44, True: 8}
"""Bytes that emulated MX rounding reads and writes per value: eager, counted over `mx_round`; compiled, in two
passes.
"""

CLIPPING = 12
"""Bytes of a parameter's gradient to take its norm and to scale it: two reads, one write."""

RECURRENCE_BACKWARD = 3.0
"""Operations of a recurrence's backward pass over those of its forward pass: two for each, and the segment's again."""

ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward pass over those of its forward pass: five products instead of two (Dao, 2023)."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step, part by part; the parts add up to `total`."""

    parts: dict[str, float]
    """matrix products, attention, memory, optimizer, and exposed: fsdp, replicas, tp, cp, ep, pipeline."""

    @cached_property
    def total(self) -> float:
        return sum(self.parts.values())

    @cached_property
    def computing(self) -> float:
        return sum(self.parts[name] for name in ("matrix products", "attention", "memory", "optimizer"))


@dataclass
class _Pass:
    """Seconds of one micro-batch through some layers, forward and backward together."""

    parts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.parts[name] = self.parts.get(name, 0.0) + seconds

    def add_all(self, other: _Pass, times: float = 1.0) -> None:
        for name, seconds in other.parts.items():
            self.add(name, seconds * times)

    @property
    def total(self) -> float:
        return sum(self.parts.values())


class Clock:
    """Times plans of one job on one cluster."""

    def __init__(self, shape: Shape, job: Job, cluster: Cluster) -> None:
        self.shape, self.job, self.cluster = shape, job, cluster
        device = cluster.device
        self.rate = device.flops[job.rate] * (
            device.float8_efficiency if job.rate == "float8" else device.matmul_efficiency
        )
        plain = "float32" if job.precision == "fp32" else "bfloat16"
        self.plain_rate = device.flops[plain] * device.matmul_efficiency
        self.recurrence_rate = device.flops.get("float32", device.flops[plain]) * device.matmul_efficiency
        self.attention_rate = device.flops[plain] * device.attention_efficiency
        self.bandwidth = device.memory_bandwidth * device.memory_efficiency
        self._own: dict[tuple[object, ...], tuple[_Pass, _Pass]] = {}

    def step(self, plan: LayoutPlan) -> StepTime:
        """The step of the slowest stage, with the pipeline's bubble."""
        groups = plan_groups(plan)
        passes = [self._stage(plan, stage, groups) for stage in self.shape.stages(plan.layout.pp)]
        slowest = max(passes, key=lambda stage: stage.total)
        parts = {name: seconds * plan.micro_batches for name, seconds in slowest.parts.items()}
        pp = plan.layout.pp
        if pp > 1:
            tokens = plan.tokens(self.job)
            edge = self.cluster.send(
                groups["pp"].axes[0][1], self.job.width * self.shape.config.model * tokens / plan.layout.tp
            )
            # 1F1B: the first micro-batch fills the stages and the last one drains them; its edges are waited for.
            # Interleaved, a piece of a stage is enough to go on, and there are more edges (Narayanan et al., 2021).
            parts["pipeline"] = plan.bubble * slowest.total
            parts["pipeline"] += 2 * (pp - 1 + plan.micro_batches * plan.interleave) * edge
            parts["fsdp"] = parts.get("fsdp", 0.0) + self._once(plan, groups, slowest.total)
        parts["optimizer"] = self._optimizer(plan)
        names = ("matrix products", "attention", "memory", "optimizer")
        exposed = ("fsdp", "replicas", "tp", "cp", "ep", "pipeline")
        return StepTime(parts={name: parts.get(name, 0.0) for name in (*names, *exposed)})

    def _stage(self, plan: LayoutPlan, stage: Stage, groups: dict[str, RankGroup]) -> _Pass:
        total = _Pass()
        for kind, count in stage.layers:
            total.add_all(self._layer(plan, kind, groups), count)
        if stage.heads:
            total.add_all(self._head(plan))
        total.add_all(self._ends(plan, stage, groups))
        return total

    def _layer(self, plan: LayoutPlan, kind: Kind, groups: dict[str, RankGroup]) -> _Pass:
        """One layer, one micro-batch: forward, backward, and what is recomputed between."""
        layout = plan.layout
        # However the batch is split into replicas and shards, a layer itself takes as long.
        key = (kind, layout.tp, layout.cp, layout.pp, layout.ep, plan.micro_batch, plan.recompute)
        if key not in self._own:
            computing = self._computing(plan, kind)
            exchanging = _Pass()
            self._add_activations(exchanging, plan, kind, groups)
            self._own[key] = computing, exchanging
        computing, exchanging = self._own[key]
        here = _Pass()
        here.add_all(computing)
        here.add_all(exchanging)
        self._add_sharding(here, plan, self.shape.layer(kind), groups, computing.total)
        return here

    def _computing(self, plan: LayoutPlan, kind: Kind) -> _Pass:
        layout, tokens = plan.layout, plan.tokens(self.job)
        parameters = self.shape.layer(kind)
        share = 2 * tokens / layout.tp
        forward = share * (parameters.attention + parameters.feed_forward) / self.rate
        forward += 2 * tokens * parameters.whole / self.rate
        forward += (
            share * parameters.chosen_experts / self.plain_rate
        )  # the trainer leaves experts in bfloat16
        # Selective recomputation keeps what these two gave.
        again = 1 if plan.recompute == "full" else 0
        # Weights of all experts are read for however few tokens; a product is bound by operations or by bytes.
        weights = self.job.width * held(parameters, layout) / self.bandwidth
        here = _Pass()
        here.add("matrix products", (3 + again) * max(forward, weights))
        here.add("attention", self._attend(plan, kind, 1 + ATTENTION_BACKWARD + again))
        mixer = self.shape.mixer(kind)
        if mixer is not None:  # in float32; backward it is computed again by segments
            flops = mixer.flops / layout.tp * tokens
            here.add("attention", (1 + RECURRENCE_BACKWARD + again) * flops / self.recurrence_rate)
        here.add("memory", self._elementwise(plan, kind) * tokens / self.bandwidth)
        if self.job.precision == "mxfp8":
            rounded = self._rounded(kind, layout.tp) * tokens
            rounded += 2 * ((parameters.attention + parameters.feed_forward) / layout.tp + parameters.whole)
            rounded += 2 * parameters.experts / (layout.tp * layout.ep)
            here.add("memory", MX_BYTES[self.job.compile] * rounded / self.bandwidth)
        return here

    def _rounded(self, kind: Kind, tp: int) -> float:
        """Values per token that MX formats round: every product's input and output gradient, both ways."""
        shape, E, experts = self.shape.of(kind), self.shape.config.model, self.shape.config.experts
        F = shape.feed_forward_width(kind) / tp
        given, read = (width / tp for width in shape.mixing_widths(kind))
        times = experts.chosen if kind.sparse and experts is not None else 1
        return 2 * ((3 + 2 * times) * E + read + F) + 2 * (given + 2 * F + (1 + times) * E)

    def _attend(self, plan: LayoutPlan, kind: Kind, passes: float) -> float:
        """A fused kernel; for soft caps, and windows in a ring, tiles of scores that go through memory."""
        tokens, shape, context = plan.tokens(self.job), self.shape, self.job.context
        flops = shape.attention_flops(kind, context) / plan.layout.tp * tokens
        windowed = rings(shape, plan.layout) and 0 < kind.window < context
        if not shape.config.attention_soft_cap and not windowed:
            return passes * flops / self.attention_rate
        scores = shape.config.heads / plan.layout.tp * tokens * shape.keys(kind, context)
        return passes * (flops / self.plain_rate + SCORE_BYTES * scores / self.bandwidth)

    def _elementwise(self, plan: LayoutPlan, kind: Kind) -> float:
        """Bytes per token that element-wise kernels and norms read and write, forward and backward."""
        shape, tp, width = self.shape.of(kind), plan.layout.tp, self.job.width
        F = shape.feed_forward_width(kind) / tp
        heads = (shape.q_width + shape.kv_width) / tp if kind.attends else 0.0
        # Fused: two norms with their additions, the rotation, and the activation with its product.
        values = 2 * 4 * shape.config.model / tp + 2 * heads + 3 * F
        mixer = shape.mixer(kind)
        if mixer is not None:
            # Convolutions with their activation, what the recurrence reads and gives, a gated norm.
            values += (3 * mixer.keys + 7 * mixer.values) / tp
        experts = shape.config.experts
        if kind.sparse and experts is not None:
            values += 6 * experts.chosen * shape.config.model  # rows sorted by expert, sent back and weighted
        passes = 3.0 if plan.recompute == "none" else 4.0
        fused = 1.0 if self.job.compile else 2.5
        return width * values * passes * fused + self._casts(kind, tp)

    def _casts(self, kind: Kind, tp: int) -> float:
        """Bytes per token of turning inputs and gradients into float8: each read and written by rows and by columns."""
        if self.job.rate != "float8":
            return 0.0
        shape, E = self.shape.of(kind), self.shape.config.model
        F = 0.0 if kind.sparse else shape.feed_forward_width(kind) / tp
        given, read = shape.mixing_widths(kind)
        inputs = 2 * E + read / tp + F
        outputs = given / tp + 2 * F + 2 * E
        return 3 * (2 * inputs + 2 * outputs)

    def _add_sharding(
        self,
        here: _Pass,
        plan: LayoutPlan,
        layer: LayerParameters,
        groups: dict[str, RankGroup],
        computing: float,
    ) -> None:
        """Return the seconds of FSDP's and HSDP's collectives that the computation does not hide."""
        layout, parameters = plan.layout, held(layer, plan.layout)
        # A forward pass is a third of the layer's computation, a quarter with full recomputation.
        forward = computing / (4 if plan.recompute == "full" else 3)
        backward = computing - forward
        if groups["fsdp"].size > 1 and layout.pp == 1:
            gather = self.cluster.gather(groups["fsdp"], arriving(layer, layout, self.job))
            reduce = self.cluster.gather(groups["fsdp"], 4 * parameters)
            here.add("fsdp", max(0.0, gather - forward) + max(0.0, gather + reduce - backward))
            backward = max(0.0, backward - gather - reduce)
        if layout.dp_replicate > 1 and layout.pp == 1:
            ways = groups["fsdp"].size
            every = self.cluster.all_reduce(groups["dp_replicate"], 4 * parameters / ways)
            here.add("replicas", max(0.0, every - backward))

    def _add_activations(
        self, here: _Pass, plan: LayoutPlan, kind: Kind, groups: dict[str, RankGroup]
    ) -> None:
        layout, shape = plan.layout, self.shape
        tokens, width, E = plan.tokens(self.job), self.job.width, self.shape.config.model
        repeats = 3 if plan.recompute == "full" else 2
        if layout.tp > 1:
            # Gathered before attention and feed-forward and scattered behind each; the same backward.
            here.add("tp", shape.exchanges * repeats * self.cluster.gather(groups["tp"], width * E * tokens))
        if layout.cp > 1:
            here.add("cp", self._context(plan, kind, groups, repeats))
        if layout.ep > 1 and kind.sparse and shape.config.experts is not None:
            rows = width * E * tokens * copies(shape, layout) / layout.tp
            here.add("ep", 2 * repeats * self.cluster.all_to_all(groups["ep"], rows))

    def _context(self, plan: LayoutPlan, kind: Kind, groups: dict[str, RankGroup], repeats: int) -> float:
        """Over heads where they divide: an all-to-all of q, k and v, and one of the output. Else a ring."""
        layout, shape, width = plan.layout, self.shape.of(kind), self.job.width
        tokens = plan.tokens(self.job)
        if not rings(shape, layout):
            values = 2 * (shape.q_width + shape.kv_width) / layout.tp
            return repeats * self.cluster.all_to_all(groups["cp"], width * values * tokens)
        block = 2 * shape.kv_width / layout.tp * tokens
        attend = self._attend(plan, kind, 1.0) / layout.cp
        degree, distance = groups["cp"].axes[0]
        hop = self.cluster.send(distance, width * block)
        # Backward passes gradients of keys and values along as well, in float32.
        back = hop + self.cluster.send(distance, 4 * block)
        return (degree - 1) * (
            (repeats - 1) * max(0.0, hop - attend) + max(0.0, back - ATTENTION_BACKWARD * attend)
        )

    def _head(self, plan: LayoutPlan) -> _Pass:
        tokens, V = plan.tokens(self.job), self.shape.config.vocabulary / plan.layout.tp
        here = _Pass()
        here.add("matrix products", 6 * self.shape.config.model * V * tokens / self.plain_rate)
        # Logits are written, read twice and once more for their gradients, which are written and read; eager, in
        # float32 and with every step through memory.
        values = 6 * self.job.width if self.job.fused_loss else 2 * self.job.width + 6 * 4
        here.add("memory", values * V * tokens / self.bandwidth)
        return here

    def _ends(self, plan: LayoutPlan, stage: Stage, groups: dict[str, RankGroup]) -> _Pass:
        """Return the bytes that embedding and output layer move, without the logits."""
        ends, width = Ends.of(self.shape, stage, plan.layout, self.job.width), self.job.width
        tokens = plan.tokens(self.job) if stage.embeds else 0
        # A row read and written a token; backward it is added to a table of zeros. Gradients are copied to be sent.
        values = tokens * self.shape.config.model * (4 + 2 * width + 8) + ends.embedding + 2 * ends.reducing
        here = _Pass()
        here.add("memory", values / self.bandwidth)
        if plan.layout.pp == 1:
            gradients = 4 * ends.parameters
            if groups["fsdp"].size > 1:
                here.add("fsdp", self.cluster.gather(groups["fsdp"], ends.embedding))
                here.add("fsdp", self.cluster.gather(groups["fsdp"], gradients))
            if plan.layout.dp_replicate > 1:
                part = gradients / groups["fsdp"].size
                here.add("replicas", self.cluster.all_reduce(groups["dp_replicate"], part))
        return here

    def _once(self, plan: LayoutPlan, groups: dict[str, RankGroup], micro_batch: float) -> float:
        """Stages gather their parameters and reduce their gradients once a step: what one micro-batch does not hide."""
        layout, width = plan.layout, self.job.width
        stages = self.shape.stages(layout.pp)
        ends = [Ends.of(self.shape, stage, layout, width).parameters for stage in stages]
        layers = [[(self.shape.layer(kind), count) for kind, count in stage.layers] for stage in stages]
        stage = max(
            sum(held(layer, layout) * count for layer, count in of_stage) + end
            for of_stage, end in zip(layers, ends, strict=True)
        )
        stages_bytes = max(
            sum(arriving(layer, layout, self.job) * count for layer, count in of_stage) + width * end
            for of_stage, end in zip(layers, ends, strict=True)
        )
        gather = self.cluster.gather(groups["fsdp"], stages_bytes)
        reduce = self.cluster.gather(groups["fsdp"], 4 * stage)
        if plan.layout.dp_replicate > 1:
            reduce += self.cluster.all_reduce(groups["dp_replicate"], 4 * stage / groups["fsdp"].size)
        return max(0.0, gather - micro_batch / 3) + max(0.0, reduce - 2 * micro_batch / 3)

    def _optimizer(self, plan: LayoutPlan) -> float:
        """Gradients clipped; state, gradients and parameters read, state and parameters written."""
        mine = max(owned_by(self.shape, stage, plan.layout) for stage in self.shape.stages(plan.layout.pp))
        return mine * (2 * OPTIMIZER_BYTES[self.job.optimizer] + 12 + CLIPPING) / self.bandwidth


def plan_groups(plan: LayoutPlan) -> dict[str, RankGroup]:
    """The ranks that take part in each axis's collectives; `fsdp` is dp_shard and cp together."""
    layout = plan.layout
    order = ("dp_replicate", "dp_shard", "pp", "cp", "tp")
    axes = axis_groups([(axis, getattr(layout, axis)) for axis in order])
    groups = {axis: RankGroup(axes=(axes[axis],)) for axis in order}
    groups["fsdp"] = RankGroup(axes=(axes["cp"], axes["dp_shard"]))
    # Experts lie on the innermost of dp_shard · cp.
    inner = min(layout.cp, layout.ep)
    groups["ep"] = RankGroup(axes=((inner, axes["cp"][1]), (max(1, layout.ep // inner), axes["dp_shard"][1])))
    return groups
