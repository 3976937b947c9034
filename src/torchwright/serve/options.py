"""Options of a server and of its engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Self

from torchwright.core.errors import WorkloadError
from torchwright.serve.limits import SEQUENCES

AUTO, NONE = "auto", "none"
"""In place of a format's name: what the model's files show, or none."""
KV_SHARE = 0.5
"""The default share of the available memory for keys and values."""

MOST_DRAIN_SECONDS = 3600
"""No balancer takes an hour to notice that a server leaves."""


def check_context(asked: int | None, longest: int) -> None:
    """Raise `WorkloadError` for a `--max-context` that is more than the model's own."""
    if asked is not None and asked > longest:
        raise WorkloadError(
            f"--max-context {asked} is more than the model's own context",
            allowed=f"1 to {longest}",
            next="leave it out to serve the model's own",
        )


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which model the engine runs, and how. The server's process sends them to the engine's as they are."""

    model: str | None = None
    """An artifact, a Hugging Face folder or a hub id; the bundled model without it."""
    quantize: str | None = None
    kv: str | None = None
    dtype: str | None = None
    device: str | None = None
    """The device of a language model; the CPU, or an artifact's own, without it."""
    quantize_vision: str | None = None
    adapter: str | None = None
    """A folder of LoRA or DoRA that is added to the weights."""
    adapters: Sequence[tuple[str, str]] = ()
    """Names and folders of LoRA that requests choose by name."""
    adapter_memory: int = 2**30
    """Bytes for these and for those that are loaded later, at most."""
    trust: bool = False
    """Load compiled code that somebody else built."""
    kv_memory: int | None = None
    """Bytes for keys and values; `KV_SHARE` of the available memory without it."""
    step_tokens: int = 512
    """Tokens of one step at most, prompts and answers together."""
    max_running: int = 64
    max_queue: int = SEQUENCES
    """Sequences that wait at most; further requests are refused. An idle engine takes the largest request."""
    max_context: int | None = None
    """Tokens of one sequence at most, where it shall be less than the model's context."""
    speculate: Literal["ngram", "none"] = "ngram"
    draft: str | None = None
    """A folder or hub id of an EAGLE-3 head or a small model of equal tokens, which proposes tokens; an artifact's own
    without it. `folder.NO_DRAFT` leaves that out."""
    speculate_rows: int = 16
    """Rows that decode in one step, up to which tokens are proposed: while rows are few, more cost next to nothing."""
    prefix_cache: bool = True
    deterministic: bool | None = None
    """A request's tokens are the same, bit for bit, in any company. None: wherever the model can; one of another family
    on transformers' own code then runs in batches."""

    def __post_init__(self) -> None:
        for name, least in (("step_tokens", 1), ("max_running", 1), ("max_queue", 1), ("speculate_rows", 0)):
            if getattr(self, name) < least:
                raise WorkloadError(f"{name} {getattr(self, name)}", allowed=f"{least} or more")
        if self.max_context is not None and self.max_context < 1:
            raise WorkloadError(f"max_context {self.max_context}", allowed="1 or more")
        if self.step_tokens < self.max_running:
            raise WorkloadError(
                f"step_tokens {self.step_tokens} is less than max_running {self.max_running}",
                next=f"every running sequence needs one token of a step: --step-tokens {self.max_running}",
            )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the output of `to_json`."""
        data = json.loads(text)
        return cls(**data | {"adapters": tuple(map(tuple, data.get("adapters", ())))})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The settings with which a model is served."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one, which is printed."""
    served_model_names: Sequence[str] = ()
    """Names of the model for clients, in place of its folder's; answers carry the first."""
    api_keys: Sequence[str] = ()
    api_key_file: Path | None = None
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    allowed_urls: Sequence[str] = ()
    """Hosts from which pictures are fetched, as HOST or HOST:PORT."""
    log_requests: bool = False
    tool_call_format: str = AUTO
    """Format of the model's tool calls."""
    reasoning_format: str = AUTO
    """Format of the model's reasoning."""
    allow_adapters: Path | None = None
    """The folder below which clients may load adapters; none may without it."""
    allow_weights: Path | None = None
    """The folder below which clients may have other weights read; then they may also pause generation."""
    batches: Path | None = None
    """The folder of files and batches that clients leave; none are taken without it."""
    wait_ready: bool = False
    """Serve in the background, and return when requests are taken."""
    drain_seconds: float = 0.0
    """After a SIGTERM, seconds in which requests are still taken while /ready says 503."""

    def __post_init__(self) -> None:
        if not 0 <= self.drain_seconds <= MOST_DRAIN_SECONDS:
            raise WorkloadError(f"drain_seconds {self.drain_seconds:g}", allowed=f"0 to {MOST_DRAIN_SECONDS}")
