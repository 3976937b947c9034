"""The HTTP process's end of the engine: it starts the engine, talks to it, notices its death and starts it again.

client = EngineClient(Launcher(lambda endpoint: [sys.executable, "-m", …, "--endpoint", endpoint]), Limits())
await client.start()
mailbox = client.mailbox()
client.submit(Submit(…), mailbox)
for item in await mailbox.take(): …      what has come since the last time
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from torchwright.core.process.waited import how_it_ended
from torchwright.serve.limits import Limits
from torchwright.serve.wire.launch import Launched, Launcher
from torchwright.serve.wire.mailbox import Dropped, Item, Lost, Mailbox
from torchwright.serve.wire.messages import (
    OUT_OF_MEMORY,
    Cancel,
    Control,
    Embed,
    EngineReady,
    Forget,
    Grammar,
    LoadAdapter,
    Loading,
    Paint,
    Pause,
    Reply,
    RequestRefused,
    Shutdown,
    Stats,
    StepOutput,
    Submit,
    ToEngine,
    Transcribe,
    UnloadAdapter,
    UpdateWeights,
    WeightsUpdated,
    decode_from_engine,
    encode,
)

log = logging.getLogger("torchwright.serve")

State = Literal["loading", "ready", "restarting", "failed", "closing"]
EARLY_SECONDS = 10.0
"""A death before the engine is ready, or sooner than this after the engine was ready, is an early one."""
EARLY_DEATHS = 4
"""After so many early deaths in a row the engine is not started again."""
COUNTERS = (
    "prompt_tokens",
    "generated_tokens",
    "prefix_queries",
    "prefix_hits",
    "preemptions",
    "speculated_tokens",
    "accepted_tokens",
    "steps",
)
"""The fields of `Stats` that only grow."""
BACKOFF_SECONDS = (0.1, 0.3, 2.0, 10.0)
"""Before the next start, by the number of early deaths."""
SILENT_SECONDS = 120.0
"""An engine that says nothing for so long while requests wait hangs, and is killed; it speaks after every step."""
LONG_SILENT_SECONDS = 900.0
"""The same for a speech model, whose step is a window, decoded up to six times, and for one of a picture's."""
RESTORED = "restored"
"""Id of the messages that give an engine the state of the one before; no request has it."""
LAST_WORDS_SECONDS = 0.05
"""Longest delay of a dead engine's last messages."""
KILL_SECONDS = 5.0
"""Longest time that an engine may take to end after a request."""


@dataclass
class _Known:
    """A grammar that the engine keeps: the size of its JSON, and how many requests hold it."""

    bytes: int
    holders: int = 0


