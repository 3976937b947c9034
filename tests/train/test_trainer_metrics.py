"""The figures of a run: operations counted by torch itself, lines that survive a kill, what a terminal shows."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from runs import CONFIG, MIXTURE
from torch.utils.flop_counter import FlopCounterMode

from torchwright.decoder import read_decoder_config
from torchwright.devices.base import Ceilings
from torchwright.train import loop_trainer
from torchwright.train.metrics import FILE, Metrics, flops_per_token, perplexity, read_figures
from torchwright.train.model import Transformer, explicit_attention


@pytest.mark.parametrize(
    "changes", [{}, {"num_key_value_heads": 4, "head_dim": 32}, MIXTURE], ids=["gqa", "mha", "moe"]
)
def test_operations_are_those_that_torch_counts(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Explicit attention computes the masked half as well, which is what twice the context means here."""
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
    assert counter.get_total_flops() / ids.numel() == pytest.approx(flops_per_token(config, 2 * 48), rel=1e-6)


def test_a_window_limits_the_keys(tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    windowed = read_decoder_config(tmp_path)
    seen = sum(min(place + 1, 8) for place in range(4096)) / 4096
    full = flops_per_token(windowed, 0)
    attention = (flops_per_token(windowed, 4096) - full) / (
        12 * windowed.heads * windowed.head_dim * windowed.layers
    )
    assert attention == pytest.approx(seen, rel=0.01 + 1 / 16)


def test_lines_survive_a_kill_and_a_step_done_twice(tmp_path: Path) -> None:
    with Metrics(tmp_path, steps=4, live=False) as metrics:
        metrics.event("start", at=0)
        for step, loss in ((1, 3.0), (2, 2.0)):
            metrics.figures(step, {"loss": loss, "mfu": None})
        metrics.figures(2, {"validation_loss": 2.5})
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 3, "lo')
    with (tmp_path / FILE).open("a") as file:
        file.write("\n" + json.dumps({"step": 2, "loss": 1.5}) + "\n")
    assert read_figures(tmp_path) == {
        1: {"step": 1, "loss": 3.0},
        2: {"step": 2, "loss": 1.5, "validation_loss": 2.5},
    }


def test_a_file_gets_a_line_for_each_set_of_figures(tmp_path: Path) -> None:
    told = Console(file=io.StringIO(), width=200)
    figures = {"loss": 2.0, "lr": 3e-4, "tokens_per_s": 12345.6, "mfu": 0.41, "memory_bytes": 2**31}
    with Metrics(tmp_path, steps=4, live=True, console=told) as metrics:
        metrics.figures(1, {**figures, "effective_time": 0.9})
        metrics.show("[red]a sample[/red]")
    text = told.file.getvalue()  # type: ignore[attr-defined]
    assert "step 1  loss 2.0000  lr 3.00e-04  12,346 tok/s  MFU 41%  2.00 GiB  effective 90%" in text
    assert "[red]a sample[/red]" in text


def test_a_terminal_gets_one_moving_line(tmp_path: Path) -> None:
    told = Console(file=io.StringIO(), width=120, force_terminal=True)
    with Metrics(tmp_path, steps=4, live=True, console=told) as metrics:
        metrics.figures(3, {"loss": 2.0})
    text = told.file.getvalue()  # type: ignore[attr-defined]
    assert "step 3/4" in text
    assert "loss 2.0000" in text


def test_a_process_that_shows_nothing_writes_nothing(tmp_path: Path) -> None:
    with Metrics(None, steps=4, live=True) as metrics:
        metrics.figures(1, {"loss": 1.0})
        metrics.show("a sample")
    assert not list(tmp_path.iterdir())


def test_perplexity_of_a_hopeless_model() -> None:
    assert perplexity(0.0) == 1
    assert perplexity(1e4) == float("inf")


@pytest.mark.parametrize(("precision", "peak"), [("fp32", 2.0), ("bf16", 8.0)])
def test_the_measured_peak_is_that_of_the_products_type(
    monkeypatch: pytest.MonkeyPatch, precision: str, peak: float
) -> None:
    ceilings = Ceilings(read_gb_per_s=1.0, tflops={"float32": 2.0, "bfloat16": 8.0})
    monkeypatch.setattr(loop_trainer, "get_device", lambda name: SimpleNamespace(ceilings=lambda: ceilings))
    run: Any = SimpleNamespace(precision=precision)
    assert loop_trainer._measured_peak(run, "cpu") == peak
