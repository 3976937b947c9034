"""The longest sequence that a config.json's rotary scaling allows. No torch here."""

from __future__ import annotations

from typing import Any


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
        if isinstance(scaling, dict) and isinstance(factor := scaling.get("factor"), int | float):
            original = scaling.get("original_max_position_embeddings")
            kind = str(scaling.get("rope_type", scaling.get("type")))
            found.append(scaled_context(kind, positions, original or positions, factor))
    return max(found)
