"""A small model and pairs of answers for the tests of preferences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from runs import BUNDLED, CONFIG, make_run

from torchwright.models.decoder.families import decoder_config
from torchwright.train.model import Transformer, save_folder

WORDS = ["sun", "moon", "tree", "river", "stone", "bird", "cloud", "fire"]
SMALL: dict[str, Any] = {**CONFIG, "vocab_size": 4096}


def small_model(folder: Path) -> Path:
    """A folder of random weights with the bundled tokenizer."""
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(SMALL))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, source)
    config = decoder_config(SMALL, "the test")
    model = Transformer(config)
    model.reset_parameters(0)
    save_folder(model, config, folder / "model", source=source)
    return folder / "model"


def write_pairs(path: Path, count: int = 40) -> Path:
    """A chosen answer repeats two words, a rejected one does not."""
    rng = np.random.default_rng()
    rows = []
    for _ in range(count):
        one, other, third = rng.choice(WORDS, 3, replace=False)
        rows.append(
            {"prompt": f"Say {one}, {other}:", "chosen": f" {one} {other}", "rejected": f" no, {third}!"}
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs_run(folder: Path, base: Path, **changes: Any) -> Path:
    """A run of DPO over pairs of its own, unless they lie there already."""
    if not (folder / "pairs.jsonl").exists():
        write_pairs(folder / "pairs.jsonl")
    given: dict[str, Any] = {
        "model": {"folder": str(base)},
        "data": {"train": ["pairs.jsonl"]},
        "preference": {"beta": 0.5},
        "context": 64,
    }
    return make_run(folder, **given | changes)
