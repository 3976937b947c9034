"""The parts of parallel training on four gloo processes, each against the plain computation.

All checks run in one start of the processes; each returns what its test looks at.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import build, save, token_ids
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchwright.models.decoder import DecoderConfig, read_decoder_config
from torchwright.train.data.batch import of_windows
from torchwright.train.layout import Layout, LayoutError
from torchwright.train.model import Scores, Transformer, explicit_attention, load_weights, save_folder
from torchwright.train.model.fill import whole
from torchwright.train.model.loss import shift_labels, token_loss
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.parallel import (
    by_mesh,
    check_fits,
    clip_grad_norm,
    global_sum,
    grad_norm,
    local_batch,
    make_mesh,
    parallelize,
)
from torchwright.train.parallel.context import HeadExchange
from torchwright.train.parallel.ring import ring_attention
from torchwright.train.parallel.tensor import apply_tensor_parallel
from torchwright.train.parallel.zigzag import pieces, places
from torchwright.train.prove.processes import ProveError, on_processes
from torchwright.train.run.config.read import parse_run
from torchwright.train.run.objectives.precision import autocast
from torchwright.train.run.objectives.setup import Batches, build_model
from torchwright.train.run.objectives.step import compile_blocks, recompute

WORLD = 4
FULL = Scores(scale=0.3, window=0, soft_cap=0.0)
VARIANTS = {
    "full": FULL,
    "window within a part": dataclasses.replace(FULL, window=3),
    "window over two parts": dataclasses.replace(FULL, window=9),
    "window as wide as a part": dataclasses.replace(FULL, window=6),
    "soft cap": dataclasses.replace(FULL, soft_cap=1.5),
    "soft cap in a window": dataclasses.replace(FULL, soft_cap=1.5, window=7),
    "sinks": FULL,
    "sinks in a window": dataclasses.replace(FULL, window=7),
}


def error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, but for what is zero: a first token's query has no gradient."""
    actual, wanted = actual.detach(), wanted.detach()
    return float((actual - wanted).norm() / wanted.norm().clamp_min(1.0))


