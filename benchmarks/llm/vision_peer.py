"""A peer of vision.py in its own interpreter: OpenVINO GenAI or llama.cpp's mtmd on the same shape.

Arguments: openvino FOLDER THREADS, or llama FOLDER THREADS, whose folder has model.gguf and mmproj.gguf. A question is
a picture's side, a seed and a number of new tokens. The answer has the seconds from the picture's pixels to the first
token, and those of a later one.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import peers

Turn = Callable[[int, int, int], dict[str, float]]
TEXT = "What is in the picture?"
CONTEXT = 4096


def pixels(side: int, seed: int) -> np.ndarray:
    """A random picture (H, W, 3), another one for each seed: no contender answers from what it remembers."""
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)


def prompt(picture: str) -> str:
    """The user's message as the chat template writes it, with these words in the picture's place."""
    return f"<|im_start|>user\n{picture}{TEXT}<|im_end|>\n<|im_start|>assistant\n"


def openvino(path: str, threads: int) -> Turn:
    import openvino as ov  # pyright: ignore[reportMissingImports]
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]

    pipe = genai.VLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads)

    def generate(side: int, seed: int, new: int) -> Any:
        options = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        options.apply_chat_template = False
        return pipe.generate(
            prompt("<ov_genai_image_0>"),
            images=[ov.Tensor(pixels(side, seed)[None])],
            generation_config=options,
        )

    def turn(side: int, seed: int, new: int) -> dict[str, float]:
        begun = time.perf_counter()
        generate(side, 2 * seed, 1)
        first = time.perf_counter() - begun
        metrics = generate(side, 2 * seed + 1, 1 + new).perf_metrics
        return {
            "first": first,
            "step": metrics.get_tpot().mean / 1e3,
            "tokens": metrics.get_num_input_tokens(),
        }

    return turn


def llama(path: str, threads: int) -> Turn:
    import llama_cpp  # pyright: ignore[reportMissingImports]
    from llama_cpp import mtmd_cpp as mtmd  # pyright: ignore[reportMissingImports]

    folder, piece = Path(path), 512
    sizes = {"n_ctx": CONTEXT, "n_batch": piece, "n_ubatch": piece}
    model = llama_cpp.Llama(
        str(folder / "model.gguf"), n_threads=threads, n_threads_batch=threads, verbose=False, **sizes
    )
    settings = mtmd.mtmd_context_params_default()
    settings.use_gpu, settings.print_timings, settings.n_threads = False, False, threads
    encoder = mtmd.mtmd_init_from_file(str(folder / "mmproj.gguf").encode(), model.model, settings)
    if not encoder:
        raise RuntimeError(f"{folder / 'mmproj.gguf'} cannot be loaded")
    text = prompt(mtmd.mtmd_default_marker().decode()).encode()
    vocabulary = model.n_vocab()

    def best() -> int:
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())

    def read(picture: np.ndarray) -> int:
        """Read the prompt with a picture, and return its tokens."""
        height, width, _ = picture.shape
        bitmap = mtmd.mtmd_bitmap_init(width, height, picture.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
        chunks = mtmd.mtmd_input_chunks_init()
        given = mtmd.mtmd_input_text(text=text, text_len=len(text), add_special=False, parse_special=True)
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        past = llama_cpp.llama_pos(0)
        failed = mtmd.mtmd_tokenize(encoder, chunks, ctypes.byref(given), bitmaps, 1)
        failed = failed or mtmd.mtmd_helper_eval_chunks(
            encoder, model.ctx, chunks, 0, 0, piece, True, ctypes.byref(past)
        )
        count = mtmd.mtmd_helper_get_n_tokens(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        mtmd.mtmd_input_chunks_free(chunks)
        if failed:
            raise RuntimeError(f"mtmd failed: {failed}")
        return count

    def turn(side: int, seed: int, new: int) -> dict[str, float]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(model.ctx), True)
        picture = pixels(side, seed)
        begun = time.perf_counter()
        count = read(picture)
        token = (llama_cpp.llama_token * 1)(best())
        first = time.perf_counter()
        for _ in range(new):
            if llama_cpp.llama_decode(model.ctx, llama_cpp.llama_batch_get_one(token, 1)):
                raise RuntimeError("llama_decode failed")
            token[0] = best()
        return {"first": first - begun, "step": (time.perf_counter() - first) / new, "tokens": count}

    return turn


if __name__ == "__main__":
    peers.serve_one_of({"openvino": openvino, "llama": llama}, 56, 0, 2)
