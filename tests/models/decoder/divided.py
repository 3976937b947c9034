"""The program of each process of `test_tensor_parallel.py`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from torchwright.hardware.kernels.cpu import shared_memory
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.tensor_parallel import processes

NEW = 12
"""Tokens of a greedy answer."""


class Case(NamedTuple):
    """A model as it is loaded."""

    folder: Path
    dtype: torch.dtype = torch.float32
    quantize: str | None = None


class Answer(NamedTuple):
    logits: np.ndarray
    """An array, because a tensor in a message lasts only as long as the process that sent it."""
    tokens: list[list[int]]
    kv_heads: int


def answer(case: Case, ids_BT: torch.Tensor, tp: int = 1) -> Answer:
    """Logits of all tokens, in chunks that cut a row, and a greedy answer to prompts of different lengths."""
    model = load_decoder(case.folder, case.dtype, case.quantize, tp=tp)
    prompts = [row[: len(row) - 5 * place] for place, row in enumerate(ids_BT.tolist())]
    tokens = model.generate(prompts, max_new_tokens=NEW, stop=[])
    return Answer(model.logits(ids_BT, prefill_chunk=23).numpy(), tokens, model.config.kv_heads)


def answers(tp: int, cases: list[Case], ids_BT: torch.Tensor, shared: bool) -> list[Answer]:
    """The same of one of `tp` processes."""
    if not shared:
        taken: Any = processes
        taken.open_shared = lambda: (None, "the test")
    return [answer(case, ids_BT, tp) for case in cases]


def opened_without_kernels(of: int, folder: Path) -> tuple[bool, str, list[str]]:
    """Return if this process shares memory where process `of` has no kernels, why not, and the files that are left."""
    taken: Any = shared_memory
    taken.FOLDER = folder
    if dist.get_rank() == of:
        taken.build = SimpleNamespace(load_fault=lambda: "no compiler")
    memory, reason = shared_memory.open_shared()
    dist.barrier()
    return memory is not None, reason, [path.name for path in folder.iterdir()]
