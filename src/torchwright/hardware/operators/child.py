"""The child process of the scorecard: takes samples of the entries in its job, and writes a line for each.

    python -m torchwright.hardware.operators.child      the job is JSON on stdin; lines of JSON go to stdout

Everything else that the process prints goes to stderr: operators and drivers may print.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, TextIO

import torch

from torchwright.hardware.devices import get_device
from torchwright.hardware.operators.databases import Entry, Sample, load, tensors

LOST = 3
"""Exit code of a child whose device no longer answers."""
MOST_MESSAGE = 300


def main() -> None:
    lines = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if job["device"] != "cpu":
        get_device(job["device"]).start()
    entries = load()
    limit = job["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if job["entries"] is None:
        _say(lines, {"entries": [[entry.database, entry.name] for entry in entries]})
        return
    for index in job["entries"]:
        _say(lines, {"begin": index})
        judge = Judge(job["device"])
        found = judge.judge(entries[index])
        _say(lines, {"end": index, **found})
        if judge.lost:
            os._exit(LOST)
    os._exit(0)  # a library of the device may hang at a process's end


def _say(lines: TextIO, line: dict[str, Any]) -> None:
    lines.write(json.dumps(line) + "\n")


def _answers(device: str) -> bool:
    """Check whether a device still computes."""
    try:
        return (torch.ones(3, device=device) + 1).cpu().tolist() == [2.0, 2.0, 2.0]
    except Exception:
        return False


class Judge:
    """Outcomes of one entry's samples on a device.

    `settle` waits for a device, and `answers` checks whether it still computes.
    """

    def __init__(
        self,
        device: str,
        *,
        settle: Callable[[str], None] | None = None,
        answers: Callable[[str], bool] | None = None,
    ) -> None:
        self.device, self._settle, self._answers = device, settle or _settle, answers or _answers
        self.counts: dict[str, Counter[str]] = {}
        self.faults: dict[tuple[str, str], tuple[int, str]] = {}
        self.lost = False
        """The device no longer answers: nothing after that says anything about its operators."""

    def judge(self, entry: Entry) -> dict[str, Any]:
        """Return counts by family and outcome, and faults with their first message."""
        left_out = None
        try:
            torch.manual_seed(0)
            for sample in entry.samples():
                state = torch.get_rng_state()  # samples are drawn one after the other
                for family in sample.families:
                    if not self.lost:
                        self._take(family, sample)
                torch.set_rng_state(state)
        except LookupError as error:
            left_out = _message(error)
        except Exception as error:
            left_out = f"its samples cannot be made: {_message(error)}"
        if not self.counts and left_out is None:
            left_out = "it has no sample on which the CPU succeeds"
        return {
            "counts": self.counts,
            "faults": [
                {"family": family, "outcome": outcome, "samples": samples, "message": message}
                for (family, outcome), (samples, message) in self.faults.items()
            ],
            "left_out": left_out,
        }

    def _take(self, family: str, sample: Sample) -> None:
        try:
            wanted = self._seeded(sample, "cpu", family, 0)
            random = not _same(wanted, self._seeded(sample, "cpu", family, 1))
        except Exception:
            return  # the CPU has no answer to compare with
        try:
            found = self._seeded(sample, self.device, family, 0)
            message = difference(wanted, found, only_shapes=sample.only_shapes)
            if message and random and self.device != "cpu":
                # Another device draws other numbers.
                message = difference(wanted, found, only_shapes=True)
            outcome = "wrong" if message else "passed"
        except Exception as error:
            self.lost = not self._answers(self.device)
            outcome, message = "crashed" if self.lost else "refused", _message(error)
        self.counts.setdefault(family, Counter())[outcome] += 1
        if message:
            samples, first = self.faults.get((family, outcome), (0, message))
            self.faults[family, outcome] = samples + 1, first

    def _seeded(self, sample: Sample, device: str, family: str, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        out = tensors(sample.run(device, family))
        if device != "cpu":
            self._settle(device)
        return [each.detach().cpu() for each in out]


def _settle(device: str) -> None:
    """Wait for the device: a copy that does not block has its numbers only then."""
    get_device(device).synchronize()


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and difference(first, second, only_shapes=False) is None


def difference(wanted: list[torch.Tensor], found: list[torch.Tensor], *, only_shapes: bool) -> str | None:
    """Return the first difference between results, or None where they agree within PyTorch's tolerances."""
    if len(wanted) != len(found):
        return f"{len(found)} tensors instead of {len(wanted)}"
    for one, other in zip(wanted, found, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{other.dtype} {tuple(other.shape)} instead of {one.dtype} {tuple(one.shape)}"
        if only_shapes:
            continue
        try:
            torch.testing.assert_close(other, one, equal_nan=True, check_stride=False)
        except AssertionError as error:
            return _message(error)
    return None


def _message(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:MOST_MESSAGE]


if __name__ == "__main__":
    main()
