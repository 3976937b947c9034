"""Encoder-decoder text models beside CTranslate2 and transformers: T5-small's and Marian's shapes, random weights.

    pip install ctranslate2
    python benchmarks/seq2seq.py [--rounds 7] [--tokens 64] [--source 64]

Greedy answers of a fixed length, which the end of text cannot shorten, for 1 and 8 sources, contenders in turns, each
in a process of its own. It prints medians of wall time and of processor time over all threads, and of the ratios within
a round to CTranslate2's int8, on one thread or all, whichever is faster. Where others use the machine, processor time
is the one to read; pools that spin while they wait are charged for it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from torchwright.models.decoder.load_seq2seq import load_seq2seq

Answer = Callable[[Sequence[Sequence[int]], int], Any]
"""Of sources (as token ids) and the number of new tokens."""
T5_END, T5_PAD, MARIAN_END, MARIAN_PAD = 1, 0, 0, 58100
UNKNOWN = 2
SHAPES: dict[str, Callable[[], Any]] = {
    "t5-small": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(decoder_start_token_id=T5_PAD)  # pyright: ignore[reportCallIssue]
    ),
    "marian": lambda: transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=58101,
            decoder_vocab_size=58101,
            d_model=512,
            encoder_layers=6,
            decoder_layers=6,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            encoder_ffn_dim=2048,
            decoder_ffn_dim=2048,
            activation_function="swish",
            scale_embedding=True,
            max_position_embeddings=512,
            pad_token_id=MARIAN_PAD,
            eos_token_id=MARIAN_END,
            decoder_start_token_id=MARIAN_PAD,
            forced_eos_token_id=None,
        )
    ),
}


def save(folder: Path, make: Callable[[], Any]) -> Any:
    """A folder with a vocabulary of numbers, which converters want to read; its configuration."""
    model = make().eval()
    model.save_pretrained(folder)
    config = model.config
    named = {config.pad_token_id: "<pad>", config.eos_token_id: "</s>", UNKNOWN: "<unk>"}
    words = {named.get(i, f"w{i}"): i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return config


def torchwright(folder: Path, how: str) -> Answer:
    model = load_seq2seq(folder, torch.bfloat16, how)
    return lambda sources, tokens: model.generate(
        [list(ids) for ids in sources], max_new_tokens=tokens, stop=[]
    )


def eager(folder: Path, how: str) -> Answer:
    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=getattr(torch, how)).eval()

    def answer(sources: Sequence[Sequence[int]], tokens: int) -> Any:
        ids = torch.tensor(sources)
        return model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
        )

    return answer


CONTENDERS: dict[str, Callable[[Path, str], Answer]] = {
    "torchwright": torchwright,
    "transformers": eager,
}
ROWS = (
    "torchwright w8a8",
    "torchwright none",
    "ctranslate2 int8 1",
    f"ctranslate2 int8 {torch.get_num_threads()}",
    f"ctranslate2 float32 {torch.get_num_threads()}",
    "transformers float32",
    "transformers bfloat16",
)


class Contender:
    """A row of `ROWS` in a process of its own; raises `RuntimeError` for what its making raised."""

    def __init__(self, name: str, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        threads = torch.get_num_threads()
        self._process = context.Process(target=work, args=(theirs, name, folder, threads), daemon=True)
        self._process.start()
        self._answer()

    def __call__(self, sources: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        """Seconds by the clock, and of all its threads."""
        self._pipe.send((sources, tokens))
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def _answer(self) -> Any:
        found = self._pipe.recv()
        if isinstance(found, str):
            self.close()
            raise RuntimeError(found)
        return found


class CTranslate2:
    """The same of CTranslate2, in seq2seq_peer.py; its name ends with its number of threads."""

    def __init__(self, name: str, folder: Path) -> None:
        _, how, threads = name.split()
        converted = folder / f"ctranslate2-{how}"
        if not converted.is_dir():
            import ctranslate2  # pyright: ignore[reportMissingImports]

            ctranslate2.converters.TransformersConverter(str(folder)).convert(
                str(converted), quantization=how
            )
        command = [sys.executable, str(Path(__file__).with_name("seq2seq_peer.py")), str(converted)]
        self._process = subprocess.Popen(
            [*command, how, threads], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def __call__(self, sources: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        words = [[*(f"w{token}" for token in ids[:-1]), "</s>"] for ids in sources]
        assert self._process.stdin
        print(json.dumps({"sources": words, "tokens": tokens}), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"CTranslate2 ended with {self._process.wait()}")
        return json.loads(line)


def work(pipe: Connection, name: str, folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    kind, how = name.split()
    try:
        answer = CONTENDERS[kind](folder, how)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send(None)
    with torch.inference_mode():
        while True:
            sources, tokens = pipe.recv()
            begun, before = time.perf_counter(), time.process_time()
            answer(sources, tokens)
            pipe.send((time.perf_counter() - begun, time.process_time() - before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--source", type=int, default=64)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    for shape in options.shape or SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            measure(shape, Path(folder), options)


def measure(shape: str, folder: Path, options: argparse.Namespace) -> None:
    config, ready = save(folder, SHAPES[shape]), dict[str, Contender | CTranslate2]()
    ids = range(UNKNOWN + 1, config.vocab_size - 1)
    for name in ROWS:
        try:
            ready[name] = (
                CTranslate2(name, folder) if name.startswith("ctranslate2") else Contender(name, folder)
            )
        except (RuntimeError, ImportError) as error:  # a contender that is not here is a row that says so
            print(f"{shape}: {name}: {error}", flush=True)
    for batch in (1, 8):
        wall: dict[str, list[float]] = {name: [] for name in ready}
        spent: dict[str, list[float]] = {name: [] for name in ready}
        for turn in range(options.rounds + 1):
            sources = [
                [*random.choices(ids, k=options.source - 1), config.eos_token_id] for _ in range(batch)
            ]
            for name in random.sample(sorted(ready), len(ready)):
                seconds, processor = ready[name](sources, options.tokens)
                if turn:  # the first is to warm up
                    wall[name].append(seconds)
                    spent[name].append(processor)
        for name in ready:
            row = {
                "shape": shape,
                "batch": batch,
                "contender": name,
                "wall_s": round(statistics.median(wall[name]), 4),
                "processor_s": round(statistics.median(spent[name]), 4),
            }
            if peers := [other for other in ready if other.startswith("ctranslate2 int8")]:
                # Its own best: few rows gain nothing by a second thread there.
                peer = min(peers, key=lambda other: statistics.median(wall[other]))
                for key, times in (("wall_ratio", wall), ("processor_ratio", spent)):
                    ratios = [other / own for other, own in zip(times[peer], times[name], strict=True)]
                    row[key] = round(statistics.median(ratios), 2)
            print(json.dumps(row), flush=True)
    for each in ready.values():
        each.close()


if __name__ == "__main__":
    main()
