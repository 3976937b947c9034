"""Comparing what compiled code returned with what NumPy returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from torchwright.optimization.numpy.call import ArrayCall
from torchwright.optimization.numpy.report import ProgramRefused
from torchwright.optimization.numpy.tree import Path, leaves, place, structure

RTOL = {"float16": 4e-3, "float32": 1e-5, "float64": 1e-10}
"""Relative tolerance by dtype of the result, or of its parts. Integers and booleans must be equal."""
ATOL_EPS = 16
"""Absolute tolerance, in units of the dtype's epsilon times the largest magnitude in the NumPy result."""
WIDER_FACTOR = 4
"""A result outside the tolerance still agrees if it is at most this many times as far from the same function
in the next wider precision as NumPy itself is (sums that cancel; long sums in float32)."""
WIDER = {"f2": "f4", "f4": "f8", "f8": "g", "c8": "c16", "c16": "G"}
"""The next wider precision by type code."""

Place = tuple[Path, Literal["real", "imag"]]
"""A floating-point result; one that is not complex is its own real part."""


@dataclass
class Deviation:
    """Return where one result differs from another, in words."""

    rtol: float | None = None
    atol: float | None = None
    scale: float = 0.0
    """The largest magnitude that went in: sums that cancel are off by its rounding."""
    problems: list[str] = field(default_factory=list)
    dtype_differences: list[str] = field(default_factory=list)
    outside: list[Place] = field(default_factory=list)
    """Floating-point results outside the tolerance, before the wider precision was asked."""
    error: float = 0.0

    def add(self, path: Path, ref: np.ndarray, out: np.ndarray) -> None:
        """Compare one array."""
        where = place(path)
        if ref.dtype != out.dtype:
            self.dtype_differences.append(f"{where}: NumPy {ref.dtype}, compiled {out.dtype}")
        elif ref.shape != out.shape:
            self.problems.append(f"{where}: NumPy has shape {ref.shape}, compiled {out.shape}")
        elif ref.dtype.kind == "f":
            self._add_floats(where, (path, "real"), ref, out)
        elif ref.dtype.kind == "c":  # the parts, so that NaN and infinity are compared in each
            parts: tuple[Literal["real", "imag"], ...] = ("real", "imag")
            for part in parts:
                self._add_floats(f"{where}.{part}", (path, part), getattr(ref, part), getattr(out, part))
        elif differing := int(np.count_nonzero(ref != out)):
            self.problems.append(f"{where}: {differing:,} of {ref.size:,} {ref.dtype} values differ")

    def _add_floats(self, where: str, at: Place, ref: np.ndarray, out: np.ndarray) -> None:
        special = ~np.isfinite(ref)
        same = np.array_equal(ref[special], out[special], equal_nan=True)
        if not same or not np.isfinite(out[~special]).all():
            self.problems.append(f"{where}: NaN or infinity in other places than NumPy's")
            return
        ref, out = ref[~special], out[~special]
        if not ref.size:
            return
        wide = np.promote_types(ref.dtype, np.float64)
        difference = np.abs(out.astype(wide) - ref.astype(wide))
        largest = float(np.abs(ref).max())
        worst = float(difference.max())
        self.error = max(self.error, worst / largest if largest else worst)
        relative = RTOL[ref.dtype.name] if self.rtol is None else self.rtol
        absolute = (
            ATOL_EPS * float(np.finfo(ref.dtype).eps) * max(largest, self.scale)
            if self.atol is None
            else self.atol
        )
        if (difference > absolute + relative * np.abs(ref)).any():
            self.outside.append(at)
            self.problems.append(f"{where}: off by up to {worst:.3g} (largest value {largest:.3g})")


def compare(
    reference: Any, result: Any, rtol: float | None = None, atol: float | None = None, scale: float = 0.0
) -> Deviation:
    """Compare ``result`` with NumPy's ``reference``: types, structure, dtypes, shapes and values."""
    found = Deviation(rtol, atol, scale)
    if structure(reference) != structure(result):
        found.problems.append(
            f"NumPy returned {_type_text(reference)}, the compiled function {_type_text(result)}"
        )
    for (path, ref), (_, out) in zip(leaves(reference), leaves(result), strict=False):
        if all(isinstance(leaf, np.ndarray | np.generic | float) for leaf in (ref, out)):
            found.add(path, np.asarray(ref), np.asarray(out))
        elif type(ref) is not type(out) or not (ref is out or ref == out):
            found.problems.append(f"{place(path)}: NumPy {ref!r}, compiled {out!r}")
    return found


def no_less_accurate(call: ArrayCall, fn: Callable, reference: Any, result: Any, places: list[Place]) -> bool:
    """Check whether ``result`` is about as near as NumPy's to the function in the next wider precision."""

    def widen(array: np.ndarray) -> np.ndarray:
        code = WIDER.get(array.dtype.str[1:])
        return array if code is None else array.astype(code)

    if not any(array.dtype.str[1:] in WIDER for array in call.arrays):
        return False  # nothing to widen
    try:
        with np.errstate(all="ignore"):
            args, kwargs = call.with_arrays(widen)
            exact = dict(leaves(fn(*args, **kwargs)))
    except Exception:  # a function that does not run in the wider precision settles nothing
        return False
    refs, outs = dict(leaves(reference)), dict(leaves(result))
    for path, part in places:
        if any(path not in found for found in (exact, refs, outs)):
            return False
        best, ref, out = (getattr(np.asarray(found[path]), part) for found in (exact, refs, outs))
        if best.shape != ref.shape or best.dtype.kind not in "fc" or best.dtype.itemsize < ref.dtype.itemsize:
            return False
        finite = np.isfinite(ref) & np.isfinite(best)
        ref_error = np.abs(ref[finite] - best[finite]).max(initial=0)
        if np.abs(out[finite] - best[finite]).max(initial=0) > WIDER_FACTOR * ref_error:
            return False
    return True


def require_own_memory(call: ArrayCall, reference: Any, first: Any, second: Any) -> None:
    """Raise `ProgramRefused` where compiled code shares memory that NumPy does not: a later write would reach more."""

    def arrays(value: Any) -> list[np.ndarray]:
        return [leaf for _, leaf in leaves(value) if isinstance(leaf, np.ndarray)]

    refs, outs, others = arrays(reference), arrays(first), arrays(second)
    for index, (ref, out) in enumerate(zip(refs, outs, strict=True)):
        shared = [given for given in call.arrays if np.may_share_memory(out, given)]
        if any(not given.flags.writeable or not np.may_share_memory(ref, given) for given in shared):
            raise ProgramRefused("the compiled function returns a view of an argument where NumPy does not")
        if not shared and any(np.may_share_memory(out, other) for other in others):
            raise ProgramRefused("the compiled function returns the same memory on every call")
        for ref_later, out_later in zip(refs[index + 1 :], outs[index + 1 :], strict=True):
            if np.may_share_memory(out, out_later) and not np.may_share_memory(ref, ref_later):
                raise ProgramRefused("the compiled function returns two results in the same memory")


def _type_text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of ({', '.join(_type_text(item) for item in value)})"
    return type(value).__name__
