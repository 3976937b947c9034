"""Grammars on their way to the engine: compiled in processes of their own, within limits, and remembered by content."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Literal

import msgspec

from torchwright.serve.api_error import invalid
from torchwright.serve.grammar.schema.rules import WHITESPACE as WHITESPACE
from torchwright.serve.limits import MIB, Limits
from torchwright.serve.wire.messages import EngineReady, Grammar
from torchwright.serve.workers.pool import Unfinished, Workers, WorkLimits

REMEMBERED_BYTES = 64 * MIB
Kind = Literal["json", "regex", "choice", "grammar", "tools"]


class GrammarJob(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar to be compiled; `text` is a schema, regex, list of texts (JSON), EBNF or structural tag (tools)."""

    kind: Kind
    text: str
    prefix: str = ""
    """A structural tag of what may come before, such as reasoning."""
    lead: str = ""
    """A structural tag of what stands right before."""
    calls: str = ""
    """A structural tag of what may come in its place."""


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled grammar as JSON, or the reason for the failure."""

    json: str | None = None
    fault: str | None = None


JSON_OBJECT = GrammarJob(kind="json", text='{"type": "object", "additionalProperties": true}')
COMMON = (JSON_OBJECT,)
"""Compiled before the first request asks for one."""


class GrammarCompiler:
    """Compiles each grammar once, however many ask for it."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder, self._limits = folder, limits
        self._workers: Workers | None = None
        self._known: OrderedDict[GrammarJob, Grammar | str] = OrderedDict()
        """`GrammarJob` → its grammar, or the reason for the failure; the last used last."""
        self._known_bytes = 0
        self._running: dict[GrammarJob, asyncio.Task[Grammar | str]] = {}

    async def compile(self, job: GrammarJob, ready: EngineReady, param: str) -> Grammar:
        """The compiled grammar; `param` names the request's field in errors.

        Raises `ApiError`: 400 for a grammar that is wrong, too large or too slow, 429 when too many wait.
        """
        limits = self._limits
        size = len(job.text.encode()) + len(job.calls.encode())
        if size > limits.grammar_bytes:
            raise invalid(
                f"'{param}' has {size} bytes; at most {limits.grammar_bytes} are compiled",
                param,
                "grammar_limit",
            )
        if not ready.stop_ids:
            raise invalid(
                f"'{param}' needs a model that names an end-of-text token", param, "unsupported_parameter"
            )
        found = self._known.get(job)
        if found is None:
            task = self._running.get(job)
            if task is None:
                task = self._running[job] = asyncio.create_task(self._compile(job, ready))
                task.add_done_callback(lambda ended: self._ended(job, ended))
            found = await asyncio.shield(task)  # others may wait for it, too
        else:
            self._known.move_to_end(job)
        if isinstance(found, str):
            raise invalid(f"'{param}' cannot be used: {found}", param, "invalid_grammar")
        return found

    async def warm(self, ready: EngineReady) -> list[Grammar]:
        """Start the process, and compile what is common, so that no request waits for it."""
        return [await self.compile(job, ready, "") for job in COMMON] if ready.stop_ids else []

    async def close(self) -> None:
        """End the process."""
        if self._workers is not None:
            await self._workers.close()

    def _ended(self, job: GrammarJob, task: asyncio.Task[Grammar | str]) -> None:
        """Forget a job; its fault is for those who wait, and all of them may have left."""
        del self._running[job]
        if not task.cancelled():
            task.exception()

    async def _compile(self, job: GrammarJob, ready: EngineReady) -> Grammar | str:
        limits = self._limits
        if self._workers is None:
            facts = [str(self._folder), ready.vocabulary, ready.stop_ids]
            self._workers = Workers(
                "torchwright.serve.grammar.worker",
                facts,
                WorkLimits(
                    seconds=limits.grammar_seconds,
                    quick_seconds=limits.grammar_quick_seconds,
                    memory_bytes=limits.grammar_memory_bytes,
                    waiting=limits.grammars_waiting,
                ),
            )
        try:
            answer = await self._workers.run(msgspec.msgpack.encode(job))
        except Unfinished as unfinished:
            found: Grammar | str = str(unfinished)
        else:
            found = self._grammar(msgspec.msgpack.decode(answer, type=Compiled))
        self._remember(job, found)
        return found

    def _grammar(self, compiled: Compiled) -> Grammar | str:
        text, most = compiled.json, self._limits.grammar_compiled_bytes
        if text is None:
            return compiled.fault or "it cannot be compiled"
        if len(text) > most:
            return f"compiled it has {len(text)} bytes, and at most {most} are taken"
        return Grammar(key=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), json=text)

    def _remember(self, job: GrammarJob, found: Grammar | str) -> None:
        """Faults are remembered too, so that a grammar that is too slow is slow once."""
        self._known[job] = found
        self._known_bytes += _bytes(job, found)
        for oldest in [known for known in self._known if known not in COMMON]:
            if self._known_bytes <= REMEMBERED_BYTES:
                return
            self._known_bytes -= _bytes(oldest, self._known.pop(oldest))


def _bytes(job: GrammarJob, found: Grammar | str) -> int:
    return len(job.text) + len(job.calls) + len(found if isinstance(found, str) else found.json)
