"""The tensors of a GGUF file, under the names that the model has for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from torchwright.core.errors import ModelError
from torchwright.hub.fields import Fields
from torchwright.hub.folder import read_object
from torchwright.hub.formats.base import Format
from torchwright.hub.gguf import assemble
from torchwright.hub.gguf.blocks import BLOCKS, FLOAT_BLOCKS
from torchwright.hub.gguf.families import family_of
from torchwright.hub.gguf.folder import FILE
from torchwright.hub.gguf.header import GgufTensor, read_gguf
from torchwright.hub.gguf.names import Place, places
from torchwright.hub.gguf.recurrent import by_key_head, in_the_model, value_heads
from torchwright.hub.weight import Floats, FloatStack, Grouped, Plain, SmallFloats, Weight, Wide

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TURNED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""Projections whose rows may be in another order in the file, by the number of their heads in config.json."""
NORM = "norm.weight"
"""The end of the names of norms, to whose weights the files of some families add a number."""
DELTA, OUTPUT_NORM, OUTPUT = ".linear_attn.", ".linear_attn.norm.weight", ".linear_attn.out_proj.weight"
"""Recurrent layers with value heads, and their tensors whose rows are not those of heads."""


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
        self._family, self._model = family_of(self._header)
        self._places = places(self._header)
        self._config = read_object(folder / "config.json")
        self._bytes: torch.Tensor | None = None

    def __str__(self) -> str:
        kinds = Counter(stored.type.name for stored in self._header.tensors.values() if len(stored.shape) > 1)
        return f"GGUF {', '.join(name for name, _ in kinds.most_common())}"

    def names(self) -> Iterable[str]:
        return self._places

    def holds(self, name: str) -> bool:
        return (
            name in self._places and self._header.tensors[self._places[name].tensor].type.name not in FLOATS
        )

    def where(self, name: str) -> Path:
        return self.path

    def weight(self, name: str) -> Weight:
        place = self._place(name)
        stored = self._header.tensors[place.tensor]
        if place.by_expert:
            return self._by_expert(place)
        if place.by_head:
            return self._by_head(place)
        if place.joined:
            return self._joined(place)
        begin, end = place.rows or (0, stored.shape[0])
        if place.rows is None and len(stored.shape) > 2:
            raise ModelError(
                f"the tensor '{name}' in {self.path} is {list(stored.shape)}", allowed="a matrix"
            )
        found = self._rows(stored, begin, end, self._order(name, end - begin))
        if self._family.tiled and name.endswith(OUTPUT):
            order_K = value_heads(self._model.states(), found.shape[-1])
            return found if order_K is None else assemble.columns(found, order_K)
        if self._family.norm_shift and name.endswith(NORM) and not name.endswith(OUTPUT_NORM):
            return Plain(found.rows(0, end - begin).float() - self._family.norm_shift)
        return self._changed(name, place, found) if isinstance(found, Plain) else found

    def _changed(self, name: str, place: Place, found: Plain) -> Plain:
        """A tensor whose numbers or shape the model has in another form than a file."""
        changed = in_the_model(name, found.tensor)
        if changed is None:
            return found
        if not bool(changed.isfinite().all()):
            raise ModelError(f"the tensor '{place.tensor}' in {self.path} holds numbers that cannot be used")
        return Plain(changed)

    def close(self) -> None:
        self._bytes = None

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise ModelError(
                f"the weights in {self.path} lack the tensor '{name}'",
                found=f"{len(self._places)} tensors",
                next="take a file that holds a whole language model",
            )
        return self._places[name]

    def _by_expert(self, place: Place) -> Weight:
        """All experts' matrices as one tensor (X, K, N), or their biases (X, N), dequantized as they are asked for."""
        stored = [self._header.tensors[name] for name in (place.tensor, place.partner) if name is not None]
        X, N, *K = stored[0].shape
        if K and all(tensor.type.name in FLOAT_BLOCKS for tensor in stored):
            return self._float_stack(stored)
        each = N if K else 1

        def part(begin: int, end: int) -> torch.Tensor:
            count = end - begin
            wholes = [self._rows(tensor, begin * each, end * each, None) for tensor in stored]
            rows = [whole.rows(0, count * each).reshape(count, N, *K) for whole in wholes]
            together = torch.stack(rows, dim=2).flatten(1, 2)
            return together.transpose(1, 2) if K else together

        return Wide((X, *K, N * len(stored)), part)

    def _float_stack(self, stored: list[GgufTensor]) -> FloatStack:
        """All experts' matrices of small floats; rows of partners alternate."""
        X, N, K = stored[0].shape

        def part(expert: int) -> SmallFloats:
            each = [self._rows(tensor, expert * N, (expert + 1) * N, None) for tensor in stored]
            parts = [floats.part(0, N) for floats in each if isinstance(floats, Floats)]
            return SmallFloats(
                codes_NK=torch.stack([floats.codes_NK for floats in parts], 1).flatten(0, 1),
                scales_NG=torch.stack([floats.scales_NG for floats in parts], 1).flatten(0, 1),
                bits=parts[0].bits,
            )

        _, bits, group = FLOAT_BLOCKS[stored[0].type.name]
        return FloatStack(shape=(X, K, N * len(stored)), bits=bits, group=group, part=part)

    def _by_head(self, place: Place) -> Weight:
        """The keys (P, R) and values (V, R) of each head below each other, from keys (H, R, P) and values (H, V, R)."""
        assert place.partner
        keys, values = (self._header.tensors[name] for name in (place.tensor, place.partner))
        (H, R, P), V = keys.shape, values.shape[1]

        def whole() -> torch.Tensor:
            keys_HRP = self._rows(keys, 0, H * R, None).rows(0, H * R).view(H, R, P)
            values_HVR = self._rows(values, 0, H * V, None).rows(0, H * V).view(H, V, R)
            return torch.cat([keys_HRP.transpose(1, 2), values_HVR], dim=1).flatten(0, 1)

        return Wide((H * (P + V), R), lambda begin, end: whole()[begin:end])

    def _joined(self, place: Place) -> Weight:
        """A tensor with its partner's rows below, in each expert if there are several."""
        stored = [self._header.tensors[name] for name in (place.tensor, place.partner) if name is not None]
        kinds = [tensor.type.name for tensor in stored]
        if len(stored[0].shape) == 2:
            whole = assemble.below([self._rows(tensor, 0, tensor.shape[0], None) for tensor in stored], kinds)
            if not place.tensor.endswith(".attn_qkv.weight"):
                return whole
            # Gates below queries, keys and values; the model has all four by key head.
            order_N = by_key_head(self._model.states(), whole.shape[0])
            return whole if order_N is None else assemble.rows(whole, order_N)
        X, N, K = stored[0].shape

        def part(begin: int, end: int) -> torch.Tensor:
            wholes = [self._rows(tensor, begin * N, end * N, None) for tensor in stored]
            count = end - begin
            return torch.cat([whole.rows(0, count * N).view(count, N, K) for whole in wholes], dim=1)

        return Wide((X, N * len(stored), K), part)

    def _rows(self, stored: GgufTensor, begin: int, end: int, order: torch.Tensor | None) -> Weight:
        """Rows of a tensor, counted over all of its matrices, in the order that the model has them."""
        row = stored.shape[1:][-1:]
        K, N = math.prod(row), end - begin
        size = K // stored.type.numbers * stored.type.bytes
        flat = self._mapped()[stored.begin + begin * size : stored.begin + end * size]
        if stored.type.name in FLOATS:
            # A copy: a view of another type would have to begin at a multiple of its size.
            plain = flat.clone().view(FLOATS[stored.type.name]).view(N, *row)
            return Plain(plain if order is None else plain[order])
        if not row:
            raise ModelError(f"a vector in {self.path} is of {stored.type.name}", allowed=", ".join(FLOATS))
        blocks = flat.view(N, K // stored.type.numbers, stored.type.bytes)

        def take(first: int, last: int) -> torch.Tensor:
            return blocks[first:last] if order is None else blocks[order[first:last]]

        if stored.type.name in FLOAT_BLOCKS:
            floats, bits, group = FLOAT_BLOCKS[stored.type.name]
            return Floats(
                shape=(N, K), bits=bits, group=group, part=lambda begin, end: floats(take(begin, end))
            )
        read, bits, group = BLOCKS[stored.type.name]
        return Grouped(shape=(N, K), bits=bits, group=group, part=lambda first, last: read(take(first, last)))

    def _mapped(self) -> torch.Tensor:
        if self._bytes is None:
            self._bytes = torch.from_file(str(self.path), size=self.path.stat().st_size, dtype=torch.uint8)
        return self._bytes

    def _order(self, name: str, rows: int) -> torch.Tensor | None:
        """The file's row for each of the model's.

        Files of some families turn neighbours of a head together, and models here the two halves: row (half, i) of a
        head lies at (i, half). Others have the value heads of recurrent layers in another order.
        """
        if self._family.tiled and DELTA in name and not name.endswith((OUTPUT_NORM, OUTPUT)):
            return value_heads(self._model.states(), rows)
        heads = self._config.get(TURNED.get(name.split(".")[-2], ""))
        if not self._family.turned or heads is None:
            return None
        if type(heads) is not int or heads < 1 or rows % (2 * heads):
            raise ModelError(f"the tensor '{name}' in {self.path} has {rows} rows for {heads} heads")
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
