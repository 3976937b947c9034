"""RUN.toml: what is refused, and how it is said; schedules and the plan of a step as functions of its number."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import CONFIG, to_toml

from torchwright.core.errors import TorchwrightError, UnknownName
from torchwright.train.layout import LayoutError
from torchwright.train.run.config.check import check_run
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.config.read import parse_run, read_run
from torchwright.train.run.config.run import Run
from torchwright.train.run.config.run_file import changed_fields
from torchwright.train.run.config.schedule import plan_step, rate, steps

BASE: dict[str, Any] = {
    "out": "out",
    "tokens": 100_000,
    "batch_tokens": 1024,
    "context": 128,
    "model": {"config": CONFIG},
    "data": {"train": ["*.npy"]},
}


def make(**changes: Any) -> Run:
    run = parse_run({**BASE, **changes})
    check_run(run)
    return run


def test_a_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(to_toml({**BASE, "clip": False, "optimizer": {"name": "muon", "betas": [0.8, 0.9]}}))
    run = read_run(path)
    assert run.clip is None
    assert run.optimizer.betas == (0.8, 0.9)
    assert run.precision == "bf16"
    assert run == parse_run(run.model_dump(mode="json"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"contxt": 3}, r"unknown field of the run 'contxt'; did you mean 'context'\?"),
        ({"data": {"trian": ["a"]}}, r"'data\.trian'; did you mean 'data\.train'"),
        ({"optimizer": {"lrr": 1.0}}, r"'optimizer\.lrr'; did you mean 'optimizer\.lr'"),
        ({"qat": {"scheme": "w4a8", "groupsize": 32}}, r"did you mean 'qat\.group_size'"),
    ],
)
def test_an_unknown_field_names_the_nearest(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnknownName, match=words):
        make(**change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 0}, "tokens: .*greater than 0"),
        ({"tokens": "many"}, 'tokens: .*Found: tokens = "many"'),
        ({"precision": "float9"}, "precision: .*'fp32', 'bf16'"),
        ({"model": {}}, "either `folder` or `config`"),
        ({"model": {"folder": "a", "config": CONFIG}}, "either `folder` or `config`"),
        ({"optimizer": {"lr": -1.0}}, r"optimizer\.lr"),
        ({"optimizer": {"lr": math.nan}}, r"optimizer\.lr"),
        ({"qat": {"scheme": "w4a8", "group_size": 48}}, r"qat\.group_size"),
        ({"batch_tokens": 1000}, "batch_tokens=1000 cannot be divided.*= 128"),
        ({"micro_batches": 3}, "= 384"),
        ({"layout": {"dp_shard": 16}}, "16 parts of the batch"),
        ({"context": 129, "batch_tokens": 1290, "layout": {"cp": 2}}, "cannot be divided over cp=2"),
        (
            {"context": 130, "batch_tokens": 1300, "layout": {"cp": 2, "tp": 2}},
            "over cp=2 x tp=2.*multiple of 4",
        ),
        (
            {"layout": {"tp": 4}, "schedule": {"name": "wsd", "decay_context": 2}},
            "windows of 2 tokens cannot be divided",
        ),
        ({"context": 1, "data": {"train": ["a"], "begin_every": 1}}, "no room for text"),
        (
            {"data": {"train": ["a"], "validation": ["b"]}, "evaluation": {"tokens": 127}},
            "evaluation.tokens=127 holds no window",
        ),
        ({"schedule": {"decay_context": 256}}, "is for schedule 'wsd'"),
        ({"schedule": {"decay_fraction": 0.2}}, r"schedule\.decay_fraction is for schedule 'wsd'"),
        ({"optimizer": {"adam_lr": 1e-3}}, "is for optimizer 'muon'"),
        ({"optimizer": {"momentum": 0.9}}, r"optimizer\.momentum is for optimizer 'muon'"),
        ({"qat": {"scheme": "w8a8"}, "precision": "mxfp8"}, "does not go with another low precision"),
        ({"qat": {"scheme": "w8a8"}, "compile": True}, "compile = false"),
        ({"evaluation": {"every_steps": 5}}, "nothing to evaluate"),
        ({"evaluation": {"prompts": ["a"]}, "layout": {"cp": 2}}, "cp=1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(TorchwrightError, match=words) as caught:
        make(**change)
    assert isinstance(caught.value, RunError)


def test_a_misspelt_required_field_is_named_with_what_was_meant() -> None:
    without = {name: value for name, value in BASE.items() if name != "context"}
    with pytest.raises(UnknownName, match=r"'contxt'; did you mean 'context'\?"):
        parse_run({**without, "contxt": 128})


def test_layout_errors_come_from_the_layout() -> None:
    with pytest.raises(LayoutError, match="ep=3 does not divide"):
        make(layout={"ep": 3})
    with pytest.raises(UnknownName, match="layout axis 'dp'"):
        make(layout={"dp": 2})


def test_files_that_are_no_run_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run file"):
        read_run(tmp_path / "none.toml")
    (tmp_path / "a.toml").write_text("tokens = ")
    with pytest.raises(RunError, match="not a TOML file"):
        read_run(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_text("tokens = 2026-11-21")
    with pytest.raises(RunError, match="unexpected type"):
        read_run(tmp_path / "b.toml")


def test_changes_are_named_by_field() -> None:
    one, two = make().model_dump(mode="json"), make(seed=3, tokens=5).model_dump(mode="json")
    assert changed_fields(one, two) == ["seed: 0 → 3", "tokens: 100000 → 5"]
    assert changed_fields(one, two, ignore=("tokens",)) == ["seed: 0 → 3"]
    three = make(model={"config": {**CONFIG, "hidden_size": 96}}, layout={"tp": 2}).model_dump(mode="json")
    assert changed_fields(one, three) == ["layout.tp: null → 2", "model.config.hidden_size: 64 → 96"]


def test_cosine_falls_from_the_end_of_the_warm_up_to_final() -> None:
    run = make(tokens=100 * 1024, schedule={"warmup_tokens": 10 * 1024, "final": 0.1})
    assert steps(run) == 100
    assert [rate(run, step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1])
    assert rate(run, 54) == pytest.approx(0.55)
    assert rate(run, 10) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 90)))
    assert rate(run, 99) == pytest.approx(0.1)
    assert all(rate(run, step) > rate(run, step + 1) for step in range(9, 99))


def test_wsd_stays_and_falls_in_a_straight_line_to_final() -> None:
    run = make(tokens=100 * 1024, schedule={"name": "wsd"})
    assert [rate(run, step) for step in (0, 50, 79, 80, 89, 99)] == pytest.approx([1, 1, 1, 0.95, 0.5, 0])
    four = make(tokens=8 * 1024, schedule={"name": "wsd", "decay_fraction": 0.5, "final": 0.1})
    assert [rate(four, step) for step in range(3, 8)] == pytest.approx([1, 0.775, 0.55, 0.325, 0.1])


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_the_first_step_of_the_shortest_runs_moves(name: str) -> None:
    """Without a warm-up; one that is longer than the run is refused, and would move it as well."""
    for tokens in (1, 2):
        assert rate(make(tokens=tokens * 1024, schedule={"name": name}), 0) == 1
        warming = {"tokens": tokens * 1024, "schedule": {"name": name, "warmup_tokens": 4096}}
        assert rate(parse_run({**BASE, **warming}), 0) == pytest.approx(0.25)
        with pytest.raises(RunError, match="warm-up is longer than the run"):
            make(**warming)


def test_steps_read_consecutive_windows_and_start_anew_with_longer_ones() -> None:
    schedule = {"name": "wsd", "decay_fraction": 0.5, "decay_context": 256}
    run = make(tokens=8 * 1024, schedule=schedule)
    plans = [plan_step(run, number) for number in range(8)]
    assert [plan.first for plan in plans] == [0, 8, 16, 24, 0, 4, 8, 12]
    assert [plan.rows * plan.context for plan in plans] == [1024] * 8
    assert [plan.phase for plan in plans] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [plan.tokens for plan in plans] == [1024 * number for number in range(8)]


def test_compiled_autograd_is_refused_with_its_figures() -> None:
    with pytest.raises(RunError, match=r"does not pay.*1\.02 times.*set compile = true"):
        make(compile="autograd")


def test_a_run_file_is_checked_without_torch() -> None:
    code = "import sys, torchwright.train.run.config.run, torchwright.train.run.config.schedule; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
