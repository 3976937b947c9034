# pyright: basic
"""A fresh process that opens a package in its own runtime.

Started as `python -m torchwright.exporter.verification.worker FD PARENT`.
Requests and answers are JSON over the socket FD; tensors travel in files.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import first_line
from torchwright.core.json_file import read_json, typed
from torchwright.core.process.orphans import be_killed_first, die_with_parent
from torchwright.exporter.base import exports
from torchwright.exporter.package import EXPORT, PACKAGE, REFERENCE, Export
from torchwright.exporter.verification.locate import smallest
from torchwright.exporter.verification.probes import Probe, probes_of
from torchwright.exporter.verification.reference import calling, eager, read_calls, read_graph, read_settings
from torchwright.hardware.devices import get_device
from torchwright.hardware.measure.clock import Waiting
from torchwright.optimization.artifact.load import load
from torchwright.optimization.artifact.tree import write_tree
from torchwright.workloads.accuracy import relative_error

TURN_SECONDS = 0.05
TURN_CALLS = 50
VECTORS = 0.01
"""The largest distance of a weight vector from the original's: no format keeps one in less than bfloat16."""
LONGEST = 200
"""The most characters of a setting that are reported."""


class VerifierSession:
    """One package, the graph that it was made from, or the artifact that it was exported from."""

    def open(self, folder: str, reference: bool, artifact: str | None) -> dict[str, Any]:
        """Seconds until the first answer, and the memory that was there before."""
        self.folder = Path(folder)
        self.export = typed(read_json(self.folder / EXPORT), Export, EXPORT)
        self.calls = read_calls(self.folder / REFERENCE)
        torch.set_num_threads(self.export.threads)
        self.device = get_device("cpu")
        self.device.reset_peak_memory()
        self.before = self.device.peak_memory_bytes()
        begun = time.perf_counter()
        if reference:
            self.program = read_graph(self.folder / REFERENCE, trust=True)
            self.run = eager(self.program)
        elif artifact is not None:
            own = load(artifact, trust=True).model  # its user's own, or trusted: `export` has seen to that
            self.run = calling(own, read_graph(self.folder / REFERENCE, trust=True))
        else:
            target = exports.get(self.export.target)
            self.run = target.open(self.folder / PACKAGE, self.export.call, self.export.threads)
        return {"seconds": time.perf_counter() - begun}

    def answer(self, call: int, out: str) -> dict[str, Any]:
        """Write the outputs of a call to `out`, or return the runtime's error."""
        return self._answer([tensor.clone() for tensor in self.calls[call].tensors], out)

    def probes(self) -> dict[str, Any]:
        """Return the probes of the graph's inputs."""
        return {"probes": [asdict(probe) for probe in probes_of(self.program, self.calls[0].tensors)]}

    def probe(self, probe: dict[str, Any], out: str) -> dict[str, Any]:
        """Answer the example's call with a probe in it, as `answer` does."""
        return self._answer(Probe(**probe).applied(self.calls[0].tensors), out)

    def _answer(self, tensors: list[torch.Tensor], out: str) -> dict[str, Any]:
        try:
            outputs = self.run(tensors)
        except Exception as error:  # of the runtime, in whatever way it refuses
            return {"refused": f"{type(error).__name__}: {first_line(error)}"}
        write_tree(Path(out), outputs)
        return {}

    def time(self) -> dict[str, Any]:
        """Seconds of the example's call: the median of a turn, after one that is not counted."""
        tensors = self.calls[0].tensors
        self.run(tensors)
        seconds: list[float] = []
        earlier, started = Waiting.now(), time.perf_counter()
        while sum(seconds) < TURN_SECONDS and len(seconds) < TURN_CALLS:
            begun = time.perf_counter()
            self.run(tensors)
            seconds.append(time.perf_counter() - begun)
        waited = Waiting.now().since(earlier) / (time.perf_counter() - started)
        return {"seconds": statistics.median(seconds), "waited": waited}

    def memory(self) -> dict[str, Any]:
        """Bytes that opening and running have added to the process at most."""
        return {"bytes": self.device.peak_memory_bytes() - self.before}

    def values(self, out: str) -> dict[str, Any]:
        """Return the values that the package's own operators compute for the example's call."""
        target = exports.get(self.export.target)
        found = target.values(self.folder / PACKAGE, self.export.call, self.calls[0].tensors)
        write_tree(Path(out), found)
        return {}

    def operator_times(self) -> dict[str, Any]:
        """Return the example call's time by kind of operator: the median of several runs, since the machine may be
        busy.
        """
        target, folder = exports.get(self.export.target), self.folder / PACKAGE
        calls = target.times(folder, self.export.call, self.calls[0].tensors, self.export.threads)
        kinds = dict.fromkeys(kind for call in calls for kind in call)
        return {"times": {kind: statistics.median(call.get(kind, 0.0) for call in calls) for kind in kinds}}

    def furthest(self) -> dict[str, Any]:
        """The weight with the row that is furthest from the reference's beyond what rounding does, and by how much."""
        target = exports.get(self.export.target)
        wanted = read_graph(self.folder / REFERENCE, trust=True).state_dict
        worst = ("", 0.0)
        for name, found in target.weights(self.folder / PACKAGE).items():
            own = next((value for key, value in wanted.items() if key.endswith(f".{name}")), None)
            if own is None:
                continue
            error = furthest_row(own, found)
            if error > (target.rounding[self.export.precision] if own.ndim > 1 else VECTORS):
                worst = max(worst, (name, error), key=lambda pair: pair[1])
        return {"name": worst[0], "error": worst[1]}

    def settings(self) -> dict[str, Any]:
        """Those that are not as they were written, each with both values, in the package's order."""
        target = exports.get(self.export.target)
        was, now = read_settings(self.folder / REFERENCE), target.settings(self.folder / PACKAGE)
        return {
            "changed": [
                f"{name} {now.get(name)!r}, was {was.get(name)!r}"[:LONGEST]
                for name in dict.fromkeys((*was, *now))
                if was.get(name) != now.get(name)
            ],
            "of_layers": target.settings_of_layers,
        }

    def weights(self, allowed: float) -> dict[str, Any]:
        """Return the weights that, in place of the package's own, make the example's answer right.

        The second result is the error with all of them in place, None if the runtime accepts no replacement.
        """
        target, call = exports.get(self.export.target), self.calls[0]
        mine = read_graph(self.folder / REFERENCE, trust=True)
        states = dict(mine.state_dict) | {
            name: value for name, value in mine.constants.items() if isinstance(value, torch.Tensor)
        }

        def error(names: Sequence[str]) -> float | None:
            run = target.reweighted(
                self.folder / PACKAGE, self.export.call, {name: states[name] for name in names}
            )
            return None if run is None else relative_error(call.outputs, run(call.tensors)).value

        def right(names: Sequence[str]) -> bool:
            found = error(names)
            return found is not None and found <= allowed

        return {"names": smallest(sorted(states), right), "error": error(sorted(states))}


def furthest_row(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The largest relative error of a row, of a vector that of the whole; infinite for another shape."""
    if wanted.shape != found.shape:
        return math.inf
    before, after = (
        wanted.double().reshape(-1, wanted.shape[-1]),
        found.double().reshape(-1, wanted.shape[-1]),
    )
    off, size = (after - before).norm(dim=1), before.norm(dim=1)
    return float(torch.where(size > 0, off / size.clamp_min(1e-300), off).max().nan_to_num(math.inf))


def main(connection: Connection) -> None:
    session = VerifierSession()
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = getattr(session, request.pop("do"))(**request)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {first_line(error)}"}
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    be_killed_first()
    main(Connection(int(sys.argv[1])))
