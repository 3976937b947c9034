"""Rows of different lengths in calls of fixed shapes: how they are split, planned, batched, and refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchwright.core.errors import WorkloadError
from torchwright.workloads.base import Case
from torchwright.workloads.encoding import padded
from torchwright.workloads.rows import Batcher, RowShapes, split


class TestLayout:
    @given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=40), count=st.integers(1, 5))
    @settings(deadline=None)
    def test_split_serves_the_rows_it_was_made_for_in_one_call_each(self, lengths, count):
        shapes = split(lengths, count, 16)
        assert 1 <= len(shapes) <= count
        assert sum(B for B, _ in shapes) == len(lengths)
        assert max(T for _, T in shapes) == max(lengths)
        assert all(T % 16 == 0 or max(lengths) == T for _, T in shapes)
        calls = RowShapes(shapes=shapes).plan(lengths)
        assert sorted(shape for shape, _ in calls) == sorted(shapes)
        assert all(len(rows) == B for (B, _), rows in calls)

    @given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=12), count=st.integers(1, 3))
    @settings(deadline=None)
    def test_split_has_the_fewest_padded_tokens(self, lengths, count):
        from itertools import combinations, pairwise

        longest = max(lengths)
        rounded = sorted(min(longest, -(-n // 16) * 16) for n in lengths)

        def cost(cuts):
            edges = [0, *cuts, len(rounded)]
            return sum((b - a) * rounded[b - 1] for a, b in pairwise(edges))

        best = min(
            cost(cuts)
            for k in range(min(count, len(rounded)))
            for cuts in combinations(range(1, len(rounded)), k)
        )
        assert sum(B * T for B, T in split(lengths, count, 16)) == best

    @given(
        shapes=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([4, 8, 16])), min_size=1, max_size=4),
        data=st.data(),
    )
    @settings(deadline=None)
    def test_plan_answers_every_row_once_in_a_shape_that_holds_it(self, shapes, data):
        layout = RowShapes(shapes=tuple(shapes))
        lengths = data.draw(st.lists(st.integers(1, layout.tokens), min_size=1, max_size=30))
        calls = layout.plan(lengths)
        assert sorted(row for _, rows in calls for row in rows) == list(range(len(lengths)))
        for (B, T), rows in calls:
            assert (B, T) in shapes
            assert 0 < len(rows) <= B
            assert all(lengths[row] <= T for row in rows)

    def test_round_trip(self):
        layout = RowShapes(shapes=((4, 16), (2, 50)), pad=1, prompt="query: ", cut=512, part="0_Transformer")
        assert RowShapes.from_dict(layout.as_dict()) == layout


class TestBatcher:
    @given(
        lengths=st.lists(st.integers(1, 24), min_size=1, max_size=20),
        shapes=st.lists(st.tuples(st.integers(1, 5), st.sampled_from([8, 16, 24])), min_size=1, max_size=3),
    )
    @settings(deadline=None)
    def test_rows_come_back_in_their_order_out_of_fixed_shapes(self, lengths, shapes):
        layout = RowShapes(shapes=((3, 24), *shapes), pad=9)
        random = torch.Generator().manual_seed(0)
        rows = [torch.randint(10, 99, (n,), generator=random).tolist() for n in lengths]

        def run(case):
            ids, mask = case.args
            assert tuple(ids.shape) in layout.shapes
            assert mask.sum(1).min() > 0
            assert (ids[mask == 0] == 9).all()
            return torch.stack([(ids * mask).sum(1).float(), mask.sum(1).float()], 1)

        answer = Batcher(run, layout)(Case(name="encode", args=padded(rows, 9)))
        assert answer.tolist() == [[float(sum(row)), float(len(row))] for row in rows]

    @given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=12), wider=st.integers(0, 9))
    @settings(deadline=None)
    def test_answers_for_each_token_lie_where_the_tokens_do(self, lengths, wider):
        layout = RowShapes(shapes=((3, 8), (2, 24)), tokenwise=True)
        random = torch.Generator().manual_seed(0)
        ids, mask = padded([torch.randint(10, 99, (n,), generator=random).tolist() for n in lengths], 0)
        ids, mask = (torch.nn.functional.pad(tensor, (0, wider)) for tensor in (ids, mask))
        named = {"input_ids": ids, "attention_mask": mask, "token_type_ids": 7 * mask}

        def run(case):
            assert tuple(case.kwargs["input_ids"].shape) in layout.shapes
            both = case.kwargs["input_ids"] + case.kwargs["token_type_ids"]
            return {"logits": torch.stack([both, -both], 2).float(), "start": both}

        answer = Batcher(run, layout)(Case(name="forward", kwargs=named))
        assert answer["logits"].shape == (*ids.shape, 2)
        assert torch.equal(answer["start"] * mask, (ids + 7) * mask)
        assert torch.equal(answer["logits"][..., 1] * mask, -((ids + 7) * mask).float())

    def test_a_call_in_a_known_shape_is_passed_on(self):
        case = Case(name="encode", args=(torch.ones(2, 4), torch.ones(2, 4)))
        assert Batcher(lambda given: given, RowShapes(shapes=((2, 4),)))(case) is case

    @pytest.mark.parametrize(
        ("ids", "mask", "words"),
        [
            (torch.ones(2, 3), torch.ones(2, 4), r"do not make a batch.*\[2, 3\] and \[2, 4\]"),
            (torch.ones(0, 3), torch.ones(0, 3), "do not make a batch"),
            (torch.ones(3), torch.ones(3), "do not make a batch"),
            (torch.ones(1, 3), torch.tensor([[0, 1, 1]]), "padded at their right end only"),
            (torch.ones(1, 3), torch.tensor([[1, 0, 1]]), "has gaps"),
            (torch.ones(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]]), "row 1 has no tokens"),
            (torch.ones(1, 9), torch.ones(1, 9), "row of 9 tokens is longer.*Allowed: 8 tokens.*tokens=9"),
        ],
    )
    def test_batches_that_are_none(self, ids, mask, words):
        layout = RowShapes(shapes=((2, 8),))
        with pytest.raises(WorkloadError, match=words):
            Batcher(lambda case: case, layout)(Case(name="encode", args=(ids.long(), mask.long())))