def attention_inputs(heads: int, kv_heads: int, tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, count, tokens, 8) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def documents(tokens: int) -> torch.Tensor:
    """(2, T): where documents begin, in one row of the two at the borders of parts."""
    places_T = torch.arange(tokens)
    uneven = torch.where(places_T < 1, 0, torch.where(places_T < tokens // 2 + 2, 1, tokens // 2 + 2))
    return torch.stack([uneven, places_T - places_T % 3])


def context_errors(kv_heads: int, attend: Callable[..., torch.Tensor], tokens: int = 24) -> dict[str, float]:
    """Output and gradients of a context-parallel attention against the whole one, for every variant."""
    errors = {}
    variants = {(name, None): scores for name, scores in VARIANTS.items()}
    variants |= {(name, documents(tokens)): scores for name, scores in VARIANTS.items()}
    for (name, packed), scores in variants.items():
        *inputs, gradient = attention_inputs(2 * kv_heads, kv_heads, tokens)
        wholes = [x.clone().requires_grad_() for x in inputs]
        sinks = [torch.linspace(-1, 2, 2 * kv_heads, dtype=torch.float64).requires_grad_() for _ in range(2)]
        rules = [scores.beside(sinks_H) if "sinks" in name else scores for sinks_H in sinks]
        wanted = explicit_attention(*wholes, rules[0], packed)
        wanted.backward(gradient)
        own = places(tokens, dist.get_rank(), dist.get_world_size())
        parts = [x[:, :, own].requires_grad_() for x in inputs]
        actual = attend(*parts, rules[1], packed)
        actual.backward(gradient[:, :, own])
        if "sinks" in name:
            summed, whole_sum = (part.grad for part in reversed(sinks))
            assert summed is not None
            assert whole_sum is not None
            dist.all_reduce(summed)
            errors[f"{name}, their own gradient{'' if packed is None else ', documents'}"] = error(
                summed, whole_sum
            )
        pairs = [
            (actual, wanted),
            *((part.grad, full.grad) for part, full in zip(parts, wholes, strict=True)),
        ]
        errors[name if packed is None else f"{name}, documents"] = max(
            error(a, b[:, :, own]) for a, b in pairs
        )
    return errors


def ring(tokens: int = 24) -> dict[str, float]:
    def attend(*inputs: Any) -> torch.Tensor:
        *inputs, packed = inputs
        return ring_attention(*inputs, dist.group.WORLD.group_name, packed)  # type: ignore[union-attr]

    return context_errors(3, attend, tokens)


def heads_exchanged() -> dict[str, float]:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
    return context_errors(4, HeadExchange(mesh, explicit_attention))


def vocabulary() -> dict[str, float]:
    """The loss over divided logits; the vocabularies do not divide, one leaves a process without any."""
    mesh = init_device_mesh("cpu", (WORLD,))
    errors = {}
    for size in (64, 67, 3):
        generator = torch.Generator().manual_seed(size)
        logits = 5 * torch.randn(2, 6, size, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, size, (2, 6), generator=generator)
        labels[0, :2] = IGNORE
        plain = logits.clone().requires_grad_()
        wanted, valid = token_loss(plain, labels)
        (wanted * 0.7).backward()
        divided = distribute_tensor(logits, mesh, [Shard(2)]).requires_grad_()
        actual, count = token_loss(divided, labels)
        (actual * 0.7).backward()
        assert count == valid
        errors[f"loss {size}"] = error(actual, wanted)
        errors[f"gradient {size}"] = error(whole(divided.grad), plain.grad)
    return errors


def model(config: DecoderConfig, layout: Layout, **options: Any) -> tuple[Transformer, Any]:
    """Built without memory, divided, and only then filled."""
    mesh = make_mesh(layout, "cpu")
    with torch.device("meta"):
        built = Transformer(config)
    parallelize(built, layout, mesh, **options)
    built.to_empty(device="cpu")
    built.tie()
    return built, mesh


LAYOUTS = {
    "qwen3-moe": ["dp_shard=2,cp=2,ep=2", "dp_shard=2,tp=2,ep=2"],
    "llama-tied-biases": ["dp_shard=2,tp=2"],
    "olmo2": ["dp_replicate=2,tp=2"],
}
FURTHER = {
    "qwen3-moe": ["dp_shard=4,ep=2", "dp_replicate=2,dp_shard=2,ep=2"],
    "llama-tied-biases": ["cp=2,tp=2", "dp_replicate=2,dp_shard=2"],
}
"""Layouts that no other check needs."""


def folders(sources: dict[str, str], layouts: dict[str, list[str]] = LAYOUTS) -> dict[str, bool]:
    """Folders read into every layout and written from it again are the same; so are seeded weights."""
    same = {}
    for name, texts in layouts.items():
        source = Path(sources[name])
        config = read_decoder_config(source)
        alone = Transformer(config)
        load_weights(alone, source)
        for text in texts:
            divided, _ = model(config, Layout.parse(text))
            load_weights(divided, source)
            shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(shared)
            out = Path(str(shared[0])) / "out"
            save_folder(divided, config, out, source=source)
            dist.barrier()
            again = Transformer(config)
            load_weights(again, out)
            pairs = zip(alone.parameters(), again.parameters(), strict=True)
            same[f"{name} {text}"] = all(torch.equal(one, two) for one, two in pairs)
            divided.reset_parameters(11)
            seeded = Transformer(config)
            seeded.reset_parameters(11)
            pairs = zip(seeded.parameters(), divided.parameters(), strict=True)
            same[f"{name} {text} seeded"] = all(torch.equal(one, whole(two)) for one, two in pairs)
    return same


def step(sources: dict[str, str]) -> dict[str, Any]:
    """One clipped optimizer step on a mix of meshes, and the same on one process."""
    layout = Layout(dp_shard=2, cp=2, ep=2)
    source = Path(sources["qwen3-moe"])
    config = read_decoder_config(source)
    ids, labels = token_ids(4, 16), shift_labels(token_ids(4, 16), torch.tensor([16, 4, 9, 16]))
    alone = Transformer(config)
    load_weights(alone, source)
    total, valid = alone.loss(ids, labels)
    (total / valid).backward()
    wanted = grad_norm(alone.parameters())
    alone_norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)

    divided, mesh = model(config, layout)
    load_weights(divided, source)
    own_ids, own_labels, positions = local_batch(ids, labels, layout, mesh)
    total, own_valid = divided.loss(own_ids, own_labels, positions)
    (total / global_sum(own_valid, mesh)).backward()
    norm = clip_grad_norm(divided.parameters(), 0.1)
    clipped = max(
        error(whole(two.grad), one.grad)
        for one, two in zip(alone.parameters(), divided.parameters(), strict=True)
    )
    groups = by_mesh(divided.parameters())
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.1, foreach=True)
    optimizer.step()
    return {
        "labels": (int(global_sum(own_valid, mesh)), int(valid)),
        "norms": (float(norm), float(wanted), float(alone_norm)),
        "clipped": clipped,
        "meshes": len(groups),
        "own": float(own_valid),
    }


