"""An MTP layer (DeepSeek-AI, 2024) as a module that is trained, its steps unrolled as it is served."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.draft.mtp import one_layer
from torchwright.models.decoder.shared import shape_logits
from torchwright.train.draft.chain import Chain, following, step_angles
from torchwright.train.model.attention import Scores
from torchwright.train.model.blocks import Attention, RMSNorm
from torchwright.train.model.fill import initialize
from torchwright.train.model.latent import LatentAttention
from torchwright.train.model.transformer import Layer


class MtpHead(nn.Module):
    """One layer of the target's family over the next token's embedding and the target's last hidden state."""

    embedding: torch.Tensor
    output: torch.Tensor
    ids: torch.Tensor

    def __init__(self, target: DecoderConfig, embedding_VE: torch.Tensor, output_VE: torch.Tensor) -> None:
        """`embedding_VE` and `output_VE` are the target's, and frozen."""
        super().__init__()
        self.target, self.config = target, one_layer(target)
        E = target.model

        def norm() -> RMSNorm:
            return RMSNorm(E, target.eps, target.norm_offset)

        self.embedding_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.join = nn.Linear(2 * E, E, bias=False)
        self.layers = nn.ModuleList([Layer(self.config, 0)])
        self.register_buffer("embedding", embedding_VE, persistent=False)
        self.register_buffer("output", output_VE, persistent=False)
        self.register_buffer("ids", torch.arange(target.vocabulary), persistent=False)
        self.observed = (target.layers,)
        self.stacked = False
        """True if the files that it was read from hold all experts in two tensors."""

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Begin with the target's own state in the layer's residual stream; the rest is random."""
        initialize(self, self.config, seed)
        self.join.weight[:, self.config.model :] += torch.eye(self.config.model)

    def chains(
        self,
        ids_BT: torch.Tensor,
        observed_BTF: torch.Tensor,
        positions_BT: torch.Tensor,
        documents_BT: torch.Tensor | None,
        steps: int,
    ) -> Iterator[torch.Tensor]:
        """See `EagleHead`; the states are those behind the final norm."""
        rope, layer = self.config.ropes[0], self.layers[0]
        self._attend_by(Chain.over(ids_BT, documents_BT))
        state_BTE = observed_BTF.to(self.join.weight.dtype)
        for step in range(steps):
            embedded_BTE = F.embedding(following(ids_BT, step), self.embedding).to(state_BTE.dtype)
            embedded_BTE = embedded_BTE * self.config.embedding_scale
            joined = torch.cat([self.embedding_norm(embedded_BTE), self.hidden_norm(state_BTE)], -1)
            cos, sin = step_angles(rope, positions_BT, step, steps)
            turned = None if cos is None or sin is None else (cos, sin)
            state_BTE = self.norm(layer(self.join(joined), turned))
            yield state_BTE

    def answer(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Logits (N, V) of states."""
        output_VE = self.output.to(hidden_NE.dtype)
        return shape_logits(self.config, F.linear(hidden_NE, output_VE))

    def _attend_by(self, chain: Chain) -> None:
        """Compute the layer's attention by the chains of this call."""

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, _documents: torch.Tensor | None
        ) -> torch.Tensor:
            return chain.attend(q, k, v, scores.scale)

        for module in self.modules():
            if isinstance(module, Attention | LatentAttention):
                module.attend = attend
