"""Held-out loss and sample text of the model that is being trained, wherever it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchwright.models.decoder.generation.text import FolderTokenizer
from torchwright.train.model.foreign import ModelConfig
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import Precision, Run
from torchwright.train.run.objectives.objective import MicroBatch, NextToken, Objective
from torchwright.train.run.objectives.precision import autocast
from torchwright.train.run.objectives.setup import Batches
from torchwright.train.run.observe.metrics import HELD_OUT, perplexity
from torchwright.train.run.runtime.corpus import Corpus, held_out

PADDING = 64
"""Texts are computed at a multiple of this length and of tp, which divides sequences."""


class Evaluator:
    """Measures the same held-out windows and continues the same prompts at every evaluation."""

    def __init__(self, run: Run, config: ModelConfig, source: Path, corpus: Corpus, device: str) -> None:
        """Raises `RunError` for prompts without a tokenizer, or longer than a window."""
        self.run, self.config, self.device = run, config, device
        self.windows = held_out(run, corpus, config.bos)
        self.prompts: list[list[int]] = []
        if run.evaluation.prompts:
            if not (source / "tokenizer.json").is_file():
                raise RunError(
                    "evaluation.prompts needs a tokenizer", next="set `model.tokenizer` in the run file"
                )
            self.text = FolderTokenizer(source, config.bos)
            self.prompts = [self.text.encode(prompt) for prompt in run.evaluation.prompts]

    @torch.no_grad()
    def measure(self, objective: Objective[MicroBatch], batches: Batches) -> dict[str, float]:
        """The loss and the objective's figures of the held-out windows, over all processes; empty without any.

        The rows of a training micro-batch are computed at once, so that nothing is compiled for another shape; what
        the last of them are more than there are windows holds no label.
        """
        if self.windows is None:
            return {}
        run = self.run
        rows = batches.rows(run.batch_tokens // run.context) // run.micro_batches
        everywhere = rows * run.parallel.batch_ways
        told = torch.zeros(2 + len(objective.figures), dtype=torch.float64, device=self.device)
        for first in range(0, self.windows.count, everywhere):
            batch = batches.prepare(self.windows.batch(first + batches.part * rows, rows))
            with autocast(run.precision, self.device):
                loss, more = objective(batch)
            told += torch.cat([objective.count(batch)[None].double(), loss[None].double(), more.double()])
        if dist.get_world_size() > 1:
            dist.all_reduce(told)  # those along tp count the same tokens, in all sums
        count, *totals = told.tolist()
        means = [total / count for total in totals]
        names = ("loss", *objective.figures)
        figures = {f"{HELD_OUT}{name}": mean for name, mean in zip(names, means, strict=True)}
        if isinstance(objective, NextToken):
            figures[f"{HELD_OUT}perplexity"] = perplexity(means[0])
        return figures

    def samples(self, model: nn.Module) -> list[str]:
        """The prompts with their most likely continuations."""
        if not self.prompts:
            return []
        texts = continued(
            model,
            self.prompts,
            self.run.evaluation.sample_tokens,
            device=self.device,
            precision=self.run.precision,
            multiple=math.lcm(PADDING, self.run.parallel.tp),
            stop=self.config.eos,
        )
        return [self.text.decode(text) for text in texts]


@torch.no_grad()
def continued(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    device: str,
    precision: Precision,
    multiple: int,
    stop: Sequence[int] = (),
) -> list[list[int]]:
    """Prompts and their most likely continuations; a text ends at a token of `stop`.

    The whole text is computed again for each token, at one length, a multiple of `multiple`, since what is to come
    changes nothing before it: slow per token, but it needs no cache and runs however the model is sharded. Every
    process gets the same answer.
    """
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    longest += -longest % multiple
    texts = [list(prompt) for prompt in prompts]
    ended = [False] * len(texts)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(new_tokens):
            ids_BT = torch.zeros(len(texts), longest, dtype=torch.int64)
            for row, text in enumerate(texts):
                ids_BT[row, : len(text)] = torch.tensor(text)
            with autocast(precision, device):
                logits: Any = model(ids_BT.to(device))
            logits_BTV = logits.full_tensor() if isinstance(logits, DTensor) else logits
            for row, text in enumerate(texts):
                if ended[row]:
                    continue
                token = int(logits_BTV[row, len(text) - 1].argmax())
                ended[row] = token in stop
                if not ended[row]:
                    text.append(token)
            if all(ended):
                break
    return texts
