"""The trainable decoder of every family: embedding, layers, final norm, output layer."""

from __future__ import annotations

import torch
from torch import nn

from torchwright.core.errors import ModelError
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.families import FAMILIES
from torchwright.models.decoder.rope import angles
from torchwright.models.decoder.shared import shape_logits
from torchwright.train.model.attention import Attend
from torchwright.train.model.blocks import Attention, FeedForward, MixtureOfExperts, RMSNorm, RotaryAngles
from torchwright.train.model.fill import initialize
from torchwright.train.model.latent import LatentAttention
from torchwright.train.model.layer_inputs import InputLayer, KeysAndValues, QueryAttention, TokenInputs
from torchwright.train.model.loss import token_loss
from torchwright.train.model.recurrent import ParallelMixer, ScaledFeedForward, mixer

SCORE = "score"
"""The name of a classifier's output layer in files."""


class Layer(nn.Module):
    """Attention or a recurrent mixer, and feed-forward block, each with a norm before it, after it, or both."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        names = FAMILIES[config.architecture].names

        def norm(part: str) -> RMSNorm | None:
            used = getattr(names, part) is not None
            return RMSNorm(config.model, config.eps, config.norm_offset) if used else None

        self.residual_scale = config.residual_scale
        self.pre_attention = norm("pre_attention")
        self.attention = _token_mixer(config, layer)
        self.post_attention = norm("post_attention")
        self.pre_mlp = norm("pre_mlp")
        self.mlp: FeedForward | MixtureOfExperts
        if config.sparse[layer]:
            assert config.experts
            self.mlp = MixtureOfExperts(config, config.experts)
        else:
            block = FeedForward if config.parallel is None else ScaledFeedForward
            self.mlp = block(config, config.feed_forward)
        self.post_mlp = norm("post_mlp")

    def forward(
        self, x_BTE: torch.Tensor, rotary_angles: RotaryAngles, documents_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        delta_BTE = self.attention(_normed(self.pre_attention, x_BTE), rotary_angles, documents_BS)
        x_BTE = x_BTE + self._scaled(_normed(self.post_attention, delta_BTE))
        delta_BTE = self.mlp(_normed(self.pre_mlp, x_BTE))
        return x_BTE + self._scaled(_normed(self.post_mlp, delta_BTE))

    def _scaled(self, delta_BTE: torch.Tensor) -> torch.Tensor:
        return delta_BTE if self.residual_scale == 1 else delta_BTE * self.residual_scale


def _token_mixer(config: DecoderConfig, layer: int) -> nn.Module:
    """Return a layer's attention, its recurrent mixer, or both next to each other."""
    if config.parallel is not None:
        return ParallelMixer(config, layer)
    if config.recurrent and config.recurrent[layer]:
        return mixer(config)
    return (Attention if config.latent is None else LatentAttention)(config, layer)


