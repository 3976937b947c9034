"""Held-out training data, and the use of its loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from torchwright.train.data.documents import RowsAs
from torchwright.train.data.hold_out import MOST, divide, drawn_last
from torchwright.train.data.shards import Shards
from torchwright.train.data.text import token_shards
from torchwright.train.run.loop.best import Best
from torchwright.workloads.texts import BUNDLED

TOKENIZER = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
END = 1


@pytest.mark.parametrize("count", [0, 1, 30, MOST, MOST + 700])
def test_every_row_is_written_once_and_the_drawn_ones_last(count: int) -> None:
    found = list(drawn_last(range(count), seed=3))
    assert sorted(number for number, _ in found) == list(range(count))
    drawn = [number for number, last in found if last]
    assert len(drawn) == min(count, MOST)
    assert [number for number, _ in found][count - len(drawn) :] == drawn
    assert list(drawn_last(range(count), seed=3)) == found
    if count > 1:
        assert [number for number, _ in drawn_last(range(count), seed=4)] != [number for number, _ in found]


def shards(folder: Path, rows: list[dict[str, Any]], **how: Any) -> Shards:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUNDLED / name).read_bytes())
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = token_shards([path], ["*.txt"], folder, END, folder / "tokens", RowsAs(draw=0, **how))
    return Shards(made, TOKENIZER.get_vocab_size())


def texts(of: Shards) -> list[str]:
    starts = of.starts(0)
    assert starts is not None
    ends = [*starts[1:], of.sizes[0]]
    return [
        TOKENIZER.decode(of.read(0, int(begin), int(end - begin)).tolist())
        for begin, end in zip(starts, ends, strict=True)
    ]


def test_rows_are_either_trained_on_or_held_out(tmp_path: Path) -> None:
    rows = [{"text": f"This is row {number}."} for number in range(60)]
    train, held = divide(shards(tmp_path, rows), 0.05, pairs=False)
    assert held is not None
    assert (len(texts(train)), len(texts(held))) == (57, 3)
    assert sorted(texts(train) + texts(held)) == sorted(row["text"] for row in rows)
    assert train.tokens + held.tokens == sum(train.sizes) + sum(held.sizes)
    assert train.digest() != held.digest()
    assert train.trained(0, 0, train.sizes[0]).sum() == train.sizes[0] - 57
    few, none = divide(shards(tmp_path, rows[:19]), 0.05, pairs=False)
    assert (len(texts(few)), none) == (19, None)


def test_few_long_texts_are_held_out_by_their_tokens(tmp_path: Path) -> None:
    """Five long documents had no validation; those that stay whole, as conversations do, still have none."""
    rows = [{"text": " ".join(f"word {number} of text {row}" for number in range(300))} for row in range(5)]
    made = shards(tmp_path, rows)
    train, held = divide(made, 0.05, pairs=False, whole=False)
    assert held is not None
    assert held.tokens == int(0.05 * made.tokens)
    assert train.tokens + held.tokens == made.tokens
    assert not train.answers(0)
    assert not held.answers(0)
    ids = [part.read(0, 0, part.sizes[0]) for part in (train, held)]
    assert np.concatenate(ids).tolist() == made.read(0, 0, made.sizes[0]).tolist()
    assert divide(made, 0.05, pairs=False)[1] is None


def test_both_answers_of_a_pair_are_held_out_together(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{number}?", "chosen": f" yes {number}", "rejected": f" no {number}"}
        for number in range(40)
    ]
    train, held = divide(shards(tmp_path, rows, form="preference"), 0.05, pairs=True)
    assert held is not None
    for part, count in ((train, 38), (held, 2)):
        found = texts(part)
        assert len(found) == 2 * count
        assert [text.replace("no", "yes") for text in found[1::2]] == found[::2]


def test_token_ids_are_held_out_at_their_end(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(1000, dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.arange(10, dtype=np.uint16))
    train, held = divide(Shards([tmp_path / "a.npy", tmp_path / "b.npy"], 2000), 0.05, pairs=False)
    assert held is not None
    assert train.sizes == [950, 10]
    assert held.sizes == [50]
    assert held.read(0, 0, 50).tolist() == list(range(950, 1000))
    joined = Shards.joined([held, held])
    assert joined.sizes == [50, 50]
    assert joined.part([range(5), range(0)]).read(0, 1, 100).tolist() == [951, 952, 953, 954]


def test_a_validation_loss_that_rises_is_reported_once() -> None:
    best, told = Best(), []
    for step, (trained, validation) in enumerate([(3, 3), (2, 2.5), (1.5, 2.6), (1, 2.7), (0.5, 2.9)], 1):
        best.trained(trained)
        told.append(best.judge(step, validation))
    assert (best.step, best.loss) == (2, 2.5)
    assert [text is not None for text in told] == [False, False, False, True, False]
    assert "from 2.5000 at step 2 to 2.7000" in (told[3] or "")
    again = Best()
    again.recall([(1, 3.0, None), (1, None, 3.0), (2, 2.0, 2.5), (3, 1.5, 2.6)])
    assert (again.step, again.loss) == (2, 2.5)


def test_a_validation_loss_that_wavers_is_not_reported() -> None:
    best = Best()
    for step, validation in enumerate([3, 2.5, 2.51, 2.6, 2.4, 2.45, 2.41], 1):
        best.trained(3 / step)
        assert best.judge(step, validation) is None
