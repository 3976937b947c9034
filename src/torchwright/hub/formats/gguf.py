"""The tensors of a GGUF file, under the names that the model has for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from torchwright.core.errors import ModelError
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_object
from torchwright.hub.formats.base import Format
from torchwright.hub.gguf.blocks import BLOCKS
from torchwright.hub.gguf.folder import FILE
from torchwright.hub.gguf.header import GgufTensor, read_gguf
from torchwright.hub.gguf.names import model_names
from torchwright.hub.weight import Grouped, Integers, Plain, Weight

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TURNED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Projections whose rows are in another order in files of Llama, by the number of their heads in config.json."""


class Gguf(Format):
    name = "gguf"

    @classmethod
    def check(cls, settings: Fields) -> None:
        """The file says itself what it holds."""

    def __init__(self, folder: Path, settings: Fields) -> None:
        self.path = folder / FILE
        if not self.path.is_file():
            raise ModelError(f"{folder} has no {FILE}", next="name the *.gguf file itself")
        self._header = read_gguf(self.path)
        self._names = model_names(self._header.tensors, str(self.path))
        self._config = read_object(folder / "config.json")
        self._bytes: torch.Tensor | None = None

    def __str__(self) -> str:
        kinds = Counter(stored.type.name for stored in self._header.tensors.values() if len(stored.shape) > 1)
        return f"GGUF {', '.join(name for name, _ in kinds.most_common())}"

    def names(self) -> Iterable[str]:
        return self._names

    def holds(self, name: str) -> bool:
        return name in self._names and self._stored(name).type.name in BLOCKS

    def where(self, name: str) -> Path:
        return self.path

    def weight(self, name: str) -> Weight:
        stored = self._stored(name)
        order = self._order(name, stored)
        if self._bytes is None:
            self._bytes = torch.from_file(str(self.path), size=self.path.stat().st_size, dtype=torch.uint8)
        flat = self._bytes[stored.begin : stored.begin + stored.bytes]
        if stored.type.name in FLOATS:
            # A copy: a view of another type would have to begin at a multiple of its size.
            plain = flat.clone().view(FLOATS[stored.type.name]).view(stored.shape)
            return Plain(plain if order is None else plain[order])
        if len(stored.shape) != 2:
            raise ModelError(
                f"the tensor '{name}' in {self.path} is {list(stored.shape)} of {stored.type.name}"
            )
        N, K = stored.shape
        blocks = flat.view(N, K // stored.type.numbers, stored.type.bytes)
        read, bits, group = BLOCKS[stored.type.name]

        def part(begin: int, end: int) -> Integers:
            return read(blocks[begin:end] if order is None else blocks[order[begin:end]])

        return Grouped(shape=(N, K), bits=bits, group=group, part=part)

    def close(self) -> None:
        self._bytes = None

    def _stored(self, name: str) -> GgufTensor:
        if name not in self._names:
            raise ModelError(
                f"the weights in {self.path} lack the tensor '{name}'",
                found=f"{len(self._names)} tensors",
                next="take a file that holds a whole language model",
            )
        return self._header.tensors[self._names[name]]

    def _order(self, name: str, stored: GgufTensor) -> torch.Tensor | None:
        """The file's row for each of the model's.

        Llama files turn neighbours of a head together, and models here the two halves: row (half, i) of a head lies at
        (i, half).
        """
        heads = self._config.get(TURNED.get(name.split(".")[-2], ""))
        if self._config.get("model_type") != "llama" or heads is None:
            return None
        if type(heads) is not int or heads < 1 or stored.shape[0] % (2 * heads):
            raise ModelError(
                f"the tensor '{name}' in {self.path} has {stored.shape[0]} rows for {heads} heads"
            )
        return torch.arange(stored.shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()
