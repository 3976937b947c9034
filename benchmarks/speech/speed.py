"""Seconds of Whisper for 30 s and a fixed number of tokens: ours, transformers, CTranslate2, OpenVINO, whisper.cpp.

    python -m benchmarks.speech.speed [--shape base small] [--batch 1 8] [--tokens 64 224] [--rounds 3]
        [--only CONTENDER …] [--peers-python PATH] [--openvino FOLDER] [--json FILE]

Random weights of the published shapes. Each contender is a process of its own (peer.py). They take turns, and ratios
over the first of them are medians of the ratios of each turn. CPU time, of all threads together, is given next to the
seconds: on a busy machine it says more. --openvino is a folder with optimum's exports of each shape, as SHAPE/. A
missing peer is skipped with its reason.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.harness import run
from benchmarks.harness.peers import Peer
from benchmarks.harness.run import Row
from benchmarks.speech import ggml
from benchmarks.speech.rules import END, SIZE, START
from torchwright.hardware.measure.clock import paired_speedup

SHAPES = {"base": (512, 6, 8), "small": (768, 12, 12)}
"""Model size, layers of each stack, heads."""
HERE = ("transformers:fp32", "transformers:bf16")
HERE += ("torchwright:none", "torchwright:w8a8", "torchwright:decoder=w8a8")
PEERS = ("ctranslate2:float32", "ctranslate2:int8", "ctranslate2:int8@1")
PEERS += ("openvino:f32", "openvino:bf16", "whispercpp:f16", "whispercpp:q8_0")
"""Contenders in --peers-python; `@1` is on one thread, which suits CTranslate2 better on some machines."""
KEYS = ("seconds", "cpu", "encoder", "encoder_cpu")


def main() -> None:
    options = run.options(
        __doc__,
        shape=tuple(SHAPES),
        batch=[1, 8],
        tokens=[64, 224],
        rounds=3,
        only=(*HERE, *PEERS),
        peers_python=sys.executable,
        openvino=Path,
    )
    if options.rounds < 2:
        raise SystemExit("--rounds: two or more, of which ratios have an interval")
    rows = run.Rows(options.json, note=f"load {os.getloadavg()[0]:.0f}")
    for shape in options.shape:
        with TemporaryDirectory() as scratch:
            peers = start(options, shape, make(shape, Path(scratch)))
            try:
                for batch in options.batch:
                    for tokens in options.tokens:
                        rows += compare(peers, shape, batch, tokens, options.rounds)
                        rows.write()
            finally:
                for peer in peers.values():
                    peer.close()


def make(shape: str, folder: Path) -> Path:
    """Write a random Whisper of a published shape."""
    model, layers, heads = SHAPES[shape]
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": 4 * model}
    ids: dict[str, Any] = dict.fromkeys(("eos_token_id", "pad_token_id", "bos_token_id"), END)
    ids["decoder_start_token_id"] = START
    config = transformers.WhisperConfig(vocab_size=SIZE, d_model=model, **ids, **sides)
    made: Any = transformers.WhisperForConditionalGeneration(config)
    plain = {"suppress_tokens": [], "begin_suppress_tokens": []}
    made.generation_config = transformers.GenerationConfig(**ids, **plain)
    made.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of Whisper's size and special tokens, whose words mean nothing; converters need one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"word{i}" for i in range(len(alphabet), END))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    languages = ["en", *(f"l{i}" for i in range(98))]
    tasks = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
    names = ("endoftext", "startoftranscript", *languages, *tasks)
    tokenizer.add_special_tokens([f"<|{name}|>" for name in names])
    tokenizer.add_tokens([f"<|{tick * 0.02:.2f}|>" for tick in range(1501)])
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def start(options: argparse.Namespace, shape: str, folder: Path) -> dict[str, Peer]:
    """Start the contenders, each ready for its turn; print the reasons of those that are missing."""
    if options.openvino:
        (folder / "openvino").symlink_to((options.openvino / shape).absolute())
    found: dict[str, Peer] = {}
    for name in options.only:
        python = sys.executable if name in HERE else options.peers_python
        try:
            kind, _, how = name.partition("@")[0].partition(":")
            if kind == "ctranslate2":
                convert(python, folder, how)
            elif kind == "whispercpp":
                ggml.write(folder, folder / f"ggml-{how}.bin", how)
            arguments = (name, folder, torch.get_num_threads())
            found[name] = Peer("benchmarks.speech.peer", *arguments, python=python)
        except (RuntimeError, OSError) as error:
            print(f"{shape}: {name} is skipped: {str(error)[:200]}", flush=True)
    return found


def convert(python: str, folder: Path, how: str) -> None:
    """Write CTranslate2's folder of the same weights."""
    code = (
        "import sys, ctranslate2 as c; "
        "c.converters.TransformersConverter(sys.argv[1]).convert(sys.argv[2], quantization=sys.argv[3])"
    )
    target = folder / f"ct2-{how}"
    if target.exists():
        return
    done = subprocess.run([python, "-c", code, str(folder), str(target), how], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(run.last_line(done.stderr) or "the converter failed")


def compare(peers: dict[str, Peer], shape: str, batch: int, tokens: int, rounds: int) -> list[Row]:
    """Return a row for each contender; the first round warms up and is not counted."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    for _ in range(rounds + 1):
        for name, peer in list(peers.items()):
            try:
                found = peer.ask(batch, tokens)
                if found["tokens"] != tokens:
                    raise RuntimeError(f"{found['tokens']} tokens in place of {tokens}")
                turns[name].append(found)
            except RuntimeError as error:
                print(f"{shape}: {name} is out: {str(error)[:200]}", flush=True)
                peers.pop(name).close()
                del turns[name]
    titles = ("s a window", "CPU s", "encoder s", "encoder CPU s", "speed-up")
    run.head((f"{shape}, batch {batch}, {tokens} tokens", *titles))
    rows: list[Row] = []
    first = [turn["seconds"] for turn in next(iter(turns.values()), ())[1:]]
    for name, taken in turns.items():
        row: Row = {"shape": shape, "batch": batch, "tokens": tokens, "contender": name}
        for key in KEYS:
            values = [turn[key] / batch for turn in taken[1:] if key in turn]
            row[key] = statistics.median(values) if values else None
        gain = paired_speedup(first, [turn["seconds"] for turn in taken[1:]])
        row |= {"real_time_factor": row["seconds"] / 30, "over_the_first": gain.value}
        rows.append(row)
        shown = ("-" if row[key] is None else f"{row[key]:.3f}" for key in KEYS)
        print(run.line((name, *shown, f"{gain.value:.2f}x")), flush=True)
    return rows


if __name__ == "__main__":
    main()
