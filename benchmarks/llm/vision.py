"""The first token of an answer about a picture, and a step of decoding: Torchwright and its peers, in turns.

    python -m benchmarks.llm.vision [--models DIR] [--shape NAME] [--scheme none|w8a8|w4a8 …] [--side PIXELS]
        [--rounds N] [--without-transformers] [--openvino PYTHON FOLDER …] [--llama PYTHON FOLDER …] [--json FILE]

Random weights of a real shape (speed does not depend on the values), a random picture and a short question. The clock
runs from the picture's pixels to the first token: preparing it as the model's processor does, encoding it, reading the
prompt. Ours and transformers report these parts; peers run in interpreters of their own, with as many threads. Every
turn has a picture of its own. "text" is our decoder on as many tokens without a picture. transformers computes in
bfloat16, ours with the scheme for the language model, and 8 bits for the encoder with any scheme that rounds. Ratios
are medians over rounds of one run; the peers' best turn of a round counts.

A folder for OpenVINO GenAI is made by optimum-intel, and one for llama.cpp (model.gguf, mmproj.gguf) by
`benchmarks.llm.vision_gguf`. The shape qwen2.5-vl-3b-third has 12 of 36 layers of the language model and 16 of 32 of
the encoder: three contenders of the whole shape do not fit into 24 GB while they are made.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import run, turns
from benchmarks.harness.peers import Peer
from benchmarks.llm import native, shapes
from benchmarks.llm.vision_peer import pixels, prompt
from torchwright.hub.tokenizer import open_tokenizer
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.generation.generate import PREFILL_CHUNK, LoadedDecoder
from torchwright.models.decoder.shown import Shown, with_pictures
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.models.vision.reader import PictureReader
from torchwright.models.vision.record import Picture

STEPS = 16
EXAMPLE = 140
"""Pixels of the picture by which our encoder's kernels are compared with transformers' modules."""
PARTS = ("prepare", "encode", "read")
PEERS = ("openvino", "llama")
COLUMNS = (
    *("contender", "tokens", "prepare, s", "encode, s", "read, s", "first token, s", "step, ms"),
    *("first token over the best peer", "step over the best peer", "step over text's"),
)
Turn = Callable[[], dict[str, float]]


class Prompts:
    """Prompts about random pictures, as the model's own processor prepares them."""

    def __init__(self, folder: Path, side: int) -> None:
        self._reader, self._side = PictureReader(folder), side
        self._reader.load()
        self._tokenizer = open_tokenizer(folder)

    def prepared(self, seed: int) -> tuple[Picture, list[int]]:
        """Return a picture from its pixels, and the prompt's tokens."""
        found = self._reader.read(pixels(self._side, seed))
        return found.picture, self._tokenizer.encode(
            prompt(f"<|vision_start|>{found.text}<|vision_end|>")
        ).ids


def main() -> None:
    options = run.options(
        __doc__,
        models=str,
        shape="qwen2.5-vl-3b",
        scheme=list(native.SCHEMES[:3]),
        side=448,
        rounds=5,
        without_transformers=False,
        **native.peer_options(*PEERS),
    )
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode(), contextlib.ExitStack() as stack:
        folder = shapes.make(options.shape, Path(options.models or scratch))
        prompts, contenders = Prompts(folder, options.side), dict[str, Turn]()
        peers = native.start_peers("benchmarks.llm.vision_peer", options, PEERS, stack)
        contenders |= {name: asks(peer, options.side) for name, peer in peers.items()}
        if not options.without_transformers:
            contenders["transformers bf16"] = theirs(folder, prompts)
        texts = dict[str, str]()
        for scheme in options.scheme:
            loaded = load_decoder(folder, torch.bfloat16, scheme)
            loaded.vision = vision = PictureEncoder(folder, torch.bfloat16, rounded=scheme != "none")
            vision.load(Prompts(folder, EXAMPLE).prepared(0)[0])
            name = f"torchwright {scheme.replace('none', 'bf16')}"
            run.say(f"{name}: pictures by {vision.runs_as}")
            contenders[name] = ours(loaded, prompts)
            texts[name] = f"{name}, text"
            contenders[texts[name]] = text_alone(loaded, len(prompts.prepared(0)[1]))
        for turn in contenders.values():
            turn()
        found = turns.in_turns(contenders, options.rounds)
    report(options, found, list(peers), texts)


