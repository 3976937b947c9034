"""Files and batches as they are kept and as clients read them: OpenAI's objects `file` and `batch`."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from torchwright.serve.ids import new_id

Purpose = Literal["batch", "batch_output"]
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
"""States that a batch does not leave."""
STAMPED: tuple[Status, ...] = (
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)
"""States whose beginning a batch names, as `completed_at`."""


class StoredFile(msgspec.Struct, kw_only=True):
    """A file that a client uploaded, or the results of a batch."""

    id: str
    owner: str
    """A digest of the API key of the client; empty on a server without keys."""
    filename: str
    purpose: Purpose
    bytes: int
    created: float
    """Seconds since 1970, as all times here."""
    expires: float

    def public(self) -> dict[str, Any]:
        """Return the file as clients read it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class BatchFault(msgspec.Struct, kw_only=True):
    """A reason for which a whole batch failed."""

    code: str
    message: str
    line: int | None = None
    """The line of the input file, from 1."""
    param: str | None = None


class Counts(msgspec.Struct, kw_only=True):
    """Requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    """Lines of the error file."""


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of all answers of a batch."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def public(self) -> dict[str, Any]:
        """Return the usage as clients read it."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class StoredBatch(msgspec.Struct, kw_only=True):
    """A batch: which file, which endpoint, and how far it is."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created: float
    expires: float
    output_seconds: float
    """Time for which the files of results are kept."""
    output_name: str = msgspec.field(default_factory=lambda: new_id("file-"))
    error_name: str = msgspec.field(default_factory=lambda: new_id("file-"))
    """Ids that the files of results will have: a server that is killed in between gives no others."""
    metadata: dict[str, str] | None = None
    idempotency_key: str | None = None
    """The client's name for the request that made the batch: the same request again makes no other."""
    model: str | None = None
    status: Status = "validating"
    ending: Status | None = None
    """The state in which the batch ends, once its rows are done and its results become files."""
    at: dict[Status, float] = {}
    """State → when it began."""
    faults: list[BatchFault] = []
    counts: Counts = msgspec.field(default_factory=Counts)
    usage: Usage = msgspec.field(default_factory=Usage)
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def public(self) -> dict[str, Any]:
        """Return the batch as clients read it."""
        faults = [msgspec.to_builtins(fault) for fault in self.faults]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            **{f"{name}_at": int(self.at[name]) if name in self.at else None for name in STAMPED},
            "request_counts": msgspec.to_builtins(self.counts),
            "usage": self.usage.public(),
            "metadata": self.metadata,
        }


def now() -> float:
    """Return seconds since 1970: these times outlive the server, and clients read them."""
    return time.time()
