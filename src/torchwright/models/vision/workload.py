"""Vision-language models: a question about a picture answered token by token, judged by what is said next."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from torchwright.core.errors import WorkloadError
from torchwright.core.records import Quality
from torchwright.hub.folder import model_files
from torchwright.hub.language_part import HOSTS
from torchwright.models.vision.calls import Answers
from torchwright.models.vision.question import question_about
from torchwright.models.vision.reader import media_tokens, takes_pictures
from torchwright.models.vision.user_pictures import UserPictures
from torchwright.workloads import accuracy
from torchwright.workloads.base import (
    Case,
    Optimized,
    Run,
    Served,
    Workload,
    batches_to_judge,
    check_sizes,
)
from torchwright.workloads.huggingface import load_model

JUDGED, CALIBRATION = 6, 2
"""Pictures by which the search judges, and as many again by which what it chose is judged; those that calibrate."""
SIDES = ((224, 224), (196, 308), (336, 252), (280, 168))
"""Heights and widths of made-up pictures: ragged, and small enough that a search has time for some."""


class VisionLanguageWorkload(Workload):
    """A model that answers about a picture: the picture encoded, the prompt read, then `new_tokens` from a cache.

    Metric: perplexity of the original's predictions over its own answers, which every candidate is made to give; the
    drop is exp(mean KL divergence) − 1. Pictures are made up, or those of a folder (`images`).
    """

    name = "vision_language"
    supports = "…ForConditionalGeneration that takes pictures: " + ", ".join(HOSTS)
    opens = frozenset({"images"})

    def __init__(
        self,
        folder: str | Path,
        *,
        new_tokens: int = 16,
        question: str = "What does the picture show?",
        images: str | Path | None = None,
    ) -> None:
        if not 1 <= new_tokens <= 4096:
            raise WorkloadError(f"--new-tokens {new_tokens}", allowed="1 to 4096")
        self.folder, self.label = Path(folder), str(folder)
        self.new_tokens, self.question = new_tokens, question
        self.images = None if images is None else Path(images)
        self._token = media_tokens(self.folder)[0]
        judged, calibration = _pictures(self.images)
        self.pictures = len(judged)
        self._calls = [self._read(picture) for picture in (*judged, *calibration)]
        self._targets = self._answers()

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        return takes_pictures(folder)

    def build(self) -> nn.Module:
        return load_model(self.folder, "AutoModelForImageTextToText")

    def adapt(self, model: nn.Module) -> nn.Module:
        return Answers(model, self._token)

    def original_run(self, model: nn.Module) -> Run:
        answers = self.adapt(model)
        return lambda case: answers(*case.args, **case.kwargs)

    def cases(self, dtype: torch.dtype) -> list[Case]:
        return [self._case(0)]

    def calibration(self, dtype: torch.dtype) -> list[Case]:
        return [self._case(index) for index in range(self.pictures, len(self._calls))]

    def calibrates_apart(self) -> bool:
        return True

    @classmethod
    def check(cls, description: dict[str, Any]) -> None:
        check_sizes(description, "new_tokens")

    @classmethod
    def answerer(cls, optimized: Optimized) -> None:
        """None: only the native layers generate, and the engine that runs them says so itself."""

    @classmethod
    def served_as(cls, description: dict[str, Any]) -> Served:
        return "writer"

    @classmethod
    def rates(cls, description: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
        """New tokens a second, the picture's encoding and the prompt's reading included."""
        return {"tokens_per_s": description["new_tokens"] / seconds["answer"]}

    def observe(self, run: Run, dtype: torch.dtype) -> torch.Tensor:
        """Log-probabilities (tokens, V) in float16 before each token of the original's answers."""
        found = [run(self._case(index))[0].float() for index in self.sample or range(self._judged())]
        return torch.cat(found).log_softmax(-1).half().cpu()

    def unseen(self) -> Self | None:
        return self.judged_after(self._judged(), self.pictures)

    def compare(self, reference: Any, candidate: Any) -> Quality:
        return accuracy.predictions(reference, candidate, self.new_tokens)

    def files(self, *, weights: bool) -> dict[str, Path]:
        return model_files(self.folder, weights=weights)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "model": self.label,
            "new_tokens": self.new_tokens,
            "question": self.question,
            "images": None if self.images is None else str(self.images),
        }

    def properties(self, model: nn.Module) -> set[str]:
        return {"vision_language", "two_stacks"}

    def _judged(self) -> int:
        return batches_to_judge(JUDGED, self.pictures)

    def _case(self, index: int) -> Case:
        ids_1T, arrays = self._calls[index]
        args = ids_1T.to(self.device), self._targets[index].to(self.device)
        return Case(
            name="answer", args=args, kwargs={k: v.to(self.device) for k, v in arrays.items()}, fixed=True
        )

    def _read(self, picture: np.ndarray) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Token ids (1, T) of the question about a picture, and the picture as the encoder takes it."""
        asked = question_about(self.folder, self.question, [picture])
        arrays = asked.pictures[0].arrays.items()
        return torch.tensor([asked.ids]), {k: torch.from_numpy(array.numpy().copy()) for k, array in arrays}

    @torch.inference_mode()
    def _answers(self) -> list[torch.Tensor]:
        """The original's answers (1, N) to each picture."""
        model = Answers(self.build(), self._token)
        return [model.greedy(ids_1T, self.new_tokens, **arrays).clone() for ids_1T, arrays in self._calls]


def _pictures(folder: Path | None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Pictures (H, W, 3) to judge by, and others to calibrate on."""
    if folder is not None:
        found = UserPictures(folder)
        judged, calibration = (
            [found.read(index, calibration=apart) for index in range(min(most, len(files)))]
            for apart, files, most in (
                (False, found.judged, 2 * JUDGED),
                (True, found.calibration, CALIBRATION),
            )
        )
        return judged, calibration
    made = [_made_up(seed) for seed in range(2 * JUDGED + CALIBRATION)]
    return made[: 2 * JUDGED], made[2 * JUDGED :]


def _made_up(seed: int) -> np.ndarray:
    """Discs of colour on fields of colour, with noise: neither flat nor white."""
    draw = np.random.default_rng(seed)
    height, width = SIDES[seed % len(SIDES)]
    fields = np.kron(draw.uniform(0, 255, (height // 28, width // 28, 3)), np.ones((28, 28, 1)))
    y, x = np.mgrid[:height, :width]
    for _ in range(4):
        at, radius = draw.uniform(0, 1, 2) * (height, width), draw.uniform(0.05, 0.3) * width
        fields[(y - at[0]) ** 2 + (x - at[1]) ** 2 < radius**2] = draw.uniform(0, 255, 3)
    return (fields + draw.normal(0, 8, fields.shape)).clip(0, 255).astype(np.uint8)
