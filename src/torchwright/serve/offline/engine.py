"""The engine of a language model in this process: the same interface to requests as the client of its own process."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from torchwright.core.errors import ModelError
from torchwright.hardware.devices.allocator import retain_where_possible
from torchwright.serve.engine.process import SWITCH_S, ServedDecoder, open_served
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.mailbox import Lost, Mailbox
from torchwright.serve.wire.messages import (
    Cancel,
    FromEngine,
    Grammar,
    Stats,
    Submit,
)

UNREAD = 1 << 20
"""Outputs of one request that nobody has read: the reader is in the same process, and none is dropped."""


class Silent:
    """Hears how far the engine's start is, and tells nobody."""

    def send(self, message: FromEngine) -> None:
        """Drop a message."""


class LocalEngine:
    """One engine whose steps run in a thread of this process.

    Everything but a step happens on the event loop. What changes the engine waits for the end of the running step.

    engine = LocalEngine(EngineOptions(model="path/to/folder"))
    async with asyncio.TaskGroup() as group:
        steps = group.create_task(engine.run())
        …                                           requests, as `openai.generation.Generation` sends them
        steps.cancel()
    """

    def __init__(self, options: EngineOptions) -> None:
        """Raises `TorchwrightError` as `open_served` does, and `ModelError` for a model that writes no text."""
        retain_where_possible()  # a step's logits are tens of megabytes, mapped afresh each time otherwise
        sys.setswitchinterval(SWITCH_S)
        served = open_served(options, Silent())
        if not isinstance(served, ServedDecoder):
            raise ModelError(f"{options.model} writes no text")
        self._engine, self.ready = served.engine, served.ready
        if self._engine.grammars is not None:
            self._engine.grammars.warm()
        # One thread for all steps: OpenMP keeps a pool of threads for each that computes.
        self._thread = ThreadPoolExecutor(1, "engine")
        self._mailboxes: dict[str, Mailbox] = {}
        self._holders = Counter[str]()
        self._changes: list[Callable[[], None]] = []
        self._wake = asyncio.Event()

    @property
    def stats(self) -> Stats:
        """The engine's state now."""
        return self._engine.stats()

    async def run(self) -> None:
        """Compute steps while there are requests, until it is cancelled; what a step raises passes."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                self._change()
                while not self._engine.idle:
                    output = await loop.run_in_executor(self._thread, self._engine.step)
                    for one in output.outputs:
                        if mailbox := self._mailboxes.get(one.id):
                            mailbox.put(one)
                    self._change()
        except Exception as error:
            for mailbox in self._mailboxes.values():
                mailbox.put(Lost(f"the engine failed: {error}"))
            raise

    def close(self) -> None:
        """End the engine's threads."""
        self._thread.shutdown()
        self._engine.close()

    def mailbox(self) -> Mailbox:
        return Mailbox(UNREAD)

    def has_room_for(self, pictures: int) -> bool:
        """True: whoever asks bounds the requests that run side by side."""
        return True

    def hold(self, grammar: Grammar) -> bool:
        """Give the engine a grammar unless it has it; it keeps it until the last `release`."""
        self._holders[grammar.key] += 1
        if self._holders[grammar.key] == 1:
            self._later(lambda: self._keep(grammar))
        return True

    def release(self, grammar: Grammar) -> None:
        self._holders[grammar.key] -= 1
        if not self._holders[grammar.key]:
            self._later(lambda: self._forget(grammar.key))

    def knows(self, id: str) -> bool:
        return id in self._mailboxes

    def submit(self, message: Submit, mailbox: Mailbox) -> None:
        self._mailboxes[message.id] = mailbox
        self._later(lambda: self._submit(message, mailbox))

    def cancel(self, id: str, reason: str) -> None:
        if id in self._mailboxes:
            self._later(lambda: self._engine.cancel(Cancel(id=id, reason=reason)))

    def end_one(self, id: str, index: int, reason: str) -> None:
        if id in self._mailboxes:
            self._later(lambda: self._engine.cancel(Cancel(id=id, index=index, reason=reason, finish="stop")))

    def finish(self, id: str) -> None:
        self._mailboxes.pop(id, None)

    def _later(self, change: Callable[[], None]) -> None:
        """Change the engine before its next step."""
        self._changes.append(change)
        self._wake.set()

    def _change(self) -> None:
        changes, self._changes = self._changes, []
        for change in changes:
            change()

    def _submit(self, message: Submit, mailbox: Mailbox) -> None:
        if refused := self._engine.submit(message):
            mailbox.put(refused)

    def _keep(self, grammar: Grammar) -> None:
        if self._engine.grammars is not None:
            self._engine.grammars.keep(grammar)

    def _forget(self, key: str) -> None:
        # Somebody may have asked for it again since.
        if self._engine.grammars is not None and not self._holders[key]:
            self._engine.grammars.forget(key)
