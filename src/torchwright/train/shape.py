"""Count a decoder's parameters and operations, layer by layer, from its configuration alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from torchwright.models.decoder.config import DecoderConfig, LayerInputs, LayerShape
from torchwright.models.decoder.families import FAMILIES
from torchwright.train.layout import cut
from torchwright.train.mixer_shape import MixerShape


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The fields in which layers may differ; layers of one kind cost the same."""

    sparse: bool
    """The feed-forward block is a mixture of experts, or has one next to it."""
    window: int
    """Keys that a query sees, itself included; 0 is all before it."""
    attends: bool = True
    """False for a layer with a recurrent mixer in place of attention."""
    sizes: LayerShape | None = None
    """Given where layers differ in them."""


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """Parameters of one layer."""

    attention: int
    """Matrices and biases of q, k, v and o; of latent attention those that are divided by heads, and o; of a recurrent
    mixer all that is divided.
    """
    whole: int
    """Matrices and biases that tensor parallelism does not divide: those into latent vectors, into keys that all heads
    share, and of a layer's own input.
    """
    feed_forward: int
    """Matrices and biases of a dense block, or of the one that all tokens go through next to their experts."""
    experts: int
    """All experts together."""
    chosen_experts: int
    """The experts that one token passes through."""
    replicated: int
    """Norms and the router, which tensor parallelism does not divide."""
    biases: int
    """The parameters of `attention` and `feed_forward` that are not matrices: biases and sinks."""

    @property
    def total(self) -> int:
        return self.attention + self.whole + self.feed_forward + self.experts + self.replicated

    @property
    def active(self) -> int:
        """Those that one token passes through."""
        return self.total - self.experts + self.chosen_experts


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A run of consecutive layers, one of a pipeline's stages; without a pipeline there is one."""

    index: int
    layers: tuple[tuple[Kind, int], ...]
    """Return the number of layers of each kind."""
    embeds: bool
    """It holds the embedding."""
    heads: bool
    """It holds the final norm and the output layer."""


