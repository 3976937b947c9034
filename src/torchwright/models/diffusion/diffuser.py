"""Pictures from prompts: diffusers' own pipeline, whose components ask whoever runs them."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchwright.core.errors import ModelError, WorkloadError, first_line, unknown
from torchwright.models.diffusion.distilled import habits
from torchwright.models.diffusion.folder import READERS, PipelineFolder
from torchwright.models.diffusion.limits import (
    LONGEST_PROMPT,
    MOST_GUIDANCE,
    MOST_PIXELS,
    MOST_SEED,
    MOST_STEPS,
    Style,
)
from torchwright.models.diffusion.parts import Ask, find_class, stand_ins
from torchwright.models.diffusion.sampling import Plan, Steps
from torchwright.models.diffusion.schedulers import NAMES, possible
from torchwright.models.diffusion.truncation import cut_prompts
from torchwright.workloads.huggingface import quiet_transformers

NOT_FINITE = (
    "the picture holds values that are not numbers, and is black there: take another scheduler or float32"
)


class ImagineError(WorkloadError, ValueError):
    """A picture that cannot be made: what was asked, and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A picture or film: pixels (H, W, 3) in uint8 of each frame, and what the VAE made it of.

    `picture_3HW` is float32 from 0 to 1; the frames of a film stand in it below one another, (3, F·H, W).
    """

    frames_FHW3: np.ndarray
    picture_3HW: torch.Tensor
    latents: torch.Tensor
    steps: int
    notices: tuple[str, ...] = ()
    """Sentences for the user: parts of the prompt that were left out, faults of the picture."""

    @property
    def pixels_HW3(self) -> np.ndarray:
        """Pixels of the picture, or of a film's first frame."""
        return self.frames_FHW3[0]


