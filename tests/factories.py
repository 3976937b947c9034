"""Frozen values for tests: a realistic recipe with every verdict in it, and one that could not be made faster."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchwright.core.records import (
    Budget,
    CaseTime,
    Coverage,
    DeviceFacts,
    Features,
    Fingerprint,
    Interval,
    Measurement,
    ProcessGain,
    Quality,
    Recipe,
    RooflinePoint,
    RowsTime,
    Step,
    StepResult,
)


def make_interval(value: float, spread: float = 0.03) -> Interval:
    return Interval(value=value, low=round(value * (1 - spread), 4), high=round(value * (1 + spread), 4))


def make_quality(drop: float = 0.0, drop_high: float | None = None, **overrides: Any) -> Quality:
    fields: dict[str, Any] = {
        "metric": "perplexity",
        "value": round(12.31 * (1 + drop), 4),
        "reference": 12.31,
        "drop": drop,
        "drop_high": drop + 0.0012 if drop_high is None else drop_high,
        "higher_is_better": False,
        "samples": 64,
        "extras": {"KL divergence": 0.0031, "top-1 agreement": 0.987},
    }
    return Quality(**(fields | overrides))


def make_device(**overrides: Any) -> DeviceFacts:
    fields: dict[str, Any] = {
        "kind": "cpu",
        "name": "Intel Xeon Platinum 8481C",
        "isa": ("avx2", "avx512f", "avx512_vnni", "amx_bf16", "amx_int8"),
        "cores": 8,
        "memory_bytes": 32_000_000_000,
        "read_gb_per_s": 61.4,
        "tflops": {"float32": 0.71, "bfloat16": 3.9, "int8": 7.2},
    }
    return DeviceFacts(**(fields | overrides))


def make_features(**overrides: Any) -> Features:
    fields: dict[str, Any] = {
        "linear": 1.0,
        "convolution": 0.0,
        "attention": 0.0,
        "depthwise": 0.0,
        "recurrent": False,
        "decode": False,
        "operations": 2_000_000_000,
        "weight_bytes": 40_000_000,
        "dtype": "float32",
    }
    return Features(**(fields | overrides))


def make_rung(status: str = "kept", **overrides: Any) -> StepResult:
    fields: dict[str, Any] = {
        "step": Step(name="dtype", options={"to": "bfloat16"}),
        "kept": status == "kept",
        "status": status,
        "reason": "1.52x is outside the noise and the loss is within the budget",
    }
    return StepResult(**(fields | overrides))


def make_rungs() -> tuple[StepResult, ...]:
    """Kept, dropped, refused, failed and removed ones, with and without numbers."""
    skipped = {"lm_head": "the last layer loses most: 1.9% alone", "model.embed_tokens": "not a linear layer"}
    skipped |= {f"model.layers.{index}.mlp.gate": "narrower than min_features=512" for index in range(12)}
    return (
        make_rung(
            step=Step(name="attention", options={"kernel": "sdpa"}),
            reason="1.04x is outside the noise",
            speedup=make_interval(1.04, 0.01),
            total_speedup=make_interval(1.04, 0.01),
            memory_bytes=1_210_000_000,
            memory_change_bytes=-31_000_000,
            quality=make_quality(0.0, 0.0001),
            compile_seconds=0.4,
            payback_calls=3.1,
            coverage=(Coverage(technique="attention", changed=30, total=30, unit="attention layers", kernel="sdpa"),),
        ),
        make_rung(
            speedup=make_interval(1.52),
            total_speedup=make_interval(1.58),
            memory_bytes=760_000_000,
            memory_change_bytes=-450_000_000,
            quality=make_quality(0.0007),
            compile_seconds=0.6,
            payback_calls=0.5,
            coverage=(Coverage(technique="dtype", changed=211, total=211, unit="parameters", kernel="oneDNN AMX"),),
        ),
        make_rung(
            "dropped",
            step=Step(name="quantize", options={"weights": "int4", "group_size": 64}),
            reason="loss of up to 2.31% is over the budget of 1.00%, also after it retreated from 9 of 211 layers",
            speedup=make_interval(1.83),
            total_speedup=make_interval(2.89),
            memory_bytes=480_000_000,
            memory_change_bytes=-280_000_000,
            quality=make_quality(0.0204, 0.0231),
            compile_seconds=7.1,
            payback_calls=8.0,
        ),
        make_rung(
            step=Step(name="quantize", options={"weights": "int8", "activations": "int8", "skip": ["lm_head"]}),
            reason="1.49x is outside the noise and the loss of up to 0.55% is within the budget",
            speedup=make_interval(1.49),
            total_speedup=make_interval(2.35),
            memory_bytes=571_000_000,
            memory_change_bytes=-189_000_000,
            quality=make_quality(0.0041, 0.0055),
            compile_seconds=2.2,
            payback_calls=3.2,
            coverage=(
                Coverage(technique="quantize", changed=197, total=211, unit="linear layers",
                         kernel="torchwright::int8_amx", skipped=skipped),
            ),
        ),
        make_rung(
            "refused",
            step=Step(name="sparse24", options={}),
            reason="no kernel for 2:4 sparsity on a CPU; best case 1.00x by the roofline",
        ),
        make_rung(
            "failed",
            step=Step(name="compile", options={"backend": "inductor", "mode": "max-autotune", "freezing": True}),
            reason="the trial was ended after 60 s (limit for one trial); it was still compiling graph 3 of 5",
        ),
        make_rung(
            step=Step(name="compile", options={"backend": "inductor", "dynamic": False}),
            reason="1.22x is outside the noise",
            speedup=make_interval(1.22, 0.02),
            total_speedup=make_interval(2.87),
            memory_bytes=598_000_000,
            memory_change_bytes=27_000_000,
            quality=make_quality(0.0041, 0.0055),
            compile_seconds=31.4,
            payback_calls=120.0,
            coverage=(Coverage(technique="compile", changed=1, total=1, unit="graphs", kernel="inductor C++"),),
        ),
        make_rung(
            "removed",
            step=Step(name="fuse_norm", options={}),
            reason="without it the recipe is as fast: 1.00x [0.99, 1.01]",
            speedup=make_interval(1.03, 0.01),
            total_speedup=make_interval(2.95),
            memory_bytes=598_000_000,
            memory_change_bytes=0,
            quality=make_quality(0.0041, 0.0055),
            compile_seconds=0.1,
            payback_calls=1.4,
        ),
        make_rung(
            "dropped",
            step=Step(name="channels_last", options={}),
            reason="0.99x [0.97, 1.02] is inside the noise",
            speedup=make_interval(0.99),
            total_speedup=make_interval(2.84),
            memory_bytes=601_000_000,
            memory_change_bytes=3_000_000,
            compile_seconds=0.2,
        ),
    )  # fmt: skip


def make_recipe(**overrides: Any) -> Recipe:
    """A language model on a CPU, 2.88x as fast, with every verdict among its rungs."""
    fields: dict[str, Any] = {
        "created": "2026-01-14T10:21:07Z",
        "workload": {
            "kind": "language",
            "name": "HuggingFaceTB/SmolLM2-135M",
            "prompt_tokens": 512,
            "new_tokens": 128,
            "batch": 1,
        },
        "steps": tuple(rung.step for rung in make_rungs() if rung.kept),
        "budget": Budget(max_drop=0.01, time_seconds=300.0),
        "baseline": Measurement(
            seconds=3.3457,
            cases=(
                CaseTime(name="prefill", seconds=0.412),
                CaseTime(name="decode", seconds=0.0231, repeat=127),
            ),
            peak_memory_bytes=1_241_000_000,
            weight_bytes=538_000_000,
            quality=make_quality(0.0, 0.0),
        ),
        "final": Measurement(
            seconds=1.1616,
            cases=(
                CaseTime(name="prefill", seconds=0.171),
                CaseTime(name="decode", seconds=0.0078, repeat=127),
            ),
            peak_memory_bytes=598_000_000,
            weight_bytes=191_000_000,
            prepare_seconds=34.6,
            quality=make_quality(0.0041, 0.0055),
        ),
        "speedup": make_interval(2.88),
        "rungs": make_rungs(),
        "fingerprint": Fingerprint(
            torchwright="0.1.0",
            torch="2.13.0+cpu",
            libraries={"transformers": "5.1.0", "safetensors": "0.8.0"},
            python="3.11.7",
            device=make_device(),
            threads=8,
        ),
        "search_seconds": 212.4,
        "roofline": make_roofline(),
        "notes": ("5 of 64 evaluation windows were shorter than the prompt and were left out.",),
        "engine": "aot",
        "command": "torchwright tune HuggingFaceTB/SmolLM2-135M --prompt-tokens 512 --new-tokens 128 --budget 1%",
    }
    return Recipe(**(fields | overrides))


def make_shipped_recipe(**overrides: Any) -> Recipe:
    """A classifier of pictures whose last comparison says all that one can."""
    gains = ((1, 0.01, 1.9), (8, 0.07, 2.1), (32, 0.31, 2.4))
    fields: dict[str, Any] = {
        "workload": {"kind": "image", "model": "resnet", "batch": 16},
        "runs_as": "ahead-of-time package",
        "rows": tuple(RowsTime(rows=n, seconds=s, speedup=make_interval(gain)) for n, s, gain in gains),
        "process": ProcessGain(without=make_interval(1.62), both=make_interval(1.75)),
    }
    return make_recipe(**(fields | overrides))


def make_roofline() -> tuple[RooflinePoint, ...]:
    rows: tuple[tuple[str, Any, str, int, int, float, float, Any], ...] = (
        ("prefill", "original", "float32", 590_000_000, 139_000_000_000, 0.412, 0.1958, "operations"),
        ("decode", "original", "float32", 538_000_000, 270_000_000, 0.0231, 0.00876, "bytes"),
        ("prefill", "final", "int8", 240_000_000, 139_000_000_000, 0.171, 0.0193, "operations"),
        ("decode", "final", "int8", 191_000_000, 270_000_000, 0.0078, 0.00311, "bytes"),
    )
    names = ("case", "stage", "dtype", "bytes", "operations", "seconds", "bound_seconds", "bound_by")
    fields: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in rows]
    return tuple(RooflinePoint(**each) for each in fields)


def make_unchanged_recipe(**overrides: Any) -> Recipe:
    """Nothing paid: no step, no metric, no roofline, and a machine of which little is known."""
    original = Measurement(
        seconds=0.0042,
        cases=(CaseTime(name="1x3x224x224", seconds=0.0042),),
        peak_memory_bytes=0,
        weight_bytes=0,
    )
    recipe = make_recipe(
        workload={},
        steps=(),
        baseline=original,
        final=original,
        speedup=Interval(value=1.0, low=1.0, high=1.0),
        rungs=(make_rung("refused", reason="the matrices are too small: best case 1.01x"),),
        roofline=(),
        notes=(),
        engine="eager",
        command="",
    )
    bare = dataclasses.replace(
        recipe.fingerprint, device=DeviceFacts(kind="cpu", name="unknown"), libraries={}
    )
    return dataclasses.replace(recipe, fingerprint=bare, **overrides)
