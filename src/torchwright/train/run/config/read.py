"""A language model's run file, read and checked (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchwright.train.run.config.check import check_run
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.run import Run
from torchwright.train.run.config.run_file import parse_file, read_toml, with_settings


def read_run(path: Path, settings: Mapping[str, Any] | None = None) -> Run:
    """Return the run of a file; `settings` are fields by their dotted names, which win over the file's.

    Raises `RunError`, or `UnknownName` with the nearest field, naming file and key.
    """
    run = parse_run(with_settings(read_toml(path), settings or {}), str(path))
    check_run(run)
    return run


def parse_run(data: dict[str, Any], source: str = "the run") -> Run:
    """A run from plain data; `source` is named in errors."""
    if data.get("clip") is False:  # TOML has no null
        data = {**data, "clip": None}
    if data.get("compile") == "autograd":
        raise RunError(
            "compile = 'autograd' is not offered: compiling the backward pass as a whole does not pay",
            found="1.02 times the speed of compile = true, after a first step of 71 s where that takes 10 "
            "(processor time; docs/log.md, 2026-11-25; benchmarks/train/speed.py)",
            allowed="true, false",
            next="set compile = true",
        )
    return parse_file(Run, data, source)


def with_merge(run: Run) -> Run:
    """The run with `lora.merge`; raises `RunError` where there is nothing to merge."""
    if run.lora is None:
        raise RunError(
            "--merge puts adapters into a model, and the run has no [lora]", next="leave --merge out"
        )
    return run.model_copy(update={"lora": run.lora.model_copy(update={"merge": True})})
