"""Every token once an epoch in each layout, shards of both kinds, damage named by file, text tokenized once."""

from __future__ import annotations

import itertools
import resource
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import CONFIG
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from torchwright.train.data.shards import CHECKSUMS, DataError, Shards, open_shard, verify_shards
from torchwright.train.data.streams import HeldOut, Windows, permuted
from torchwright.train.data.text import expand, token_shards, tokenize, write_checksums, write_shard
from torchwright.train.layout import Layout
from torchwright.train.model.vocabulary import IGNORE
from torchwright.train.run.config.read import parse_run
from torchwright.train.run.config.run import Data, Run
from torchwright.train.run.config.schedule import plan_step, steps
from torchwright.train.run.loop.evaluate import Evaluator
from torchwright.train.run.objectives.objective import NextToken
from torchwright.train.run.objectives.setup import Batches
from torchwright.train.run.runtime.corpus import ONE, Corpus, windows_of
from torchwright.train.run.runtime.processes import processes

BUNDLED = Path(__file__).parents[2] / "src" / "torchwright" / "workloads" / "bundled"
VOCABULARY = 1000
TEXT = Data.model_fields["text"].default
UINT16 = np.dtype(np.uint16)


def make_shards(folder: Path, *sizes: int) -> Shards:
    """Shards whose ids count on from one to the next (modulo the vocabulary)."""
    paths, first = [], 0
    for number, size in enumerate(sizes):
        path = folder / f"{number}.npy"
        np.save(path, ((first + np.arange(size)) % VOCABULARY).astype(np.uint16))
        paths.append(path)
        first += size
    return Shards(paths, VOCABULARY)


@given(st.integers(1, 3000), st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_a_shuffle_is_a_permutation(count: int, key: int) -> None:
    assert sorted(permuted(i, count, key) for i in range(count)) == list(range(count))


def test_a_shuffle_looks_random() -> None:
    """Neighbours land apart and two keys agree no more often than by chance."""
    count = 4096
    one, two = ([permuted(i, count, key) for i in range(count)] for key in (1, 2))
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(one)) < 12
    assert sum(a == b for a, b in zip(one, two, strict=True)) < 12
    assert abs(np.corrcoef(one, range(count))[0, 1]) < 0.08


def distinct(folder: Path, sizes: list[int]) -> Shards:
    """Shards in which every token is another, so that what is read can be counted."""
    folder.mkdir(exist_ok=True)
    ids = np.split(np.arange(sum(sizes), dtype=np.uint32), np.cumsum(sizes)[:-1])
    for number, some in enumerate(ids):
        np.save(folder / f"{number:04}.npy", some)
    return Shards(sorted(folder.iterdir()), sum(sizes))


def lognormal(count: int, median: float, *, multiple: int = 1) -> list[int]:
    """Lengths of ordinary files, together a multiple of `multiple`."""
    sizes = [1 + int(size) for size in np.random.default_rng(0).lognormal(np.log(median), 1.2, count)]
    return [*sizes, 1 + -(sum(sizes) + 1) % multiple]


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=9),
    st.integers(2, 60),
    st.integers(0, 9),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_reads_every_token_once(sizes: list[int], context: int, seed: int, every: int) -> None:
    """But for those of its last window that are the next epoch's; they are read before it begins."""
    with tempfile.TemporaryDirectory() as folder:
        shards = distinct(Path(folder), sizes)
        windows = Windows(shards, context, seed, begin=shards.tokens, begin_every=every)
        read = np.zeros(shards.tokens + 1, dtype=np.int64)
        for epoch in range(1, 4):
            first, last = windows.first_of_epoch(epoch - 1), windows.first_of_epoch(epoch)
            if last > first:  # a window may be longer than epochs
                inputs_BT = windows.batch(first, last - first).ids_BT
                read += np.bincount(inputs_BT.flatten(), minlength=len(read))
            assert read[:-1].min() >= epoch
            assert 0 <= read[:-1].sum() - epoch * shards.tokens < context


