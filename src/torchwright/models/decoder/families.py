"""The model families: for each architecture one entry that says how it differs from Llama.

A family gives its defaults, the names of its tensors, and a function that reads the fields that only it has. A field
that is neither read nor known to be inert is refused by name (`inert_fields.py`). To add a family, add an entry to
`FAMILIES` and to `hub.architectures.NATIVE`. Small random models go to tests/models/decoder/tiny.py
(docs/contributing/model-family.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchwright.hardware.kernels.reference import SWIGLU_ALPHA, SWIGLU_LIMIT
from torchwright.hub.architectures import recognize
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

    @property
    def expert_bias(self) -> str:
        """The bias by which experts are chosen in addition to their shares, for the method `BIASED`."""
        return f"{self.router}.e_score_correction_bias"


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
    kv_heads: int | None = None
    """Default without such a key in config.json; None, and null in the file, mean one per query head."""
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
            "feed_forward": fields.integer("intermediate_size"),
            "eps": fields.number("rms_norm_eps", self.eps),
            "activation": ACTIVATIONS[activation],
            "tied": fields.flag("tie_word_embeddings", self.tied),
            "windows": (0,) * layers,
            "sparse": (False,) * layers,
            "scale": head_dim**-0.5,
            "eos": fields.ids("eos_token_id"),
            "bos": bos[0] if bos else None,
        }
        full, local = self._ropes(fields, head_dim, positions)
        values = common | self.special(fields, layers)
        _check_layer_types(fields, values["windows"])
        fields.settle(*self.ignored)
        refuse_unread(fields, architecture)
        rotates = values.pop("rotates", (True,) * layers)
        values["ropes"] = tuple(
            (local if window else full) if rotated else None
            for window, rotated in zip(values["windows"], rotates, strict=True)
        )
        return DecoderConfig(**values, context=max(full.context(positions), local.context(positions)))

    def _ropes(self, fields: Fields, head_dim: int, positions: int) -> tuple[Rope, Rope]:
        """Return the embeddings of full-attention and of sliding-window layers."""
        trained = fields.get("original_max_position_embeddings")
        original = None if trained is None else fields.integer("original_max_position_embeddings")
        partial = fields.optional("partial_rotary_factor")
        partial = self.share if partial is None else partial

        def read(section: Fields, theta: float) -> Rope:
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
            return (rope := read(section, theta)), rope
        if section.data and older == nested:
            raise fields.wrong(key, f"{FULL} and {SLIDING} in rope_parameters, or one rope_scaling")
        if older and fields.data.get("rope_parameters"):
            raise fields.wrong("rope_parameters", "nothing beside rope_scaling")
        local = section.section(SLIDING) if nested else Fields(fields.path, {}, f"{key}.")
        local_theta = self.local_theta
        if self.local_key is not None:
            local_theta = fields.number(self.local_key, local_theta)
        return read(section.section(FULL) if nested else section, theta), read(local, local_theta)


def _check_layer_types(fields: Fields, windows: tuple[int, ...]) -> None:
    """Raise `ModelError` for layer types that a family does not read and that say otherwise."""
    kinds = fields.items("layer_types", len(windows))
    found = [SLIDING if window else FULL for window in windows]
    if kinds is not None and kinds != found:
        raise fields.wrong("layer_types", f"{found}, as the family's other fields say")


def _windows(fields: Fields, window: int, kinds: list[str]) -> tuple[int, ...]:
    """Return each layer's window; "layer_types" goes before the family's own `kinds`."""
    kinds = fields.items("layer_types", len(kinds)) or kinds
    if not all(kind in (FULL, SLIDING) for kind in kinds):
        raise fields.wrong("layer_types", f"{FULL} and {SLIDING}")
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def _window(fields: Fields, default: int) -> int:
    """Return the width of sliding windows, 0 where null switches them off."""
    if fields.data.get("sliding_window", default) is None:
        fields.settle("sliding_window")
        return 0
    return default if "sliding_window" not in fields.data else fields.integer("sliding_window")


def _asked_window(fields: Fields, default: int) -> int:
    """Return the width of sliding windows where `use_sliding_window` asks for them, else 0."""
    fields.settle("sliding_window", "max_window_layers")
    return _window(fields, default) if fields.flag("use_sliding_window", False) else 0


def _biases(fields: Fields) -> dict[str, Any]:
    attention = fields.flag("attention_bias", False)
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": fields.flag("mlp_bias", False)}


def _sliding(default: int) -> Callable[[Fields, int], dict[str, Any]]:
    """One window for all layers, `default` where config.json has no such key."""
    return lambda fields, layers: {"windows": (_window(fields, default),) * layers}


def _qwen_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    window = _asked_window(fields, 4096)
    first = fields.integer("max_window_layers", 28, minimum=0)
    kinds = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    return _windows(fields, window, kinds)


def _qwen2(fields: Fields, layers: int) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": _qwen_windows(fields, layers)}


def _qwen3(fields: Fields, layers: int) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    windows = _qwen_windows(fields, layers)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "windows": windows}


def _smollm3(fields: Fields, layers: int) -> dict[str, Any]:
    interval = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.items("no_rope_layers", layers) or [
        int((layer + 1) % interval != 0) for layer in range(layers)
    ]
    window = _asked_window(fields, 0)
    kinds = [SLIDING if window and not rotated else FULL for rotated in rotates]
    return _biases(fields) | {"rotates": tuple(rotates), "windows": _windows(fields, window, kinds)}


def _gemma(fields: Fields, layers: int) -> dict[str, Any]:
    if fields.get("use_bidirectional_attention"):
        raise fields.wrong("use_bidirectional_attention", "false: a decoder's attention is causal")
    bias = fields.flag("attention_bias", False)
    scale = fields.integer("hidden_size") ** 0.5
    return {"qkv_bias": bias, "o_bias": bias, "norm_offset": 1.0, "embedding_scale": scale}


def _sliding_gemma(fields: Fields, layers: int, pattern: int) -> dict[str, Any]:
    kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    window = _window(fields, 4096)
    if not window:
        raise fields.wrong("sliding_window", "an integer of 1 or more")
    return _gemma(fields, layers) | {
        "windows": _windows(fields, window, kinds),
        "scale": fields.positive("query_pre_attn_scalar", 256) ** -0.5,
    }


def _cap(fields: Fields, key: str, default: float) -> float:
    """Return a soft cap: the family's own where the key is absent, none (0) where it is null."""
    cap = fields.optional(key)
    if cap is not None and cap <= 0:
        raise fields.wrong(key, "a number above 0, or null for none")
    return default if key not in fields.data else cap or 0.0


