"""A step as one operator: to the bit what the layers' own calls give, whatever family, scheme and threads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import MODELS, RECURRENT, build, save, token_ids
from torch import nn

from torchwright.core.scheme import BF16, KEPT, MADE, W8A8, Scheme
from torchwright.hardware.kernels import ops
from torchwright.hardware.kernels.cpu import build as kernels
from torchwright.hardware.kernels.cpu.threads import own_threads, torch_threads
from torchwright.hardware.kernels.linear import PackedLinear
from torchwright.hardware.kernels.pack import PANEL
from torchwright.hub.weight import E2M1, SmallFloats
from torchwright.models.decoder import LoadedDecoder, load_decoder, model, plan
from torchwright.models.decoder.cache import PagedCache
from torchwright.models.decoder.plan import MOST_ROWS, DecodePlan
from torchwright.models.decoder.scores import Logits

LENGTHS = (3, 25, 17, 1, 16)
STEPS = 4
UNPLANNED = {
    "olmo2": "without a norm before",
    "olmo3": "without a norm before",
    "exaone4": "without a norm before",
    "exaone4-full": "without a norm before",
    "granite": "scaled before they join",
    "gpt-oss": "attention with sinks",
    "gemma4": "inputs of single layers",
    "gemma4-moe": "inputs of single layers",
    "gemma4-one-size": "inputs of single layers",
    "deepseek-v2": "latent attention",
    "deepseek-v2-greedy": "latent attention",
    "deepseek-v3": "latent attention",
    "deepseek-v3-halves": "latent attention",
    "glm4-moe": "mixture of experts",
    "mixtral": "mixture of experts",
    "qwen3-moe": "mixture of experts",
    "qwen3-moe-dense-layer": "mixture of experts",
    "olmoe": "all heads together",
}
"""Family → what the reason says."""
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


@pytest.fixture
def layers_only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context in which no step takes the plan."""

    class Called:
        def __enter__(self) -> None:
            monkeypatch.setattr(model, "MOST_ROWS", 0)

        def __exit__(self, *error: object) -> None:
            monkeypatch.setattr(model, "MOST_ROWS", MOST_ROWS)

    return Called()


def fresh_cache(loaded: LoadedDecoder) -> PagedCache:
    """Its pages come in an odd order."""
    cache = loaded.new_cache([length + STEPS + 16 for length in LENGTHS])
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
    """Hidden states and logits, and every page of both caches."""
    for mine, theirs in zip(got[0], wanted[0], strict=True):
        assert torch.isfinite(theirs).all()
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(got[1].layers, wanted[1].layers, strict=True):
        for name in ("k", "v", "k_scale", "v_scale"):
            if getattr(mine, name) is not None:
                assert torch.equal(getattr(mine, name), getattr(theirs, name))


@pytest.mark.parametrize("name", RECURRENT)
def test_layers_with_states_have_no_plan(name: str, tmp_path: Path) -> None:
    loaded = load_decoder(save(build(name), tmp_path), torch.bfloat16, "w8a8")
    cache = loaded.new_cache([4])
    loaded.decoder(cache.append([(cache.sequence(2), [5, 6])]), cache)
    reason = "scaled before they join" if name.startswith("granite") else "recurrent layers"
    assert reason in (plan_over(cache).unplanned or "")


@pytest.mark.plain("glm-no-bias", "llama-yarn-mscale", "llama-yarn-options", "smollm3-window")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in RECURRENT])
def test_every_family(name: str, tmp_path: Path, layers_only: Any) -> None:
    loaded = load_decoder(save(build(name), tmp_path), torch.bfloat16, "w8a8")
    got = run(loaded)
    reason = plan_over(got[1]).unplanned
    assert (reason is not None) == (name in UNPLANNED)
    assert UNPLANNED.get(name, "") in (reason or "")
    with layers_only:
        same(got, run(loaded))


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
def test_every_scheme_on_every_instruction_set(
    isa: str, scheme: Scheme, llama: Path, layers_only: Any
) -> None:
    for dtype, kv in ((torch.bfloat16, "bf16"), (torch.bfloat16, "int8"), (torch.float32, "fp32")):
        loaded = loaded_as(llama, scheme, dtype, kv)
        got = run(loaded)
        assert plan_over(got[1]).unplanned is None
        with layers_only:
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


def test_long_contexts_are_divided_between_the_threads(llama: Path, layers_only: Any) -> None:
    """More than a stretch of 1,024 keys, in fewer pieces than threads want."""
    loaded = loaded_as(llama, BF16, torch.bfloat16, "bf16")
    found = []
    for context in (nullcontext(), layers_only):
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


