"""Which of a picture's steps are computed: some reuse the last answer, the last ones may go without guidance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchwright.core.errors import ArtifactError
from torchwright.models.diffusion.limits import MOST_STEPS

Denoise = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The parts of a picture's steps (from 0) that are skipped."""

    reused: frozenset[int] = frozenset()
    """Steps that take what the last computed one predicted."""
    unguided: int = 0
    """Last steps, in which the difference that guidance made is taken from the last guided one."""

    def as_dict(self) -> dict[str, Any]:
        return {"reused": sorted(self.reused), "unguided": self.unguided}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Read the result of `as_dict`; raises `ArtifactError` for anything else, since it may be untrusted."""
        reused, unguided = data.get("reused") or [], data.get("unguided") or 0
        numbers = [*reused, unguided] if isinstance(reused, list) else [None]
        if not all(type(number) is int and 0 <= number <= MOST_STEPS for number in numbers):
            raise ArtifactError("the plan of a picture's steps is damaged", found=str(data)[:80])
        return cls(reused=frozenset(reused), unguided=unguided)


class Steps:
    """The denoiser of one picture: counts its steps, and computes those that the plan says.

    A guided denoiser is called with the rows without the prompt first and those with it after them, as diffusers'
    pipelines do. Then an unguided step computes the second half alone, and takes u = c − (c − u) of the last guided
    step for the first. One that is called twice a step is asked with the prompt first, and not asked without it then.
    """

    def __init__(
        self,
        denoise: Denoise,
        plan: Plan,
        *,
        count: Callable[[], int],
        on_step: Callable[[int, int], None] = lambda done, total: None,
        rows: int = 1,
        turns: int = 1,
    ) -> None:
        """`count` says how many predictions there will be, once the scheduler knows: some make more than one a step.

        Each prediction takes so many `turns` of the denoiser; a step that is reused reuses each of them.
        """
        self._denoise, self._plan, self._count, self._on_step, self._rows = (
            denoise,
            plan,
            count,
            on_step,
            rows,
        )
        self._turns = turns
        self._calls = 0
        self._last: dict[int, torch.Tensor] = {}
        self._guidance: torch.Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        index, turn = divmod(self._calls, self._turns)
        self._calls += 1
        if turn not in self._last or index not in self._plan.reused:
            compute = self._computed if self._turns == 1 else self._second if turn else self._denoise
            self._last[turn] = compute(*args, **kwargs)
        if turn == self._turns - 1:
            self._on_step(index + 1, self._count())
        return self._last[turn]

    def _second(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The prediction without the prompt, after the one with it."""
        with_prompt = self._last[0]
        if self._unguided and self._guidance is not None:
            return with_prompt - self._guidance
        without = self._denoise(*args, **kwargs)
        self._guidance = with_prompt - without
        return without

    @property
    def _unguided(self) -> bool:
        """True if the step of the last call runs without guidance."""
        return (self._calls - 1) // self._turns >= self._count() - self._plan.unguided

    def _computed(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = pytree.tree_leaves((args, kwargs))[0].shape[0]
        if rows != 2 * self._rows:
            return self._denoise(*args, **kwargs)
        if self._unguided and self._guidance is not None:
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: _second_half(t, rows), (args, kwargs))
            with_prompt = self._denoise(*args, **kwargs)
            return torch.cat([with_prompt - self._guidance, with_prompt])
        output = self._denoise(*args, **kwargs)
        without, with_prompt = output.chunk(2)
        self._guidance = with_prompt - without
        return output


def _second_half(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor[rows // 2 :] if tensor.dim() and tensor.shape[0] == rows else tensor


def steps_to_reuse(changes: list[float], threshold: float) -> frozenset[int]:
    """Steps whose prediction is nearly the last computed one's.

    `changes[i]` is ‖p[i] − p[i−1]‖ / ‖p[i−1]‖ of the predictions of steps, 0 for the first. A step is reused while
    the sum of changes since the last computed step stays below `threshold`. The first and last step are computed.
    """
    reused, since = set(), 0.0
    for step in range(1, len(changes) - 1):
        since += changes[step]
        if since < threshold:
            reused.add(step)
        else:
            since = 0.0
    return frozenset(reused)
