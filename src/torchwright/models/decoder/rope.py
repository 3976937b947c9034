"""Rotary position embeddings: every scaling of the supported families, and the cosines and sines of a batch.

Angles are float32, as they are in transformers: at far positions another precision is another rotation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchwright.core.errors import unknown
from torchwright.hub.context import scaled_context
from torchwright.hub.fields import Fields
from torchwright.models.decoder.axes import AXES
from torchwright.models.decoder.batch import Batch

FIRST_ROWS = 512
STRETCHED = "ntk_alpha"
"""Hunyuan's name here for what its files call dynamic: with an `alpha` the base is stretched by it, whatever the length
of a text."""
KEYS = (
    "type",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
    "finetuned",
    "mrope_section",
    "mrope_interleaved",
)
"""Keys of any scaling: transformers ignores those that the given kind does not use."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """One rotary embedding: what config.json says, defaults filled in."""

    kind: str
    theta: float
    rotated: int
    """Dimensions of a head that turn (R)."""
    factor: float = 1.0
    original: int
    """Positions the model was trained on before it was scaled."""
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    share: float = 1.0
    """The share of a proportional embedding's pairs that turn; all have a place."""
    sections: tuple[int, ...] = ()
    """Frequencies that turn with time, height and width of a picture's token (Qwen2-VL)."""
    interleaved: bool = False
    """True if frequencies take turns instead of lying in sections (Qwen3-VL)."""

    def context(self, positions: int) -> int:
        """Return the positions that the model can serve, where max_position_embeddings is `positions`."""
        return scaled_context(self.kind, positions, self.original, self.factor)