def test_another_layer_in_the_place_of_one(llama: Path, layers_only: Any) -> None:
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
        with layers_only:
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
    isa: str, vocabulary: int, dtype: torch.dtype, llama: Path, layers_only: Any
) -> None:
    """Of another output layer than the model came with, as long as no whole number of panels."""
    loaded = loaded_as(llama, W8A8, dtype, "fp32")
    wide: Any = loaded.decoder.head
    made = loaded.decoder.head = PackedLinear(wide.wide_weight()[:vocabulary], torch.randn(vocabulary), W8A8)
    found = answer(loaded, [3, 4, 5, 6], [1, 3])
    with layers_only:
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


def test_an_output_layer_of_pytorch_is_called(llama: Path, layers_only: Any) -> None:
    loaded = loaded_as(llama, BF16, torch.bfloat16, "bf16")
    wide: Any = loaded.decoder.head
    cache = fresh_cache(loaded)
    assert answer(loaded, [3, 4, 5], [2], cache).peaks_NP is not None
    loaded.decoder.head = nn.Linear(wide.in_features, wide.out_features).bfloat16()
    found = answer(loaded, [3, 4, 5], [2], cache)
    assert found.peaks_NP is None
    with layers_only:
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


def told(loaded: LoadedDecoder, **changes: Any) -> Any:
    config = loaded.config
    values = {
        "heads": config.heads,
        "scale": 1.0,
        "soft_cap": 0.0,
        "activation": "silu",
        "gated": True,
        "eps": 1e-5,
    }
    native: Any = torch.classes.torchwright.DecodePlan
    made = native(*(values | changes).values(), loaded.decoder.norm)
    made.embed_by(loaded.decoder.embedding, 1.0, None)
    return made


def test_what_does_not_fit_is_refused(llama: Path) -> None:
    loaded = loaded_as(llama, W8A8, torch.bfloat16, "bf16")
    cache = fresh_cache(loaded)
    batch = cache.append([(cache.sequence(1), [3])])
    layer: Any = loaded.decoder.layers[0]
    x, turn = batch.ids_T, [torch.zeros(64, 16), torch.zeros(64, 16), batch.positions_T]
    where = (batch.slots_T, batch.block_tables_BP, batch.query_starts, batch.context_lens_B, [], None, None)
    rows = torch.tensor([0])

    with pytest.raises(ValueError, match="0 layers"):
        told(loaded).hidden(x, turn, *where)
    with pytest.raises(ValueError, match="does not fit"):
        layer.plan(told(loaded, heads=3), 0, cache.layers[0], None)
    with pytest.raises(ValueError, match="features is where one of"):
        layer.plan(told(loaded, heads=6), 0, cache.layers[0], None)
    good = told(loaded)
    layer.plan(good, 1, cache.layers[0], None)
    with pytest.raises(ValueError, match="no turn 1"):
        good.hidden(x, turn, *where)
    turns = [*turn, *turn]
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
    with pytest.raises(ValueError, match="no output layer"):
        good.logits(x, turns, *where, rows)
    head: Any = loaded.decoder.head
    good.add_linear(*head.planned())
    with pytest.raises(IndexError, match="row 1 is beyond"):
        good.logits(x, turns, *where, rows + 1)
    with pytest.raises(ValueError, match="2 rows of 1"):
        good.logits(x, turns, *where, torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="rows must be"):
        good.logits(x, turns, *where, rows.int())
    with pytest.raises(ValueError, match="is not contiguous rows of"):
        good.embed_by(loaded.decoder.embedding[:, :8], 1.0, None)
    with pytest.raises(ValueError, match="of a gate silu or gelu_tanh"):
        told(loaded, activation="gelu")
    with pytest.raises(ValueError, match="1 tensors of a memory"):
        good.hidden(x, turns, *where[:-3], [batch.block_tables_BP], None, None)
    E = loaded.config.model
    with pytest.raises(ValueError, match="no layer 2 to observe"):
        good.observe([2])
    with pytest.raises(ValueError, match="rows of 0 observed"):
        good.hidden(x, turns, *where[:-1], torch.zeros(1, E, dtype=torch.bfloat16))
    good.observe([0, 1])
    for features in (torch.zeros(1, E, dtype=torch.bfloat16), torch.zeros(1, 2 * E)):
        with pytest.raises(ValueError, match="features"):
            good.hidden(x, turns, *where[:-1], features)
    pages = cache.layers[0]
    with pytest.raises(ValueError, match="memory does not fit"):
        good.add_memory(layer.pre_mlp, pages.k, pages.v, None, None)
    narrow = told(loaded)
    layer.plan(narrow, 0, cache.layers[0], None)
    narrow.add_linear(*layer.mlp.down.planned())
    with pytest.raises(ValueError, match="features is where one of"):
        narrow.logits(x, turns, *where, rows)
