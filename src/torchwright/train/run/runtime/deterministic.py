"""`deterministic = true`: two runs on the same machines, of the same versions, are bitwise equal."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor import config as inductor

from torchwright.core import system
from torchwright.core.errors import first_line
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import RunFile

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(run: RunFile, device: str) -> Generator[None]:
    """Let torch take operators that give the same bits every time, where the run asks for it, while the block lasts.

    Raises `RunError` naming the first operator that has no such form. What a step draws at random depends on the seed,
    the step and the process in every run. Memory is not filled before use, since nothing here reads what was not
    written.
    """
    if not run.deterministic:
        yield
        return
    if device == "cpu" and run.threads is None:
        raise RunError(
            "deterministic = true needs `threads`, since sums are cut into as many parts",
            next=f"set threads = {torch.get_num_threads()} to have what this machine takes now",
        )
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        with inductor.patch(deterministic=True), system.environment({WORKSPACE: ":4096:8"}):
            yield
    except RuntimeError as error:
        if "torch.use_deterministic_algorithms" not in str(error):
            raise
        raise RunError(
            "deterministic = true, and the run takes an operator that has no deterministic form",
            found=first_line(error),
            next="leave deterministic out, or use another model, precision or device",
        ) from error
    finally:
        torch.set_deterministic_debug_mode(before[0])
        memory.fill_uninitialized_memory = before[1]
