"""A step as one operator, from token ids to logits: a decoder over one cache, described to the kernels once.

Results are bitwise those of the decoder's own calls: both run the same kernels on the same rows in the same order. A
layer's `unplanned` says why it has no plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.models.decoder.batch import Batch
from torchwright.models.decoder.cache import LayerCache
from torchwright.models.decoder.config import DecoderConfig
from torchwright.models.decoder.layer_inputs import TokenInputs
from torchwright.models.decoder.pages import LayerPages
from torchwright.models.decoder.program import Cells, Program, no_kernels, not_packed
from torchwright.models.decoder.rotary_cache import RotaryAngles
from torchwright.models.decoder.states import LayerStates

MOST_ROWS = 64
"""Tokens of a step that takes the plan: more spend their time in products, and a plan keeps memory for its rows."""


Kept = LayerPages | LayerStates | tuple[LayerPages, LayerStates]
"""A layer's part of the cache: keys and values, states, or both."""


@dataclass(frozen=True)
class StepModules:
    """The parts that a step computes with, in addition to the cache."""

    embedding_VE: torch.Tensor
    """In the type of the residual stream."""
    embedding_scale: float
    layers: nn.ModuleList
    rotary_of_layer: Sequence[int]
    """Each layer's rotary embedding, by its index among a step's angles."""
    norm_E: torch.Tensor | None
    head: nn.Module
    positions_PE: torch.Tensor | None = None
    """Added to the embedding at each position."""
    inputs: TokenInputs | None = None
    memory: Sequence[LayerPages] | None = None
    """Pages that the layers attend to in addition to the cache."""


class DecodePlan:
    """The plan of a decoder over one cache, as described to the kernels."""

    def __init__(
        self, parts: StepModules, config: DecoderConfig, cache: LayerCache, kept: Sequence[Kept]
    ) -> None:
        self._parts = parts
        places = [
            (owner._modules, name, part)
            for module in (parts.layers, *([parts.inputs] if parts.inputs else []))
            for owner in module.modules()
            for name, part in owner._modules.items()
        ]
        self._owners, self._names, self._modules = zip(*places, strict=True)
        self._hooks = hooks(parts.layers) + ([] if parts.inputs is None else hooks(parts.inputs))
        self._head_hooks = hooks(parts.head)
        self._has_head = isinstance(parts.head, PackedLinear)
        self._observed: tuple[int, ...] = ()
        self.unplanned = _unplanned(parts, cache)
        """Why these layers cannot run as one operator, None where they can."""
        if self.unplanned is None:
            self.native = described(parts, config, kept)[0].native

    def holds(
        self,
        embedding_VE: torch.Tensor,
        layers: nn.ModuleList,
        head: nn.Module,
        memory: Sequence[LayerPages] | None,
    ) -> bool:
        """Check whether these are the plan's parts: a technique may have replaced some since."""
        parts = self._parts
        return (
            embedding_VE is parts.embedding_VE
            and layers is parts.layers
            and head is parts.head
            and memory is parts.memory
            and all(map(is_, map(dict.get, self._owners, self._names), self._modules))
        )

    @property
    def watched(self) -> bool:
        """Check whether a hook watches a part of a layer, which the operator does not call."""
        return any(self._hooks)

    @property
    def answers(self) -> bool:
        """Check whether the plan has the output layer, and no hook watches it."""
        return self._has_head and not any(self._head_hooks)

    def hidden(self, angles_by_rotary: Iterable[RotaryAngles], batch: Batch) -> torch.Tensor:
        """Hidden states (T, E) after the final norm."""
        self._observe(batch)
        return self.native.hidden(*_step(angles_by_rotary, batch))

    def logits(
        self, angles_by_rotary: Iterable[RotaryAngles], batch: Batch, rows_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output layer's numbers (N, V) of these rows (int64), and the largest of each `PANEL`; float32.

        A panel with a NaN has NaN as its largest."""
        self._observe(batch)
        return self.native.logits(*_step(angles_by_rotary, batch), rows_N)

    def _observe(self, batch: Batch) -> None:
        """Tell the kernels which layers' inputs a batch wants, when these have changed."""
        if batch.features is not None and batch.features.layers != self._observed:
            self._observed = batch.features.layers
            self.native.observe(list(self._observed))


plans: WeakKeyDictionary[LayerCache, DecodePlan] = WeakKeyDictionary()
"""The plan of every cache that a step ran over; outside the caches, so that a copy has a plan of its own."""


def _unplanned(parts: StepModules, cache: LayerCache) -> str | None:
    if fault := no_kernels(parts.embedding_VE):
        return fault
    if not cache.layers:
        return "no layer keeps keys and values"
    layers: list[Any] = list(parts.layers)
    inputs = None if parts.inputs is None else not_packed(parts.inputs.project)
    return inputs or next((layer.unplanned for layer in layers if layer.unplanned), None)


def described(parts: StepModules, config: DecoderConfig, kept: Sequence[Kept]) -> tuple[Program, Cells]:
    """Describe a step, from token ids to the output layer; the cells hold what this layer reads."""
    program, delta = Program(parts.embedding_VE, config.eps), None
    program.embed(parts.embedding_VE, parts.embedding_scale, config.placeholders, config.padding)
    if parts.positions_PE is not None:
        program.places(parts.positions_PE)
    if parts.inputs is not None:
        program.inputs = parts.inputs.plan(program)
    layers: list[Any] = list(parts.layers)
    memory = parts.memory or [None] * len(layers)
    for layer, rotary, own, remembered in zip(layers, parts.rotary_of_layer, kept, memory, strict=True):
        delta = layer.plan(program, delta, rotary, own, *([] if remembered is None else [remembered]))
    out = program.join(delta, parts.norm_E)
    program.note(config.layers, out)
    program.finish(out, parts.head)
    return program, out


def _step(angles_by_rotary: Iterable[RotaryAngles], batch: Batch) -> tuple[Any, ...]:
    states = batch.states
    return (
        batch.ids_T,
        [*chain.from_iterable(angles_by_rotary)],
        batch.slots_T,
        batch.block_tables_BP,
        batch.query_starts,
        batch.context_lens_B,
        [] if batch.memory is None else [batch.memory.block_tables_BP, batch.memory.lengths_B],
        [] if states is None else [states.slots_B, states.mark_rows_N, states.mark_slots_N],
        None if batch.adapted is None else batch.adapted.native,
        None if batch.features is None else batch.features.values_TF,
    )


def hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Return the tables in which hooks on the module are registered."""
    return [
        watching for part in module.modules() for watching in (part._forward_hooks, part._forward_pre_hooks)
    ]