def _gemma2(fields: Fields, layers: int) -> dict[str, Any]:
    return _sliding_gemma(fields, layers, 2) | {
        "attention_soft_cap": _cap(fields, "attn_logit_softcapping", 50.0),
        "logit_soft_cap": _cap(fields, "final_logit_softcapping", 30.0),
    }


def _gemma3(fields: Fields, layers: int) -> dict[str, Any]:
    return _sliding_gemma(fields, layers, fields.integer("sliding_window_pattern", 6)) | {
        "qk_norm": "head",
        "logit_soft_cap": _cap(fields, "final_logit_softcapping", 0.0),
    }


def _seed_oss(fields: Fields, layers: int) -> dict[str, Any]:
    return {
        "qkv_bias": fields.flag("attention_bias", True),
        "o_bias": fields.flag("attention_out_bias", False),
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def _cwm(fields: Fields, layers: int) -> dict[str, Any]:
    kinds = [FULL if layer % 4 == 0 else SLIDING for layer in range(layers)]
    return {
        "mlp_bias": fields.flag("mlp_bias", False),
        "windows": _windows(fields, _window(fields, 8192), kinds),
    }


def _ernie(fields: Fields, layers: int) -> dict[str, Any]:
    bias = fields.flag("use_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bias, "interleaved": True}


def _glm(fields: Fields, layers: int) -> dict[str, Any]:
    return {"qkv_bias": fields.flag("attention_bias", True), "interleaved": True}


def _olmo2(fields: Fields, layers: int) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": "projection"}


def _olmo3(fields: Fields, layers: int) -> dict[str, Any]:
    kinds = [FULL if (layer + 1) % 4 == 0 else SLIDING for layer in range(layers)]
    return _olmo2(fields, layers) | {"windows": _windows(fields, _window(fields, 4096), kinds)}


def _exaone4(fields: Fields, layers: int) -> dict[str, Any]:
    window = _window(fields, 4096)
    pattern = fields.data.get("sliding_window_pattern", 4)
    fields.settle("sliding_window_pattern")
    if "layer_types" not in fields.data and window and (type(pattern) is not int or pattern < 1):
        raise fields.wrong("sliding_window_pattern", "an integer of 1 or more, or 'layer_types'")
    every = pattern if type(pattern) is int and window else 1
    kinds = [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]
    windows = _windows(fields, window, kinds)
    return {"qk_norm": "head", "windows": windows, "rotates": tuple(not window or w > 0 for w in windows)}


def _granite(fields: Fields, layers: int) -> dict[str, Any]:
    return _biases(fields) | {
        "scale": fields.number("attention_multiplier", 1.0),
        "embedding_scale": fields.number("embedding_multiplier", 1.0),
        "residual_scale": fields.number("residual_multiplier", 1.0),
        "logit_scale": 1 / fields.positive("logits_scaling", 1.0),
    }


def _experts(fields: Fields, *, feed_forward: str, normalize: bool) -> ExpertsConfig:
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


def _mixtral(fields: Fields, layers: int) -> dict[str, Any]:
    return _sliding(0)(fields, layers) | {
        "experts": _experts(fields, feed_forward="intermediate_size", normalize=True),
        "sparse": (True,) * layers,
    }


def _qwen3_moe(fields: Fields, layers: int) -> dict[str, Any]:
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers", "a list of layers")
    window = _asked_window(fields, 4096)
    normalize = fields.flag("norm_topk_prob", False)
    bias = fields.flag("attention_bias", False)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": "head",
        "windows": (window,) * layers,
        "experts": _experts(fields, feed_forward="moe_intermediate_size", normalize=normalize),
        "sparse": tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    }


def _gpt_oss(fields: Fields, layers: int) -> dict[str, Any]:
    for key, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if fields.number(key, value) != value:
            raise fields.wrong(key, str(value))
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.wrong("hidden_act", "silu")
    bias = fields.flag("attention_bias", True)
    kinds = [SLIDING if (layer + 1) % 2 else FULL for layer in range(layers)]
    experts = _experts(fields, feed_forward="intermediate_size", normalize=True)
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "sinks": True,
        "windows": _windows(fields, _window(fields, 128), kinds),
        "activation": "clamped_swiglu",
        "experts": replace(experts, router_bias=True, linear_bias=True),
        "sparse": (True,) * layers,
    }


