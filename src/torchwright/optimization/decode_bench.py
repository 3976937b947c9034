"""Benchmark of the native decoder against the machine's roofline.

Whole generations are timed, at a growing context, cache and sampling included. The bound of a call is the longer of two
times: bytes (weights, keys and values) over measured bandwidth, and operations over measured matrix rates.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from torchwright.core.errors import WorkloadError
from torchwright.core.records import RooflinePoint
from torchwright.hardware.devices import get_device
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hardware.measure.roofline import Work, point
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.generation.generate import PREFILL_CHUNK, LoadedDecoder
from torchwright.models.decoder.generation.sampling import Sampling
from torchwright.models.decoder.load import KV_DTYPES
from torchwright.optimization.open_model import DTYPES, is_artifact, open_model, promise
from torchwright.workloads.language import LanguageWorkload

TURNS = (3, 9)
TURNS_SECONDS = 20.0
"""Turns go on for about this long, within TURNS."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of one turn's generation."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def of(cls, **given: int | None) -> Sizes:
        """The language workload's own sizes where none is given."""
        known = inspect.signature(LanguageWorkload).parameters
        sizes: dict[str, int] = {
            name: known[name].default if size is None else size for name, size in given.items()
        }
        if sizes["new_tokens"] < 2:
            raise WorkloadError(
                f"--new-tokens {sizes['new_tokens']}", allowed="2 or more: the first comes with the prompt"
            )
        return cls(**sizes)


def bench(
    target: str,
    where: str,
    *,
    quantize: str | None = None,
    kv: str | None = None,
    dtype: str | None = None,
    trust: bool = False,
    batch: int | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
) -> dict[str, Any]:
    """Time the native decoder on a Hugging Face folder or hub id, or on an artifact that was made for the device
    `where`.

    `prefill` is the prompts with the first token of each, `decode` one further token of every sequence.
    `peak_memory_bytes` is the process's while it answers; `loading_peak_memory_bytes` until it can.
    """
    sizes = Sizes.of(batch=batch, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    device = get_device(where)
    device.reset_peak_memory()
    begun = time.perf_counter()
    given = None if is_artifact(target) else where
    opened = open_model(target, quantize=quantize, kv=kv, dtype=dtype, device=given, trust=trust)
    ready, loading = time.perf_counter() - begun, device.peak_memory_bytes()
    model, notices = opened.model, list(opened.notices)
    assert isinstance(model, LoadedDecoder), "an artifact of another engine is not benchmarked here"
    device.reset_peak_memory()
    turns = _turns(model, sizes)
    peak = device.peak_memory_bytes()
    ttft, tpot = (statistics.median(column) for column in zip(*turns, strict=True))
    facts = device.facts()  # after the memory is read, because measuring takes some
    if disturbed := device.ceilings().disturbed:
        notices.append(
            f"no share of the machine's ceilings: {disturbed}; `torchwright doctor` when it is quiet"
        )
    result: dict[str, Any] = {
        "runs_as": "native decoder",
        **({} if opened.recipe is None else promise(opened.recipe)),
        **_describe(model),
        "threads": torch.get_num_threads(),
        "batch": sizes.batch,
        "prompt_tokens": sizes.prompt_tokens,
        "new_tokens": sizes.new_tokens,
        "turns": len(turns),
        "ready_s": ready,
        **LanguageWorkload.rates(asdict(sizes), {"prefill": ttft, "decode": tpot}),
        "peak_memory_bytes": peak,
        "loading_peak_memory_bytes": loading,
    }
    for case, seconds in (("prefill", ttft), ("decode", tpot)):
        work = prefill_work(model, sizes) if case == "prefill" else decode_work(model, sizes)
        result |= roofline_facts(case, point(case, seconds, work, facts))
    return result | {"notices": notices}


def roofline_facts(case: str, found: RooflinePoint | None) -> dict[str, Any]:
    """Return one case's share of the roofline, with the keys of `bench`; bound None if a ceiling is unknown."""
    if found is None:
        return {f"bound_{case}": None}
    return {
        f"{case}_gb_per_s": found.gb_per_s,
        f"{case}_tflops": found.tflops,
        f"{case}_percent_of_bound": found.percent_of_bound,
        f"bound_{case}": found.bound_by,
    }


def prefill_work(model: LoadedDecoder, sizes: Sizes) -> Work:
    """All prompts at once: weights read once, keys and values written, the output layer for the last tokens alone."""
    tokens = sizes.batch * sizes.prompt_tokens
    operations = _linear_operations(model, tokens, sizes.batch)
    pairs = sizes.batch * sum(_keys_seen(model.config, range(sizes.prompt_tokens)))
    operations[_name(model.decoder.embedding.dtype)] += _attention_operations(model.config, pairs)
    kv = tokens * len(model.config.page_shapes) * _kv_bytes(model)
    return Work(bytes=_weight_bytes(model, tokens) + kv, operations=dict(operations))


def decode_work(model: LoadedDecoder, sizes: Sizes) -> Work:
    """One step of all sequences, the mean over the contexts that they grow through."""
    steps = range(sizes.prompt_tokens, sizes.prompt_tokens + sizes.new_tokens - 1)
    pairs = sizes.batch * sum(_keys_seen(model.config, steps)) / len(steps)
    operations = _linear_operations(model, sizes.batch, sizes.batch)
    operations[_name(model.decoder.embedding.dtype)] += _attention_operations(model.config, pairs)
    states = 2 * sizes.batch * sum(shape.bytes for shape in model.config.state_shapes)  # read and written
    moved = _weight_bytes(model, sizes.batch) + pairs * _kv_bytes(model) + states
    return Work(bytes=moved, operations=dict(operations))


def _turns(model: LoadedDecoder, sizes: Sizes) -> list[tuple[float, float]]:
    """(seconds to the first tokens, seconds of each step after them), turn by turn."""
    random = torch.Generator().manual_seed(0)
    shape = (sizes.batch, sizes.prompt_tokens)
    rows: list[list[int]] = torch.randint(model.config.vocabulary, shape, generator=random).tolist()
    for _ in islice(_tokens(model, rows, sizes.new_tokens), 2 * sizes.batch):
        pass  # warms up; what does not fit is said with the sizes that were asked for
    turns: list[tuple[float, float]] = []
    begun = time.perf_counter()
    while len(turns) < TURNS[0] or (len(turns) < TURNS[1] and time.perf_counter() - begun < TURNS_SECONDS):
        turns.append(_turn(model, rows, sizes.new_tokens))
    return turns


def _turn(model: LoadedDecoder, rows: list[list[int]], new_tokens: int) -> tuple[float, float]:
    begun = time.perf_counter()
    # The rows of a step come one after another.
    times = [time.perf_counter() for _ in _tokens(model, rows, new_tokens)]
    first = times[len(rows) - 1]
    return first - begun, (times[-1] - first) / (new_tokens - 1)


def _tokens(model: LoadedDecoder, rows: list[list[int]], new_tokens: int) -> Iterator[Any]:
    """Greedy tokens of all rows, step by step, without an end."""
    return model.tokens(rows, new_tokens, 0, [], PREFILL_CHUNK, Sampling())


def _describe(model: LoadedDecoder) -> dict[str, str]:
    layers = Counter(_scheme(module) for module in model.decoder.modules() if _is_linear(module))
    return {
        "kernels": _kernels(model.device.type),
        "layers": ", ".join(f"{count} {scheme}" for scheme, count in layers.most_common()),
        "kv": next(name for name, dtype in KV_DTYPES.items() if dtype == model.kv_dtype),
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == model.decoder.embedding.dtype),
    }


