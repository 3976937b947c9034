"""Forward passes of transformers' architectures at published sizes, optimized by `torchwright optimize FOLDER`.

    python -m benchmarks.optimize.forward [--only NAME …] [--time-budget 150] [--max-drop 0.03] [--json FILE]

Random weights with the bundled model's tokenizer. "speed-up" is the search's own last comparison of original and
result in turns, on the one batch that it times. "on other batches" has the original and
the artifact in turns over other batches of the text, each padded to its own longest sentence; it is empty for an
artifact that takes one batch only. Random weights
answer at random, so that answers change more easily than a trained model's.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import torchwright
from benchmarks.harness import run
from benchmarks.harness.run import BUNDLED
from benchmarks.harness.turns import seconds
from torchwright.core.records import Interval
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.workloads.encoding import TextModel
from torchwright.workloads.forward import ForwardWorkload

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER: dict[str, Any] = {
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "decoder_start_token_id": 3,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
}
T5 = {"d_ff": 2048, "num_layers": 6, "num_heads": 8, "d_model": 512}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "distilbert-base": ("DistilBertForSequenceClassification", {"num_labels": 2}),
    "bert-base-ner": ("BertForTokenClassification", {"num_labels": 9}),
    "t5-small": ("T5ForConditionalGeneration", T5),
    "whisper-base": ("WhisperForConditionalGeneration", SPECIAL | WHISPER),
    "clip-vit-b32": ("CLIPModel", {}),
    "wav2vec2-base": ("Wav2Vec2ForCTC", {}),
}
"""Name → (architecture, fields that differ from its configuration's defaults, the published base sizes)."""
OTHER_BATCHES, ROUNDS = 16, 5
COLUMNS = (
    *("model", "parameters, M", "original, ms", "optimized, ms", "speed-up", "on other batches"),
    *("kept", "metric", "loss"),
)


def make(name: str, folder: Path) -> int:
    """Write the model's folder; return its number of parameters."""
    architecture, fields = MODELS[name]
    cls = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = cls(cls.config_class(**fields)).eval()
    model.save_pretrained(folder)
    shutil.copy2(BUNDLED / "tokenizer.json", folder)
    return sum(parameter.numel() for parameter in model.parameters())


def on_other_batches(folder: Path, out: Path) -> Interval | None:
    """Return the artifact's speed-up over batches that nothing was fitted to; None if it takes only one."""
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
    both = [lambda model=model: [model(**batch) for batch in batches] for model in (original, fast)]
    with torch.inference_mode():
        turns = [[seconds(call) for call in both] for _ in range(ROUNDS + 1)][1:]  # the first warms up
    return paired_speedup(*zip(*turns, strict=True))


def main() -> None:
    options = run.options(__doc__, only=tuple(MODELS), time_budget=150.0, max_drop=0.03)
    rows = run.Rows(options.json, COLUMNS)
    for name in options.only:
        with tempfile.TemporaryDirectory() as scratch:
            folder, out = Path(scratch) / "model", Path(scratch) / "out"
            size = f"{make(name, folder) / 1e6:.0f}"
            words = ("optimize", folder, "-o", out, "--json", "--quiet")
            limits = ("--time-budget", options.time_budget, "--max-drop", options.max_drop)
            done = run.torchwright(*words, *limits, check=False)
            if done.returncode:
                failure = done.stderr.strip()[-200:]
                rows.add({"model": name, "failure": failure}, (name, size, f"failed: {failure}"))
                continue
            recipe = json.loads(done.stdout)["recipe"]
            others = on_other_batches(folder, out)
        final, kept = recipe["final"], " + ".join(step["name"] for step in recipe["steps"])
        ms = [f"{1e3 * recipe[state]['seconds']:.1f}" for state in ("baseline", "final")]
        gains = (Interval(**recipe["speedup"]), others or "")
        quality = final["quality"]
        cells = (name, size, *ms, *gains, kept, quality["metric"], f"{quality['drop']:.4f}")
        rows.add({"model": name, "recipe": recipe}, cells)


if __name__ == "__main__":
    main()
