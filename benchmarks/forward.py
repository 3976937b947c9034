"""Architectures of transformers at their published sizes: what `torchwright optimize FOLDER` makes of a forward pass.

    python benchmarks/forward.py [--only NAME …] [--time-budget 150] [--max-drop 0.03] [--json FILE]

Random weights with the bundled model's tokenizer. "speed-up" is the search's own last comparison of original and
result in turns, on the one batch that it times. Where an artifact takes any batch of text, "on other batches" has the
original and the artifact in turns over others of the text, each padded to its own longest sentence. Random weights
answer at random, so that answers change more easily than a trained model's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import torchwright
from torchwright.core.records import Interval
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.workloads.encoding import TextModel
from torchwright.workloads.forward import ForwardWorkload

BUNDLED = Path(torchwright.__file__).parent / "workloads" / "bundled"
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "distilbert-base": ("DistilBertForSequenceClassification", {"num_labels": 2}),
    "bert-base-ner": ("BertForTokenClassification", {"num_labels": 9}),
    "t5-small": (
        "T5ForConditionalGeneration",
        {"d_ff": 2048, "num_layers": 6, "num_heads": 8, "d_model": 512},
    ),
    "whisper-base": (
        "WhisperForConditionalGeneration",
        SPECIAL
        | {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6}
        | {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
        | {"encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "decoder_start_token_id": 3},
    ),
    "clip-vit-b32": ("CLIPModel", {}),
    "wav2vec2-base": ("Wav2Vec2ForCTC", {}),
}
"""Name → (architecture, what differs from its configuration's defaults, which are the published base sizes)."""

OTHER_BATCHES, ROUNDS = 16, 5


def make(name: str, folder: Path) -> int:
    """The model's folder; returns its parameters."""
    architecture, fields = MODELS[name]
    cls = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = cls(cls.config_class(**fields)).eval()
    model.save_pretrained(folder)
    shutil.copy2(BUNDLED / "tokenizer.json", folder)
    return sum(parameter.numel() for parameter in model.parameters())


def on_other_batches(folder: Path, out: Path) -> Interval | None:
    """How many times as fast the artifact is over batches that nothing was fitted to; None where it takes only one."""
    fast = torchwright.load(out).model
    if not isinstance(fast, TextModel):
        return None
    workload = ForwardWorkload(folder)
    original = workload.build()
    batches = []
    for index in range(1, OTHER_BATCHES + 1):
        inputs = workload.reader.inputs(index)
        longest = int(inputs["attention_mask"].sum(1).max())
        batches.append({name: tensor[:, :longest].contiguous() for name, tensor in inputs.items()})

    def seconds(model: Callable[..., Any]) -> float:
        begun = time.perf_counter()
        for batch in batches:
            model(**batch)
        return time.perf_counter() - begun

    with torch.inference_mode():
        for model in (original, fast):  # to warm up
            seconds(model)
        turns = [(seconds(original), seconds(fast)) for _ in range(ROUNDS)]
    return paired_speedup(*zip(*turns, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="One forward pass of other architectures, optimized.")
    parser.add_argument("--only", action="append", choices=MODELS, help="these models alone")
    parser.add_argument("--time-budget", type=float, default=150.0, help="seconds of each search")
    parser.add_argument("--max-drop", type=float, default=0.03)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    rows = {}
    print(
        "| model | parameters, M | original, ms | optimized, ms | speed-up | on other batches | kept | metric | loss |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in arguments.only or MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            folder, out = Path(scratch) / "model", Path(scratch) / "out"
            parameters = make(name, folder)
            words = ["optimize", str(folder), "-o", str(out), "--json", "--quiet"]
            words += ["--time-budget", str(arguments.time_budget), "--max-drop", str(arguments.max_drop)]
            program = "import sys; from torchwright.cli import main; sys.exit(main())"
            done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
            if done.returncode:
                print(
                    f"| {name} | {parameters / 1e6:.0f} | failed: {done.stderr.strip()[-200:]} |", flush=True
                )
                continue
            recipe = rows[name] = json.loads(done.stdout)["recipe"]
            others = on_other_batches(folder, out)
        speedup, kept = Interval(**recipe["speedup"]), [step["name"] for step in recipe["steps"]]
        quality = recipe["final"]["quality"]
        print(
            f"| {name} | {parameters / 1e6:.0f} | {1e3 * recipe['baseline']['seconds']:.1f} "
            f"| {1e3 * recipe['final']['seconds']:.1f} "
            f"| {speedup} | {others or ''} | {' + '.join(kept)} "
            f"| {quality['metric']} | {quality['drop']:.4f} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
