# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Language models for ExecuTorch's own runner: keys and values in the program's memory, the tokenizer next to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.core.layer_types import overridden
from torchwright.exporter.base import Run
from torchwright.exporter.targets.executorch.cached import Cached, narrowed
from torchwright.hub.folder import read_config
from torchwright.optimization.engines.compiled.program import export_one
from torchwright.workloads.base import Case

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

CONTEXT = 2048
"""Tokens that the cache holds, where the model takes more."""
PIECE = 128
"""The most tokens of a prompt that one call takes."""
GROUP = 32
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
CACHED = "use_kv_cache"
"""The method by which the runner, and we, know such a program."""
PRECISIONS = ("fp32", "8da4w")


def cached_program(
    model: nn.Module, folder: Path, precision: str, context: int | None
) -> tuple[ExportedProgram, dict[str, Any], tuple[str, ...]]:
    """The graph of a causal language model with its cache, the methods that the runner asks, and notes.

    `context` is how many tokens the cache holds. Raises `RefusedTechnique` for a precision or a model without one.
    """
    if precision not in PRECISIONS:
        raise RefusedTechnique(
            f"a language model is not written as {precision} with its cache", allowed=", ".join(PRECISIONS)
        )
    config = read_config(folder)
    longest = config.get("max_position_embeddings") or CONTEXT
    if context is not None and context > longest:
        raise RefusedTechnique(f"the model takes {longest:,} tokens", found=f"a context of {context:,}")
    length = context or min(CONTEXT, longest)
    model, halved = narrowed(model)
    notes = (f"its cache holds {length:,} tokens",)
    if halved:
        notes += ("embeddings in bfloat16, as the model has them",)
    if precision == "8da4w":
        notes += _quantize(model)
    cached = Cached(model, length).eval()
    piece = min(PIECE, length)
    tokens = torch.export.Dim("tokens", min=1, max=piece)
    example = torch.zeros(1, min(2, piece), dtype=torch.long), torch.zeros(1, dtype=torch.long)
    call = Case(name="forward", args=example, kwargs={})
    program = export_one(cached, call, {"tokens": {1: tokens}, "start": None})
    return program, _methods(config, length, piece), notes


def _methods(config: dict[str, Any], length: int, piece: int) -> dict[str, Any]:
    methods: dict[str, Any] = {
        CACHED: True,
        "use_sdpa_with_kv_cache": False,
        "enable_dynamic_shape": True,
        "get_max_seq_len": piece,
        "get_max_context_len": length,
        "get_vocab_size": config["vocab_size"],
        "get_n_layers": config["num_hidden_layers"],
    }
    begins, ends = config.get("bos_token_id"), config.get("eos_token_id")
    if begins is not None:
        methods["get_bos_id"] = begins
    if ends is not None:
        methods["get_eos_ids"] = ends if isinstance(ends, list) else [ends]
    return methods


def _quantize(model: nn.Module) -> tuple[str, ...]:
    """Quantize linear layers: 4-bit weights in groups, 8-bit inputs per token. Returns the layers left alone."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_

    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    fitting = {
        name
        for name, module in linears.items()
        if module.in_features % GROUP == 0 and not overridden(module, (nn.Linear,))
    }
    if not fitting:
        raise RefusedTechnique(f"no linear layer has inputs in a multiple of {GROUP} and torch's own forward")
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(GROUP)
    )
    quantize_(model, config, lambda module, name: name in fitting)
    return tuple(f"kept in float32: {name}" for name in linears if name not in fitting)


def keep_tokenizer(model: Path, folder: Path) -> None:
    """Write the model's tokenizer next to the program, from where the runner reads it."""
    for name in TOKENIZERS:
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)


def through_cache(forward: Callable[[Sequence[Tensor]], Sequence[Any]]) -> Run:
    """Prompts (B, T) → logits (B, T, V), each prompt as one call, and again token by token as a runner continues it.

    Of the first comes the last token's, of the second those of the tokens before it: both ways are compared.
    """

    def at(tokens: Tensor, start: int) -> Tensor:
        return forward((tokens, torch.tensor([start])))[0].clone()

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        rows = []
        for ids_1T in tensors[0].split(1):
            last = _last_of(ids_1T, at)
            before = [at(token, start) for start, token in enumerate(ids_1T[:, :-1].split(1, dim=1))]
            rows.append(torch.stack([*before, last], dim=1))
        return [torch.cat(rows)]

    return run


def _last_of(ids_1T: Tensor, at: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The logits after a prompt, in pieces that one call takes."""
    logits = torch.empty(0)
    start = 0
    for piece in ids_1T.split(PIECE, dim=1):
        logits = at(piece.contiguous(), start)
        start += piece.shape[1]
    return logits
