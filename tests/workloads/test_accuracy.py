"""Comparing outputs: every figure against a direct float64 computation, and nothing that is no number gets through."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchwright.core.errors import WorkloadError
from torchwright.core.intervals import rms_bounds
from torchwright.workloads import accuracy

NAN, INF = math.nan, math.inf


def noisy(shape: tuple[int, ...], noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    before = torch.randn(shape, generator=random)
    return before, before + noise * torch.randn(shape, generator=random)


class TestFlatten:
    def test_nested_outputs_in_order_and_numbers_as_tensors(self):
        flat = accuracy.flatten({"a": (torch.ones(2), [3, True]), "b": 0.5})
        assert [t.tolist() for t in flat] == [[1.0, 1.0], 3, True, 0.5]

    def test_texts_and_none_are_left_out(self):
        assert len(accuracy.flatten((torch.ones(1), "text", None))) == 1

    @pytest.mark.parametrize("output", ["text", None, [], {}])
    def test_nothing_to_compare(self, output):
        with pytest.raises(WorkloadError, match=r"nothing that can be compared.*pass metric="):
            accuracy.flatten(output)


class TestRelativeError:
    @given(seed=st.integers(0, 2**31), noise=st.floats(1e-6, 10))
    @settings(max_examples=30, deadline=None)
    def test_is_the_ratio_of_norms(self, seed, noise):
        before, after = noisy((7, 5), noise, seed)
        quality = accuracy.relative_error([before], [after])
        expected = (after.double() - before.double()).norm() / before.double().norm()
        assert quality.drop == pytest.approx(expected.item(), rel=1e-12)
        assert quality.value == quality.drop
        assert quality.samples == 35
        low, high = rms_bounds(35)
        assert (quality.drop_low, quality.drop_high) == pytest.approx(
            (low * quality.drop, high * quality.drop)
        )

    def test_the_fewer_numbers_the_wider_and_every_output_has_its_own(self):
        before, after = noisy((400, 5), 0.1)
        few = accuracy.relative_error([before, before[0]], [after, before[0] * 1.09])
        assert few.drop == accuracy.relative_error([before], [after]).drop
        assert few.drop_high == pytest.approx(0.09 * rms_bounds(5)[1], rel=1e-5)

    def test_integers_have_none_and_infinities_do_not_count(self):
        ids = torch.arange(8)
        found = accuracy.relative_error([ids], [ids.where(ids != 3, 0)])
        assert found.drop == found.drop_low == found.drop_high == 1 / 8
        before = torch.tensor([1.0, 2.0, float("inf")])
        found = accuracy.relative_error([before], [before * 1.1])
        assert found.drop_high == pytest.approx(0.1 * rms_bounds(2)[1], rel=1e-5)

    def test_the_budget_is_held_against_the_worst_output(self):
        before, after = noisy((4, 4), 0.1)
        quality = accuracy.relative_error([before, before], [before, after])
        alone = accuracy.relative_error([before], [after])
        assert quality.drop == alone.drop
        assert quality.extras["mean_relative_error"] == pytest.approx(alone.drop / 2)

    def test_scaling_both_changes_nothing(self):
        before, after = noisy((4, 4), 0.1)
        one, scaled = (accuracy.relative_error([before * s], [after * s]).drop for s in (1.0, 2.0**-20))
        assert one == pytest.approx(scaled, rel=1e-12)

    def test_integers_count_the_share_that_differs(self):
        assert (
            accuracy.relative_error([torch.tensor([1, 2, 3, 4])], [torch.tensor([1, 2, 3, 5])]).drop == 0.25
        )
        assert (
            accuracy.relative_error([torch.tensor([True, True])], [torch.tensor([True, False])]).drop == 0.5
        )

    def test_complex_outputs(self):
        before = torch.tensor([3 + 4j, 0j])
        assert accuracy.relative_error([before], [before + torch.tensor([0.5j, 0])]).drop == pytest.approx(
            0.1
        )

    def test_an_output_of_zeros_is_judged_by_the_root_mean_square(self):
        assert accuracy.relative_error([torch.zeros(4)], [torch.zeros(4)]).drop == 0
        assert accuracy.relative_error([torch.zeros(4)], [torch.full((4,), 1e-3)]).drop == pytest.approx(1e-3)

    def test_empty_outputs_are_equal(self):
        assert accuracy.relative_error([torch.zeros(0)], [torch.zeros(0)]).drop == 0

    @pytest.mark.parametrize("strange", [NAN, INF, -INF])
    def test_the_same_strange_elements_in_both_are_no_error(self, strange):
        before = torch.tensor([1.0, strange, 2.0])
        assert accuracy.relative_error([before], [before.clone()]).drop == 0

    @pytest.mark.parametrize(
        ("before", "after"), [(1.0, NAN), (1.0, INF), (NAN, 1.0), (INF, NAN), (INF, -INF), (NAN, INF)]
    )
    def test_strange_elements_that_differ_are_refused(self, before, after):
        with pytest.raises(WorkloadError, match="infinite or NaN elements"):
            accuracy.relative_error([torch.tensor([2.0, before])], [torch.tensor([2.0, after])])

    def test_numbers_and_shapes_must_match(self):
        with pytest.raises(WorkloadError, match="returned 2 tensors where the original has 1"):
            accuracy.relative_error([torch.ones(1)], [torch.ones(1)] * 2)
        with pytest.raises(WorkloadError, match=r"shape \[3\] where the original has \[2\]"):
            accuracy.relative_error([torch.ones(2)], [torch.ones(3)])


class TestAgreement:
    @given(seed=st.integers(0, 2**31), noise=st.floats(0, 3))
    @settings(max_examples=30, deadline=None)
    def test_is_the_share_of_equal_answers(self, seed, noise):
        before, after = noisy((40, 6), noise, seed)
        quality = accuracy.agreement(before, after)
        same = sum(int(b.argmax() == a.argmax()) for b, a in zip(before, after, strict=True)) / 40
        assert quality.value == pytest.approx(same)
        assert quality.drop == pytest.approx(1 - same)
        assert quality.drop <= quality.drop_high <= 1
        assert quality.samples == 40

    def test_interval_of_a_share(self):
        before = torch.eye(100)
        after = before.clone()
        after[0] = after[1]
        quality = accuracy.agreement(before, after)
        assert quality.drop == pytest.approx(0.01)
        # Clopper and Pearson: the shares with which so few, or so many, changes have a chance of 2.5%.
        assert 1 - (1 - quality.drop_low) ** 100 == pytest.approx(0.025)
        none, one = (1 - quality.drop_high) ** 100, 100 * quality.drop_high * (1 - quality.drop_high) ** 99
        assert none + one == pytest.approx(0.025)

    def test_few_rows_that_all_agree_prove_little(self):
        quality = accuracy.agreement(torch.eye(8), 2 * torch.eye(8))
        assert (quality.drop, quality.drop_low) == (0, 0)
        assert quality.drop_high == pytest.approx(0.369, abs=1e-3)
        assert quality.extras["relative_error"] == pytest.approx(1)

    def test_rounding_takes_no_answer(self):
        before, after = noisy((8, 5), 1e-6)
        quality = accuracy.answers(before, after)
        assert (quality.metric, quality.drop, quality.drop_high) == ("top-1 agreement", 0, 0)
        assert accuracy.answers(*noisy((8, 5), 1e-3)).drop_high > 0.3

    def test_too_few_rows_for_a_share_are_judged_by_their_logits(self):
        before, after = noisy((367, 5), 0.01)
        quality = accuracy.enough_answers(before, after)
        assert quality.metric == "relative error"
        assert quality.drop == pytest.approx(0.01, rel=0.1)
        assert quality.extras["top1_rows"] == 367
        before, after = noisy((368, 5), 2e-4)
        assert accuracy.enough_answers(before, after).drop_high == pytest.approx(0.00997, abs=1e-5)

    def test_leading_axes_are_rows(self):
        assert accuracy.agreement(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)).samples == 6

    def test_a_nan_is_refused_even_where_it_would_agree(self):
        broken = torch.full((3, 4), NAN)
        with pytest.raises(WorkloadError, match="of a candidate are not numbers"):
            accuracy.agreement(torch.ones(3, 4), broken)
        with pytest.raises(WorkloadError, match="of the original are not numbers"):
            accuracy.agreement(broken, broken)

    def test_shapes_must_match(self):
        with pytest.raises(WorkloadError, match=r"\[2, 5\] and \[2, 4\]"):
            accuracy.agreement(torch.ones(2, 4), torch.ones(2, 5))
        with pytest.raises(WorkloadError, match="at least one row"):
            accuracy.agreement(torch.ones(0, 4), torch.ones(0, 4))


class TestCosine:
    @given(seed=st.integers(0, 2**31), noise=st.floats(0, 3))
    @settings(max_examples=30, deadline=None)
    def test_is_the_mean_over_rows(self, seed, noise):
        before, after = noisy((20, 8), noise, seed)
        quality = accuracy.cosine(before, after)
        b, a = before.double(), after.double()
        each = [(x @ y / (x.norm() * y.norm())).item() for x, y in zip(b, a, strict=True)]
        assert quality.value == pytest.approx(sum(each) / 20, abs=1e-12)
        assert quality.drop == pytest.approx(1 - sum(each) / 20, abs=1e-12)
        half = 2.0930241 * statistics.stdev(each) / math.sqrt(20)  # Student's t of 19 degrees of freedom
        assert quality.drop_low == pytest.approx(quality.drop - half, rel=1e-6, abs=1e-12)
        assert quality.drop_high == pytest.approx(quality.drop + half, rel=1e-6, abs=1e-12)
        assert quality.extras["worst_cosine"] == pytest.approx(min(each), abs=1e-12)

    def test_length_does_not_matter(self):
        before, _ = noisy((5, 8), 0)
        assert accuracy.cosine(before, 3 * before).drop == pytest.approx(0, abs=1e-12)

    def test_rows_of_zeros_are_equal_to_each_other_alone(self):
        zeros = torch.zeros(3, 4)
        assert accuracy.cosine(zeros, zeros).drop == 0
        assert accuracy.cosine(zeros, torch.ones(3, 4)).drop == 1

    def test_one_row_has_no_interval(self):
        with pytest.raises(WorkloadError, match=r"no interval. Found: 1 independent values"):
            accuracy.cosine(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]))

    @pytest.mark.parametrize("strange", [NAN, INF])
    def test_what_is_no_number_is_refused(self, strange):
        with pytest.raises(WorkloadError):
            accuracy.cosine(torch.ones(2, 3), torch.tensor([[1.0, strange, 1.0], [1.0, 1.0, 1.0]]))


class TestScalar:
    @pytest.mark.parametrize(
        ("reference", "value", "higher", "drop"),
        [
            (0.8, 0.76, True, 0.05),
            (0.8, 0.84, True, -0.05),
            (2.0, 2.2, False, 0.1),
            (-2.0, -2.2, True, 0.1),
            (0.0, -0.3, True, 0.3),
        ],
    )
    def test_drop_is_relative_to_the_reference(self, reference, value, higher, drop):
        quality = accuracy.scalar("F1", reference, value, higher)
        assert quality.drop == quality.drop_high == pytest.approx(drop)
        assert (quality.metric, quality.higher_is_better) == ("F1", higher)

    @pytest.mark.parametrize("strange", [NAN, INF, -INF])
    def test_a_metric_that_is_no_number(self, strange):
        with pytest.raises(
            WorkloadError, match=r"the metric 'F1' returned (nan|inf|-inf) for the original.*finite"
        ):
            accuracy.scalar("F1", strange, 1.0, True)
        with pytest.raises(WorkloadError, match="for a candidate"):
            accuracy.scalar("F1", 1.0, strange, True)


class TestPerplexity:
    def make(self, windows: int, window: int, noise: float, seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        reference = 3 + torch.rand(windows * window, generator=random)
        candidate = reference + noise * torch.randn(windows * window, generator=random)
        rest = torch.zeros(windows * window), torch.ones(windows * window, dtype=torch.bool)
        return (
            accuracy.perplexity(reference, candidate, *rest, window),
            reference.double(),
            candidate.double(),
        )

    @given(seed=st.integers(0, 2**31), noise=st.floats(0, 0.5))
    @settings(max_examples=30, deadline=None)
    def test_drop_is_the_relative_growth(self, seed, noise):
        quality, reference, candidate = self.make(6, 10, noise, seed)
        before, after = math.exp(reference.mean()), math.exp(candidate.mean())
        assert quality.reference == pytest.approx(before)
        assert quality.value == pytest.approx(after)
        assert quality.drop == pytest.approx(after / before - 1, abs=1e-9)
        assert quality.drop_high >= quality.drop

    def test_interval_is_clustered_by_window(self):
        quality, reference, candidate = self.make(8, 16, 0.1)
        blocks = (candidate - reference).view(8, 16).mean(1)
        half = 2.3646243 * blocks.std().item() / math.sqrt(8)  # Student's t of 7 degrees of freedom
        assert quality.drop_high == pytest.approx(math.expm1(blocks.mean().item() + half))
        assert quality.drop_low == pytest.approx(math.expm1(blocks.mean().item() - half))

    def test_extras(self):
        nll = torch.ones(4)
        quality = accuracy.perplexity(
            nll, nll, torch.tensor([0.0, 0.2, 0.0, 0.2]), torch.tensor([1, 1, 1, 0]), 2
        )
        assert quality.extras == pytest.approx({"kl_divergence": 0.1, "top1_agreement": 0.75})

    @pytest.mark.parametrize("strange", [NAN, INF, 1e4])
    def test_what_is_no_number_is_refused(self, strange):
        nll = torch.ones(4)
        with pytest.raises(WorkloadError, match="perplexity"):
            accuracy.perplexity(nll, nll * strange, torch.zeros(4), torch.ones(4), 2)
