"""A GGUF file as a language model: its sizes, and the metadata that its architecture's keys hold."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchwright.core.errors import ModelError
from torchwright.hub.fields import Fields
from torchwright.hub.gguf.header import GgufTensor, Header

IN_A_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([\w.]+)")


@dataclass(frozen=True, kw_only=True)
class States:
    """The sizes of recurrent layers that have a matrix as state for each head (`ssm.*`)."""

    key_heads: int
    heads: int
    key_dim: int
    head_dim: int
    width: int
    """Tokens that the convolution sees."""


class GgufModel:
    """The sizes of a file's model; `keys` are those of its architecture, read without the name in front.

    Raises `ModelError`, naming file and key, for a size that is missing or wrong.
    """

    def __init__(self, header: Header, architecture: str) -> None:
        prefix = f"{architecture}."
        own = {
            key.removeprefix(prefix): value
            for key, value in header.metadata.items()
            if key.startswith(prefix)
        }
        self.path, self.tensors, self.architecture = header.path, header.tensors, architecture
        self.keys = keys = Fields(header.path, own, prefix)
        self.blocks = keys.integer("block_count")
        if self.blocks > len(header.tensors):
            # Lists of one entry for each block would take the memory that a wrong number asks for.
            raise keys.wrong("block_count", f"at most {len(header.tensors)}: every block has tensors")
        drafting = keys.integer("nextn_predict_layers", 0, minimum=0)
        if drafting >= self.blocks:
            raise keys.wrong("nextn_predict_layers", f"fewer than the {self.blocks} blocks")
        self.layers = self.blocks - drafting
        """Without those that predict tokens ahead, which come last."""
        self.width = keys.integer("embedding_length")
        self.heads = keys.integer("attention.head_count")
        self.kv_by_layer = self._kv_by_layer()
        """Heads of keys in each layer, 0 in a recurrent one; empty where one number holds for all."""
        self.kv_heads = max(self.kv_by_layer, default=0) or keys.integer(
            "attention.head_count_kv", self.heads
        )
        self.recurrent: tuple[bool, ...] = ()
        """Which layers are recurrent, set for families that have such layers."""
        self.head_dim = keys.integer("attention.key_length", max(1, self.width // self.heads))
        self.context = keys.integer("context_length")
        self.experts = keys.integer("expert_count", 0, minimum=0)
        matches = (IN_A_LAYER.fullmatch(name) for name in header.tensors)
        self._in_layers = frozenset(match[2] for match in matches if match and int(match[1]) < self.layers)

    def _kv_by_layer(self) -> tuple[int, ...]:
        key = "attention.head_count_kv"
        if not isinstance(self.keys.data.get(key), list):
            return ()
        allowed = f"{self.blocks} times the same number, or 0 for a recurrent layer"
        counts = self.keys.integers(key, allowed)
        if len(counts) != self.blocks or len(set(counts[: self.layers]) - {0}) != 1 or min(counts) < 0:
            raise self.keys.wrong(key, allowed)
        return counts[: self.layers]

    def has(self, name: str) -> bool:
        """Check whether a layer has a tensor."""
        return name in self._in_layers

    def biased(self, *stems: str) -> bool:
        """Check whether these tensors of a layer have biases; query, key and value may be one tensor.

        Raises `ModelError` if some have one and others none, which no family here computes.
        """
        if self.has("attn_qkv.weight"):
            fused = {"attn_q": "attn_qkv", "attn_k": "attn_qkv", "attn_v": "attn_qkv"}
            stems = tuple(dict.fromkeys(fused.get(stem, stem) for stem in stems))
        found = [stem for stem in stems if self.has(f"{stem}.bias")]
        if found and len(found) < len(stems):
            raise ModelError(
                f"{self.path} has biases for some layers alone",
                found=", ".join(found),
                allowed=f"biases for {', '.join(stems)}, or for none of them",
            )
        return bool(found)

    def tensor(self, name: str, extents: int) -> GgufTensor:
        stored = self.tensors.get(name)
        if stored is None or len(stored.shape) != extents:
            raise ModelError(
                f"{self.path} lacks the tensor '{name}'",
                found=f"{len(self.tensors)} tensors" if stored is None else str(list(stored.shape)),
                next="take a file that holds a whole language model",
            )
        return stored

    def states(self) -> States:
        """Return the sizes of recurrent layers."""
        keys = self.keys
        groups, heads = keys.integer("ssm.group_count"), keys.integer("ssm.time_step_rank")
        inner = keys.integer("ssm.inner_size")
        if heads % groups:
            raise keys.wrong("ssm.time_step_rank", f"a multiple of ssm.group_count, {groups}")
        if inner % heads:
            raise keys.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank, {heads}")
        return States(
            key_heads=groups,
            heads=heads,
            key_dim=keys.integer("ssm.state_size"),
            head_dim=inner // heads,
            width=keys.integer("ssm.conv_kernel", minimum=2),
        )
