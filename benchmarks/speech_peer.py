"""One contender of speech.py, in whatever interpreter has it: a Whisper over windows of 30 s, a fixed number of tokens.

    python benchmarks/speech_peer.py CONTENDER FOLDER THREADS

Answers every line "BATCH TOKENS" on standard input with one line of JSON: seconds, seconds of CPU time of all threads,
and seconds of the encoder alone, where it can be called by itself. Features are made anew each time, by ours where
the contender has none of its own. The end is forbidden, so that every window has its tokens.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchwright.speech.whisper.features import LogMel

FRAMES, RATE = 3000, 16_000
END = 50257
PROMPT = [50258, 50259, 50359, 50363]
"""Start, English, transcribe, no timestamps."""
Windows = Sequence[np.ndarray]


class Torchwright:
    """Torchwright's kernels: a precision as --quantize takes it, bfloat16 beside it."""

    def __init__(self, folder: Path, how: str) -> None:
        from torchwright.decoder.precision import read_precision
        from torchwright.speech.load import load_speech  # noqa: F401  (its faults are told before the timing)
        from torchwright.speech.whisper.native import FAMILY

        self.model = FAMILY.load_native(folder, torch.bfloat16, read_precision(how))
        self.features = LogMel(folder, bands=80, frames=FRAMES)

    def encode(self, windows: Windows) -> list[Any]:
        return [self.model.encode(self.features(samples)) for samples in windows]

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

    def __init__(self, folder: Path, how: str) -> None:
        import transformers

        build: Any = transformers.WhisperForConditionalGeneration
        self.model = (
            build.from_pretrained(folder).eval().to({"fp32": torch.float32, "bf16": torch.bfloat16}[how])
        )
        self.plain: Any = transformers.GenerationMixin
        self.settings: Any = transformers.GenerationConfig
        self.features = LogMel(folder, bands=80, frames=FRAMES)

    def encode(self, windows: Windows) -> Any:
        return self.model.get_encoder()(self._features(windows))

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


class CTranslate2:
    """What faster-whisper runs on: int8 or float32; FOLDER/ct2-HOW is made by speech.py."""

    def __init__(self, folder: Path, how: str) -> None:
        import ctranslate2  # pyright: ignore[reportMissingImports]

        self.library = ctranslate2
        self.model = ctranslate2.models.Whisper(
            str(folder / f"ct2-{how}"), compute_type=how, intra_threads=torch.get_num_threads()
        )
        self.features = LogMel(folder, bands=80, frames=FRAMES)

    def encode(self, windows: Windows) -> Any:
        return self.model.encode(self._features(windows))

    def __call__(self, windows: Windows, tokens: int) -> int:
        found = self.model.generate(
            self._features(windows),
            [PROMPT] * len(windows),
            beam_size=1,
            max_length=2 * tokens,  # it counts a token twice
            suppress_tokens=[END],
            suppress_blank=False,
        )
        return len(found[0].sequences_ids[0])

    def _features(self, windows: Windows) -> Any:
        made = np.concatenate([self.features(samples).numpy() for samples in windows])
        return self.library.StorageView.from_array(np.ascontiguousarray(made))


class OpenVINO:
    """OpenVINO GenAI's pipeline, weights in int8, computing in f32 or bf16; one window after another, its own features.

    FOLDER/openvino is optimum's export (`optimum-cli export openvino … --weight-format int8`).
    """

    encode = None

    def __init__(self, folder: Path, how: str) -> None:
        import openvino_genai  # pyright: ignore[reportMissingImports]

        self.pipeline = openvino_genai.WhisperPipeline(
            str(folder / "openvino"),
            "CPU",
            INFERENCE_PRECISION_HINT=how,
            INFERENCE_NUM_THREADS=torch.get_num_threads(),
        )
        self.settings = self.pipeline.get_generation_config()
        self.settings.ignore_eos = True
        self.settings.suppress_tokens = []
        self.settings.language, self.settings.task = "<|en|>", "transcribe"

    def __call__(self, windows: Windows, tokens: int) -> int:
        self.settings.max_new_tokens = tokens
        for samples in windows:
            found = self.pipeline.generate(samples.tolist(), self.settings)
        steps = found.perf_metrics.get_num_generated_tokens()
        return int(steps)


CONTENDERS: dict[str, Callable[[Path, str], Any]] = {
    "torchwright": Torchwright,
    "transformers": Transformers,
    "ctranslate2": CTranslate2,
    "openvino": OpenVINO,
}


def main() -> None:
    name, folder, threads = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    torch.set_num_threads(int(threads))
    kind, _, how = name.partition(":")
    contender = CONTENDERS[kind](Path(folder), how)
    print("{}", file=answers, flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            batch, tokens = map(int, line.split())
            windows = [(0.1 * np.random.randn(30 * RATE)).astype(np.float32) for _ in range(batch)]
            begun, before = time.perf_counter(), time.process_time()
            count = contender(windows, tokens)
            found = {
                "seconds": time.perf_counter() - begun,
                "cpu": time.process_time() - before,
                "tokens": count,
            }
            if contender.encode is not None:
                begun, before = time.perf_counter(), time.process_time()
                contender.encode(windows)
                found |= {"encoder": time.perf_counter() - begun, "encoder_cpu": time.process_time() - before}
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
