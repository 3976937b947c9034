"""The service: one model, its engine, and the limits that every request is checked against."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torchwright.hub.chat_template import ChatTemplate
from torchwright.hub.folder import find_object, read_config
from torchwright.models.diffusion.folder import INDEX
from torchwright.serve.api_error import ApiError, invalid, unavailable
from torchwright.serve.batches.figures import BatchFigures
from torchwright.serve.batches.runner import Batches
from torchwright.serve.http.fetching import PictureFetcher
from torchwright.serve.http.hosts import Hosts
from torchwright.serve.http.sounds import Sounds
from torchwright.serve.limits import Limits
from torchwright.serve.openai.prepare import ServedModel
from torchwright.serve.openai.reading import BodyReader
from torchwright.serve.openai.request_limits import check_model
from torchwright.serve.wire.client import EngineClient
from torchwright.serve.wire.messages import EngineReady
from torchwright.serve.wire.metrics import PREFIX, ServerMetrics

log = logging.getLogger("torchwright.serve")

USES = {
    "encoder": "a sentence encoder: use /v1/embeddings, /v1/score or /v1/rerank",
    "recognizer": "a speech model: use /v1/audio/transcriptions",
    "painter": "a pipeline of pictures: use /v1/images/generations",
    "classifier": "a classifier of text: use /v1/classify, /v1/score or /v1/rerank",
}
ENDPOINTS = {
    "decoder": ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    "encoder": ("/v1/embeddings", "/v1/score", "/v1/rerank", "/pooling"),
    "recognizer": ("/v1/audio/transcriptions", "/v1/audio/translations"),
    "painter": ("/v1/images/generations",),
    "classifier": ("/v1/classify", "/v1/score", "/v1/rerank", "/pooling"),
}
"""The paths that a model of each kind answers, for /v1/models."""
TRANSLATOR = ("/v1/completions",)
"""The path that a language model with an encoder answers: it takes texts, not conversations."""


@dataclass(kw_only=True)
class Service:
    """One served model, and everything that answers for it."""

    name: str
    """The model's name in answers."""
    client: EngineClient
    model: ServedModel | None
    """The tokenizer and its companions; None for an encoder, whose engine tokenizes."""
    folder: Path
    """The folder of the model's configuration and tokenizer."""
    sounds: Sounds | None = None
    """Uploads of a speech model."""
    aliases: Sequence[str] = ()
    """Further names by which requests may ask for the model."""
    allow_adapters: Path | None = None
    """The folder below which clients may load adapters."""
    allow_weights: Path | None = None
    """The folder below which clients may have weights read; then they may also pause generation."""
    batches: Batches | None = None
    """Files and batches of clients, where they are kept."""
    limits: Limits = field(default_factory=Limits)
    keys: Sequence[str] = ()
    hosts: Hosts = field(default_factory=Hosts)
    """The names that it answers to where it has no keys."""
    picture_hosts: Sequence[str] = ()
    """The hosts from which pictures may be fetched."""
    log_requests: bool = False
    ignored: set[str] = field(default_factory=set)
    """Fields without effect that the log has named."""
    created: int = field(default_factory=lambda: int(time.time()))
    stopping: bool = False
    """True once a signal has asked the server to end: /ready says 503."""
    refuses: bool = False
    """True if no further requests are taken, because the running ones are the last."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a request may use."""
        return (self.name, *self.aliases, *self.adapters)

    @property
    def adapters(self) -> dict[str, Path]:
        """Name → folder of the adapters that requests may choose."""
        return {} if self.model is None else self.model.adapters

    @cached_property
    def metrics(self) -> ServerMetrics:
        metrics = ServerMetrics(self.client, self.name)
        if self.batches is not None:
            metrics.registry.register(BatchFigures(self.batches, self.name, PREFIX))
        return metrics

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json; a pipeline has an index of its components instead."""
        if (self.folder / INDEX).is_file():
            return {"architectures": [find_object(self.folder / INDEX).get("_class_name")]}
        return read_config(self.folder) if (self.folder / "config.json").is_file() else {}

    @cached_property
    def template(self) -> ChatTemplate:
        """The folder's chat template, which a reward model has; it is parsed and rendered by `reader` alone."""
        return ChatTemplate(self.folder, parse=False)

    @property
    def chat_template(self) -> list[str] | None:
        """The names of the model's chat templates, none where it has none; None for a model of another kind."""
        ready = self.client.ready
        if self.model is None or (ready is not None and ready.answer is not None):
            return None
        template = self.model.template
        return [] if template.plain else sorted(template.sources)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The paths under /v1 that the served model answers; raises `ApiError` (503) while it is not ready."""
        ready = self.engine()
        return TRANSLATOR if ready.answer is not None else ENDPOINTS[ready.kind]

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """The kinds of input that the served model takes: text, perhaps with pictures and videos, or sound."""
        if self.sounds is not None:
            return ("audio",)
        reader = self.model.pictures if self.model is not None else None
        if reader is None or not self.engine().pictures:
            return ("text",)
        return ("text", "image") if reader.video_fault else ("text", "image", "video")

    @cached_property
    def reader(self) -> BodyReader:
        fetch = PictureFetcher(self.picture_hosts, self.limits).fetched
        return BodyReader(self.folder, self.limits, tokenizes=self.model is not None, fetch=fetch)

    async def warm(self, ready: EngineReady) -> None:
        """Start the processes that help, so that no request waits for them."""
        try:
            await (self.sounds or self.reader).workers.start()
            writes = self.model is not None and ready.answer is None
            for grammar in await self.model.grammars.warm(ready) if self.model and writes else ():
                if self.client.hold(grammar):
                    self.client.release(grammar)
        except ApiError as error:
            log.warning("%s", error.message)

    def decoder(self, name: str | None) -> tuple[ServedModel, EngineReady]:
        """The language model that a request asks for; raises `ApiError` where it is another, or not ready."""
        ready = self.ready(name)
        if ready.kind != "decoder" or self.model is None:
            raise invalid(f"the served model is {USES[ready.kind]}", code="wrong_model_kind")
        return self.model, ready

    def chat(self, name: str | None) -> tuple[ServedModel, EngineReady]:
        """The same for a conversation, which a model with an encoder does not answer."""
        model, ready = self.decoder(name)
        if ready.answer is not None:
            raise invalid(
                "the served model answers texts, not conversations: use /v1/completions",
                code="wrong_model_kind",
            )
        return model, ready

    def recognizer(self) -> Sounds:
        """Return the uploads of a speech model; raises `ApiError` for another kind, or before the model is ready."""
        ready = self.engine()
        if self.sounds is None:
            wrong = (
                f"the served model is no speech model{f' but {use}' if (use := USES.get(ready.kind)) else ''}"
            )
            raise invalid(wrong, code="wrong_model_kind")
        return self.sounds

    def check_painter(self, name: str | None) -> None:
        """Raise `ApiError` for another model, one that makes no pictures, or an engine that is not ready."""
        ready = self.ready(name)
        if ready.kind != "painter":
            wrong = f"the served model makes no pictures{f' but is {use}' if (use := USES.get(ready.kind)) else ''}"
            raise invalid(wrong, code="wrong_model_kind")

    def ready(self, name: str | None) -> EngineReady:
        """The engine's facts; raises `ApiError` where another model is asked for, or the engine is not ready."""
        self.check_model(name)
        return self.engine()

    def engine(self) -> EngineReady:
        """The engine's facts; raises `ApiError` (503) while it is not ready."""
        if self.client.state != "ready" or self.client.ready is None:
            raise unavailable(f"the engine is not ready: {self.client.detail}")
        return self.client.ready

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` (404) for a model that is not the served one."""
        check_model(name, self.names)