class Transformer(nn.Module):
    """A decoder-only language model over whole sequences, built on whatever device is the default (meta as well).

    logits_BTV = model(ids_BT)
    total, valid = model.loss(ids_BT, shift_labels(ids_BT))
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.untrained is not None:
            raise ModelError(
                f"the trainer's own layers have no {config.untrained}, which {config.architecture} has",
                next="name its folder: it trains on transformers' own code",
            )
        self.config, self.output = config, "lm_head"
        self.embedding = nn.Embedding(config.vocabulary, config.model)
        inputs = config.layer_inputs
        self.inputs = (
            TokenInputs(config, inputs.width, inputs.vocabulary) if inputs and inputs.width else None
        )
        self.layers = nn.ModuleList(
            Layer(config, layer) if inputs is None else InputLayer(config, layer)
            for layer in range(config.layers)
        )
        self.norm = RMSNorm(config.model, config.eps, config.norm_offset)
        self.head = nn.Linear(config.model, config.vocabulary, bias=False)
        self.tie()
        distinct = list(dict.fromkeys(rope for rope in config.ropes if rope))
        self.ropes = distinct
        self._rope_of = [distinct.index(rope) if rope else None for rope in config.ropes]
        self.sequence_parts = 1
        """The parts of a sequence, of which this process holds one (context parallelism)."""

    def forward(
        self,
        ids_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        documents_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (B, T, V) in the model's dtype of ids (B, T).

        `positions_BT`, (B, T) or (T,), turn rotary embeddings, and are 0, 1, 2, … where none are given; attention is
        causal by place in the row whatever they are. `documents_BS` says for each token of the whole row, of which
        `ids_BT` may be a part, where its document begins: attention goes no further back. They go with positions that
        count from there.
        """
        return self.logits(self.hidden(ids_BT, positions_BT, documents_BS))

    def hidden(
        self,
        ids_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        documents_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states (B, T, E) after the final norm."""
        if positions_BT is None:
            positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        if self.config.placeholders:
            pictures = torch.tensor(self.config.placeholders, device=ids_BT.device)
            ids_BT = ids_BT.masked_fill(torch.isin(ids_BT, pictures), self.config.padding)
        x_BTE, layers = self.embed(ids_BT), range(len(self.layers))
        inputs = None if self.inputs is None else self.inputs(ids_BT, x_BTE)
        return self.norm(self.through(x_BTE, layers, positions_BT, documents_BS, inputs))

    def embed(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer (B, T, E)."""
        x_BTE = self.embedding(ids_BT)
        if self.config.embedding_scale != 1:
            # Gemma scales by the factor as the model's dtype rounds it.
            x_BTE = x_BTE * torch.full(
                (), self.config.embedding_scale, dtype=x_BTE.dtype, device=x_BTE.device
            )
        return x_BTE

    def through(
        self,
        x_BTE: torch.Tensor,
        layers: range,
        positions_BT: torch.Tensor,
        documents_BS: torch.Tensor | None = None,
        inputs_BTLI: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply these layers, one after the other, to `x_BTE`; they may have inputs of their own."""
        T = positions_BT.shape[-1] * self.sequence_parts
        length = torch.full((1,), T, device=positions_BT.device)
        angles_by_rope: list[RotaryAngles] = [angles(rope, positions_BT, length) for rope in self.ropes]
        kept: dict[int, KeysAndValues | None] = {}
        for layer in layers:
            rope = self._rope_of[layer]
            rotary_angles = None if rope is None else angles_by_rope[rope]
            if self.config.layer_inputs is None:
                x_BTE = self.layers[layer](x_BTE, rotary_angles, documents_BS)
                continue
            own_BTI = None if inputs_BTLI is None else inputs_BTLI[:, :, layer]
            read = kept.get(self.config.reads[layer]) if self.config.reads else None
            x_BTE, kept[layer] = self.layers[layer](x_BTE, rotary_angles, documents_BS, own_BTI, read)
        return x_BTE

    def logits(self, hidden_BTE: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) of hidden states (B, T, E)."""
        return shape_logits(self.config, self.head(hidden_BTE))

    def loss(
        self,
        ids_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        documents_BS: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed negative log-likelihood and the number of labels that count (`token_loss`)."""
        return self.tail(self.hidden(ids_BT, positions_BT, documents_BS), labels_BT)

    def tail(self, hidden_BTE: torch.Tensor, labels_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`loss` of hidden states."""
        return token_loss(self.logits(hidden_BTE), labels_BT)

    def tie(self) -> None:
        """Share the embedding's parameter with the output layer where the configuration says so.

        To be called again after the embedding's parameter has been replaced.
        """
        if self.config.tied:
            self.head.weight = self.embedding.weight

    def use_attention(self, attend: Attend) -> None:
        """Compute attention by `attend` in every layer."""
        for module in self.modules():
            if isinstance(module, Attention | LatentAttention | QueryAttention):
                module.attend = attend

    def reset_parameters(self, seed: int) -> None:
        """Random weights that depend on `seed` and each parameter's name and shape alone, however it is sharded.

        Matrices are normal with deviation 0.02, the two that write into the residual stream with 0.02 / √(2 · layers)
        (Radford et al., 2019); norms are the identity, biases zero.
        """
        initialize(self, self.config, seed)


def mixture_of(layer: nn.Module) -> MixtureOfExperts | None:
    """Return a layer's experts, None where it has none or is another process's."""
    if isinstance(layer, InputLayer):
        return layer.mixture
    return layer.mlp if isinstance(layer, Layer) and isinstance(layer.mlp, MixtureOfExperts) else None


def _normed(norm: RMSNorm | None, x_BTE: torch.Tensor) -> torch.Tensor:
    return x_BTE if norm is None else norm(x_BTE)