LAYOUTS = [
    {},
    {"dp_shard": 2},
    {"dp_replicate": 2, "cp": 2},
    {"cp": 4},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    """300 files, most of them shorter than two windows of 512, together a whole number of steps."""
    return distinct(tmp_path_factory.mktemp("corpus"), lognormal(300, 500, multiple=8 * 512))


def processes_of(run: Run) -> list[Batches]:
    """What each process of the run's layout reads with; those along tp read the same and count once."""
    layout = run.parallel
    axes = ("dp_replicate", "dp_shard", "cp")
    places = itertools.product(*(range(getattr(layout, axis)) for axis in axes))
    meshes: list[Any] = [
        SimpleNamespace(get_local_rank=dict(zip(axes, place, strict=True)).__getitem__) for place in places
    ]
    return [Batches(run, mesh, "cpu") for mesh in meshes]


def make(corpus: Shards, **changes: Any) -> Run:
    run = {
        "out": "out",
        "tokens": 2 * corpus.tokens,
        "batch_tokens": 8 * 512,
        "context": 512,
        "model": {"config": CONFIG},
        "data": {"train": ["*.npy"]},
        **changes,
    }
    return parse_run(run)


@pytest.mark.plain("dp_shard=2,tp=2")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(Layout.from_degrees(layout)))
def test_every_token_of_ordinary_files_is_read_once_an_epoch_in_each_layout(
    corpus: Shards, layout: dict[str, int]
) -> None:
    run = make(corpus, layout=layout, micro_batches=2)
    windows = windows_of(run, corpus, run.context, None, 0)
    everywhere = processes_of(run)
    read, labelled = (np.zeros(corpus.tokens, dtype=np.int64) for _ in range(2))
    for epoch in (1, 2):
        ids, labels = [], []
        for number in range((epoch - 1) * steps(run) // 2, epoch * steps(run) // 2):
            for batches in everywhere:
                for micro in batches.of_step(plan_step(run, number), windows):
                    ids.append(micro.ids_BT.flatten())
                    labels.append(micro.labels_BT.flatten())
        read += np.bincount(np.concatenate(ids), minlength=len(read))
        labelled += np.bincount(np.concatenate(labels), minlength=len(read))
        assert (read == epoch).all()
        # The first token of all is no label, and the last one's label is the next epoch's first.
        assert abs(labelled - epoch).sum() <= 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(Layout.from_degrees(layout)))
def test_a_step_reads_the_same_windows_in_each_layout(corpus: Shards, layout: dict[str, int]) -> None:
    one, other = make(corpus), make(corpus, layout=layout, micro_batches=2)
    windows = windows_of(one, corpus, one.context, None, 0)
    for number in (0, 7):
        step = plan_step(one, number)
        whole = windows.batch(step.first, step.rows).ids_BT
        parts = [micro.ids_BT for batches in processes_of(other) for micro in batches.of_step(step, windows)]
        assert torch.equal(torch.cat([part.flatten() for part in parts]).sort()[0], whole.flatten().sort()[0])


