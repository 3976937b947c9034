"""Check that each architecture of models/zoo.py is fit to be measured: the original is built and called.

`zoo.py --check` examines each in a process of its own, all forked from one that has imported the libraries.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.models import zoo

LARGEST, SMALLEST = 1e5, 1e-5
"""Standard deviations of outputs between which different answers can be distinguished."""
SHARE = 1e-3
"""Rows whose differences are a smaller share of the whole output's deviation hide a wrong answer in its rounding."""
SECONDS = 600


def main(names: Sequence[str]) -> int:
    """Print a line for each; 1 if anything is off."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["benchmarks.optimize.zoo_check"])
    failed = False
    for name in names:
        ours, theirs = processes.Pipe()
        process = processes.Process(target=_answer, args=(name, theirs))
        process.start()
        theirs.close()
        try:
            row = ours.recv() if ours.poll(SECONDS) else {"problems": [f"not done in {SECONDS} s"]}
        except EOFError:
            row = {"problems": ["its process died"]}
        process.kill()
        process.join()
        size = f"{row['parameters_M']:.1f} M, {row['ms']:.0f} ms" if "ms" in row else ""
        print(f"{name}: {size}", *row["problems"], sep="; ", flush=True)
        failed |= bool(row["problems"])
    return int(failed)


def _answer(name: str, connection: Connection) -> None:
    try:
        row = examine(name)
    except Exception as error:  # whatever a factory raises is its line
        row = {"problems": [f"{type(error).__name__}: {error}"[:300]]}
    connection.send(row)


def examine(name: str) -> dict[str, Any]:
    """Return parameters in millions, milliseconds of a call, and what is off in two batches of different inputs."""
    found: list[str] = []
    model, inputs = zoo.make(name)
    row: dict[str, Any] = {
        "parameters_M": sum(p.numel() for p in model.parameters()) / 1e6,
        "problems": found,
    }
    again, same = zoo.make(name)
    _, fewer = zoo.make(name, zoo.OTHER_BATCH, inputs=1)
    with torch.no_grad():
        first, repeated = call(model, inputs), call(model, inputs)
        begun = time.perf_counter()
        rebuilt = call(again, same)
        row["ms"] = 1e3 * (time.perf_counter() - begun)
        others = call(model, fewer)
    if not first:
        found.append("no floating output")
    if not identical(first, repeated):
        found.append("two calls differ")
    if not identical(first, rebuilt):
        found.append("two models of one seed differ")
    if len(first) != len(others):
        found.append(f"{len(first)} outputs for one batch, {len(others)} for the other")
    for outputs in (first, others):
        found += itertools.chain.from_iterable(map(degenerate, outputs))
    return row


def call(model: torch.nn.Module, inputs: zoo.Inputs) -> list[torch.Tensor]:
    """Return the floating outputs of a call, as a flat list."""
    outputs = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    leaves = pytree.tree_leaves(
        outputs if isinstance(outputs, torch.Tensor | tuple | list) else dict(outputs)
    )
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def identical(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def degenerate(output: torch.Tensor) -> list[str]:
    """Return why an output could not show a wrong answer: not finite, out of range, or the same for every row."""
    what = f"output {tuple(output.shape)}"
    if not output.isfinite().all():
        return [f"{what} is not finite"]
    if output.dim() == 0 or output.shape[0] == 1:
        return []
    spread = (output - output.mean(0, keepdim=True)).std().item()
    if not SMALLEST <= spread <= LARGEST:
        return [f"{what} differs between rows by {spread:.1g}"]
    if spread < SHARE * output.std().item():
        return [f"{what} differs between rows by {spread:.1g}, within by {output.std().item():.1g}"]
    return []
