"""Precision of the weights of an encoder and of a decoder: each has its own choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchwright.core.errors import ModelError
from torchwright.core.scheme import Scheme, read_scheme

SIDES = ("encoder", "decoder")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """None leaves a side in the model's own type."""

    encoder: Scheme | None = None
    decoder: Scheme | None = None

    @property
    def schemes(self) -> dict[str, Scheme | None]:
        return {side: getattr(self, side) for side in SIDES}

    def describe(self, dtype: torch.dtype) -> str:
        """In words."""
        own = str(dtype).removeprefix("torch.")
        sides = ", ".join(f"{side} {scheme or own}" for side, scheme in self.schemes.items())
        return f"Torchwright's kernels, {sides}"


def read_precision(quantize: str | None) -> Precision:
    """`w8a8` for both, or a side each: `encoder=w8a8,decoder=w4a16:group_size=64`; a side not named is left.

    Raises `ModelError` for another form, and what `read_scheme` does.
    """
    if quantize is None or "=" not in quantize.partition(":")[0]:
        scheme = read_scheme(quantize)
        return Precision(encoder=scheme, decoder=scheme)
    found: dict[str, Scheme | None] = {}
    for part in quantize.split(","):
        side, _, scheme = part.partition("=")
        if side not in SIDES or side in found:
            raise ModelError(
                f"quantize='{quantize}'",
                found=part,
                allowed=f"a scheme for both sides, or each of {' and '.join(SIDES)} once, as in encoder=w8a8",
            )
        found[side] = read_scheme(scheme)
    return Precision(**found)