def test_another_seed_and_another_epoch_have_another_order(corpus: Shards) -> None:
    def starts(seed: int, epoch: int) -> list[int]:
        windows = Windows(corpus, 512, seed)
        first = windows.first_of_epoch(epoch)
        return windows.batch(first, 40).ids_BT[:, 0].tolist()

    assert starts(0, 0) == starts(0, 0)
    orders = [starts(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for one, other in itertools.combinations(orders, 2):
        assert len({*one} & {*other}) < 4, "windows are cut at other places"


def test_files_of_whole_windows_are_cut_elsewhere_in_each_epoch(tmp_path: Path) -> None:
    windows = Windows(distinct(tmp_path, [512]), 16, 0)
    cuts = [{int(row[0]) % 16 for row in windows.batch(32 * epoch, 31).ids_BT} for epoch in range(4)]
    assert len(set.union(*cuts)) > 2


def test_labels_follow_inputs_and_rows_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    windows = Windows(make_shards(tmp_path, 1000), 16, seed=5)
    rows = windows.batch(3, 6)
    assert rows.ids_BT.dtype == rows.labels_BT.dtype == torch.int64
    assert rows.ids_BT.shape == rows.labels_BT.shape == (6, 16)
    assert torch.equal((rows.ids_BT + 1) % VOCABULARY, rows.labels_BT)
    assert torch.equal(rows.ids_BT[:, 1:], rows.labels_BT[:, :-1])
    assert torch.equal(windows.batch(5, 1).ids_BT[0], rows.ids_BT[2])
    other = Windows(make_shards(tmp_path, 1000), 16, seed=6).batch(3, 6)
    assert not torch.equal(other.ids_BT, rows.ids_BT)


def test_every_second_window_is_led_by_the_begin_token(tmp_path: Path) -> None:
    windows = Windows(make_shards(tmp_path, 500), 8, 1, begin=999, begin_every=2)
    rows = windows.batch(0, 60)
    for number, row in enumerate(torch.cat([rows.ids_BT, rows.labels_BT[:, -1:]], 1)):
        led = windows.window(number) % 2 == 0
        assert (row[0] == 999) == led
        start = windows.start(windows.window(number))
        read = windows.stream.read(start, 8 if led else 9)
        assert row[int(led) :].tolist() == read.tolist()


@pytest.mark.parametrize(("tokens", "context", "told"), [(1000, 64, 500), (1000, 64, 10**6), (40, 64, 64)])
@pytest.mark.parametrize("begin", [None, 2000])
def test_held_out_windows_hold_no_label_twice_and_no_more_than_told(
    tmp_path: Path, tokens: int, context: int, told: int, begin: int | None
) -> None:
    shards = distinct(tmp_path, [tokens // 3, tokens // 2, tokens - tokens // 3 - tokens // 2])
    held = HeldOut(shards, context, told, begin=begin)
    rows = held.batch(0, held.count + 3)
    assert (rows.labels_BT[held.count :] == IGNORE).all()
    labels = rows.labels_BT[rows.labels_BT != IGNORE].tolist()
    assert len(labels) == len({*labels}) <= told
    if told >= tokens + context:  # all of them, but for one that nothing is before
        assert len(labels) == tokens - (begin is None)
    assert {2000} == {*rows.ids_BT[: held.count, 0].tolist()} if begin else 2000 not in rows.ids_BT


def test_a_single_held_out_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="single token"):
        HeldOut(distinct(tmp_path, [1]), 8, 100)


@pytest.mark.parametrize(("layout", "micro_batches"), [({}, 1), ({}, 4), ({"dp_shard": 2, "cp": 2}, 2)])
def test_an_evaluation_reads_the_same_labels_in_each_layout(
    tmp_path: Path, corpus: Shards, layout: dict[str, int], micro_batches: int
) -> None:
    """Each process alone here, with a loss that notes what it is given."""
    run = make(corpus, layout=layout, micro_batches=micro_batches, evaluation={"tokens": 5 * 512 + 3})
    read: list[int] = []

    def loss(ids: torch.Tensor, labels: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert ids.min() >= 0
        read.extend(labels[labels != IGNORE].tolist())
        return torch.tensor(0.0), torch.tensor(1)

    model: Any = SimpleNamespace(loss=loss)

    config: Any = SimpleNamespace(bos=None)
    opened = Corpus(train={ONE: corpus}, validation=corpus, packed=False, end=None, reports={})
    evaluator = Evaluator(run, config, tmp_path, opened, "cpu")
    with processes(10.0):
        for batches in processes_of(run):
            evaluator.measure(NextToken(model, compiled=False), batches)
    wanted = HeldOut(corpus, 512, 5 * 512).batch(0, 5).labels_BT
    assert sorted(read) == sorted(wanted.flatten().tolist())


def test_safetensors_and_numpy_shards_are_mapped_alike(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 200)
    for kind in (np.uint16, np.int32, np.uint32, np.int64):
        np.save(tmp_path / "a.npy", ids.astype(kind))
        save_file({"tokens": ids.astype(kind)}, tmp_path / "a.safetensors", metadata={"made": "here"})
        for name in ("a.npy", "a.safetensors"):
            shard = open_shard(tmp_path / name)
            assert isinstance(shard, np.memmap)
            assert np.array_equal(shard, ids)


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def damage_head(path: Path) -> None:
    path.write_bytes(b"\xff" * 40 + path.read_bytes()[40:])


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
@pytest.mark.parametrize("damage", [damage_cut, damage_head, lambda path: path.write_bytes(b"")])
def test_a_damaged_shard_is_named(tmp_path: Path, suffix: str, damage) -> None:
    good, bad = tmp_path / f"good.{suffix}", tmp_path / f"bad.{suffix}"
    for path in (good, bad):
        ids = np.arange(100, dtype=np.uint16)
        np.save(path, ids) if suffix == "npy" else save_file({"t": ids}, path)
    damage(bad)
    with pytest.raises(DataError, match=rf"bad\.{suffix}"):
        Shards([good, bad], VOCABULARY)


def test_a_header_with_an_open_bracket_is_named(tmp_path: Path) -> None:
    """NumPy passes the error of Python's tokenizer on."""
    np.save(tmp_path / "a.npy", np.arange(5, dtype=np.uint16))
    data = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(data.replace(b"(5,)", b"(5, "))
    with pytest.raises(DataError, match=r"a\.npy cannot be read"):
        open_shard(tmp_path / "a.npy")


def test_a_pickled_shard_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"no": "objects"}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"a\.npy"):
        open_shard(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "array", [np.zeros((3, 4), np.uint16), np.zeros(9, np.float32), np.zeros(0, np.uint16)]
)
def test_a_shard_of_another_shape_or_type_is_refused(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match="no list of token ids"):
        open_shard(tmp_path / "a.npy")


def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    ids = np.zeros(64, np.uint16)
    ids[37] = VOCABULARY
    np.save(tmp_path / "a.npy", ids)
    windows = Windows(Shards([tmp_path / "a.npy"], VOCABULARY), 8, 0)
    with pytest.raises(DataError, match=r"a\.npy.*1000 at place 37"):
        windows.batch(0, 8)


def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        shards = distinct(tmp_path, [3] * 1100)
        assert Windows(shards, 8, 0).batch(0, 60).ids_BT.shape == (60, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_checksums_find_a_flipped_bit(tmp_path: Path) -> None:
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    write_checksums(tmp_path, {path.name: write_shard(path, [np.arange(300)], UINT16) for path in paths})
    assert verify_shards(paths) == 2
    data = bytearray(paths[1].read_bytes())
    data[-3] ^= 1
    paths[1].write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"b\.npy is damaged"):
        verify_shards(paths)


def test_text_is_tokenized_once_and_again_when_it_changes(tmp_path: Path) -> None:
    text, cache = tmp_path / "a.txt", tmp_path / "cache"
    text.write_text("def add(a, b):\n    return a + b  # ünïcode\n" * 20)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    (shard,) = token_shards([text], TEXT, BUNDLED, 1, cache)
    ids = open_shard(shard)
    assert ids.dtype == np.uint16
    assert ids[-1] == 1
    assert tokenizer.decode(ids[:-1].tolist()) == text.read_text()
    made = shard.stat().st_mtime_ns
    assert token_shards([text], TEXT, BUNDLED, 1, cache) == [shard]
    assert shard.stat().st_mtime_ns == made
    text.write_text("something else")
    (other,) = token_shards([text], TEXT, BUNDLED, 1, cache)
    assert other != shard
    assert {path.name for path in cache.iterdir()} == {CHECKSUMS, shard.name, other.name}
    assert verify_shards([shard, other]) == 2


def test_long_text_is_tokenized_a_block_at_a_time_and_cut_at_lines(tmp_path: Path) -> None:
    line, lines = "a line of some words, and its end\n", 500
    text = tmp_path / "long.txt"
    text.write_text(line * lines)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    once = tokenizer.encode(line, add_special_tokens=False).ids
    pieces = list(tokenize(text, tokenizer, None, block_characters=1000))
    assert max(map(len, pieces)) <= len(once) * (1000 // len(line) + 1)
    assert np.concatenate(pieces).tolist() == once * lines
    (shard,) = token_shards([text], TEXT, BUNDLED, None, tmp_path)
    assert open_shard(shard).tolist() == once * lines


def test_the_mark_at_the_start_of_a_text_is_not_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("Once upon a time", encoding="utf-8-sig")
    (ids,) = tokenize(tmp_path / "a.txt", tokenizer, None)
    assert tokenizer.decode(ids.tolist()) == "Once upon a time"


def test_text_without_a_tokenizer_and_text_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00broken")
    with pytest.raises(DataError, match="no tokenizer"):
        token_shards([tmp_path / "a.txt"], TEXT, tmp_path, 1, tmp_path / "cache")
    with pytest.raises(DataError, match=r"a\.txt cannot be read"):
        token_shards([tmp_path / "a.txt"], TEXT, BUNDLED, 1, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("name", ["a.XML", "a.yaml", "a.txt.gz", "README"])
def test_what_is_neither_text_nor_rows_nor_shard_is_refused_unless_it_is_said_to_be_text(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_text('{"messages": [{"role": "user"}]}\n{broken\n')
    with pytest.raises(DataError, match=rf"{name} is neither text nor rows nor a token shard") as caught:
        token_shards([path], TEXT, BUNDLED, 1, tmp_path / "cache")
    said = str(caught.value).rpartition("add '")[2].partition("'")[0]
    (shard,) = token_shards([path], [*TEXT, said], BUNDLED, 1, tmp_path / "cache")
    assert len(open_shard(shard)) > 5


def test_globs_are_relative_to_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("b.npy", "a.npy"):
        np.save(tmp_path / "d" / name, np.arange(5, dtype=np.uint16))
    found = [tmp_path / "d" / "a.npy", tmp_path / "d" / "b.npy"]
    assert expand(["d/*"], tmp_path) == found
    assert expand([str(tmp_path / "d" / "*.npy")], Path("/nowhere")) == found
    with pytest.raises(DataError, match=r"no file matches 'e/\*'"):
        expand(["e/*"], tmp_path)
    with pytest.raises(DataError, match=r"c\.npy"):
        expand(["d/c.npy"], tmp_path)
    with pytest.raises(DataError, match=r"'d/b\*' names .*b\.npy again"):
        expand(["d/*", "d/b*"], tmp_path)
