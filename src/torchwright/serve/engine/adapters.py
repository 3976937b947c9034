"""The adapters of a serving engine, by name: loaded, replaced, and let go when no sequence computes with them.

A name is looked up once for each request. Its sequences keep the adapter itself, so that other weights under the same
name are another adapter to the batch and to the prefix tree. Files are read in a thread, one adapter at a time: a slow
disk holds no step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torchwright.core.errors import ModelError, TorchwrightError, first_line
from torchwright.models.decoder.low_rank import Adapter
from torchwright.serve.wire.messages import (
    AdapterLoaded,
    AdapterUnloaded,
    LoadAdapter,
    RequestRefused,
    Submit,
    UnloadAdapter,
)

Answer = AdapterLoaded | AdapterUnloaded | RequestRefused
ReadAdapter = Callable[[Path, int], Adapter]
"""(folder, bytes of its file at most) → the adapter; raises `TorchwrightError`."""
WIDEST = 2
"""Bytes of a file, at most, for each byte in memory: files may hold float32."""


class ServedAdapters:
    """Adapters by name, and those without a name any more that running sequences still compute with.

    All of them together take at most `most_bytes`.
    """

    def __init__(self, read: ReadAdapter, most_bytes: int) -> None:
        self._read, self._most = read, most_bytes
        self._named: dict[str, Adapter] = {}
        self._users: dict[Adapter, int] = {}
        """Sequences of each adapter that is in memory."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._loading: list[tuple[LoadAdapter, Future[Adapter]]] = []
        self._leaving: list[tuple[UnloadAdapter, Adapter]] = []
        self._answers: list[Answer] = []

    @property
    def loading(self) -> bool:
        """Check whether files are being read."""
        return bool(self._loading)

    @property
    def bytes(self) -> int:
        return sum(adapter.bytes for adapter in self._users)

    def refuse(self, submit: Submit) -> RequestRefused | None:
        """Return why a request cannot be computed, None where it names no adapter or one that there is."""
        if submit.adapter is None or submit.adapter in self._named:
            return None
        if any(message.name == submit.adapter for message, _ in self._loading):  # again, after a restart
            text = f"the adapter '{submit.adapter}' is being loaded"
            return RequestRefused(id=submit.id, reason="queue_full", text=text, retry_after_s=1.0)
        return RequestRefused(id=submit.id, reason="invalid", text=f"there is no adapter '{submit.adapter}'")

    def take(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Begin to load or unload an adapter; `answers` has the outcome."""
        if isinstance(message, LoadAdapter):
            folder, most = Path(message.folder), WIDEST * self._most
            self._loading.append((message, self._thread.submit(self._read, folder, most)))
        elif (adapter := self._named.pop(message.name, None)) is not None:
            self._leaving.append((message, adapter))
        else:
            self._refuse(message, f"there is no adapter '{message.name}'")

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter now. Raises `ModelError` as `answers` refuses."""
        self._add(name, self._read(folder, WIDEST * self._most), replace=False)

    def use(self, name: str | None) -> Adapter | None:
        """Return the adapter of a new sequence, which has to `release` it."""
        if name is None:
            return None
        adapter = self._named[name]
        self._users[adapter] += 1
        return adapter

    def release(self, adapter: Adapter | None) -> None:
        """A sequence has ended."""
        if adapter is not None:
            self._users[adapter] -= 1
            self._forget()

    def answers(self) -> list[Answer]:
        """Return what is to be sent, each once: an unloading is answered when no sequence computes with the adapter.

        Refused are files that cannot be used, a name in use without `replace`, and adapters beyond `most_bytes`.
        """
        if not (self._loading or self._leaving or self._answers):  # asked after every step
            return []
        loading, self._loading = self._loading, []
        for message, read in loading:
            if read.done():
                self._loaded(message, read)
            else:
                self._loading.append((message, read))
        leaving, self._leaving = self._leaving, []
        for message, adapter in leaving:
            if self._users[adapter]:
                self._leaving.append((message, adapter))
            else:
                self._answers.append(AdapterUnloaded(id=message.id))
        self._forget()
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        """End the thread, once it has read what it reads."""
        self._thread.shutdown(cancel_futures=True)

    def _loaded(self, message: LoadAdapter, read: Future[Adapter]) -> None:
        try:
            adapter = read.result()
            self._add(message.name, adapter, replace=message.replace)
        except Exception as error:  # a fault of one adapter must not end the engine
            known = isinstance(error, TorchwrightError)
            self._refuse(message, str(error) if known else f"{type(error).__name__}: {first_line(error)}")
        else:
            self._answers.append(AdapterLoaded(id=message.id, digest=adapter.digest, bytes=adapter.bytes))

    def _add(self, name: str, adapter: Adapter, *, replace: bool) -> None:
        old = self._named.get(name)
        if old is not None and not replace:
            raise ModelError(f"there is an adapter '{name}' already")
        freed = old.bytes if old is not None and not self._users[old] else 0
        if self.bytes - freed + adapter.bytes > self._most:
            raise ModelError(
                f"there is no memory for the adapter '{name}'",
                found=f"{adapter.bytes:,} bytes, next to {self.bytes - freed:,} of others",
                allowed=f"{self._most:,} bytes together (--adapter-memory)",
                next="unload another one",
            )
        self._users[adapter] = 0
        self._named[name] = adapter
        self._forget()

    def _refuse(self, message: LoadAdapter | UnloadAdapter, text: str) -> None:
        self._answers.append(RequestRefused(id=message.id, reason="invalid", text=text))

    def _forget(self) -> None:
        """Let go of adapters without a name and without a sequence."""
        named = {*self._named.values(), *(adapter for _, adapter in self._leaving)}
        self._users = {one: users for one, users in self._users.items() if users or one in named}
