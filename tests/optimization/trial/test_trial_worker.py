"""A trial's session, in this process: what its calls are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique, WorkloadError
from torchwright.core.records import Step
from torchwright.hardware.devices import get_device
from torchwright.optimization.trial.session import TrialSession
from torchwright.workloads import accuracy
from torchwright.workloads.module import ModuleWorkload

SEEN: list[tuple[float, int]] = []
"""Sum and address of every input."""


class Reading(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append((x.sum().item(), x.data_ptr()))
        return x * 2


class Drifting(Reading):
    """Normalizes its input in place, as careless code does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = super().forward(x)
        x.sub_(0.5).div_(0.2)
        return answer


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    SEEN.clear()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def session_of(model: nn.Module, *steps: Step, **options: Any) -> TrialSession:
    session = TrialSession()
    session.seed, session.threads, session.device = 0, 1, get_device("cpu")
    session.workload = ModuleWorkload(model, torch.arange(6.0).view(2, 3))
    session.prepare(steps=steps, **options)
    return session


def test_each_call_of_a_trial_is_given_the_users_inputs() -> None:
    session = session_of(Drifting())
    for _ in range(2):
        session.time()
    session.memory()
    session.resize(batched=(0,), rows=None)
    session.time()
    assert {total for total, _ in SEEN} == {15.0}
    reference = session.observe()
    assert session.compare(reference=reference).drop == 0


def test_inputs_that_nobody_changes_are_given_as_they_are() -> None:
    """Copies would come from other memory than a user's, and be timed in other caches."""
    session = session_of(Reading())
    first = len(SEEN)
    session.time()
    assert {place for _, place in SEEN[first:]} == {session.calls.cases[0].args[0].data_ptr()}


def test_a_type_that_loses_the_change_is_refused_in_words() -> None:
    reference = session_of(nn.Sequential(Drifting(), nn.Linear(3, 3))).observe()
    other = session_of(
        nn.Sequential(Drifting(), nn.Linear(3, 3)), Step(name="dtype", options={"dtype": "bfloat16"})
    )
    with pytest.raises(WorkloadError, match="does not change the same inputs in place"):
        other.compare(reference=reference)


def test_what_a_recipe_loses_is_seen_without_its_compiler() -> None:
    """Techniques that are worth something in compiled code alone are applied, and the model is run as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    steps = Step(name="int8_static", options={}), Step(name="compile", options={})
    reference = session_of(model).observe()
    session = session_of(model, *steps, compiled=False)
    assert type(session.engine).name == "eager"
    assert 0 < session.compare(reference=reference).drop < 0.1
    with pytest.raises(RefusedTechnique, match="lacks: compiled"):
        session_of(model, steps[0])


class Numbered(ModuleWorkload):
    """Batches of two rows each, of which any number is there; it notes which ran."""

    ran: list[int]

    def sampled(self) -> tuple[int, int | None]:
        return 3, None

    def unseen(self) -> Any:
        return self.judged_after(*self.sampled())

    def observe(self, run: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        batches = list(self.sample) or list(range(3))
        self.ran.extend(batches)
        case = self.cases(dtype)[0]
        rows = [run(dataclasses.replace(case, args=(torch.full((2, 3), float(i)),))) for i in batches]
        return {"rows": torch.cat([row.reshape(2, -1) for row in rows])}

    def compare(self, reference: Any, candidate: Any) -> Any:
        return accuracy.agreement(reference["rows"], candidate["rows"])


@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize("kept", [True, False])
def test_more_of_the_data_go_on_from_the_sample(kept: bool, unseen: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    session = session_of(model)
    session.kept_bytes = session.kept_bytes if kept else 0
    session.workload = workload = Numbered(model, torch.arange(6.0).view(2, 3))
    workload.ran = []
    first = session.observe(unseen=unseen)
    assert session.further_times(unseen=unseen) == (3.0 if kept else 4.0)
    workload.ran.clear()
    more = session.observe(unseen=unseen, further=True)
    assert len(workload.ran) == (9 if kept else 12)
    assert torch.equal(more["rows"][:6], first["rows"])
    session.observe(unseen=unseen)
    quality = session.compare(reference=more, unseen=unseen, further=True)
    assert (quality.samples, quality.drop) == (24, 0.0)
    assert torch.equal(more["rows"], session.observe(unseen=unseen, further=True)["rows"])
