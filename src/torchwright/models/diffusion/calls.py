"""The calls that a picture makes of a pipeline's parts, found without computing any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from torchwright.models.diffusion.diffuser import Diffuser
from torchwright.models.diffusion.folder import PipelineFolder
from torchwright.models.diffusion.parts import empty_parts
from torchwright.models.diffusion.sampling import Plan
from torchwright.workloads.base import Case


def calls_of(
    folder: PipelineFolder, prompt: str, *, steps: int, size: tuple[int, int], plan: Plan, frames: int = 1
) -> list[Case]:
    """Each kind of call once, with how often a picture makes it; a kind is a part and the shapes of its inputs.

    The parts have no data, so what they would have answered is random numbers of the right shape: the inputs of later
    calls are as large as real ones, and mean nothing.
    """
    recorder = _Recorder(folder)
    Diffuser(folder, recorder, plan=plan).draw(prompt, steps=steps, size=size, frames=frames)
    return recorder.calls()


class _Recorder:
    """Answers as `Parts` does, in shape."""

    def __init__(self, folder: PipelineFolder) -> None:
        self._mode = FakeTensorMode()
        with self._mode:
            self._parts = empty_parts(folder)
        self._random = torch.Generator().manual_seed(0)
        self._seen: dict[Any, tuple[Case, Any]] = {}

    def __call__(self, part: str, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        key = (part, str(structure), str(shapes))
        if key in self._seen:
            case, answer = self._seen[key]
            self._seen[key] = replace(case, repeat=case.repeat + 1), answer
            return answer
        number = 1 + sum(known[0] == part for known in self._seen)
        # Of their own, and dense: pipelines expand the number of a step to all rows, of which one may be left.
        given = pytree.tree_map_only(torch.Tensor, _dense, (args, kwargs))
        name = part if number == 1 else f"{part} {number}"
        case = Case(name=name, part=part, args=(part, *given[0]), kwargs=given[1])
        answer = pytree.tree_map_only(torch.Tensor, self._made_up, self._empty(part, args, kwargs))
        self._seen[key] = case, answer
        return answer

    def calls(self) -> list[Case]:
        return [case for case, _ in self._seen.values()]

    def _empty(self, part: str, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._mode.from_tensor, (args, kwargs))
        with torch.no_grad(), self._mode:
            return self._parts(part, *args, **kwargs)

    def _made_up(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return torch.randn(tensor.shape, generator=self._random, dtype=tensor.dtype)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
