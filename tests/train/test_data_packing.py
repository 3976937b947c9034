"""Documents packed into windows: what a window holds, and that training on it is training on each by itself."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import CONFIG

from torchwright.models.decoder.families import decoder_config
from torchwright.train.data.documents import Document, write_documents
from torchwright.train.data.mixture import ROUND, Mixture, shares
from torchwright.train.data.packing import Packed, PackedHeldOut, pack
from torchwright.train.data.shards import DataError, Shards
from torchwright.train.data.streams import Windows
from torchwright.train.layout import Layout
from torchwright.train.model import Transformer, explicit_attention, fused_attention
from torchwright.train.model.fill import whole
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.parallel import make_mesh, parallelize
from torchwright.train.prove.processes import on_processes
from torchwright.train.prove.reference import fill_weights
from torchwright.train.run.config.read import parse_run
from torchwright.train.run.objectives.setup import Batches

VOCABULARY, CONTEXT = 128, 48
UINT16 = np.dtype(np.uint16)


def documents(sizes: list[int], *, partly: bool = False, seed: int = 0) -> list[Document]:
    """Random tokens, from 2 on; where they are trained on `partly`, always their last one."""
    rng = np.random.default_rng(seed)
    found = []
    for size in sizes:
        trained = rng.random(size) < 0.5 if partly else np.ones(size, bool)
        trained[-1], trained[0] = True, False
        found.append(Document(ids=rng.integers(2, VOCABULARY, size), trained=trained))
    return found


def shard(folder: Path, some: list[Document], name: str = "a") -> Shards:
    path = folder / f"{name}.safetensors"
    write_documents(path, UINT16, lambda report: some)
    return Shards([path], VOCABULARY)


def labelled(source: Any, count: int) -> Counter[tuple[int, ...]]:
    """How often each (ids before and in its document, label) is seen in the first `count` windows."""
    batch, seen = source.batch(0, count), Counter()
    for ids, labels, begins in zip(batch.ids_BT, batch.labels_BT, batch.documents_BT, strict=True):
        for place in range(len(ids)):
            if labels[place] != IGNORE:
                seen[(*ids[begins[place] : place + 1].tolist(), int(labels[place]))] += 1
    return seen


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200))
@settings(max_examples=60, deadline=None)
def test_each_piece_is_in_one_window_and_no_window_overflows(lengths: list[int]) -> None:
    length_P = np.array(lengths)
    order_P, first_W = pack(length_P, 40)
    assert sorted(order_P.tolist()) == list(range(len(lengths)))
    held = [int(length_P[order_P[a:b]].sum()) for a, b in itertools.pairwise(first_W.tolist())]
    assert all(0 < size <= 40 for size in held)
    # Two windows that would fit into one are never both left, so that more than half of all places are filled.
    assert len(held) == 1 or sum(sorted(held)[:2]) > 40


def test_an_epoch_holds_every_label_once_with_what_comes_before_it(tmp_path: Path) -> None:
    some = documents([2, 9, 17, 30, 49, 5, 5, 12, 40, 3], partly=True)
    packed = Packed(shard(tmp_path, some), CONTEXT, 3, end=1)
    wanted = Counter(
        (*one.ids[: place + 1].tolist(),)
        for one in some
        for place in range(1, len(one.ids))
        if one.trained[place]
    )
    seen = labelled(packed, packed.count)
    assert seen == wanted
    assert labelled(packed, 3 * packed.count) == Counter({key: 3 * count for key, count in wanted.items()})
    orders = [[packed.window(epoch * packed.count + i) for i in range(packed.count)] for epoch in range(4)]
    assert all(sorted(order) == list(range(packed.count)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_positions_begin_anew_and_what_is_left_over_is_no_ones(tmp_path: Path) -> None:
    packed = Packed(shard(tmp_path, documents([11, 21])), CONTEXT, 0, end=1)
    batch = packed.batch(0, 1)
    assert batch.documents_BT is not None
    assert batch.documents_BT[0].tolist() == [0] * 10 + [10] * 20 + [30] * 18
    assert (batch.labels_BT[0, 30:] == IGNORE).all()
    assert (batch.labels_BT[0, :30] != IGNORE).all()


def test_long_documents_are_split_or_where_partly_trained_on_cut(tmp_path: Path) -> None:
    whole_one = documents([2 * CONTEXT + 8])[0]
    packed = Packed(shard(tmp_path, [whole_one]), CONTEXT, 0, end=1)
    assert packed.pieces.length_P.tolist() == [CONTEXT, CONTEXT, 7]
    labels = [key[-1] for key in labelled(packed, packed.count).elements()]
    assert sorted(labels) == sorted(whole_one.ids[1:].tolist())
    answered = documents([2 * CONTEXT], partly=True)[0]
    late = Document(ids=answered.ids, trained=np.arange(len(answered.ids)) > CONTEXT + 5)
    packed = Packed(shard(tmp_path, [answered, late], "b"), CONTEXT, 0, end=1)
    assert packed.pieces.length_P.tolist() == [CONTEXT]
    assert (packed.pieces.cut, packed.pieces.dropped) == (1, 1)
    with pytest.raises(DataError, match="no document holds a token to predict"):
        Packed(shard(tmp_path, [late], "c"), CONTEXT, 0, end=1)


def test_plain_shards_are_cut_at_the_end_token(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([5, 6, 1, 7, 8, 9, 1, 1, 4], np.uint16))
    packed = Packed(Shards([tmp_path / "a.npy"], VOCABULARY), CONTEXT, 0, end=1)
    assert sorted(packed.pieces.start_P.tolist()) == [0, 3]
    assert sorted(labelled(packed, 1)) == [(5, 6), (5, 6, 1), (7, 8), (7, 8, 9), (7, 8, 9, 1)]


def test_held_out_windows_are_the_same_every_time_and_no_more_than_told(tmp_path: Path) -> None:
    held = PackedHeldOut(shard(tmp_path, documents([30] * 20)), CONTEXT, 5 * CONTEXT, end=1)
    assert held.count == 5
    batch = held.batch(0, 8)
    assert (batch.labels_BT[5:] == IGNORE).all()
    assert (batch.labels_BT[:5] != IGNORE).any(1).all()


@pytest.mark.parametrize("weights", [[1], [0.5, 0.3, 0.2], [1 / 3, 1 / 3, 1 / 3], [997, 1, 2], [2, 7]])
def test_sources_are_mixed_by_weight_at_every_point_and_each_is_walked_in_its_order(
    tmp_path: Path, weights: list[float]
) -> None:
    names = [f"source{number}" for number in range(len(weights))]
    np.save(tmp_path / "a.npy", np.zeros(100, np.uint16))
    walk = Windows(Shards([tmp_path / "a.npy"], VOCABULARY), 8, 0)
    mixture = Mixture(dict.fromkeys(names, walk), dict(zip(names, weights, strict=True)))
    assert sum(mixture.shares) == ROUND
    given_so_far = [0] * len(weights)
    for number in range(2 * ROUND + 100):
        source, window = mixture.place(number)
        assert window == given_so_far[source], "each source's windows follow each other"
        given_so_far[source] += 1
        for share, count in zip(mixture.shares, given_so_far, strict=True):
            assert abs(count - share / ROUND * (number + 1)) < len(weights)
    wanted = [ROUND * weight / sum(weights) for weight in weights]
    assert all(abs(share - want) < 1 for share, want in zip(mixture.shares, wanted, strict=True))


def test_a_source_of_next_to_no_weight_is_refused() -> None:
    with pytest.raises(DataError, match="'small' has less than one window of 1,000"):
        shares([1.0, 1e-5], ["large", "small"])


SIZES = [13, 20, 9, 31, 4, 17, 26, 2, 8, 40]


def unpacked(model: Transformer, some: list[Document]) -> torch.Tensor:
    """The mean loss of each document by itself, and its gradients in the model."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for one in some:
        labels = torch.from_numpy(np.where(one.trained, one.ids, IGNORE))[None, 1:]
        nll, valid = model.loss(torch.from_numpy(one.ids)[None, :-1], labels)
        total, count = total + nll, count + int(valid)
    (total / count).backward()
    return total.detach() / count


