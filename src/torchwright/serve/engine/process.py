"""The engine's process: `python -m torchwright.serve.engine.process --endpoint ipc://… --options {…}`.

It connects to the HTTP process's socket, loads the model, and then takes messages between steps. It ends on
`Shutdown`, when its parent dies, and when its own accounts turn out wrong; the parent starts another.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import zmq

from torchwright.core.errors import ArtifactError, ModelError, TorchwrightError, first_line
from torchwright.hardware.devices import get_device
from torchwright.hardware.devices.allocator import retain_where_possible
from torchwright.models.decoder.cache import PAGE
from torchwright.models.decoder.draft import load_draft
from torchwright.models.decoder.generation.generate import LoadedDecoder, LoadedPagedModel
from torchwright.models.decoder.seq2seq.translator import LoadedSeq2Seq
from torchwright.models.decoder.transformers_backend.writer import TransformersWriter
from torchwright.models.vision.encoder import encoder_of
from torchwright.optimization.artifact.load import load
from torchwright.optimization.open_model import (
    is_artifact,
    open_diffuser,
    open_model,
    open_speech,
    refuse_for_artifact,
)
from torchwright.serve.engine.control import EngineControl
from torchwright.serve.engine.embed import ServedEncoder
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.hear import ServedRecognizer
from torchwright.serve.engine.memory import cache_size, is_out_of_memory
from torchwright.serve.engine.paint import ServedDiffuser
from torchwright.serve.engine.translate import TranslatingEngine
from torchwright.serve.engine.write import WritingEngine
from torchwright.serve.folder import SERVED, draft_of, find
from torchwright.serve.log import begin_log
from torchwright.serve.options import EngineOptions, check_context
from torchwright.serve.wire.messages import (
    OUT_OF_MEMORY,
    Cancel,
    Embed,
    EngineReady,
    Failed,
    FlushCache,
    Forget,
    FromEngine,
    Grammar,
    LoadAdapter,
    Loading,
    NameWeights,
    Paint,
    Pause,
    RequestRefused,
    Resume,
    Shutdown,
    StepOutput,
    Submit,
    ToEngine,
    Transcribe,
    UnloadAdapter,
    UpdateWeights,
    decode_to_engine,
    encode,
)
from torchwright.workloads.encoding import TextAnswerer
from torchwright.workloads.forward import open_text_model
from torchwright.workloads.generation import Generator

log = logging.getLogger("torchwright.serve")

SWITCH_S = 5e-4
"""The interpreter's switch interval: a step releases and reacquires the GIL hundreds of times, and other threads import
and fill masks meanwhile."""
NO_CONTROL = (
    "a model that does not run on Torchwright's own decoder: its weights do not change, and it does not pause"
)
NO_ADAPTERS = "a model that does not run on Torchwright's own decoder, and so takes no adapters by name"
CPU = "cpu"
DRAFTS_ON = "models on the CPU, where the time of a draft's proposals is measured"
LOADING_MS = 5
"""Wait of an idle engine that reads an adapter."""
QUIET_S = 5.0
"""An engine that reads weights and computes nothing says after so long that it is there."""
IDLE_MS = 250
"""Wait of an idle engine for a message before it checks its parent and its own accounts."""


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    begin_log()
    parent = given.parent or os.getppid()
    sys.setswitchinterval(SWITCH_S)
    retain_where_possible()  # a step's logits are tens of megabytes, mapped afresh each time otherwise
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set_hwm(0)  # the engine's own queue is what bounds the messages
        socket.connect(given.endpoint)
        channel = Channel(socket, parent)
        try:
            served = open_served(EngineOptions.from_json(given.options), channel)
        except TorchwrightError as error:
            channel.send(Failed(text=str(error)))
            return error.exit_code
        except Exception as error:
            log.exception("the engine cannot be started")
            channel.send(
                Failed(text=f"the engine cannot be started ({type(error).__name__}: {first_line(error)})")
            )
            return 1
        channel.send(served.ready)
        return serve(served, channel)


def serve(served: Served, channel: Channel) -> int:
    """Answer until a Shutdown, or until the engine is out of memory; return the process's exit code."""
    try:
        if isinstance(served, ServedDecoder):
            serve_decoder(served, channel)
        elif isinstance(served, ServedDiffuser):
            serve_in_turn(served, channel)
        else:
            serve_reader(served, channel)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        log.error("the engine is out of memory, and ends: %s", first_line(error))
        return OUT_OF_MEMORY
    return 0


