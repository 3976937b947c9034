"""Context parallelism: each process holds a part of every sequence.

Where the heads divide, an all-to-all gives each process all tokens of some heads (Ulysses: Jacobs et al., 2023); where
they run out, keys and values go around in a ring (Liu et al., 2023; `ring.py`). Which tokens a process holds is in
`zigzag.py`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh

from torchwright.train.model.attention import Attend, Scores
from torchwright.train.model.blocks import Attention
from torchwright.train.model.latent import LatentAttention
from torchwright.train.model.layer_inputs import QueryAttention
from torchwright.train.model.transformer import Transformer
from torchwright.train.parallel.ring import ring_attention
from torchwright.train.parallel.zigzag import divided, joined


def apply_context_parallel(model: Transformer, mesh: DeviceMesh, kv_heads: int) -> None:
    """Make attention see whole sequences whose tokens are divided over `mesh`.

    `kv_heads` is how many a process has after tensor parallelism. To be called after `Transformer.use_attention`.
    """
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention | QueryAttention):
            module.attend = (
                RingAttention(mesh) if kv_heads % mesh.size() else HeadExchange(mesh, module.attend)
            )
    model.sequence_parts = mesh.size()


class HeadExchange:
    """All tokens of H/cp heads in place of T/cp tokens of all heads, around attention over whole sequences."""

    def __init__(self, mesh: DeviceMesh, attend: Attend) -> None:
        self.ways, self.group, self.attend = mesh.size(), mesh.get_group(), attend

    def __call__(
        self,
        q_BHTD: torch.Tensor,
        k_BKTD: torch.Tensor,
        v_BKTD: torch.Tensor,
        scores: Scores,
        documents_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        heads = [part.shape[1] // self.ways for part in (q_BHTD, k_BKTD, v_BKTD)]
        # One exchange for all three: first axis the receiver's part of the heads.
        parts = [part.unflatten(1, (self.ways, -1)) for part in (q_BHTD, k_BKTD, v_BKTD)]
        arrived = self._exchange(torch.cat(parts, dim=2).movedim(1, 0))
        q, k, v = joined(arrived).split(heads, dim=1)
        if scores.sinks_H is not None:
            scores = scores.beside(scores.sinks_H.chunk(self.ways)[dist.get_rank(self.group)])
        out_BHTD = self.attend(q, k, v, scores, documents_BS)
        # Back: first axis the receiver's part of the tokens, then the sender's part of the heads.
        back = self._exchange(divided(out_BHTD, self.ways))
        return back.movedim(0, 1).flatten(1, 2)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        return wait_tensor(all_to_all_single(x.contiguous(), None, None, self.group))


class RingAttention:
    """`ring_attention` over a mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group().group_name

    def __call__(
        self,
        q_BHTD: torch.Tensor,
        k_BKTD: torch.Tensor,
        v_BKTD: torch.Tensor,
        scores: Scores,
        documents_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return ring_attention(q_BHTD, k_BKTD, v_BKTD, scores, self.group, documents_BS)
