"""Adapters in the engine: a request's answer is that of its own adapter, whatever company and cache it meets.

The answers are those of `generate` with the adapter, bit for bit. The prefix tree tells adapters apart by what they
compute with, so that other weights under the same name share nothing.
"""

from __future__ import annotations

import gc
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import Results, alone, drain, engine, request, take, tiny_decoder, words
from safetensors.torch import load_file, save_file
from test_engine_pictures import shows

import vlms
from lora_files import ATTENTION, write_adapter
from torchwright.hub.adapter_files import WEIGHTS
from torchwright.models.decoder import PAGE, LoadedDecoder, load_decoder
from torchwright.models.decoder.adapters import read_adapter
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.engine.request import Sequence
from torchwright.serve.wire.messages import (
    AdapterLoaded,
    AdapterUnloaded,
    Cancel,
    LoadAdapter,
    RequestRefused,
    Submit,
    UnloadAdapter,
    decode_to_engine,
    encode,
)

STD = 0.3
"""Standard deviation of an adapter's second matrix: wide enough to change most tokens."""


@pytest.fixture(scope="module", params=["llama", "qwen3.5"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedDecoder:
    return tiny_decoder(request.param, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedDecoder:
    return tiny_decoder("llama", tmp_path_factory.mktemp("base"))


def adapter(loaded: LoadedDecoder, folder: Path, seed: int, **options: Any) -> Path:
    return write_adapter(loaded.folder, folder / f"{seed}", seed=seed, std=STD, **options)


def with_adapters(
    loaded: LoadedDecoder, folder: Path, count: int, within: str = "", **options: Any
) -> ServingEngine:
    """An engine with adapters a0, a1, …"""
    made = engine(loaded, **options)
    for n in range(count):
        made.adapters.load(f"a{n}", adapter(loaded, folder, n, r=1 + n, within=within))
    return made


def generated(loaded: LoadedDecoder, folder: Path, seed: int, asked: Submit) -> list[int]:
    own = read_adapter(adapter(loaded, folder, seed, r=1 + seed), loaded.decoder, loaded.folder)
    return loaded.generate(asked.ids, max_new_tokens=asked.max_tokens, stop=[], adapter=own)


def ask(made: ServingEngine, *submits: Submit) -> Results:
    for submit in submits:
        assert made.submit(submit) is None
    return drain(made)


def said(made: ServingEngine, message: LoadAdapter | UnloadAdapter) -> Any:
    """Return the engine's answer, None where it waits for requests."""
    sent = decode_to_engine(encode(message))
    assert isinstance(sent, LoadAdapter | UnloadAdapter)
    made.adapters.take(sent)
    while made.adapters.loading:
        time.sleep(0.001)
        if answers := made.adapters.answers():
            return answers[0]
    answers = made.adapters.answers()
    return answers[0] if answers else None


def swap(made: ServingEngine, folder: Path, name: str = "a") -> None:
    message = LoadAdapter(id="l", name=name, folder=str(folder), replace=True)
    assert isinstance(said(made, message), AdapterLoaded)


@pytest.mark.plain("llama")
def test_an_answer_is_its_adapters_own_beside_fifteen_others(loaded: LoadedDecoder, tmp_path: Path) -> None:
    """Cached, uncached, in small steps and preempted; the row without an adapter is the plain model's."""
    names = [None, *(f"a{n}" for n in range(15))]
    ids = words(40, seed=1)  # the same prompt for all: every page that was shared would show
    asked = [request(str(n), ids, 40, adapter=name, logprobs=2) for n, name in enumerate(names)]
    cold = with_adapters(loaded, tmp_path, 15, prefix_cache=False, speculate="none")
    wanted = {submit.id: ask(cold, submit)[submit.id, 0] for submit in asked}
    assert wanted["0"].tokens == alone(loaded, request("x", ids, 40))[0].tokens
    assert len({tuple(result.tokens) for result in wanted.values()}) > 10
    for n in (0, 7, 14):
        assert wanted[str(n + 1)].tokens == generated(loaded, tmp_path, n, asked[n + 1])
    settings: tuple[dict[str, Any], ...] = ({}, {"step_tokens": 64}, {"pages": 17})
    for options in settings:
        made = with_adapters(loaded, tmp_path, 15, max_running=32, **options)
        for _ in range(2):
            found = ask(made, *asked)
            for submit in asked:
                one, other = found[submit.id, 0], wanted[submit.id]
                assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs), submit.adapter
        if "pages" in options:
            assert made.stats().preemptions
        else:
            timing = found["5", 0].timing
            assert timing is not None
            assert timing.cached_tokens == (len(ids) - 1) // PAGE * PAGE  # its own pages, and they are found
        made.close()
    cold.close()


def test_no_adapter_reads_pages_of_another(llama: LoadedDecoder, tmp_path: Path) -> None:
    made = with_adapters(llama, tmp_path, 2)
    ids = words(50, seed=2)
    for id, name in (("p", None), ("a", "a0"), ("b", "a1"), ("c", "a0"), ("q", None)):
        ask(made, request(id, ids, 3, adapter=name))
    hits = made.stats().prefix_hits
    assert hits == 2 * (48)  # c after a, and q after p
    made.close()


def test_other_weights_under_the_same_name_share_nothing(llama: LoadedDecoder, tmp_path: Path) -> None:
    """The seeded fault: a tree that told adapters apart by name would answer with the old one's pages."""
    made = engine(llama)
    ids = words(50, seed=3)
    fresh = {}
    for seed in (1, 2):
        other = engine(llama)
        other.adapters.load("a", adapter(llama, tmp_path, seed))
        fresh[seed] = ask(other, request("x", ids, 8, adapter="a", logprobs=1))["x", 0]
        other.close()
    assert fresh[1].logprobs != fresh[2].logprobs
    for seed in (1, 2, 1):
        swap(made, adapter(llama, tmp_path, seed))
        found = ask(made, request("x", ids, 8, adapter="a", logprobs=1))["x", 0]
        assert (found.tokens, found.logprobs) == (fresh[seed].tokens, fresh[seed].logprobs)
    assert made.stats().prefix_hits == 48  # the first weights' own pages, when they come back
    made.close()


def test_the_seeded_fault_is_caught(
    llama: LoadedDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = property(lambda self: [(self.submit.adapter, self.tokens[0]), *self.tokens[1:]])
    monkeypatch.setattr(Sequence, "edges", by_name)
    with pytest.raises(AssertionError):
        test_other_weights_under_the_same_name_share_nothing(llama, tmp_path)


def test_running_requests_keep_the_adapter_that_they_began_with(llama: LoadedDecoder, tmp_path: Path) -> None:
    """A swap between steps, with a preemption after it: streams go on, and none of them mixes two sets of weights."""
    asked = [request(str(n), words(30, seed=n), 60, adapter="a", n=1 + n % 2, logprobs=0) for n in range(4)]
    wanted = {}
    for seed in (1, 2):
        other = engine(llama, prefix_cache=False)
        other.adapters.load("a", adapter(llama, tmp_path, seed))
        wanted[seed] = ask(other, *asked)
        other.close()
    made = engine(llama, pages=12, step_tokens=64)
    made.adapters.load("a", adapter(llama, tmp_path, 1))
    found: Results = {}
    for submit in asked[:2]:
        assert made.submit(submit) is None
    for _ in range(5):
        take(found, made)
    assert not all(result.finish for result in found.values())
    swap(made, adapter(llama, tmp_path, 2))
    for submit in asked[2:]:
        assert made.submit(submit) is None
    drain(made, found)
    assert made.stats().preemptions
    for (id, index), result in found.items():
        own = wanted[1 if int(id) < 2 else 2][id, index]
        assert (result.tokens, result.logprobs) == (own.tokens, own.logprobs)
    made.adapters.answers()
    assert made.adapters.bytes == made.adapters._named["a"].bytes
    made.close()


def test_siblings_logprobs_of_prompts_and_speculation(llama: LoadedDecoder, tmp_path: Path) -> None:
    ids = words(8, seed=4) * 6
    plain = with_adapters(llama, tmp_path, 2, prefix_cache=False, speculate="none")
    made = with_adapters(llama, tmp_path, 2)
    asked = [
        request("n", ids, 10, adapter="a0", n=3, temperature=1.0, seed=5, logprobs=1),
        request("p", ids, 4, adapter="a1", prompt_logprobs=1),
        request("s", ids, 40, adapter="a1", logprobs=0),
    ]
    found = ask(made, *asked)
    for submit in asked:
        for key, result in ask(plain, submit).items():
            assert (found[key].tokens, found[key].logprobs) == (result.tokens, result.logprobs)
            assert found[key].prompt_logprobs == result.prompt_logprobs
    assert made.stats().speculated_tokens
    made.close()
    plain.close()


def test_unloading_waits_for_its_requests(llama: LoadedDecoder, tmp_path: Path) -> None:
    made = with_adapters(llama, tmp_path, 2)
    assert made.submit(request("x", words(9, seed=1), 6, adapter="a0", n=2)) is None
    found: Results = {}
    take(found, made)
    assert said(made, UnloadAdapter(id="u", name="a0")) is None
    refused = made.submit(request("y", [5, 6], adapter="a0"))
    assert refused is not None
    assert (refused.reason, refused.text) == ("invalid", "there is no adapter 'a0'")
    assert isinstance(said(made, UnloadAdapter(id="v", name="a0")), RequestRefused)
    held = made.adapters.bytes
    made.cancel(Cancel(id="x", index=0, reason="test"))
    assert made.adapters.answers() == []
    drain(made, found)
    assert len(found["x", 1].tokens) == 6
    assert made.adapters.answers() == [AdapterUnloaded(id="u")]
    assert 0 < made.adapters.bytes < held
    made.close()


def test_unloading_after_many_siblings_is_answered_at_once(llama: LoadedDecoder, tmp_path: Path) -> None:
    """sgl-project/sglang#36894: unloading hung for ever after requests with n=16."""
    made = with_adapters(llama, tmp_path, 2)
    for n in range(3):
        ask(made, request(f"s{n}", words(9, seed=n), 6, adapter="a0", n=16, temperature=1.0))
    assert said(made, UnloadAdapter(id="u", name="a0")) == AdapterUnloaded(id="u")
    assert len(ask(made, request("x", words(9, seed=1), 6, adapter="a1"))["x", 0].tokens) == 6
    made.close()


def test_what_cannot_be_loaded_is_refused_and_changes_nothing(llama: LoadedDecoder, tmp_path: Path) -> None:
    made = with_adapters(llama, tmp_path, 1)
    ids, before = words(20, seed=1), made.adapters.bytes
    wanted = ask(made, request("x", ids, adapter="a0"))["x", 0].tokens
    other = tiny_decoder("llama", tmp_path / "other", fields={"hidden_size": 32, "head_dim": 16})
    for name, folder, text in (
        ("a0", adapter(llama, tmp_path, 1), "there is an adapter 'a0' already"),
        ("new", tmp_path / "missing", "has no adapter_config.json"),
        ("new", adapter(other, tmp_path / "wrong", 0), "does not fit its weight"),
    ):
        refused = said(made, LoadAdapter(id="l", name=name, folder=str(folder)))
        assert isinstance(refused, RequestRefused)
        assert text in refused.text
        assert made.adapters.bytes == before
    replaced = said(made, LoadAdapter(id="l", name="a0", folder=str(tmp_path / "missing"), replace=True))
    assert isinstance(replaced, RequestRefused)
    assert ask(made, request("x", ids, adapter="a0"))["x", 0].tokens == wanted
    for name in ("new", "", "a0 "):
        refused = made.submit(request("y", ids, adapter=name))
        assert refused is not None
    assert made.idle
    made.close()


@pytest.mark.slow
def test_an_adapter_and_a_picture_share_pages_only_together(tmp_path: Path) -> None:
    vlms.save("Qwen2_5_VL", tmp_path)
    loaded = load_decoder(tmp_path, torch.bfloat16)
    loaded.vision = PictureEncoder(tmp_path, torch.bfloat16)
    text = "A text that is longer than a page comes first. "
    made = with_adapters(loaded, tmp_path / "adapters", 2, within="model.layers.")
    for _ in range(2):
        for name in (None, "a0", "a1"):
            for place, picture in enumerate((vlms.picture(1), vlms.picture(2))):
                asked = shows(loaded, f"{name}{place}", text, picture, "?", adapter=name)
                cold = with_adapters(
                    loaded, tmp_path / "adapters", 2, within="model.layers.", prefix_cache=False
                )
                found, wanted = ask(made, asked)[asked.id, 0], ask(cold, asked)[asked.id, 0]
                assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs)
                cold.close()
    assert made.stats().prefix_hits
    made.close()


@pytest.mark.parametrize("name", ["Qwen3VL", "Qwen3_5"])
def test_an_adapter_of_the_text_model_alone_changes_the_whole_model(name: str, tmp_path: Path) -> None:
    """vllm-project/vllm#39369, #48019: names without `language_model` loaded, and changed nothing."""
    vlms.save(name, tmp_path)
    loaded = load_decoder(tmp_path, torch.bfloat16)
    whole = write_adapter(tmp_path, tmp_path / "whole", within="language_model.")
    alone = write_adapter(tmp_path, tmp_path / "alone", within="language_model.")
    tensors = {
        key.replace(".language_model.", "."): tensor for key, tensor in load_file(alone / WEIGHTS).items()
    }
    save_file(tensors, alone / WEIGHTS)
    first, second = (read_adapter(folder, loaded.decoder, tmp_path) for folder in (whole, alone))
    assert first.digest == second.digest
    ids = torch.arange(5, 25)[None]
    assert not torch.equal(loaded.logits(ids, adapter=second), loaded.logits(ids))


def test_files_are_read_once(llama: LoadedDecoder, tmp_path: Path) -> None:
    made, ids = with_adapters(llama, tmp_path, 1, prefix_cache=False), words(20, seed=1)
    wanted = ask(made, request("x", ids, adapter="a0"))["x", 0].tokens
    for path in (tmp_path / "0").iterdir():
        path.write_bytes(b"")
        path.unlink()
    assert ask(made, request("x", ids, adapter="a0"))["x", 0].tokens == wanted
    made.close()


def test_a_slow_disk_holds_no_step(llama: LoadedDecoder, tmp_path: Path) -> None:
    made, go = with_adapters(llama, tmp_path, 1), threading.Event()
    read = made.adapters._read

    def slowly(folder: Path, most: int) -> Any:
        assert go.wait(30)
        if folder.name == "bug":
            raise KeyError("a fault of ours")
        return read(folder, most)

    made.adapters._read = slowly
    for name, folder in (("b", adapter(llama, tmp_path, 5)), ("c", tmp_path / "bug")):
        made.adapters.take(LoadAdapter(id=name, name=name, folder=str(folder)))
    assert len(ask(made, request("x", words(9, seed=1), 6, adapter="a0"))["x", 0].tokens) == 6
    assert made.adapters.answers() == []
    refused = made.submit(request("y", [5, 6], adapter="b"))
    assert refused is not None
    assert (refused.reason, refused.retry_after_s) == ("queue_full", 1.0)
    go.set()
    found: dict[str, Any] = {}
    while len(found) < 2:
        found |= {answer.id: answer for answer in made.adapters.answers()}
    assert isinstance(found["b"], AdapterLoaded)
    assert found["c"] == RequestRefused(id="c", reason="invalid", text="KeyError: 'a fault of ours'")
    ask(made, request("x", words(9, seed=1), 2, adapter="b"))
    made.close()


def test_adapters_have_a_bound(llama: LoadedDecoder, tmp_path: Path) -> None:
    size = read_adapter(adapter(llama, tmp_path, 0), llama.decoder, llama.folder).bytes
    made = engine(llama, adapter_memory=2 * size)
    for n in range(2):
        made.adapters.load(f"a{n}", adapter(llama, tmp_path, n))
    refused = said(made, LoadAdapter(id="l", name="a2", folder=str(adapter(llama, tmp_path, 2))))
    assert isinstance(refused, RequestRefused)
    assert "--adapter-memory" in refused.text
    assert isinstance(said(made, UnloadAdapter(id="u", name="a0")), AdapterUnloaded)
    made.adapters.load("a2", adapter(llama, tmp_path, 2))
    swap(made, adapter(llama, tmp_path, 3), "a2")
    assert made.adapters.bytes == 2 * size
    made.close()


def test_weights_that_change_under_load_keep_the_adapters(llama: LoadedDecoder, tmp_path: Path) -> None:
    other = load_decoder(llama.folder, torch.bfloat16)
    for layer in other.decoder.layers:
        assert isinstance(layer.pre_attention, torch.Tensor)
        layer.pre_attention.mul_(1.5)
    made, fresh = with_adapters(llama, tmp_path, 1), with_adapters(other, tmp_path, 1)
    ids = words(40, seed=6)
    ask(made, request("x", ids, adapter="a0"))
    made.load_weights(other)
    asked = request("x", ids, adapter="a0", logprobs=1)
    found, wanted = ask(made, asked)["x", 0], ask(fresh, asked)["x", 0]
    assert (found.tokens, found.logprobs) == (wanted.tokens, wanted.logprobs)
    made.close()
    fresh.close()


def resident() -> int:
    """Bytes of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("times", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_loading_and_unloading_leaves_nothing(times: int, llama: LoadedDecoder, tmp_path: Path) -> None:
    """Four sets of weights in turn under one name, each asked once."""
    made = engine(llama)
    folders = [adapter(llama, tmp_path, n, targets=ATTENTION, r=64) for n in range(4)]
    size = read_adapter(folders[0], llama.decoder, llama.folder).bytes
    before = 0
    for n in range(times):
        if n == times // 2:
            gc.collect()
            before = resident()
        assert isinstance(
            said(made, LoadAdapter(id="l", name="a", folder=str(folders[n % 4]))), AdapterLoaded
        )
        ask(made, request("x", words(20, seed=n % 4), 2, adapter="a"))
        assert isinstance(said(made, UnloadAdapter(id="u", name="a")), AdapterUnloaded)
        assert made.adapters.bytes == 0
    gc.collect()
    assert resident() - before < 4 * size + times * 1000, "memory grows with each load"
    made.close()
