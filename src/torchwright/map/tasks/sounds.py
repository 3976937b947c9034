"""Sound files through a speech model: transcripts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchwright.core.errors import ModelError, TorchwrightError, unknown
from torchwright.map.tasks.base import Answer, Rejected, Task, TaskSpec
from torchwright.map.tasks.texts import text_fault
from torchwright.models.speech.transcript import Options
from torchwright.optimization.open_model import open_speech

DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


class SoundTask(Task):
    """Writes down what is said in files."""

    def __init__(self, spec: TaskSpec) -> None:
        model, options = spec.model, dict(spec.options.request)
        known = [field.name for field in dataclasses.fields(Options)]
        for name in options:
            if name not in known:
                raise unknown("option of a transcript", name, known)
        if model.dtype not in DTYPES:
            raise ModelError(f"--dtype {model.dtype}", allowed="fp32, bf16")
        self._recognizer = open_speech(model.model, DTYPES[model.dtype], model.quantize, trust=model.trust)
        self._options = options
        self._recognizer.check(Options(**options))
        assert spec.options.text_column is not None, "the plan names the column"
        self._column = spec.options.text_column

    def answer(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Answer]]:
        for place, row in enumerate(rows):
            if fault := text_fault(row, self._column):
                yield place, Rejected(fault)
                continue
            try:
                found = self._recognizer.transcribe(Path(row[self._column]), **self._options)
            except TorchwrightError as error:
                yield place, Rejected(str(error))
                continue
            segments = [
                {"start": segment.start, "end": segment.end, "text": segment.text}
                for segment in found.segments
            ]
            yield (
                place,
                {
                    "text": found.text,
                    "language": found.language,
                    "seconds": found.seconds,
                    "segments": segments,
                },
            )
