"""One stack of an encoder-decoder model as parts of `layers.py` and `post_norm.py`, from its checkpoint.

Layers with norms before their blocks know no LayerNorm and need none: a LayerNorm of x is the RMSNorm of x without its
mean, times a weight, plus a shift. Whatever is added to their residual stream is read without its mean over the
stream's dimensions, so that the stream never has one (Ashkboos et al., SliceGPT, 2024, section 3.1), and the shift goes
into the bias of the layer behind the norm.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import nn

from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.fields import Fields
from torchwright.models.decoder.seq2seq.stacks import POSITIONS, Side, StackFamily
from torchwright.models.decoder.weights import DecoderParts, MakeLinear

READS = {"qkv": "attention", "memory_q": "memory", "up": "mlp", "gate_up": "mlp"}
"""Linear layers behind a norm."""
TO_HEADS, FROM_HEADS = ("qkv", "memory_q", "memory_kv"), ("o", "memory_o")
INTO_STREAM = (*FROM_HEADS, "down")
LOGITS_BIAS = "final_logits_bias"


class StackParts(DecoderParts):
    """One side's parts, in `dtype`; linear layers as `make_linear` makes them of float32 weights."""

    device = torch.device("cpu")

    def __init__(
        self,
        family: StackFamily,
        fields: Fields,
        side: Side,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        make_linear: MakeLinear,
    ) -> None:
        self.family, self.fields, self.side, self.dtype = family, fields, side, dtype
        self.config = family.read(fields, side)
        self._checkpoint, self._make_linear = checkpoint, make_linear
        self._at = family.stack.format(side=side)
        self._names = frozenset(checkpoint.format.names())
        self._order = family.order
        self._folds = family.norms == "layer" and not self.config.post_norm

    def embedding(self) -> torch.Tensor:
        """(V, E)."""
        return self._streamed(self._table_VE).to(self.dtype)

    def positions(self) -> torch.Tensor | None:
        """(P, E), what is added at each position."""
        made, count, model = self.family.positions, self.config.context, self.config.model
        if made is None:
            return None
        if isinstance(made, str):
            skipped = self.family.skipped
            table_PE = self._read(self._at + made, skipped + count, model)[skipped:]
        elif (
            self._at + POSITIONS in self._names
        ):  # transformers reads a table that is there, whatever is in it
            table_PE = self._read(self._at + POSITIONS, count, model)
        else:
            table_PE = made(self.fields, count, model)
        return self._streamed(table_PE).to(self.dtype)

    def head(self, embedding_VE: torch.Tensor) -> nn.Module:
        """The output layer (V, E) behind the last norm."""
        V, E = self.config.vocabulary, self.config.model
        own = self.family.head in self._names or not self.config.tied
        weight_VE = self._read(self.family.head, V, E) if own else self._table_VE
        bias_V = self._read(LOGITS_BIAS, 1, V)[0] if LOGITS_BIAS in self._names else None
        shift_E = self.final_shift()
        if shift_E is not None:
            shift_V = weight_VE @ shift_E
            bias_V = shift_V if bias_V is None else bias_V + shift_V
        del self._table_VE
        return self._make_linear(weight_VE, bias_V)

    def final_norm(self) -> torch.Tensor | None:
        """(E,); None where a norm follows each block."""
        if self.config.post_norm:
            return None
        norm_E = self._tensor(f"{self.family.final_norm}.weight", self.config.model)
        return norm_E * self._output_scale if self.side == "decoder" else norm_E

    def final_shift(self) -> torch.Tensor | None:
        """The shift of the last norm."""
        shifts = self._folds and self.family.shifted
        return self._tensor(f"{self.family.final_norm}.bias", self.config.model) if shifts else None

    def norm(self, layer: int, part: str) -> torch.Tensor | None:
        """pre_attention, pre_memory or pre_mlp (E,)."""
        place, _, block = part.partition("_")
        if place != "pre" or self.config.post_norm:
            return None
        return self._tensor(self._name(layer, self.family.norm[block]) + ".weight", self.config.model)

    def layer_norm(self, layer: int, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and shift of what follows attention, memory or mlp."""
        return self._pair(self._name(layer, self.family.norm[part]))

    def embedding_norm(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return weight and shift; None where the file has no such norm."""
        return None if self.family.embedding_norm is None else self._pair(self.family.embedding_norm)

    def attention_bias(self) -> torch.Tensor | None:
        """(H, 2L) as `paged_attention` wants it, the same tensor for every layer; None where scores have none."""
        return self._bias_HD

    def linear(self, layer: int, part: str) -> nn.Module:
        config, family = self.config, self.family
        rows, columns = config.model, config.model
        inner = config.heads * (config.head_dim if self._order is None else int((self._order >= 0).sum()))
        if part in FROM_HEADS:
            columns = inner
        elif part in TO_HEADS:
            rows = inner
        elif part == "down":
            columns = config.feed_forward
        else:
            rows = config.feed_forward * (2 if family.gate_below else 1)
        names = family.linear[part]
        weights = [self._tensor(f"{self._name(layer, name)}.weight", rows, columns) for name in names]
        has_bias = family.biased and not family.unbiased.issuperset(names)
        biases = [self._bias(layer, name, rows) for name in names] if has_bias else []
        if part in TO_HEADS:
            weights, biases = ([self._ordered(one, 0) for one in each] for each in (weights, biases))
        if part == "gate_up" and family.gate_below:
            weights, biases = (
                [one.roll(config.feed_forward, 0) for one in each] for each in (weights, biases)
            )
        weight_NK = torch.cat(weights)
        if part in FROM_HEADS:
            weight_NK = self._ordered(weight_NK, 1)
        bias_N = torch.cat(biases) if biases else None
        if self._folds and family.shifted and part in READS:
            shift_K = self._tensor(self._name(layer, family.norm[READS[part]]) + ".bias", columns)
            shift_N = weight_NK @ shift_K
            bias_N = shift_N if bias_N is None else bias_N + shift_N
        if part in INTO_STREAM:
            weight_NK = self._streamed(weight_NK, 0)
            bias_N = None if bias_N is None else self._streamed(bias_N, 0)
        return self._make_linear(weight_NK, bias_N)

    def release(self) -> None:
        self._checkpoint.close()

    def _ordered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Every head's dimensions along `dim` where our layers want them."""
        if self._order is None:
            return x
        heads = x.unflatten(dim, (self.config.heads, -1))
        found = heads.index_select(dim + 1, self._order.clamp_min(0))
        empty = (self._order < 0).nonzero()[:, 0]
        return found.index_fill_(dim + 1, empty, 0).flatten(dim, dim + 1)

    def _bias(self, layer: int, name: str, rows: int) -> torch.Tensor:
        """Return the bias of a linear layer; zeros for one without a bias that is fused with others."""
        if name in self.family.unbiased:
            return torch.zeros(rows)
        return self._tensor(f"{self._name(layer, name)}.bias", rows)

    @cached_property
    def _table_VE(self) -> torch.Tensor:
        """The embedding as the file has it."""
        shared = self.family.shared
        name = shared if shared in self._names else f"{self._at}embed_tokens.weight"
        return self._read(name, self.config.vocabulary, self.config.model)

    @cached_property
    def _bias_HD(self) -> torch.Tensor | None:
        if self.family.relative is None:
            return None
        fields = self.fields
        buckets = fields.integer("relative_attention_num_buckets", 32, minimum=4)
        furthest = fields.integer("relative_attention_max_distance", 128, minimum=buckets)
        table_BH = self._tensor(self.family.relative, buckets, self.config.heads)
        distance_D = torch.arange(-self.config.context, self.config.context)
        bucket_D = buckets_of(distance_D, buckets, furthest, both_ways=not self.config.causal)
        return table_BH[bucket_D].T.contiguous()

    @property
    def _output_scale(self) -> float:
        """The factor of the last norm's output in models whose output layer is, or once was, the embedding."""
        scaled = self.fields.flag("scale_decoder_outputs", self.config.tied)
        return self.config.model**-0.5 if self.family.relative is not None and scaled else 1.0

    def _streamed(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Without its mean along the stream's dimension, where layers rely on that."""
        return x - x.mean(dim, keepdim=True) if self._folds else x

    def _pair(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        E = self.config.model
        return self._tensor(f"{name}.weight", E), self._tensor(f"{name}.bias", E)

    def _name(self, layer: int, name: str) -> str:
        name = name.format(mlp=2 if self.side == "decoder" else 1)
        return self.family.layer.format(layer=layer) + name

    def _tensor(self, name: str, *shape: int) -> torch.Tensor:
        return self._read(self._at + name, *shape)

    def _read(self, name: str, *shape: int) -> torch.Tensor:
        """In float32 and memory of its own."""
        return self._checkpoint.weight(name, shape).rows(0, shape[0]).to(torch.float32, copy=True)


def buckets_of(distance_D: torch.Tensor, buckets: int, furthest: int, *, both_ways: bool) -> torch.Tensor:
    """The bucket of each distance of a key from its query (Raffel et al., 2020, section 2.1).

    Half of the buckets hold one distance each, the other half ever more, up to `furthest` and all beyond it. Where keys
    lie on both sides of a query, those behind it have buckets of their own.
    """
    side = buckets // 2 if both_ways else buckets
    exact = side // 2
    away_D = distance_D.abs() if both_ways else (-distance_D).clamp_min(0)
    # In float32, in which transformers rounds: a distance on an edge falls into the same bucket.
    ratio_D = torch.log(away_D.clamp_min(1).float() / exact) / math.log(furthest / exact)
    far_D = (exact + (ratio_D * (side - exact)).long()).clamp_max(side - 1)
    bucket_D = torch.where(away_D < exact, away_D, far_D)
    return bucket_D + side * (distance_D > 0) if both_ways else bucket_D
