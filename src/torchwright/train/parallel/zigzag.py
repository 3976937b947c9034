"""Which tokens of a sequence each process of context parallelism holds: a piece from its front and one from its back.

A causal query sees all before it: in plain order the last process would compute the most and the others wait. Pieces i
and 2n - 1 - i of 2n cost every process the same (zig-zag; Dubey et al., The Llama 3 Herd of Models, 2024, 3.3.2).
"""

from __future__ import annotations

import torch

PARTS, TOKENS = 0, 3
"""Dimensions of parts (P, B, H, T, D)."""


def pieces(tokens: int, part: int, parts: int) -> tuple[range, range]:
    """The places of a sequence of `tokens` that `part` of `parts` holds; where they are odd, the first is longer."""
    second = tokens // parts // 2
    first = tokens // parts - second
    begin = parts * first + (parts - 1 - part) * second
    return range(part * first, (part + 1) * first), range(begin, begin + second)


def places(tokens: int, part: int, parts: int) -> torch.Tensor:
    """The same as one tensor (tokens / parts,), rising."""
    return torch.tensor([place for piece in pieces(tokens, part, parts) for place in piece])


def joined(parts_PBHTD: torch.Tensor) -> torch.Tensor:
    """Whole sequences (B, H, P · T, D) of all processes' parts."""
    second = parts_PBHTD.shape[TOKENS] // 2
    front, back = parts_PBHTD.split([parts_PBHTD.shape[TOKENS] - second, second], TOKENS)
    return torch.cat([piece.movedim(PARTS, 2).flatten(2, 3) for piece in (front, back.flip(PARTS))], 2)


def divided(whole_BHSD: torch.Tensor, parts: int) -> torch.Tensor:
    """Undo `joined`: (P, B, H, T, D) from S = P · T tokens."""
    length = whole_BHSD.shape[2] // parts
    second = length // 2
    front, back = whole_BHSD.split([parts * (length - second), parts * second], 2)
    front, back = front.unflatten(2, (parts, length - second)), back.unflatten(2, (parts, second)).flip(2)
    return torch.cat([front, back], TOKENS).movedim(2, PARTS)
