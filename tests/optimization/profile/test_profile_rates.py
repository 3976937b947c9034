"""Achieved rates against ceilings that a test gives."""

from __future__ import annotations

import pytest

from torchwright.core.records import DeviceFacts
from torchwright.optimization.profile.rates import rate
from torchwright.optimization.profile.terminal import achieved

MACHINE = DeviceFacts(kind="cpu", name="a processor", read_gb_per_s=10.0, tflops={"float32": 0.1})


def test_a_share_is_of_the_nearer_ceiling() -> None:
    found = rate(8e10, 1e9, 1.0, "float32", MACHINE)
    assert (found.bound_by, found.share) == ("operations", pytest.approx(0.8))
    assert achieved(found) == ("80.0 GFLOP/s float32", "80%")


def test_an_operator_faster_than_the_machine_shows_that_the_ceiling_is_wrong() -> None:
    found = rate(5.03e11, 1e9, 1.0, "float32", MACHINE)
    assert (found.bound_by, found.share) == ("bytes", pytest.approx(0.1)), "no 503% of the machine"
    assert rate(5.03e11, None, 1.0, "float32", MACHINE).share is None


def test_bytes_beyond_the_ceiling_come_from_a_cache() -> None:
    found = rate(None, 4e10, 1.0, "float32", MACHINE)
    assert achieved(found) == ("40.0 GB/s", "from cache")


def test_without_ceilings_there_is_no_share() -> None:
    found = rate(8e10, 1e9, 1.0, "float32", DeviceFacts(kind="cpu", name="a processor"))
    assert (found.bound_by, found.share) == (None, None)