class Shape:
    """A decoder's counts."""

    def __init__(self, config: DecoderConfig, whole: DecoderConfig | None = None) -> None:
        """`whole` is the model's configuration, where `config` has the sizes of one kind of its layers."""
        self.whole, self.config = whole or config, config
        mixed, sizes = set(config.mixed), config.shapes or (None,) * config.layers
        recurrent = config.recurrent or (False,) * config.layers
        self.kinds = tuple(
            Kind(
                sparse=layer in mixed,
                window=config.windows[layer],
                attends=not recurrent[layer],
                sizes=sizes[layer],
            )
            for layer in range(config.layers)
        )
        self._mixer = MixerShape.of(config) if config.mixer else None
        self._of: dict[LayerShape, Shape] = {}
        self._layers = {kind: self.of(kind)._count(kind) for kind in set(self.kinds)} if whole is None else {}
        self._stages: dict[int, list[Stage]] = {}

    def of(self, kind: Kind) -> Shape:
        """Return the same with the sizes of one kind of layer; the widths below are those of that kind."""
        sizes = kind.sizes
        if sizes is None or self.whole is not self.config:
            return self
        if sizes not in self._of:
            config = replace(self.config.sized(sizes), shapes=(sizes,) * self.config.layers)
            self._of[sizes] = Shape(config, self.config)
        return self._of[sizes]

    @property
    def q_width(self) -> int:
        """All query heads side by side (H · D)."""
        return self.config.heads * self.config.expanded_head_dim

    @property
    def kv_width(self) -> int:
        """All key heads side by side (K · D)."""
        return self.config.expanded_kv_heads * self.config.expanded_head_dim

    def mixer(self, kind: Kind) -> MixerShape | None:
        """Return the recurrent mixer of layers of a kind, None for layers of attention alone."""
        return self._mixer if self.config.parallel or not kind.attends else None

    def mixing_widths(self, kind: Kind) -> tuple[int, int]:
        """Columns that the linear layers before attention or a mixer give, and those that the one behind it reads."""
        config, mixer = self.config, self.mixer(kind)
        given, read = (0, 0) if mixer is None else (mixer.inputs, mixer.values)
        if not kind.attends:
            return given, read
        return given + self.q_width * (1 + config.output_gate) + 2 * self.kv_width, read + self.q_width

    @property
    def exchanges(self) -> int:
        """Gathers and scatters of tokens in a layer's pass under tensor parallelism: around each block."""
        return 4 if self.config.parallel is None else 6

    def feed_forward_width(self, kind: Kind) -> int:
        """Columns of gate and up that one token passes through: F, or F of an expert times the chosen experts, and the
        shared one's.
        """
        experts, dense = self.config.experts, self.of(kind).config.feed_forward
        if not kind.sparse or experts is None:
            return dense
        return experts.chosen * experts.feed_forward + (
            experts.shared if self.config.layer_inputs is None else dense
        )

    def layer(self, kind: Kind) -> LayerParameters:
        return self._layers[kind]

    def stages(self, pp: int) -> list[Stage]:
        """`pp` stages, as even as they come; the first ones have a layer less where the layers do not divide."""
        if pp not in self._stages:
            self._stages[pp] = [
                Stage(
                    index=index,
                    layers=tuple(Counter(self.kinds[layer] for layer in layers).items()),
                    embeds=index == 0,
                    heads=index == pp - 1,
                )
                for index, layers in enumerate(cut(len(self.kinds), pp))
            ]
        return self._stages[pp]

    def _count(self, kind: Kind) -> LayerParameters:
        config, names = self.config, FAMILIES[self.config.architecture].names
        if config.layer_inputs is not None:
            return self._count_input_layer(kind, config.layer_inputs)
        E = config.model
        attention, whole, attention_biases, normed = self._attention() if kind.attends else (0, 0, 0, 0)
        mixer = self.mixer(kind)
        if mixer is not None:
            attention += mixer.matrices + mixer.rest - mixer.whole
            whole, normed = whole + mixer.whole, normed + mixer.norm
            attention_biases += mixer.rest
        norms = (names.pre_attention, names.post_attention, names.pre_mlp, names.post_mlp)
        replicated = E * sum(name is not None for name in norms)
        replicated += normed
        if kind.sparse and config.experts is not None:
            experts = config.experts
            one = 3 * E * experts.feed_forward + (2 * experts.feed_forward + E) * experts.linear_bias
            return LayerParameters(
                attention=attention,
                whole=whole,
                feed_forward=3 * E * experts.shared,
                experts=experts.count * one,
                chosen_experts=experts.chosen * one,
                replicated=replicated
                + E * (experts.count + experts.shared_gate)
                + experts.count * experts.router_bias,
                biases=attention_biases,
            )
        F = config.feed_forward
        dense_biases = (2 * F + E) * config.mlp_bias
        return LayerParameters(
            attention=attention,
            whole=whole,
            feed_forward=3 * E * F + dense_biases,
            experts=0,
            chosen_experts=0,
            replicated=replicated,
            biases=attention_biases + dense_biases,
        )

    def _count_input_layer(self, kind: Kind, inputs: LayerInputs) -> LayerParameters:
        config, experts = self.config, self.config.experts if kind.sparse else None
        E, q, kv, D = config.model, self.q_width, self.kv_width, config.head_dim
        keys_values = kv if config.keys_as_values else 2 * kv
        biases = (q + keys_values) * config.qkv_bias + E * config.o_bias
        one = 0 if experts is None else 3 * E * experts.feed_forward
        norms = 4 + (inputs.width > 0) + 4 * (experts is not None)
        return LayerParameters(
            attention=E * (2 * q + keys_values) + biases,
            whole=2 * E * inputs.width,
            feed_forward=3 * E * config.feed_forward,
            experts=0 if experts is None else experts.count * one,
            chosen_experts=0 if experts is None else experts.chosen * one,
            replicated=norms * E + D * (2 if kv else 1) + (0 if experts is None else experts.count * (E + 1)),
            biases=biases,
        )

    def _attention(self) -> tuple[int, int, int, int]:
        """Parameters that are divided by heads, those that are not, biases among the first, and norms."""
        config, latent = self.config, self.config.latent
        E, q, kv = config.model, self.q_width, self.kv_width
        if latent is None:
            asked = q * (1 + config.output_gate)
            biases = (asked + 2 * kv) * config.qkv_bias + E * config.o_bias + config.heads * config.sinks
            by_head = 2 * config.head_dim
            normed = {"none": 0, "head": by_head, "rotated": by_head, "projection": q + kv}[config.qk_norm]
            return E * (asked + 2 * kv) + q * E + biases, 0, biases, normed
        rank = latent.query_rank or 0
        into = rank + latent.rank + latent.turned
        heads = (rank or E) * q + config.heads * (
            latent.rank * (latent.plain + latent.value) + latent.value * E
        )
        biases = E * config.o_bias
        return heads + biases, into * (E + config.qkv_bias), biases, rank + latent.rank

    @property
    def embedding(self) -> int:
        return self.config.vocabulary * self.config.model

    @property
    def head(self) -> int:
        """Parameters of an output layer of its own; 0 where it is the embedding table."""
        return 0 if self.config.tied else self.embedding

    @property
    def token_inputs(self) -> int:
        """Parameters of the inputs of all layers: a table, a matrix and a norm."""
        inputs = self.config.layer_inputs
        if inputs is None:
            return 0
        return self.input_table + inputs.width * (self.config.layers * self.config.model + 1)

    @property
    def input_table(self) -> int:
        """The table among them."""
        inputs = self.config.layer_inputs
        return 0 if inputs is None else inputs.vocabulary * self.config.layers * inputs.width

    @cached_property
    def parameters(self) -> int:
        """All of them; a tied output layer counts once."""
        layers = sum(self.layer(kind).total * count for kind, count in Counter(self.kinds).items())
        return layers + self.embedding + self.head + self.config.model + self.token_inputs

    @cached_property
    def active_parameters(self) -> int:
        """Those that one token passes through, all of the embedding table included."""
        layers = sum(self.layer(kind).active * count for kind, count in Counter(self.kinds).items())
        return layers + self.embedding + self.head + self.config.model + self.token_inputs

    @property
    def matrices(self) -> int:
        """Parameters in a matrix product that one token passes through."""
        looked_up = self.input_table + self.embedding * (0 if self.config.tied else 1)
        return self.active_parameters - looked_up

    def keys(self, kind: Kind, context: int) -> float:
        """Keys that a query sees, averaged over a causal sequence of `context` tokens."""
        window = min(kind.window or context, context)
        return (window * (window + 1) / 2 + (context - window) * window) / context

    def attention_flops(self, kind: Kind, context: int) -> float:
        """Operations per token of scores and weighted values in one layer's forward pass, masked ones left out."""
        return 4 * self.of(kind).q_width * self.keys(kind, context) if kind.attends else 0.0

    def model_flops(self, context: int) -> float:
        """Operations per token of forward and backward that MFU counts (PaLM, appendix B).

        Six for each parameter in a matrix product, and attention as if nothing were masked; recomputation is not
        counted. torchtitan counts the same. A recurrence counts as it is computed, backward twice as much as forward.
        """
        mixers = sum(mixer.flops for kind in self.kinds if (mixer := self.mixer(kind)) is not None)
        latent, seen = self.config.latent, 0
        for kind in self.kinds:
            width = self.of(kind).q_width if kind.attends else 0
            values = self.config.heads * latent.value if latent is not None and kind.attends else width
            seen += (width + values) * min(kind.window or context, context)
        return 6 * self.matrices + 6 * seen + 3 * mixers