def read_rope(
    section: Fields,
    *,
    theta: float,
    head_dim: int,
    positions: int,
    renamed: dict[str, str],
    original: int | None = None,
    partial: float | None = None,
) -> Rope:
    """Return the embedding that `section` describes: rope_parameters, or rope_scaling of older files.

    `theta` and `partial` (the rotated share of a head) hold where the section names none. `original` is the trained
    length that the top level names, which goes before the section's. `renamed` are the family's names for a scaling.
    Raises `ModelError` for a kind or a key that is not read here.
    """
    kind = section.text("rope_type", section.text("type", "default"))
    kind = renamed.get(kind, kind)
    alpha = 1.0
    if kind == STRETCHED:
        kind, alpha = ("default", section.positive("alpha")) if section.get("alpha") else ("dynamic", 1.0)
    if kind not in ROPES:
        raise unknown(
            "rotary embedding", kind, ROPES, next=f"see '{section.prefix}rope_type' in {section.path}"
        )
    section.settle(*KEYS)
    theta = section.positive("rope_theta", theta)
    if theta <= 1:
        raise section.wrong("rope_theta", "a number above 1")
    if alpha != 1 and head_dim == 2:
        raise section.wrong("alpha", "a number for four dimensions that turn, or more")
    theta *= alpha ** (head_dim / (head_dim - 2)) if alpha != 1 else 1
    share = section.positive("partial_rotary_factor", 1.0 if partial is None else partial)
    rotated = head_dim if kind == "proportional" else int(head_dim * share)
    if rotated < 2 or rotated % 2 or rotated > head_dim:
        raise section.wrong("partial_rotary_factor", f"an even part of the head's {head_dim} dimensions")
    if kind == "dynamic" and rotated == 2:
        raise section.wrong("rope_type", "another scaling: dynamic needs four dimensions that turn")
    if original is None:
        original = section.integer("original_max_position_embeddings", positions)
    plain = {"kind": kind, "theta": theta, "rotated": rotated, "original": original}
    plain |= _sections(section, kind, rotated // 2)
    if kind == "default":
        return Rope(**plain)
    if kind == "proportional":
        if share > 1:
            raise section.wrong("partial_rotary_factor", "a number of at most 1")
        return Rope(**plain, factor=section.positive("factor", 1.0), share=share)
    if kind in ("linear", "dynamic"):
        return Rope(**plain | {"factor": section.positive("factor"), "original": positions})
    if kind == "llama3":
        return Rope(
            **plain,
            factor=section.positive("factor"),
            low_freq_factor=section.positive("low_freq_factor"),
            high_freq_factor=_high_factor(section),
        )
    factor = section.positive("factor", positions / original)
    given = None if section.get("attention_factor") is None else section.positive("attention_factor")
    if kind == "yarn":
        return Rope(
            **plain,
            factor=factor,
            attention_factor=_yarn_attention(section, factor) if given is None else given,
            beta_fast=section.positive("beta_fast", 32.0),
            beta_slow=section.positive("beta_slow", 1.0),
            truncate=section.flag("truncate", True),
        )
    stretch = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
    return Rope(
        **plain,
        factor=factor,
        attention_factor=stretch if given is None else given,
        short_factor=_factors(section, "short_factor", rotated // 2),
        long_factor=_factors(section, "long_factor", rotated // 2),
    )


def _sections(section: Fields, kind: str, frequencies: int) -> dict[str, Any]:
    """Return which frequencies turn with which axis of a picture."""
    if section.get("mrope_section") is None:
        return {}
    found = tuple(int(count) for count in section.numbers("mrope_section", AXES))
    interleaved = section.flag("mrope_interleaved", False)
    if min(found) < 0 or (sum(found) != frequencies and not interleaved):
        raise section.wrong("mrope_section", f"{AXES} numbers that are {frequencies} together")
    if kind in BY_LENGTH:
        raise section.wrong("mrope_section", f"another scaling: {kind} depends on the length")
    return {"sections": found, "interleaved": interleaved}


def _high_factor(section: Fields) -> float:
    """Return llama3's `high_freq_factor`; the blend divides by its distance from the low one."""
    high = section.positive("high_freq_factor")
    if high == section.positive("low_freq_factor"):
        raise section.wrong("high_freq_factor", "another number than low_freq_factor")
    return high


def _factors(section: Fields, key: str, length: int) -> tuple[float, ...]:
    """Return longrope's factors, by which frequencies are divided."""
    found = section.numbers(key, length)
    if min(found) <= 0:
        raise section.wrong(key, f"a list of {length} numbers above 0")
    return found


def angles(rope: Rope, positions: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines (…, R/2) in float32 of positions (…), by which serving and training rotate alike.

    `lengths` are the lengths of the positions' sequences, one each or one for all.
    """
    angle = positions[..., None].float() * ROPES[rope.kind](rope, lengths)
    return angle.cos() * rope.attention_factor, angle.sin() * rope.attention_factor


class RotaryTable:
    """Cosines and sines of one embedding for whatever positions a batch holds.

    Most embeddings turn a position by the same angle in every sequence: one table serves all, and grows with the
    longest sequence seen, because a table of a whole long context would cost tens of megabytes. "dynamic" and
    "longrope" depend on the sequence's length as well (`Batch.lengths_T`): the length of the prompt, then that of the
    sequence as it grows.
    """

    def __init__(self, rope: Rope, context: int) -> None:
        self.rope, self.context = rope, context
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cosines and sines (rows, R/2) in float32, and each token's row (T,)."""
        if self.rope.kind in BY_LENGTH:
            cos, sin = angles(self.rope, batch.positions_T, batch.lengths_T)
            return cos, sin, torch.arange(len(batch.positions_T), device=batch.positions_T.device)
        cos, sin = self.rows(batch.longest, batch.positions_T.device)
        if batch.axes_AT is None or not self.rope.sections:
            return cos, sin, batch.positions_T
        # Taken from the table like those of text: a picture changes no bit of another sequence.
        of_frequency_TR = batch.axes_AT[axes_of(self.rope).to(batch.axes_AT.device)].T
        cos, sin = cos.gather(0, of_frequency_TR), sin.gather(0, of_frequency_TR)
        return cos, sin, torch.arange(len(batch.positions_T), device=batch.positions_T.device)

    def rows(self, longest: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the table of at least `longest` positions, of an embedding that does not depend on lengths."""
        if self._table is None or len(self._table[0]) < longest or self._table[0].device != device:
            rows = min(max(FIRST_ROWS, 2 ** math.ceil(math.log2(longest))), max(self.context, longest))
            positions = torch.arange(rows, device=device)
            self._table = angles(self.rope, positions, positions)
        return self._table


def axes_of(rope: Rope) -> torch.Tensor:
    """The axis (R/2,) with which each frequency turns."""
    if not rope.interleaved:
        return torch.repeat_interleave(torch.arange(AXES), torch.tensor(rope.sections))
    found = torch.zeros(rope.rotated // 2, dtype=torch.int64)
    for axis in range(1, AXES):  # the first takes what the others leave
        found[axis : AXES * rope.sections[axis] : AXES] = axis
    return found


def _exponents(rope: Rope, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(0, rope.rotated, 2, device=like.device).float() / rope.rotated


def _default(rope: Rope, lengths_T: torch.Tensor) -> torch.Tensor:
    return 1.0 / rope.theta ** _exponents(rope, lengths_T)


def _linear(rope: Rope, lengths_T: torch.Tensor) -> torch.Tensor:
    return _default(rope, lengths_T) / rope.factor


def _proportional(rope: Rope, lengths_T: torch.Tensor) -> torch.Tensor:
    """Frequencies of the first pairs, in steps of the whole head; the others do not turn (Gemma 4)."""
    turns = torch.arange(rope.rotated // 2, device=lengths_T.device) < int(rope.share * rope.rotated // 2)
    return torch.where(turns, _linear(rope, lengths_T), 0.0)


def _dynamic(rope: Rope, lengths_T: torch.Tensor) -> torch.Tensor:
    """Beyond the trained length the base grows with the sequence (NTK-aware scaling)."""
    lengths = lengths_T.clamp_min(rope.original)[:, None]
    growth = (rope.factor * lengths / rope.original) - (rope.factor - 1)
    base = rope.theta * growth ** (rope.rotated / (rope.rotated - 2))
    return 1.0 / base ** _exponents(rope, lengths_T)


def _llama3(rope: Rope, lengths_T: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between blended (Llama 3.1)."""
    inverse = _default(rope, lengths_T)
    wave = 2 * math.pi / inverse
    blend = (rope.original / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    stretched = torch.where(wave > rope.original / rope.low_freq_factor, inverse / rope.factor, blended)
    return torch.where(wave < rope.original / rope.high_freq_factor, inverse, stretched)


def _yarn(rope: Rope, lengths_T: torch.Tensor) -> torch.Tensor:
    """A ramp over dimensions between kept and stretched frequencies (Peng et al., 2023)."""

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times within the trained length."""
        wave = rope.original / (rotations * 2 * math.pi)
        return rope.rotated * math.log(wave) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotated - 1)
    if low == high:
        high += 0.001
    place = torch.arange(rope.rotated // 2, device=lengths_T.device).float()
    stretch = ((place - low) / (high - low)).clamp(0, 1)
    inverse = _default(rope, lengths_T)
    return inverse / rope.factor * stretch + inverse * (1 - stretch)


def _longrope(rope: Rope, lengths_T: torch.Tensor) -> torch.Tensor:
    """One factor for each dimension, from one list within the trained length and another beyond (Ding et al., 2024)."""
    short = torch.tensor(rope.short_factor, device=lengths_T.device)
    long = torch.tensor(rope.long_factor, device=lengths_T.device)
    factor_TR = torch.where((lengths_T > rope.original)[:, None], long, short)
    return 1.0 / (factor_TR * rope.theta ** _exponents(rope, lengths_T))


def _yarn_attention(section: Fields, factor: float) -> float:
    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_dimensions = section.optional("mscale"), section.optional("mscale_all_dim")
    for key, scale in (("mscale", one), ("mscale_all_dim", all_dimensions)):
        if scale is not None and scale < 0:
            raise section.wrong(key, "a number of 0 or more")
    return growth(one) / growth(all_dimensions) if one and all_dimensions else growth(1.0)


ROPES: dict[str, Callable[[Rope, torch.Tensor], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""Inverse frequencies (R/2,), or (T, R/2) where they depend on the length."""
BY_LENGTH = ("dynamic", "longrope")
