"""The parts `kills` and `ray` of benchmarks/serve/map.py: processes and a node that die in the middle."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.run import Row
from benchmarks.serve.map_runs import PART_ROWS, call, command, joined, stamps, texts

WORKERS = 2
"""Workers of a thread each, where there are two cores."""
Stamps = dict[str, tuple[int, int]]


@dataclass
class Life:
    """The command from its start to its end, or to a kill."""

    killed: bool
    log: Path
    """The parts that its workers began, a line for each."""
    before: Stamps
    after: Stamps
    """The finished parts at its start and at its end."""

    def lost(self) -> list[str]:
        """Return the parts that it began and did not finish, which a later life computes again."""
        return [name for name in self._begun() if name not in self.after]

    def again(self) -> list[str]:
        """Return the parts that it began or wrote though they were there."""
        begun = self._begun()
        return [name for name, stamp in self.before.items() if name in begun or self.after.get(name) != stamp]

    def _begun(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.is_file() else []


def kills(model: str, folder: Path, options: Any) -> Row:
    """Kill the command at random times of its life, compare with a run in peace, and count parts computed twice.

    It begins anew in an empty place when it has ended before its kills are done.
    """
    draw, workers = random.Random(options.seed), min(WORKERS, os.cpu_count() or 1)
    source, quiet = texts(folder / "texts.jsonl", options.rows // 4, options.seed), folder / "quiet"
    words = command(model, source, "--part-rows", str(PART_ROWS), "--workers", str(workers), "--threads", "1")
    alone, _ = call([*words, "-o", str(quiet)])
    lives, exact = list[Life](), True
    while (left := options.kills - sum(life.killed for life in lives)) > 0:
        out = folder / f"killed-{len(lives)}"
        lives += killed_run(words, out, left, lambda: draw.uniform(0, alone))
        exact = exact and joined(out) == joined(quiet)
    lost = [len(life.lost()) for life in lives if life.killed]
    again = sum(len(life.again()) for life in lives)
    return {
        "result": f"{len(lost)} kills, rows {'exact' if exact else 'DIFFERENT'}; parts computed twice: {sum(lost)}, at "
        f"most {max(lost)} a kill with {workers} workers; {again} finished parts computed again",
        "bar": "rows exact; a part of each worker computed twice a kill, no finished one",
        "kept": exact and not again and max(lost) <= workers,
        "kills": len(lost),
        "workers": workers,
        "lost": lost,
        "seconds_in_peace": alone,
    }


def killed_run(words: list[str], out: Path, most: int, seconds: Callable[[], float]) -> Iterator[Life]:
    """Run the command until it ends, and kill it `most` times at most, each time after so many seconds."""
    before: Stamps = {}
    for number in itertools.count():
        log = out.with_name(f"{out.name}-begun-{number}")
        counted = [sys.executable, "-m", "benchmarks.serve.map_counted", str(log), *words[3:], "-o", str(out)]
        process = subprocess.Popen(counted, stdout=subprocess.DEVNULL)
        try:
            process.wait(seconds() if number < most else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode not in (0, -signal.SIGKILL):
            raise SystemExit(f"{' '.join(counted)}: exit code {process.returncode}")
        after = stamps(out)
        yield Life(process.returncode != 0, log, before, after)
        if process.returncode == 0:
            return
        before = after


def on_ray(model: str, folder: Path, options: Any) -> Row:
    """Kill a node's processes when a third of the parts is there."""
    source = texts(folder / "texts.jsonl", options.rows // 4, options.seed)
    words = (source, "--part-rows", str(PART_ROWS))
    call(command(model, *words, "-o", folder / "alone"))
    whole = len(stamps(folder / "alone"))
    with two_nodes() as (address, kill):
        out = folder / "ray"
        process = subprocess.Popen([*command(model, *words, "-o", out), "--ray", address, "--threads", "1"])
        while len(stamps(out)) < whole // 3 and process.poll() is None:
            time.sleep(0.2)
        there = len(stamps(out))
        kill()
        code = process.wait()
    exact = joined(out) == joined(folder / "alone")
    return {
        "result": f"a node killed at {there} of {whole} parts: exit code {code}, rows "
        f"{'exact' if exact else 'DIFFERENT'}",
        "bar": "nothing lost",
        "kept": exact and not code and there < whole,
    }


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the address of a cluster of two nodes on loopback, and what kills the second."""
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    os.environ.setdefault("RAY_worker_niceness", "0")  # or what else this machine does comes first
    cluster = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False)
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    try:
        yield cluster.address, lambda: cluster.remove_node(second, allow_graceful=False)
    finally:
        cluster.shutdown()
