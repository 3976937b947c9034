"""A pipeline of diffusers as a workload: the calls of one picture, judged by the pictures of the same seeds."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchwright.core.errors import ArtifactError, WorkloadError
from torchwright.core.records import Quality
from torchwright.hub.folder import model_files
from torchwright.models.diffusion.beside import pictures_beside
from torchwright.models.diffusion.calls import calls_of
from torchwright.models.diffusion.diffuser import Diffuser
from torchwright.models.diffusion.folder import INDEX, is_pipeline, open_pipeline
from torchwright.models.diffusion.parts import IDENTIFIERS, PipelineModules, build_parts
from torchwright.models.diffusion.perceptual import find_backbone
from torchwright.models.diffusion.precision import bound, delicate
from torchwright.models.diffusion.sampling import Plan
from torchwright.models.diffusion.score import alike
from torchwright.report.pictures import PictureRow
from torchwright.workloads.base import (
    Case,
    Optimized,
    Run,
    Served,
    Workload,
    check_sizes,
    to_device,
    to_dtype,
)

PROMPTS = (
    "a red bicycle on a beach",
    "a dog in the snow, oil on canvas",
    "a blue house by the sea at night",
    "three apples in a bowl",
    "a city street in the rain",
    "a portrait of an old man",
    "a forest path in autumn",
    "a cup of coffee beside a book",
    "a sailing boat on a lake, watercolour",
)
"""Prompts that judge, as many held-out ones, and the last, which only chooses layers and steps."""
JUDGED = (4, 16)
"""Fewest and most prompts that the search is judged by; what it chose is judged by as many others, if there are any."""
JUDGED_PIXELS = 2e6
"""Budget of pixels over all steps of all judged pictures, beyond the fewest."""
GLANCED = 2
"""Steps of a picture by which the effect of one layer is measured."""
MOST_PROMPTS, MOST_PROMPT_BYTES = 1000, 2**20


class DiffusionWorkload(Workload):
    """A text-to-image pipeline: text encoders, the denoiser's steps and the VAE, for one picture.

    Metric: LPIPS between the original's and the candidate's pictures of the same prompts and seeds, if its weights
    are available, else multi-scale SSIM. The cosine of their latents is reported as well.
    """

    name = "diffusion"
    supports = (
        "pipelines of diffusers (model_index.json): CogVideoX, Flux, LTX-Video, PixArt, QwenImage, Sana, "
        "Stable Diffusion 1.5, XL and 3"
    )
    opens = frozenset({"prompts"})

    def __init__(
        self,
        folder: str | Path,
        *,
        steps: int = 20,
        size: str | None = None,
        frames: int | None = None,
        prompts: str | Path | None = None,
    ) -> None:
        self.folder, self.label = Path(folder), str(folder)
        self.opened = open_pipeline(folder)
        self.steps, self.plan = steps, Plan()
        self.prompts = None if prompts is None else Path(prompts)
        self.texts = PROMPTS if self.prompts is None else _read_prompts(self.prompts)
        self.height, self.width = _size(size) if size is not None else self._shapes.size
        self.frames = frames or self._shapes.frames
        self._shapes.check(self.texts[0], 0, steps, (self.height, self.width), self.frames)

    @cached_property
    def _shapes(self) -> Diffuser:
        """One that draws nothing: it knows sizes."""
        return Diffuser(self.opened, _nothing)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_shapes", "_calls")}

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        return is_pipeline(folder)

    @classmethod
    def check(cls, description: dict[str, Any]) -> None:
        check_sizes(description, "steps", "frames")
        Plan.from_dict(description)
        if description.get("size") is not None:
            try:
                _size(description["size"])
            except WorkloadError as error:
                raise ArtifactError("the recipe's size is damaged", found=str(error)[:80]) from error

    @classmethod
    def served_as(cls, description: dict[str, Any]) -> Served:
        return "painter"

    @classmethod
    def answerer(cls, optimized: Optimized) -> Diffuser:
        plan = Plan.from_dict(optimized.description)
        folder = open_pipeline(optimized.folder)
        return Diffuser(folder, _asking(optimized.run), plan=plan, device=optimized.device)

    def build(self) -> PipelineModules:
        return build_parts(self.opened)

    def planned(self, plan: Plan) -> DiffusionWorkload:
        """The same pictures with other steps left out."""
        other = copy.copy(self)
        other.plan = plan
        vars(other).pop("_calls", None)
        return other

    @cached_property
    def _calls(self) -> list[Case]:
        size = (self.height, self.width)
        return calls_of(
            self.opened, self.texts[-1], steps=self.steps, size=size, frames=self.frames, plan=self.plan
        )

    def cases(self, dtype: torch.dtype) -> list[Case]:
        placed = [to_device((case.args, case.kwargs), self.device) for case in self._calls]
        return [
            replace(case, args=args, kwargs=kwargs)
            for case, (args, kwargs) in zip(self._calls, placed, strict=True)
        ]

    def cast(self, model: nn.Module, dtype: torch.dtype, keep: Callable[[str, nn.Module], bool]) -> nn.Module:
        to_dtype(model, dtype, keep)
        bound(_parts_in(model), dtype, keep)
        for boundary in model.modules():
            if isinstance(boundary, PartsBoundary):  # another component was cast before
                boundary.look()
                return model
        return PartsBoundary(model)

    def parts(self) -> tuple[str, ...]:
        last = (self.opened.family.denoiser, "vae")
        return (*(name for name in self.opened.models if name not in last), *last)

    def delicate(self, model: nn.Module) -> tuple[str, ...]:
        name = self.opened.family.denoiser
        return delicate(model.get_submodule(name), name)

    def observe(self, run: Run, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """`pictures` (N, 3, H, W) from 0 to 1 and `latents` (N, …), a seed for each prompt."""
        diffuser = Diffuser(self.opened, _asking(run), plan=self.plan, device=self.device)
        drawn = [
            diffuser.draw(
                self.texts[i], seed=i, steps=self.steps, size=(self.height, self.width), frames=self.frames
            )
            for i in self._judged()
        ]
        return {
            "pictures": torch.stack([one.picture_3HW for one in drawn]),
            "latents": torch.stack([one.latents for one in drawn]),
        }

    def glance(self, run: Run) -> torch.Tensor:
        """A picture of few steps (3, H, W), of no prompt that judges."""
        diffuser = Diffuser(self.opened, _asking(run), device=self.device)
        size, last = (self.height, self.width), len(self.texts)
        steps = min(GLANCED, self.steps)
        drawn = diffuser.draw(self.texts[-1], seed=last, steps=steps, size=size, frames=self.frames)
        return drawn.picture_3HW - 0.5

    def side_by_side(self, reference: Any, candidate: Any) -> list[PictureRow]:
        return pictures_beside(
            [f"{self.texts[i]}, seed {i}" for i in self._judged()],
            reference["pictures"],
            candidate["pictures"],
            frames=self.frames,
        )

    def _judged(self) -> Sequence[int]:
        """The numbers of the prompts that are drawn, which are their seeds."""
        return self.sample or range(min(self._most_judged, len(self.texts)))

    @property
    def _most_judged(self) -> int:
        """So many as small pictures allow, and no more than leave as many that choose nothing."""
        fewest, most = JUDGED
        pixels = self.steps * self.height * self.width * self.frames
        return max(fewest, min(most, int(JUDGED_PIXELS / pixels), (len(self.texts) - 1) // 2))

    def calibrates_apart(self) -> bool:
        return len(self.texts) > self._most_judged

    def unseen(self) -> Self | None:
        return self.judged_after(self._most_judged, len(self.texts) - 1)

    def compare(self, reference: Any, candidate: Any) -> Quality:
        return alike(reference, candidate)

    def changes(self, model: nn.Module) -> list[float]:
        """‖p[i] − p[i−1]‖ / ‖p[i−1]‖ of the predictions of each step on the last prompt; 0 for the first."""
        seen: list[torch.Tensor] = []

        def ask(part: str, *args: Any, **kwargs: Any) -> Any:
            output = model(part, *args, **kwargs)
            if part == self.opened.family.denoiser:
                seen.append(output.float())
            return output

        Diffuser(self.opened, ask, device=self.device).draw(
            self.texts[-1],
            seed=len(self.texts),
            steps=self.steps,
            size=(self.height, self.width),
            frames=self.frames,
        )
        pairs = itertools.pairwise(seen)
        return [0.0, *(((b - a).norm() / a.norm().clamp(min=1e-12)).item() for a, b in pairs)]

    def guided(self) -> bool:
        """True if the denoiser sees each picture with and without its prompt, in one call or two."""
        if self.opened.family.turns == 2:
            return True
        denoiser = next(case for case in self._calls if case.name == self.opened.family.denoiser)
        return pytree.tree_leaves((denoiser.args[1:], denoiser.kwargs))[0].shape[0] == 2

    def files(self, *, weights: bool) -> dict[str, Path]:
        parts = [*self.opened.components]
        files = model_files(self.opened.path, weights=weights, parts=parts)
        wanted = {
            name: path
            for name, path in files.items()
            if name == INDEX or name.partition("/")[0] in parts or name.startswith("LICENSE")
        }
        return {name: path for name, path in wanted.items() if path != self.prompts}

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "model": self.label,
            "steps": self.steps,
            "size": f"{self.height}x{self.width}",
            "frames": self.frames,
            "prompts": str(self.prompts) if self.prompts else None,
            **self.plan.as_dict(),
        }

    def notices(self) -> tuple[str, ...]:
        missing = find_backbone((self.height, self.width))
        judged = (f"judged by multi-scale SSIM: {missing}",) if isinstance(missing, str) else ()
        return (*self.opened.notices, *judged)

    def properties(self, model: nn.Module) -> set[str]:
        return {"denoising_steps"} | ({"guided"} if self.guided() else set())


class PartsBoundary(nn.Module):
    """Gives each part of `PipelineModules` its inputs in its own type, numbers of steps and places apart; outputs are
    float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.look()

    def look(self) -> None:
        """See which type each part has now."""
        self._types = {name: _type_of(module) for name, module in _parts_in(self.inner).named_children()}

    def forward(self, part: str, *args: Any, **kwargs: Any) -> Any:
        dtype = self._types[part]

        def cast(value: Any) -> Any:
            return pytree.tree_map_only(
                torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value
            )

        kwargs = {name: value if name in IDENTIFIERS else cast(value) for name, value in kwargs.items()}
        output = self.inner(part, *cast(args), **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, output)


