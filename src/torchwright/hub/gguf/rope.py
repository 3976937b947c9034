"""The rotary embedding that a GGUF file's keys and tensors describe, as config.json has it."""

from __future__ import annotations

import math
import struct
from typing import Any

from torchwright.core.errors import ModelError
from torchwright.hub.gguf.model import GgufModel

THETA = 10_000.0
"""The base in a file that names none."""
FREQUENCIES, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
TENSORS = (FREQUENCIES, SHORT, LONG)
"""One factor for each frequency: at every length, within the trained length, and beyond it."""


def rope_of(model: GgufModel, *, partial: bool = False) -> dict[str, Any]:
    """Return the fields of `rope_parameters`; with `partial` the family may rotate a part of each head."""
    keys = model.keys
    rotated = keys.integer("rope.dimension_count", model.head_dim)
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", THETA)}
    if partial:
        plain["partial_rotary_factor"] = _share(rotated, model.head_dim)
    elif rotated != model.head_dim:
        raise keys.wrong("rope.dimension_count", f"{model.head_dim}, the size of a head's keys")
    # As llama.cpp has it: an old key holds the factor, and a factor without a type scales linearly.
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    kind = keys.text("rope.scaling.type", "linear" if factor else "none")
    original = keys.integer("rope.scaling.original_context_length", model.context)
    given = [name for name in TENSORS if name in model.tensors]
    if given and kind not in ("none", "longrope"):
        raise keys.wrong("rope.scaling.type", f"none, beside {given[0]}")
    if FREQUENCIES in given:
        # Llama 3.1's scaling: the same factors at every length.
        return plain | _longrope(model, (FREQUENCIES, FREQUENCIES), rotated, model.context, 1.0)
    if given:
        attention = keys.positive("rope.scaling.attn_factor", 1.0)
        return plain | _longrope(model, (SHORT, LONG), rotated, original, attention)
    if kind == "none" or (kind == "linear" and not factor):
        return plain
    if kind == "linear":
        return plain | {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        raise keys.wrong("rope.scaling.type", "none, linear or yarn")
    return plain | _yarn(model, factor, original)


def ropes_of(model: GgufModel, local_theta: float | None) -> dict[str, Any]:
    """Return `rope_parameters` of a family whose sliding-window layers have an embedding of their own.

    `local_theta` is its base in a file that names none; None for the base of the other layers.
    """
    full = rope_of(model)
    theta = model.keys.number("rope.freq_base_swa", local_theta or full["rope_theta"])
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}


def _share(rotated: int, head_dim: int) -> float:
    """Return a share of a head whose product with the head's size is `rotated` when its fraction is cut off."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 1.0)


def _longrope(
    model: GgufModel, names: tuple[str, str], rotated: int, original: int, attention: float
) -> dict[str, Any]:
    short, long = (_factors(model, name, rotated // 2) for name in names)
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "factor": max(1.0, model.context / original),
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }


def _yarn(model: GgufModel, factor: float, original: int) -> dict[str, Any]:
    keys = model.keys
    if factor < 1:
        raise keys.wrong("rope.scaling.factor", "a number of 1 or more")
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise keys.wrong("rope.scaling.yarn_ext_factor", "1")
    attention = 1 + 0.1 * math.log(factor)
    if not math.isclose(keys.number("rope.scaling.yarn_attn_factor", attention), attention, rel_tol=1e-4):
        raise keys.wrong(
            "rope.scaling.yarn_attn_factor", f"{attention:.4f}, as the factor of {factor:g} gives it"
        )
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.positive("rope.scaling.yarn_beta_slow", 1.0),
    }


def _factors(model: GgufModel, name: str, count: int) -> list[float]:
    """Return the numbers of a small float32 tensor."""
    stored = model.tensor(name, 1)
    if stored.type.name != "F32" or stored.shape != (count,):
        raise ModelError(
            f"the tensor '{name}' in {model.path} is {list(stored.shape)} of {stored.type.name}",
            allowed=f"{[count]} of F32",
        )
    with model.path.open("rb") as file:
        file.seek(stored.begin)
        found = struct.unpack(f"<{count}f", file.read(4 * count))
    if not all(math.isfinite(value) and value > 0 for value in found):
        raise ModelError(f"the tensor '{name}' in {model.path} holds numbers that are no factors")
    return list(found)