def _deepseek_experts(fields: Fields) -> ExpertsConfig:
    """Experts as DeepSeek V3 chooses them: by sigmoids, a bias and groups, beside a shared one."""
    count, groups = fields.integer("n_routed_experts"), fields.integer("n_group", 1)
    chosen, chosen_groups = fields.integer("num_experts_per_tok"), fields.integer("topk_group", 1)
    if count % groups or chosen_groups > groups:
        raise fields.wrong("n_group", f"a divisor of the {count} experts, and at least topk_group")
    if chosen > count // groups * chosen_groups:
        raise fields.wrong("num_experts_per_tok", "at most the experts of the chosen groups")
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
        scale=fields.positive("routed_scaling_factor", 1.0),
        shared=inner * fields.integer("n_shared_experts", 1),
    )


def _glm4_moe(fields: Fields, layers: int) -> dict[str, Any]:
    dense = fields.integer("first_k_dense_replace", 1, minimum=0)
    return {
        "qkv_bias": fields.flag("attention_bias", False),
        "qk_norm": "head" if fields.flag("use_qk_norm", False) else "none",
        "experts": _deepseek_experts(fields),
        "sparse": tuple(layer >= dense for layer in range(layers)),
    }


def _olmoe(fields: Fields, layers: int) -> dict[str, Any]:
    normalize = fields.flag("norm_topk_prob", False)
    return _olmo2(fields, layers) | {
        "clip_qkv": fields.optional("clip_qkv"),
        "experts": _experts(fields, feed_forward="intermediate_size", normalize=normalize),
        "sparse": (True,) * layers,
    }


GEMMA_NAMES = Names(
    post_attention="post_attention_layernorm",
    pre_mlp="pre_feedforward_layernorm",
    post_mlp="post_feedforward_layernorm",
)

