"""Write the table of where torch's operations leave NumPy's: python scripts/numpy_semantics.py.

Each ufunc, cast and reduction that torch knows is run on probe values of each dtype in NumPy, in eager torch and
compiled by Inductor. The table holds for the versions of torch and NumPy that it was written with.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch._numpy as tnp

from torchwright.optimization.numpy import operations, semantics
from torchwright.optimization.numpy.operations import Operation

DTYPES = ("bool", "uint8", "int32", "int64", "float32", "float64")
"""Dtypes that the table covers. Others are probed at first use."""
POWERS = (-2, -1, 0, 1, 2, 3, 4, -1.0, -0.5, 0.5, 1.5, 2.0, 3.0)
BATCH = 60
ALONG = ("all", "any", "argmax", "argmin", "max", "min", "ptp", "sum", "prod", "mean", "std", "var")
ALONG += ("cumsum", "cumprod", "sort", "argsort")
WHOLE = (*ALONG, "median", "round", "fix", "nan_to_num", "sinc", "isneginf", "isposinf")
BOUNDS = ("1, 3", "1, None", "None, 3")


def every_operation() -> list[Operation]:
    """The operations of the table, each in the form in which a graph names it."""
    found = [
        Operation(f"np.{name}({', '.join('abc'[: ufunc.nin])})", loop)
        for name, ufunc in sorted(vars(np).items())
        if isinstance(ufunc, np.ufunc)
        and name == ufunc.__name__
        and hasattr(tnp, name)
        and name not in operations.UNPROBED_UFUNCS
        for loop in _loops(ufunc)
    ]
    found += [Operation(f"a ** {power!r}", (dtype,)) for power in POWERS for dtype in _numbers(power)]
    found += [Operation("a ** b", (dtype, dtype)) for dtype in DTYPES[3:]]
    found += [Operation(f"a.astype('{to}')", (dtype,)) for dtype in DTYPES for to in DTYPES if to != dtype]
    for dtype in DTYPES:
        found += [Operation(f"np.{name}(a, axis=-1)", (dtype,)) for name in ALONG]
        found += [Operation(f"np.{name}(a)", (dtype,)) for name in WHOLE]
        found += [Operation(f"np.clip(a, {pair})", (dtype,)) for pair in BOUNDS]
    return list(dict.fromkeys(found))


def _numbers(power: float) -> tuple[str, ...]:
    return DTYPES[4:] if isinstance(power, float) or power < 0 else DTYPES[2:]


def _loops(ufunc: np.ufunc) -> list[tuple[str, ...]]:
    """The dtypes of NumPy's loops for operands of one dtype, and of two where the result hides the loop."""
    found = []
    for dtype in DTYPES:
        given = np.dtype(dtype)
        try:
            resolved = ufunc.resolve_dtypes((given,) * ufunc.nin + (None,) * ufunc.nout)
        except TypeError:
            continue
        hidden = resolved[-1] == np.dtype(bool)
        found.append(tuple((given if hidden else one).name for one in resolved[: ufunc.nin]))
    return [loop for loop in dict.fromkeys(found) if set(loop) <= set(DTYPES)]


def main() -> None:
    """Probe batch by batch, and write the table after each: a run that is ended continues where it was."""
    wanted = every_operation()
    data = json.loads(semantics.TABLE.read_text()) if semantics.TABLE.exists() else {}
    known = data["differences"] if data.get("versions") == semantics.versions() else {}
    known = {one.key: known[one.key] for one in wanted if one.key in known}
    missing = [one for one in wanted if one.key not in known]
    for first in range(0, len(missing), BATCH):
        batch = missing[first : first + BATCH]
        known |= {
            one.key: text for one, text in zip(batch, semantics.probed(batch, seconds=3600), strict=True)
        }
        text = {"versions": semantics.versions(), "differences": dict(sorted(known.items()))}
        semantics.TABLE.write_text(json.dumps(text, indent=1) + "\n")
        print(f"{len(known)} of {len(wanted)}", file=sys.stderr)
    print(f"{sum(map(bool, known.values()))} of {len(known)} operations differ")


if __name__ == "__main__":
    main()
