"""The contract tests fail for what breaks the contract."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from torchwright.optimization.techniques.base import techniques
from torchwright.testing.examples import perceptron
from torchwright.testing.test_techniques import TestDeclaration as Declaration
from torchwright.testing.test_techniques import TestOnModels as Techniques
from torchwright.testing.test_workloads import TestWorkload as Workloads
from torchwright.testing.test_workloads import answers_of
from torchwright.workloads.module import ModuleWorkload


class Shared(ModuleWorkload):
    def build(self) -> torch.nn.Module:
        return self.model


class Blind(ModuleWorkload):
    def compare(self, reference: Any, candidate: Any) -> Any:
        return super().compare(reference, reference)


class Restless(ModuleWorkload):
    def observe(self, run: Any, dtype: torch.dtype) -> Any:
        return super().observe(lambda case: run(case) * torch.rand(()), dtype)


class Greedy(ModuleWorkload):
    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        return True


def declaring(name: str, **declared: Any) -> AbstractContextManager[None]:
    """Register a technique with other declarations in place of `name`."""
    cls = techniques.get(name)
    return techniques.adding({name: type(cls.__name__, (cls,), declared)})


@pytest.mark.parametrize(
    ("cls", "test"),
    [
        (Shared, Workloads.test_every_model_it_builds_is_fresh),
        (Blind, Workloads.test_other_weights_lose),
        (Restless, Workloads.test_the_original_loses_nothing),
    ],
)
def test_a_workload_with_a_fault(cls: type[ModuleWorkload], test: Any) -> None:
    def called(workload: ModuleWorkload) -> None:
        reads = "reference" in inspect.signature(test).parameters
        test(Workloads(), workload, **({"reference": answers_of(workload)} if reads else {}))

    called(ModuleWorkload(*perceptron()))
    with pytest.raises(AssertionError):
        called(cls(*perceptron()))


def test_a_workload_that_takes_every_folder(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        Workloads().test_a_stranger_to_it_is_not_accepted(Greedy(*perceptron()), tmp_path)


def test_a_technique_that_loses_more_than_it_declares() -> None:
    Techniques().test_apply_keeps_what_the_model_computes("dtype", "mlp")
    with declaring("dtype", tolerance=1e-9), pytest.raises(AssertionError):
        Techniques().test_apply_keeps_what_the_model_computes("dtype", "mlp")


@pytest.mark.parametrize(
    ("declared", "names", "said"),
    [
        ("needs", {"flaot_weights"}, "unknown property 'flaot_weights'; did you mean 'float_weights'"),
        ("needs", {"something_else"}, "unknown property 'something_else'"),
        ("removes", {"eagre"}, "did you mean 'eager'"),
        ("gives", {"compield"}, "did you mean 'compiled'"),
    ],
)
def test_a_technique_that_misspells_a_property(declared: str, names: set[str], said: str) -> None:
    with declaring("dtype", **{declared: frozenset(names)}), pytest.raises(AssertionError, match=said):
        Declaration().test_properties_are_known("dtype")


def test_a_technique_may_give_a_property_of_its_own() -> None:
    tabulated = frozenset({"tabulated"})
    with declaring("dtype", gives=tabulated), declaring("threads", needs=tabulated):
        for name in ("dtype", "threads"):
            Declaration().test_properties_are_known(name)