def packed_errors(path: str, cp: int, kv_heads: int) -> float:
    """The largest relative error of the loss and of any gradient of packed training on `cp` processes."""
    torch.set_default_dtype(torch.float64)
    described = {**CONFIG, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    config = decoder_config(described, "the test")
    some = documents(SIZES, partly=True)
    alone = Transformer(config)
    fill_weights(alone)
    wanted = unpacked(alone, some)
    layout = Layout(cp=cp)
    mesh = make_mesh(layout, "cpu")
    model = Transformer(config)
    fill_weights(model)
    model.use_attention(explicit_attention)
    parallelize(model, layout, mesh)
    fields = {"out": "", "tokens": 1, "batch_tokens": 1, "context": CONTEXT, "layout": {"cp": cp}}
    run = parse_run(fields | {"model": {"config": {}}, "data": {"train": ["x"]}})
    source = Packed(Shards([Path(path)], VOCABULARY), CONTEXT, 0, end=1)
    batch = Batches(run, mesh, "cpu").prepare(source.batch(0, source.count))
    nll, valid = model.loss(batch.ids_BT, batch.labels_BT, batch.positions_BT, batch.documents_BS)
    told = torch.stack([nll.detach(), valid.double()])
    dist.all_reduce(told)
    (nll / told[1]).backward()
    errors = [float(abs(told[0] / told[1] - wanted) / wanted)]
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        errors.append(float((whole(ours.grad) - theirs.grad).norm() / theirs.grad.norm()))
    return max(errors)


@pytest.mark.parametrize("attend", [explicit_attention, fused_attention])
def test_packed_training_is_that_of_each_document_by_itself(tmp_path: Path, attend: Any) -> None:
    config = decoder_config(CONFIG, "the test")
    some = documents(SIZES, partly=True)
    packed = Packed(shard(tmp_path, some), CONTEXT, 0, end=1)
    assert packed.count < len(some) // 2
    alone, model = Transformer(config).double(), Transformer(config).double()
    for one in (alone, model):
        fill_weights(one)
    model.use_attention(attend)
    wanted = unpacked(alone, some)
    batch = packed.batch(0, packed.count)
    assert batch.documents_BT is not None
    positions = torch.arange(CONTEXT) - batch.documents_BT
    nll, valid = model.loss(batch.ids_BT, batch.labels_BT, positions, batch.documents_BT)
    (nll / valid).backward()
    assert abs((nll.detach() / valid - wanted) / wanted) < 1e-12
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() / theirs.grad.norm() < 1e-12
    wrong, _ = model.loss(batch.ids_BT, batch.labels_BT, positions)
    assert abs(wrong.detach() / valid - wanted) > 1e-4, "attention over borders would be another loss"


@pytest.mark.parametrize(
    ("cp", "kv_heads"),
    [
        (2, 2),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(4, 4, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.slow),
    ],
)
def test_packed_training_over_divided_sequences(tmp_path: Path, cp: int, kv_heads: int) -> None:
    """By exchanged heads, and in a ring where there are too few of them."""
    shard(tmp_path, documents(SIZES, partly=True))
    errors = on_processes(cp, packed_errors, str(tmp_path / "a.safetensors"), cp, kv_heads)
    assert max(errors) < 1e-12
