"""Whether the engine notices that other programs take its cores."""

from __future__ import annotations

import logging

import pytest
import torch
from engine_support import bundled, drain, engine, request

from torchwright.hardware.kernels.cpu.threads import torch_threads
from torchwright.models.decoder import load_decoder
from torchwright.serve.engine.cores import CoreShare
from torchwright.workloads.language import BUNDLED


class Cores:
    """Two clocks: the day's, and that of a thread that runs `share` of it."""

    def __init__(self) -> None:
        self.now = self.ran = 0.0
        self.share = CoreShare(lambda: self.now, lambda: self.ran)

    def compute(self, seconds: float, share: float) -> float:
        for _ in range(round(seconds / 0.01)):
            with self.share.counted():
                self.now += 0.01
                self.ran += 0.01 * share
            self.now += 1.0  # between steps it waits for requests, which nobody takes from it
        return self.share.value


def test_the_share_is_that_of_the_last_second():
    cores = Cores()
    assert cores.share.value == 1.0
    assert cores.compute(5, 1.0) == pytest.approx(1.0)
    assert cores.compute(5, 0.25) == pytest.approx(0.25, abs=0.01)
    assert cores.compute(5, 1.0) == pytest.approx(1.0, abs=0.01)


def test_the_log_tells_changes_once(caplog: pytest.LogCaptureFixture):
    cores = Cores()
    with caplog.at_level(logging.WARNING, "torchwright.serve"):
        for share in (1.0, 0.8, 0.3, 0.8, 0.5, 1.0):
            cores.compute(5, share)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "other programs take the cores",
        "the engine has its cores to itself again",
    ]


def test_a_short_stumble_is_not_told(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "torchwright.serve"):
        Cores().compute(0.2, 0.1)
    assert not caplog.records


def test_the_engine_says_its_share():
    made = engine(bundled())
    assert made.stats().core_share == 1.0
    assert made.submit(request("a", [1, 2, 3], 5)) is None
    drain(made)
    assert 0 < made.stats().core_share <= 1
    made.close()


@pytest.mark.parametrize(("dtype", "torchs"), [(torch.bfloat16, 1), (torch.float32, 3)])
def test_torch_keeps_its_threads_where_it_multiplies(dtype: torch.dtype, torchs: int):
    loaded = load_decoder(BUNDLED, dtype)
    with torch_threads(3):
        with loaded.on_threads():
            assert torch.get_num_threads() == torchs
        loaded.threads = 2
        with loaded.on_threads():
            assert torch.get_num_threads() == min(torchs, 2)
        assert torch.get_num_threads() == 3
