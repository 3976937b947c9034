"""A speech model that is served: sounds in, windows out, one window of each sound in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain

import numpy as np

from torchwright.core.errors import TorchwrightError
from torchwright.models.speech.base import Recognizer
from torchwright.models.speech.transcript import Window
from torchwright.serve.engine.fingerprint import fingerprint
from torchwright.serve.wire.messages import EngineReady, Failed, Heard, RequestRefused, Transcribe


class ServedRecognizer:
    """A recognizer and its sounds: `max_running` of them in turn, window by window; at most `max_queue` wait.

    A sound's windows do not depend on what else is there: each is computed by itself.
    """

    purpose = "this model writes down sound; it does not read text"

    def __init__(self, model: Recognizer, *, max_running: int, max_queue: int) -> None:
        self._model, self._max_running, self._max_queue = model, max_running, max_queue
        self._running = deque[tuple[str, Iterator[Window]]]()
        """The next one first."""
        module = model.model.module
        self._waiting = deque[tuple[str, Iterator[Window]]]()
        self.ready = EngineReady(
            kind="recognizer",
            vocabulary=model.tokenizer.get_vocab_size(),
            context=model.positions,
            pages=0,
            page_tokens=0,
            stop_ids=[],
            max_running=max_running,
            weight_bytes=sum(value.nbytes for value in chain(module.parameters(), module.buffers())),
            kv_bytes=0,
            fingerprint=fingerprint(module),
        )

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    def submit(self, message: Transcribe) -> Failed | RequestRefused | None:
        """Take a sound, or say why not. Its file may go once this has returned."""
        if len(self._running) + len(self._waiting) >= self._max_running + self._max_queue:
            text = f"{len(self._waiting)} sounds wait; at most {self._max_queue} may"
            return RequestRefused(id=message.id, reason="queue_full", text=text, retry_after_s=1.0)
        try:
            samples_T = np.memmap(message.samples, np.float32, "r")
        except (OSError, ValueError) as error:
            return Failed(id=message.id, text=f"the samples cannot be read: {error}")
        asked = asdict(message.options)
        self._waiting.append((message.id, self._model.windows(samples_T, **asked)))
        return None

    def cancel(self, id: str) -> None:
        """Forget a sound that nobody waits for; unknown ids have ended."""
        for queue in (self._running, self._waiting):
            for one in [one for one in queue if one[0] == id]:
                queue.remove(one)

    def cancel_all(self) -> None:
        """Forget every sound."""
        self._running.clear()
        self._waiting.clear()

    def step(self) -> Heard | Failed:
        """The next window of the sound whose turn it is, or its end, or what is wrong with it."""
        while self._waiting and len(self._running) < self._max_running:
            self._running.append(self._waiting.popleft())
        id, windows = self._running.popleft()
        try:
            window = next(windows, None)
        except TorchwrightError as error:
            return Failed(id=id, text=str(error))
        if window is not None:
            self._running.append((id, windows))
        return Heard(id=id, window=window)
