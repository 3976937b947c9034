"""A decoder's parts from a model folder: checked against the configuration and converted one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from torchwright.core.scheme import BF16
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.head_linears import HeadLinears
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hardware.kernels.pack import finite
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.tensor_names import EMBEDDING, HEAD
from torchwright.hub.weight import FloatStack, Weight, fill
from torchwright.models.decoder.config import DecoderConfig, ExpertsConfig
from torchwright.models.decoder.families import FAMILIES
from torchwright.models.decoder.weight_rows import Rows, linear_rows, recurrent_part, row_order

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]
"""From a weight (N, K) and a bias (N,) or None, in the model's dtype, to a module that maps (T, K) to (T, N)."""
Repack = Callable[[Sequence[Weight], torch.Tensor | None], PackedLinear | None]
"""Maps the stacked parts of a weight and a bias to a layer that computes with their integers or small floats.

None if no layer does."""


class LayerParts(Protocol):
    """The parts that a `Layer` is built from; derived protocols may leave some out."""

    device: torch.device
    """The device to run on; the parts may lie on a CPU until they are moved there."""

    def norm(self, layer: int, part: str) -> torch.Tensor | None: ...
    def linear(self, layer: int, part: str) -> nn.Module: ...
    def release(self) -> None: ...

    def expert(self, layer: int, expert: int) -> tuple[nn.Module, nn.Module]:
        """gate_up and down of one expert."""
        raise AssertionError("these parts have no experts")

    def router(self, layer: int) -> torch.Tensor:
        """(experts, E)."""
        raise AssertionError("these parts have no experts")

    def expert_bias(self, layer: int) -> torch.Tensor | None:
        """(experts,) in float32; None where experts are chosen by their shares alone."""
        return None

    def router_bias(self, layer: int) -> torch.Tensor:
        """(experts,)."""
        raise AssertionError("these parts have no bias of a router")

    def shared(self, layer: int) -> tuple[nn.Module, nn.Module]:
        """gate_up and down of the block that all tokens go through besides their experts."""
        raise AssertionError("these parts have no shared expert")

    def shared_gate(self, layer: int) -> nn.Module:
        """The linear layer (1, E) by whose sigmoid that block's output is multiplied."""
        raise AssertionError("these parts have no gate of a shared expert")

    def recurrent(self, layer: int, part: str) -> torch.Tensor | None:
        """A part of a recurrent layer in float32, as `recurrent.py` names it; None for a bias that is not there."""
        raise AssertionError("these parts have no recurrent layer")

    def sinks(self, layer: int) -> torch.Tensor:
        """(H,) in float32, as `paged_attention` wants them."""
        raise AssertionError("these parts have no sinks")

    def from_latent(self, layer: int, part: str) -> HeadLinears:
        """The keys' part, keys (H, R, D) by which queries are multiplied, or the values' (H, D, R)."""
        raise AssertionError("these parts have no latent attention")

    def vector(self, layer: int, part: str) -> torch.Tensor:
        """layer_scale (1,), router_scale (E,) · E^-1/2 or expert_scale (experts,), in float32."""
        raise AssertionError("these parts have no scales")

    def attention_bias(self) -> torch.Tensor | None:
        """(H, 2L) as `paged_attention` wants it; None where scores know no distances."""
        return None


class DecoderParts(LayerParts, Protocol):
    """The parts that a `Decoder` is built from."""

    def embedding(self) -> torch.Tensor: ...
    def head(self, embedding_VE: torch.Tensor) -> nn.Module: ...
    def final_norm(self) -> torch.Tensor | None: ...

    def positions(self) -> torch.Tensor | None:
        """(P, E), what is added at each position; None where the model turns by positions, and learns none."""
        return None

    def layer_inputs(self) -> tuple[torch.Tensor, nn.Module, torch.Tensor]:
        """Gemma 4's table (V, L · I), linear layer (L · I, E) and norm (I,) of the inputs of its layers."""
        raise AssertionError("these parts have no inputs of layers")