POST_NAMES = Names(
    pre_attention=None,
    post_attention="post_attention_layernorm",
    pre_mlp=None,
    post_mlp="post_feedforward_layernorm",
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(special=lambda fields, layers: _biases(fields)),
    "MistralForCausalLM": Family(special=_sliding(4096), kv_heads=8),
    "Qwen2ForCausalLM": Family(special=_qwen2, kv_heads=32, ignored=("attention_bias",)),
    "Qwen3ForCausalLM": Family(special=_qwen3, head_dim=128, kv_heads=32),
    "SmolLM3ForCausalLM": Family(special=_smollm3, theta=2_000_000.0, tied=True, kv_heads=4),
    "GemmaForCausalLM": Family(
        special=_gemma,
        tied=True,
        head_dim=256,
        kv_heads=16,
        ignored=("hidden_activation",),
        default_activation="gelu_pytorch_tanh",
    ),
    "Gemma2ForCausalLM": Family(
        special=_gemma2,
        names=GEMMA_NAMES,
        tied=True,
        head_dim=256,
        kv_heads=4,
        ignored=("hidden_act",),
        activation="hidden_activation",
        default_activation="gelu_pytorch_tanh",
    ),
    "Gemma3ForCausalLM": Family(
        special=_gemma3,
        names=GEMMA_NAMES,
        theta=1_000_000.0,
        local_theta=10_000.0,
        tied=True,
        head_dim=256,
        kv_heads=4,
        ignored=("hidden_act",),
        activation="hidden_activation",
        default_activation="gelu_pytorch_tanh",
    ),
    "Phi3ForCausalLM": Family(
        special=_sliding(0),
        names=Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        eps=1e-5,
        rope_names={"su": "longrope", "yarn": "longrope"},
        partial=True,
        original=4096,
    ),
    "CwmForCausalLM": Family(
        special=_cwm,
        theta=1_000_000.0,
        eps=1e-5,
        head_dim=128,
        kv_heads=8,
        default_rope={
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
        ignored=("attention_bias",),
    ),
    "Ernie4_5ForCausalLM": Family(
        special=_ernie, theta=500_000.0, eps=1e-5, tied=True, head_dim=128, kv_heads=2
    ),
    "GlmForCausalLM": Family(
        special=_glm,
        names=Names(gate_up=("mlp.gate_up_proj",)),
        eps=1.5625e-7,
        head_dim=128,
        kv_heads=2,
        partial=True,
        share=0.5,
    ),
    "Glm4ForCausalLM": Family(
        special=_glm,
        names=Names(
            post_attention="post_self_attn_layernorm",
            pre_mlp="post_attention_layernorm",
            post_mlp="post_mlp_layernorm",
            gate_up=("mlp.gate_up_proj",),
        ),
        eps=1.5625e-7,
        head_dim=128,
        kv_heads=2,
        partial=True,
        share=0.5,
    ),
    "Glm4MoeForCausalLM": Family(
        special=_glm4_moe, eps=1e-5, kv_heads=8, partial=True, share=0.5, ignored=("num_mtp_layers",)
    ),
    "Olmo2ForCausalLM": Family(special=_olmo2, names=POST_NAMES, eps=1e-5),
    "Olmo3ForCausalLM": Family(
        special=_olmo3,
        names=POST_NAMES,
        eps=1e-5,
        theta=500_000.0,
        local_theta=500_000.0,
        local_key=None,
    ),
    "Exaone4ForCausalLM": Family(
        special=_exaone4, names=POST_NAMES, eps=1e-5, kv_heads=32, ignored=("attention_bias",)
    ),
    "GraniteForCausalLM": Family(special=_granite),
    "MixtralForCausalLM": Family(
        special=_mixtral,
        names=Names(
            router="block_sparse_moe.gate",
            expert_gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
            expert_down="block_sparse_moe.experts.{}.w2",
        ),
        theta=1_000_000.0,
        eps=1e-5,
        kv_heads=8,
    ),
    "Qwen3MoeForCausalLM": Family(special=_qwen3_moe, kv_heads=4),
    "OlmoeForCausalLM": Family(special=_olmoe, eps=1e-5),
    "GptOssForCausalLM": Family(
        special=_gpt_oss,
        names=Names(
            router="mlp.router",
            expert_gate_up=("mlp.experts.gate_up_proj",),
            expert_down="mlp.experts.down_proj",
        ),
        theta=150_000.0,
        eps=1e-5,
        head_dim=64,
        kv_heads=8,
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        ignored=("initial_context_length", "experts_per_token"),
    ),
    "SeedOssForCausalLM": Family(special=_seed_oss, head_dim=128, kv_heads=8),
}
"""Architecture, as config.json names it, → family."""


def read_decoder_config(folder: Path) -> DecoderConfig:
    """Return the decoder of a Hugging Face folder.

    Raises what `decoder_config` does, and `ModelError` for a config.json that is missing or no JSON.
    """
    from torchwright.hub.folder import read_config

    return decoder_config(read_config(folder), folder / "config.json")


def decoder_config(data: dict[str, Any], path: Path | str) -> DecoderConfig:
    """Return the decoder that the fields of a config.json describe; errors name `path`.

    Raises `UnsupportedArchitecture` for a model that no family here describes. Raises `ModelError`, naming file and
    key, for fields that are missing, contradictory, not honoured, or of an unsupported checkpoint format.
    """
    from torchwright.hub.checkpoint import check_format

    architecture, data = recognize(data, path)
    check_format(path, data)
    return FAMILIES[architecture].read(architecture, Fields(path, data))
