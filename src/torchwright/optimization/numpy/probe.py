"""Compare torch's operations with NumPy's, in a process of its own: eagerly, vectorized and one by one.

A request is a JSON list of [expression, dtypes] on stdin; the answer is a JSON list of texts, empty where all agree.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchwright.optimization.engines.compiled.compiler_caches import use_private_caches
from torchwright.optimization.numpy import domain
from torchwright.optimization.numpy.compare import RTOL
from torchwright.optimization.numpy.program import SAFE_INDUCTOR
from torchwright.optimization.numpy.report import first_line
from torchwright.optimization.numpy.tree import map_leaves

NAMES = "abc"
"""The operands of an expression."""
MODES: dict[str, dict[str, Any]] = {"vectorized": {}, "scalar": {"cpp.simdlen": 1}}
"""Inductor runs the last elements of a loop, and loops that it cannot vectorize, one by one."""


class Probe:
    """One operation on its probe values: NumPy's results, and what torch makes of them."""

    def __init__(self, expression: str, dtypes: list[str]) -> None:
        self.expression = expression
        self.calls = _calls(expression, tuple(dtypes))
        function = _function(expression)
        self.refused: str | None = None
        self.expected: list[Any] = []
        try:
            self.expected = [function(*call) for call in self.calls]
        except Exception as error:
            self.refused = f"NumPy raises {type(error).__name__}: {first_line(error)}"

    def difference(self, mode: str, results: list[Any]) -> str:
        """The first value that differs, in words, or an empty text."""
        for call, wanted, found in zip(self.calls, self.expected, results, strict=True):
            text = _difference(call, wanted, found)
            if text:
                return f"{text} ({mode})"
        return ""


def differences(requests: list[tuple[str, list[str]]]) -> list[str]:
    """Probe several operations at once: they are compiled together, which takes a fraction of the time."""
    with np.errstate(all="ignore"):
        return _differences([Probe(expression, dtypes) for expression, dtypes in requests])


def _differences(probes: list[Probe]) -> list[str]:
    found = [probe.refused or _eager_difference(probe) for probe in probes]
    for mode, settings in MODES.items():
        left = [index for index, text in enumerate(found) if not text]
        for index, outcome in zip(left, _outcomes([probes[i] for i in left], settings), strict=True):
            found[index] = outcome if isinstance(outcome, str) else probes[index].difference(mode, outcome)
    return found


def _eager_difference(probe: Probe) -> str:
    """torch's own NumPy, without a compiler: Inductor leaves to it what it cannot lower."""
    import torch._numpy as tnp

    function = _function(probe.expression, tnp)
    try:
        results = [function(*map(tnp.array, call)) for call in probe.calls]  # pyright: ignore[reportPrivateImportUsage]
        return probe.difference("eager", [map_leaves(one, lambda _, leaf: _array(leaf)) for one in results])
    except Exception as error:
        return f"torch cannot run it: {first_line(error)}"


def _array(leaf: Any) -> np.ndarray:
    return np.asarray(getattr(leaf, "tensor", leaf))


def _outcomes(probes: list[Probe], settings: dict[str, Any]) -> list[list[Any] | str]:
    """Return compiled results of each probe, or the reason for their absence. Probes that fail together are tried in
    halves.
    """
    if not probes:
        return []
    try:
        return list(_run(probes, settings))
    except Exception as error:
        if len(probes) == 1:
            return [f"torch cannot compile it: {first_line(error)}"]
        middle = len(probes) // 2
        return _outcomes(probes[:middle], settings) + _outcomes(probes[middle:], settings)


