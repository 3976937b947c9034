"""Bytes that one layer keeps of a token from its forward to its backward pass.

Counted operator by operator over `train/model/`; `tests/train/test_planning_memory.py` counts on the running model.
"""

from __future__ import annotations

from torchwright.decoder.families import FAMILIES
from torchwright.train.layout import Layout
from torchwright.train.planning.job import Job, Recompute
from torchwright.train.planning.shape import Kind, Shape


def rings(shape: Shape, layout: Layout) -> bool:
    """Whether context parallelism passes keys around in a ring: it exchanges heads only where they divide."""
    return layout.cp > 1 and (shape.config.kv_heads // layout.tp) % layout.cp != 0


class Activations:
    """Bytes per token of a layer; tensor-parallel processes share the sequence between matrices.

    `fused_norms`: one operator for a norm, as on CUDA; on the CPU it is several, which keep the normalized input too.
    """

    def __init__(self, shape: Shape, job: Job, layout: Layout, *, fused_norms: bool) -> None:
        tp = layout.tp
        self.shape, self.job, self.fused_norms = shape, job, fused_norms
        self.cp, self.ring = layout.cp, rings(shape, layout)
        self.a = job.width
        self.E = shape.config.model / tp
        self.q = shape.q_width / tp
        self.kv = shape.kv_width / min(tp, shape.config.kv_heads)
        self.H = shape.config.heads / tp
        self.tp = tp

    def kept(self, kind: Kind, recompute: Recompute) -> float:
        """From forward to backward."""
        if recompute == "full":
            return self.a * self.E
        if recompute == "selective":
            return self._selective(kind)
        return self.whole(kind)

    def whole(self, kind: Kind) -> float:
        """With nothing recomputed; what recomputing a layer brings back for the time of its backward pass."""
        return self._norms() + self._attention(kind) + self._feed_forward(kind)

    def passing(self, kind: Kind) -> float:
        """Gradients of activations that live at once inside a layer's backward pass."""
        F = self.shape.feed_forward_width(kind) / self.tp
        experts = self.shape.config.experts
        if kind.sparse and experts is not None:
            F /= experts.count  # one expert after the other, each on its share of the rows
        values = 2 * F + 2 * self.E
        if not self.ring:
            return self.a * values
        # A ring's scores, weights and their gradients exist for one block of keys, in float32.
        return self.a * values + 3 * 4 * self.H * self.job.context / self.cp

    def final(self) -> float:
        """Of the norm behind the last layer and the output layer's input."""
        return self._norm(self.E) + self.a * self.shape.config.model

    def _norm(self, width: float) -> float:
        if self.job.compile:
            return self.a * width
        return (4 if self.fused_norms else 8) * width + 4

    def _norms(self) -> float:
        names = FAMILIES[self.shape.config.architecture].names
        count = sum(
            name is not None
            for name in (names.pre_attention, names.post_attention, names.pre_mlp, names.post_mlp)
        )
        heads = 0.0 if self.shape.config.qk_norm == "none" else self._norm(self.q) + self._norm(self.kv)
        # The matrices behind two of the norms keep their output, and under tensor parallelism for all tokens; compiled
        # on one device it is computed again instead.
        computed_again = self.job.compile and self.tp == 1
        inputs = 0.0 if computed_again else self.a * 2 * self.shape.config.model
        return count * self._norm(self.E) + heads + inputs

    def _attention(self, kind: Kind) -> float:
        kept = self.a * (2 * self.q + 2 * self.kv) + 4 * self.H
        if self.shape.config.attention_soft_cap and not self.ring:
            # Computed explicitly: tanh, softmax in float32, and its copy in the model's type, for every key.
            kept += self.H * self.job.context * (2 * self.a + 4)
        return kept

    def _feed_forward(self, kind: Kind) -> float:
        F = self.shape.feed_forward_width(kind) / self.tp
        kept = self.a * F * (2 if self.job.compile else 4)
        experts = self.shape.config.experts
        if kind.sparse and experts is not None:
            # Rows in the experts' order on the way in and out, scores and shares.
            kept += self.a * 2 * experts.chosen * self.E + 8 * experts.count
        return kept

    def _selective(self, kind: Kind) -> float:
        """The layer's input and what every matrix product and attention gave."""
        F = self.shape.feed_forward_width(kind) / self.tp
        rows = 1.0
        experts = self.shape.config.experts
        if kind.sparse and experts is not None:
            rows = experts.chosen
        return self.a * ((2 + rows) * self.E + 2 * self.q + 2 * self.kv + 2 * F) + 4 * self.H
