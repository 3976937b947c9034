"""Quantization schemes of linear layers: types of the weights and of the rounded inputs. No torch here.

bf16             weights and inputs in bfloat16
w8a8             8-bit weights, one scale for each output feature; each row of inputs is rounded to 8 bits
w4a8, w4a16      4-bit weights in groups along the input; each row of inputs is rounded to 8 or 16 bits
w4bf16, w8bf16   the integers of a quantized checkpoint; bitwise the results of bf16 on the dequantized weights
mxfp4, fp8       its 4-bit (e2m1) and 8-bit (e4m3) floats, with the same results

The names stand in artifacts and on the command line. What a name means is asked of its `Scheme`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from torchwright.core.errors import ModelError, UnknownName, unknown

GROUPS = (32, 64, 128)
"""Sizes of the groups of weights that are rounded here. The first is taken where nobody says."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way to keep weights and to multiply them."""

    name: str
    operator: str
    """The operator of `torch.ops.torchwright` and `torch.ops.torchwright_gpu`."""
    weight_bits: int
    input_bits: int | None = None
    """The bits of the integers to which inputs are rounded per token; None for bfloat16."""
    groups: tuple[int, ...] = ()
    """Sizes that a group of weights may have; none where the whole row shares one scale."""
    group: int | None = None
    """Weights along the input that share a multiplier, or a scale and an offset."""
    group_bytes: int = 0
    """Bytes of a group's scale and offset."""
    kept: bool = False
    """True if it keeps the numbers of a quantized checkpoint; no weight is rounded to it here."""
    floats: bool = False
    """True if weights are floats: e2m1 of 4 bits, e4m3 of 8."""

    def __str__(self) -> str:
        """Return the name that `read_scheme` reads."""
        return self.name if self.group is None else f"{self.name}:group_size={self.group}"

    @property
    def scaled(self) -> bool:
        """Check whether scales are per-channel."""
        return self.input_bits is not None

    def bytes_of(self, weights: int) -> int:
        """Return the bytes of this many weights in whole groups, including the groups' scales."""
        return weights * self.weight_bits // 8 + (
            weights // self.group * self.group_bytes if self.group else 0
        )

    @property
    def products(self) -> Literal["int8", "bfloat16"]:
        """The type of what a CPU multiplies: which measured rate counts. A GPU rounds 16-bit inputs to bfloat16."""
        return "int8" if self.scaled else "bfloat16"

    @property
    def digits(self) -> int:
        """Products for one weight and input: an input of 16 bits is multiplied as two digits of 8."""
        return (self.input_bits or 8) // 8


BF16 = Scheme(name="bf16", operator="linear_bf16", weight_bits=16)
W8A8 = Scheme(name="w8a8", operator="linear_w8a8", weight_bits=8, input_bits=8)
W4A8 = Scheme(
    name="w4a8",
    operator="linear_w4a8",
    weight_bits=4,
    input_bits=8,
    groups=GROUPS,
    group=GROUPS[0],
    group_bytes=1,
)
W4A16 = replace(W4A8, name="w4a16", operator="linear_w4a16", input_bits=16)
W4BF16 = Scheme(
    name="w4bf16",
    operator="linear_grouped",
    weight_bits=4,
    groups=(16, *GROUPS),
    group=GROUPS[0],
    group_bytes=8,
    kept=True,
)
W8BF16 = replace(W4BF16, name="w8bf16", weight_bits=8)
MXFP4 = replace(W4BF16, name="mxfp4", groups=(32,), group_bytes=1, floats=True)
FP8 = replace(W8BF16, name="fp8", groups=GROUPS, group_bytes=4, floats=True)

SCHEMES = {scheme.name: scheme for scheme in (BF16, W8A8, W4A8, W4A16, W4BF16, W8BF16, MXFP4, FP8)}
MADE = {name: scheme for name, scheme in SCHEMES.items() if not scheme.kept}
"""The schemes to which weights are rounded here."""
KEPT = {name: scheme for name, scheme in SCHEMES.items() if scheme.kept}
"""The schemes that keep the numbers of a quantized checkpoint."""
INTEGERS = {name: scheme for name, scheme in KEPT.items() if not scheme.floats}
FLOATS = {name: scheme for name, scheme in KEPT.items() if scheme.floats}
ASKED = {name: scheme for name, scheme in MADE.items() if scheme.scaled}
"""The schemes that a user can name."""


def scheme_of(name: str, group: int = GROUPS[0]) -> Scheme:
    """Return the scheme of a name, with groups of this size if it has groups.

    Raises `ValueError` for an unknown name.
    """
    if name not in SCHEMES:
        raise ValueError(f"scheme is {name}; one of {', '.join(SCHEMES)} is wanted")
    scheme = SCHEMES[name]
    allowed = scheme.groups or GROUPS
    if group not in allowed:
        raise ValueError(f"group_size is {group}; one of {', '.join(map(str, allowed))} is wanted")
    return replace(scheme, group=group) if scheme.groups else scheme


LIKE = (
    (r"(ao_|u)?int8.*|q[568](_.*)?|8bit|bnb8|llm\.?int8|w8a16", W8A8),
    (r"(ao_|u)?int4.*|i?q4(_.*)?|4bit|nf4|fp4|awq|gptq|bnb4?|bitsandbytes", W4A8),
)
"""Patterns of other tools' names → the scheme here that keeps weights in as many bits."""


def _unknown_quantization(name: str) -> UnknownName:
    """Return the error for a quantization that does not exist, with the scheme that another tool's name stands for."""
    near = next((scheme for pattern, scheme in LIKE if re.fullmatch(pattern, name, re.IGNORECASE)), None)
    hint = None if near is None else f"--quantize {near.name} keeps weights in {near.weight_bits} bits"
    return unknown("quantization", name, ("none", *ASKED), next=hint)


def read_scheme(quantize: str | None) -> Scheme | None:
    """The scheme that a user names, such as `w8a8` or `w4a8:group_size=64`; None for none.

    Raises `UnknownName` for another name, and `ModelError` for an option that the scheme does not have.
    """
    name, _, option = (quantize or "none").partition(":")
    if name not in ("none", *ASKED):
        raise _unknown_quantization(name)
    scheme = ASKED.get(name)
    if not option:
        return scheme
    key, _, value = option.partition("=")
    if scheme is None or key != "group_size" or value not in map(str, scheme.groups):
        raise ModelError(
            f"quantize='{quantize}'",
            allowed=f"group_size={' or '.join(map(str, GROUPS))}, for 4-bit weights only",
        )
    return scheme_of(name, int(value))
