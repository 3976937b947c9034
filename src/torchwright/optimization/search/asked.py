"""Techniques asked for by name, checked against the model before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence

from torchwright.core.errors import RefusedTechnique
from torchwright.core.records import Step
from torchwright.hardware.devices.base import Device
from torchwright.optimization.engines.apply import refusal, seen_target
from torchwright.optimization.search.state import Request
from torchwright.optimization.techniques.base import from_step, techniques
from torchwright.workloads.module import ModuleWorkload


def check_asked(request: Request, device: Device) -> None:
    """Raise `RefusedTechnique` for a step that cannot run on this machine, or on a module that is in memory already.

    Other models are checked in the first trial, which builds them.
    """
    if not request.wanted:
        return
    facts, workload = device.identify(), request.workload
    if isinstance(workload, ModuleWorkload):
        target = seen_target(workload.model, workload, facts)
        given = given_by(request.wanted, request.only, request.without)
        raise_refused([(step, refusal(target, step, given)) for step in request.wanted])
    raise_refused([(step, from_step(step).available(facts)) for step in request.wanted])


def given_by(wanted: Sequence[Step], only: bool, without: frozenset[str]) -> frozenset[str]:
    """Return the properties that the steps of a search may give each other."""
    given = frozenset[str]().union(*(from_step(step).gives for step in wanted))
    if only:
        return given
    return given.union(*(cls.gives for name, cls in techniques if name not in without))


def raise_refused(reasons: Sequence[tuple[Step, str | None]]) -> None:
    """Raise `RefusedTechnique` for the first step with a reason."""
    for step, reason in reasons:
        if reason is not None:
            raise RefusedTechnique(
                f"{step} was asked for and cannot run here",
                found=reason,
                next="`torchwright doctor` says more",
            )
