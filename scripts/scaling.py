"""Write docs/scaling.md: what the planner says of clusters that nobody here has.

python scripts/scaling.py            writes the page
python scripts/scaling.py --check    exit code 1 when it is out of step with the planner
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from torchwright.train.planning.cluster import Cluster, read_device
from torchwright.train.planning.job import Job
from torchwright.train.planning.models import read_model
from torchwright.train.planning.rank import RankedLayout, evaluate, rank
from torchwright.train.planning.recommender import (
    Estimate,
    RecommenderJob,
    Sharding,
    Tables,
    estimate,
    estimates,
)
from torchwright.train.planning.render import UNKNOWN, batch_text, layout_text, time_name
from torchwright.train.planning.traffic import traffic
from torchwright.train.shape import Shape

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
CONTEXT = 8192
SAMPLES_70B = 2048
MODEL = "llama-3.1-70b"
RECOMMENDER = RecommenderJob(
    tables=(
        Tables(count=8, rows=4_000_000_000, dim=128, pooling=20),
        Tables(count=60, rows=95_000_000, dim=128, pooling=30),
        Tables(count=400, rows=2_500_000, dim=128, pooling=10),
    ),
    dense_parameters=1_000_000_000,
    samples=2048,
)
EVERY = (1, 10, 100)


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        if not same:
            print(f"{PAGE.name} is out of step: run python scripts/scaling.py")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    left_out = "\n".join(f"- {line}" for line in UNKNOWN)
    return (
        "<!-- Written by scripts/scaling.py from the planner; edit the script instead. -->\n\n"
        "# Scaling on paper\n\n"
        "What the planner ([plan-layout.md](plan-layout.md)) says of two clusters that nobody here has. No figure on "
        "this page was measured. Bytes are GB = 1e9 unless GiB is written.\n\n"
        f"{language_model()}\n{recommender()}\n"
        f"## What neither calculation knows\n\n{left_out}\n"
    )


Change = Callable[[str, float], float]
"""From (bandwidth or latency, value) of the network to another value."""


def cluster_of(
    name: str,
    nodes: int,
    change: Change = lambda field, value: value,
    fields: Mapping[str, float] | None = None,
) -> Cluster:
    """Nodes of 8 devices, with the network changed and other fields of the device set."""
    device = read_device(name)
    inner, outer = device.links
    outer = dataclasses.replace(
        outer, bandwidth=change("bandwidth", outer.bandwidth), latency=change("latency", outer.latency)
    )
    device = dataclasses.replace(device, links=(inner, outer), **(fields or {}))  # type: ignore[arg-type]
    return Cluster(device=device, nodes=nodes, devices_per_node=8)


def h200(
    nodes: int, change: Change = lambda field, value: value, fields: Mapping[str, float] | None = None
) -> Cluster:
    return cluster_of("h200", nodes, change, fields)


def scaled(wanted: str, factor: float) -> Change:
    return lambda field, value: value * factor if field == wanted else value


# ---------------------------------------------------------------------------------------------- the language model


def job(sequences: int = SAMPLES_70B, precision: str = "float8_rowwise") -> Job:
    return Job(tokens_per_step=sequences * CONTEXT, context=CONTEXT, precision=precision)  # type: ignore[arg-type]


def language_model() -> str:
    cluster = h200(256)
    found = rank(read_model(MODEL), job(), cluster)
    families = found.families
    best = families[0][0]
    wide = rank(read_model(MODEL), job(precision="bf16"), cluster).families[0][0]
    lines = [
        "## Llama 3.1 70B on 2,048 H200 with float8\n",
        f"256 nodes of 8 H200; {SAMPLES_70B} sequences of {CONTEXT} tokens a step (16.8 M tokens), float8_rowwise, "
        "AdamW, compiled.\n",
        f"`torchwright plan-layout {MODEL} --nodes 256 --device h200 --tokens-per-step 16M "
        "--precision float8_rowwise`\n",
        _table(
            ("", "layout", "tok/s/GPU", "MFU", "GiB", "batch", "what takes the time"),
            (
                (
                    place,
                    layout_text(family),
                    f"{family[0].tokens_per_second:,.0f}",
                    f"{family[0].mfu:.1%}",
                    f"{family[0].memory.total / 2**30:.0f}",
                    batch_text(family[0].plan),
                    family[0].bound,
                )
                for place, family in enumerate(families[:8], 1)
            ),
        ),
        "MFU is held against bfloat16's peak, so float8 can lift it above what bfloat16 could. "
        f"In bfloat16 the best is {wide.plan.layout} with {wide.tokens_per_second:,.0f} tok/s/GPU: float8 is worth "
        f"{best.tokens_per_second / wide.tokens_per_second:.2f}x here. "
        "Meta and Crusoe published 1.34x to 1.43x at 1,920 H200, with HSDP and cp=2.\n",
        f"### {best.plan.layout}: one GPU\n",
        _table(
            ("memory", "GiB", "of a step", "ms"),
            _side_by_side(
                [(name, f"{size / 2**30:.1f}") for name, size in best.memory.parts.items() if size],
                [
                    (time_name(name), f"{value * 1e3:,.1f}")
                    for name, value in best.time.parts.items()
                    if value
                ],
            ),
        ),
        f"In all {best.memory.total / 2**30:.0f} of {cluster.device.room / 2**30:.0f} GiB and "
        f"{best.time.total:.2f} s a step, "
        f"{job().tokens_per_step / best.time.total / 1e6:.2f} M tokens a second.\n",
        "### Traffic of one GPU and step\n",
        _traffic(cluster, best),
        "### From one node to all\n",
        _weak(),
        "### What would break first\n",
        _breaks(best),
    ]
    return "\n".join(lines)


def _traffic(cluster: Cluster, best: RankedLayout) -> str:
    found = traffic(Shape(read_model(MODEL)), job(), cluster, best.plan)
    names = [tier.name for tier in cluster.tiers]
    speeds = {tier.name: tier.bandwidth * tier.efficiency for tier in cluster.tiers}
    totals = {name: sum(links.get(name, 0.0) for links in found.values()) for name in names}
    rows = [
        (axis, *(f"{links.get(name, 0.0) / 1e9:,.1f}" for name in names)) for axis, links in found.items()
    ]
    rows.append(("all", *(f"{totals[name] / 1e9:,.1f}" for name in names)))
    busy = (f"{totals[name] / speeds[name] / best.time.total:.0%}" for name in names)
    rows.append(("share of the step that the link is busy", *busy))
    return _table(("GB in", *names), rows)


def _weak() -> str:
    rows, first = [], None
    for nodes in (8, 16, 32, 64, 128, 256):
        best = rank(read_model(MODEL), job(nodes * 8), h200(nodes), fixed={"pp": 1}).families[0][0]
        first = first or best.tokens_per_second
        rows.append(
            (
                nodes * 8,
                str(best.plan.layout),
                f"{best.tokens_per_second:,.0f}",
                f"{best.tokens_per_second / first:.1%}",
            )
        )
    return (
        "One sequence for each GPU, the best layout without pipeline stages.\n\n"
        + _table(("GPUs", "layout", "tok/s/GPU", "of 64 GPUs'"), rows)
        + "\nNothing is lost on paper, where every collective hides. Meta and Crusoe lost 4% in bfloat16 from 960 to "
        "1,920 GPUs: contention and stragglers, of which the model knows nothing.\n"
    )


def _breaks(best: RankedLayout) -> str:
    """Return how much each figure may worsen until the best layout loses 5%, and the best layout with much less."""
    shape, tokens = Shape(read_model(MODEL)), best.tokens_per_second

    def loss(cluster: Cluster) -> float:
        return 1 - evaluate(shape, job(), cluster, best.plan).tokens_per_second / tokens

    margins = [
        ("network bandwidth divided by", _margin(lambda x: loss(h200(256, scaled("bandwidth", 1 / x))))),
        ("network latency multiplied by", _margin(lambda x: loss(h200(256, scaled("latency", x))))),
        (
            "one GPU slower by a factor, for all wait for it",
            _margin(lambda x: loss(h200(256, fields=_slower(1 / x)))),
        ),
    ]
    memory = best.memory.total / h200(256).device.room
    cases: list[tuple[str, Cluster, int]] = [
        ("a tenth of the network's bandwidth", h200(256, scaled("bandwidth", 0.1)), SAMPLES_70B),
        ("ten times its latency", h200(256, scaled("latency", 10)), SAMPLES_70B),
        ("a quarter of the batch, 512 sequences", h200(256), 512),
        ("a sixteenth of the batch, 128 sequences", h200(256), 128),
        ("H100's memory (80 GiB)", h200(256, fields={"memory": 80 * 2**30}), SAMPLES_70B),
    ]
    rows = []
    for name, cluster, sequences in cases:
        worse = rank(read_model(MODEL), job(sequences), cluster, fixed={"pp": 1}).families[0][0]
        lost = 1 - worse.tokens_per_second / tokens
        rows.append((name, str(worse.plan.layout), f"{worse.tokens_per_second:,.0f}", f"{lost:.0%}"))
    first = min(margins, key=lambda margin: margin[1])
    return (
        "This layout loses a twentieth of its speed at:\n\n"
        + _table(("", "factor"), [(name, f"{factor:.2f}") for name, factor in margins])
        + f"\nMemory is used to {memory:.0%}. The smallest margin: {first[0].split(',')[0]}.\n\n"
        "With much less of one thing another layout may be best, pipeline stages left out:\n\n"
        + _table(("", "best layout then", "tok/s/GPU", "loss"), rows)
        + "\nParameters are gathered for each micro-batch however many tokens it has: a small batch leaves nothing to "
        "hide them behind.\n"
    )


def _margin(loss: Callable[[float], float]) -> float:
    """The factor from 1 at which a twentieth is lost, to one per cent; 1000 where it never is."""
    low, high = 1.0, 1000.0
    if loss(high) < 0.05:
        return high
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if loss(middle) >= 0.05 else (middle, high)
    return high


def _slower(factor: float) -> dict[str, float]:
    device = read_device("h200")
    names = ("matmul_efficiency", "float8_efficiency", "attention_efficiency", "memory_efficiency")
    return {name: getattr(device, name) * factor for name in names}


# -------------------------------------------------------------------------------------------------- the recommender


def recommender() -> str:
    cluster = cluster_of("h100", 512)
    room = cluster.device.room
    found = list(estimates(RECOMMENDER, cluster, EVERY))
    fitting = [one for one in found if one.total_memory <= room]
    best = min((one for one in fitting if one.sharding.sync_every == 100), key=lambda one: one.step)
    whole = estimate(RECOMMENDER, cluster, Sharding(group=cluster.devices, sync_every=1))
    smallest = min(one.sharding.group for one in fitting)
    lines = [
        "## A recommender with 10 TB of tables on 4,096 H100\n",
        "512 nodes of 8 H100 (80 GiB). Tables in 2 bytes with row-wise Adagrad, "
        f"{RECOMMENDER.table_bytes / 1e12:.2f} TB in all; {RECOMMENDER.dense_parameters / 1e9:.0f} B dense parameters; "
        f"{RECOMMENDER.samples} samples for each GPU, "
        f"{RECOMMENDER.lookups:,.0f} rows and {RECOMMENDER.vectors:,} numbers of vectors a sample.\n",
        _table(
            ("tables", "rows", "dim", "rows looked up", "TB"),
            (
                (
                    kind.count,
                    f"{kind.rows:,}",
                    kind.dim,
                    kind.pooling,
                    f"{kind.count * RECOMMENDER.bytes_of(kind) / 1e12:.2f}",
                )
                for kind in RECOMMENDER.tables
            ),
        ),
        "A group of GPUs holds all tables once; replicas of a shard are averaged every N steps. Groups of fewer than "
        f"{smallest} do not fit. With replicas as neighbours in rank (groups are "
        "`[i, R+i, 2R+i, …]` for R replicas):\n",
        _table(
            (
                "group",
                "replicas",
                "GiB",
                "busiest",
                "vectors",
                *(f"N={every}: ms (efficiency)" for every in EVERY),
            ),
            _by_group(found, room),
        ),
        "`busiest` is the cost of lookups on the fullest GPU of a group over the mean. `vectors` is what is sent for a "
        "sample: the larger the group, the smaller a GPU's fair share, and tables that are cut by rows send a "
        "partial sum from every piece.\n",
        f"### Groups of {best.sharding.group}, averaged every {best.sharding.sync_every} steps\n",
        _table(
            ("memory", "GiB", "of a step", "ms"),
            _side_by_side(
                [(name, f"{size / 2**30:.1f}") for name, size in best.memory.items()],
                [(name, f"{value * 1e3:.2f}") for name, value in best.seconds.items()],
            ),
        ),
        f"One table group over all 4,096 GPUs, without replicas, takes {whole.step * 1e3:.1f} ms a step; this "
        f"{best.step * 1e3:.1f} ms, {whole.step / best.step:.2f} times as fast. Expected efficiency "
        f"(computing over the whole step) {best.efficiency:.0%}, against {whole.efficiency:.0%}; "
        f"{RECOMMENDER.samples * cluster.devices / best.step / 1e6:.0f} M samples a second.\n",
        "### Traffic of one GPU\n",
        _table(("", "GB a step"), [(name, f"{size / 1e9:.2f}") for name, size in best.traffic.items()]),
        f"One average over {best.replicas} replicas takes "
        f"{best.seconds['sync'] * best.sharding.sync_every * 1e3:,.0f} ms; "
        "its line above is of one average, every other of one step.\n",
        "### What would break first\n",
        _recommender_breaks(best, room),
    ]
    return "\n".join(lines)


def _by_group(found: Sequence[Estimate], room: float) -> Iterable[tuple[object, ...]]:
    for group in (4096, 2048, 1024, 512, 256, 128):
        rows = [one for one in found if one.sharding.group == group and one.sharding.contiguous_replicas]
        first = rows[0]
        fits = "" if first.total_memory <= room else " (too much)"
        times = [f"{one.step * 1e3:.1f} ({one.efficiency:.0%})" for one in rows]
        times += [""] * (len(EVERY) - len(times))
        yield (
            group,
            first.replicas,
            f"{first.total_memory / 2**30:.0f}{fits}",
            f"{first.placement.cost:.2f}",
            f"{first.placement.vectors:,}",
            *times,
        )


def _recommender_breaks(best: Estimate, room: float) -> str:
    tables = tuple(dataclasses.replace(kind, rows=kind.rows * 2) for kind in RECOMMENDER.tables)
    hot = tuple(
        dataclasses.replace(kind, pooling=kind.pooling * 10 if kind.count == 60 else kind.pooling)
        for kind in RECOMMENDER.tables
    )
    flipped = dataclasses.replace(best.sharding, contiguous_replicas=False)
    normal = cluster_of("h100", 512)
    cases: list[tuple[str, RecommenderJob, Cluster, Sharding]] = [
        ("network at a half", RECOMMENDER, cluster_of("h100", 512, scaled("bandwidth", 0.5)), best.sharding),
        ("four times the latency", RECOMMENDER, cluster_of("h100", 512, scaled("latency", 4)), best.sharding),
        ("groups of neighbours, replicas far apart", RECOMMENDER, normal, flipped),
        (
            "an average after every step",
            RECOMMENDER,
            normal,
            dataclasses.replace(best.sharding, sync_every=1),
        ),
        ("tables of twice the rows", dataclasses.replace(RECOMMENDER, tables=tables), normal, best.sharding),
        (
            "the 60 middle tables looked up ten times as often",
            dataclasses.replace(RECOMMENDER, tables=hot),
            normal,
            best.sharding,
        ),
        (
            "a quarter of the samples for each GPU",
            dataclasses.replace(RECOMMENDER, samples=RECOMMENDER.samples // 4),
            normal,
            best.sharding,
        ),
    ]
    rows = []
    for name, model, cluster, sharding in cases:
        worse = estimate(model, cluster, sharding)
        fits = "" if worse.total_memory <= room else ": does not fit"
        speed = (model.samples / worse.step) / (RECOMMENDER.samples / best.step)
        memory = f"{worse.total_memory / 2**30:.0f}{fits}"
        rows.append((name, memory, f"{worse.step * 1e3:.1f}", f"{worse.efficiency:.0%}", f"{speed:.2f}x"))
    return _table(("", "GiB", "ms a step", "efficiency", "samples a second"), rows) + (
        f"\nMemory is at {best.total_memory / room:.0%} of what there is. What a step waits for longest is "
        f"{max(('imbalance', 'exchange', 'reduce', 'sync'), key=best.seconds.__getitem__)}.\n"
    )


def _side_by_side(
    left: Sequence[tuple[str, str]], right: Sequence[tuple[str, str]]
) -> Iterable[tuple[str, ...]]:
    for row in range(max(len(left), len(right))):
        yield (*(left[row] if row < len(left) else ("", "")), *(right[row] if row < len(right) else ("", "")))


def _table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
