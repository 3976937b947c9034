"""Seconds that Whisper takes for 30 s and a fixed number of tokens: ours, transformers, CTranslate2, OpenVINO GenAI,
whisper.cpp.

    python benchmarks/speech.py [--shape base small] [--batch 1 8] [--tokens 64 224] [--rounds 3]
        [--only CONTENDER …] [--peers-python PATH] [--openvino FOLDER] [--json FILE]

Random weights of the published shapes. Each contender is a process of its own (speech_peer.py); they take turns, and
ratios over the first of them are medians of the ratios of each turn. CPU time, of all threads together, is given beside
the seconds: on a busy machine it says more. --openvino is a folder with what optimum exported for each shape, as
SHAPE/; a peer that is not there is skipped with its reason.
"""

from __future__ import annotations

import argparse
import json
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

import speech_ggml
from speech_rules import END, SIZE, START
from torchwright.hardware.measure.clock import paired_speedup

SHAPES = {"base": (512, 6, 8), "small": (768, 12, 12)}
"""Model size, layers of each stack, heads."""
OURS = ("torchwright:none", "torchwright:w8a8", "torchwright:decoder=w8a8")
CONTENDERS = {
    **dict.fromkeys(("transformers:fp32", "transformers:bf16", *OURS), "here"),
    **dict.fromkeys(("ctranslate2:float32", "ctranslate2:int8", "ctranslate2:int8@1"), "peers"),
    **dict.fromkeys(("openvino:f32", "openvino:bf16", "whispercpp:f16", "whispercpp:q8_0"), "peers"),
}
"""Each with the interpreter that runs it; `@1` is on one thread, which suits CTranslate2 better on some machines."""


class Peer:
    """speech_peer.py for one contender."""

    def __init__(self, python: str, name: str, folder: Path) -> None:
        script = Path(__file__).with_name("speech_peer.py")
        self.words = folder / f"{name.replace(':', '-')}.log"
        with self.words.open("w") as words:
            self.process = subprocess.Popen(
                [python, str(script), name, str(folder), str(torch.get_num_threads())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
            )
        self._answer()

    def turn(self, batch: int, tokens: int) -> dict[str, float]:
        assert self.process.stdin
        self.process.stdin.write(f"{batch} {tokens}\n")
        self.process.stdin.flush()
        found = self._answer()
        if found["tokens"] != tokens:
            raise RuntimeError(f"{found['tokens']} tokens in place of {tokens}")
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            lines = [text.strip() for text in self.words.read_text(errors="replace").splitlines()]
            raise RuntimeError(next((text for text in reversed(lines) if text), "it ended without a word"))
        return json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 224])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="CONTENDER"
    )
    parser.add_argument("--peers-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--openvino", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.rounds < 2:
        parser.error("--rounds: two or more, of which ratios have an interval")
    print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, transformers {transformers.__version__},"
    )
    print(f"load {os.getloadavg()[0]:.0f}, {torch.backends.cpu.get_cpu_capability()}\n")
    rows: list[dict[str, Any]] = []
    for shape in asked.shape:
        with TemporaryDirectory() as scratch:
            folder = make(shape, Path(scratch))
            peers = start(asked, shape, folder)
            try:
                for batch in asked.batch:
                    for tokens in asked.tokens:
                        rows += compare(peers, shape, batch, tokens, asked.rounds)
                        if asked.json:
                            asked.json.write_text(json.dumps(rows, indent=1))
            finally:
                for peer in peers.values():
                    peer.close()
    return 0


def make(shape: str, folder: Path) -> Path:
    """A random Whisper of a published shape."""
    model, layers, heads = SHAPES[shape]
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": 4 * model}
    ids: dict[str, Any] = {
        "eos_token_id": END,
        "pad_token_id": END,
        "bos_token_id": END,
        "decoder_start_token_id": START,
    }
    config = transformers.WhisperConfig(vocab_size=SIZE, d_model=model, **ids, **sides)
    made: Any = transformers.WhisperForConditionalGeneration(config)
    made.generation_config = transformers.GenerationConfig(
        **ids, suppress_tokens=[], begin_suppress_tokens=[]
    )
    made.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """One of Whisper's size and special tokens, whose words mean nothing; converters ask for it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"word{i}" for i in range(len(alphabet), END))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    languages = ["en", *(f"l{i}" for i in range(98))]
    tasks = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
    tokenizer.add_special_tokens(
        [f"<|{name}|>" for name in ("endoftext", "startoftranscript", *languages, *tasks)]
    )
    tokenizer.add_tokens([f"<|{tick * 0.02:.2f}|>" for tick in range(1501)])
    end = "<|endoftext|>"
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end
    )
    fast.save_pretrained(folder)


def start(asked: argparse.Namespace, shape: str, folder: Path) -> dict[str, Peer]:
    """Those contenders that are there, each ready for its turn; the reasons of the others are printed."""
    pythons: dict[str, str] = {"here": sys.executable, "peers": asked.peers_python}
    if asked.openvino:
        (folder / "openvino").symlink_to((asked.openvino / shape).absolute())
    found: dict[str, Peer] = {}
    for name in asked.only:
        python = pythons[CONTENDERS[name]]
        try:
            kind, _, how = name.partition("@")[0].partition(":")
            if kind == "ctranslate2":
                convert(python, folder, how)
            elif kind == "whispercpp":
                speech_ggml.write(folder, folder / f"ggml-{how}.bin", how)
            found[name] = Peer(python, name, folder)
        except (RuntimeError, OSError) as error:
            print(f"{shape}: {name} is skipped: {str(error)[:200]}", flush=True)
    return found


def convert(python: str, folder: Path, how: str) -> None:
    """CTranslate2's folder of the same weights."""
    code = (
        "import sys, ctranslate2 as c; "
        "c.converters.TransformersConverter(sys.argv[1]).convert(sys.argv[2], quantization=sys.argv[3])"
    )
    target = folder / f"ct2-{how}"
    if target.exists():
        return
    done = subprocess.run([python, "-c", code, str(folder), str(target), how], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the converter failed"])[-1])


def compare(peers: dict[str, Peer], shape: str, batch: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each contender, printed as it is known; the first round warms up and is not counted."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
    for _ in range(rounds + 1):
        for name, peer in list(peers.items()):
            try:
                turns[name].append(peer.turn(batch, tokens))
            except RuntimeError as error:
                print(f"{shape}: {name} is out: {str(error)[:200]}", flush=True)
                peers.pop(name).close()
                del turns[name]
    print(
        f"| {shape}, batch {batch}, {tokens} tokens | s a window | CPU s | encoder s | encoder CPU s | speed-up |"
    )
    print("|---|---|---|---|---|---|")
    rows: list[dict[str, Any]] = []
    for name, taken in turns.items():
        row: dict[str, Any] = {"shape": shape, "batch": batch, "tokens": tokens, "contender": name}
        for key in ("seconds", "cpu", "encoder", "encoder_cpu"):
            values = [turn[key] / batch for turn in taken[1:] if key in turn]
            row[key] = statistics.median(values) if values else None
        gain = paired_speedup(
            *([turn["seconds"] for turn in turns[who][1:]] for who in (next(iter(turns)), name))
        )
        row |= {"real_time_factor": row["seconds"] / 30, "over_the_first": gain.value}
        rows.append(row)
        shown = [
            "-" if row[key] is None else f"{row[key]:.3f}"
            for key in ("seconds", "cpu", "encoder", "encoder_cpu")
        ]
        print(f"| {name} | {' | '.join(shown)} | {gain.value:.2f}x |", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
