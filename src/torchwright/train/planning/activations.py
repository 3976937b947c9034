"""Bytes that one layer keeps of a token from its forward to its backward pass.

Counted operator by operator over `train/model/`; `tests/train/test_planning_memory.py` counts in the trainer's step.
"""

from __future__ import annotations

import functools
import math

from torchwright.models.decoder.families import FAMILIES
from torchwright.train.layout import Layout
from torchwright.train.model.attention import BLOCK, MOST_BLOCKS
from torchwright.train.parallel.ring import TILE
from torchwright.train.planning.job import Job, Recompute
from torchwright.train.planning.mixers import MixerActivations
from torchwright.train.shape import Kind, Shape


def copies(shape: Shape, layout: Layout) -> float:
    """To how many processes of `ep` a token travels, its own among them, where its experts are any C of the X.

    Once to each, however many of its experts are there (DeepEP's layout).
    """
    experts = shape.config.experts
    assert experts is not None
    elsewhere = experts.count - experts.count // layout.ep
    return layout.ep * (1 - math.comb(elsewhere, experts.chosen) / math.comb(experts.count, experts.chosen))


def rings(shape: Shape, layout: Layout) -> bool:
    """True if context parallelism passes keys around in a ring: it exchanges heads only where they divide."""
    return layout.cp > 1 and shape.whole.kv_heads_of(layout.tp) % layout.cp != 0


