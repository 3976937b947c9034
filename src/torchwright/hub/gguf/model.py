"""A GGUF file as a language model: its sizes, and the metadata that its architecture's keys hold."""

from __future__ import annotations

from torchwright.core.errors import ModelError
from torchwright.hub.fields import Fields
from torchwright.hub.gguf.header import GgufTensor, Header


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
        drafting = keys.integer("nextn_predict_layers", 0, minimum=0)
        if drafting >= self.blocks:
            raise keys.wrong("nextn_predict_layers", f"fewer than the {self.blocks} blocks")
        self.layers = self.blocks - drafting
        """Without those that predict tokens ahead, which come last."""
        self.width = keys.integer("embedding_length")
        self.heads = keys.integer("attention.head_count")
        self.kv_heads = keys.integer("attention.head_count_kv", self.heads)
        self.head_dim = keys.integer("attention.key_length", max(1, self.width // self.heads))
        self.context = keys.integer("context_length")
        self.experts = keys.integer("expert_count", 0, minimum=0)

    def has(self, name: str) -> bool:
        """Check whether the first layer that may have a tensor has it."""
        return any(f"blk.{layer}.{name}" in self.tensors for layer in (0, self.layers - 1))

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
