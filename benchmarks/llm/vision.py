"""The first token of an answer about a picture: Torchwright and transformers, in turns.

    python -m benchmarks.llm.vision [--models DIR] [--shape NAME] [--scheme none|w8a8|w4a8 …] [--side PIXELS]
        [--rounds N] [--json FILE]

Random weights of a real shape (speed does not depend on the values), one picture and 16 tokens of text. The picture is
prepared before the clock starts. Encoding it, reading the prompt and a step of decoding are timed apart. transformers
runs in bfloat16, ours with the scheme for the language model, and 8 bits for the encoder with any scheme that rounds;
on as many threads as PyTorch has. Ratios are medians over rounds.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import run, turns
from benchmarks.llm import native, shapes
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.shown import Shown, with_pictures
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.models.vision.reader import media_tokens
from torchwright.models.vision.record import Picture, picture_of

PATCH, MERGED = 14, 2
TEXT = 8
"""Tokens of text before the picture, and behind it."""
STEPS = 8
EXAMPLE = 140
"""Pixels of the picture by which our encoder's kernels are compared with transformers' modules."""
PARTS = ("encode", "read", "step")


def main() -> None:
    options = run.options(
        __doc__, models=str, shape="qwen2.5-vl-3b", scheme=list(native.SCHEMES[:3]), side=448, rounds=5
    )
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        folder = shapes.make(options.shape, Path(options.models or scratch))
        picture = picture_of_side(options.side)
        place = [media_tokens(folder)[0]] * picture.tokens
        ids = [*range(1000, 1000 + TEXT), *place, *range(2000, 2000 + TEXT)]
        contenders = {"transformers bf16": theirs(folder, picture, ids)}
        for scheme in options.scheme:
            loaded = load_decoder(folder, torch.bfloat16, scheme)
            loaded.vision = vision = PictureEncoder(folder, torch.bfloat16, rounded=scheme != "none")
            vision.load(picture_of_side(EXAMPLE))
            print(f"{scheme}: pictures by {vision.runs_as}")
            contenders[f"torchwright {scheme.replace('none', 'bf16')}"] = ours(loaded, picture, ids)
        for turn in contenders.values():
            turn()
        found = turns.in_turns(contenders, options.rounds)
    columns = (
        "contender",
        "encode, s",
        "read, s",
        "first token, s",
        "step, ms",
        "first token over transformers",
    )
    rows = run.Rows(options.json, columns)
    first = {name: [turn["encode"] + turn["read"] for turn in told] for name, told in found.items()}
    for name, told in found.items():
        middle = {part: statistics.median(turn[part] for turn in told) for part in PARTS}
        over = turns.ratio(first["transformers bf16"], first[name])
        row = {"shape": options.shape, "side": options.side, "contender": name, **middle, "over": over}
        rows.add(
            row,
            (
                name,
                f"{middle['encode']:.2f}",
                f"{middle['read']:.2f}",
                f"{statistics.median(first[name]):.2f}",
                f"{1e3 * middle['step']:.0f}",
                f"{over:.2f}x",
            ),
        )
    rows.write()


def picture_of_side(side: int) -> Picture:
    """A random picture as the processor of Qwen2.5-VL prepares it."""
    patches = side // PATCH
    pixels = np.random.default_rng(0).normal(size=(patches**2, 3 * 2 * PATCH**2)).astype(np.float32)
    grid = np.array([[1, patches, patches]], np.int64)
    return picture_of({"pixel_values": pixels, "image_grid_thw": grid}, (patches // MERGED) ** 2)


def ours(loaded: Any, picture: Picture, ids: list[int]) -> Any:
    """Return the call that times each part."""

    def turn() -> dict[str, float]:
        begun = time.perf_counter()
        shown = Shown.of(loaded.vision, ids, [picture])
        encoded = time.perf_counter()
        cache = loaded.new_cache([len(ids) + STEPS])
        sequence = cache.sequence(len(ids), shown.axes)
        piece = ids
        marks = [encoded]
        with loaded.on_threads():
            for _ in range(STEPS):
                place = (shown, sequence.length, len(piece))
                batch = with_pictures(cache.append([(sequence, piece)]), [place])
                piece = loaded.decoder.answer(batch, cache, batch.last_rows_B).values_NV.argmax(-1).tolist()
                marks.append(time.perf_counter())
        return parts(begun, marks)

    return turn


def theirs(folder: Path, picture: Picture, ids: list[int]) -> Any:
    """Return the call that times each part of transformers' model."""
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    pixels, grid = (
        torch.from_numpy(picture.arrays[name].numpy().copy()) for name in ("pixel_values", "image_grid_thw")
    )
    ids_1T = torch.tensor([ids])
    marks_1T = (ids_1T == model.config.image_token_id).int()

    def turn() -> dict[str, float]:
        begun = time.perf_counter()
        model.model.get_image_features(pixels, grid, return_dict=True)
        encoded = time.perf_counter()
        out = model(
            input_ids=ids_1T,
            pixel_values=pixels,
            image_grid_thw=grid,
            mm_token_type_ids=marks_1T,
            use_cache=True,
            logits_to_keep=1,
        )
        whole = time.perf_counter() - encoded
        marks = [encoded, begun + whole]  # the second call has encoded the picture once more
        at = time.perf_counter()
        for _ in range(STEPS - 1):
            token = out.logits[:, -1:].argmax(-1)
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
            marks.append(marks[1] + time.perf_counter() - at)
        return parts(begun, marks)

    return turn


def parts(begun: float, marks: list[float]) -> dict[str, float]:
    steps = [after - before for before, after in itertools.pairwise(marks[1:])]
    return {"encode": marks[0] - begun, "read": marks[1] - marks[0], "step": statistics.median(steps)}


if __name__ == "__main__":
    main()
