"""Producers of a target's hidden states: processes that compute them while the trainer makes a step.

Each has a pipe of its own. It computes one micro-batch, and waits in sending it until the trainer takes it: that is
the bound on what is made ahead. One that dies is started again and gets its micro-batches anew; states are a function
of the windows, so that nothing else changes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from torchwright.core.process.orphans import die_with_parent
from torchwright.train.draft.config import DraftRun
from torchwright.train.draft.target import HiddenStates, TargetModel
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.objectives.objective import MicroBatch

DEATHS = 3
"""Deaths of a producer without a result in between, after which the run stops: another start would die as well."""
ENDING_S = 5.0
"""Seconds in which a producer whose pipe is closed ends."""


@dataclass(frozen=True, kw_only=True)
class ProducerPlan:
    """Everything that a producer needs to begin."""

    folder: str
    dtype: str
    quantize: str | None
    device: str
    card: int | None
    threads: int | None
    observed: tuple[int, ...]


@dataclass(eq=False)
class Producer:
    """A process, and the micro-batches that it has not answered yet."""

    process: Any
    pipe: Connection
    waiting: deque[MicroBatch] = field(default_factory=deque)
    deaths: int = 0


class Producers:
    """Processes that answer micro-batches in the order in which they were asked."""

    def __init__(self, run: DraftRun, folder: str, observed: tuple[int, ...], device: str) -> None:
        """`folder` is the target's."""
        self._plan = ProducerPlan(
            folder=folder,
            dtype=run.target.dtype,
            quantize=run.target.quantize,
            device=device,
            card=torch.cuda.current_device() if device == "cuda" else None,
            threads=run.features.threads,
            observed=observed,
        )
        self._device = device
        self.restarts = 0
        self._producers = [Producer(*_started(self._plan)) for _ in range(run.features.producers)]
        self._asked = self._taken = 0

    @property
    def count(self) -> int:
        return len(self._producers)

    def ask(self, batch: MicroBatch) -> None:
        """Have the next producer compute the states of a micro-batch."""
        producer = self._producers[self._asked % len(self._producers)]
        self._asked += 1
        producer.waiting.append(batch)
        self._send(producer, batch)

    def take(self) -> HiddenStates:
        """Return the states of the micro-batch that was asked for first; waits for them.

        Raises `RunError` if its producer dies again and again.
        """
        producer = self._producers[self._taken % len(self._producers)]
        while True:
            try:
                found = producer.pipe.recv()
                break
            except (EOFError, OSError):
                self._restart(producer)
        producer.waiting.popleft()
        producer.deaths = 0
        self._taken += 1
        observed, final = (_tensor(array, kind).to(self._device) for array, kind in found)
        return HiddenStates(observed_BTF=observed, final_BTE=final)

    def close(self) -> None:
        """End the processes."""
        for producer in self._producers:
            producer.pipe.close()
        for producer in self._producers:
            producer.process.join(ENDING_S)
            if producer.process.is_alive():
                producer.process.kill()
                producer.process.join()

    def _send(self, producer: Producer, batch: MicroBatch) -> None:
        try:
            producer.pipe.send([None if part is None else part.cpu().numpy() for part in _parts(batch)])
        except OSError:
            self._restart(producer)

    def _restart(self, producer: Producer) -> None:
        producer.pipe.close()
        producer.process.join(ENDING_S)
        producer.process.kill()
        producer.process.join()
        producer.deaths += 1
        self.restarts += 1
        if producer.deaths >= DEATHS:
            raise RunError(
                f"a producer of hidden states died {producer.deaths} times",
                found=f"exit code {producer.process.exitcode}",
                next="look at what it wrote; a target that does not fit into memory once more needs fewer "
                "features.producers, and 0 computes in the training process",
            )
        producer.process, producer.pipe = _started(self._plan)
        for batch in list(producer.waiting):
            self._send(producer, batch)


def _parts(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return batch.ids_BT, batch.labels_BT, batch.documents_BS


def _started(plan: ProducerPlan) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=produce, args=(plan, theirs, os.getpid()), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def produce(plan: ProducerPlan, pipe: Connection, parent: int) -> None:
    """Answer micro-batches until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer is asked to leave, and closes the pipe
    die_with_parent(parent)
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    if plan.card is not None:
        torch.cuda.set_device(plan.card)
    target = TargetModel(plan.folder, plan.dtype, plan.quantize, plan.device)
    while True:
        try:
            asked = pipe.recv()
        except (EOFError, OSError):
            return
        ids, labels, documents = (
            None if part is None else torch.from_numpy(part).to(plan.device) for part in asked
        )
        assert ids is not None
        assert labels is not None
        states = target.hidden_states(plan.observed, ids, labels, documents)
        pipe.send([_array(states.observed_BTF), _array(states.final_BTE)])


def _array(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """A tensor as NumPy has it, which knows no bfloat16, and the name of its type."""
    kind = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.cpu()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy(), kind


def _tensor(array: np.ndarray, kind: str) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if kind == "bfloat16" else tensor
