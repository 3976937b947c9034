"""What a recipe says of a search, beside what the search itself found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torchwright.core.records import CaseTime, Rate
from torchwright.optimization.engines.dispatch.spec import CallSpec, Guard
from torchwright.optimization.proof.recipe import _rates, domain_notes
from torchwright.workloads.language import LanguageWorkload


class Described(LanguageWorkload):
    def __init__(self) -> None:
        """No folder is opened."""

    def describe(self) -> dict[str, Any]:
        return {"batch": 2, "prompt_tokens": 100}


def test_rates_are_those_of_the_calls_before_and_after() -> None:
    def calls(prefill: float, decode: float) -> Any:
        named = {"prefill": prefill, "decode": decode}
        return SimpleNamespace(cases=[CaseTime(name=name, seconds=each) for name, each in named.items()])

    outcome: Any = SimpleNamespace(baseline=calls(0.5, 0.04), final=calls(0.25, 0.01))
    workload = Described()
    assert _rates(outcome, workload, workload.describe()) == (
        Rate(name="ttft_s", before=0.5, after=0.25),
        Rate(name="tpot_s", before=0.04, after=0.01),
        Rate(name="prefill_tokens_per_s", before=400.0, after=800.0),
        Rate(name="decode_tokens_per_s", before=50.0, after=200.0),
    )


def test_the_calls_that_guards_keep_from_the_engine_are_noted() -> None:
    guards = (Guard(tensor=0, values="finite"), Guard(tensor=1, least=0, most=99))
    guarded, free = (
        CallSpec(name="call", structure={"tuple": []}, tensors=(), guards=said) for said in (guards, ())
    )
    manifest: dict[str, Any] = {"engine": "openvino", "calls": (guarded, free, guarded)}
    said = (
        "PyTorch's own operators answer calls with NaN or infinity in input 0; numbers outside 0 to 99 in input 1: "
        "openvino is not right there"
    )
    assert domain_notes(manifest, []) == [said]
    assert not domain_notes({"engine": "jit", "calls": (free,)}, [])
    assert not domain_notes({"engine": "eager"}, [])
    for seconds, cost in ((5e-4, "; checking for them takes 4.0% of a call"), (1.1e-3, "")):
        found = domain_notes(manifest, [CaseTime(name="call", seconds=seconds)], lambda call: 2e-5)
        assert found == [said + cost]