class DecoderWeights(DecoderParts):
    """A decoder's parts from a checkpoint, in the model's `dtype`; linear layers as `make_linear` makes them."""

    def __init__(
        self,
        config: DecoderConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        make_linear: MakeLinear,
        device: torch.device,
        *,
        rounded: bool = False,
        repack: Repack | None = None,
    ) -> None:
        """`rounded` says that `make_linear` puts weights on a grid, which has no place for NaN; `repack` is asked for a
        layer of integers first."""
        self.config, self.checkpoint, self.dtype, self.make_linear = config, checkpoint, dtype, make_linear
        self.device, self.rounded, self.repack = device, rounded, repack
        self.repacked: Counter[str] = Counter()
        """Layers that the checkpoint has quantized: how many of which scheme, "" where they were made wide."""
        self.names = FAMILIES[config.architecture].names

    def embedding(self) -> torch.Tensor:
        """Return the embedding table (V, E)."""
        return self._stack([self._embedding], [(self.config.vocabulary, self.config.model)])

    def head(self, embedding_VE: torch.Tensor) -> nn.Module:
        """Return the output layer (V, E); a tied one shares the embedding's tensor.

        As in transformers, a file that holds another output layer than the embedding goes before the configuration.
        """
        name, wide_VE = self._output(embedding_VE)
        return self._layer([name], [(self.config.vocabulary, self.config.model)], None, wide_NK=wide_VE)

    def _output(self, embedding_VE: torch.Tensor) -> tuple[str, torch.Tensor | None]:
        """The output layer's tensor in the file, and its weight (V, E) where that has been read."""
        if not self.config.tied:
            return HEAD, None
        if HEAD in self.checkpoint and self._embedding != HEAD:
            own_VE = self._stack([HEAD], [(self.config.vocabulary, self.config.model)])
            if not torch.equal(own_VE, embedding_VE):
                return HEAD, own_VE
        return self._embedding, embedding_VE

    @property
    def _embedding(self) -> str:
        """The name of the embedding table: tied files may hold the output layer alone."""
        return HEAD if self.config.tied and EMBEDDING not in self.checkpoint else EMBEDDING

    def final_norm(self) -> torch.Tensor:
        return self._norm(f"{self.names.final_norm}.weight", self.config.model)

    def norm(self, layer: int, part: str) -> torch.Tensor | None:
        """pre_attention, post_attention, pre_mlp or post_mlp (E,), q_norm or k_norm, and others by `Names`; None where
        the family has none."""
        config, name = self.config.at(layer), getattr(self.names, part)
        if name is None:
            return None
        size = config.model
        if part in ("q_norm", "k_norm"):
            heads = config.heads if part == "q_norm" else config.kv_heads
            if config.qk_norm == "none" or not heads:
                return None
            size = config.head_dim * (heads if config.qk_norm == "projection" else 1)
        if config.latent is not None and part in ("query_norm", "latent_norm"):
            size = config.latent.rank if part == "latent_norm" else config.latent.query_rank or 0
        return self._norm(f"model.layers.{layer}.{name}.weight", size)

    def linear(self, layer: int, part: str) -> nn.Module:
        """One of a layer's linear layers: (N, K) with query, key and value, or gate and up, one below the other."""
        rows = linear_rows(self.config.at(layer), self.names, part)
        order_N = row_order(self.config, layer, part, len(rows.names))
        return (self._exact if part == "decay" else self._linear)(layer, rows, order_N)

    def recurrent(self, layer: int, part: str) -> torch.Tensor | None:
        """See `LayerParts`."""
        return recurrent_part(self.config, self.names, self.checkpoint, layer, part)

    def expert(self, layer: int, expert: int) -> tuple[nn.Module, nn.Module]:
        """gate_up and down of one expert."""
        assert self.config.experts
        both, down = self.names.stacked_experts
        if "{}" not in self.names.expert_down or f"model.layers.{layer}.{both}" in self.checkpoint:
            return self._stacked(layer, expert, self.config.experts, both, down)
        F, E = self.config.experts.feed_forward, self.config.model
        gate_up = [name.format(expert) for name in self.names.expert_gate_up]
        down = self.names.expert_down.format(expert)
        return self._linear(layer, Rows(gate_up, (F, F), E)), self._linear(layer, Rows([down], (E,), F))

    def shared(self, layer: int) -> tuple[nn.Module, nn.Module]:
        assert self.config.experts
        F, E = self.config.experts.shared, self.config.model
        gate_up = self._linear(layer, Rows(self.names.shared_gate_up, (F, F), E))
        return gate_up, self._linear(layer, Rows([self.names.shared_down], (E,), F))

    def shared_gate(self, layer: int) -> nn.Module:
        return self._exact(layer, Rows([self.names.shared_gate], (1,), self.config.model))

    def router(self, layer: int) -> torch.Tensor:
        """(experts, E): a plain tensor, because a rounded router sends tokens elsewhere and saves nothing."""
        assert self.config.experts
        name = f"model.layers.{layer}.{self.names.router}.weight"
        return self._stack([name], [(self.config.experts.count, self.config.model)])

    def router_bias(self, layer: int) -> torch.Tensor:
        """(experts,) in the model's dtype."""
        assert self.config.experts
        return self._stack([f"model.layers.{layer}.{self.names.router}.bias"], [(self.config.experts.count,)])

    def sinks(self, layer: int) -> torch.Tensor:
        """(H,) in float32."""
        heads = self.config.heads
        name = f"model.layers.{layer}.self_attn.sinks"
        return self.checkpoint.weight(name, (heads,)).rows(0, heads).float()

    def _stacked(
        self, layer: int, expert: int, experts: ExpertsConfig, both: str, down: str
    ) -> tuple[nn.Module, nn.Module]:
        """gate_up and down of one expert, where a file holds those of all in one tensor.

        gpt-oss has them transposed, gate and up alternate row by row, and their names are those of parameters.
        """
        F, E = experts.feed_forward, self.config.model
        if not experts.linear_bias:
            gate_up_NK = self._of_expert(layer, expert, both, 2 * F, E)
            down_NK = self._of_expert(layer, expert, down, E, F)
            return self._made(both, gate_up_NK, None), self._made(down, down_NK, None)
        halves = torch.arange(2 * F).view(F, 2).t().flatten()
        offsets = self._of_expert(layer, expert, f"{both}_bias", 2 * F)[halves]
        gate_up = self._transposed(layer, expert, both, offsets, halves)
        return gate_up, self._transposed(
            layer, expert, down, self._of_expert(layer, expert, f"{down}_bias", E), torch.arange(E)
        )

    def _of_expert(self, layer: int, expert: int, name: str, *shape: int) -> torch.Tensor:
        """One expert's part of a tensor of all, in the model's dtype and in memory of its own."""
        whole = self._of_all(layer, name, *shape)
        return whole.rows(expert, expert + 1)[0].to(self.dtype, copy=True)

    def _of_all(self, layer: int, name: str, *shape: int) -> Weight:
        """A tensor of all experts: a parameter of theirs, or the weight of a module."""
        assert self.config.experts
        name = f"model.layers.{layer}.{name}"
        name = f"{name}.weight" if f"{name}.weight" in self.checkpoint else name
        return self.checkpoint.weight(name, (self.config.experts.count, *shape))

    def _transposed(
        self, layer: int, expert: int, name: str, bias_N: torch.Tensor, order_N: torch.Tensor
    ) -> nn.Module:
        """One expert's linear layer, whose weights lie transposed in a tensor of all, its rows in this order."""
        assert self.config.experts
        F, E = self.config.experts.feed_forward, self.config.model
        whole = self._of_all(layer, name, *((F, E) if name == self.names.expert_down else (E, 2 * F)))
        if isinstance(whole, FloatStack):
            made = self._repacked([whole.matrix(expert, order_N)], bias_N)
            if made is not None:
                return made
            self.repacked[""] += 1
        wide_NK = whole.rows(expert, expert + 1)[0].to(self.dtype).t()[order_N]
        return self._made(name, wide_NK, bias_N)

    def _made(self, name: str, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> nn.Module:
        if self.rounded:
            finite(weight_NK, name)
        return self.make_linear(weight_NK, bias_N)

    def expert_bias(self, layer: int) -> torch.Tensor | None:
        """(experts,) in float32; None where experts are chosen by their shares alone."""
        experts = self.config.experts
        if experts is None or not experts.bias:
            return None
        name = f"model.layers.{layer}.{self.names.expert_bias}"
        return self.checkpoint.weight(name, (experts.count,)).rows(0, experts.count).float()

    def from_latent(self, layer: int, part: str) -> HeadLinears:
        return HeadLinears(self._from_latent(layer, part), device=self.device)

    def _from_latent(self, layer: int, part: str) -> torch.Tensor:
        """The weight of each head: keys (H, R, D) or values (H, D, R)."""
        latent, heads = self.config.latent, self.config.heads
        assert latent
        shape = (heads * (latent.plain + latent.value), latent.rank)
        wide_NR = self._stack([f"model.layers.{layer}.{self.names.from_latent}.weight"], [shape])
        keys_HDR, values_HDR = wide_NR.view(heads, -1, latent.rank).split([latent.plain, latent.value], dim=1)
        return keys_HDR.transpose(1, 2) if part == "keys" else values_HDR

    def vector(self, layer: int, part: str) -> torch.Tensor:
        experts = self.config.experts
        size = {
            "layer_scale": 1,
            "router_scale": self.config.model,
            "expert_scale": experts and experts.count,
        }
        name, count = f"model.layers.{layer}.{getattr(self.names, part)}", size[part] or 0
        found = self.checkpoint.weight(name, (count,)).rows(0, count).float().clone()
        return found * self.config.model**-0.5 if part == "router_scale" else found

    def layer_inputs(self) -> tuple[torch.Tensor, nn.Module, torch.Tensor]:
        config, inputs = self.config, self.config.layer_inputs
        assert inputs
        width = config.layers * inputs.width
        table_VI = self._stack(["model.embed_tokens_per_layer.weight"], [(inputs.vocabulary, width)])
        project = self._layer(["model.per_layer_model_projection.weight"], [(width, config.model)], None)
        return table_VI, project, self._norm("model.per_layer_projection_norm.weight", inputs.width)

    def release(self) -> None:
        """Let go of the files' memory, called after each layer; parts given before stay good."""
        self.checkpoint.close()

    def _linear(self, layer: int, rows: Rows, order_N: torch.Tensor | None = None) -> nn.Module:
        """A linear layer; integers of a quantized checkpoint are made wide where its rows change their order."""
        weights, shapes, offsets = self._places(layer, rows)
        if order_N is None:
            return self._layer(weights, shapes, offsets)
        if any(map(self.checkpoint.holds, weights)):
            self.repacked[""] += 1
        wide_NK = self._stack(weights, shapes)[order_N]
        return self._made(weights[0], wide_NK, None if offsets is None else offsets[order_N])

    def _exact(self, layer: int, rows: Rows, order_N: torch.Tensor | None = None) -> nn.Module:
        """A linear layer that no scheme rounds; by the kernels where they run, so that its rows are independent."""
        wide_NK, offsets = self._whole(layer, rows, order_N)
        if self.dtype == torch.bfloat16 and ops.on(self.device, self.dtype) is not None:
            return PackedLinear(wide_NK, offsets, BF16, device=self.device)
        return plain_linear(wide_NK, offsets)

    def _whole(
        self, layer: int, rows: Rows, order_N: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight (N, K) of a linear layer and its bias, in this decoder's order of rows."""
        weights, shapes, offsets = self._places(layer, rows)
        wide_NK = self._stack(weights, shapes)
        if order_N is None:
            return wide_NK, offsets
        return wide_NK[order_N], None if offsets is None else offsets[order_N]

    def _places(self, layer: int, rows: Rows) -> tuple[list[str], list[tuple[int, int]], torch.Tensor | None]:
        """A linear layer's tensors in the file and their shapes, and its bias; one tensor may be several elsewhere."""
        counts = rows.counts if len(rows.names) > 1 else (sum(rows.counts),)
        full = [f"model.layers.{layer}.{name}" for name in rows.names]
        offsets = None
        if rows.bias:
            offsets = self._stack([f"{name}.bias" for name in full], [(count,) for count in counts])
        return [f"{name}.weight" for name in full], [(count, rows.columns) for count in counts], offsets

    def _layer(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        bias_N: torch.Tensor | None,
        wide_NK: torch.Tensor | None = None,
    ) -> nn.Module:
        """The linear layer of the weights of these names, one below the other, which `wide_NK` holds already."""
        weights = self._read(names, shapes)
        made = self._repacked(weights, bias_N)
        if made is not None:
            return made
        if all(map(self.checkpoint.holds, names)):
            self.repacked[""] += 1
        wide_NK = self._wide(weights) if wide_NK is None else wide_NK
        if self.rounded:
            for name, part in zip(names, wide_NK.split([shape[0] for shape in shapes]), strict=True):
                finite(part, name)
        return self.make_linear(wide_NK, bias_N)

    def _repacked(self, weights: Sequence[Weight], bias_N: torch.Tensor | None) -> PackedLinear | None:
        """The layer that computes with a checkpoint's own numbers, or None."""
        made = self.repack(weights, bias_N) if self.repack else None
        if made is not None:
            self.repacked[made.scheme.name] += 1
        return made

    def _stack(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """The tensors one below the other, in the model's dtype and in memory of their own."""
        return self._wide(self._read(names, shapes))

    def _read(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Weight]:
        return [self.checkpoint.weight(name, shape) for name, shape in zip(names, shapes, strict=True)]

    def _wide(self, weights: Sequence[Weight]) -> torch.Tensor:
        rows = [weight.shape[0] for weight in weights]
        out = torch.empty(sum(rows), *weights[0].shape[1:], dtype=self.dtype)
        for part, weight in zip(out.split(rows), weights, strict=True):
            fill(part, weight)
        return out

    def _norm(self, name: str, size: int) -> torch.Tensor:
        """float32, whatever the model's dtype: the norm computes in it, and 1 + w would lose digits in bfloat16."""
        return self.checkpoint.weight(name, (size,)).rows(0, size).float() + self.config.norm_offset


def plain_linear(
    weight_NK: torch.Tensor, bias_N: torch.Tensor | None, columns: range | None = None
) -> nn.Linear:
    """PyTorch's own linear layer around the given tensors, or around a copy of some columns of the weight."""
    if columns is not None:
        weight_NK = weight_NK[:, columns.start : columns.stop].clone(memory_format=torch.contiguous_format)
    N, K = weight_NK.shape
    linear = nn.Linear(K, N, bias=bias_N is not None, device="meta")
    linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    if bias_N is not None:
        linear.bias = nn.Parameter(bias_N, requires_grad=False)
    return linear