class EngineClient:
    """One engine process and the requests that wait for it."""

    def __init__(
        self,
        launcher: Launcher,
        limits: Limits,
        *,
        silent_seconds: float = SILENT_SECONDS,
        early_seconds: float = EARLY_SECONDS,
        backoff_seconds: Sequence[float] = BACKOFF_SECONDS,
    ) -> None:
        """`silent_seconds`: how long the engine may say nothing while requests wait.

        `early_seconds`: a death sooner than this after the engine was ready is an early one. `backoff_seconds`: pauses
        before the next start, by the number of early deaths; the last one for all further ones.
        """
        self._launcher, self._limits = launcher, limits
        self._silent_seconds, self._backoff_seconds = silent_seconds, backoff_seconds
        self.early_seconds = early_seconds
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._engine: Launched | None = None
        self._ended: asyncio.Task[int] | None = None
        """Its exit code, once it has ended."""
        self._life: asyncio.Task[None] | None = None
        self._mailboxes: dict[str, Mailbox] = {}
        self._generating: set[str] = set()
        """Ids of requests that generate text."""
        self._pictures: dict[str, int] = {}
        """Id of a request → bytes of its pictures."""
        self._grammars: OrderedDict[str, _Known] = OrderedDict()
        """Key → a grammar that this engine keeps, the last used last."""
        self.adapters: dict[str, LoadAdapter] = {}
        """Adapters that were loaded since the start, by name: an engine that follows loads them again."""
        self.weights: UpdateWeights | None = None
        """The last change of the weights: an engine that follows makes it again before it takes requests."""
        self.paused = False
        """True if generation is paused; an engine that follows is, too."""
        self.weight_version = ""
        """The version of the weights that the engine computes with."""
        self._early_deaths = 0
        self._killed = False
        """True if this process ended the engine."""
        self._ready_at: float | None = None
        self._heard = 0.0
        """When the engine last spoke, or was given something to do."""
        self.state: State = "loading"
        self.detail = "starting"
        """The engine's activity, or the reason why it is not running."""
        self.ready: EngineReady | None = None
        """The engine's facts; they stay while it is restarted."""
        self.stats: Stats | None = None
        self.before: Counter[str] = Counter()
        """The counters of engines that have died, by their names in `Stats`: totals run on over a restart."""
        self.restarts = 0
        self.changed = asyncio.Event()
        """Set at every change of state; whoever waits clears it first."""

    async def start(self) -> None:
        """Start the engine's first life; `state` says how it goes."""
        self._life = asyncio.create_task(self._lives_or_fails())

    async def close(self, *, drain: bool) -> None:
        """End the engine, after its running requests if `drain`; an idle one at once."""
        was = self.state
        if was != "failed":
            self._become("closing", "the server is stopping")
        if was == "ready" and self._ended is not None and self._mailboxes:
            self._send(Shutdown(drain=drain))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if drain else KILL_SECONDS):
                    await asyncio.shield(self._ended)
        self.kill()
        if self._ended is not None:
            await self._ended
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        self._context.destroy(linger=0)

    def stop(self) -> None:
        """End the engine at once and for good."""
        self._become("closing", "the server is stopping")
        self.kill()

    def kill(self) -> None:
        """End this engine's life; unless the server stops, another begins."""
        if self._engine is not None:
            self._killed = self._killed or self._engine.process.returncode is None
            self._engine.kill()

    @property
    def waiting(self) -> int:
        """Requests that have not ended."""
        return len(self._mailboxes)

    def mailbox(self) -> Mailbox:
        """A place for what the engine sends for one request of a client, which may be several of the engine's."""
        return Mailbox(self._limits.unread_outputs)

    def submit(
        self,
        message: Submit | Embed | Transcribe | Paint | LoadAdapter | UnloadAdapter | Control,
        mailbox: Mailbox,
    ) -> None:
        """Send a request; `finish` it when its last item has been taken."""
        if isinstance(message, Submit):
            self._generating.add(message.id)
        if not self._mailboxes:  # an idle engine has nothing to say
            self._heard = asyncio.get_running_loop().time()
        self._mailboxes[message.id] = mailbox
        if isinstance(message, Submit) and message.pictures:
            self._pictures[message.id] = sum(picture.bytes for picture in message.pictures)
        if self.state != "ready":
            mailbox.put(Lost(self.detail))
        elif not self._send(message):
            mailbox.put(Lost("the engine has just died"))  # and is not yet known to have

    def hold(self, grammar: Grammar) -> bool:
        """Keep a grammar in the engine until its `release`, and afterwards for the next request while it fits.

        Returns False if the held grammars have reached their memory limit.
        """
        known = self._grammars.get(grammar.key) or _Known(len(grammar.json))
        held = sum(one.bytes for one in self._grammars.values() if one.holders)
        if not known.holders and held and held + known.bytes > self._limits.grammars_held_bytes:
            return False
        known.holders += 1
        if grammar.key not in self._grammars and self.state == "ready":
            self._send(grammar)
            self._grammars[grammar.key] = known
        if grammar.key in self._grammars:
            self._grammars.move_to_end(grammar.key)
        self._forget()
        return True

    def has_room_for(self, pictures: int) -> bool:
        """Check whether so many bytes of pictures may be submitted, with those of requests that have not ended."""
        return not pictures or sum(self._pictures.values()) + pictures <= self._limits.pictures_held_bytes

    def release(self, grammar: Grammar) -> None:
        """One request less holds it."""
        if known := self._grammars.get(grammar.key):
            known.holders = max(0, known.holders - 1)  # those of an engine that has died are not counted
            self._forget()

    def _forget(self) -> None:
        """Have the engine forget grammars that nobody holds, those that were not used for longest first."""
        limits = self._limits
        free = [key for key, known in self._grammars.items() if not known.holders]
        for key in free:
            size = sum(known.bytes for known in self._grammars.values())
            if len(self._grammars) <= limits.grammars_kept and size <= limits.grammars_kept_bytes:
                return
            del self._grammars[key]
            self._send(Forget(key=key))

    def cancel(self, id: str, reason: str) -> None:
        """Tell the engine that nobody waits for a request."""
        if id in self._mailboxes and self.state == "ready":
            self._send(Cancel(id=id, reason=reason))

    def end_one(self, id: str, index: int, reason: str) -> None:
        """Tell the engine that one of a request's sequences is complete: a normal end."""
        if id in self._mailboxes and self.state == "ready":
            self._send(Cancel(id=id, index=index, reason=reason, finish="stop"))

    def finish(self, id: str) -> None:
        """No more items are wanted for a request."""
        self._mailboxes.pop(id, None)
        self._pictures.pop(id, None)
        self._generating.discard(id)

    def knows(self, id: str) -> bool:
        """Check whether a request with this id has not ended."""
        return id in self._mailboxes

    def abort(self, id: str | None, reason: str) -> int:
        """End the generating requests of one id, or all of them, with what they have; return how many.

        A request for several prompts has one for each, whose ids go on after a '-' or '_'.
        """
        own = (f"{id}-", f"{id}_")
        ends = [one for one in self._generating if id is None or one.startswith(own)]
        for one in ends if self.state == "ready" else ():
            self._send(Cancel(id=one, reason=reason, finish="abort"))
        return len(ends)

    def _become(self, state: State, detail: str) -> None:
        self.state, self.detail = state, detail
        self.changed.set()

    def _send(self, message: ToEngine) -> bool:
        if self._socket is None:
            return False
        # No limit on what waits in the socket, so that this never blocks; the engine's own queue is bounded.
        # Not copied where it is long, as with pictures.
        sent = asyncio.ensure_future(self._socket.send(encode(message), zmq.NOBLOCK, copy=False))
        return sent.done() and sent.exception() is None

    async def _lives_or_fails(self) -> None:
        """Run `_lives`; whatever it raises ends the server with its reason instead of leaving it loading for ever."""
        try:
            await self._lives()
        except Exception as error:
            log.exception("the engine cannot be started")
            self._become("failed", f"the engine cannot be started ({type(error).__name__}: {error})")
            for mailbox in self._mailboxes.values():
                mailbox.put(Lost(self.detail))

    async def _lives(self) -> None:
        """Start the engine, again after each death, until it dies too early too often or cannot be loaded."""
        loop = asyncio.get_running_loop()
        while self.state not in ("closing", "failed"):
            self._ready_at = None
            code = await self._live(self._launcher.launch())
            if self.state in ("closing", "failed"):
                break
            if self.ready is None and code >= 0:
                # No signal ended it, and it never ran: another start would end the same way.
                self._become(
                    "failed", f"the engine ended before it was ready ({self._cause(code)}); its log says why"
                )
                log.error("%s", self.detail)
                break
            self._lose(code)
            early = self._ready_at is None or loop.time() - self._ready_at < self.early_seconds
            self._early_deaths = self._early_deaths + 1 if early else 0
            if self._early_deaths >= EARLY_DEATHS:
                self._become(
                    "failed",
                    f"the engine died {self._early_deaths} times in a row ({self._cause(code)})",
                )
                log.error("%s; it is not started again", self.detail)
                break
            await asyncio.sleep(
                self._backoff_seconds[min(self._early_deaths, len(self._backoff_seconds) - 1)]
            )
            self.restarts += 1
        for mailbox in self._mailboxes.values():
            mailbox.put(Lost(self.detail))

    async def _live(self, engine: Launched) -> int:
        """One life of an engine; returns its exit code."""
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(engine.endpoint)
        self._grammars.clear()
        self._killed = False
        self._engine, self._ended = engine, asyncio.create_task(engine.ended())
        tasks = [asyncio.create_task(self._read(self._socket)), asyncio.create_task(self._watch())]
        try:
            code = await asyncio.shield(self._ended)
            await asyncio.sleep(LAST_WORDS_SECONDS)
            return code
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._socket.close()
            self._socket = None
            self.kill()

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                self._take(await socket.recv())
        except msgspec.MsgspecError as error:
            log.error("the engine sent what is no message (%s); it is ended", error)
            self.kill()

    async def _watch(self) -> None:
        """Kill an engine that hangs."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._silent_seconds / 4)
            silent = loop.time() - self._heard
            if self.state == "ready" and self._mailboxes and silent > self._silent_seconds:
                log.error("the engine has said nothing for %.0f s while requests wait; it is killed", silent)
                self.kill()

    def _take(self, data: bytes) -> None:
        message = decode_from_engine(data)
        self._heard = asyncio.get_running_loop().time()
        if isinstance(message, StepOutput):
            self.stats = message.stats
            for output in message.outputs:
                self._deliver(output.id, output)
        elif isinstance(message, Reply):
            if isinstance(message, WeightsUpdated) and self.ready is not None:
                self.weight_version = message.version
                self.ready = msgspec.structs.replace(self.ready, fingerprint=message.fingerprint)
            if message.id == RESTORED:
                self._restored(message)
            self._deliver(message.id, message)
        elif isinstance(message, Loading):
            self._become(self.state, message.text)
        elif isinstance(message, EngineReady):
            self.ready, self._ready_at = message, self._heard
            self.weight_version = message.fingerprint
            for adapter in self.adapters.values():
                self._send(msgspec.structs.replace(adapter, replace=True))
            if self.paused:
                self._send(Pause(id=RESTORED, mode="in_place"))
            if self.weights is not None:
                self._become(self.state, "the engine reads the weights again that it had")
                self._send(msgspec.structs.replace(self.weights, id=RESTORED, abort=False, pause=False))
            elif self.state != "closing":
                self._become("ready", "ready")
        elif message.id is not None:
            self._deliver(message.id, message)
        else:
            self._become("failed", message.text)

    def _restored(self, message: Reply) -> None:
        """Take requests again, with the weights that the engine had before it died.

        Where they cannot be read any more it goes on with those that it was started with, as their version says.
        """
        if isinstance(message, RequestRefused):
            log.error("the weights cannot be read again, and those of the start are served: %s", message.text)
            self.weights = None
        if isinstance(message, RequestRefused | WeightsUpdated) and self.state != "closing":
            self._become("ready", "ready")

    def _deliver(self, id: str, item: Item) -> None:
        mailbox = self._mailboxes.get(id)
        if mailbox is None:
            return
        if mailbox.full:
            self.cancel(id, "slow reader")
            self.finish(id)
            mailbox.put(Dropped("slow reader"))
        else:
            mailbox.put(item)

    def _lose(self, code: int) -> None:
        """Handle the engine's death: fail all waiting requests, and keep its counters."""
        reason = f"the engine died ({self._cause(code)}) and is being restarted"
        log.error("%s; %d requests were waiting", reason, len(self._mailboxes))
        if self.stats is not None:
            self.before.update({name: getattr(self.stats, name) for name in COUNTERS})
            self.stats = None
        self._become("restarting", reason)
        for mailbox in self._mailboxes.values():
            mailbox.put(Lost(reason))

    def _cause(self, code: int) -> str:
        """Return how an engine ended; the system's killer of processes leaves no other word."""
        if code == OUT_OF_MEMORY:
            return "out of memory"
        how = how_it_ended(code)
        return f"{how}: most likely out of memory" if code == -signal.SIGKILL and not self._killed else how