@functools.cache
def keys_computed(context: int, window: int) -> float:
    """Keys for which explicit attention has a weight, averaged over a sequence's queries."""
    block = max(BLOCK, -(-context // MOST_BLOCKS))
    area = 0
    for begin in range(0, context, block):
        end = min(begin + block, context)
        area += (end - begin) * (end - (max(0, begin + 1 - window) if window else 0))
    return area / context


class Activations:
    """Bytes per token of a layer; tensor-parallel processes share the sequence between matrices.

    `fused`: attention is one operator, as on CUDA; on the CPU it is several, which keep the attention weights too.
    """

    def __init__(self, shape: Shape, job: Job, layout: Layout, *, fused: bool) -> None:
        tp = layout.tp
        self.shape, self.job, self.fused = shape, job, fused
        self.cp, self.ep, self.ring = layout.cp, layout.ep, rings(shape, layout)
        self.a = job.width
        self.E = shape.config.model / tp
        self.q = shape.q_width / tp
        # With fewer heads than processes each computes them all.
        self.kv = shape.kv_width / (1 if shape.config.expanded_kv_heads % tp else tp)
        self.H = shape.config.heads / tp
        self.tp = tp
        self.mixers = MixerActivations(job, tp)

    def kept(self, kind: Kind, recompute: Recompute) -> float:
        """From forward to backward."""
        if recompute == "full":
            return self.a * self.E
        if recompute == "selective":
            return self._selective(kind) + self._scores(kind)
        return self._whole(kind)

    def again(self, kind: Kind, recompute: Recompute) -> float:
        """The activations that recomputing a layer restores during its backward pass."""
        if recompute == "selective":  # stored activations are used, not recomputed
            return max(0.0, self._whole(kind) - self._selective(kind))
        return self._whole(kind) if recompute == "full" else 0.0

    def _whole(self, kind: Kind) -> float:
        """With nothing recomputed."""
        mixer = self.shape.mixer(kind)
        kept = self._norms(kind) + self._attention(kind) + self._feed_forward(kind)
        return kept if mixer is None else kept + self.mixers.kept(mixer)

    def passing(self, kind: Kind) -> float:
        """Gradients of activations that live at once inside a layer's backward pass."""
        F = self.shape.feed_forward_width(kind) / self.tp
        experts = self.shape.config.experts
        if kind.sparse and experts is not None:
            F /= experts.count  # one expert after the other, each on its share of the rows
        # Attention's backward pass comes when the feed-forward block has let go of what it kept.
        mixer = self.shape.mixer(kind)
        mixing = self._attention_passing(kind) if kind.attends else 0.0
        if mixer is not None:
            mixing = max(mixing, self.mixers.passing(mixer))
        return max(self.a * (2 * F + 2 * self.E), mixing - self._feed_forward(kind))

    def _attention_passing(self, kind: Kind) -> float:
        a, soft_cap = self.a, self.shape.config.attention_soft_cap
        if self.ring:
            # Gradients in float32 with a part's own; keys and values here and coming, their gradients here, there and
            # on the way.
            passing = (4 + a) * self.q + 3 * (4 + a) * 2 * self.kv
            windowed = 0 < kind.window < self.job.context
            return passing + (3 * 4 * self.H * TILE if soft_cap or windowed else 0)
        if self.fused and not soft_cap:
            return a * 2 * (self.q + 2 * self.kv)
        block = max(BLOCK, -(-self.job.context // MOST_BLOCKS))
        return a * (self.q + 2 * self.kv) + 3 * a * self.H * min(block, self.job.context)

    def final(self) -> float:
        """Return the bytes of the final norm and of the output layer's input."""
        return self._norm(self.E) + self.a * self.shape.config.model

    def token_inputs(self) -> float:
        """Return the bytes of the inputs of all layers, and of what their norm and their sum keep."""
        inputs = self.shape.config.layer_inputs
        if inputs is None or not inputs.width:
            return 0.0
        width = self.shape.config.layers * inputs.width / self.tp
        return self.a * width + self._norm(width)

    def _norm(self, width: float) -> float:
        if self.job.compile:
            return self.a * width
        # Our kernel on a CPU keeps its input; PyTorch's on a card a copy in float32.
        return (4 if self.fused else self.a) * width + 4

    def _norms(self, kind: Kind) -> float:
        names = FAMILIES[self.shape.config.architecture].names
        count = sum(
            name is not None
            for name in (names.pre_attention, names.post_attention, names.pre_mlp, names.post_mlp)
        )
        inputs = self.shape.config.layer_inputs
        if inputs is not None:
            count += (inputs.width > 0) + 4 * (self.shape.config.experts is not None)
        by_head = kind.attends and self.shape.config.qk_norm != "none"
        heads = self._norm(self.q) + self._norm(self.kv) if by_head else 0.0
        heads += self._norm(self.kv) if self.shape.config.value_norm else 0.0
        heads += self._latents()
        # The matrices behind two of the norms keep their output, and under tensor parallelism for all tokens; compiled
        # on one device it is computed again instead.
        computed_again = self.job.compile and self.tp == 1
        inputs = 0.0 if computed_again else self.a * 2 * self.shape.config.model
        return count * self._norm(self.E) + heads + inputs

    def _latents(self) -> float:
        """Latent vectors and their norms, whole on every process."""
        latent = self.shape.config.latent
        if latent is None:
            return 0.0
        ranks = [latent.rank, *([] if latent.query_rank is None else [latent.query_rank])]
        return sum(self._norm(rank) + self.a * rank for rank in ranks)

    def _attention(self, kind: Kind) -> float:
        if not kind.attends:
            return 0.0
        kept = self.a * (2 * self.q + 2 * self.kv)
        if self.shape.config.output_gate:
            kept += self.a * 2 * self.q  # the gate's sigmoid, and the output before it
        if self.shape.config.parallel:
            kept += self.a * self.E * self.tp  # attention's input, which is scaled
        if self.ring:
            return kept + 4 * self.H
        if self.cp > 1:
            kept += self.a * self.q  # the output before it is sent home
        scores = self._scores(kind)
        if not scores:
            return kept + 4 * self.H
        # Weights of every key, and what tanh gave.
        return kept + scores * (2 if self.shape.config.attention_soft_cap else 1)

    def _scores(self, kind: Kind) -> float:
        """One value for every key, where attention is computed explicitly."""
        if not kind.attends or self.ring or (self.fused and not self.shape.config.attention_soft_cap):
            return 0.0
        return self.a * self.H * keys_computed(self.job.context, kind.window)

    def _feed_forward(self, kind: Kind) -> float:
        F = self.shape.feed_forward_width(kind) / self.tp
        # Eager, a clamped activation keeps three more of its steps (`blocks.gated`).
        steps = 7 if self.shape.config.activation == "clamped_swiglu" else 4
        kept = self.a * F * (2 if self.job.compile else steps)
        inputs = self.shape.config.layer_inputs
        if inputs is not None:  # gate, activation and product of the layer's own input
            kept += self.a * 3 * inputs.width / self.tp
        experts = self.shape.config.experts
        if kind.sparse and experts is not None:
            # Rows in the experts' order on the way in and out, scores and shares.
            kept += self.a * 2 * experts.chosen * self.E + 8 * experts.count
            # Between processes they are weighted in float32 (`dispatch.py`).
            kept += 4 * experts.chosen * self.E if self.ep > 1 else 0.0
        return kept

    def _selective(self, kind: Kind) -> float:
        """The layer's input and what every matrix product and attention gave."""
        F = self.shape.feed_forward_width(kind) / self.tp
        rows = 1.0
        experts = self.shape.config.experts
        if kind.sparse and experts is not None:
            rows = experts.chosen
        gate = self.q if self.shape.config.output_gate else 0.0
        attention = self.a * (2 * self.q + 2 * self.kv + gate) + 4 * self.H if kind.attends else 0.0
        mixer = self.shape.mixer(kind)
        mixing = 0.0 if mixer is None else self.mixers.selective(mixer)
        return self.a * ((2 + rows) * self.E + 2 * F) + attention + mixing
