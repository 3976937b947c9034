"""A step as one operator: to the bit what the layers' own calls give, whatever family, scheme and threads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MODELS, build, save, token_ids
from torch import nn

from torchwright.core.scheme import BF16, KEPT, MADE, W8A8, Scheme
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.cpu import build as kernels
from torchwright.hardware.kernels.cpu.threads import own_threads, torch_threads
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hardware.kernels.pack import PANEL
from torchwright.hub.weight import E2M1, SmallFloats
from torchwright.models.decoder import LoadedDecoder, load_decoder, plan
from torchwright.models.decoder.batch import FeatureRows
from torchwright.models.decoder.cache import PagedCache
from torchwright.models.decoder.plan import MOST_ROWS, DecodePlan
from torchwright.models.decoder.program import Program
from torchwright.models.decoder.scores import Logits
from watched_layers import layers_called

LENGTHS = (3, 25, 17, 1, 16)
STEPS = 4
POISON = 255
"""As every byte of a float: NaN."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    missing = kernels.load_fault()
    if missing:
        pytest.skip(f"no kernels: {missing}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama-tied-biases"), tmp_path_factory.mktemp("llama"))


def fresh_cache(loaded: LoadedDecoder) -> PagedCache:
    """Its pages come in an odd order."""
    cache = loaded.new_cache([length + STEPS + 16 for length in LENGTHS], copies=9)
    held = [cache.sequence(1) for _ in range(9)]
    for sequence in held:
        cache.append([(sequence, [1])])
    for sequence in (*held[::2], *held[1::2]):
        cache.free(sequence)
    return cache


def poison(made: DecodePlan | None) -> None:
    """Let what a plan computes in hold nothing that is a number."""
    if made is not None and made.unplanned is None and made.native.scratch() is not None:
        made.native.scratch().fill_(POISON)


def plan_over(cache: PagedCache) -> DecodePlan:
    return plan.plans[cache]


def run(loaded: LoadedDecoder, rows: int = len(LENGTHS)) -> tuple[list[torch.Tensor], PagedCache]:
    """Hidden states, and logits of the last rows, of a prompt each, of decode steps of all, and of one that lets a
    prompt's piece in."""
    cache = fresh_cache(loaded)
    ids = [token_ids(length + STEPS, seed=length).tolist() for length in LENGTHS[:rows]]
    sequences = [cache.sequence(length) for length in LENGTHS[:rows]]
    parts = [
        [row[:length] for row, length in zip(ids, LENGTHS, strict=False)],
        *([row[-STEPS + step : len(row) - STEPS + step + 1] for row in ids] for step in range(STEPS - 1)),
        [ids[0][-2:], *([row[-1]] for row in ids[1:])],
    ]
    found = []
    with torch.inference_mode():
        for part in parts:
            batch = cache.append(list(zip(sequences, part, strict=True)))
            poison(plan.plans.get(cache))
            found.append(loaded.decoder(batch, cache))
            poison(plan.plans.get(cache))
            found.append(loaded.decoder.answer(batch, cache, batch.last_rows_B).values_NV)
    return found, cache


def same(got: tuple[list[torch.Tensor], PagedCache], wanted: tuple[list[torch.Tensor], PagedCache]) -> None:
    """Hidden states and logits, and every page and state of both caches."""
    for mine, theirs in zip(got[0], wanted[0], strict=True):
        assert torch.isfinite(theirs).all()
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(got[1].layers, wanted[1].layers, strict=True):
        for name in ("k", "v", "k_scale", "v_scale"):
            if getattr(mine, name) is not None:
                assert torch.equal(getattr(mine, name), getattr(theirs, name))
    mine, theirs = (([] if made.states is None else made.states.layers) for made in (got[1], wanted[1]))
    for ours, others in zip(mine, theirs, strict=True):
        assert all(map(torch.equal, ours.parts, others.parts))