class Channel:
    """The socket to the HTTP process."""

    def __init__(self, socket: zmq.Socket[bytes], parent: int) -> None:
        self._socket, self._parent = socket, parent
        self._sent = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last message was sent."""
        return time.monotonic() - self._sent

    def send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))
        self._sent = time.monotonic()

    def receive(self, wait_ms: int) -> Iterator[ToEngine]:
        """Yield received messages, waiting `wait_ms` for the first. End the process if the parent is gone."""
        if os.getppid() != self._parent:
            log.error("the parent has died; so does the engine")
            sys.exit(1)
        while self._socket.poll(wait_ms):
            yield decode_to_engine(self._socket.recv())
            wait_ms = 0


class Told(Protocol):
    """The interface of what hears how far the engine's start is: a `Channel`."""

    def send(self, message: FromEngine) -> None: ...


@dataclass(frozen=True)
class ServedDecoder:
    """A language model's engine, and its description for the HTTP process."""

    engine: ServingEngine | TranslatingEngine | WritingEngine
    ready: EngineReady
    control: EngineControl | None = None


Reader = ServedEncoder | ServedRecognizer
Served = ServedDecoder | Reader | ServedDiffuser


def serve_decoder(served: ServedDecoder, channel: Channel) -> None:
    """Take messages and compute steps until a Shutdown."""
    engine, draining, checked = served.engine, False, True
    grammars, control = engine.grammars, served.control
    adapters = engine.adapters if isinstance(engine, ServingEngine) else None
    if grammars is not None:
        grammars.warm()
    while not (draining and engine.idle):
        loading = (adapters is not None and adapters.loading) or (control is not None and control.reading)
        rests = engine.idle or (control is not None and control.pauses)
        for message in channel.receive((LOADING_MS if loading else IDLE_MS) if rests else 0):
            match message:
                case Submit() if draining:
                    text = "the server is stopping"
                    channel.send(
                        RequestRefused(id=message.id, reason="queue_full", text=text, retry_after_s=1.0)
                    )
                case Submit():
                    if refused := engine.submit(message):
                        channel.send(refused)
                case Cancel():
                    engine.cancel(message)
                case Grammar() if grammars is not None:
                    grammars.keep(message)
                case Forget() if grammars is not None:
                    grammars.forget(message.key)
                case Grammar() | Forget():
                    pass  # nobody's request names one
                case Embed() | Transcribe() | Paint():
                    channel.send(Failed(id=message.id, text="this model writes text, from text"))
                case LoadAdapter() | UnloadAdapter() if adapters is not None:
                    adapters.take(message)
                case LoadAdapter() | UnloadAdapter():
                    channel.send(Failed(id=message.id, text=NO_ADAPTERS))
                case FlushCache() | UpdateWeights() | NameWeights() | Pause() | Resume():
                    if control is None:
                        channel.send(Failed(id=message.id, text=NO_CONTROL))
                    else:
                        control.take(message)
                case Shutdown():
                    draining = True
                    if control is not None:
                        control.resume()  # what waits would never end
                    if not message.drain:
                        engine.cancel_all("the server is stopping")
        if not engine.idle:
            channel.send(engine.step())
            checked = False
            if engine.idle:
                channel.send(StepOutput(outputs=[], stats=engine.stats()))
        elif not checked:
            engine.check_integrity()
            checked = True
        for answer in () if adapters is None else adapters.answers():
            channel.send(answer)
        for answer in () if control is None else control.answers():
            channel.send(answer)
            checked = False
        if engine.idle and channel.silent_s > QUIET_S and control is not None and control.reading:
            channel.send(StepOutput(outputs=[], stats=engine.stats()))  # it lives
    engine.check_integrity()
    if control is not None:
        control.close()
    engine.close()


def serve_reader(served: Reader, channel: Channel) -> None:
    """Take messages and run calls until a Shutdown."""
    draining = False
    while not (draining and served.idle):
        draining |= _listen(served, channel, 0 if not served.idle else IDLE_MS)
        if not served.idle:
            channel.send(served.step())


def serve_in_turn(served: ServedDiffuser, channel: Channel) -> None:
    """Make one picture after another until a Shutdown, and take messages after each of their steps."""
    draining = False

    def listen(wait_ms: int = 0) -> None:
        nonlocal draining
        draining |= _listen(served, channel, wait_ms)

    while not (draining and served.idle):
        listen(0 if not served.idle else IDLE_MS)
        if not served.idle:
            served.paint(channel.send, listen)


