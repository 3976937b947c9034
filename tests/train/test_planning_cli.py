"""`torchwright plan-layout`: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from torchwright.cli.plan_layout import command
from torchwright.core.errors import UnknownName
from torchwright.train.planning.job import JobError
from torchwright.train.planning.models import KNOWN


def run(*words: str) -> Result:
    return CliRunner().invoke(command, words)


def test_the_table_says_layouts_memory_time_reasons_and_what_is_unknown() -> None:
    result = run("llama-3.1-70b", "--nodes", "2", "--tokens-per-step", "1M")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    for words in (
        "70.6 B parameters on 2 x 8 h100, 128 sequences of 8192 tokens a step, bf16, adamw, compiled",
        "optimizer",
        "matrix products",
        "does not fit into 73.6 GiB",
        "The model does not know",
        "stragglers",
    ):
        assert words in text


def test_json_has_the_same_layouts(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(KNOWN["mixtral-8x7b"]))
    result = run(
        str(file), "--nodes", "2", "--tokens-per-step", "1M", "--context", "4K", "--fix", "pp=1", "--json"
    )
    data = json.loads(result.output)
    assert data["job"]["tokens_per_step"] == 2**20
    assert data["job"]["context"] == 4096
    assert all(layout["layout"]["pp"] == 1 for layout in data["layouts"])
    speeds = [layout["tokens_per_second"] for layout in data["layouts"]]
    assert speeds[0] >= 0.99 * max(speeds)
    assert data["model"]["active_parameters"] < data["model"]["parameters"]


def test_a_cluster_on_which_nothing_fits_says_so() -> None:
    result = run("llama-3.1-405b", "--nodes", "1")
    assert result.exit_code == 0
    assert "No layout is possible" in result.output


def test_this_machines_cpu_is_measured_and_planned_for() -> None:
    words = ("--devices-per-node", "2", "--tokens-per-step", "4K", "--context", "512", "--precision", "fp32")
    result = run("llama-3.2-1b", "--device", "cpu", *words, "--eager", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["cluster"]["device"]["fused"] is False


@pytest.mark.parametrize("value", ["0", "4T", "-1", "", "1.5M"])
def test_tokens_that_are_no_number_are_refused(value: str) -> None:
    result = run("llama-3.1-8b", "--tokens-per-step", value)
    assert result.exit_code == 2
    assert "no number of tokens" in result.output


def test_what_cannot_be_planned_is_refused_by_name() -> None:
    assert isinstance(run("llama-3.1-8b", "--context", "3K", "--tokens-per-step", "4M").exception, JobError)
    assert isinstance(run("llama-9-8b").exception, UnknownName)
    assert isinstance(run("llama-3.1-8b", "--fix", "dp=2").exception, UnknownName)
    assert isinstance(run("llama-3.1-8b", "--precision", "fp8").exception, UnknownName)
