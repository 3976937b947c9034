"""Requests to a serving engine as a whole: other weights, a pause, an empty prefix cache.

New weights are read in a thread while steps go on, one set at a time, and change hands between two steps. Requests for
weights are answered in their order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from torchwright.core.errors import TorchwrightError, first_line
from torchwright.models.decoder.generation.generate import LoadedPagedModel
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.wire.messages import (
    Control,
    Controlled,
    FlushCache,
    NameWeights,
    Pause,
    RequestRefused,
    Resume,
    UpdateWeights,
    WeightsUpdated,
)

log = logging.getLogger("torchwright.serve")

Answer = Controlled | WeightsUpdated | RequestRefused
ReadWeights = Callable[[str], LoadedPagedModel]
"""Folder → its weights, as the engine's own were opened; raises `TorchwrightError`."""
WAITING = 8
"""Updates that wait for the one before: each is a whole set of weights, and only the last one stays."""


class EngineControl:
    """Does what control messages say; `answers` has what is to be sent."""

    def __init__(self, engine: ServingEngine, read: ReadWeights) -> None:
        self._engine, self._read = engine, read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._updates: deque[UpdateWeights] = deque()
        self._reading: Future[LoadedPagedModel] | None = None
        """That of the first update."""
        self._answers: list[Answer] = []

    @property
    def reading(self) -> bool:
        """Check whether weights are being read."""
        return self._reading is not None

    @property
    def pauses(self) -> bool:
        """Check whether steps compute nothing."""
        return self._engine.paused

    def take(self, message: Control) -> None:
        """Do what a message says, or begin to."""
        engine = self._engine
        match message:
            case FlushCache():
                if engine.flush():
                    self._answers.append(Controlled(id=message.id))
                else:
                    self._refuse(
                        message, "requests are running, and what they have computed cannot be let go"
                    )
            case Pause():
                engine.pause(message.mode)
                self._answers.append(Controlled(id=message.id, requests=engine.requests))
            case Resume():
                requests = engine.requests
                engine.resume()
                self._answers.append(Controlled(id=message.id, requests=requests))
            case NameWeights():
                if message.abort:
                    engine.cancel_all("the weights have another version", "abort")
                engine.name_weights(message.version)
                self._updated(message)
            case UpdateWeights():
                if len(self._updates) >= WAITING:
                    self._refuse(message, f"{WAITING} updates of the weights wait already")
                else:
                    self._updates.append(message)

    def resume(self) -> None:
        """End a pause, without an answer."""
        self._engine.resume()

    def answers(self) -> list[Answer]:
        """Put weights that have been read into the engine; return what is to be sent, each once.

        Called between steps.
        """
        if self._reading is not None and self._reading.done():
            self._change(self._updates.popleft(), self._reading)
            self._reading = None
        if self._reading is None and self._updates:
            self._reading = self._thread.submit(self._read, self._updates[0].folder)
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End the thread, once it has read what it reads."""
        self._thread.shutdown(cancel_futures=True)

    def _change(self, message: UpdateWeights, read: Future[LoadedPagedModel]) -> None:
        engine = self._engine
        try:
            loaded = read.result()
            engine.load_weights(loaded, message.version)
        except Exception as error:  # a fault of one folder must not end the engine
            known = isinstance(error, TorchwrightError)
            self._refuse(message, str(error) if known else f"{type(error).__name__}: {first_line(error)}")
            return
        if message.abort:
            engine.cancel_all("the weights have changed", "abort")
        if message.pause:
            engine.pause("retract")
        log.info("weights %s (%s) from %s", engine.weight_version, engine.fingerprint[:16], message.folder)
        self._updated(message)

    def _updated(self, message: UpdateWeights | NameWeights) -> None:
        engine = self._engine
        self._answers.append(
            WeightsUpdated(
                id=message.id,
                version=engine.weight_version,
                fingerprint=engine.fingerprint,
                requests=engine.requests,
            )
        )

    def _refuse(self, message: Control, text: str) -> None:
        self._answers.append(RequestRefused(id=message.id, reason="invalid", text=text))
