"""The longest sequence that a config.json's rotary scaling allows. No torch here."""

from __future__ import annotations

from typing import Any

from torchwright.hub.fields import LARGEST_FACTOR


def scaled_context(kind: str, positions: int, original: int, factor: float) -> int:
    """Return the positions that a model can serve, where its max_position_embeddings is `positions`.

    Some scalings (dynamic always, yarn in files that leave the scaling to the user) keep the trained length there.
    """
    if kind == "dynamic":
        return int(positions * factor)
    return max(positions, int(original * factor)) if kind == "yarn" else positions


def longest_context(config: dict[str, Any], positions: int) -> int:
    """Return the same for an unchecked config.json, for predictions before the model is read."""
    section = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scalings = [section, *section.values()] if isinstance(section, dict) else []
    found = [positions]
    for scaling in scalings:
        if not isinstance(scaling, dict):
            continue
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
        if isinstance(factor, int | float) and 0 < factor <= LARGEST_FACTOR:
            trained = original if type(original) is int and original > 0 else positions
            kind = str(scaling.get("rope_type", scaling.get("type")))
            found.append(scaled_context(kind, positions, trained, factor))
    return max(found)
