"""Contenders of speed.py that run on torch: ours, and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.speech.rules import BANDS, END, FRAMES, PROMPT, Windows
from torchwright.models.speech.whisper.features import LogMel


class Torchwright:
    """Torchwright's kernels: a precision of --quantize, and bfloat16 for everything else."""

    def __init__(self, folder: Path, how: str, threads: int) -> None:
        torch.set_num_threads(threads)
        from torchwright.models.decoder.precision import read_precision
        from torchwright.models.speech.load import load_speech  # noqa: F401  (its faults are reported before the timing)
        from torchwright.models.speech.whisper.native import FAMILY

        self.model = FAMILY.load_native(folder, torch.bfloat16, read_precision(how))
        self.features = LogMel(folder, bands=BANDS, frames=FRAMES)

    @torch.inference_mode()
    def encode(self, windows: Windows) -> list[Any]:
        return [self.model.encode(self.features(samples)) for samples in windows]

    @torch.inference_mode()
    def __call__(self, windows: Windows, tokens: int) -> int:
        steps = [self.model.steps(heard) for heard in self.encode(windows)]
        ids, count = [PROMPT] * len(steps), 0
        while count < tokens:
            hidden = self.model.read(list(zip(steps, ids, strict=True)))
            logits_BV = self.model.logits(torch.stack([rows[-1] for rows in hidden]))
            logits_BV[:, END] = -torch.inf
            ids, count = logits_BV.argmax(-1, keepdim=True).tolist(), count + 1
        return count


class Transformers:
    """transformers' modules and its plain `generate`, eager: fp32 or bf16."""

    def __init__(self, folder: Path, how: str, threads: int) -> None:
        torch.set_num_threads(threads)
        import transformers

        build: Any = transformers.WhisperForConditionalGeneration
        self.model = (
            build.from_pretrained(folder).eval().to({"fp32": torch.float32, "bf16": torch.bfloat16}[how])
        )
        self.plain: Any = transformers.GenerationMixin
        self.settings: Any = transformers.GenerationConfig
        self.features = LogMel(folder, bands=BANDS, frames=FRAMES)

    @torch.inference_mode()
    def encode(self, windows: Windows) -> Any:
        return self.model.get_encoder()(self._features(windows))

    @torch.inference_mode()
    def __call__(self, windows: Windows, tokens: int) -> int:
        ids = self.plain.generate(
            self.model,
            self._features(windows),
            decoder_input_ids=torch.tensor([PROMPT] * len(windows)),
            generation_config=self.settings(
                min_new_tokens=tokens, max_new_tokens=tokens, eos_token_id=END, pad_token_id=END
            ),
        )
        return ids.shape[1] - len(PROMPT)

    def _features(self, windows: Windows) -> torch.Tensor:
        return torch.cat([self.features(samples) for samples in windows]).to(self.model.dtype)