def _listen(served: Reader | ServedDiffuser, channel: Channel, wait_ms: int) -> bool:
    """Take what has come; whether it is to end."""
    ends = False
    for message in channel.receive(wait_ms):
        match message:
            case Embed() | Transcribe() | Paint() | Submit() | LoadAdapter() | UnloadAdapter():
                if refused := _taken(served, message):
                    channel.send(refused)
            case FlushCache() | UpdateWeights() | NameWeights() | Pause() | Resume():
                channel.send(Failed(id=message.id, text=NO_CONTROL))
            case Cancel():
                served.cancel(message.id)
            case Grammar() | Forget():
                pass  # nothing but a language model has one
            case Shutdown():
                ends = True
                if not message.drain:
                    served.cancel_all()
    return ends


def _taken(
    served: Reader | ServedDiffuser,
    message: Embed | Transcribe | Paint | Submit | LoadAdapter | UnloadAdapter,
) -> Failed | RequestRefused | None:
    """None for a request that was taken."""
    if isinstance(served, ServedEncoder) and isinstance(message, Embed):
        return served.submit(message)
    if isinstance(served, ServedRecognizer) and isinstance(message, Transcribe):
        return served.submit(message)
    if isinstance(served, ServedDiffuser) and isinstance(message, Paint):
        return served.submit(message)
    return RequestRefused(id=message.id, reason="invalid", text=served.purpose)


def open_served(options: EngineOptions, channel: Told) -> Served:
    """The model of the options, ready to answer; raises `TorchwrightError` for what cannot be served."""
    channel.send(Loading(text=f"loading {options.model or 'the bundled model'}"))
    target = find(options.model)
    options = replace(options, draft=draft_of(options.draft, target))
    served_as = target.served_as
    if options.model is not None and served_as == "painter":
        diffuser = open_diffuser(options.model, trust=options.trust)
        return ServedDiffuser(diffuser, max_queue=options.max_queue)
    if options.model is not None and served_as == "recognizer":
        dtypes = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}
        if options.dtype not in dtypes:
            raise ModelError(f"--dtype {options.dtype}", allowed="fp32, bf16")
        speech = open_speech(options.model, dtypes[options.dtype], options.quantize, trust=options.trust)
        return ServedRecognizer(speech, max_running=options.max_running, max_queue=options.max_queue)
    if served_as == "reader" and target.artifact is None:
        return ServedEncoder(target.folder, open_text_model(target.folder), [], options.max_queue)
    if options.model is not None and is_artifact(options.model):
        refuse_for_artifact(
            options.model,
            quantize=options.quantize,
            kv=options.kv,
            dtype=options.dtype,
            device=options.device,
            adapter=options.adapter,
        )
        loaded = load(options.model, trust=options.trust)
        model, notices = loaded.model, loaded.notices
        if isinstance(model, TextAnswerer):
            return ServedEncoder(Path(options.model), model, notices, options.max_queue)
    else:
        opened = open_model(
            options.model,
            quantize=options.quantize,
            kv=options.kv,
            dtype=options.dtype,
            quantize_vision=options.quantize_vision,
            device=options.device or CPU,
            adapter=options.adapter,
            trust=options.trust,
            batched=options.deterministic is not True,
        )
        model, notices = opened.model, list(opened.notices)
    if options.draft and not isinstance(model, LoadedPagedModel):
        raise ModelError(
            f"--draft {options.draft}", found="a model without pages of keys and values, which takes no draft"
        )
    if options.adapters and not isinstance(model, LoadedDecoder):
        raise ModelError("--adapter NAME=DIR", found=NO_ADAPTERS)
    if isinstance(model, LoadedSeq2Seq):
        translating = TranslatingEngine(model, options=options, notices=tuple(notices))
        return ServedDecoder(translating, translating.ready)
    if isinstance(model, Generator | TransformersWriter):
        writing = WritingEngine(
            model,
            target.artifact or target.folder,
            tokenizer=target.folder,
            options=options,
            notices=tuple(notices),
        )
        return ServedDecoder(writing, writing.ready)
    if not isinstance(model, LoadedPagedModel):
        raise ArtifactError(
            f"{options.model} cannot be served",
            found="a model that `torchwright generate` does not answer with either",
            allowed=SERVED,
            next="call it from Python: torchwright.load(DIR).model(…)",
        )
    if target.artifact is not None and model.vision is None:
        model.vision = encoder_of(target.folder, model.decoder.embedding.dtype, model.device)
    if model.vision is not None:
        try:
            model.vision.load()
            notices.append(f"pictures are encoded by {model.vision.runs_as}")
        except ModelError as error:
            model.vision = None
            notices.append(f"it takes text alone: {error}")
    engine = _engine(model, options)
    control = EngineControl(engine, partial(read_weights, options, target.folder))
    return ServedDecoder(engine, _ready(engine, notices), control)


