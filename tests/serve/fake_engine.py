"""A fake engine that speaks `messages.py`: the process behind the servers of `http_support`.

The engine needs neither torch nor a model: it answers with the prompt's own tokens from the second on, over and over. A
request's `priority` asks it for what goes wrong: see `Trouble`. It imports little, because every server of the tests
starts one.
"""

from __future__ import annotations

import argparse
import enum
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import zmq

from torchwright.models.speech.transcript import Segment, Unheard, Window, Word
from torchwright.serve.wire.messages import (
    OUT_OF_MEMORY,
    AdapterLoaded,
    AdapterUnloaded,
    Cancel,
    Control,
    Controlled,
    Embed,
    Embedded,
    EngineReady,
    Failed,
    Finish,
    FlushCache,
    Forget,
    FromEngine,
    Grammar,
    Heard,
    LoadAdapter,
    Loading,
    NameWeights,
    Paint,
    Painted,
    Pause,
    RequestRefused,
    Resume,
    Shutdown,
    Stats,
    StepOutput,
    Submit,
    Timing,
    TokenLogprob,
    TokenOutput,
    Transcribe,
    UnloadAdapter,
    UpdateWeights,
    WeightsUpdated,
    decode_to_engine,
    encode,
)

CONTEXT = 1024
STOP = 1
LOADING = "loading for ever"
NEVER = "a text that is not embedded, a prompt for which only the first window is heard"
DIES = "a prompt that ends the engine"
READERS = ("encoder", "classifier", "recognizer", "painter")
"""Kinds that need no tokenizer in the HTTP process."""
SAMPLE_BYTES = 4
"""Sounds are files of float32."""

CHUNK_SEED, CHUNK = 93, 4
"""The seed of a request whose tokens come so many at a time, as accepted draft tokens do."""
SLOW_SEED = 94
"""The seed of a request that is slow, at paths that take no priority."""


class Trouble(enum.IntEnum):
    """A fault that a request asks of the fake engine by its priority."""

    FULL = 91
    DIE = 92
    FAIL = 93
    SLOW = 94
    """20 ms for each token."""
    HANG = 95
    SLOW_GRAMMAR = 96


