"""Requests and small models for the engine's tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchwright.models.decoder import LoadedDecoder, load_decoder
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.memory import CacheSize
from torchwright.serve.engine.row_costs import RowCosts
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import Finish, Grammar, SamplingOptions, Submit, Timing, TokenLogprob
from torchwright.workloads.language import BUNDLED

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS), str(TESTS / "models" / "decoder")]  # factories, folders; tiny


@dataclass
class Result:
    """Everything that the engine said of one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: Finish | None = None
    message: str | None = None
    timing: Timing | None = None


def bundled() -> LoadedDecoder:
    return load_decoder(BUNDLED, torch.bfloat16)


def tiny_decoder(
    name: str, folder: Path, *, fields: dict[str, Any] | None = None, **options: Any
) -> LoadedDecoder:
    """A random model of one family, in bfloat16 on the compiled kernels; `fields` go before the family's own."""
    from tiny import build, save

    return load_decoder(save(build(name, **(fields or {})), folder), torch.bfloat16, **options)


def request(id: str, ids: list[int], max_tokens: int = 8, **options: Any) -> Submit:
    """A Submit; options of sampling and of the request alike. Greedy, and never stopping, by default."""
    sampling = {name: options.pop(name) for name in SamplingOptions.__struct_fields__ if name in options}
    sampling.setdefault("temperature", 0.0)
    return Submit(id=id, ids=ids, max_tokens=max_tokens, sampling=SamplingOptions(**sampling), **options)


FREE_ROWS = RowCosts([1, 16], [1.0, 1.0])
"""Rows that cost nothing: all that is found is proposed, however busy the machine is."""


def engine(
    loaded: LoadedDecoder, *, pages: int = 256, copies: int | None = None, **options: Any
) -> ServingEngine:
    extra = {name: options.pop(name) for name in ("clock", "row_costs") if name in options}
    extra.setdefault("row_costs", FREE_ROWS)
    asked = EngineOptions(**options)
    copies = (asked.max_running if copies is None else copies) if loaded.config.state_shapes else 0
    size = CacheSize(pages=pages, running=asked.max_running, copies=copies)
    return ServingEngine(loaded, size=size, options=asked, **extra)


Results = dict[tuple[str, int], Result]


def drain(engine: ServingEngine, results: Results | None = None, steps: int = 10_000) -> Results:
    """Run until idle, checking the accounts on the way; what each sequence got, together with `results`."""
    results = {} if results is None else results
    for step in range(steps):
        if engine.idle:
            engine.check_integrity()
            assert engine.stats().pages_used == 0
            return results
        take(results, engine)
        if step % 16 == 0:
            engine.check_integrity()
    raise AssertionError(f"not idle after {steps} steps: {engine.stats()}")


def take(results: Results, engine: ServingEngine) -> None:
    """One step."""
    for output in engine.step().outputs:
        result = results.setdefault((output.id, output.index), Result())
        assert result.finish is None, "nothing comes after the end"
        result.tokens += output.tokens
        result.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert result.prompt_logprobs is None
            result.prompt_logprobs = output.prompt_logprobs
        result.finish, result.message, result.timing = output.finish, output.message, output.timing


def answers(loaded: LoadedDecoder, submits: Iterable[Submit], *, pages: int = 256, **options: Any) -> Results:
    """What a new engine answers to all of them at once."""
    return answered(engine(loaded, pages=pages, **options), submits)


def answered(made: ServingEngine, submits: Iterable[Submit]) -> Results:
    """Return this engine's answers to all requests at once, and close the engine."""
    for submit in submits:
        know(made, submit.grammar)
        assert made.submit(submit) is None
    try:
        return drain(made)
    finally:
        made.close()


def know(made: ServingEngine, grammar: str | None) -> None:
    """Have an engine keep a compiled grammar, whose JSON is its key in these tests."""
    if grammar is not None:
        made.grammars.keep(Grammar(key=grammar, json=grammar))


def alone(loaded: LoadedDecoder, submit: Submit) -> dict[int, Result]:
    """What a new engine answers to one request, without any of what might disturb it."""
    plain = {"prefix_cache": False, "speculate": "none"}
    return {index: result for (_, index), result in answers(loaded, [submit], **plain).items()}


def words(count: int, seed: int, vocabulary: int = 128) -> list[int]:
    """Token ids without end-of-text."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (count,), generator=random).tolist()


def compiled(loaded: LoadedDecoder, schema: dict[str, Any] | None = None, regex: str | None = None) -> str:
    """A grammar as the HTTP process sends it."""
    import xgrammar

    from torchwright.serve.grammar.masks import tokenizer_info

    info = tokenizer_info(loaded.folder, loaded.config.vocabulary, list(loaded.stop))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    if regex is not None:
        return compiler.compile_regex(regex).serialize_json()
    return compiler.compile_json_schema(json.dumps(schema), any_whitespace=False).serialize_json()
