"""A cluster in a few numbers, and what its collectives cost.

A collective is costed on the ranks it really joins: at each tier the bytes that must enter one unit (a device, a node,
…) over the links that the group's own members have there. Stages are pipelined, so the slowest tier counts. Latency is
that of a ring, added up over its hops, or for an all-reduce that of a tree where it is less; the messages of an
all-to-all overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchwright.core.errors import TorchwrightError, unknown
from torchwright.core.toml_file import load_toml
from torchwright.train.planning.devices import DEVICES

POSTING = 1 / 8
"""The cost that one of many messages adds to an all-to-all, as a share of a single message's latency."""


class ClusterError(TorchwrightError):
    """A description of a device or cluster that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link between the units of one tier."""

    name: str
    bandwidth: float
    """Bytes per second and device, in one direction."""
    latency: float
    """Seconds of one hop."""
    devices: int | None = None
    """The number of devices that share the tier; None: a node's for the first, the whole cluster's for the last."""
    efficiency: float = 0.8
    """The share of the bandwidth that large collectives reach."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One accelerator. Bytes, bytes per second, operations per second."""

    name: str
    memory: float
    memory_bandwidth: float
    flops: dict[str, float]
    """Peak rate of dense matrix products for each type: float32, bfloat16, float8."""
    links: tuple[Link, ...]
    """The innermost first."""
    source: str = ""
    matmul_efficiency: float = 0.60
    """The share of the peak that large matrix products reach."""
    float8_efficiency: float = 0.50
    """The share of float8's peak that they reach."""
    attention_efficiency: float = 0.35
    """The share of bfloat16's peak that the attention kernel reaches."""
    memory_efficiency: float = 0.80
    """The share of the memory's bandwidth that element-wise kernels reach."""
    fused: bool = True
    """Attention is one operator; on the CPU it is several, which keep more."""
    reserved: float = 0.08
    """Share of the memory that the run-time, the collectives' buffers and the allocator keep from the model."""

    @property
    def room(self) -> float:
        """Bytes that the model can have."""
        return self.memory * (1 - self.reserved)


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """The ranks of a collective: (degree, distance in rank) for each of its axes, the innermost first."""

    axes: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        size = 1
        for degree, _ in self.axes:
            size *= degree
        return size

    def inside(self, unit: int) -> int:
        """Return how many of them lie within `unit` consecutive ranks."""
        inside = 1
        for degree, distance in self.axes:
            inside *= min(degree, max(1, unit // distance))
        return inside


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`nodes` machines of `devices_per_node` equal devices."""

    device: Accelerator
    nodes: int
    devices_per_node: int
    tiers: tuple[Link, ...] = field(init=False)
    """The links with `devices` filled in, as far as the cluster is large enough to have them."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.devices_per_node < 1:
            raise ClusterError("a cluster needs at least one node of one device")
        links, tiers = self.device.links, []
        for index, link in enumerate(links):
            last = index == len(links) - 1
            shared = link.devices or (self.devices if last else self.devices_per_node)
            tiers.append(Link(**{**vars(link), "devices": min(shared, self.devices)}))
            if shared >= self.devices:
                break
        object.__setattr__(self, "tiers", tuple(tiers))
        if tiers[-1].devices != self.devices:
            raise ClusterError(
                f"the links of {self.device.name} join {tiers[-1].devices} devices",
                found=f"a cluster of {self.devices}",
                next="add a [[links]] entry for the outermost tier",
            )

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def entering(self, group: RankGroup, size: float) -> dict[str, float]:
        """Tier → bytes that each member takes from its links when all gather the same `size` bytes, a part each."""
        total, unit, bytes_of = group.size, 1, {}
        for tier in self.tiers:
            inside = group.inside(unit)
            if group.inside(tier.devices or unit) > inside:
                bytes_of[tier.name] = size * (total - inside) / total / inside
            unit = tier.devices or unit
        return bytes_of

    def gather(self, group: RankGroup, size: float) -> float:
        """Seconds of an all-gather to `size` bytes on every rank, or of a reduce-scatter from them."""
        return max(self._seconds(self.entering(group, size)).values(), default=0.0) + self._ring(group)

    def all_reduce(self, group: RankGroup, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes: a reduce-scatter and an all-gather, by rings or by trees."""
        moving = max(self._seconds(self.entering(group, size)).values(), default=0.0)
        return 2 * (moving + min(self._ring(group), self._tree(group)))

    def leaving(self, group: RankGroup, size: float) -> dict[str, float]:
        """Tier → bytes that each member sends over its links of `size` bytes, in equal parts for all members."""
        total, unit, bytes_of = group.size, 1, {}
        for tier in self.tiers:
            outside = total - group.inside(unit)
            if outside:
                bytes_of[tier.name] = size * outside / total
            unit = tier.devices or unit
        return bytes_of

    def all_to_all(self, group: RankGroup, size: float) -> float:
        """Seconds in which every rank sends `size` bytes in equal parts to all ranks, itself included."""
        return max(self._seconds(self.leaving(group, size)).values(), default=0.0) + self._messages(group)

    def send(self, distance: int, size: float) -> float:
        """Seconds to send `size` bytes to the rank `distance` further."""
        tier = next((tier for tier in self.tiers if distance < (tier.devices or 0)), self.tiers[-1])
        return size / (tier.bandwidth * tier.efficiency) + tier.latency

    def _seconds(self, bytes_of: dict[str, float]) -> dict[str, float]:
        tiers = {tier.name: tier.bandwidth * tier.efficiency for tier in self.tiers}
        return {name: size / tiers[name] for name, size in bytes_of.items()}

    def _tree(self, group: RankGroup) -> float:
        """Latency from the leaves of a binary tree to its root."""
        seconds, unit = 0.0, 1
        for tier in self.tiers:
            branches = group.inside(tier.devices or unit) // group.inside(unit)
            seconds += math.ceil(math.log2(branches)) * tier.latency
            unit = tier.devices or unit
        return seconds

    def _messages(self, group: RankGroup) -> float:
        """Latency of a message to every other member; they overlap, and each costs its share of posting."""
        seconds, unit = 0.0, 1
        for tier in self.tiers:
            peers = group.inside(tier.devices or unit) - group.inside(unit)
            seconds += (1 + peers * POSTING) * tier.latency if peers else 0.0
            unit = tier.devices or unit
        return seconds

    def _ring(self, group: RankGroup) -> float:
        """Latency of a ring through all members, each unit entered once."""
        seconds, unit = 0.0, 1
        for tier in self.tiers:
            units = group.size // group.inside(unit)
            outer = group.size // group.inside(tier.devices or unit)
            seconds += (units - outer) * tier.latency
            unit = tier.devices or unit
        return seconds


def read_device(name: str) -> Accelerator:
    """A well-known device, or the one a TOML file describes with the same fields.

    Raises `UnknownName` and `ClusterError`.
    """
    if name in DEVICES:
        return _device(name, DEVICES[name])
    path = Path(name)
    if not path.is_file():
        raise unknown("device", name, [*DEVICES, "cpu"], next="give one of these or the path of a TOML file")
    try:
        return _device(path.stem, load_toml(path))
    except (ValueError, OSError) as error:
        raise ClusterError(f"{path} is not TOML", found=str(error)) from error


def _device(name: str, data: dict[str, Any]) -> Accelerator:
    links = data.get("links")
    if not isinstance(links, list) or not links or not all(isinstance(link, dict) for link in links):
        raise ClusterError(
            f"the device {name} has no links", allowed="[[links]] entries, the innermost first"
        )
    flops = data.get("flops")
    if not isinstance(flops, dict) or not flops:
        raise ClusterError(
            f"the device {name} has no rates", allowed="[flops] with float32, bfloat16, float8"
        )
    for kind, rate in flops.items():
        if kind not in ("float32", "bfloat16", "float8"):
            raise unknown("type of number", kind, ["float32", "bfloat16", "float8"])
        _positive(name, kind, rate)
    rest = {key: value for key, value in data.items() if key not in ("links", "flops")}
    values = _fields(Accelerator, name, {"name": name} | rest)
    return Accelerator(
        **values, flops=flops, links=tuple(Link(**_fields(Link, name, link)) for link in links)
    )


def _fields(cls: type, name: str, data: dict[str, Any]) -> dict[str, Any]:
    known = [field for field in cls.__dataclass_fields__ if field not in ("links", "flops")]
    for key, value in data.items():
        if key not in known:
            raise unknown(f"field of the device {name}", key, known)
        if key == "fused":
            if not isinstance(value, bool):
                raise ClusterError(f"{key} of the device {name} is neither true nor false", found=repr(value))
        elif key not in ("name", "source"):
            _positive(name, key, value)
    needed = ("memory", "memory_bandwidth") if cls is Accelerator else ("name", "bandwidth", "latency")
    missing = [key for key in needed if key not in data]
    if missing:
        raise ClusterError(f"the device {name} has no {missing[0]}", allowed=", ".join(known))
    return data


def _positive(name: str, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ClusterError(f"{key} of the device {name} is no positive number", found=repr(value))


def axis_groups(degrees: Sequence[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Axis → (degree, distance in rank), for axes given from the outermost to the innermost."""
    groups, distance = {}, 1
    for axis, degree in reversed(degrees):
        groups[axis] = (degree, distance)
        distance *= degree
    return groups


def this_machine(processes: int) -> Accelerator:
    """Describe this machine's CPU, divided among `processes`, by the rates that `torchwright doctor` measures.

    Links are gloo's over the loopback interface, of which 2 GB/s and 0.1 ms are a guess.
    On a busy machine the rates are lower bounds, and `source` says so.
    """
    from torchwright.hardware.devices.cpu import CPU

    facts, ceilings = CPU().identify(), CPU().ceilings()
    if not ceilings.tflops:
        ceilings = CPU().ceilings(refresh=True)
    rates = {kind: rate * 1e12 / processes for kind, rate in ceilings.tflops.items()}
    return Accelerator(
        name="cpu",
        memory=facts.memory_bytes / processes,
        memory_bandwidth=(ceilings.read_gb_per_s or 10.0) * 1e9 / processes,
        flops={kind: rates[kind] for kind in ("float32", "bfloat16") if kind in rates},
        links=(Link(name="loopback", bandwidth=2e9, latency=1e-4),),
        fused=False,
        source=f"measured here, at least: {ceilings.disturbed}" if ceilings.disturbed else "measured here",
    )
