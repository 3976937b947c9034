"""The order of windows, token shards of both kinds, damage named by file, and text tokenized once."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from torchwright.train.data import Windows, permuted
from torchwright.train.data_shards import CHECKSUMS, DataError, Shards, open_shard, verify_shards
from torchwright.train.data_text import BLOCK_CHARACTERS, expand, token_shards, write_shard

BUNDLED = Path(__file__).parents[2] / "src" / "torchwright" / "bundled"
VOCABULARY = 1000


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


@given(st.lists(st.integers(1, 400), min_size=1, max_size=4), st.integers(2, 60), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_an_epoch_reads_every_window_once(sizes: list[int], context: int, seed: int) -> None:
    shards = Shards([], VOCABULARY)
    shards.arrays = [np.zeros(size, np.uint16) for size in sizes]
    if max(sizes) <= context:
        with pytest.raises(DataError, match="no token shard is longer"):
            Windows(shards, context, seed)
        return
    windows = Windows(shards, context, seed)
    for epoch in range(2):
        first = epoch * windows.per_epoch
        places = [windows.place(number) for number in range(first, first + windows.per_epoch)]
        seen: Counter[tuple[int, int]] = Counter()
        for place in places:
            assert 0 <= place.start <= sizes[place.shard] - context - 1
            seen.update((place.shard, token) for token in range(place.start, place.start + context))
        assert max(seen.values()) == 1
        for shard, size in enumerate(sizes):
            missed = size - sum(1 for at, _ in seen if at == shard)
            assert missed <= 2 * context or size <= context


def test_labels_follow_inputs_and_rows_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    windows = Windows(make_shards(tmp_path, 700, 300), 16, seed=5)
    rows = windows.batch(3, 6)
    assert rows.dtype == torch.int64
    assert rows.shape == (6, 17)
    assert torch.equal((rows[:, :-1] + 1) % VOCABULARY, rows[:, 1:])
    assert torch.equal(windows.batch(5, 1)[0], rows[2])
    again = Windows(make_shards(tmp_path, 700, 300), 16, seed=5)
    assert torch.equal(again.batch(3, 6), rows)
    assert not torch.equal(Windows(make_shards(tmp_path, 700, 300), 16, seed=6).batch(3, 6), rows)


def test_epochs_differ_in_order_and_in_offset(tmp_path: Path) -> None:
    windows = Windows(make_shards(tmp_path, 1000), 16, seed=0)
    epochs = [[windows.place(e * windows.per_epoch + i) for i in range(windows.per_epoch)] for e in range(4)]
    assert len({tuple(place.start for place in epoch) for epoch in epochs}) == 4
    assert len({min(place.start for place in epoch) for epoch in epochs}) > 1


def test_every_second_window_is_led_by_the_begin_token(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, 500)
    plain, led = Windows(shards, 8, 1), Windows(shards, 8, 1, begin=999, begin_every=2)
    a, b = plain.batch(0, 4), led.batch(0, 4)
    assert torch.equal(a[1::2], b[1::2])
    assert (b[::2, 0] == 999).all()
    assert torch.equal(b[::2, 1:], a[::2, :-1])


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
        windows.batch(0, windows.per_epoch)


def test_checksums_find_a_flipped_bit(tmp_path: Path) -> None:
    for name in ("a.npy", "b.npy"):
        write_shard(tmp_path / name, np.arange(300, dtype=np.uint16))
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    assert verify_shards(paths) == 2
    data = bytearray(paths[1].read_bytes())
    data[-3] ^= 1
    paths[1].write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"b\.npy is damaged"):
        verify_shards(paths)


def test_text_is_tokenized_once_and_again_when_it_changes(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("def add(a, b):\n    return a + b  # ünïcode\n" * 20)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    (shard,) = token_shards([text], BUNDLED, 1, tmp_path / "cache")
    ids = open_shard(shard)
    assert ids.dtype == np.uint16
    assert ids[-1] == 1
    assert tokenizer.decode(ids[:-1].tolist()) == text.read_text()
    made = shard.stat().st_mtime_ns
    assert token_shards([text], BUNDLED, 1, tmp_path / "cache") == [shard]
    assert shard.stat().st_mtime_ns == made
    text.write_text("something else")
    (other,) = token_shards([text], BUNDLED, 1, tmp_path / "cache")
    assert other != shard
    assert set(json.loads((tmp_path / "cache" / CHECKSUMS).read_text())) == {shard.name, other.name}


def test_long_text_is_cut_at_lines(tmp_path: Path) -> None:
    line = "a line of some words, and its end\n"
    text = tmp_path / "long.txt"
    text.write_text(line * (BLOCK_CHARACTERS // len(line) + 50))
    (shard,) = token_shards([text], BUNDLED, None, tmp_path)
    once = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode(line * 3, add_special_tokens=False).ids
    ids = open_shard(shard)
    assert len(ids) == len(once) // 3 * (BLOCK_CHARACTERS // len(line) + 50)


def test_text_without_a_tokenizer_and_text_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00broken")
    with pytest.raises(DataError, match="no tokenizer"):
        token_shards([tmp_path / "a.txt"], tmp_path, 1, tmp_path / "cache")
    with pytest.raises(DataError, match=r"a\.txt cannot be read"):
        token_shards([tmp_path / "a.txt"], BUNDLED, 1, tmp_path / "cache")


def test_globs_are_relative_to_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("b.npy", "a.npy"):
        write_shard(tmp_path / "d" / name, np.arange(5, dtype=np.uint16))
    found = [tmp_path / "d" / "a.npy", tmp_path / "d" / "b.npy"]
    assert expand(["d/*"], tmp_path) == found
    assert expand([str(tmp_path / "d" / "*.npy")], Path("/nowhere")) == found
    with pytest.raises(DataError, match=r"no file matches 'e/\*'"):
        expand(["e/*"], tmp_path)
    with pytest.raises(DataError, match=r"c\.npy"):
        expand(["d/c.npy"], tmp_path)