class Diffuser:
    """Makes pictures; `ask` computes what `parts.Parts` would.

    One picture at a time: two threads need two of them.
    """

    def __init__(
        self, folder: PipelineFolder, ask: Ask, *, plan: Plan | None = None, device: str = "cpu"
    ) -> None:
        self.folder, self.plan = folder, plan or Plan()
        self._ask = ask
        self._denoise: Callable[..., Any] = ask
        self._latents: torch.Tensor | None = None
        self.pipe = _pipeline(folder, stand_ins(folder, self._answer, device))
        self._own_scheduler = self.pipe.scheduler
        self.habits = habits(folder)

    @property
    def multiple(self) -> int:
        """Sides of a picture are multiples of so many pixels."""
        denoiser = getattr(self.pipe, self.folder.family.denoiser)
        patch = getattr(denoiser.config, "patch_size", None) or 1
        family = self.folder.family
        return math.lcm(int(self._scale * family.patch * patch), family.multiple)

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) that the model was trained for."""
        denoiser = getattr(self.pipe, self.folder.family.denoiser)
        config, given = denoiser.config, inspect.signature(type(self.pipe).__call__).parameters
        if self.folder.family.video:
            tall, wide = getattr(config, "sample_height", None), getattr(config, "sample_width", None)
            if tall and wide:
                return int(tall * self._scale), int(wide * self._scale)
            return given["height"].default, given["width"].default
        side = getattr(self.pipe, "default_sample_size", None) or config.sample_size
        height, width = (side, side) if isinstance(side, int) else side
        return int(height * self._scale), int(width * self._scale)

    @property
    def frames(self) -> int:
        """The smallest number of frames above one that a film may have, for trials; 1 for a picture."""
        return 1 + self._apart if self.folder.family.video else 1

    @property
    def _scale(self) -> int:
        """Pixels of a latent's side."""
        names = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
        return next(int(getattr(self.pipe, name)) for name in names if hasattr(self.pipe, name))

    @property
    def _apart(self) -> int:
        """Frames that a film is longer than another at least."""
        names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
        step = next((int(getattr(self.pipe, name)) for name in names if hasattr(self.pipe, name)), 1)
        return step * self.folder.family.together

    def check(
        self,
        prompt: str,
        seed: int,
        steps: int,
        size: tuple[int, int],
        frames: int = 1,
        style: Style = Style(),  # noqa: B008 (frozen)
    ) -> None:
        """Raises `ImagineError` for what no picture is made of, and `UnknownName` for a scheduler without that name."""
        height, width = size
        multiple = self.multiple
        _check_prompt(prompt)
        self._check_style(style)
        if not 0 <= seed <= MOST_SEED:
            raise ImagineError(f"seed {seed}", allowed=f"0 to {MOST_SEED}")
        if not 1 <= steps <= MOST_STEPS:
            raise ImagineError(f"{steps} steps", allowed=f"1 to {MOST_STEPS}")
        if not self.folder.family.video and frames != 1:
            raise ImagineError(
                f"{frames} frames", found=f"{self.folder.pipeline} makes pictures", allowed="1"
            )
        if min(size) < 1 or height % multiple or width % multiple or height * width > MOST_PIXELS:
            raise ImagineError(
                f"a picture of {height}x{width} pixels (height x width)",
                allowed=f"multiples of {multiple}, at most {MOST_PIXELS:,} pixels together",
            )
        if frames < 1 or (frames - 1) % self._apart or frames * height * width > MOST_PIXELS:
            raise ImagineError(
                f"a film of {frames} frames",
                allowed=f"1 and {self._apart} more each time, at most {MOST_PIXELS:,} pixels together",
            )

    def _check_style(self, style: Style) -> None:
        family, kind = self.folder.family, self.folder.pipeline
        if style.guidance is not None and not 0 <= style.guidance <= MOST_GUIDANCE:
            raise ImagineError(f"guidance {style.guidance:g}", allowed=f"0 to {MOST_GUIDANCE:g}")
        embeds = getattr(getattr(self.pipe, family.denoiser).config, "guidance_embeds", None)
        if style.guidance is not None and embeds is False and not family.negative:
            raise ImagineError(
                f"this {kind} was trained without guidance", found=f"guidance {style.guidance:g}"
            )
        if style.negative is not None:
            _check_prompt(style.negative, "negative prompt")
            if not self._guided(style):
                raise ImagineError(
                    "a negative prompt changes nothing here",
                    found=f"{kind} without guidance by a second prompt",
                    next="leave it out"
                    if not family.negative
                    else "ask for guidance above 1, or leave it out",
                )
        if style.scheduler is not None:
            self._scheduler(style.scheduler)

    def _guided(self, style: Style) -> bool:
        """Return whether a step compares the prompt's prediction with another prompt's."""
        config = getattr(self.pipe, self.folder.family.denoiser).config
        if not self.folder.family.negative or getattr(config, "time_cond_proj_dim", None) is not None:
            return False
        guidance = self.habits.guidance if style.guidance is None else style.guidance
        return guidance is None or guidance > 1

    def _scheduler(self, name: str | None) -> Any:
        """Return diffusers' scheduler of a name, with the folder's configuration; None is the folder's own."""
        own = self._own_scheduler
        if name is None:
            return own
        if name not in NAMES:
            raise unknown("scheduler", name[:80], NAMES)
        choice = possible(type(own).__name__)
        if name not in choice:
            raise ImagineError(
                f"{self.folder.pipeline} cannot use the scheduler {name}",
                found=f"the folder's own is {type(own).__name__}",
                allowed=", ".join(choice) or "the folder's own alone",
            )
        cls, options = choice[name]
        with quiet_transformers():
            return find_class("diffusers", cls, "SchedulerMixin").from_config(own.config, **options)

    def draw(
        self,
        prompt: str,
        *,
        seed: int = 0,
        steps: int | None = None,
        size: tuple[int, int] | None = None,
        frames: int | None = None,
        style: Style = Style(),  # noqa: B008 (frozen)
        on_step: Callable[[int, int], None] | None = None,
        preview: Callable[[int, np.ndarray], None] | None = None,
    ) -> Drawn:
        """Draw a prompt. Equal seeds give bitwise equal pictures on one machine with one number of threads.

        `size` is (height, width), `frames` a film's length; `steps` and `style` are by default what the model was
        trained for. `on_step` receives the number of finished steps and of all steps. `preview` receives
        the picture after each step, (H, W, 3) uint8; a preview takes a pass of the VAE.

        Raises `ImagineError` for sizes, numbers and prompts that the pipeline does not take.
        """
        height, width = size = size or self.size
        frames, steps = frames or self.frames, self.habits.steps if steps is None else steps
        self.check(prompt, seed, steps, size, frames, style)
        self.pipe.scheduler = self._scheduler(style.scheduler)
        self._denoise = Steps(
            lambda *args, **kwargs: self._ask(self.folder.family.denoiser, *args, **kwargs),
            self.plan,
            count=lambda: len(self.pipe.scheduler.timesteps),
            on_step=on_step or (lambda done, total: None),
            turns=self.folder.family.turns if self._guided(style) else 1,
        )
        film = {"num_frames": frames} if self.folder.family.video else {}
        try:
            with torch.no_grad(), self._previewing(preview), cut_prompts(self.pipe) as notices:
                made = self.pipe(
                    prompt,
                    height=height,
                    width=width,
                    num_inference_steps=steps,
                    generator=torch.Generator("cpu").manual_seed(seed),
                    output_type="pt",
                    **film,
                    **(self._taken() | self._asked(style)),
                )
        except ImagineError:
            raise
        except ValueError as error:  # what a pipeline says of its arguments
            raise ImagineError(
                f"{self.folder.pipeline} does not make this picture", found=first_line(error)
            ) from error
        except IndexError as error:
            if steps > 1:
                raise
            # PixArt-alpha's single step is what distilled models take: the clean picture that a scheduler thinks of.
            raise ImagineError(
                f"{self.folder.pipeline} makes no picture in one step",
                found=f"{type(self.pipe.scheduler).__name__}, which tells no clean picture of a step",
                allowed="2 steps or more",
            ) from error
        assert self._latents is not None
        frames_F3HW = (made.frames[0] if self.folder.family.video else made.images).float().cpu()
        if not frames_F3HW.isfinite().all():
            notices.append(NOT_FINITE)
        return Drawn(
            frames_FHW3=np.stack([pixels(frame) for frame in frames_F3HW]),
            picture_3HW=torch.cat(list(frames_F3HW), dim=1),
            latents=self._latents[0].cpu(),
            steps=steps,
            notices=tuple(notices),
        )

    def _taken(self) -> dict[str, Any]:
        """The family's arguments that this pipeline has."""
        names = inspect.signature(type(self.pipe).__call__).parameters
        return {name: value for name, value in self.folder.family.arguments if name in names}

    def _asked(self, style: Style) -> dict[str, Any]:
        """Return the pipeline's arguments for a style."""
        guidance = self.habits.guidance if style.guidance is None else style.guidance
        asked: dict[str, Any] = {} if guidance is None else {self.folder.family.guidance: guidance}
        return asked if style.negative is None else asked | {"negative_prompt": style.negative}

    def _answer(self, part: str, *args: Any, **kwargs: Any) -> Any:
        """Answer a stand-in's call; the denoiser goes through the steps' plan."""
        if part == self.folder.family.denoiser:
            return self._denoise(*args, **kwargs)
        if part == "vae":
            self._latents = args[0].float()
        return self._ask(part, *args, **kwargs)

    @contextmanager
    def _previewing(self, preview: Callable[[int, np.ndarray], None] | None) -> Iterator[None]:
        """Decodes what the scheduler gives after each step, within the block.

        Latents become the VAE's input by its configuration, as in all pipelines here whose latents stay a picture.
        """
        if preview is None:
            yield
            return
        if not self.folder.family.previews:
            raise ImagineError(f"{self.folder.pipeline} has no previews: its latents are packed, or a film's")
        scheduler, config, done = self.pipe.scheduler, self.pipe.vae.config, itertools.count(1)
        step, shift = scheduler.step, getattr(config, "shift_factor", None) or 0.0

        def shown(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            picture_B3HW = self._ask("vae", output[0].float() / config.scaling_factor + shift)
            preview(next(done), pixels((picture_B3HW[0].float().cpu() / 2 + 0.5).clamp(0, 1)))
            return output

        scheduler.step = shown
        try:
            yield
        finally:
            del scheduler.step


def _check_prompt(prompt: str, what: str = "prompt") -> None:
    if not isinstance(prompt, str) or not _is_text(prompt):
        raise ImagineError(f"the {what} is no text", found=ascii(prompt)[:80], allowed="one text of Unicode")
    if len(prompt) > LONGEST_PROMPT:
        raise ImagineError(f"a {what} of {len(prompt):,} characters", allowed=f"{LONGEST_PROMPT:,}")


def _is_text(text: str) -> bool:
    """Check whether `text` can be encoded: a shell gives lone surrogates for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def pixels(picture_3HW: torch.Tensor) -> np.ndarray:
    """From 0 to 1 → (H, W, 3) uint8, rounded; black where it is not a number."""
    return (picture_3HW.nan_to_num().permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()


def _pipeline(folder: PipelineFolder, models: dict[str, torch.nn.Module]) -> Any:
    """diffusers' pipeline of these models, with the folder's tokenizers and scheduler."""
    cls = find_class("diffusers", folder.pipeline, "DiffusionPipeline")
    given: dict[str, Any] = dict(models)
    for name, (library, kind) in folder.components.items():
        if name in READERS:
            found = find_class(library, kind, "PreTrainedTokenizerBase")
            given[name] = _read(found, folder, name, trust_remote_code=False)
        elif name == "scheduler":
            given[name] = _read(find_class(library, kind, "SchedulerMixin"), folder, name)
    accepted = inspect.signature(cls).parameters
    fixed = {"add_watermarker": False, "requires_safety_checker": False}
    given |= {name: value for name, value in (folder.constants | fixed).items() if name in accepted}
    # What a picture from text does without.
    given |= {name: None for name, p in accepted.items() if p.default is p.empty and name not in given}
    try:
        with quiet_transformers():
            pipe = cls(**given)
    except Exception as error:
        raise ModelError(
            f"diffusers makes no {folder.pipeline} of {folder.path}",
            found=f"{type(error).__name__}: {first_line(error)}",
        ) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _read(cls: Any, folder: PipelineFolder, name: str, **options: Any) -> Any:
    try:
        with quiet_transformers():
            return cls.from_pretrained(folder.path / name, local_files_only=True, **options)
    except Exception as error:
        raise ModelError(
            f"{folder.path / name} cannot be read", found=f"{type(error).__name__}: {first_line(error)}"
        ) from error