def whole_model(source: str, how: str) -> dict[str, float]:
    """Loss and every gradient, in float64, of a model whose sequences are divided over all processes."""
    layout = Layout(cp=dist.get_world_size())
    config = read_decoder_config(Path(source))
    ids = token_ids(2, 48)
    labels = shift_labels(ids, torch.tensor([48, 29]))
    alone, mesh = Transformer(config).double(), make_mesh(layout, "cpu")
    load_weights(alone, Path(source))
    total, valid = alone.loss(ids, labels)
    (total / valid).backward()
    divided = Transformer(config).double()
    load_weights(divided, Path(source))
    recompute(divided, "selective" if how == "selective" else "none")
    parallelize(divided, layout, mesh)
    if how == "compiled":
        compile_blocks(divided)
    loss, _ = divided.loss(*local_batch(ids, labels, layout, mesh))
    (loss / valid).backward()
    pairs = zip(divided.named_parameters(), alone.parameters(), strict=True)
    errors = {name: error(whole(two.grad), one.grad) for (name, two), one in pairs}
    return errors | {"loss": error(global_sum(loss, mesh), total)}


def bfloat16(sources: dict[str, str]) -> dict[str, Any]:
    """Parameters in float32, computed with in bfloat16."""
    layout = Layout(dp_shard=2, tp=2)
    config = read_decoder_config(Path(sources["llama-tied-biases"]))
    divided, mesh = model(config, layout, compute=torch.bfloat16, reshard_after_forward=False)
    divided.reset_parameters(1)
    ids = token_ids(4, 16)
    own_ids, own_labels, positions = local_batch(ids, shift_labels(ids), layout, mesh)
    with autocast("bf16", "cpu"):
        logits = divided(own_ids, positions)
    total, valid = token_loss(logits, own_labels)
    (total / global_sum(valid, mesh)).backward()
    return {
        "logits": str(logits.dtype),
        "divided": isinstance(logits, DTensor) and logits.to_local().shape[-1] == config.vocabulary // 2,
        "loss": str(total.dtype),
        "gradients": {
            str(parameter.grad.dtype) for parameter in divided.parameters() if parameter.grad is not None
        },
        "parts": float(global_sum(total, mesh) / global_sum(valid, mesh)),
    }


def compiled(sources: dict[str, str]) -> float:
    """The embedding's gradient where what follows it is compiled, against the same uncompiled."""
    config = read_decoder_config(Path(sources["olmo2"]))
    mesh, gradients = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"], []
    if dist.get_rank() >= 2:  # two suffice: each spends two seconds on starting a compiler
        return 0.0
    for follow in (torch.sin, torch.compile(torch.sin, backend="aot_eager")):
        divided = Transformer(config)
        divided.reset_parameters(1)
        apply_tensor_parallel(divided, mesh)
        follow(divided.embedding(token_ids(4, 16))).square().sum().backward()
        gradient = divided.embedding.weight.grad
        assert isinstance(gradient, DTensor)
        gradients.append(gradient.to_local())
    return error(*gradients)


def gathered(source: str, settings: dict[str, Any]) -> dict[str, str]:
    """The types that the trainer's model computes with, and of its residual stream."""
    config = read_decoder_config(Path(source))
    fields = {"out": "", "tokens": 1, "batch_tokens": 1, "context": 8, "layout": {"dp_shard": 2}}
    run = parse_run(fields | {"model": {"config": {}}, "data": {"train": ["x"]}} | settings)
    built, mesh = build_model(run, config, Path(), "cpu")
    seen: dict[str, str] = {}
    for name, module in built.named_modules():
        if name in ("embedding", "layers.0.attention.q", "head"):
            module.register_forward_pre_hook(
                lambda module, _, name=name: seen.__setitem__(name, str(module.weight.dtype))
            )
    built.layers[0].register_forward_pre_hook(
        lambda _, inputs: seen.__setitem__("residual", str(inputs[0].dtype))
    )
    batch = Batches(run, mesh, "cpu").prepare(of_windows(torch.full((2, 600), 5)))
    with autocast(run.precision, "cpu"):
        built.loss(batch.ids_BT, batch.labels_BT, batch.positions_BT)[0].backward()
    return seen | {"gradient": str(built.embedding.weight.grad.dtype)}  # type: ignore[union-attr]


