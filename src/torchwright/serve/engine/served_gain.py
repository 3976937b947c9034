"""The gain of a trained draft: its target is served with it and without, in turns, in a bounded time.

served_gain(loaded, Path("out/model"), prompts, seconds=60.0, agree=0.6)
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchwright.core.errors import ModelError
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.models.decoder.cache import PAGE
from torchwright.models.decoder.draft import Draft, load_draft
from torchwright.models.decoder.generation.generate import LoadedPagedModel
from torchwright.optimization.decode_bench import Sizes
from torchwright.serve.engine.draft_bench import (
    AHEAD,
    PLAIN,
    ROUNDS,
    TEMPERATURES,
    Served,
    answered,
    contenders,
    in_rounds,
)
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.memory import CacheSize
from torchwright.serve.engine.row_costs import RowCosts
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import SamplingOptions, Submit

BATCHES = (1, 4)
"""One request, and so few that drafts may still gain."""
TOKENS = (8, 64)
"""Tokens of one answer at least, and at most: a slow target writes fewer in the time that there is."""
MOST_ROUNDS = 100
DOUBT = math.exp(-20)
"""The chance below which an acceptance of nothing is a fault: one run in half a billion."""
SAME, FREE = RowCosts([1, 16], [1.0, 1.0]), RowCosts([1, 16], [0.0, 0.0])
"""Costs of the model's rows and of the draft's by which everything is proposed."""


def served_gain(
    loaded: LoadedPagedModel,
    folder: Path,
    prompts: Sequence[list[int]],
    *,
    seconds: float,
    agree: float,
    quantize: str | None = None,
) -> list[dict[str, Any]]:
    """Time a served model with the draft in `folder` and without, by batch and temperature.

    `seconds` are for all settings, and shared evenly. Each row has the ratio of tokens per second with its 95%
    interval, and a verdict: "gains", "loses" or, where the interval holds 1, "open". `agree` is the share of held-out
    first proposals that are the model's likeliest token. Raises `ModelError` where none is accepted against that.
    """
    draft = load_draft(folder, loaded, quantize)
    longest = max(map(len, prompts), default=1)
    room = loaded.config.context - longest
    if not prompts or room < TOKENS[0]:
        return []
    end = time.perf_counter() + seconds
    check_accepted(loaded, draft, prompts, agree, tokens=min(room, TOKENS[0]))
    settings = [(batch, temperature) for batch in BATCHES for temperature in TEMPERATURES]
    rows = list[dict[str, Any]]()
    for place, (batch, temperature) in enumerate(settings):
        until = time.perf_counter() + (end - time.perf_counter()) / (len(settings) - place)
        most = Sizes(batch=batch, prompt_tokens=longest, new_tokens=min(room, TOKENS[1]))
        engines = contenders(loaded, draft, most, ("none",))
        try:
            sizes = _affordable(engines[PLAIN], prompts, most, until)
            found = in_rounds(engines, prompts, sizes, temperature, MOST_ROUNDS, until)
        finally:
            for engine in engines.values():
                engine.close()
        rows.append(_row(batch, temperature, found[PLAIN], found[draft.kind]))
    return rows


def _affordable(engine: ServingEngine, prompts: Sequence[list[int]], most: Sizes, until: float) -> Sizes:
    """Sizes of a turn such that the rounds of an interval fit into the time until then, by a short turn's speed."""
    some = [prompts[place % len(prompts)] for place in range(most.batch)]
    least = min(TOKENS[0], most.new_tokens)
    begun = answered(engine, some, least, 0.0, 0)
    turns = 2 * (ROUNDS + 1)
    affordable = int(least * (until - time.perf_counter()) / (turns * begun.seconds))
    tokens = min(most.new_tokens, max(least, affordable))
    return Sizes(batch=most.batch, prompt_tokens=most.prompt_tokens, new_tokens=tokens)


def _row(batch: int, temperature: float, plain: list[Served], drafted: list[Served]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "batch": batch,
        "temperature": temperature,
        "rounds": len(drafted),
        "tokens_per_s": _speed(drafted),
        "tokens_per_s_without": _speed(plain),
        "speedup": None,
        "speedup_low": None,
        "speedup_high": None,
        "verdict": "open",
        "proposed_tokens": sum(one.proposed for one in drafted),
        "accepted_tokens": sum(one.accepted for one in drafted),
    }
    if len(drafted) < 2:
        return row
    found = paired_speedup(*([one.seconds for one in part] for part in (plain, drafted)))
    verdict = "gains" if found.low > 1 else "loses" if found.high < 1 else "open"
    return row | {
        "speedup": found.value,
        "speedup_low": found.low,
        "speedup_high": found.high,
        "verdict": verdict,
    }


def _speed(served: list[Served]) -> float | None:
    return statistics.median(one.tokens / one.seconds for one in served) if served else None


def check_accepted(
    loaded: LoadedPagedModel, draft: Draft, prompts: Sequence[list[int]], agree: float, *, tokens: int
) -> None:
    """Raise `ModelError` where no first proposal is accepted, and held-out figures say that some must be.

    A draft of another kind, or one that reads other states than it was trained on, is served all the same. Only its
    acceptance shows that. Answers are greedy here, and everything is proposed.
    """
    count = min(len(prompts), 16)
    pages = sum(-(-(len(ids) + tokens + AHEAD) // PAGE) for ids in prompts[:count]) + PAGE
    copies = count * PAGE if loaded.config.state_shapes else 0
    engine = ServingEngine(
        loaded,
        size=CacheSize(pages, count, copies, draft.page_shapes),
        options=EngineOptions(speculate="none", prefix_cache=False, max_running=count, deterministic=False),
        draft=draft,
        row_costs=SAME,
        draft_costs=FREE,
    )
    proposed = accepted = 0
    try:
        for place, ids in enumerate(prompts[:count]):
            sampling = SamplingOptions(temperature=0.0)
            submit = Submit(id=str(place), ids=ids, max_tokens=tokens, min_tokens=tokens, sampling=sampling)
            refused = engine.submit(submit)
            assert refused is None, refused.text
        while not engine.idle:
            for output in engine.step().outputs:
                if output.timing is not None:
                    proposed += sum(output.timing.proposed_at[:1])
                    accepted += sum(output.timing.accepted_at[:1])
    finally:
        engine.close()
    if not accepted and (1 - agree) ** proposed < DOUBT:
        raise ModelError(
            "the draft is served in another way than it was trained",
            found=f"none of {proposed} first proposals accepted",
            allowed=f"about {agree:.0%}, as on held-out text",
            next="check that the draft and the model are of one training run; report this if they are",
        )
