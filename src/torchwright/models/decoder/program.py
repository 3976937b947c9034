"""A step described to the compiled kernels, operation by operation.

program = Program(embedding_VE)
with program.scope():                       rooms taken within are free again behind it
    wide = program.linear(mlp.gate_up, program.x)
    product = program.gated("silu", wide)
    program.linear(mlp.down, product, program.delta)

Every operation runs the kernel that a layer's own call runs, on the same rows and in the same order. So the results
are the same bits (`csrc/decode_plan.h`). Cells are numbers of each row of the step, in the residual stream's type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.head_linears import HeadLinears
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.models.decoder.pages import LayerPages

NOT_PACKED = "linear layers of PyTorch"


class Cells(NamedTuple):
    """`width` numbers of each row from `first` on, in a room whose rows are `stride` numbers long."""

    room: int
    first: int
    width: int
    stride: int

    def part(self, first: int, width: int) -> Cells:
        """Return so many of the numbers."""
        return Cells(self.room, self.first + first, width, self.stride)

    def split(self, *widths: int) -> list[Cells]:
        """Return parts that follow each other."""
        starts = [sum(widths[:place]) for place in range(len(widths))]
        return [self.part(start, width) for start, width in zip(starts, widths, strict=True)]


class Program:
    """The operations of a step, as layers add them."""

    def __init__(self, embedding_VE: torch.Tensor, eps: float) -> None:
        """`eps` is that of the norms."""
        native: Any = torch.classes.torchwright.DecodePlan
        self.native, self.dtype, self.eps = native(embedding_VE), embedding_VE.dtype, eps
        self._taken = 0
        self.stream, self.delta, self.x = (self.rows(embedding_VE.shape[1]) for _ in range(3))
        """The residual stream, the output of the last block, and the input of the next."""
        self.inputs: Cells | None = None
        """The inputs of all layers, for layers that have one."""

    def rows(self, width: int) -> Cells:
        """Take a room."""
        self.native.room(self._taken, width)
        self._taken += 1
        return Cells(self._taken - 1, 0, width, width)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Free the rooms that are taken within; others may have been widened."""
        taken = self._taken
        yield
        self._taken = taken

    def embed(self, table_VE: torch.Tensor, factor: float, placeholders: Sequence[int], padding: int) -> None:
        """Let the stream be each token's row, `placeholders` read as `padding` in every table."""
        self.native.read_as(list(placeholders), padding)
        self.lookup(table_VE, factor, self.stream)

    def lookup(self, table_VE: torch.Tensor, factor: float, to: Cells) -> None:
        """Let `to` be each token's row of the table, times a factor."""
        self.native.lookup(table_VE, factor, [*to])

    def places(self, table_PE: torch.Tensor) -> None:
        """Add to the stream what a table has at each position."""
        self.native.places(table_PE, [*self.stream])

    def join(self, delta: Cells | None, norm_E: torch.Tensor | None) -> Cells:
        """Add a block's output (none before the first layer) to the stream; the next block's input (`layers.join`)."""
        if norm_E is not None:
            if delta is None:
                self.norm(norm_E, self.stream, self.x)
            else:
                self.native.join(norm_E, self.eps, [*delta], [*self.stream], [*self.x])
            return self.x
        if delta is not None:
            self.add(self.stream, delta, self.stream)
        return self.stream

    def leave(self, norm_E: torch.Tensor | None, factor: float) -> None:
        """Norm and scale a block's output where its layer does so."""
        if norm_E is not None:
            self.norm(norm_E, self.delta, self.delta)
        if factor != 1:
            self.scale(factor, self.delta)

    def note(self, layer: int, cells: Cells) -> None:
        """Let a step's features have a layer's input; the number of layers stands for the final norm's output."""
        self.native.note(layer, [*cells])

    def norm(self, weight_D: torch.Tensor, source: Cells, to: Cells, eps: float | None = None) -> None:
        """`rms_norm` of each part of the rows that is as wide as the weight."""
        self.native.norm(weight_D, self.eps if eps is None else eps, [*source], [*to])

    def add(self, a: Cells, b: Cells, to: Cells) -> None:
        self.native.add([*a], [*b], [*to])

    def multiply(self, a: Cells, b: Cells, to: Cells) -> None:
        """`b` may be one number a row."""
        self.native.multiply([*a], [*b], [*to])

    def scale(self, factor: float, cells: Cells, to: Cells | None = None) -> None:
        """Multiply by a number, in place where `to` is not given."""
        if factor != 1 or to is not None:
            self.native.scale(factor, [*cells], [*(to or cells)])

    def scale_columns(self, factors_D: torch.Tensor, cells: Cells) -> None:
        """Multiply by a factor for each column, as the stream's type rounds it."""
        self.native.scale_by(factors_D.to(self.dtype).float(), [*cells], [*cells])

    def clamp(self, limit: float, cells: Cells) -> None:
        self.native.clamp(limit, [*cells])

    def copy(
        self,
        source: Cells,
        to: Cells,
        *,
        parts: int = 1,
        steps: tuple[int, int] = (0, 0),
        halves: bool = False,
    ) -> None:
        """Copy parts of a row, so many numbers apart on either side and the last at the end of `source`.

        `halves`: numbers that lie in adjacent pairs are parted, the first of each pair first (`shared.halves`).
        """
        size = source.width - (parts - 1) * steps[0]
        self.native.copy([*source], steps[0], [*to], steps[1], parts, size, halves)

    def gated(self, kind: str, gate_up: Cells) -> Cells:
        """activation(gate) · up, in a room that is taken."""
        to = self.rows(gate_up.width // 2)
        self.native.gated(kind, [*gate_up], [*to])
        return to

    def activate(self, kind: str, cells: Cells, to: Cells | None = None) -> None:
        """In place where `to` is not given."""
        self.native.activate(kind, [*cells], [*(to or cells)])

    def linear(self, linear: nn.Module, x: Cells, to: Cells | None = None, place: int = -1) -> Cells:
        """A packed layer's output, in a room that is taken where `to` is not given; adapters add theirs at `place`."""
        assert isinstance(linear, PackedLinear), NOT_PACKED
        to = to or self.rows(linear.out_features)
        self.native.linear(self.add_linear(linear), [*x], [*to], place)
        return to

    def add_linear(self, linear: PackedLinear) -> int:
        """Return the number of a packed layer among the plan's."""
        return self.native.add_linear(*linear.planned())

    def heads(self, linears: HeadLinears, x: Cells, x_step: int, to: Cells, to_step: int) -> None:
        """Each head by a weight of its own; heads lie so many numbers apart, the last at the end of `x`."""
        self.native.heads(linears.packed, linears.features, [*x], x_step, [*to], to_step)

    def store(
        self,
        qkv: Cells,
        q: Cells,
        pages: LayerPages,
        turn: int,
        *,
        keeps: bool = True,
        norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    ) -> None:
        """`rope_store` of queries, keys and values, or of queries alone; `turn` is the rotary embedding's index."""
        self.native.store([*qkv], [*q], *pages.tensors, keeps, *norms, self.eps, turn)

    def attend(
        self,
        q: Cells,
        to: Cells,
        pages: LayerPages,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        remembers: bool = False,
    ) -> None:
        """`paged_attention`, causal but where a layer `remembers`: then `pages` are those of a memory."""
        tensors = pages.tensors
        self.native.attend([*q], [*to], *tensors, scale, window, soft_cap, bias, sinks, remembers)

    def receive(self, to: Cells) -> None:
        """Let `to` be what a draft's step is given of each row."""
        self.native.receive([*to])

    def finish(self, out: Cells, head: nn.Module) -> None:
        """End the program with the final norm's output; a packed `head` becomes a part."""
        self.native.finish([*out], self.add_linear(head) if isinstance(head, PackedLinear) else None)

    def carry(self, state: Cells, ids_D: torch.Tensor) -> None:
        """End a draft's program: `state` is given to its next step, and the head's outputs are the tokens `ids_D`."""
        self.native.carry([*state], ids_D)


def no_kernels(embedding_VE: torch.Tensor) -> str | None:
    """Return why compiled kernels take no model of its embedding's type and device, None where they do."""
    dtype, device = embedding_VE.dtype, embedding_VE.device
    if ops.on(device, dtype) is ops.native:
        return None
    return f"there are no compiled kernels for {dtype} on {device.type}"


def not_packed(*linears: nn.Module | None) -> str | None:
    """Return why a program has no place for one of these, None where it has."""
    packed = all(linear is None or isinstance(linear, PackedLinear) for linear in linears)
    return None if packed else NOT_PACKED
