"""Two processes of one core each that divide a model, against one process on two cores; and what a sum costs.

    python -m benchmarks.llm.tensor_parallel [--shape qwen3-0.6b|bundled] [--schemes bf16] [--rounds 9] [--json FILE]

First the sum of two processes' numbers, through gloo and through shared memory: a decode step of one sequence, of 16
and a chunk of a prompt; the median and, for a busy machine, the least of all batches. Then the shape with random
weights: prompts of 512 tokens, and decode steps of 1 and 16 sequences behind 128 tokens. The contenders take turns,
while the others wait; a ratio is the median of those within rounds. One process takes a step as one operator, and in a
second turn by calls of its layers, as the two have to.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import run
from benchmarks.harness.run import BUNDLED
from benchmarks.harness.turns import orders, processes, ratio, seconds
from benchmarks.llm.shapes import SHAPES, make

CORES = 2
SUMS = {"1 row of 2,048": (2048, 50), "16 rows": (16 * 2048, 20), "512 rows": (512 * 2048, 4)}
"""Name → numbers, and batches of a round."""
BATCH = 10
"""Sums of a batch."""
PROMPT, BEHIND, STEPS = 512, 128, 16
TOGETHER = ("rank 0", "rank 1")
ALONE = "alone"
WAYS = {"plan": (ALONE,), "calls": (ALONE,), "divided": TOGETHER}
"""Contender → its processes."""


def main() -> None:
    options = run.options(
        __doc__,
        shape="qwen3-0.6b",
        schemes=("bf16", "w8a8", "w4a8", "w4a16"),
        rounds=9,
        folder="build/models",
    )
    if options.shape not in (BUNDLED.name, *SHAPES):
        raise SystemExit(f"--shape: one of {', '.join((BUNDLED.name, *SHAPES))}")
    if len(os.sched_getaffinity(0)) < CORES:
        raise SystemExit(f"needs {CORES} cores")
    folder = BUNDLED if options.shape == BUNDLED.name else make(options.shape, Path(options.folder))
    rows = run.Rows(options.json)
    with (
        tempfile.TemporaryDirectory() as meeting,
        processes(_worker, [ALONE, *TOGETHER], meeting, str(folder)) as pipes,
    ):
        _each(pipes, TOGETHER, "meet")
        _sums(pipes, rows, options.rounds)
        for scheme in options.schemes:
            _model(pipes, rows, scheme, options.rounds)
        for pipe in pipes.values():
            pipe.send(False)


def _sums(pipes: dict[str, Connection], rows: run.Rows, rounds: int) -> None:
    for name, (count, batches) in SUMS.items():
        for dtype in ("float32", "bfloat16"):
            found: dict[str, list[float]] = {"gloo": [], "shared memory": []}
            least = dict.fromkeys(found, float("inf"))
            for _, order in zip(range(rounds), orders(list(found)), strict=False):
                for way in order:
                    (median, best), _ = _each(pipes, TOGETHER, "sum", way, count, dtype, batches)
                    found[way].append(median)
                    least[way] = min(least[way], best)
            us = {way: 1e6 * statistics.median(times) for way, times in found.items()}
            least_us = {way: 1e6 * best for way, best in least.items()}
            faster = ratio(found["gloo"], found["shared memory"])
            rows.add(
                {"sum": name, "dtype": dtype, "us": us, "least_us": least_us, "ratio": faster},
                f"sum of {name} {dtype}: gloo {us['gloo']:.0f} us (least {least_us['gloo']:.0f}), shared memory "
                f"{us['shared memory']:.1f} us (least {least_us['shared memory']:.1f}), {faster:.1f}x",
            )


def _model(pipes: dict[str, Connection], rows: run.Rows, scheme: str, rounds: int) -> None:
    _each(pipes, [ALONE], "load", scheme, 1)
    _each(pipes, TOGETHER, "load", scheme, 2)
    work: dict[str, Callable[[str], float]] = {
        f"prompt of {PROMPT}": lambda way: max(_each(pipes, WAYS[way], "prompt", way)),
        "decode, 1 sequence": lambda way: max(_each(pipes, WAYS[way], "decode", way, 1)),
        "decode, 16 sequences": lambda way: max(_each(pipes, WAYS[way], "decode", way, 16)),
    }
    for name, call in work.items():
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for way in WAYS:
            call(way)  # the first finds out how to compute
        for _, order in zip(range(rounds), orders(list(WAYS)), strict=False):
            for way in order:
                found[way].append(call(way))
        ms = {way: 1000 * statistics.median(times) for way, times in found.items()}
        over = {way: ratio(found[way], found["divided"]) for way in ("plan", "calls")}
        rows.add(
            {"scheme": scheme, "work": name, "ms": ms, "divided_over": over},
            f"{scheme:6} {name:22}: one process {ms['plan']:.1f} ms (by calls {ms['calls']:.1f}), divided "
            f"{ms['divided']:.1f} ms: {over['plan']:.2f}x ({over['calls']:.2f}x)",
        )


def _each(pipes: dict[str, Connection], names: Sequence[str], *words: Any) -> list[Any]:
    """Ask several processes at once; return their answers."""
    for name in names:
        pipes[name].send(words)
    return [pipes[name].recv() for name in names]


def _worker(name: str, meeting: str, folder: str, pipe: Connection) -> None:
    import torch

    if name in TOGETHER:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[TOGETHER.index(name)]})
    torch.set_num_threads(1 if name in TOGETHER else CORES)
    held: dict[str, Any] = {}
    pipe.send("warm")
    while words := pipe.recv():
        with torch.inference_mode():
            pipe.send(_answer(name, meeting, folder, held, *words))


def _answer(name: str, meeting: str, folder: str, held: dict[str, Any], word: str, *more: Any) -> Any:
    import torch
    import torch.distributed as dist

    if word == "meet":
        from torchwright.models.decoder.tensor_parallel.processes import meet

        store: Any = torch.distributed.FileStore(f"{meeting}/store", CORES)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=TOGETHER.index(name), world_size=CORES)
        held["shared"] = meet(CORES, "cpu").shared
        return held["shared"] is not None
    if word == "sum":
        way, count, dtype, batches = more
        x = torch.zeros(count, dtype=getattr(torch, dtype))
        one = dist.all_reduce if way == "gloo" else held["shared"].sum
        one(x)
        times = [seconds(lambda: one(x), BATCH) for _ in range(batches)]
        return statistics.median(times), min(times)
    if word == "load":
        from torchwright.models.decoder import load_decoder

        scheme, tp = more
        held.pop("model", None)
        held["model"] = load_decoder(folder, torch.bfloat16, None if scheme == "bf16" else scheme, tp=tp)
        return True
    model = held["model"]
    watch = None
    if more[0] == "calls":  # a hook that does nothing: the step is called layer by layer
        watch = model.decoder.layers[0].register_forward_hook(lambda *_: None)
    try:
        return _prompt(model) if word == "prompt" else _decode(model, more[1])
    finally:
        if watch is not None:
            watch.remove()


def _prompt(model: Any) -> float:
    cache = model.new_cache([PROMPT])
    sequence = cache.sequence(PROMPT)
    batch = cache.append([(sequence, range(3, PROMPT + 3))])
    with model.on_threads():
        return seconds(lambda: model.decoder.answer(batch, cache, batch.last_rows_B))


def _decode(model: Any, sequences: int) -> float:
    """Return the seconds of one step."""
    cache = model.new_cache([BEHIND + STEPS + 1] * sequences)
    each = [cache.sequence(BEHIND) for _ in range(sequences)]
    with model.on_threads():
        for sequence in each:
            batch = cache.append([(sequence, range(3, BEHIND + 3))])
            model.decoder.answer(batch, cache, batch.last_rows_B)

        def step() -> None:
            batch = cache.append([(sequence, [5]) for sequence in each])
            model.decoder.answer(batch, cache, batch.last_rows_B)

        step()
        return seconds(step, STEPS)


if __name__ == "__main__":
    main()