def _run(probes: list[Probe], settings: dict[str, Any]) -> list[list[Any]]:
    """Compile all probes as one function and call it."""
    import torch._inductor.config as inductor_config

    from torchwright.optimization.engines.compiled.byte_reductions import exact_reductions

    lines, slots = [], []
    for probe in probes:
        body = probe.expression
        for call in probe.calls:
            first = len(slots)
            slots += list(call)
            lines.append(
                f"    {'; '.join(f'{n} = xs[{first + i}]' for i, n in enumerate(NAMES[: len(call)]))}"
            )
            lines.append(f"    out.append({body})")
    source = "\n".join(["def batch(xs):", "    out = []", *lines, "    return out"])
    scope: dict[str, Any] = {"np": np}
    exec(source, scope)
    torch._dynamo.reset()
    compiled = torch.compile(scope["batch"], dynamic=False, fullgraph=True)
    with (
        inductor_config.patch({**SAFE_INDUCTOR, **exact_reductions(), "cpp.threads": 1, **settings}),
        torch.no_grad(),
    ):
        results = compiled(slots)
    found, at = [], 0
    for probe in probes:
        found.append(results[at : at + len(probe.calls)])
        at += len(probe.calls)
    return found


def _function(expression: str, module: Any = np) -> Callable[..., Any]:
    return eval(f"lambda a, b=None, c=None: {expression}", {"np": module})


def _calls(expression: str, dtypes: tuple[str, ...]) -> list[list[np.ndarray]]:
    """The operands of each call. Reductions along an axis take rows; without one, the rows come one at a time."""
    dtype, *others = dtypes
    if others:
        return [_without_traps(expression, domain.crossed(dtypes))]
    full = domain.values(dtype)
    several = domain.rows(dtype)
    if "axis=" in expression:
        return [[several]]
    # Whole vectors of it: the rest of a vectorized loop is tried in scalar mode.
    whole = [[np.resize(full, 32 * (len(full) // 32 + 1))]]
    return whole if _is_ufunc(expression) else whole + [[row] for row in several[[0, 4, 6]]]


def _is_ufunc(expression: str) -> bool:
    name = expression.removeprefix("np.").split("(")[0]
    return isinstance(getattr(np, name, None), np.ufunc)


def _without_traps(expression: str, operands: list[np.ndarray]) -> list[np.ndarray]:
    """Without zero divisors of integers: there compiled code raises, and NumPy answers in its place."""
    divides = any(name in expression for name in ("floor_divide", "remainder", "fmod", "divmod"))
    if not divides or operands[-1].dtype.kind not in "iub":
        return operands
    kept = operands[-1] != 0
    return [operand[kept] for operand in operands]


def _difference(call: list[np.ndarray], wanted: Any, found: Any) -> str:
    if isinstance(wanted, tuple | list):
        texts = (_difference(call, one, other) for one, other in zip(wanted, found, strict=True))
        return next((text for text in texts if text), "")
    wanted, found = np.asarray(wanted), np.asarray(found)
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return f"NumPy {wanted.dtype}{list(wanted.shape)}, torch {found.dtype}{list(found.shape)}"
    bad = ~_agree(wanted, found)
    if not bad.any():
        return ""
    place = np.unravel_index(int(np.argmax(bad)), bad.shape)
    given = ", ".join(
        str(x[place] if x.shape == bad.shape else x[place[0]] if place and x.ndim > 1 else x) for x in call
    )
    return f"of {given} NumPy has {wanted[place]}, torch {found[place]}"


def _agree(wanted: Any, found: Any) -> Any:
    """Elementwise: equal, NaN in both, or within the tolerance of compare.py relative to the value itself."""
    if wanted.dtype.kind == "c":
        near = np.abs(wanted - found) <= RTOL[wanted.real.dtype.name] * np.abs(wanted)
        parts = _agree(wanted.real, found.real) & _agree(wanted.imag, found.imag)
        return parts | (near & np.isfinite(wanted) & np.isfinite(found))
    if wanted.dtype.kind != "f":
        return wanted == found
    limits = np.finfo(wanted.dtype)
    wide = np.promote_types(wanted.dtype, np.float64)
    ref, out = wanted.astype(wide), found.astype(wide)
    near = np.abs(ref - out) <= RTOL[wanted.dtype.name] * np.abs(ref) + 4 * float(limits.smallest_subnormal)
    return (ref == out) | (np.isnan(ref) & np.isnan(out)) | (near & np.isfinite(ref) & np.isfinite(out))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    use_private_caches()
    torch.set_default_dtype(torch.float64)  # the variant of a program that divides integers as NumPy does
    torch.set_num_threads(1)
    print(json.dumps(differences(json.load(sys.stdin))))