def refusals(sources: dict[str, str]) -> dict[str, str]:
    """What each call says."""
    said = {}

    def refused(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except LayoutError as refusal:
            said[name] = str(refusal)

    layout = Layout(dp_shard=2, cp=2)
    mesh = make_mesh(layout, "cpu")
    refused("processes", lambda: make_mesh(Layout(dp_shard=2, tp=3), "cpu"))
    refused("rows", lambda: local_batch(token_ids(3, 8), token_ids(3, 8), layout, mesh))
    refused("tokens", lambda: local_batch(token_ids(2, 7), token_ids(2, 7), layout, mesh))
    return said


def every_check(sources: dict[str, str]) -> dict[str, Any]:
    checks = {"ring": ring, "heads": heads_exchanged, "vocabulary": vocabulary}
    with_sources = {"folders": folders, "step": step, "bfloat16": bfloat16}
    with_sources |= {"compiled": compiled, "refusals": refusals}
    results: dict[str, Any] = {name: check() for name, check in checks.items()}
    return results | {name: check(sources) for name, check in with_sources.items()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(save(build(name), tmp_path_factory.mktemp(name))) for name in LAYOUTS}


@pytest.fixture(scope="module")
def found(sources: dict[str, str]) -> list[dict[str, Any]]:
    return on_processes(WORLD, every_check, sources)


@pytest.mark.parametrize("way", ["ring", "heads"])
def test_attention_over_divided_sequences(found: list[dict[str, Any]], way: str) -> None:
    compared = {*VARIANTS, *(f"{name}, their own gradient" for name in VARIANTS if "sinks" in name)}
    for rank in found:
        assert set(rank[way]) == compared | {f"{name}, documents" for name in compared}
        assert max(rank[way].values()) < 1e-13, rank[way]


EIGHT_OF_ONE = pytest.param(8, 8, marks=pytest.mark.slow)
EIGHT_OF_FIVE = pytest.param(8, 40, marks=pytest.mark.slow)


@pytest.mark.parametrize(("ways", "tokens"), [(2, 2), (2, 600), EIGHT_OF_ONE, EIGHT_OF_FIVE])
def test_a_ring_of_any_length_computes_what_one_process_computes(ways: int, tokens: int) -> None:
    """Float64: one token each, odd parts, and more queries than a tile has."""
    for errors in on_processes(ways, ring, tokens):
        assert max(errors.values()) < 1e-13, errors


@pytest.mark.parametrize(
    ("ways", "name", "how"),
    [
        (2, "llama-one-kv-head", "eager"),
        pytest.param(4, "llama-one-kv-head", "selective", marks=pytest.mark.slow),
        pytest.param(8, "gemma2", "eager", marks=pytest.mark.slow),
        pytest.param(2, "llama-one-kv-head", "compiled", marks=pytest.mark.slow),
    ],
)
def test_a_model_over_a_ring_has_the_gradients_of_one_process(
    ways: int, name: str, how: str, tmp_path: Path
) -> None:
    for errors in on_processes(ways, whole_model, str(save(build(name), tmp_path)), how):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_every_part_of_a_sequence_sees_as_many_keys(parts: int) -> None:
    """Zig-zag: each token is held once, in order within a part, and causal attention costs every part the same."""
    held = [places(64, part, parts) for part in range(parts)]
    assert torch.cat(held).sort().values.tolist() == list(range(64))
    assert all(torch.equal(part, part.sort().values) for part in held)
    assert len({int((part + 1).sum()) for part in held}) == 1
    assert [place for piece in pieces(9, 0, 1) for place in piece] == list(range(9))


def test_loss_over_a_divided_vocabulary(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert max(rank["vocabulary"].values()) < 1e-13, rank["vocabulary"]


def test_weights_survive_every_layout_and_seeds_do_not_depend_on_it(found: list[dict[str, Any]]) -> None:
    count = 2 * sum(map(len, LAYOUTS.values()))
    for rank in found:
        assert len(rank["folders"]) == count
        assert all(rank["folders"].values()), rank["folders"]


@pytest.mark.slow
def test_weights_survive_further_layouts(sources: dict[str, str]) -> None:
    for same in on_processes(WORLD, folders, sources, FURTHER):
        assert len(same) == 2 * sum(map(len, FURTHER.values()))
        assert all(same.values()), same


def test_a_clipped_step_over_several_meshes(found: list[dict[str, Any]]) -> None:
    for rank in found:
        step = rank["step"]
        assert step["labels"][0] == step["labels"][1]
        assert step["meshes"] == 2  # experts lie on one of their own
        norm, wanted, torchs = step["norms"]
        assert norm == pytest.approx(wanted, rel=1e-5)
        assert norm == pytest.approx(torchs, rel=1e-5)
        assert norm > 0.1, "nothing was clipped"
        assert step["clipped"] < 1e-4
    assert len({rank["step"]["own"] for rank in found}) > 1, (
        "every process has as many labels: weights cannot show"
    )


def test_bfloat16_computation_keeps_float32_parameters(found: list[dict[str, Any]]) -> None:
    for rank in found:
        result = rank["bfloat16"]
        assert result["logits"] == "torch.bfloat16"
        assert result["divided"]
        assert result["loss"] == "torch.float32"
        assert result["gradients"] == {"torch.float32"}
        assert result["parts"] == pytest.approx(math.log(128), rel=0.05)


def test_an_embedding_before_compiled_code_has_its_gradient(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["compiled"] < 1e-6


@pytest.mark.parametrize(
    ("name", "settings", "wide"),
    [
        ("llama", {"precision": "bf16"}, {"embedding"}),
        pytest.param(
            "llama-tied-biases", {"precision": "bf16"}, {"embedding", "head"}, marks=pytest.mark.slow
        ),
        ("llama", {"precision": "fp32"}, {"embedding", "head", "layers.0.attention.q", "residual"}),
    ],
)
def test_layers_are_gathered_in_the_type_they_compute_in(
    name: str, settings: dict[str, Any], wide: set[str], tmp_path: Path
) -> None:
    """The embedding is not: thousands of places add to a row of its gradient, and bfloat16 ends at 256."""
    for seen in on_processes(2, gathered, str(save(build(name), tmp_path)), settings):
        assert seen.pop("gradient") == "torch.float32"
        assert {part for part, kind in seen.items() if kind == "torch.float32"} == wide
        assert {kind for part, kind in seen.items() if part not in wide} <= {"torch.bfloat16"}


def test_what_does_not_divide_is_refused_on_every_process(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "takes 6 processes" in rank["refusals"]["processes"]
        assert "multiples of 2" in rank["refusals"]["rows"]
        assert "7 tokens in a row" in rank["refusals"]["tokens"]


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("llama", "tp=3", "2 key-value heads"),
        ("llama", "dp_shard=2,ep=2", "has no experts"),
        ("qwen3-moe", "dp_shard=4,ep=4", "6 experts"),
        ("llama", "pp=9", "more stages than the model has layers"),
    ],
)
def test_a_layout_that_the_model_does_not_allow(name: str, layout: str, words: str, tmp_path: Path) -> None:
    config = read_decoder_config(save(build(name), tmp_path))
    with pytest.raises(LayoutError, match=words):
        check_fits(config, Layout.parse(layout))


def fails(place: int) -> None:
    if dist.get_rank() == place:
        raise ValueError("on purpose")
    dist.barrier()


def waits_for_a_collective_that_nobody_else_calls() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    else:
        dist.all_reduce(torch.ones(1))
        time.sleep(60)


def test_a_failing_process_is_named() -> None:
    with pytest.raises(ProveError, match=r"process 1 of 2 failed.*ValueError: on purpose"):
        on_processes(2, fails, 1)


def aborts(place: int) -> None:
    if dist.get_rank() == place:
        os.write(2, b"terminate called: sizes differ\n")
        os.abort()
    dist.barrier()


def test_a_process_that_dies_is_named_with_its_last_output() -> None:
    """Abort one process as native code does; the others fail because it is gone, and are not the reason."""
    with pytest.raises(ProveError, match=r"process 1 of 2 failed.*SIGABRT.*terminate called: sizes differ"):
        on_processes(2, aborts, 1)


@pytest.mark.slow
def test_processes_that_hang_are_given_up() -> None:
    with pytest.raises(ProveError, match="did not finish in time") as found:
        on_processes(2, waits_for_a_collective_that_nobody_else_calls, limit=3.0)
    waiting, sleeping = str(found.value).split("process 0 in ")[1].split("; process 1 in ")
    assert "all_reduce (distributed_c10d.py:" in waiting
    assert "waits_for_a_collective_that_nobody_else_calls (test_parallel_pieces.py:" in waiting
    assert sleeping.startswith("waits_for_a_collective_that_nobody_else_calls (test_parallel_pieces.py:")


@pytest.mark.slow
def test_an_interruption_says_where_the_processes_stand() -> None:
    """Interrupt the wait as pytest's time limit does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.alarm(4)
        with pytest.raises(KeyboardInterrupt) as found:
            on_processes(2, waits_for_a_collective_that_nobody_else_calls)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    (note,) = found.value.__notes__
    assert note.count("waits_for_a_collective_that_nobody_else_calls (test_parallel_pieces.py:") == 2
