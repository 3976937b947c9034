"""Multi-head latent attention over whole sequences (DeepSeek-AI, 2024): keys and values are taken apart by heads.

Serving keeps the latent vector (`models/decoder/latent.py`); training computes every token's keys and values.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.latent import EPS
from torchwright.models.decoder.shared import halves
from torchwright.train.model.attention import Attend, Scores, fused_attention
from torchwright.train.model.blocks import RMSNorm, RotaryAngles, rotate


class LatentAttention(nn.Module):
    """Called like `Attention`; how many heads there are is read from the projections' outputs as well."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        assert config.latent
        E, H, sizes = config.model, config.heads, config.latent
        self.sizes = sizes
        self.scores = Scores(
            scale=config.scale, window=config.windows[layer], soft_cap=config.attention_soft_cap
        )
        self.query_in: nn.Linear | None = None
        self.query_norm: RMSNorm | None = None
        if sizes.query_rank is not None:
            self.query_in = nn.Linear(E, sizes.query_rank, bias=config.qkv_bias)
            self.query_norm = RMSNorm(sizes.query_rank, EPS, 0.0)
        self.query = nn.Linear(sizes.query_rank or E, H * (sizes.plain + sizes.turned), bias=False)
        self.latent = nn.Linear(E, sizes.rank + sizes.turned, bias=config.qkv_bias)
        self.latent_norm = RMSNorm(sizes.rank, EPS, 0.0)
        self.from_latent = nn.Linear(sizes.rank, H * (sizes.plain + sizes.value), bias=False)
        self.o = nn.Linear(H * sizes.value, E, bias=config.o_bias)
        self.shared = nn.Identity()
        """Passed by what all heads share, on the way to them: under tensor parallelism its gradient is a sum."""
        self.attend: Attend = fused_attention

    def forward(
        self, x_BTE: torch.Tensor, rotary_angles: RotaryAngles, documents_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        sizes = self.sizes
        assert rotary_angles is not None
        plain_BTHD, turned_BTHD = self._by_heads(self._queries(x_BTE), sizes.plain, sizes.turned)
        latent_BTR, shared_BTD = self.latent(x_BTE).split([sizes.rank, sizes.turned], dim=-1)
        wide = self.from_latent(self.latent_norm(latent_BTR))
        key_BTHD, v_BTHD = self._by_heads(wide, sizes.plain, sizes.value)
        shared_BTHD = rotate(self._halves(self.shared(shared_BTD)[..., None, :]), *rotary_angles)
        shared_BTHD = shared_BTHD.expand(*key_BTHD.shape[:-1], -1)
        q_BTHD = torch.cat([plain_BTHD, rotate(self._halves(turned_BTHD), *rotary_angles)], dim=-1)
        k_BTHD = torch.cat([key_BTHD, shared_BTHD], dim=-1)
        # Fused attention takes heads of one size: zeros change neither scores nor what is added up.
        width = max(k_BTHD.shape[-1], sizes.value)
        q, k, v = (F.pad(part, (0, width - part.shape[-1])) for part in (q_BTHD, k_BTHD, v_BTHD))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out_BHTD = self.attend(q, k, v, self.scores, documents_BS)
        return self.o(out_BHTD[..., : sizes.value].transpose(1, 2).flatten(2))

    def _queries(self, x_BTE: torch.Tensor) -> torch.Tensor:
        if self.query_in is None or self.query_norm is None:
            return self.query(x_BTE)
        return self.query(self.query_norm(self.query_in(x_BTE)))

    def _by_heads(self, x: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
        return x.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)

    def _halves(self, x: torch.Tensor) -> torch.Tensor:
        """Return the dimensions that turn as `rotate` takes them."""
        return halves(x) if self.sizes.interleaved else x
