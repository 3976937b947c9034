"""Pipeline stages: the layers of a Transformer that a process holds, and whole batches through the stages of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchwright.models.decoder.config import DecoderConfig
from torchwright.train.layout import cut
from torchwright.train.model.fill import named_tensors, whole
from torchwright.train.model.transformer import Transformer
from torchwright.train.model.vocabulary import IGNORE


class Elsewhere(nn.Module):
    """In the place of a module that is part of another process's stage."""

    def forward(self, *_inputs: Any, **_options: Any) -> NoReturn:
        raise AssertionError("the module is part of another process's stage")


class Stage(nn.Module):
    """One stage of a model, whose modules it shares; FSDP takes it as its root."""

    def __init__(self, model: Staged, number: int) -> None:
        super().__init__()
        self.number, self.first, self.last = number, number == 0, number == model.count - 1
        self.layers = nn.ModuleList(model.layers[layer] for layer in model.cuts[number])
        self.ends = nn.ModuleList(model.get_submodule(name) for name in model.ends(number))
        self._compute = model.compute  # a method, so that the model does not become a part of its part
        self.precision: Callable[[], AbstractContextManager[Any]] = nullcontext
        """The context of a forward pass."""

    def forward(self, x: torch.Tensor, **rows: torch.Tensor) -> torch.Tensor:
        with self.precision():
            return self._compute(self.number, x, **rows)


class Staged(Transformer):
    """A Transformer of which this process holds the stages `numbers`; parameters keep the names of the whole.

    `forward`, `loss` and `values` are for all processes of `mesh`, the pipeline's dimension, together: each gets what
    the last stage gives. They take the stages one after the other; `Pipeline` trains.
    """

    def __init__(
        self, config: DecoderConfig, owners: Sequence[int], mesh: DeviceMesh, token_ways: int = 1
    ) -> None:
        """`owners` names for each stage, from the first to the last, the process along `mesh` that holds it.

        Between layers a process holds one of `token_ways` parts of the tokens (sequence parallelism).
        """
        super().__init__(config)
        self.owners, self.count, self.group = list(owners), len(owners), mesh.get_group()
        self.token_ways = token_ways
        self.cuts = cut(config.layers, self.count)
        self.activation = torch.get_default_dtype()
        """The dtype of the values that stages pass on."""
        here = mesh.get_local_rank()
        for number, owner in enumerate(owners):
            if owner != here:
                for name in (*self.ends(number), *(f"layers.{layer}" for layer in self.cuts[number])):
                    self.set_submodule(name, Elsewhere())
        self.stages = {number: Stage(self, number) for number, owner in enumerate(owners) if owner == here}

    def between(self, ids_BT: torch.Tensor) -> tuple[int, int, int]:
        """The shape of what one stage hands on to the next."""
        B, T = ids_BT.shape
        return B, T // self.token_ways, self.config.model

    def ends(self, number: int) -> tuple[str, ...]:
        """The parts of a stage other than layers."""
        first = ("embedding",) if number == 0 else ()
        return (*first, "norm", "head") if number == self.count - 1 else first

    def compute(
        self,
        number: int,
        x: torch.Tensor,
        labels_BT: torch.Tensor | None = None,
        positions_BT: torch.Tensor | None = None,
        documents_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply a stage of this process to ids, or to the previous stage's output (B, T, E).

        The last one gives the summed negative log-likelihood of labels, and logits without them.
        """
        if positions_BT is None:
            tokens = x.shape[1] * (1 if number == 0 else self.token_ways)
            positions_BT = torch.arange(tokens, device=x.device)
        x_BTE = self.embed(x) if number == 0 else x
        x_BTE = self.through(x_BTE, self.cuts[number], positions_BT, documents_BS)
        if number < self.count - 1:
            return x_BTE
        hidden_BTE = self.norm(x_BTE)
        return self.logits(hidden_BTE) if labels_BT is None else self.tail(hidden_BTE, labels_BT)[0]

    def forward(
        self,
        ids_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        documents_BS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (B, T, V), without a gradient."""
        logits = self._pass_on(ids_BT, positions_BT=positions_BT, documents_BS=documents_BS)
        full = (*ids_BT.shape, self.config.vocabulary)
        return self._from(self.owners[-1], logits, full, torch.get_default_dtype(), ids_BT.device)

    def loss(
        self,
        ids_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        documents_BS: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `Transformer.loss` without a gradient."""
        rows = {"labels_BT": labels_BT, "positions_BT": positions_BT, "documents_BS": documents_BS}
        nll = self._pass_on(ids_BT, **rows)
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        valid = (labels_BT != IGNORE).sum()
        return self._from(self.owners[-1], nll, (), dtype, ids_BT.device), valid

    def values(self) -> Callable[[str], torch.Tensor]:
        """Parameter name → its whole value, of whichever stage it is."""
        with torch.device("meta"):
            shapes = {name: value.shape for name, value in named_tensors(Transformer(self.config)).items()}
        like, held = next(self.parameters()), named_tensors(self)

        def value(name: str) -> torch.Tensor:
            owner = self.owners[self._stage_of(name)]
            return self._from(owner, held.get(name), shapes[name], like.dtype, like.device)

        return value

    def _stage_of(self, name: str) -> int:
        part, *rest = name.split(".")
        if part != "layers":
            return 0 if part == "embedding" else self.count - 1
        return next(number for number, layers in enumerate(self.cuts) if int(rest[0]) in layers)

    @torch.no_grad()
    def _pass_on(self, ids_BT: torch.Tensor, **rows: torch.Tensor | None) -> torch.Tensor | None:
        """Return the last stage's output, on its process; the stages take turns."""
        x: torch.Tensor | None = ids_BT
        here = dist.get_rank(self.group)
        for number, owner in enumerate(self.owners):
            if number and owner != self.owners[number - 1]:
                if self.owners[number - 1] == here:
                    assert x is not None
                    dist.send(x.contiguous(), group=self.group, group_dst=owner)
                elif owner == here:
                    x = torch.empty(self.between(ids_BT), dtype=self.activation, device=ids_BT.device)
                    dist.recv(x, group=self.group, group_src=self.owners[number - 1])
            x = self.stages[number](x, **rows) if owner == here else None
        return x

    def _from(
        self,
        owner: int,
        value: torch.Tensor | None,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """`value` of the process `owner`, on every process."""
        if value is None:
            value = torch.empty(tuple(shape), dtype=dtype, device=device)
        value = whole(value.detach()).to(dtype).contiguous()
        dist.broadcast(value, group=self.group, group_src=owner)
        return value
