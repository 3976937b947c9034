"""A decoder's shape, read from a Hugging Face config.json; `families.py` holds what differs from family to family."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from torchwright.hub.architectures import UnsupportedArchitecture as UnsupportedArchitecture
from torchwright.models.decoder.pages import PageShape
from torchwright.models.decoder.rope import BY_LENGTH, Rope
from torchwright.models.decoder.states import StateShape

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


class PagedConfig(Protocol):
    """The facts of a model for a cache, `generate` and the serving engine."""

    @property
    def architecture(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def context(self) -> int:
        """The most tokens of one sequence."""
        ...

    @property
    def bos(self) -> int | None: ...

    @property
    def page_shapes(self) -> tuple[PageShape, ...]:
        """The keys and values of a token, by layer that has them."""
        ...

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """The states of a sequence, by layer that has one."""
        ...

    @property
    def varies_by_length(self) -> bool:
        """Check whether keys depend on the length of their sequence's prompt, so that sequences cannot share them."""
        ...

    def restarts_at(self, prompt_tokens: int, length: int) -> bool:
        """Check whether a sequence's cached keys become invalid once it reaches `length`."""
        ...


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture-of-experts feed-forward block: each token goes to `chosen` of `count` experts."""

    count: int
    chosen: int
    feed_forward: int
    normalize: bool
    """True if the chosen experts' weights are scaled to sum to 1."""
    bias: bool = False
    """True if a bias is added to the shares for the choice of experts, and not to their weights (DeepSeek-AI, 2024)."""
    router_bias: bool = False
    """True if a bias is added to the router's scores."""
    linear_bias: bool = False
    """True if the experts' linear layers have biases."""
    sigmoid: bool = False
    """True if shares are sigmoids of the router's scores, not their softmax."""
    groups: int = 1
    chosen_groups: int = 1
    """Experts lie in groups, of which each token goes to these few: those with the largest sums of `ranked` shares."""
    ranked: int = 2
    scale: float = 1.0
    """The chosen experts' shares are multiplied by it."""
    shared: int = 0
    """Width of a feed-forward block that all tokens go through besides, 0 for none."""
    shared_gate: bool = False
    """True if that block's output is multiplied by the sigmoid of a product of its input."""
    expert_scale: bool = False
    """True if each expert's output is multiplied by a number of its own."""


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig:
    """A short convolution between two gates in place of attention (LFM2)."""

    width: int
    bias: bool

    def state_shape(self, model: int) -> StateShape:
        return StateShape(((self.width - 1, model),))


@dataclass(frozen=True, kw_only=True)
class RecurrenceConfig:
    """A linear recurrence behind a short convolution, in place of attention."""

    key_heads: int
    heads: int
    key_dim: int
    head_dim: int
    width: int
    """Width of the convolution."""

    @property
    def keys(self) -> int:
        """Numbers in all heads' keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers in all heads' values of a token."""
        return self.heads * self.head_dim

    def state_shape(self, model: int) -> StateShape:
        convolved = 2 * self.keys + self.values
        return StateShape(((self.width - 1, convolved), (self.heads, self.key_dim, self.head_dim)))


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(RecurrenceConfig):
    """A gated delta rule (Yang et al., 2024)."""


@dataclass(frozen=True, kw_only=True)
class MambaConfig(RecurrenceConfig):
    """Mamba-2 (Dao and Gu, 2024); B and C are its keys and queries."""

    conv_bias: bool
    bias: bool
    """True if its first linear layer has a bias."""
    out_bias: bool
    normed: bool = True
    """True if its output is normed in parts of as many heads as share a key, and not only gated."""
    gate_first: bool = True
    """True if the gate comes before that norm."""
    input_scale: float = 1.0
    scales: tuple[float, ...] = ()
    """Factors of gate, values, keys, queries and steps, as the first linear layer gives them; empty for none."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Factors of layers whose attention and mixer lie next to each other (Falcon-H1)."""

    attention_in: float
    attention_out: float
    mixer_out: float
    gate: float
    """The feed-forward block's gate is multiplied by it before the activation."""
    down: float


