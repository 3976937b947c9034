# pyright: basic
"""A causal language model that keeps its keys and values in buffers, as runtimes without Python's objects need it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from torchwright.core.errors import RefusedTechnique, first_line
from torchwright.core.layer_types import computes_as
from torchwright.workloads.huggingface import cache_keyword

ATTENTION = "torchwright_cached"
"""The name under which transformers calls `attention`."""
CHANGES = ("softcap", "s_aux", "position_bias")
"""Further attention arguments of some families."""


class Cached(nn.Module):
    """Token ids (1, T) and the position (1,) of the first → logits (1, V) of the last.

    What earlier calls left at earlier positions is read, what lies at later ones is not. It is the call that
    ExecuTorch's runner for language models makes. `model` is a causal language model of transformers, whose attention
    is replaced; `length` is how many positions there are. Raises `RefusedTechnique` for one whose layers attend to less
    than all that was before, or that wants more of its cache than to be updated.
    """

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        _check_windows(model.config, length)
        self.model, self.length = model, length
        self.keyword = cache_keyword(model)
        model.set_attn_implementation(ATTENTION)
        for layer, (keys, values) in enumerate(_shapes(model)):
            self.register_buffer(f"keys_{layer}", torch.zeros(1, keys[0], length, keys[1]))
            self.register_buffer(f"values_{layer}", torch.zeros(1, values[0], length, values[1]))

    def forward(self, tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        positions_T = start + torch.arange(tokens.shape[1])
        seen_TL = torch.arange(self.length) <= positions_T[:, None]
        hidden_TL = torch.where(seen_TL, 0.0, torch.finfo(torch.float32).min)
        outputs = self.model(
            input_ids=tokens,
            position_ids=positions_T[None],
            attention_mask=hidden_TL[None, None],
            use_cache=True,
            logits_to_keep=1,
            **{self.keyword: _Buffers(self, positions_T)},
        )
        return outputs.logits[:, -1].float()

    def update(self, layer: int, positions_T: torch.Tensor, keys: Any, values: Any) -> Any:
        """Write keys and values (1, K, T, D) to their positions; all of the layer's."""
        buffers = self.get_buffer(f"keys_{layer}"), self.get_buffer(f"values_{layer}")
        for buffer, given in zip(buffers, (keys, values), strict=True):
            buffer.index_copy_(2, positions_T, given)
        return buffers


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Queries (1, H, T, D), keys and values (1, K, L, D) and what is added (1, 1, T, L) → (1, T, H, D).

    Products of matrices and a softmax, which every delegate knows; the heads that share keys are rows of one product,
    so that no cache is repeated for them.
    """
    if asked := {name for name in CHANGES if settings.get(name) is not None}:
        raise RefusedTechnique("attention is not exported with a cache", found=", ".join(sorted(asked)))
    _, heads, tokens, size = query.shape
    keys_KLD, values_KLD = key.flatten(0, 1), value.flatten(0, 1)
    shared = heads // len(keys_KLD)
    rows = query.reshape(len(keys_KLD), shared * tokens, size)
    scores = torch.bmm(rows * scaling, keys_KLD.transpose(1, 2))
    scores = scores.unflatten(1, (shared, tokens)) + attention_mask[0]
    found = torch.bmm(scores.softmax(-1).flatten(1, 2), values_KLD)
    return found.unflatten(1, (shared, tokens)).flatten(0, 1).transpose(0, 1)[None], None


class _Buffers:
    """The object that transformers' layers accept as a cache."""

    def __init__(self, owner: Cached, positions_T: torch.Tensor) -> None:
        self._owner, self._positions = owner, positions_T

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, **_settings: Any) -> Any:
        return self._owner.update(layer, self._positions, keys, values)


class _Sizes:
    """A cache that keeps nothing, and notes what it is given."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, **_settings: Any) -> Any:
        self.found[layer] = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
        return keys, values


def _shapes(model: nn.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(heads, head dimension) of the keys and of the values of each layer."""
    sizes = _Sizes()
    one = torch.zeros(1, 1, dtype=torch.long)
    try:
        with torch.no_grad():
            model(
                input_ids=one,
                position_ids=one,
                attention_mask=torch.zeros(1, 1, 1, 1),
                use_cache=True,
                logits_to_keep=1,
                **{cache_keyword(model): sizes},
            )
    except (AttributeError, TypeError) as error:
        raise RefusedTechnique(
            "this model's cache is more than keys and values by position", found=first_line(error)
        ) from error
    if sorted(sizes.found) != list(range(len(sizes.found))) or not sizes.found:
        raise RefusedTechnique("this model keeps no keys and values", found=f"layers {sorted(sizes.found)}")
    return [sizes.found[layer] for layer in range(len(sizes.found))]


def _check_windows(config: Any, length: int) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    narrow = window is not None and window < length
    if kinds - {"full_attention"} or (not kinds and narrow and getattr(config, "use_sliding_window", True)):
        raise RefusedTechnique(
            "layers that do not attend to all that was before are not exported with a cache",
            found=f"layers {', '.join(sorted(kinds)) or 'all alike'}, window {window}",
            next=f"a cache of at most {window} positions holds all that they see" if not kinds else "",
        )


def narrowed(model: Any) -> tuple[nn.Module, bool]:
    """A copy with its embeddings in bfloat16, where that changes none of them, and whether it did.

    A runtime looks them up as they lie, while it multiplies by float32 or quantized matrices alone: tied embeddings lie
    in a package twice.
    """
    model = copy.deepcopy(model)
    embedding = model.get_input_embeddings()
    half = embedding.weight.detach().to(torch.bfloat16)
    if not computes_as(embedding, (nn.Embedding,)) or not torch.equal(half.float(), embedding.weight):
        return model, False
    embedding.weight = nn.Parameter(half, requires_grad=False)
    embedding.register_forward_hook(lambda module, args, output: output.float())
    return model, True


AttentionInterface.register(ATTENTION, attention)
