"""A model's repeated blocks."""

from __future__ import annotations

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The longest list of equal-typed children with weights in any `ModuleList` or `Sequential`: a model's layers."""
    best: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            children = list(module.children())
            same = len({type(child) for child in children}) == 1
            if len(children) > max(1, len(best)) and same and any(True for _ in children[0].parameters()):
                best = children
    return best