@pytest.mark.plain(
    *(
        "glm-no-bias",
        "smollm3-window",
        "olmo2",
        "gpt-oss",
        "gemma4-moe",
        "deepseek-v3",
        "falcon-h1",
        "qwen3-next",
    ),
    *("gemma4", "granite-hybrid"),
)
@pytest.mark.parametrize("name", MODELS)
def test_every_family(name: str, tmp_path: Path) -> None:
    loaded = load_decoder(save(build(name), tmp_path), torch.bfloat16, "w8a8")
    got = run(loaded)
    assert plan_over(got[1]).unplanned is None
    with layers_called(loaded.decoder):
        same(got, run(loaded))


SPECIAL = ("gpt-oss", "gemma4", "gemma4-moe", "deepseek-v3", "falcon-h1", "qwen3-next", "lfm2-moe")
"""Experts, inputs of layers, latent attention and states."""


@pytest.mark.plain("gemma4-moe", "deepseek-v3", "falcon-h1")
@pytest.mark.parametrize("name", SPECIAL)
def test_special_layers_in_any_company_and_threads(name: str, tmp_path: Path) -> None:
    loaded = load_decoder(save(build(name), tmp_path), torch.bfloat16, "w8a8")
    everybody, _ = run(loaded)
    for rows, threads in (
        (1, own_threads(2)),
        (2, torch_threads(2)),
        (4, own_threads(1)),
        (5, own_threads(3)),
    ):
        with threads:
            found, _ = run(loaded, rows)
        for mine, theirs in zip(found, everybody, strict=True):
            assert torch.equal(mine, theirs[: len(mine)])


@pytest.mark.plain("gpt-oss-mxfp4", "gpt-oss-w4bf16", "deepseek-v2-w4a8")
@pytest.mark.parametrize("scheme", ["w4a8", "w4a16", "mxfp4", "w4bf16"])
@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v2"])
def test_experts_of_every_kind_of_weight(name: str, scheme: str, tmp_path: Path) -> None:
    loaded = loaded_as(save(build(name), tmp_path), (MADE | KEPT)[scheme], torch.bfloat16, "int8")
    got = run(loaded)
    assert plan_over(got[1]).unplanned is None
    with layers_called(loaded.decoder):
        same(got, run(loaded))


@pytest.mark.parametrize("name", ["falcon-h1", "qwen3.5", "lfm2"])
def test_copies_of_states_on_the_way(name: str, tmp_path: Path) -> None:
    loaded = load_decoder(save(build(name), tmp_path), torch.bfloat16, "w8a8")
    found = []
    for context in (nullcontext(), layers_called(loaded.decoder)):
        cache = loaded.new_cache([20, 9], copies=3)
        one, other = cache.sequence(12), cache.sequence(5)
        for length in (4, 12):
            cache.mark(one, length)
        cache.mark(other, 3)
        batch = cache.append([(one, token_ids(12).tolist()), (other, [5, 6, 7, 8, 9])])
        with context, torch.inference_mode():
            hidden = loaded.decoder(batch, cache)
        assert cache.states is not None
        slots = [one.marks[4], one.marks[12], other.marks[3], one.state, other.state]
        found.append([hidden, *(part[slots] for layer in cache.states.layers for part in layer.parts)])
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[0][1][0], found[0][1][1])


@pytest.mark.plain("olmo2", "gemma4")
@pytest.mark.parametrize("name", ["olmo2", "gemma4", "falcon-h1", "deepseek-v3", "granite"])
def test_the_inputs_of_layers_are_observed(name: str, tmp_path: Path) -> None:
    loaded = load_decoder(save(build(name), tmp_path), torch.bfloat16, "w8a8")
    layers, found = (0, 2, loaded.config.layers), []
    for context in (nullcontext(), layers_called(loaded.decoder)):
        cache = loaded.new_cache([8])
        batch = cache.append([(cache.sequence(6), [5, 6, 7, 8, 9, 10])])
        values_TF = torch.zeros(6, 3 * loaded.config.model, dtype=torch.bfloat16)
        with context, torch.inference_mode():
            loaded.decoder(replace(batch, features=FeatureRows(layers, values_TF)), cache)
        found.append(values_TF)
    assert torch.equal(*found)
    assert found[0].any(dim=1).all()