def read_weights(options: EngineOptions, served_folder: Path, path: str) -> LoadedPagedModel:
    """Return the weights in a folder, opened as those of the options were; no code of the folder's is run.

    A safetensors file has all tensors of the model in `served_folder`, whose other files are taken. Raises
    `TorchwrightError` for another kind of model.
    """
    if Path(path).suffix != ".safetensors":
        return _read_folder(options, path)
    with tempfile.TemporaryDirectory() as folder:
        for name in (config.name for config in served_folder.glob("*.json") if "index" not in config.name):
            (Path(folder) / name).symlink_to((served_folder / name).resolve())
        (Path(folder) / "model.safetensors").symlink_to(path)
        return _read_folder(options, folder)


def _read_folder(options: EngineOptions, folder: str) -> LoadedPagedModel:
    served = options.model is not None and is_artifact(options.model)
    if served != is_artifact(folder):
        kinds = "an artifact", "a folder of a model's weights"
        raise ModelError(
            f"{folder} cannot take the place of the served model",
            found=kinds[served],
            allowed=kinds[not served],
        )
    opened = open_model(
        folder,
        quantize=options.quantize,
        kv=options.kv,
        dtype=options.dtype,
        device=None if served else options.device or CPU,
        adapter=options.adapter,
        batched=options.deterministic is not True,
    )
    if not isinstance(opened.model, LoadedPagedModel):
        raise ModelError(f"{folder} cannot take the place of the served model", found=NO_CONTROL)
    return opened.model


def _engine(model: LoadedPagedModel, options: EngineOptions) -> ServingEngine:
    check_context(options.max_context, model.config.context)
    context = min(model.config.context, options.max_context or model.config.context)
    on_cpu = model.device.type == CPU
    if options.draft and not on_cpu:
        raise ModelError(
            f"--draft {options.draft}", found=f"a model on {model.device.type}", allowed=DRAFTS_ON
        )
    draft = load_draft(options.draft, model, options.quantize) if options.draft else None
    size = cache_size(
        model.config,
        model.kv_dtype,
        context=context,
        max_running=options.max_running,
        kv_memory=options.kv_memory,
        available=None if on_cpu else get_device(model.device.type).free_memory_bytes(),
        draft=draft.page_shapes if draft else (),
    )
    engine = ServingEngine(model, size=size, options=options, draft=draft)
    for name, folder in options.adapters:
        engine.adapters.load(name, Path(folder))
    return engine


def _ready(engine: ServingEngine, notices: list[str]) -> EngineReady:
    model, size = engine.loaded, engine.size
    storages = {t.data_ptr(): t.nbytes for t in model.decoder.state_dict().values()}
    return EngineReady(
        kind="decoder",
        vocabulary=model.config.vocabulary,
        context=engine.context,
        pages=size.pages,
        page_tokens=PAGE,
        stop_ids=list(model.stop),
        max_running=size.running,
        weight_bytes=sum(storages.values()),
        kv_bytes=size.bytes_of(model.config, model.kv_dtype),
        fingerprint=engine.fingerprint,
        pictures=model.vision is not None,
        notices=notices,
    )


def parser() -> argparse.ArgumentParser:
    """The process's own command line; `torchwright serve` writes it."""
    made = argparse.ArgumentParser(
        prog="torchwright.serve.engine.process", description="The engine's process."
    )
    made.add_argument("--endpoint", required=True, help="the HTTP process's ZeroMQ PAIR socket")
    made.add_argument(
        "--parent", type=int, help="the process that it ends with; it may have ended while this one began"
    )
    made.add_argument("--options", default="{}", help="`EngineOptions` in JSON")
    return made


if __name__ == "__main__":
    sys.exit(main())
