"""Encoder-decoder text models compared with CTranslate2 and transformers: T5-small's and Marian's shapes.

    pip install ctranslate2
    python -m benchmarks.llm.seq2seq [--rounds 7] [--tokens 64] [--source 64] [--shape NAME …]

Random weights, 1 and 8 sources, greedy answers of a fixed length, which the end of text cannot shorten. Contenders take
turns, each in a process of its own. Printed are medians of wall time and of processor time over all threads. Ratios
within a round are to CTranslate2's int8, on one thread or all, whichever is faster. On a busy machine processor time is
the one to read; pools that spin while they wait are charged for it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.harness import peers, run
from benchmarks.harness.peers import Peer
from benchmarks.harness.turns import both_clocks, ratio, since
from torchwright.models.decoder.seq2seq.load import load_seq2seq

Sources = Sequence[Sequence[int]]
Answer = Callable[[Sources, int], Any]
"""Sources (as token ids) and the number of new tokens → an answer."""
T5_END, T5_PAD, MARIAN_END, MARIAN_PAD = 1, 0, 0, 58100
UNKNOWN = 2
# fmt: off
MARIAN: dict[str, Any] = {
    "vocab_size": 58101, "decoder_vocab_size": 58101, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6,
    "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
    "activation_function": "swish", "scale_embedding": True, "max_position_embeddings": 512,
    "pad_token_id": MARIAN_PAD, "eos_token_id": MARIAN_END, "decoder_start_token_id": MARIAN_PAD,
    "forced_eos_token_id": None,
}
# fmt: on
SHAPES: dict[str, Callable[[], Any]] = {
    "t5-small": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(decoder_start_token_id=T5_PAD)  # pyright: ignore[reportCallIssue]
    ),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**MARIAN)),
}


def save(folder: Path, make: Callable[[], Any]) -> Any:
    """Write a folder with a vocabulary of numbers, which converters want to read; return its configuration."""
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
    return lambda sources, tokens: model.generate(list(map(list, sources)), max_new_tokens=tokens, stop=[])


def eager(folder: Path, how: str) -> Answer:
    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=getattr(torch, how)).eval()

    def answer(sources: Sources, tokens: int) -> Any:
        ids = torch.tensor(sources)
        length = {"min_new_tokens": tokens, "max_new_tokens": tokens}
        mask = torch.ones_like(ids)
        return model.generate(input_ids=ids, attention_mask=mask, do_sample=False, num_beams=1, **length)

    return answer


CONTENDERS: dict[str, Callable[[Path, str], Answer]] = {"torchwright": torchwright, "transformers": eager}
ROWS = (
    "torchwright w8a8",
    "torchwright none",
    "ctranslate2 int8 1",
    f"ctranslate2 int8 {torch.get_num_threads()}",
    f"ctranslate2 float32 {torch.get_num_threads()}",
    "transformers float32",
    "transformers bfloat16",
)


def start_contender(name: str, folder: Path) -> Peer:
    """Start a row of `ROWS`; a name of CTranslate2's ends with its number of threads."""
    kind, how, *threads = name.split()
    if kind != "ctranslate2":
        return Peer("benchmarks.llm.seq2seq", "_contender", kind, how, folder, torch.get_num_threads())
    converted = folder / f"ctranslate2-{how}"
    if not converted.is_dir():
        import ctranslate2  # pyright: ignore[reportMissingImports]

        ctranslate2.converters.TransformersConverter(str(folder)).convert(str(converted), quantization=how)
    return Peer("benchmarks.llm.seq2seq_peer", converted, how, *threads)


def contender() -> tuple[None, Callable[[Sources, int], tuple[float, float]]]:
    kind, how, folder, threads = sys.argv[2:]
    torch.set_num_threads(int(threads))
    answer = CONTENDERS[kind](Path(folder), how)

    def turn(sources: Sources, tokens: int) -> tuple[float, float]:
        with torch.inference_mode():
            begun = both_clocks()
            answer(sources, tokens)
            return since(begun)

    return None, turn


def main() -> None:
    options = run.options(__doc__, json=False, rounds=7, tokens=64, source=64, shape=tuple(SHAPES))
    run.Rows()
    for shape in options.shape:
        with tempfile.TemporaryDirectory() as folder:
            measure(shape, Path(folder), options)


def measure(shape: str, folder: Path, options: argparse.Namespace) -> None:
    config, ready = save(folder, SHAPES[shape]), dict[str, Peer]()
    ids = range(UNKNOWN + 1, config.vocab_size - 1)
    for name in ROWS:
        try:
            ready[name] = start_contender(name, folder)
        except (RuntimeError, ImportError) as error:  # a contender that is missing is a row that says so
            print(f"{shape}: {name}: {error}", flush=True)
    for batch in (1, 8):
        found: dict[str, list[list[float]]] = {name: [] for name in ready}
        for round_ in range(options.rounds + 1):
            asked = [[*random.choices(ids, k=options.source - 1), config.eos_token_id] for _ in range(batch)]
            words = [[*(f"w{token}" for token in row[:-1]), "</s>"] for row in asked]
            for name in random.sample(list(ready), len(ready)):
                seconds = ready[name].ask(words if name.startswith("ctranslate2") else asked, options.tokens)
                if round_:  # the first warms up
                    found[name].append(seconds)
        report(shape, batch, found)
    for peer in ready.values():
        peer.close()


def report(shape: str, batch: int, found: dict[str, list[list[float]]]) -> None:
    wall, spent = (
        {name: [turn[clock] for turn in turns] for name, turns in found.items()} for clock in (0, 1)
    )
    peers = [other for other in found if other.startswith("ctranslate2 int8")]
    for name in found:
        row = {"shape": shape, "batch": batch, "contender": name}
        row |= {"wall_s": round(statistics.median(wall[name]), 4)}
        row |= {"processor_s": round(statistics.median(spent[name]), 4)}
        if peers:
            # Its own best: small batches gain nothing by a second thread there.
            peer = min(peers, key=lambda other: statistics.median(wall[other]))
            row |= {"wall_ratio": round(ratio(wall[peer], wall[name]), 2)}
            row |= {"processor_ratio": round(ratio(spent[peer], spent[name]), 2)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["_contender"]:
        peers.serve(contender)
    else:
        main()
