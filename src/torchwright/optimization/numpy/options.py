"""The options of compile_numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import torch

from torchwright.core.errors import TorchwrightError
from torchwright.optimization.numpy.narrow import RTOL


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings for compiling, comparing and timing a function.

    Raises TorchwrightError for a value that is out of range or a device that is not there.
    """

    threads: int | None = None
    """Most threads to use; None takes ``torch.get_num_threads()``. One thread is always tried too."""
    device: str = "cpu"
    """A torch device on which the compiled function runs; results come back."""
    float32: bool = False
    """Compute in float32: arguments and results of double precision are rounded to single. They are compared with
    what NumPy computes in float64; where compiled code does not serve, that is returned, rounded."""
    rtol: float | None = None
    """Relative tolerance for floating-point results; None takes ``RTOL`` of compare.py, by dtype, and with ``float32``
    that of narrow.py."""
    atol: float | None = None
    """Absolute tolerance; None takes ``ATOL_EPS`` of compare.py."""
    dynamic: bool | None = None
    """Like ``dynamic`` of ``torch.compile``: True traces symbolic shapes from the start, False never."""
    strict: bool = False
    """Raise TorchwrightError where the original would have to serve for any reason but speed."""
    measure: bool = True
    """False serves compiled code wherever it agrees, without timing it."""
    measure_seconds: float = 2.0
    """Most time to spend on timing in one first call; three rounds may take as long as compiling did."""
    progress: bool = True
    """Print one line to stderr where compiling takes longer than two seconds."""

    def __post_init__(self) -> None:
        for name, low in (("threads", 1), ("rtol", 0), ("atol", 0), ("measure_seconds", 0)):
            value = getattr(self, name)
            if value is not None and not value >= low:  # written so that NaN is out of range
                raise TorchwrightError(
                    f"compile_numpy: {name} is out of range", found=repr(value), allowed=f"at least {low}"
                )
        if self.float32 and self.rtol is None:
            object.__setattr__(self, "rtol", RTOL)
        if self.device != "cpu":
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            here = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
            if self.device.split(":")[0] not in here:
                raise TorchwrightError(
                    f"compile_numpy: device {self.device!r} is not available here", allowed=" or ".join(here)
                )


class OptionFields(TypedDict, total=False):
    """The fields of Options as keyword arguments."""

    threads: int | None
    device: str
    float32: bool
    rtol: float | None
    atol: float | None
    dynamic: bool | None
    strict: bool
    measure: bool
    measure_seconds: float
    progress: bool
