"""`bench` of language models on the native decoder: what is counted, what is reported, and for which targets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchwright as tw
from folders import VOCABULARY, causal, save
from in_process import measured_cpu, own_cache, trials_in_process
from language_artifacts import NEW, PROMPT, fixed_artifact, native_artifact
from torchwright.core.errors import WorkloadError
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices.base import Ceilings
from torchwright.optimization import api, decode_bench
from torchwright.optimization.decode_bench import Sizes, decode_work, point, prefill_work

ASKED = (
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "ttft_s",
    "tpot_s",
    "peak_memory_bytes",
    "bound_prefill",
    "bound_decode",
)
SHARES = [
    f"{case}_{what}" for case in ("prefill", "decode") for what in ("gb_per_s", "tflops", "percent_of_bound")
]
CEILINGS = Ceilings(read_gb_per_s=30.0, tflops={"float32": 0.25, "bfloat16": 2.5, "int8": 4.5})
E, F, D, HEADS, KV, LAYERS = 32, 48, 16, 4, 2, 2
"""The sizes of `folders.causal` with heads of the size that the kernels take."""
LINEAR = LAYERS * (E * (HEADS + 2 * KV) * D + E * HEADS * D + 3 * E * F)
HEAD = E * VOCABULARY
NORMS = (2 * LAYERS + 1) * E


@pytest.fixture(autouse=True)
def _quick(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decode_bench, "TURNS", (2, 2))
    monkeypatch.setattr(api, "VERIFY_ROUNDS", 2)
    own_cache(monkeypatch, tmp_path_factory.getbasetemp() / "cache")
    with measured_cpu(CEILINGS):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(causal(head_dim=16), tmp_path_factory.mktemp("model"))


# ---------------------------------------------------------------------------------------------------- what is reported


@pytest.mark.parametrize(
    ("options", "layers", "kv", "dtype"),
    [
        ({"quantize": "w8a8"}, "9 w8a8", None, None),
        ({"quantize": "w4a8:group_size=64", "kv": "int8"}, "9 w4a8:group_size=64", "int8", None),
        ({"quantize": "w4a16", "dtype": "bf16"}, "9 w4a16:group_size=32", "bf16", "bf16"),
        ({"dtype": "fp32"}, "9 float32", "fp32", "fp32"),
        ({"quantize": "none", "dtype": "fp32", "kv": "bf16"}, "9 float32", "bf16", "fp32"),
    ],
)
def test_a_folder_runs_on_the_native_decoder(
    folder: Path, options: dict[str, str], layers: str, kv: str | None, dtype: str | None
):
    found = api.bench(str(folder), prompt_tokens=20, new_tokens=4, batch=2, **options)
    assert found["runs_as"] == "native decoder"
    assert found["layers"] == layers
    assert kv in (None, found["kv"])
    assert dtype in (None, found["dtype"])
    assert (found["batch"], found["prompt_tokens"], found["new_tokens"], found["turns"]) == (2, 20, 4, 2)
    assert all(found[name] for name in (*ASKED, *SHARES))
    assert found["prefill_tokens_per_s"] == pytest.approx(40 / found["ttft_s"])
    assert found["decode_tokens_per_s"] == pytest.approx(2 / found["tpot_s"])
    assert {found["bound_prefill"], found["bound_decode"]} <= {"bytes", "operations"}
    json.dumps(found, allow_nan=False)


def test_an_artifact_of_the_native_decoder_takes_any_size(folder: Path, tmp_path: Path):
    out = str(native_artifact(folder, tmp_path / "out"))
    found = api.bench(out)
    assert (found["batch"], found["prompt_tokens"], found["new_tokens"]) == (1, PROMPT, NEW)
    assert (found["layers"], found["kv"], found["dtype"]) == ("9 w8a8", "int8", "bf16")
    assert found["promised"] == "2.88x [2.79, 2.97]"
    assert all(found[name] for name in (*ASKED, *SHARES))
    assert api.bench(out, batch=3, prompt_tokens=40, new_tokens=2)["batch"] == 3


def test_an_artifact_of_fixed_calls_has_the_same_names(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trials_in_process(monkeypatch)
    found = api.bench(str(fixed_artifact(folder, tmp_path / "out")))
    assert found["runs_as"] == "eager"
    assert all(found[name] for name in (*ASKED, *SHARES))


def test_without_the_options_it_is_the_model_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch):
    trials_in_process(monkeypatch)
    found = api.bench(str(folder), prompt_tokens=16, new_tokens=4)
    assert found["runs_as"] == "the original, eager"
    assert found["bound_prefill"] is found["bound_decode"] is None
    assert all(name in found for name in ASKED)


def test_ceilings_of_a_busy_machine_are_pointed_out(folder: Path):
    busy = Ceilings(read_gb_per_s=30.0, tflops=CEILINGS.tflops, disturbed="machine busy (load 20 on 2 cores)")
    with measured_cpu(busy):
        found = api.bench(str(folder), quantize="w8a8", prompt_tokens=4, new_tokens=2)
    assert "machine busy (load 20 on 2 cores)" in found["notices"][-1]
    assert found["bound_prefill"] is found["bound_decode"] is None


# -------------------------------------------------------------------------------------------------------------- sizes


def test_sizes_are_the_workloads_where_none_is_given():
    sizes = Sizes.of(batch=None, prompt_tokens=None, new_tokens=7)
    assert (sizes.batch, sizes.prompt_tokens, sizes.new_tokens) == (1, 128, 7)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"new_tokens": 1}, "--new-tokens 1. Allowed: 2 or more"),
        ({"prompt_tokens": 300}, "exceed the model's context"),
        ({"prompt_tokens": 250, "new_tokens": 20}, "250 tokens and 20 new ones exceed the model's context"),
    ],
)
def test_sizes_that_cannot_be_are_said_in_words(folder: Path, sizes: Any, said: str):
    with pytest.raises(WorkloadError, match=said):
        api.bench(str(folder), quantize="w8a8", **sizes)


# ------------------------------------------------------------------------------------------------------ what is counted


def test_bytes_and_operations_of_a_small_model(folder: Path):
    model = tw.load_decoder(folder, torch.float32)
    sizes = Sizes(batch=3, prompt_tokens=10, new_tokens=5)
    weights = 4 * (LINEAR + HEAD + NORMS)
    kv = LAYERS * KV * 2 * D * 4

    prefill = prefill_work(model, sizes)
    pairs = 3 * LAYERS * sum(range(1, 11))
    assert prefill.bytes == weights + 30 * kv
    assert prefill.operations == {"float32": 2 * (30 * LINEAR + 3 * HEAD) + 4 * HEADS * D * pairs}

    decode = decode_work(model, sizes)
    context = (11 + 12 + 13 + 14) / 4
    assert decode.bytes == weights + 3 * context * kv
    assert decode.operations == {"float32": 2 * 3 * (LINEAR + HEAD) + 4 * HEADS * D * 3 * LAYERS * context}


def test_8_bit_layers_multiply_in_int8_and_their_cache_has_scales(folder: Path):
    model = tw.load_decoder(folder, torch.bfloat16, "w8a8", "int8")
    sizes = Sizes(batch=1, prompt_tokens=8, new_tokens=2)
    work = decode_work(model, sizes)
    assert work.operations == {"int8": 2 * (LINEAR + HEAD), "bfloat16": 4 * HEADS * D * LAYERS * 9}
    longer = decode_work(model, Sizes(batch=1, prompt_tokens=9, new_tokens=2))
    assert longer.bytes - work.bytes == LAYERS * KV * (2 * D + 8)


def test_a_window_bounds_what_is_read(tmp_path: Path):
    model = tw.load_decoder(save(causal("Mistral", head_dim=D, sliding_window=6), tmp_path))
    kv = LAYERS * KV * 2 * D * 4
    short, long = (decode_work(model, Sizes(batch=1, prompt_tokens=size, new_tokens=2)) for size in (3, 100))
    assert long.bytes - short.bytes == 2 * kv
    prefill = prefill_work(model, Sizes(batch=1, prompt_tokens=9, new_tokens=2))
    pairs = LAYERS * (1 + 2 + 3 + 4 + 5 + 6 + 6 + 6 + 6)
    assert prefill.operations == {"float32": 2 * (9 * LINEAR + HEAD) + 4 * HEADS * D * pairs}


def test_experts_are_read_and_computed_by_their_share(tmp_path: Path):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = tw.load_decoder(save(causal("Qwen3Moe", head_dim=D, **experts), tmp_path))
    one = 3 * E * 16
    always = LINEAR - LAYERS * 3 * E * F
    sizes = Sizes(batch=1, prompt_tokens=4, new_tokens=2)
    decode, prefill = decode_work(model, sizes), prefill_work(model, sizes)
    assert decode.operations["float32"] == 2 * (always + HEAD + LAYERS * 2 * one) + 4 * HEADS * D * LAYERS * 5
    touched = 8 * (1 - 0.75**4)
    kv = LAYERS * KV * 2 * D * 4
    assert prefill.bytes - 4 * kv - (decode.bytes - 5 * kv) == pytest.approx(4 * LAYERS * one * (touched - 2))


def test_the_bound_is_the_longer_of_bytes_and_operations():
    device = DeviceFacts(kind="cpu", name="cpu", read_gb_per_s=10.0, tflops={"int8": 2.0, "bfloat16": 1.0})
    work = decode_bench.Work(bytes=1e9, operations={"int8": 1e11, "bfloat16": 1e10})
    found = point("decode", 0.2, work, device)
    assert found is not None
    assert (found.bound_by, found.dtype) == ("bytes", "int8")
    assert found.bound_seconds == pytest.approx(0.1)
    assert found.percent_of_bound == pytest.approx(50)
    assert (found.gb_per_s, found.tflops) == (pytest.approx(5), pytest.approx(0.55))

    more = decode_bench.Work(bytes=1e8, operations={"int8": 1e11, "bfloat16": 1e10})
    found = point("prefill", 0.2, more, device)
    assert found is not None
    assert found.bound_by == "operations"
    assert found.bound_seconds == pytest.approx(0.05 + 0.01)


def test_an_unknown_ceiling_gives_no_bound():
    work = decode_bench.Work(bytes=1.0, operations={"int8": 1.0})
    assert point("decode", 1.0, work, DeviceFacts(kind="cpu", name="cpu", read_gb_per_s=1.0)) is None
    assert point("decode", 1.0, work, DeviceFacts(kind="cpu", name="cpu", tflops={"int8": 1.0})) is None
    assert decode_bench.roofline_facts("decode", None) == {"bound_decode": None}
