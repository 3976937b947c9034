"""Recurrent mixers from their configuration alone: parameters, operations, and the layouts that they take."""

from __future__ import annotations

from dataclasses import dataclass

from torchwright.models.decoder.config import DecoderConfig, DeltaConfig, MambaConfig, ShortConvConfig
from torchwright.train.layout import Layout

CHUNK = 64
"""Tokens that see each other directly: pairs of tokens then cost about what states of 64 to 128 rows do."""
SEGMENT = 8 * CHUNK
"""Tokens of which the state at the begin alone is kept: all else is computed again in the backward pass."""


@dataclass(frozen=True, kw_only=True)
class MixerShape:
    """One layer's mixer."""

    inputs: int
    """Columns of all linear layers before the recurrence."""
    keys: int
    """Convolved channels that are keys or queries."""
    values: int
    """The other convolved ones, which are the inputs of its last linear layer."""
    matrices: int
    """Parameters of its linear layers, without biases."""
    rest: int
    """Biases, taps, and the recurrence's vectors and norm."""
    whole: int = 0
    """Those of both that tensor parallelism does not divide: of keys and queries that all heads share."""
    norm: int = 0
    """A norm's weights that all heads share, in neither."""
    heads: int = 0
    state: int = 0
    """Numbers of the states of all heads."""
    pairs: int = 0
    """Operations of a token with each token of its chunk, in all heads."""
    normed: bool = False
    """A gated norm comes before its last linear layer."""

    @classmethod
    def of(cls, config: DecoderConfig) -> MixerShape:
        E, mixer = config.model, config.mixer
        if isinstance(mixer, ShortConvConfig):
            rest = E * (mixer.width + 5 * mixer.bias)
            return cls(inputs=3 * E, keys=0, values=E, matrices=4 * E * E, rest=rest)
        assert mixer is not None, "a model without recurrent layers"
        keys, values, heads = 2 * mixer.keys, mixer.values, mixer.heads
        if isinstance(mixer, MambaConfig):
            inputs, taps = keys + 2 * values + heads, mixer.width + mixer.conv_bias
            rest = (keys + values) * taps + 3 * heads + values * mixer.normed
            rest += inputs * mixer.bias + config.model * mixer.out_bias
            whole = keys * (E + taps + mixer.bias) if mixer.key_heads == 1 else 0
            norm, pairs, normed = 0, keys + 2 * values, mixer.normed
        else:
            inputs = keys + 2 * values + 2 * heads
            rest, whole = (keys + values) * mixer.width + 2 * heads, 0
            # Keys with keys and with queries once a group; the triangular solution; products with values.
            pairs = 2 * keys + heads * (mixer.key_dim + mixer.head_dim) + 2 * values
            norm, normed = mixer.head_dim, True
        return cls(
            inputs=inputs,
            keys=keys,
            values=values,
            matrices=E * (inputs + values),
            rest=rest,
            whole=whole,
            norm=norm,
            heads=heads,
            state=values * mixer.key_dim,
            pairs=pairs,
            normed=normed,
        )

    @property
    def flops(self) -> float:
        """Operations per token of the recurrence's forward pass: with its chunk's tokens, and with the states.

        A state is read by queries, and written by keys; the delta rule reads it by keys as well.
        """
        reads = 3 if self.norm else 2
        return CHUNK * self.pairs + 2 * reads * self.state


def refused(config: DecoderConfig, layout: Layout) -> tuple[str, str] | None:
    """Return the rule that a layout breaks in recurrent layers and the numbers that break it, or None."""
    mixer = config.mixer
    if mixer is None:
        return None
    if layout.cp > 1:
        return (
            "cp divides tokens that a recurrence reads one after the other",
            f"cp={layout.cp}: each process would wait for the state of the one before it",
        )
    for name, count in divided(config).items():
        if count % layout.tp:
            return f"tp does not divide the {name}", f"{count} {name} over tp={layout.tp}"
    return None


def divided(config: DecoderConfig) -> dict[str, int]:
    """Return what tensor parallelism divides of the model's mixers, and how many there are."""
    mixer = config.mixer
    match mixer:
        case ShortConvConfig():
            return {"channels of short convolutions": config.model}
        case DeltaConfig():
            return {"key heads of the delta rule": mixer.key_heads}
        case MambaConfig() if mixer.key_heads == 1:  # every process has the one key
            return {"heads of the state space": mixer.heads}
        case MambaConfig():
            return {"groups of state-space heads with one key": mixer.key_heads}
        case None:
            return {}