def report(
    options: Any, found: dict[str, list[dict[str, float]]], peers: list[str], texts: dict[str, str]
) -> None:
    """Print a line for each contender, with ratios where it is one of ours."""
    rows = run.Rows(options.json, COLUMNS)
    for name, told in found.items():
        middle = {part: statistics.median(turn[part] for turn in told) for part in told[0]}
        row: run.Row = {"shape": options.shape, "side": options.side, "contender": name, **middle}
        ratios = ["", "", ""]
        if name in texts:
            for place, part in enumerate(("first", "step") if peers else ()):
                best = [min(found[peer][at][part] for peer in peers) for at in range(len(told))]
                row[f"{part}_over_peers"] = turns.ratio(best, [turn[part] for turn in told])
                ratios[place] = f"{row[f'{part}_over_peers']:.2f}x"
            steps = [[turn["step"] for turn in found[which]] for which in (texts[name], name)]
            row["step_over_text"] = turns.ratio(*steps)
            ratios[2] = f"{row['step_over_text']:.2f}x"
        shown = [f"{middle[part]:.2f}" if part in middle else "" for part in (*PARTS, "first")]
        rows.add(row, (name, f"{middle['tokens']:.0f}", *shown, f"{1e3 * middle['step']:.0f}", *ratios))


def asks(peer: Peer, side: int) -> Turn:
    """Return the call that has a peer take its turn."""
    seeds = itertools.count(1)
    return lambda: peer.ask(side, next(seeds), STEPS)


def ours(loaded: LoadedDecoder, prompts: Prompts) -> Turn:
    """Return the call that times each part."""
    seeds = itertools.count(1)

    def turn() -> dict[str, float]:
        begun = time.perf_counter()
        picture, ids = prompts.prepared(next(seeds))
        prepared = time.perf_counter()
        assert loaded.vision is not None
        shown = Shown.of(loaded.vision, ids, [picture])
        encoded = time.perf_counter()
        return parts(len(ids), [begun, prepared, encoded, *decoded(loaded, ids, shown)])

    return turn


def text_alone(loaded: LoadedDecoder, count: int) -> Turn:
    """Return the call that times our decoder on so many tokens of text."""

    def turn() -> dict[str, float]:
        ids = torch.randint(10, 8000, (count,)).tolist()
        begun = time.perf_counter()
        return parts(count, [begun, begun, begun, *decoded(loaded, ids, None)])

    return turn


def decoded(loaded: LoadedDecoder, ids: list[int], shown: Shown | None) -> list[float]:
    """Return when each token of the answer was there."""
    cache = loaded.new_cache([len(ids) + STEPS])
    sequence, marks, rest = cache.sequence(len(ids), shown.axes if shown else None), list[float](), ids
    with loaded.on_threads():
        while len(marks) <= STEPS:
            start = sequence.length
            stop = start + min(len(rest), PREFILL_CHUNK)
            stop = stop if shown is None else shown.places.end(start, stop)
            piece, rest = rest[: stop - start], rest[stop - start :]
            batch = with_pictures(cache.append([(sequence, piece)]), [(shown, start, len(piece))])
            token = loaded.decoder.answer(batch, cache, batch.last_rows_B).values_NV.argmax(-1).tolist()
            if not rest:
                rest = token
                marks.append(time.perf_counter())
    return marks


def theirs(folder: Path, prompts: Prompts) -> Turn:
    """Return the call that times each part of transformers' model."""
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    seeds = itertools.count(1)

    def turn() -> dict[str, float]:
        begun = time.perf_counter()
        picture, ids = prompts.prepared(next(seeds))
        prepared = time.perf_counter()
        pixels, grid = (
            torch.from_numpy(picture.arrays[name].numpy().copy())
            for name in ("pixel_values", "image_grid_thw")
        )
        ids_1T = torch.tensor([ids])
        model.model.get_image_features(pixels, grid, return_dict=True)
        encoded = time.perf_counter()
        out = model(
            input_ids=ids_1T,
            pixel_values=pixels,
            image_grid_thw=grid,
            mm_token_type_ids=(ids_1T == model.config.image_token_id).int(),
            use_cache=True,
            logits_to_keep=1,
        )
        # This call has encoded the picture once more: the clock goes on as if it had not.
        marks = [time.perf_counter()]
        for _ in range(STEPS):
            token = out.logits[:, -1:].argmax(-1)
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
            marks.append(time.perf_counter())
        twice = encoded - prepared
        return parts(len(ids), [begun, prepared, encoded, *(mark - twice for mark in marks)])

    return turn


def parts(count: int, marks: list[float]) -> dict[str, float]:
    """Return the parts of a turn from its marks: begun, prepared, encoded, the first token, each later one."""
    gaps = [after - before for before, after in itertools.pairwise(marks)]
    found = dict(zip(PARTS, gaps, strict=False))
    return {**found, "first": sum(gaps[:3]), "step": statistics.median(gaps[3:]), "tokens": count}


if __name__ == "__main__":
    main()
