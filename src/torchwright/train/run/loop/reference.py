"""The reference of preferences: log-probabilities by the starting model, computed once and kept with the tokens.

With adapters that is the model without them, since they are empty until the first step.

    RUN/tokens/reference-….safetensors    logp (pairs, 2) float32, by the digest of weights, precision and pairs
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from torchwright.core.paths import file_digest
from torchwright.core.process.files import replacing
from torchwright.train.data.packing import Packed
from torchwright.train.data.shards import Shards
from torchwright.train.run.config.run import Run
from torchwright.train.run.objectives.adapt import base_digests
from torchwright.train.run.objectives.learner import LanguageLearner
from torchwright.train.run.objectives.precision import autocast
from torchwright.train.run.objectives.preference import Preferences
from torchwright.train.run.runtime.corpus import Corpus
from torchwright.train.run.runtime.processes import on_first

VERSION = 1
TENSOR, KEY = "logp", "key"


def with_reference(run: Run, corpus: Corpus, learner: LanguageLearner, folder: Path, tokens: Path) -> Corpus:
    """The corpus with the reference's log-probabilities, where the run's loss needs them.

    `learner` has taken no step and no checkpoint; the run's paths start from `folder`, and `tokens` is where they are
    kept. Those of other weights, another precision or other pairs are left alone, and computed anew.
    """
    if run.preference is None or not run.preference.needs_reference:
        return corpus
    assert run.model.folder is not None
    base = folder / run.model.folder
    weights = on_first(lambda: base_digests(base))

    def of(shards: Shards) -> np.ndarray:
        key = on_first(lambda: _key(run, weights, shards))
        path = tokens / f"reference-{key[:16]}.safetensors"
        if on_first(lambda: _read(path, key)) is None:
            logp_P2 = _computed(run, shards, learner)
            on_first(lambda: _write(path, key, logp_P2))
        kept_P2 = on_first(lambda: _read(path, key))
        assert kept_P2 is not None
        return kept_P2

    return dataclasses.replace(
        corpus,
        reference={name: of(shards) for name, shards in corpus.train.items()},
        held_out_reference=None if corpus.validation is None else of(corpus.validation),
    )


def _key(run: Run, weights: dict[str, str], shards: Shards) -> str:
    base = None if run.lora is None else run.lora.base
    pairs = [shards.digest(), *(file_digest(path) for path in shards.paths)]
    return hashlib.sha256(json.dumps([VERSION, weights, run.precision, base, pairs]).encode()).hexdigest()


def _read(path: Path, key: str) -> np.ndarray | None:
    """Return the kept values; None if they are missing, damaged, or of other data."""
    try:
        with safe_open(path, "np") as file:
            return file.get_tensor(TENSOR) if (file.metadata() or {}).get(KEY) == key else None
    except (FileNotFoundError, SafetensorError):
        return None


def _write(path: Path, key: str, logp_P2: np.ndarray) -> None:
    path.parent.mkdir(exist_ok=True)  # ready shards leave none
    with replacing(path) as new:
        save_file({TENSOR: logp_P2}, new, metadata={KEY: key})


@torch.no_grad()
def _computed(run: Run, shards: Shards, learner: LanguageLearner) -> np.ndarray:
    """(pairs, 2) float32; each process computes its part of the windows, a micro-batch at a time."""
    objective = learner.objective
    assert isinstance(objective, Preferences)
    packed = Packed(shards, run.context, 0, end=None, pairs=True)
    batches = learner.batches
    rows = batches.rows(run.batch_tokens // run.context) // run.micro_batches
    found_P2 = torch.zeros(len(packed.pieces.length_P), 2, device=learner.device)
    with learner.evaluating():
        # As many on every process: sharded layers are gathered by all of them.
        for first in range(0, packed.count, rows * run.parallel.batch_ways):
            numbers = [first + batches.part * rows + row for row in range(rows)]
            windows = [number if number < packed.count else None for number in numbers]
            with autocast(run.precision, learner.device):
                answers = objective.answers(batches.prepare(packed.rows(windows)))
            held = [packed.held(window) for window in windows if window is not None]
            if held:
                found_P2[torch.from_numpy(np.concatenate(held))] = answers.logp_P2.float()
    if dist.get_world_size() > 1:
        dist.all_reduce(found_P2)
    return found_P2.cpu().numpy()
