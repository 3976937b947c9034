"""A decoder's shape, read from a Hugging Face config.json; `families.py` holds what differs from family to family."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torchwright.decoder.rope import Rope
from torchwright.errors import ModelError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


class UnsupportedArchitecture(ModelError):
    """A model that the native decoder does not know; transformers may."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture-of-experts feed-forward block: each token goes to `chosen` of `count` experts."""

    count: int
    chosen: int
    feed_forward: int
    normalize: bool
    """Whether the chosen experts' weights are scaled to sum to 1."""


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
    """silu or gelu_tanh."""
    tied: bool
    """The output layer is the embedding table."""
    ropes: tuple[Rope | None, ...]
    windows: tuple[int, ...]
    """0 is full attention, else how many last tokens a query sees, itself included."""
    sparse: tuple[bool, ...]
    """Whether a layer's feed-forward block is the mixture of experts."""
    experts: Experts | None = None
    scale: float
    """Attention scores are multiplied by it."""
    qk_norm: str = "none"
    """none, head (one norm for each head) or projection (one norm over all heads together)."""
    norm_offset: float = 0.0
    """Added to norm weights as they are read."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    clip_qkv: float | None = None
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    eos: tuple[int, ...] = ()
    bos: int | None = None

    @property
    def groups(self) -> int:
        """Query heads of one key-value head."""
        return self.heads // self.kv_heads

    def restarts_at(self, prompt_tokens: int, length: int) -> bool:
        """Whether a sequence's cached keys are worthless once it reaches `length`.

        "longrope" turns positions by other angles beyond the trained length. transformers throws the cache away there
        (Phi-3), so that an answer does not depend on where its prompt ended.
        """
        return any(prompt_tokens <= trained == length - 1 for trained in self._restarts)

    @cached_property
    def _restarts(self) -> set[int]:
        return {rope.original for rope in self.ropes if rope and rope.kind == "longrope"}


def read_decoder_config(folder: Path) -> DecoderConfig:
    """The decoder of a Hugging Face folder.

    Raises what `decoder_config` does, and `ModelError` for a config.json that is missing or no JSON.
    """
    from torchwright.hub.folder import read_config

    return decoder_config(read_config(folder), folder / "config.json")


def decoder_config(data: dict[str, Any], path: Path | str) -> DecoderConfig:
    """The decoder that the words of a config.json describe; errors name `path`.

    Raises `UnsupportedArchitecture` for a model that no family here describes, and `ModelError`, naming file and key,
    for words that are incomplete, contradictory or of a format of checkpoint that is not read here.
    """
    from torchwright.decoder.families import FAMILIES
    from torchwright.hub.checkpoint import check_format
    from torchwright.hub.fields import Fields

    known = [name for name in data.get("architectures") or [] if name in FAMILIES]
    if not known:
        raise UnsupportedArchitecture(
            f"the native decoder does not know the model of {path}",
            found=", ".join(data.get("architectures") or []) or "no 'architectures'",
            allowed=", ".join(sorted(FAMILIES)),
            next="`torchwright optimize` runs other models on transformers' own code",
        )
    check_format(path, data)
    return FAMILIES[known[0]].read(known[0], Fields(path, data))
