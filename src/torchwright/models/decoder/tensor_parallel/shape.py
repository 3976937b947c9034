"""The shape of one process's part of a decoder, and which decoders and schemes can be divided."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchwright.core.errors import ModelError, TorchwrightError
from torchwright.core.scheme import Scheme
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.tensor_parallel.processes import own


@dataclass(frozen=True)
class Place:
    """One process's place among those that divide a decoder."""

    rank: int
    ways: int

    def of(self, count: int) -> range:
        """The part of `count` rows or columns that the process has."""
        return own(count, self.rank, self.ways)

    def of_heads(self, heads: int, size: int) -> range:
        """The rows of its key-value heads of `size` rows: with fewer heads than processes, several have the same."""
        parts = min(heads, self.ways)
        mine = own(heads, self.rank * parts // self.ways, parts)
        return range(mine.start * size, mine.stop * size)


def divided(config: DecoderConfig, ways: int) -> DecoderConfig:
    """Return the configuration of one process's part."""
    experts = config.experts
    if experts is not None:
        experts = replace(experts, feed_forward=experts.feed_forward // ways, shared=experts.shared // ways)
    return replace(
        config,
        heads=config.heads // ways,
        kv_heads=config.kv_heads if config.latent else config.kv_heads_of(ways),
        feed_forward=config.feed_forward // ways,
        experts=experts,
    )


def check_divides(config: DecoderConfig, ways: int, scheme: Scheme | None) -> None:
    """Raise `ModelError` where so many processes cannot divide a decoder's layers, or a scheme's groups."""
    if (part := _whole(config)) is not None:
        raise ModelError(
            f"tp={ways} does not divide {config.architecture}",
            found=part,
            allowed="attention whose heads are alike, feed-forward blocks and experts",
            next="compute it in one process",
        )
    counts = divided_counts(config)
    check_counts(counts, "tp", ways, ModelError)
    if config.latent is None:
        check_kv_heads(config.kv_heads, ways, ModelError)
    inputs = {"attention's output": config.heads * _value_size(config), **counts}
    inputs.pop("query heads")
    for what, count in inputs.items():
        if scheme is not None and scheme.group and count // ways % scheme.group:
            raise ModelError(
                f"tp={ways} cuts the groups of {scheme}",
                found=f"{what}: {count // ways} of {count} for each process, not whole groups of {scheme.group}",
                next="choose a smaller tp or group_size, or quantize='w8a8', which has no groups",
            )


def divided_counts(config: DecoderConfig) -> dict[str, int]:
    """Return what tensor parallelism divides evenly: its name → how many there are."""
    counts = {"query heads": config.heads}
    if not all(config.sparse):
        counts["feed-forward features"] = config.feed_forward
    if config.experts is not None:
        counts["features of an expert"] = config.experts.feed_forward
        counts["features of the shared expert"] = config.experts.shared
    return counts


def check_counts(counts: dict[str, int], axis: str, ways: int, error: type[TorchwrightError]) -> None:
    """Raise `error` for the first of `counts` that the `axis` of so many processes does not divide."""
    for what, count in counts.items():
        if count % ways:
            raise error(
                f"{axis}={ways} does not divide the model's {what}",
                found=f"{count} {what}",
                allowed=", ".join(str(each) for each in range(1, count + 1) if count % each == 0)[:60],
                next=f"choose another {axis}",
            )


def check_kv_heads(heads: int, ways: int, error: type[TorchwrightError]) -> None:
    """Raise `error` where key-value heads neither divide over tp nor are shared by whole groups of processes."""
    if heads % ways and ways % heads:
        raise error(
            f"tp={ways} does not divide the model's key-value heads, nor do they divide it",
            found=f"{heads} key-value heads",
            allowed=f"a divisor of {heads}, or a multiple, of which several processes have the same head",
            next="choose another tp",
        )


def _value_size(config: DecoderConfig) -> int:
    return config.head_dim if config.latent is None else config.latent.value


def _whole(config: DecoderConfig) -> str | None:
    """The part of a decoder that no process can have a part of, or None."""
    if config.mixer is not None:
        return "recurrent layers"
    if config.shapes or config.reads or config.layer_inputs is not None:
        return "layers of different sizes, or with inputs of their own"
    if config.qk_norm == "projection":
        return "norms of queries and keys over all heads together"
    return None
