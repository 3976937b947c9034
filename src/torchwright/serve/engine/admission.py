"""Which requests the engine takes: everything that a message says is checked once, here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torchwright.core.errors import WorkloadError
from torchwright.models.decoder.cache import PAGE
from torchwright.serve.engine.sampling import sampling_of
from torchwright.serve.wire.messages import RequestRefused, Submit

PRIORITIES = 100
"""The largest priority, and minus this the smallest: ageing must be able to make up for it."""
TOP_LOGPROBS = 128
TIMEOUT_S = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits on one request."""

    vocabulary: int
    context: int
    pages: int
    max_running: int
    max_queue: int
    """Sequences that wait."""


def refuse(submit: Submit, bounds: Bounds, *, known: bool) -> RequestRefused | None:
    """Why a request can never be computed, or None; `known` is whether its id is in use."""
    text = f"the id {submit.id!r} is in use" if known else _invalid(submit, bounds)
    reason: Literal["invalid", "too_long"] = "invalid"
    if text is None:
        text, reason = _too_long(submit, bounds), "too_long"
    return None if text is None else RequestRefused(id=submit.id, reason=reason, text=text)


def _too_long(submit: Submit, bounds: Bounds) -> str | None:
    prompt, total = len(submit.ids), len(submit.ids) + submit.max_tokens
    asked = f"the prompt has {prompt} tokens and {submit.max_tokens} new ones are asked for, {total} together"
    if total > bounds.context:
        return f"{asked}; the model's context is {bounds.context} tokens"
    if -(-total // PAGE) > bounds.pages:
        return f"{asked}; the server has memory for {bounds.pages * PAGE} (--kv-memory)"
    return None


def _invalid(submit: Submit, bounds: Bounds) -> str | None:
    try:
        sampling_of(submit.sampling)
    except WorkloadError as error:
        return str(error)
    bias = submit.sampling.logit_bias
    tokens = {
        "ids": submit.ids,
        "stop_ids": submit.stop_ids,
        "logit_bias": list(bias),
        "logprob_ids": submit.logprob_ids,
    }
    for name, ids in tokens.items():
        ends = (min(ids, default=0), max(ids, default=0))
        wrong = next((token for token in ends if not 0 <= token < bounds.vocabulary), None)
        if wrong is not None:
            return f"{name} has the token {wrong}; the model's are 0 to {bounds.vocabulary - 1}"
    ranges = {
        "n": (submit.n, 1, min(bounds.max_running, bounds.max_queue)),
        "max_tokens": (submit.max_tokens, 0, math.inf),
        "min_tokens": (submit.min_tokens, 0, submit.max_tokens),
        "logprobs": (submit.logprobs or 0, 0, min(TOP_LOGPROBS, bounds.vocabulary)),
        "prompt_logprobs": (submit.prompt_logprobs or 0, 0, min(TOP_LOGPROBS, bounds.vocabulary)),
        "prompt_logprobs_from": (submit.prompt_logprobs_from, 0, max(0, len(submit.ids) - 1)),
        "the length of logprob_ids": (len(submit.logprob_ids), 0, TOP_LOGPROBS),
        "priority": (submit.priority, -PRIORITIES, PRIORITIES),
        "seed": (submit.sampling.seed, -(2**63), 2**63 - 1),
        "timeout_s": (0 if submit.timeout_s is None else submit.timeout_s, 0, TIMEOUT_S),
        "the length of ids": (len(submit.ids), 1, math.inf),
    }
    for name, (value, least, most) in ranges.items():
        if not least <= value <= most:
            return f"{name} is {value}; {least} to {most} is possible"
    if not all(math.isfinite(value) for value in bias.values()):
        return "logit_bias has a value that is no finite number"
    return None
