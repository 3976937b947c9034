"""The figures of a run: operations counted by torch itself, lines that survive a kill, what a terminal shows."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from runs import CONFIG, MIXTURE
from torch.utils.flop_counter import FlopCounterMode

from torchwright.hardware.devices.base import Ceilings
from torchwright.models.decoder import read_decoder_config
from torchwright.train.model import Transformer, explicit_attention
from torchwright.train.run.loop import trainer as loop_trainer
from torchwright.train.run.observe.metrics import FILE, RunMetrics, perplexity, read_figures
from torchwright.train.run.runtime.checkpoint import CheckpointError
from torchwright.train.run.runtime.folder import hold
from torchwright.train.shape import Shape


@pytest.mark.parametrize(
    "changes", [{}, {"num_key_value_heads": 4, "head_dim": 32}, MIXTURE], ids=["gqa", "mha", "moe"]
)
def test_operations_are_those_that_torch_counts(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Attention as if nothing were masked, by trainer and planner alike; the planner counts norms' vectors as well."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    config = read_decoder_config(tmp_path)
    model = Transformer(config)
    model.use_attention(explicit_attention)
    model.reset_parameters(0)
    ids = torch.randint(0, config.vocabulary, (2, 48))
    with FlopCounterMode(display=False) as counter:
        total, valid = model.loss(ids, ids)
        (total / valid).backward()
    # The first layer's inputs are embedded ids: nothing is missing, since their gradient goes on to the table.
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    counted = counter.get_total_flops() / ids.numel() + 6 * vectors
    assert counted == pytest.approx(Shape(config).model_flops(48), rel=1e-6)


def test_a_window_limits_the_keys(tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    windowed = read_decoder_config(tmp_path)
    shape = Shape(windowed)
    attention = (shape.model_flops(4096) - shape.model_flops(1)) / (12 * shape.q_width * windowed.layers)
    assert attention == 8 - 1


def test_each_step_is_there_once_after_a_kill(tmp_path: Path) -> None:
    """The first attempt is killed in its fourth line of figures, the second goes on after step 2."""
    with RunMetrics(tmp_path, steps=4, live=False) as metrics:
        metrics.begin(0)
        for step in (1, 2, 3):
            metrics.figures(step, {"loss": 4.0 - step, "mfu": None})
            metrics.figures(step, {"validation_loss": 4.5 - step}, event="evaluation")
            metrics.event("sample", at=step, text=str(step))
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 4, "lo')
    with RunMetrics(tmp_path, steps=4, live=False) as metrics:
        metrics.begin(2)
        metrics.figures(3, {"loss": 0.5})
    assert read_figures(tmp_path) == {
        1: {"step": 1, "loss": 3.0, "validation_loss": 3.5},
        2: {"step": 2, "loss": 2.0, "validation_loss": 2.5},
        3: {"step": 3, "loss": 0.5},
    }
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == [1, 2, 3]
    assert [line["text"] for line in lines if line.get("event") == "sample"] == ["1", "2"]
    assert [line["at"] for line in lines if line.get("event") == "start"] == [0, 2]


def test_a_full_disk_hides_no_fault(tmp_path: Path) -> None:
    metrics = RunMetrics(tmp_path, steps=4, live=False)
    metrics.begin(0)
    assert metrics._file is not None
    metrics._file.close()

    def go_on() -> None:
        with Path("/dev/full").open("a", buffering=1) as full, metrics:
            metrics._file = full
            raise CheckpointError("the checkpoint of step 2 could not be written")

    with pytest.raises(CheckpointError, match="the checkpoint of step 2 could not be written"):
        go_on()


def test_a_file_gets_a_line_for_each_set_of_figures(tmp_path: Path) -> None:
    told = Console(file=io.StringIO(), width=60)  # a file has no width
    figures = {"loss": 2.0, "lr": 3e-4, "tokens_per_s": 12345.6, "mfu": 0.41, "memory_bytes": 2**31}
    with RunMetrics(tmp_path, steps=4, live=True, console=told) as metrics:
        metrics.figures(1, {**figures, "effective_time": 0.9})
        metrics.show("[red]a sample[/red]")
        metrics.figures(2, {"loss": 1.0, "epoch": 1.25})
    text = told.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"step 2 of 4  loss 1\.0000  epoch 1\.25  \ds left", text)
    assert "step 1 of 4  loss 2.0000  lr 3.00e-04  12,346 tok/s  MFU 41%  2.00 GiB  effective 90%" in text
    assert "[red]a sample[/red]" in text


def test_lines_carry_the_time_left_from_the_first_on_and_the_validation_loss(tmp_path: Path) -> None:
    told = Console(file=io.StringIO(), width=60)
    with RunMetrics(tmp_path, steps=9, live=True, console=told) as metrics:
        metrics.begin(0)
        metrics.figures(2, {"loss": 2.0})
        metrics.figures(3, {"validation_loss": 1.5}, event="evaluation")
        metrics.figures(4, {"loss": 1.0})
    lines = told.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert re.fullmatch(r"step 2 of 9  loss 2\.0000  \S+ left", lines[0])
    assert re.fullmatch(r"step 3 of 9  validation loss 1\.5000  \S+ left", lines[1])
    assert re.fullmatch(r"step 4 of 9  loss 1\.0000  validation loss 1\.5000 at step 3  \S+ left", lines[2])


def test_kinds_that_count_samples_have_epochs(tmp_path: Path) -> None:
    with RunMetrics(tmp_path, steps=9, live=False) as metrics:
        metrics.begin(0, data={"train": {"files": 1, "samples": 32}})
        metrics.figures(3, {"samples": 48, "loss": 1.0})
    assert read_figures(tmp_path)[3]["epoch"] == 1.5


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_moving_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    told = Console(file=Terminal(), width=120)
    with RunMetrics(tmp_path, steps=4, live=True, console=told) as metrics:
        metrics.figures(3, {"loss": 2.0})
    text = told.file.getvalue()  # type: ignore[attr-defined]
    assert "step 3/4" in text
    assert "loss 2.0000" in text


def test_a_process_that_shows_nothing_writes_nothing(tmp_path: Path) -> None:
    with RunMetrics(None, steps=4, live=True) as metrics:
        metrics.begin(0)
        metrics.figures(1, {"loss": 1.0})
        metrics.show("a sample")
    assert not list(tmp_path.iterdir())


def test_perplexity_of_a_hopeless_model() -> None:
    assert perplexity(0.0) == 1
    assert perplexity(1e4) == float("inf")


@pytest.mark.parametrize(("precision", "peak"), [("fp32", 2.0), ("bf16", 8.0)])
def test_the_measured_peak_is_that_of_the_products_type(precision: str, peak: float) -> None:
    rates = {"float32": 2.0, "bfloat16": 8.0}
    ceilings = [Ceilings(read_gb_per_s=1.0, tflops=rates)]
    device: Any = SimpleNamespace(ceilings=lambda: ceilings[0])
    run: Any = SimpleNamespace(precision=precision)
    assert loop_trainer._measured_peak(run, device) == peak
    ceilings[0] = Ceilings(read_gb_per_s=1.0, tflops=rates, disturbed="machine busy")
    assert loop_trainer._measured_peak(run, device) is None


def test_a_link_in_the_place_of_the_figures_is_not_written_through(tmp_path: Path) -> None:
    """A run folder may come from somebody else."""
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / "lock").symlink_to(precious)
    with contextlib.ExitStack() as held, pytest.raises(OSError, match="symbolic links"):
        hold(tmp_path, held)
    (tmp_path / FILE).symlink_to(precious)
    with RunMetrics(tmp_path, steps=4, live=False) as metrics:
        metrics.begin(0)
    assert precious.read_text() == "keep"