def _parts_in(model: nn.Module) -> PipelineModules:
    """The components themselves, whatever was wrapped around them."""
    return next(module for module in model.modules() if isinstance(module, PipelineModules))


def _type_of(part: nn.Module) -> torch.dtype:
    """Return the type of most parameters: some modules may be kept in float32."""
    numbers = Counter[torch.dtype]()
    for parameter in part.parameters():
        if parameter.is_floating_point():
            numbers[parameter.dtype] += parameter.numel()
    return numbers.most_common(1)[0][0] if numbers else torch.float32


def _asking(run: Run) -> Callable[..., Any]:
    """A pipeline's calls as the workload's."""
    return lambda part, *args, **kwargs: run(Case(name=part, part=part, args=(part, *args), kwargs=kwargs))


def _nothing(part: str, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError(f"{part} is asked of a pipeline that knows sizes alone")


def _size(text: Any) -> tuple[int, int]:
    """(height, width) of HxW."""
    height, x, width = str(text).lower().partition("x")
    if not (x and height.isdecimal() and width.isdecimal() and len(str(text)) < 16):
        raise WorkloadError(f"size {str(text)[:80]!r}", allowed="HxW, such as 512x512: the height first")
    return int(height), int(width)


def _read_prompts(path: Path) -> tuple[str, ...]:
    """A prompt for each line that is not empty."""
    try:
        if path.stat().st_size > MOST_PROMPT_BYTES:
            raise WorkloadError(f"{path} is too large", allowed=f"{MOST_PROMPT_BYTES:,} bytes")
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read", found=str(error)) from error
    prompts = tuple(line for line in lines if line)
    if not 2 <= len(prompts) <= MOST_PROMPTS:
        raise WorkloadError(f"{path} has {len(prompts)} prompts", allowed=f"2 to {MOST_PROMPTS}, a line each")
    return prompts
