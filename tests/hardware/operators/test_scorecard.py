"""The operator scorecard: a device against the CPU, with seeded faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchwright.cli import main
from torchwright.core.errors import TorchwrightError
from torchwright.hardware.operators import child, scorecard
from torchwright.hardware.operators.databases import Entry, Sample, to
from torchwright.hardware.operators.records import Scorecard
from torchwright.hardware.operators.scorecard import Limits, take
from torchwright.report import operators as page

PAIR = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])


def entry(*samples: Sample) -> Entry:
    return Entry("name", "op_db", lambda: iter(samples))


def judge(device: str, *samples: Sample, answers: bool = True) -> dict:
    """Judge on a device that nothing waits for."""
    found = child.Judge(device, settle=lambda device: None, answers=lambda device: answers)
    return found.judge(entry(*samples))


def test_results_are_compared_with_the_cpus():
    right = Sample(("forward",), lambda device, family: torch.ones(2))
    wrong = Sample(("forward",), lambda device, family: PAIR[device != "cpu"])
    found = judge("meta", right, wrong, wrong)
    assert found["counts"] == {"forward": {"passed": 1, "wrong": 2}}
    (fault,) = found["faults"]
    assert (fault["outcome"], fault["samples"]) == ("wrong", 2)
    assert "Mismatched elements: 1 / 2" in fault["message"]


def test_an_error_is_a_refusal_and_the_cpus_own_is_not_counted():
    def fails(device: str, family: str) -> torch.Tensor:
        if device != "cpu":
            raise NotImplementedError("no such kernel")
        return torch.ones(2)

    def never(device: str, family: str) -> torch.Tensor:
        raise ValueError("of this sample")

    found = judge("meta", Sample(("forward",), fails), Sample(("forward",), never))
    assert found["counts"] == {"forward": {"refused": 1}}
    assert found["faults"][0]["message"] == "NotImplementedError: no such kernel"
    assert (
        judge("cpu", Sample(("forward",), never))["left_out"] == "it has no sample on which the CPU succeeds"
    )


def test_after_a_lost_device_nothing_is_taken():
    def dies(device: str, family: str) -> torch.Tensor:
        if device != "cpu":
            raise RuntimeError("the device is lost")
        return torch.ones(2)

    found = judge("meta", *[Sample(("forward",), dies)] * 3, answers=False)
    assert found["counts"] == {"forward": {"crashed": 1}}


@pytest.mark.parametrize(
    ("database", "family"), [("op_db", "forward"), ("module_db", "modules"), ("optim_db", "optimizers")]
)
def test_what_ends_its_child_counts_where_it_belongs(database: str, family: str):
    card = Scorecard(device="sim", torch="2.13", machine="Linux")
    scorecard._add(card, (database, "nn.LSTM"), {"end": 0, "ended": "hung", "message": "no answer"})
    assert {name for name, outcomes in card.counts.items() if outcomes["hung"]} == {family}
    assert [(fault.entry, fault.family, fault.outcome) for fault in card.faults] == [
        ("nn.LSTM", family, "hung")
    ]


def test_random_results_need_the_shape_alone_on_another_device():
    def draws(device: str, family: str) -> torch.Tensor:
        return torch.rand(4) + (device != "cpu")

    assert judge("meta", Sample(("forward",), draws))["counts"] == {"forward": {"passed": 1}}
    assert judge("cpu", Sample(("forward",), lambda device, family: torch.rand(4)))["counts"] == {
        "forward": {"passed": 1}
    }


def test_samples_are_brought_to_the_device():
    x = torch.ones(2, requires_grad=True)
    found = to("meta", {"device": "cpu", "x": [x, (x, 3)], "where": torch.device("cpu")})
    assert found["device"] == "meta"
    assert found["where"] == torch.device("meta")
    assert found["x"][0].device.type == "meta"
    assert found["x"][0].requires_grad
    assert found["x"][0].is_leaf
    assert found["x"][1][1] == 3


def test_the_page_escapes_and_counts():
    card = Scorecard(device="sim", torch="2.13", machine="Linux", entries=3)
    card.add("forward", "passed", 99_999)
    card.add("forward", "wrong", 1)
    shares = [(share.family, share.passed, share.total) for share in card.shares()]
    fault = {"entry": "<b>", "family": "forward", "outcome": "wrong", "samples": 1, "message": "&"}
    data = {**vars(card), "faults": [fault]}
    html = page.render(data, shares)
    assert "<td>&lt;b&gt;</td>" in html
    assert "99.99%" in html
    assert "no samples" in html
    assert page.percent(5, 5) == "100%"


def test_the_command_refuses_what_does_not_belong_together(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--operators", "--build"]) == 2
    assert main(["doctor", "--match", "sin"]) == 2
    assert main(["doctor", "--operators", "--match", "("]) == 2
    said = capsys.readouterr().err
    assert "measures and builds nothing" in said
    assert "--match and --page belong to --operators" in said
    assert "takes a regular expression" in said


@pytest.mark.slow  # imports PyTorch's test databases in two processes
def test_the_cpu_agrees_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    into = tmp_path / "page.html"
    words = [
        "doctor",
        "--device",
        "cpu",
        "--operators",
        "--match",
        "^(sin|linalg_inv|nn.Linear|Linear|Adam|dropout)",
        "--json",
    ]
    assert main([*words, "--page", str(into)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["faults"] == []
    assert {family for family, (passed, total) in found["shares"].items() if passed == total > 0} == {
        "forward",
        "gradient",
        "modules",
        "optimizers",
    }
    assert "100%" in into.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_pattern_that_fits_nothing():
    with pytest.raises(TorchwrightError, match="has such a name"):
        take("cpu", match="no_operator_is_called_that")


@pytest.mark.slow
def test_a_child_that_never_answers_is_named(monkeypatch: pytest.MonkeyPatch):
    """What children say is written here: the first is silent after it began, the second takes what is left."""
    ended = '{"end": 1, "counts": {}, "faults": [], "left_out": "x"}'

    def said(self: scorecard._Child) -> Iterator[str | None]:
        return iter(['{"begin": 0}', None] if 0 in (self.entries or ()) else [ended])

    monkeypatch.setattr(scorecard, "_entries", lambda limits: [("op_db", "sin"), ("op_db", "cos")])
    monkeypatch.setattr(scorecard._Child, "_said", said)
    card = take("cpu", Limits(seconds=1))
    assert [(fault.entry, fault.outcome) for fault in card.faults] == [("sin", "hung")]
    assert card.left_out == {"op_db: cos": "x"}
