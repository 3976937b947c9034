"""A decoder's parts from a model folder: checked against the configuration and converted one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from torchwright.core.scheme import BF16
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hardware.kernels.pack import finite
from torchwright.hub.checkpoint import Checkpoint
from torchwright.hub.tensor_names import EMBEDDING, HEAD
from torchwright.hub.weight import Grouped, Weight, fill
from torchwright.models.decoder.config import DecoderConfig, ExpertsConfig
from torchwright.models.decoder.families import FAMILIES
from torchwright.models.decoder.weight_rows import Rows, linear_rows, recurrent_part, row_order

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]
"""From a weight (N, K) and a bias (N,) or None, in the model's dtype, to a module that maps (T, K) to (T, N)."""
Repack = Callable[[Sequence[Grouped], torch.Tensor | None], PackedLinear | None]
"""Maps the stacked parts of a weight and a bias to a layer that computes with their integers.

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
        shape = (self.config.vocabulary, self.config.model)
        if not self.config.tied:
            return self._layer([HEAD], [shape], None)
        if HEAD in self.checkpoint and self._embedding != HEAD:
            own_VE = self._stack([HEAD], [shape])
            if not torch.equal(own_VE, embedding_VE):
                return self._layer([HEAD], [shape], None, wide_NK=own_VE)
        return self._layer([self._embedding], [shape], None, wide_NK=embedding_VE)

    @property
    def _embedding(self) -> str:
        """The name of the embedding table: tied files may hold the output layer alone."""
        return HEAD if self.config.tied and EMBEDDING not in self.checkpoint else EMBEDDING

    def final_norm(self) -> torch.Tensor:
        return self._norm(f"{self.names.final_norm}.weight", self.config.model)

    def norm(self, layer: int, part: str) -> torch.Tensor | None:
        """pre_attention, post_attention, pre_mlp or post_mlp (E,), q_norm or k_norm; None where the family has none."""
        config, name = self.config, getattr(self.names, part)
        if name is None:
            return None
        size = config.model
        if part in ("q_norm", "k_norm"):
            if config.qk_norm == "none":
                return None
            heads = config.heads if part == "q_norm" else config.kv_heads
            size = config.head_dim * (1 if config.qk_norm == "head" else heads)
        return self._norm(f"model.layers.{layer}.{name}.weight", size)

    def linear(self, layer: int, part: str) -> nn.Module:
        """One of a layer's linear layers: (N, K) with query, key and value, or gate and up, one below the other."""
        rows = linear_rows(self.config, self.names, part)
        order_N = row_order(self.config, layer, part, len(rows.names))
        return (self._exact if part == "decay" else self._linear)(layer, rows, order_N)

    def recurrent(self, layer: int, part: str) -> torch.Tensor | None:
        """See `LayerParts`."""
        return recurrent_part(self.config, self.names, self.checkpoint, layer, part)

    def expert(self, layer: int, expert: int) -> tuple[nn.Module, nn.Module]:
        """gate_up and down of one expert."""
        assert self.config.experts
        if "{}" not in self.names.expert_down:
            return self._stacked(layer, expert, self.config.experts)
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

    def _stacked(self, layer: int, expert: int, experts: ExpertsConfig) -> tuple[nn.Module, nn.Module]:
        """gate_up and down of one expert, where a file holds those of all in one tensor.

        gpt-oss has them transposed, gate and up alternate row by row, and their names are those of parameters.
        """
        F, E = experts.feed_forward, self.config.model

        def part(name: str, *shape: int) -> torch.Tensor:
            whole = self.checkpoint.weight(f"model.layers.{layer}.{name}", (experts.count, *shape))
            return whole.rows(expert, expert + 1)[0].to(self.dtype)

        (both,), down = self.names.expert_gate_up, self.names.expert_down
        if not experts.linear_bias:
            gate_up_NK, down_NK = part(f"{both}.weight", 2 * F, E), part(f"{down}.weight", E, F)
            return self._made(both, gate_up_NK.clone(), None), self._made(down, down_NK.clone(), None)
        gate_up_NK, down_NK = part(both, E, 2 * F).t(), part(down, F, E).t().contiguous()
        gate_up_NK = torch.cat([gate_up_NK[::2], gate_up_NK[1::2]])
        offsets = part(f"{both}_bias", 2 * F)
        offsets = torch.cat([offsets[::2], offsets[1::2]])
        bias_E = part(f"{down}_bias", E).clone()
        return self._made(both, gate_up_NK, offsets), self._made(down, down_NK, bias_E)

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
        weights, shapes, offsets = self._places(layer, rows)
        wide_NK = self._stack(weights, shapes)
        if order_N is not None:
            wide_NK, offsets = wide_NK[order_N], None if offsets is None else offsets[order_N]
        if self.dtype == torch.bfloat16 and ops.on(self.device, self.dtype) is not None:
            return PackedLinear(wide_NK, offsets, BF16, device=self.device)
        return plain_linear(wide_NK, offsets)

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
        grouped = [weight for weight in weights if isinstance(weight, Grouped)]
        if self.repack and len(grouped) == len(weights):
            made = self.repack(grouped, bias_N)
            if made is not None:
                self.repacked[made.scheme.name] += 1
                return made
        if all(map(self.checkpoint.holds, names)):
            self.repacked[""] += 1
        wide_NK = self._wide(weights) if wide_NK is None else wide_NK
        if self.rounded:
            for name, part in zip(names, wide_NK.split([shape[0] for shape in shapes]), strict=True):
                finite(part, name)
        return self.make_linear(wide_NK, bias_N)

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


def plain_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> nn.Linear:
    """PyTorch's own linear layer around the given tensors."""
    N, K = weight_NK.shape
    linear = nn.Linear(K, N, bias=bias_N is not None, device="meta")
    linear.weight = nn.Parameter(weight_NK, requires_grad=False)
    if bias_N is not None:
        linear.bias = nn.Parameter(bias_N, requires_grad=False)
    return linear
