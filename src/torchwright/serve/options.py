"""What a user can choose of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchwright.errors import WorkloadError
from torchwright.serve.limits import SEQUENCES

KV_SHARE = 0.5
"""Of the memory that is available, for keys and values where nobody says how much."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the engine runs."""

    step_tokens: int = 512
    """Tokens of one step at most, prompts and answers together."""
    max_running: int = 64
    max_queue: int = SEQUENCES
    """Sequences that wait at most; further requests are refused. An idle engine takes the largest request."""
    max_context: int | None = None
    """Tokens of one sequence at most, where it shall be less than the model's context."""
    speculate: Literal["ngram", "none"] = "ngram"
    speculate_rows: int = 16
    """Rows that decode in one step, up to which tokens are proposed: while rows are few, more cost next to nothing."""
    prefix_cache: bool = True
    deterministic: bool = True
    """A request's tokens are the same, bit for bit, in any company."""

    def __post_init__(self) -> None:
        for name, least in (("step_tokens", 1), ("max_running", 1), ("max_queue", 1), ("speculate_rows", 0)):
            if getattr(self, name) < least:
                raise WorkloadError(f"{name} {getattr(self, name)}", allowed=f"{least} or more")
        if self.max_context is not None and self.max_context < 1:
            raise WorkloadError(f"max_context {self.max_context}", allowed="1 or more")
        if self.step_tokens < self.max_running:
            raise WorkloadError(
                f"step_tokens {self.step_tokens} is less than max_running {self.max_running}",
                next="every running sequence needs one token of a step",
            )
