"""Chains of proposals in training: every slot of a window begins one, and all of them are computed together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from torchwright.models.decoder.rope import Rope, angles
from torchwright.train.model.attention import visible


@dataclass
class Chain:
    """Keys and values of the steps so far: those of the text, and each slot's own behind it.

    Step 0 holds keys of all slots, computed of the target's features. Step k of slot j stands k places behind it: it
    sees the slots up to j of step 0 and, of the steps after, slot j alone, exactly as a served chain does.
    """

    hidden_BQS: torch.Tensor
    """True where a query does not see a slot of the text."""
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def over(cls, ids_BT: torch.Tensor, documents_BT: torch.Tensor | None) -> Chain:
        """The chains of windows, before their first step."""
        places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        seen = visible(places_T, places_T, 0, documents_BT)
        return cls(~seen if seen.ndim == 3 else ~seen[None])

    def attend(
        self, q_BHTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention (B, H, T, D) of the newest step, whose keys and values are kept."""
        (H, T), K = q_BHTD.shape[1:3], k_BKTD.shape[1]
        self.keys.append(k_BKTD)
        self.values.append(v_BKTD)
        G = H // K
        q_BKGTD = (q_BHTD * scale).unflatten(1, (K, G))
        text_BKGTS = (q_BKGTD.flatten(2, 3) @ self.keys[0].transpose(-1, -2)).unflatten(2, (G, -1))
        text_BKGTS = text_BKGTS.masked_fill(self.hidden_BQS[:, None, None], float("-inf"))
        own = [(q_BKGTD * key[:, :, None]).sum(-1, keepdim=True) for key in self.keys[1:]]
        weight = torch.cat([text_BKGTS, *own], -1).softmax(-1, dtype=torch.float32).to(v_BKTD.dtype)
        mixed = (weight[..., :T].flatten(2, 3) @ self.values[0]).unflatten(2, (G, -1))
        for step, value in enumerate(self.values[1:]):
            mixed = mixed + weight[..., T + step, None] * value[:, :, None]
        return mixed.flatten(1, 2)


def following(ids_BT: torch.Tensor, step: int) -> torch.Tensor:
    """The token (B, T) that each slot reads at a step; 0 behind the row's end."""
    T = ids_BT.shape[1]
    return F.pad(ids_BT[:, 1 + step :], (0, min(1 + step, T)))


def step_angles(
    rope: Rope | None, positions_BT: torch.Tensor, step: int, steps: int
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """Cosines and sines of a step's places, which lie `step` behind their slots."""
    if rope is None:
        return None, None
    length = positions_BT.new_full((1,), positions_BT.shape[-1] + steps)
    return angles(rope, positions_BT + step, length)