class FakeEngine:
    """Repeats prompts, one token of every sequence a step."""

    def __init__(self, endpoint: str, *, kind: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.connect(endpoint)
        self._kind = kind
        self._running: dict[tuple[str, int], tuple[Submit, int]] = {}
        self._adapters: set[str] = set()
        self._paused, self._version = False, "fake"
        self._totals = {"prompt_tokens": 0, "generated_tokens": 0, "steps": 0}

    def run(self) -> None:
        if self._kind == "loading":
            self._send(Loading(text=LOADING))
            while os.getppid() != 1:
                time.sleep(0.1)
        self._send(
            EngineReady(
                kind=self._kind if self._kind in READERS else "decoder",
                labels=["good"] if self._kind == "classifier" else [],
                activation="sigmoid",
                score_activation="sigmoid",
                vocabulary=4096,
                context=CONTEXT,
                pages=256,
                page_tokens=16,
                stop_ids=[STOP],
                max_running=64,
                weight_bytes=1,
                kv_bytes=1,
                fingerprint="fake",
                pictures=self._kind != "sightless",
            )
        )
        while True:
            while self._socket.poll(0 if self._running else 100):
                message = decode_to_engine(self._socket.recv())
                if isinstance(message, Shutdown):
                    return
                self._take(message)
            if self._running:
                self._step()
            if os.getppid() == 1:
                return

    def _take(
        self,
        message: Grammar
        | Forget
        | Submit
        | Cancel
        | Embed
        | Transcribe
        | Paint
        | LoadAdapter
        | UnloadAdapter
        | Control,
    ) -> None:
        if isinstance(message, Control):
            self._control(message)
            return
        if isinstance(message, LoadAdapter):
            if message.folder.endswith("damaged"):
                text = f"{message.folder}/adapter_model.safetensors cannot be read"
                self._send(RequestRefused(id=message.id, reason="invalid", text=text))
            else:
                self._adapters.add(message.name)
                self._send(AdapterLoaded(id=message.id, digest="d", bytes=1))
            return
        if isinstance(message, UnloadAdapter):
            self._adapters.remove(message.name)
            self._send(AdapterUnloaded(id=message.id))
            return
        if isinstance(message, Transcribe):
            self._send(*hear(message))
            return
        if isinstance(message, Paint):
            self._send(*paint(message))
            return
        if isinstance(message, Grammar | Forget):
            return
        if isinstance(message, Embed):
            for place, text in reversed(list(enumerate(message.texts))):
                pair = message.pairs[place] if message.pairs else ""
                logit = len(text) - 0.5 * len(pair)
                vectors = [[logit] if self._kind == "classifier" else [float(len(text)), 0.5]]
                if text != NEVER:
                    self._send(Embedded(id=message.id, places=[place], vectors=vectors, tokens=len(text)))
        elif isinstance(message, Cancel):
            for id, index in list(self._running):
                if id == message.id and message.index in (None, index):
                    self._finish([], id, index, "abort" if message.finish == "abort" else "cancelled")
        elif message.adapter is not None and message.adapter not in self._adapters:
            text = f"there is no adapter '{message.adapter}'"
            self._send(RequestRefused(id=message.id, reason="invalid", text=text))
        elif message.priority == Trouble.FULL:
            self._send(
                RequestRefused(id=message.id, reason="queue_full", text="the queue is full", retry_after_s=7)
            )
        elif message.priority == Trouble.DIE:
            os._exit(3)
        elif message.priority == Trouble.HANG:
            time.sleep(600)
        else:
            self._totals["prompt_tokens"] += len(message.ids)
            for index in range(message.n):
                self._running[message.id, index] = (message, 0)

    def _control(self, message: Control) -> None:
        """Weights are named by their folder; one that ends with `damaged` cannot be read."""
        requests = len({id for id, _ in self._running})
        match message:
            case FlushCache() if self._running:
                self._send(RequestRefused(id=message.id, reason="invalid", text="requests are running"))
            case UpdateWeights() if message.folder.endswith("damaged"):
                self._send(RequestRefused(id=message.id, reason="invalid", text=f"{message.folder}: damaged"))
            case UpdateWeights() | NameWeights():
                folder = message.folder if isinstance(message, UpdateWeights) else ""
                self._version = message.version or Path(folder).name
                updated = WeightsUpdated(
                    id=message.id, version=self._version, fingerprint=f"of {self._version}", requests=requests
                )
                self._send(updated)
            case FlushCache() | Pause() | Resume():
                self._paused = isinstance(message, Pause)
                if isinstance(message, Pause) and message.mode == "abort":
                    for id, index in list(self._running):
                        self._finish([], id, index, "abort")
                self._send(Controlled(id=message.id, requests=requests))

    def _step(self) -> None:
        if self._paused:
            time.sleep(0.01)
            return
        outputs: list[TokenOutput] = []
        if any(
            submit.priority == Trouble.SLOW or submit.sampling.seed == SLOW_SEED
            for submit, _ in self._running.values()
        ):
            time.sleep(0.02)
        for (id, index), (submit, count) in list(self._running.items()):
            if submit.priority in (Trouble.FAIL, Trouble.SLOW_GRAMMAR):
                self._finish(outputs, id, index, "error" if submit.priority == Trouble.FAIL else "grammar")
                continue
            if submit.max_tokens == 0:
                self._finish(outputs, id, index, "length")
                continue
            tokens, scored = list[int](), list[TokenLogprob]()
            finish: Finish | None = None
            begun, most = count, CHUNK if submit.sampling.seed == CHUNK_SEED else 1
            while len(tokens) < most and finish is None:
                token = (submit.ids[1:] or submit.ids)[count % max(1, len(submit.ids) - 1)]
                asked = [-3.0] * len(submit.logprob_ids)
                top = [(token, -0.5), (7, -2.0)][: submit.logprobs or 0]
                scored.append(TokenLogprob(token, -0.5, top, asked))
                tokens.append(token)
                count += 1
                finish = (
                    "stop" if token in submit.stop_ids else "length" if count == submit.max_tokens else None
                )
            self._running[id, index] = (submit, count)
            self._totals["generated_tokens"] += len(tokens)
            prompt = _scored_prompt(submit) if begun == 0 and index == 0 else None
            outputs.append(
                TokenOutput(
                    id=id,
                    index=index,
                    tokens=tokens,
                    logprobs=scored if submit.logprobs is not None else None,
                    prompt_logprobs=prompt,
                    finish=finish,
                    timing=self._timing(count) if finish else None,
                )
            )
            if finish:
                del self._running[id, index]
        self._totals["steps"] += 1
        self._send(StepOutput(outputs=outputs, stats=self._stats()))

    def _finish(self, outputs: list[TokenOutput], id: str, index: int, finish: Finish) -> None:
        submit, count = self._running.pop((id, index))
        prompt = _scored_prompt(submit) if count == 0 and index == 0 else None
        output = TokenOutput(
            id=id,
            index=index,
            tokens=[],
            finish=finish,
            message="a fault",
            timing=self._timing(count),
            prompt_logprobs=prompt,
        )
        if finish in ("cancelled", "abort"):
            self._send(StepOutput(outputs=[output], stats=self._stats()))
        else:
            outputs.append(output)

    def _timing(self, tokens: int) -> Timing:
        return msgspec.structs.replace(TIMING, versions=[(self._version, tokens)])

    def _stats(self) -> Stats:
        return Stats(
            running=len(self._running),
            waiting=0,
            pages_used=len(self._running),
            pages_cached=0,
            pages=256,
            prefix_queries=0,
            prefix_hits=0,
            preemptions=0,
            speculated_tokens=0,
            accepted_tokens=0,
            step_s=0.001,
            step_tokens=len(self._running),
            core_share=0.5,
            prompt_tokens=self._totals["prompt_tokens"],
            generated_tokens=self._totals["generated_tokens"],
            steps=self._totals["steps"],
        )

    def _send(self, *messages: FromEngine) -> None:
        for message in messages:
            self._socket.send(encode(message))


def _scored_prompt(submit: Submit) -> list[TokenLogprob | None] | None:
    if submit.prompt_logprobs is None:
        return None
    asked, rest = [-3.0] * len(submit.logprob_ids), submit.ids[submit.prompt_logprobs_from + 1 :]
    return [None, *(TokenLogprob(token, -1.0, [], asked) for token in rest)]


def hear(message: Transcribe) -> list[FromEngine]:
    """A window for each second, which says how many samples it has; nothing at all where the prompt is `NEVER`."""
    if message.options.language == "xx":
        return [Failed(id=message.id, text="unknown language 'xx'")]
    try:
        count = Path(message.samples).stat().st_size // SAMPLE_BYTES
    except FileNotFoundError:  # its client has left
        return []
    seconds = count / 16_000
    if message.options.prompt == HUM:
        instead = Unheard(start=0.0, end=seconds, reason="a steady sound")
        window = Window(until=seconds, total=seconds, segments=(), language="en", unheard=(instead,))
        return [Heard(id=message.id, window=window), Heard(id=message.id, window=None)]
    found: list[FromEngine] = []
    for i in range(0, count, 16_000):
        start, end = i / 16_000, min(seconds, i / 16_000 + 1)
        said = f"heard {min(16_000, count - i)}"
        words = (
            Word(start=start, end=start + 0.5, text=" heard"),
            Word(start=start + 0.5, end=end, text=said[5:]),
        )
        segment = Segment(
            start=start, end=end, text=said, tokens=(i,), mean_logprob=-0.5,
            words=words if message.options.timestamps == "word" else (),
        )  # fmt: skip
        found.append(
            Heard(id=message.id, window=Window(until=end, total=seconds, segments=(segment,), language="en"))
        )
    if message.options.prompt == NEVER:
        return found[:1]
    if message.options.prompt == DIES:
        os._exit(3)
    return [*found, Heard(id=message.id, window=None)]


HUM = "hum"
"""The prompt of a sound in which nothing is said."""
LONG = 1000
"""Characters beyond which the picture of a prompt has a notice."""


def paint(message: Paint) -> list[FromEngine]:
    """A picture of one color, which tells its seed; its first step alone where the prompt is `NEVER`."""
    if message.prompt == DIES:
        os._exit(3)
    height, width = message.size or (16, 24)
    if height % 8 or width % 8:
        return [Failed(id=message.id, text=f"a picture of {height}x{width} pixels")]
    if message.prompt == NEVER:
        return [Painted(id=message.id, done=1)]
    steps = 20 if message.steps is None else message.steps
    told = len(message.prompt) + round(message.style.guidance or 0)
    color = bytes([message.seed % 256, steps % 256, told % 256])
    pixels = color * (height * width)
    return [
        Painted(id=message.id, done=1),
        Painted(
            id=message.id,
            done=steps,
            pixels=pixels,
            size=(height, width),
            notices=["left out"] if len(message.prompt) > LONG else [],
        ),
    ]


TIMING = Timing(
    queue_s=0.1,
    prefill_s=0.2,
    decode_s=0.3,
    grammar_s=0.0,
    preempted_s=0.0,
    preemptions=0,
    cached_tokens=3,
    computed_tokens=5,
    speculated_tokens=0,
    accepted_tokens=0,
)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint")
    parser.add_argument("--kind")
    given = parser.parse_args()
    if given.kind == "broken":
        sys.exit(4)
    if given.kind == "without memory":
        sys.exit(OUT_OF_MEMORY)
    if given.kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    FakeEngine(given.endpoint, kind=given.kind).run()
