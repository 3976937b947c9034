"""Served tokens per second with a draft and without, in turns over the same requests.

The contenders share one decoder: no proposals, tokens looked up in the text, the draft, and both. Each round gives all
of them the same prompts, pieces of a text, and the same seeds.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchwright.core.errors import ModelError, WorkloadError
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.models.decoder.cache import PAGE
from torchwright.models.decoder.draft import Draft, load_draft
from torchwright.models.decoder.generation.generate import LoadedPagedModel
from torchwright.optimization.decode_bench import Sizes
from torchwright.optimization.open_model import is_artifact, open_model
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.memory import CacheSize
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import SamplingOptions, Submit
from torchwright.workloads.texts import BUNDLED_TEXTS, own_text, read_texts

PLAIN, LOOKED_UP = "no proposals", "n-gram"
TEMPERATURES = (0.0, 0.8)
"""The most likely token, which drafts like best, and drawn ones."""
ROUNDS = 7
"""Paired rounds: below six a 95% interval of the median is the whole range."""
AHEAD = 32
"""Slots of a sequence for proposals beyond its last token."""
MOST_PROMPTS = 512


@dataclass(frozen=True)
class Served:
    """One round of one contender."""

    seconds: float
    tokens: int
    proposed: int
    accepted: int


def bench_draft(
    model: str,
    draft: str,
    *,
    eval_text: str | Path | None = None,
    quantize: str | None = None,
    kv: str | None = None,
    dtype: str | None = None,
    trust: bool = False,
    rounds: int = ROUNDS,
    **sizes: int | None,
) -> dict[str, Any]:
    """Time a served language model with a draft and without; `sizes` are those of `decode_bench.Sizes`.

    Prompts are pieces of `eval_text`, or of the bundled text. Raises what `load_draft` does, and `WorkloadError` for a
    text of fewer tokens than one prompt and for sizes beyond the model's context.
    """
    asked = Sizes.of(**sizes)
    device = None if is_artifact(model) else "cpu"
    loaded = open_model(model, quantize=quantize, kv=kv, dtype=dtype, device=device, trust=trust).model
    if not isinstance(loaded, LoadedPagedModel):
        raise ModelError(
            f"--draft {draft}", found="a model without pages of keys and values, which takes no draft"
        )
    if loaded.device.type != "cpu":
        raise ModelError(
            f"--draft {draft}: {model} was packed for {loaded.device.type}", allowed="models on the CPU"
        )
    drafted = load_draft(draft, loaded, quantize)
    if asked.prompt_tokens + asked.new_tokens > loaded.config.context:
        raise WorkloadError(
            f"{asked.prompt_tokens} prompt tokens and {asked.new_tokens} new ones exceed the model's context",
            allowed=f"{loaded.config.context} tokens together",
        )
    text = own_text(eval_text)
    prompts = cut(loaded.encode(read_texts(text).evaluation), asked.prompt_tokens)
    if not prompts:
        raise WorkloadError(
            f"the evaluation text {text or BUNDLED_TEXTS[0]} is too short",
            allowed=f"at least one prompt of {asked.prompt_tokens} tokens",
            next="pass a longer --eval-text FILE, or fewer --prompt-tokens",
        )
    engines, rows = contenders(loaded, drafted, asked), list[dict[str, Any]]()
    try:
        for temperature in TEMPERATURES:
            found = in_rounds(engines, prompts, asked, temperature, rounds)
            rows += [_row(name, temperature, found) for name in found]
    finally:
        for engine in engines.values():
            engine.close()
    return {
        "draft": drafted.kind,
        "batch": asked.batch,
        "prompt_tokens": asked.prompt_tokens,
        "new_tokens": asked.new_tokens,
        "rounds": rounds,
        "proposals": rows,
    }


def cut(ids: Sequence[int], tokens: int) -> list[list[int]]:
    """Prompts of so many tokens from all over a text, neighbours far apart."""
    starts = range(0, len(ids) - tokens + 1, max(tokens, (len(ids) - tokens) // MOST_PROMPTS))
    prompts = [list(ids[start : start + tokens]) for start in starts]
    return random.Random(0).sample(prompts, len(prompts))


def contenders(
    loaded: LoadedPagedModel,
    draft: Draft,
    sizes: Sizes,
    speculations: Sequence[Literal["none", "ngram"]] = ("none", "ngram"),
) -> dict[str, ServingEngine]:
    """Engines over one decoder, by what proposes in them; each of `speculations` without the draft and with it."""
    need = sizes.prompt_tokens + sizes.new_tokens
    pages = sizes.batch * (-(-(need + AHEAD) // PAGE)) + PAGE
    copies = sizes.batch * PAGE if loaded.config.state_shapes else 0
    found: dict[str, ServingEngine] = {}
    for drafted in (None, draft):
        shapes = drafted.page_shapes if drafted else ()
        for speculate in speculations:
            names = [*([draft.kind] if drafted else []), *([LOOKED_UP] if speculate == "ngram" else [])]
            found[" and ".join(names) or PLAIN] = ServingEngine(
                loaded,
                size=CacheSize(pages, sizes.batch, copies, shapes),
                # float32 is timed, too, which cannot keep the promise of equal answers in any company.
                options=EngineOptions(
                    speculate=speculate, prefix_cache=False, max_running=sizes.batch, deterministic=False
                ),
                draft=drafted,
            )
    return found


def in_rounds(
    engines: dict[str, ServingEngine],
    prompts: Sequence[list[int]],
    sizes: Sizes,
    temperature: float,
    rounds: int,
    end: float = math.inf,
) -> dict[str, list[Served]]:
    """Serve the same prompts by every engine in each round, in an order that changes, after a round that warms up.

    No round begins after `end`, a time of `time.perf_counter`.
    """
    order, found = random.Random(0), {name: list[Served]() for name in engines}
    for number in range(rounds + 1):
        if time.perf_counter() > end:
            break
        some = [prompts[(number * sizes.batch + place) % len(prompts)] for place in range(sizes.batch)]
        for name in order.sample(list(engines), len(engines)):
            served = answered(engines[name], some, sizes.new_tokens, temperature, number)
            if number:
                found[name].append(served)
    return found


def answered(
    engine: ServingEngine, prompts: Sequence[list[int]], tokens: int, temperature: float, number: int
) -> Served:
    """Serve the prompts at the same time; the seconds are those from the first step to the last token."""
    before = engine.stats()
    for place, ids in enumerate(prompts):
        sampling = SamplingOptions(temperature=temperature, seed=number * len(prompts) + place)
        refused = engine.submit(
            Submit(id=f"{number}-{place}", ids=ids, max_tokens=tokens, min_tokens=tokens, sampling=sampling)
        )
        assert refused is None, refused.text
    made, begun = 0, time.perf_counter()
    while not engine.idle:
        made += sum(len(output.tokens) for output in engine.step().outputs)
    seconds, after = time.perf_counter() - begun, engine.stats()
    return Served(
        seconds,
        made,
        after.speculated_tokens - before.speculated_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


def _row(name: str, temperature: float, found: dict[str, list[Served]]) -> dict[str, Any]:
    """One contender's line: its speed, that over the two that take no draft, and what became of its proposals."""
    served = found[name]
    proposed, accepted = (sum(getattr(one, what) for one in served) for what in ("proposed", "accepted"))
    row: dict[str, Any] = {
        "temperature": temperature,
        "proposed_by": name,
        "tokens_per_s": statistics.median(one.tokens / one.seconds for one in served),
    }
    for label, base in (("speedup", PLAIN), ("over_n_gram", LOOKED_UP)):
        found_95 = paired_speedup(*([one.seconds for one in part] for part in (found[base], served)))
        row |= {label: found_95.value, f"{label}_low": found_95.low, f"{label}_high": found_95.high}
    return row | {"proposed_tokens": proposed, "accepted_tokens": accepted}