Mixer = ShortConvConfig | DeltaConfig | MambaConfig
"""The token mixer of recurrent layers."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-AI, 2024): a token's keys and values are products of one vector."""

    rank: int
    """Size of that vector."""
    query_rank: int | None
    """Size of the vector that queries are made of; None if they are made of the layer's input."""
    plain: int
    """Dimensions of a head's keys that do not turn."""
    turned: int
    """And of those that do, which all heads share."""
    value: int
    """Dimensions of a head's values."""
    interleaved: bool
    """True if the two dimensions that turn together lie next to each other."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Sizes of one layer, where they differ from layer to layer."""

    kv_heads: int
    """0 for a layer that attends to another's keys and values."""
    head_dim: int
    feed_forward: int
    keys_as_values: bool = False
    """True if values are the keys before their norm."""


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """Gemma 4's layers: a number scales their output, and they may have an input for each token."""

    width: int
    """Size of that input, 0 for none."""
    vocabulary: int


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything the decoder computes with; one entry for each layer in `windows`, `ropes` and `sparse`."""

    architecture: str
    vocabulary: int
    model: int
    """Model size (E)."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    context: int
    """The most tokens of one sequence."""
    eps: float
    activation: str
    """silu, gelu_tanh or clamped_swiglu; where nothing is gated also gelu or relu."""
    tied: bool
    """The output layer is the embedding table."""
    ropes: tuple[Rope | None, ...]
    windows: tuple[int, ...]
    """0 is full attention, else how many last tokens a query sees, itself included."""
    sparse: tuple[bool, ...]
    """True for layers whose feed-forward block is the mixture of experts."""
    experts: ExpertsConfig | None = None
    recurrent: tuple[bool, ...] = ()
    """True for layers with `mixer` in place of attention; empty where none has."""
    mixer: Mixer | None = None
    parallel: ParallelConfig | None = None
    """Given where all layers have attention and `mixer`; then none is `recurrent`."""
    output_gate: bool = False
    """True if queries come with a gate, by whose sigmoid attention's output is multiplied."""
    scale: float
    """Attention scores are multiplied by it."""
    interleaved: bool = False
    """True if files keep the two dimensions that turn together next to each other; they are parted as they are read."""
    qk_norm: str = "none"
    """none, head (one norm for each head), rotated (the same behind the rotation), or projection (one norm over all
    heads together)."""
    norm_offset: float = 0.0
    """Added to norm weights as they are read."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    """True if feed-forward blocks have a gate; the activation applies to it."""
    causal: bool = True
    """True if a token attends only to earlier ones; in an encoder it attends to all."""
    remembers: bool = False
    """True if each layer also attends to a memory, the states of an encoder."""
    post_norm: bool = False
    """True if a LayerNorm follows each block's sum with the residual stream, and none precedes a block."""
    embedding_norm: bool = False
    """True if a LayerNorm precedes the first layer; stacks with `post_norm` may have one in any case."""
    clip_qkv: float | None = None
    attention_soft_cap: float = 0.0
    latent: LatentConfig | None = None
    """Given where attention keeps one key-value head: a latent vector and the dimensions that turn."""
    shapes: tuple[LayerShape, ...] = ()
    """Empty where all layers have the sizes above."""
    reads: tuple[int, ...] = ()
    """The layer whose keys and values each layer attends to; empty where all have their own."""
    value_norm: bool = False
    """True if each head's values are divided by their root mean square."""
    layer_inputs: LayerInputs | None = None
    placeholders: tuple[int, ...] = ()
    """Tokens of pictures and sound, which are read as `padding` in a text."""
    padding: int = 0
    sinks: bool = False
    """True if each head has a score beside the keys' in its softmax."""
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    eos: tuple[int, ...] = ()
    bos: int | None = None

    @property
    def mixed(self) -> tuple[int, ...]:
        """The layers with experts, in place of a dense block or next to it."""
        everywhere = self.experts is not None and self.layer_inputs is not None
        return tuple(layer for layer in range(self.layers) if everywhere or self.sparse[layer])

    @property
    def groups(self) -> int:
        """Query heads of one key-value head."""
        return self.heads // self.kv_heads

    @property
    def expanded_kv_heads(self) -> int:
        """Key-value heads of attention over whole sequences, for which a latent vector is taken apart by heads.

        Where layers differ, the heads that all their numbers are multiples of.
        """
        if self.shapes:
            return math.gcd(*(shape.kv_heads for shape in self.shapes))
        return self.kv_heads if self.latent is None else self.heads

    def kv_heads_of(self, ways: int) -> int:
        """Return those of each process of tensor parallelism; with fewer heads than processes several have the same."""
        return max(1, self.expanded_kv_heads // ways)

    @property
    def expanded_head_dim(self) -> int:
        """Dimensions of a query or key there."""
        return self.head_dim if self.latent is None else self.latent.plain + self.latent.turned

    @property
    def untrained(self) -> str | None:
        """The part that the trainer's own layers lack, or None."""
        return "interleaved rotary embeddings" if self.interleaved else None

    def at(self, layer: int) -> DecoderConfig:
        """Return the configuration with one layer's sizes."""
        if not self.shapes:
            return self
        return self.sized(self.shapes[layer])

    def sized(self, shape: LayerShape) -> DecoderConfig:
        """Return the configuration with the sizes of one kind of layer."""
        sizes = {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "feed_forward": shape.feed_forward}
        return replace(self, **sizes, shapes=(shape,), reads=())

    @property
    def keys_as_values(self) -> bool:
        """Check whether values are keys, for the configuration of one layer."""
        return any(shape.keys_as_values for shape in self.shapes)

    @property
    def page_shapes(self) -> tuple[PageShape, ...]:
        if self.shapes:
            return tuple(PageShape(shape.kv_heads, shape.head_dim) for shape in self.shapes if shape.kv_heads)
        return (PageShape(self.kv_heads, self.head_dim),) * (self.layers - sum(self.recurrent))

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        count = self.layers if self.parallel else sum(self.recurrent)
        return () if self.mixer is None else (self.mixer.state_shape(self.model),) * count

    @property
    def varies_by_length(self) -> bool:
        return any(rope.kind in BY_LENGTH for rope in self.ropes if rope)

    def restarts_at(self, prompt_tokens: int, length: int) -> bool:
        """See `PagedConfig`.

        "longrope" turns positions by other angles beyond the trained length. transformers throws the cache away there
        (Phi-3), so that an answer does not depend on where its prompt ended.
        """
        return any(prompt_tokens <= trained == length - 1 for trained in self._restarts)

    @cached_property
    def _restarts(self) -> set[int]:
        return {rope.original for rope in self.ropes if rope and rope.kind == "longrope"}