def _kernels(device: str) -> str:
    if ops.fault(device) is not None:
        return "plain PyTorch"
    return "Triton" if device == "cuda" else str(ops.native.isa())


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | PackedLinear)


def _scheme(module: Any) -> str:
    if not isinstance(module, PackedLinear):
        return _name(module.weight.dtype)
    return str(module.scheme)


def _arithmetic(module: Any) -> str:
    """The type that a layer's products are in."""
    if not isinstance(module, PackedLinear):
        return _name(module.weight.dtype)
    return module.scheme.products


def _linear_operations(model: LoadedDecoder, tokens: int, last_tokens: int) -> defaultdict[str, float]:
    """Count the operations of all linear layers: output layer for `last_tokens`, experts for their share of tokens."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, module in model.decoder.named_modules():
        if _is_linear(module):
            rows = last_tokens if name == "head" else tokens * _expert_share(model.config, name)
            layer: Any = module
            digits = module.scheme.digits if isinstance(module, PackedLinear) else 1
            found[_arithmetic(module)] += 2 * digits * rows * layer.in_features * layer.out_features
    return found


def _weight_bytes(model: LoadedDecoder, tokens: int) -> float:
    """Read for `tokens` tokens: everything but the embedding, and the experts that random routing would choose."""
    total = 0.0
    for name, tensor in model.decoder.state_dict().items():
        unread = (1 - _expert_share(model.config, name)) ** tokens
        total += 0 if name == "embedding" else tensor.nbytes * (1 - unread)
    return total


def _expert_share(config: DecoderConfig, name: str) -> float:
    """The share of tokens that a module of this name sees."""
    experts = config.experts
    return experts.chosen / experts.count if experts and ".experts." in name else 1.0


def _keys_seen(config: DecoderConfig, positions: range) -> list[int]:
    """Keys that the queries at these positions see, for each layer with attention."""
    by_window = {
        window: sum(min(position + 1, window or position + 1) for position in positions)
        for window in set(config.windows)
    }
    recurrent = config.recurrent or (False,) * config.layers
    return [by_window[window] for window, state in zip(config.windows, recurrent, strict=True) if not state]


def _attention_operations(config: DecoderConfig, pairs: float) -> float:
    """Count the operations of query-key `pairs`: two products over all heads, multiply and add counted separately."""
    return 4 * config.heads * config.head_dim * pairs


def _kv_bytes(model: LoadedDecoder) -> int:
    """One token's keys and values in one layer; int8 has a float32 scale for each head."""
    size = 2 * model.config.head_dim * model.kv_dtype.itemsize
    return model.config.kv_heads * (size + (8 if model.kv_dtype == torch.int8 else 0))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
