# pyright: reportMissingImports=false
"""Contenders of speed.py that bring code of their own: torch is not imported in their processes."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speech.rules import BANDS, END, FRAMES, PROMPT, SIZE, Windows


class CTranslate2:
    """faster-whisper's engine and features: int8 or float32; FOLDER/ct2-HOW is written by speed.py."""

    def __init__(self, folder: Path, how: str, threads: int) -> None:
        import ctranslate2
        from faster_whisper.feature_extractor import FeatureExtractor

        self.library = ctranslate2
        self.model = ctranslate2.models.Whisper(
            str(folder / f"ct2-{how}"), compute_type=how, intra_threads=threads
        )
        self.features = FeatureExtractor(feature_size=BANDS)

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
        made = np.stack([self.features(samples, padding=0)[:, :FRAMES] for samples in windows])
        return self.library.StorageView.from_array(np.ascontiguousarray(made, np.float32))


class OpenVINO:
    """OpenVINO GenAI's pipeline, weights in int8, computing in f32 or bf16; one window after another, its own features.

    FOLDER/openvino is optimum's export (`optimum-cli export openvino … --weight-format int8`).
    """

    encode = None

    def __init__(self, folder: Path, how: str, threads: int) -> None:
        import openvino_genai

        self.pipeline = openvino_genai.WhisperPipeline(
            str(folder / "openvino"),
            "CPU",
            INFERENCE_PRECISION_HINT=how,
            INFERENCE_NUM_THREADS=threads,
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


class WhisperCpp:
    """whisper.cpp by its C interface, in the library that pywhispercpp brings; one window after another.

    pywhispercpp's own calls take one token at a time and return no logits. FOLDER/ggml-HOW.bin is written by speed.py.
    """

    def __init__(self, folder: Path, how: str, threads: int) -> None:
        found = importlib.util.find_spec("pywhispercpp")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("pywhispercpp is not installed")
        (library,) = (Path(found.origin).parents[1] / "pywhispercpp.libs").glob("libwhisper-*.so*")
        self.c = ctypes.CDLL(str(library))
        self.c.whisper_init_from_file.restype = ctypes.c_void_p
        self.c.whisper_get_logits.restype = ctypes.POINTER(ctypes.c_float)
        self.context = ctypes.c_void_p(
            self.c.whisper_init_from_file(str(folder / f"ggml-{how}.bin").encode())
        )
        if not self.context:
            raise RuntimeError("whisper.cpp does not read the model")
        self.threads = threads

    def encode(self, windows: Windows) -> None:
        for samples in windows:
            samples = np.ascontiguousarray(samples)
            at = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            self._done(self.c.whisper_pcm_to_mel(self.context, at, len(samples), self.threads))
            self._done(self.c.whisper_encode(self.context, 0, self.threads))

    def __call__(self, windows: Windows, tokens: int) -> int:
        count = 0
        for samples in windows:
            self.encode([samples])
            ids, past, count = PROMPT, 0, 0
            while count < tokens:
                given = (ctypes.c_int32 * len(ids))(*ids)
                self._done(self.c.whisper_decode(self.context, given, len(ids), past, self.threads))
                rows = np.ctypeslib.as_array(self.c.whisper_get_logits(self.context), (len(ids), SIZE))
                logits_V = rows[-1].copy()
                logits_V[END] = -np.inf
                past, count, ids = past + len(ids), count + 1, [int(logits_V.argmax())]
        return count

    def _done(self, status: int) -> None:
        if status:
            raise RuntimeError(f"whisper.cpp answers {status}")
