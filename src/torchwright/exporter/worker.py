# pyright: basic
"""A fresh process that opens a package in its own runtime: `python -m torchwright.exporter.worker FD PARENT`.

Requests and answers are JSON over the socket FD; tensors travel in files.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from torchwright.artifact.tree import write_tree
from torchwright.devices import get_device
from torchwright.errors import first_line
from torchwright.exporter.base import exports
from torchwright.exporter.locate import smallest
from torchwright.exporter.package import EXPORT, PACKAGE, REFERENCE, Export
from torchwright.exporter.reference import eager, read_calls, read_graph
from torchwright.json_file import read_json, typed
from torchwright.measure.clock import Waiting
from torchwright.process.orphans import be_killed_first, die_with_parent
from torchwright.workloads.accuracy import relative_error

TURN_SECONDS = 0.05
TURN_CALLS = 50


class Session:
    """One package, or the graph that it was made from."""

    def open(self, folder: str, reference: bool) -> dict[str, Any]:
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
            self.run = eager(read_graph(self.folder / REFERENCE, trust=True))
        else:
            target = exports.get(self.export.target)
            self.run = target.open(self.folder / PACKAGE, self.export.call, self.export.threads)
        return {"seconds": time.perf_counter() - begun}

    def answer(self, call: int, out: str) -> dict[str, Any]:
        """The outputs of a call, written to `out`; or what the runtime says against it."""
        try:
            outputs = self.run([tensor.clone() for tensor in self.calls[call].tensors])
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
        """What the package's own operators compute for the example's call."""
        target = exports.get(self.export.target)
        found = target.values(self.folder / PACKAGE, self.export.call, self.calls[0].tensors)
        write_tree(Path(out), found)
        return {}

    def furthest(self) -> dict[str, Any]:
        """The weight that is furthest from the reference's, and by how much."""
        target = exports.get(self.export.target)
        wanted = read_graph(self.folder / REFERENCE, trust=True).state_dict
        worst = ("", 0.0)
        for name, found in target.weights(self.folder / PACKAGE).items():
            own = next((value for key, value in wanted.items() if key.endswith(f".{name}")), None)
            if own is not None:
                worst = max(worst, (name, relative_error([own], [found]).value), key=lambda pair: pair[1])
        return {"name": worst[0], "error": worst[1]}

    def weights(self, allowed: float) -> dict[str, Any]:
        """The weights that, in place of the package's own, make the example's answer right."""
        target, call = exports.get(self.export.target), self.calls[0]
        mine = read_graph(self.folder / REFERENCE, trust=True)
        states = dict(mine.state_dict) | {
            name: value for name, value in mine.constants.items() if isinstance(value, torch.Tensor)
        }

        def right(names: Sequence[str]) -> bool:
            run = target.reweighted(
                self.folder / PACKAGE, self.export.call, {name: states[name] for name in names}
            )
            return run is not None and relative_error(call.outputs, run(call.tensors)).value <= allowed

        return {"names": smallest(sorted(states), right)}


def main(connection: Connection) -> None:
    session = Session()
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
