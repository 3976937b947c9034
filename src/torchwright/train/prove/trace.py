"""A step's values, one by one, in the order of computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchwright.train.model import Transformer
from torchwright.train.model.blocks import Attention, FeedForward, MixtureOfExperts, RMSNorm
from torchwright.train.model.fill import whole
from torchwright.train.model.latent import LatentAttention
from torchwright.train.model.layer_inputs import OwnInput, QueryAttention
from torchwright.train.model.recurrent import RecurrentMixer
from torchwright.train.parallel.stages import Staged

MIXERS = Attention | LatentAttention | QueryAttention | RecurrentMixer
WATCHED = nn.Embedding | nn.Linear | RMSNorm | MIXERS | FeedForward | MixtureOfExperts | OwnInput


@dataclass
class Trace:
    """A run's values in the order in which steps compute them.

    ids, labels, positions (in rows of several documents), forward/MODULE.input, forward/MODULE, loss, backward/MODULE
    and backward/MODULE.input, gradient/PARAMETER, load/MODULE and norm of the first step, loss/N and norm/N of those
    after it, parameter/PARAMETER and bias/MODULE in the end; recomputed/MODULE is recomputed by the backward pass.
    Sharded values are whole here; activations and their gradients are this process's part.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    positions: torch.Tensor | None = None
    """(T/cp,): which tokens of each row are this process's; None is all of them."""
    nll_BT: torch.Tensor | None = None
    """The first step's loss token by token, of the reference."""

    def merge(self, traces: Sequence[Trace]) -> None:
        """Take what the others of a pipeline have as well, in the order in which a batch passes the layers."""
        found = {name: value for trace in traces for name, value in trace.values.items()}
        self.values = {name: found[name] for name in sorted(found, key=_passed)}

    def add(self, name: str, value: torch.Tensor) -> None:
        """Keep a value; a micro-batch's comes below those of the ones before it."""
        value = value.detach().clone()
        before = self.values.get(name)
        self.values[name] = value if before is None else torch.cat([before, value])


PASSED = {"ids": 0, "labels": 1, "positions": 1, "forward": 2, "recomputed": 3, "backward": 3, "gradient": 4}


def _passed(name: str) -> tuple[int, float]:
    """When a step computes a value: forward layer by layer, backward from the last layer on, then all the rest."""
    kind, _, rest = name.partition("/")
    if kind not in PASSED:
        return max(PASSED.values()) + 1, 0.0
    first, *more = rest.split(".")
    layer = float(more[0]) if first == "layers" else -1.0 if first == "embedding" else math.inf
    return PASSED[kind], layer if kind == "forward" else -layer


class Recorder:
    """Records outputs and gradients of a model's modules in a trace, until `stop`."""

    def __init__(self, model: Transformer, trace: Trace) -> None:
        self.trace, self.forward, self.rows = trace, True, 0
        self.handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if isinstance(module, WATCHED) and module is not model.head:
                self._watch(name, module)
        # Modules that run outside of these run once more, for the backward pass.
        ends: Any = [(model.embedding, model.norm)]
        if isinstance(model, Staged):
            ends = [(stage, stage) for stage in model.stages.values()]
        for first, last in ends:
            self.handles.append(first.register_forward_pre_hook(self._begin))
            self.handles.append(last.register_forward_hook(self._end))

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _begin(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.forward, self.rows = True, len(inputs[0])

    def _end(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self.forward = False

    def _watch(self, name: str, module: nn.Module) -> None:
        def before(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            first, *rest = inputs
            self._keep(f"{'forward' if self.forward else 'recomputed'}/{name}.input", first)
            return _Watched.apply(first, self._gradient(f"{name}.input")), *rest

        def behind(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._keep(f"{'forward' if self.forward else 'recomputed'}/{name}", output)
            if self.forward:
                output.register_hook(self._gradient(name))

        if not isinstance(module, nn.Embedding):
            self.handles.append(module.register_forward_pre_hook(before, prepend=True))
        self.handles.append(module.register_forward_hook(behind))

    def _gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        """Return a hook that records one gradient once: zero-bubble schedules run it again for those of the weights."""
        told: list[bool] = []

        def tell(gradient: torch.Tensor) -> None:
            if not told:
                told.append(True)
                self._keep(f"backward/{name}", gradient)

        return tell

    def _keep(self, name: str, value: torch.Tensor) -> None:
        value = whole(value.detach())
        if value.ndim == 2:  # a router's, whose rows are tokens
            value = value.unflatten(0, (self.rows, -1))
        self.trace.add(name, value)


class _Watched(torch.autograd.Function):
    """Identity that tells its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tell: Any) -> torch.Tensor:
        ctx.tell = tell
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.tell(gradients[0])
        return gradients[0], None