def test_a_router_of_pytorch_has_no_plan(tmp_path: Path) -> None:
    """In float32 its product depends on the batch's size."""
    loaded = load_decoder(save(build("mixtral"), tmp_path), torch.float32, "w8a8")
    _, cache = run(loaded)
    assert "router is an operator of PyTorch" in (plan_over(cache).unplanned or "")


def test_another_expert_in_the_place_of_one(tmp_path: Path) -> None:
    loaded = load_decoder(save(build("mixtral"), tmp_path), torch.bfloat16, "w8a8")
    _, cache = run(loaded)
    made = plan_over(cache)
    sequence = cache.sequence(4)
    mlp: Any = loaded.decoder.layers[1].get_submodule("mlp")
    down = mlp.experts[2].down
    mlp.experts[2].down = PackedLinear(down.wide_weight() * 2, None, W8A8)
    batch = cache.append([(sequence, [4, 5, 6, 7])])
    with torch.inference_mode():
        after = loaded.decoder(batch, cache)
        assert plan_over(cache) is not made
        with layers_called(loaded.decoder):
            assert torch.equal(after, loaded.decoder(batch, cache))


def floats_near(weight_NK: torch.Tensor, scheme: Scheme) -> SmallFloats:
    """Small floats near the weight, with one scale for all."""
    groups = weight_NK.shape[0], -(-weight_NK.shape[1] // (scheme.group or 1))
    if scheme.weight_bits == 8:
        codes = (weight_NK.float() * 128).to(torch.float8_e4m3fn).view(torch.uint8)
        return SmallFloats(codes_NK=codes, scales_NG=torch.full(groups, 1 / 128), bits=8)
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = (weight_NK.float()[..., None] * 32 - table).abs().argmin(-1).to(torch.uint8)
    return SmallFloats(codes_NK=codes, scales_NG=torch.full(groups, 122, dtype=torch.uint8), bits=4)


def grouped(weight_NK: torch.Tensor, bias_N: torch.Tensor | None, scheme: Scheme) -> PackedLinear:
    """A layer of numbers as a quantized checkpoint has them, near the weight."""
    assert scheme.group
    if scheme.floats:
        return PackedLinear.from_floats(floats_near(weight_NK, scheme), bias_N, scheme)
    levels = 2**scheme.weight_bits - 1
    integers = ((weight_NK.float() + 0.6) / 1.2 * levels).round().clamp(0, levels).to(torch.uint8)
    groups = weight_NK.shape[0], -(-weight_NK.shape[1] // scheme.group)
    scale, offset = torch.full(groups, 1.2 / levels), torch.full(groups, -0.6)
    return PackedLinear.from_groups(integers, scale, offset, bias_N, scheme)


def loaded_as(folder: Path, scheme: Scheme, dtype: torch.dtype, kv: str) -> LoadedDecoder:
    make = grouped if scheme.kept else PackedLinear
    return load_decoder(folder, dtype, kv=kv, make_linear=lambda weight, bias: make(weight, bias, scheme))


@pytest.fixture(params=[*kernels.architecture(), "portable"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native = ops.native
    if request.param not in native.isas():
        pytest.skip(f"this machine has {', '.join(native.isas())}")
    before = native.isa()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(before)


@pytest.mark.plain("amx-bf16", "avx2-w8a8", "avx2-w4a8:group_size=32", "avx2-w4bf16:group_size=32")
@pytest.mark.parametrize("scheme", [*MADE.values(), *KEPT.values()], ids=str)
def test_every_scheme_on_every_instruction_set(isa: str, scheme: Scheme, llama: Path) -> None:
    for dtype, kv in ((torch.bfloat16, "bf16"), (torch.bfloat16, "int8"), (torch.float32, "fp32")):
        loaded = loaded_as(llama, scheme, dtype, kv)
        got = run(loaded)
        assert plan_over(got[1]).unplanned is None
        with layers_called(loaded.decoder):
            same(got, run(loaded))


def test_any_company_and_any_threads(llama: Path) -> None:
    loaded = loaded_as(llama, W8A8, torch.bfloat16, "bf16")
    everybody, _ = run(loaded)
    for rows in range(1, len(LENGTHS) + 1):
        for threads in (torch_threads(2), own_threads(1), own_threads(2), own_threads(3), own_threads(4)):
            with threads:
                found, _ = run(loaded, rows)
            for mine, theirs in zip(found, everybody, strict=True):
                assert torch.equal(mine, theirs[: len(mine)])


def test_long_contexts_are_divided_between_the_threads(llama: Path) -> None:
    """More than a stretch of 1,024 keys, in fewer pieces than threads want."""
    loaded = loaded_as(llama, BF16, torch.bfloat16, "bf16")
    found = []
    for context in (nullcontext(), layers_called(loaded.decoder)):
        cache = loaded.new_cache([2200])
        sequence = cache.sequence(2100)
        ids = token_ids(2100, seed=3).tolist()
        with context, own_threads(3), torch.inference_mode():
            for start in range(0, 2100, 700):
                loaded.decoder(cache.append([(sequence, ids[start : start + 700])]), cache)
            found.append([loaded.decoder(cache.append([(sequence, [token])]), cache) for token in (5, 9)])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3"])
def test_near_float64(name: str, tmp_path: Path) -> None:
    """Weights and activations in bfloat16 beside transformers' in float64."""
    original = build(name).bfloat16().double()
    loaded = load_decoder(save(original, tmp_path), torch.bfloat16)
    ids_T = token_ids(30)
    cache = loaded.new_cache([30])
    sequence, parts = cache.sequence(1), []
    with torch.inference_mode():
        wanted = original(ids_T[None], use_cache=False).logits[0]
        for token in ids_T.tolist():
            batch = cache.append([(sequence, [token])])
            parts.append(loaded.decoder.answer(batch, cache, torch.tensor([0])).values_NV)
    assert plan_over(cache).unplanned is None
    error = (torch.cat(parts).double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() < 0.05


def test_another_layer_in_the_place_of_one(llama: Path) -> None:
    loaded = loaded_as(llama, BF16, torch.bfloat16, "bf16")
    cache = fresh_cache(loaded)
    sequence = cache.sequence(4)
    with torch.inference_mode():
        before = loaded.decoder(cache.append([(sequence, [4, 5, 6, 7])]), cache)
        mlp: Any = loaded.decoder.layers[1].get_submodule("mlp")
        mlp.down = PackedLinear(mlp.down.wide_weight(), mlp.down.bias, W8A8)
        cache.rewind(sequence, 0)
        batch = cache.append([(sequence, [4, 5, 6, 7])])
        after = loaded.decoder(batch, cache)
        with layers_called(loaded.decoder):
            assert torch.equal(after, loaded.decoder(batch, cache))
        assert not torch.equal(after, before)
        mlp.down = nn.Linear(mlp.down.in_features, mlp.down.out_features).bfloat16()
        loaded.decoder(batch, cache)
    assert plan_over(cache).unplanned == "linear layers of PyTorch"


def test_whoever_watches_the_output_layer_sees_its_rows(llama: Path) -> None:
    loaded = loaded_as(llama, BF16, torch.bfloat16, "bf16")
    unseen, _ = run(loaded)
    seen: list[int] = []
    handle = loaded.decoder.head.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    found, _ = run(loaded)
    handle.remove()
    assert seen == [len(LENGTHS)] * (STEPS + 1)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, unseen, strict=True))


def answer(loaded: LoadedDecoder, ids: list[int], rows: list[int], cache: PagedCache | None = None) -> Logits:
    cache = cache or fresh_cache(loaded)
    batch = cache.append([(cache.sequence(len(ids)), ids)])
    with torch.inference_mode():
        return loaded.decoder.answer(batch, cache, torch.tensor(rows, dtype=torch.long))


@pytest.mark.parametrize("vocabulary", [5, 64, 101, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peaks_are_the_largest_of_each_panel(
    isa: str, vocabulary: int, dtype: torch.dtype, llama: Path
) -> None:
    """Of another output layer than the model came with, as long as no whole number of panels."""
    loaded = loaded_as(llama, W8A8, dtype, "fp32")
    wide: Any = loaded.decoder.head
    made = loaded.decoder.head = PackedLinear(wide.wide_weight()[:vocabulary], torch.randn(vocabulary), W8A8)
    found = answer(loaded, [3, 4, 5, 6], [1, 3])
    with layers_called(loaded.decoder):
        assert torch.equal(found.values_NV, answer(loaded, [3, 4, 5, 6], [1, 3]).values_NV)
    assert found.peaks_NP is not None
    panels = found.values_NV.split(PANEL, dim=1)
    assert torch.equal(found.peaks_NP, torch.stack([panel.amax(1) for panel in panels], 1))
    assert found.best() == found.values_NV.argmax(1).tolist()
    assert made.bias is not None
    made.bias[vocabulary - 1] = torch.nan
    broken = answer(loaded, [3, 4, 5, 6], [1, 3])
    assert broken.peaks_NP is not None
    assert broken.peaks_NP.isnan().sum(1).tolist() == [1, 1]
    assert broken.peaks_NP[:, -1].isnan().all()
    assert broken.best() == [None, None]


def test_a_step_may_answer_nothing(llama: Path) -> None:
    loaded = loaded_as(llama, BF16, torch.bfloat16, "bf16")
    assert answer(loaded, [3, 4], []).values_NV.shape == (0, loaded.config.vocabulary)


def test_an_output_layer_of_pytorch_is_called(llama: Path) -> None:
    loaded = loaded_as(llama, BF16, torch.bfloat16, "bf16")
    wide: Any = loaded.decoder.head
    cache = fresh_cache(loaded)
    assert answer(loaded, [3, 4, 5], [2], cache).peaks_NP is not None
    loaded.decoder.head = nn.Linear(wide.in_features, wide.out_features).bfloat16()
    found = answer(loaded, [3, 4, 5], [2], cache)
    assert found.peaks_NP is None
    with layers_called(loaded.decoder):
        assert torch.equal(found.values_NV, answer(loaded, [3, 4, 5], [2]).values_NV)


@pytest.mark.parametrize("part", ["attention.o", "mlp"])
def test_whoever_watches_a_part_sees_its_rows(llama: Path, part: str) -> None:
    loaded = loaded_as(llama, BF16, torch.bfloat16, "bf16")
    run(loaded)
    seen: list[int] = []
    watched = loaded.decoder.layers[2].get_submodule(part)
    handle = watched.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    run(loaded)
    handle.remove()
    run(loaded)
    assert seen[::2] == seen[1::2] == [sum(LENGTHS), *[len(LENGTHS)] * (STEPS - 1), len(LENGTHS) + 1]


def test_a_copy_has_a_plan_of_its_own(llama: Path) -> None:
    loaded = loaded_as(llama, BF16, torch.bfloat16, "bf16")
    found, cache = run(loaded)
    other, theirs = copy.deepcopy(loaded.decoder), copy.deepcopy(cache)
    assert theirs not in plan.plans
    loaded.decoder = other
    assert all(torch.equal(mine, his) for mine, his in zip(run(loaded)[0], found, strict=True))


def test_memory_is_that_of_the_rows(llama: Path) -> None:
    """At most `MOST_ROWS` rows of values, and of what the widest layer makes of them."""
    loaded = loaded_as(llama, W8A8, torch.bfloat16, "bf16")
    config, cache = loaded.config, loaded.new_cache([2 * MOST_ROWS, 8])
    sequence = cache.sequence(MOST_ROWS)
    with torch.inference_mode():
        loaded.decoder(cache.append([(sequence, [3] * MOST_ROWS)]), cache)
        held = plan_over(cache).native.scratch()
        loaded.decoder(cache.append([(cache.sequence(1), [3])]), cache)
        assert plan_over(cache).native.scratch().data_ptr() == held.data_ptr()
    q = config.heads * config.head_dim
    values = 3 * config.model + 2 * config.feed_forward + 2 * q + config.feed_forward
    widest = max(config.feed_forward, config.model, q)
    assert held.nbytes <= MOST_ROWS * (2 * values + 2 * widest + 256) + 4096


def test_more_rows_call_the_layers(llama: Path) -> None:
    loaded = loaded_as(llama, W8A8, torch.bfloat16, "bf16")
    cache = loaded.new_cache([MOST_ROWS + 1])
    batch = cache.append([(cache.sequence(1), [3] * (MOST_ROWS + 1))])
    with torch.inference_mode():
        loaded.decoder(batch, cache)
    assert cache not in plan.plans


def test_a_step_is_one_operator_of_a_profile(llama: Path) -> None:
    loaded = loaded_as(llama, W8A8, torch.bfloat16, "bf16")
    run(loaded)
    with torch.profiler.profile(acc_events=True) as profile:
        run(loaded)
    names = [event.key for event in profile.key_averages()]
    assert "torchwright::decode_step" in names
    assert "torchwright::linear_w8a8" not in names


def described(loaded: LoadedDecoder, cache: PagedCache, *, head: bool = True, turn: int = 0) -> Any:
    """A program of the decoder's first layer, as the plan would write it."""
    decoder: Any = loaded.decoder
    program = Program(decoder.embedding, loaded.config.eps)
    program.embed(decoder.embedding, 1.0, (), 0)
    delta = decoder.layers[0].plan(program, None, turn, cache.layers[0])
    program.note(1, x := program.join(delta, decoder.norm))
    program.finish(x, decoder.head if head else nn.Identity())
    return program


def test_a_batch_that_does_not_fit_is_refused(llama: Path) -> None:
    loaded = loaded_as(llama, W8A8, torch.bfloat16, "bf16")
    cache = fresh_cache(loaded)
    batch = cache.append([(cache.sequence(1), [3])])
    x, turns = batch.ids_T, [torch.zeros(64, 16), torch.zeros(64, 16), batch.positions_T]
    where = (
        *(batch.slots_T, batch.block_tables_BP, batch.query_starts, batch.context_lens_B),
        *([], [], None, None),
    )
    rows, E = torch.tensor([0]), loaded.config.model
    with pytest.raises(ValueError, match="no turn 1"):
        described(loaded, cache, turn=1).native.hidden(x, turns, *where)
    good = described(loaded, cache, head=False).native
    assert good.hidden(x, turns, *where).shape == (1, E)
    with pytest.raises(ValueError, match="turn 0 is of 64 numbers"):
        good.hidden(x, [torch.zeros(64, 32), torch.zeros(64, 32), batch.positions_T], *where)
    with pytest.raises(ValueError, match="ids must be a contiguous"):
        good.hidden(x.int(), turns, *where)
    for token in (-1, loaded.config.vocabulary):
        with pytest.raises(IndexError, match="of the embedding"):
            good.hidden(torch.tensor([token]), turns, *where)
    with pytest.raises(IndexError, match="beyond the"):
        good.hidden(x, turns, *where[:1], where[1] + 1000, *where[2:])
    with pytest.raises(IndexError, match="beyond the"):
        good.hidden(x, turns, where[0] + 100_000, *where[1:])
    adapted = torch.classes.torchwright.AdaptedRows([torch.classes.torchwright.Adapter()], [rows + 1])
    with pytest.raises(IndexError, match="row 1 is beyond the 1 of the batch"):
        good.hidden(x, turns, *where[:-2], adapted, None)
    with pytest.raises(ValueError, match="1 tensors of a memory"):
        good.hidden(x, turns, *where[:4], [batch.block_tables_BP], [], None, None)
    with pytest.raises(ValueError, match="3 tensors of states"):
        good.hidden(x, turns, *where[:4], [], [rows] * 3, None, None)
    with pytest.raises(ValueError, match="no layer 2 to observe"):
        good.observe([2])
    with pytest.raises(ValueError, match="rows of 0 observed"):
        good.hidden(x, turns, *where[:-1], torch.zeros(1, E, dtype=torch.bfloat16))
    good.observe([0, 1])
    for features in (torch.zeros(1, E, dtype=torch.bfloat16), torch.zeros(1, 2 * E)):
        with pytest.raises(ValueError, match="features"):
            good.hidden(x, turns, *where[:-1], features)
    with pytest.raises(ValueError, match="no output layer"):
        good.logits(x, turns, *where, rows)
    good = described(loaded, cache).native
    with pytest.raises(IndexError, match="row 1 is beyond"):
        good.logits(x, turns, *where, rows + 1)
    with pytest.raises(ValueError, match="2 rows of 1"):
        good.logits(x, turns, *where, torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="rows must be"):
        good.logits(x, turns, *where, rows.int())


def test_an_operation_that_does_not_fit_is_refused(llama: Path) -> None:
    loaded = loaded_as(llama, W8A8, torch.bfloat16, "bf16")
    cache, decoder = fresh_cache(loaded), loaded.decoder
    attention: Any = decoder.layers[0].get_submodule("attention")
    E, pages = loaded.config.model, cache.layers[0]
    program = Program(decoder.embedding, 1e-5)
    with pytest.raises(ValueError, match="0 layers"):
        program.native.hidden(torch.tensor([0]), [], *[torch.tensor([0])] * 4, [], [], None, None)
    narrow, wide = program.rows(8), program.rows(4 * E)
    table: torch.Tensor = decoder.get_buffer("embedding")
    wrong = [
        (lambda: program.lookup(table, 1.0, narrow), "is not contiguous rows of 8"),
        (lambda: program.linear(attention.qkv, narrow), "features is where one of"),
        (lambda: program.linear(attention.qkv, wide.part(1, E)), "whole rows are wanted"),
        (lambda: program.add(narrow, wide, wide), "do not fit rows of"),
        (lambda: program.norm(torch.ones(3), narrow, narrow), "a norm of 3 numbers"),
        (lambda: program.copy(wide, narrow), "do not fit rows of"),
        (lambda: program.gated("gelu", wide), "silu, gelu_tanh or clamped_swiglu"),
        (lambda: program.store(wide, narrow, pages, 0), "do not fit pages"),
        (lambda: program.attend(narrow, narrow, pages, 1.0), "do not fit pages"),
        (lambda: program.native.scale(2.0, [9, 0, 1, 1], [0, 0, 1, 1]), "there is no room"),
        (lambda: program.native.scale(2.0, [0, E, 1, E], [0, 0, 1, 1]), "there is no room"),
        (lambda: program.native.linear(7, [*narrow], [*wide], -1), "no linear layer 7"),
        (lambda: program.finish(wide, decoder.head), "are narrower than"),
    ]
    for call, message in wrong:
        with pytest.raises((ValueError, IndexError), match=message):
            call()


@pytest.mark.parametrize("name", ["falcon-h1", "qwen3.5", "lfm2"])
def test_a_used_slot_is_as_good_as_a_new_one(name: str, tmp_path: Path) -> None:
    """No state of an earlier sequence is left in it (llama.cpp#29092)."""
    loaded = load_decoder(save(build(name), tmp_path), torch.bfloat16, "w8a8")
    cache, found = loaded.new_cache([20]), []
    with torch.inference_mode():
        for ids in (token_ids(9, seed=2), token_ids(20, seed=3), token_ids(9, seed=2)):
            sequence = cache.sequence(len(ids))
            parts = [ids[:5].tolist(), *([id] for id in ids[5:].tolist())]
            found += [loaded.decoder(cache.append([(sequence, part)]), cache) for part in parts]
            cache.free(sequence)
    assert all(map(torch.equal, found[:5], found[-5:]))
