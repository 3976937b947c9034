"""A model family: how its config.json and its tensors' names differ from Llama's, and how a configuration is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torchwright.hub.fields import Fields
from torchwright.models.decoder.config import ACTIVATIONS, DecoderConfig, ExpertsConfig
from torchwright.models.decoder.inert_fields import refuse_unread
from torchwright.models.decoder.rope import Rope, read_rope

SLIDING, FULL = "sliding_attention", "full_attention"
BIASED = "noaux_tc"
"""The `topk_method` in config.json for experts that a bias keeps balanced."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """Tensors of one layer, without "model.layers.N." in front and ".weight" or ".bias" behind.

    Where one file tensor holds what two or three do elsewhere, the tuple has one name.
    """

    pre_attention: str | None = "input_layernorm"
    post_attention: str | None = None
    pre_mlp: str | None = "post_attention_layernorm"
    post_mlp: str | None = None
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    o: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    choice_bias: str | None = None
    """The bias by which experts are chosen, None for one of the router."""
    shared_gate: str = "mlp.shared_expert_gate"
    conv_in: str = "conv.in_proj"
    conv_out: str = "conv.out_proj"
    conv: str = "linear_attn.conv1d"
    """The convolution of a recurrent layer, whose other tensors have the same prefix."""
    delta_in: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    delta_out: str = "linear_attn.out_proj"
    decay: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    mamba_in: str = "mamba.in_proj"
    mamba_out: str = "mamba.out_proj"
    query: tuple[str, ...] = ("self_attn.q_a_proj", "self_attn.q_b_proj")
    """Two projections of latent attention with a norm between them, in place of the one in `qkv`."""
    query_norm: str = "self_attn.q_a_layernorm"
    latent: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    from_latent: str = "self_attn.kv_b_proj"
    input_gate: str = "per_layer_input_gate"
    """Tensors that only the layers of Gemma 4 have, from here on."""
    input_out: str = "per_layer_projection"
    post_input: str = "post_per_layer_input_norm"
    post_dense: str = "post_feedforward_layernorm_1"
    pre_experts: str = "pre_feedforward_layernorm_2"
    post_experts: str = "post_feedforward_layernorm_2"
    router_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    layer_scale: str = "layer_scalar"
    final_norm: str = "model.norm"
    """The last norm's whole name."""

    stacked_modules: bool = False
    """True if the tensors of all experts are weights of modules, and not parameters of their own."""

    @property
    def stacked_experts(self) -> tuple[str, str]:
        """The tensors of all experts' gates and ups, and downs, where a file holds them in two."""
        if "{}" not in self.expert_down:
            return self.expert_gate_up[0], self.expert_down
        return self.expert_gate_up[0].replace(".{}.gate_proj", ".gate_up_proj"), self.expert_down.replace(
            ".{}", ""
        )

    @property
    def expert_bias(self) -> str:
        """The bias by which experts are chosen in addition to their shares."""
        return self.choice_bias or f"{self.router}.e_score_correction_bias"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture."""

    special: Callable[[Fields, int], dict[str, Any]]
    """Reads what only this family has: fields of `DecoderConfig` from config.json and the number of layers."""
    names: Names = field(default_factory=Names)
    theta: float = 10_000.0
    local_theta: float | None = None
    """The base of sliding-window layers, where they have an embedding of their own."""
    local_key: str | None = "rope_local_base_freq"
    """The key of that base in files of one section; None where transformers reads none."""
    eps: float = 1e-6
    tied: bool = False
    head_dim: int | None = None
    """None: the model size over the heads."""
    rotary_sizes: Callable[[Fields, int], tuple[int, int]] | None = None
    """Reads the dimensions of what turns in full-attention and in sliding-window layers, given the size of heads; None
    where both are that size."""
    kv_heads: int | None = None
    """Default without such a key in config.json; None, and null in the file, mean one per query head."""
    width: str = "intermediate_size"
    """The key of the feed-forward blocks' width."""
    activation: str = "hidden_act"
    """The key of the activation."""
    default_activation: str = "silu"
    rope_names: dict[str, str] = field(default_factory=dict)
    """Old names of a scaling."""
    default_rope: dict[str, Any] = field(default_factory=dict)
    """The rotary embedding of a config.json that describes none."""
    partial: bool = False
    """The family rotates the first part of each head where `partial_rotary_factor` says so."""
    share: float | None = None
    """The rotated share of a head in a config.json that names none."""
    original: int | None = None
    """The trained length, for families whose configuration always has one at the top level."""
    ignored: tuple[str, ...] = ()
    """Fields that configurations of the family carry and its model in transformers does not read."""

    def read(self, architecture: str, fields: Fields) -> DecoderConfig:
        """Return the decoder's shape; raises `ModelError` for a field that is wrong or not honoured."""
        layers, model = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
        heads = fields.integer("num_attention_heads")
        absent = heads if self.kv_heads is None or "num_key_value_heads" in fields.data else self.kv_heads
        kv_heads = fields.integer("num_key_value_heads", absent)
        head_dim = fields.integer("head_dim", self.head_dim or model // heads)
        positions = fields.integer("max_position_embeddings")
        if heads % kv_heads:
            raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        if head_dim % 2:
            raise fields.wrong("head_dim", "an even number")
        if not fields.flag("is_causal", True):
            raise fields.wrong("is_causal", "true: a decoder's attention is causal")
        activation = fields.text(self.activation, self.default_activation)
        if activation not in ACTIVATIONS:
            raise fields.wrong(self.activation, ", ".join(ACTIVATIONS))
        bos = fields.ids("bos_token_id")
        common: dict[str, Any] = {
            "architecture": architecture,
            "vocabulary": fields.integer("vocab_size"),
            "model": model,
            "layers": layers,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "feed_forward": fields.integer(self.width),
            "eps": fields.number("rms_norm_eps", self.eps),
            "activation": ACTIVATIONS[activation],
            "tied": fields.flag("tie_word_embeddings", self.tied),
            "windows": (0,) * layers,
            "sparse": (False,) * layers,
            "scale": head_dim**-0.5,
            "eos": fields.ids("eos_token_id"),
            "bos": bos[0] if bos else None,
        }
        sizes = self.rotary_sizes(fields, head_dim) if self.rotary_sizes else (head_dim, head_dim)
        full, local = self._ropes(fields, sizes, positions)
        values = common | self.special(fields, layers)
        _check_layer_types(fields, values["windows"], values.get("recurrent") or (False,) * layers)
        fields.settle(*self.ignored)
        refuse_unread(fields, architecture)
        if values.get("qk_norm") == "rotated":
            # A norm behind the rotation takes out what all numbers of a head are multiplied by.
            full, local = (replace(rope, attention_factor=1.0) for rope in (full, local))
        rotates = values.pop("rotates", (True,) * layers)
        values["ropes"] = tuple(
            (local if window else full) if rotated else None
            for window, rotated in zip(values["windows"], rotates, strict=True)
        )
        return DecoderConfig(**values, context=max(full.context(positions), local.context(positions)))

    def _ropes(self, fields: Fields, sizes: tuple[int, int], positions: int) -> tuple[Rope, Rope]:
        """Return the embeddings of full-attention and of sliding-window layers."""
        trained = fields.get("original_max_position_embeddings")
        original = None if trained is None else fields.integer("original_max_position_embeddings")
        partial = fields.optional("partial_rotary_factor")
        partial = self.share if partial is None else partial

        def read(section: Fields, theta: float, head_dim: int) -> Rope:
            rope = read_rope(
                section,
                theta=theta,
                partial=partial,
                original=original or self.original,
                head_dim=head_dim,
                positions=positions,
                renamed=self.rope_names,
            )
            if rope.rotated != head_dim and not self.partial:
                where = section if "partial_rotary_factor" in section.data else fields
                raise where.wrong("partial_rotary_factor", "1: the family rotates whole heads")
            return rope

        # transformers 5 writes rope_parameters; older versions rope_scaling, with the base next to it at the top level.
        older = bool(fields.get("rope_scaling"))
        fields.settle("rope_parameters" if older else "rope_scaling")
        key = "rope_scaling" if older else "rope_parameters"
        section = fields.section(key)
        if not section.data and self.default_rope:
            section = Fields(fields.path, dict(self.default_rope), f"{key}.")
        nested = any(isinstance(value, dict) for value in section.data.values())
        theta = fields.number("rope_theta", self.theta)
        if self.local_theta is None:
            if nested:
                raise fields.wrong(key, "one rotary embedding for all layers")
            return (rope := read(section, theta, sizes[0])), rope
        if section.data and older == nested:
            raise fields.wrong(key, f"{FULL} and {SLIDING} in rope_parameters, or one rope_scaling")
        if older and fields.data.get("rope_parameters"):
            raise fields.wrong("rope_parameters", "nothing beside rope_scaling")
        local = section.section(SLIDING) if nested else Fields(fields.path, {}, f"{key}.")
        local_theta = self.local_theta
        if self.local_key is not None:
            local_theta = fields.number(self.local_key, local_theta)
        full = section.section(FULL) if nested else section
        return read(full, theta, sizes[0]), read(local, local_theta, sizes[1])


def _check_layer_types(fields: Fields, windows: tuple[int, ...], recurrent: tuple[bool, ...]) -> None:
    """Raise `ModelError` for layer types that a family does not read and that say otherwise."""
    kinds = fields.items("layer_types", len(windows))
    found = [SLIDING if window else FULL for window in windows]
    if kinds is not None and kinds != found and not any(recurrent):
        raise fields.wrong("layer_types", f"{found}, as the family's other fields say")


def read_recurrent(
    fields: Fields, kinds: tuple[str, ...], default: list[bool], *, others: tuple[str, ...] = (FULL,)
) -> tuple[bool, ...]:
    """Return which layers are recurrent: those whose "layer_types" is one of `kinds`; `others` have full attention."""
    found = fields.items("layer_types", len(default))
    if found is None:
        return tuple(default)
    if not all(kind in (*kinds, *others) for kind in found):
        raise fields.wrong("layer_types", " and ".join([*others, *kinds]))
    return tuple(kind in kinds for kind in found)


def read_windows(fields: Fields, window: int, kinds: list[str]) -> tuple[int, ...]:
    """Return each layer's window; "layer_types" goes before the family's own `kinds`."""
    kinds = fields.items("layer_types", len(kinds)) or kinds
    if not all(kind in (FULL, SLIDING) for kind in kinds):
        raise fields.wrong("layer_types", f"{FULL} and {SLIDING}")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def read_window(fields: Fields, default: int) -> int:
    """Return the width of sliding windows, 0 where null switches them off."""
    if fields.data.get("sliding_window", default) is None:
        fields.settle("sliding_window")
        return 0
    return default if "sliding_window" not in fields.data else fields.integer("sliding_window")


def read_biases(fields: Fields) -> dict[str, Any]:
    attention = fields.flag("attention_bias", False)
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": fields.flag("mlp_bias", False)}


def read_granite(fields: Fields) -> dict[str, Any]:
    return read_biases(fields) | {
        "scale": fields.number("attention_multiplier", 1.0),
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logit_scale": 1 / fields.positive("logits_scaling", 1.0),
    }


def read_experts(fields: Fields, *, feed_forward: str, normalize: bool) -> ExpertsConfig:
    # transformers calls the same number by two names.
    count = fields.integer("num_local_experts" if "num_local_experts" in fields.data else "num_experts")
    if fields.integer("num_experts", count) != count:
        raise fields.wrong("num_experts", f"{count}, as num_local_experts")
    chosen = fields.integer("num_experts_per_tok")
    if chosen > count:
        raise fields.wrong("num_experts_per_tok", f"at most the {count} experts")
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", BIASED):
        raise fields.wrong("topk_method", f"greedy or {BIASED}")
    return ExpertsConfig(
        count=count,
        chosen=chosen,
        feed_forward=fields.integer(feed_forward),
        normalize=normalize,
        bias=method == BIASED,
    )


def read_deepseek_experts(
    fields: Fields, *, count: int | None = None, groups: int = 1, chosen_groups: int = 1, scale: float = 1.0
) -> ExpertsConfig:
    """Experts as DeepSeek V3 chooses them: by sigmoids, a bias and groups, next to a shared one; with the defaults of a
    family's configuration class.
    """
    count, groups = fields.integer("n_routed_experts", count), fields.integer("n_group", groups)
    chosen = fields.integer("num_experts_per_tok", None if count is None else 8)
    chosen_groups = fields.integer("topk_group", chosen_groups)
    if count % groups or chosen_groups > groups:
        raise fields.wrong("n_group", f"a divisor of the {count} experts, and at least topk_group")
    if chosen > count // groups * chosen_groups:
        raise fields.wrong("num_experts_per_tok", "at most the experts of the chosen groups (topk_group)")
    if groups > 1 and count // groups < 2:
        raise fields.wrong("n_group", "groups of two experts at least")
    inner = fields.integer("moe_intermediate_size")
    return ExpertsConfig(
        count=count,
        chosen=chosen,
        feed_forward=inner,
        normalize=fields.flag("norm_topk_prob", True),
        bias=True,
        sigmoid=True,
        groups=groups,
        chosen_groups=chosen_groups,
        scale=fields.positive("routed_scaling_factor", scale),
        shared=inner * fields.integer("n_shared_experts", 1),
    )


def read_cap(fields: Fields, key: str, default: float) -> float:
    """Return a soft cap: the family's own where the key is absent, none (0) where it is null."""
    cap = fields.optional(key)
    if cap is not None and cap <= 0:
        raise fields.wrong(key, "a number above 0, or null for none")
    return default if key not in fields.data else cap or 0.0
