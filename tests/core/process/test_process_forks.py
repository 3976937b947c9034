"""Children of `fork` compute: plain PyTorch, DataLoader's workers, a pool of processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torchwright.core.process.forks import _open, reopen_in_child
from torchwright.testing.forks import check_in_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP is Linux's")

BEGIN = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch
import torchwright as tw

torch.set_num_threads(2)
weight = torch.randn(512, 512)

def compute(seed):
    x = torch.full((512, 512), float(seed))
    return float((x @ weight).sin().sum())

signal.alarm(60)
wanted = [compute(seed) for seed in range(4)]  # OpenMP has its threads now
"""


def ends_well(body: str) -> None:
    """Run a script that ends by an alarm where a child waits forever."""
    script = BEGIN + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_children_compute_with_all_threads_and_so_do_workers_of_loaders_and_pools() -> None:
    ends_well("""
        import multiprocessing

        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            threads = torch.get_num_threads()
            os._exit(0 if threads == 2 and compute(3) == wanted[3] else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert compute(2) == wanted[2]

        class Rows(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, seed): return compute(seed)

        loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork")
        found = [float(row) for row in loader]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-2)  # one thread adds in another order
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(compute, range(4)) == wanted
    """)


@pytest.mark.slow
def test_a_thread_that_has_computed_forks() -> None:
    ends_well("""
        import threading

        def fork():
            assert compute(1) == wanted[1]
            pid = os.fork()
            if pid == 0:
                signal.alarm(30)
                os._exit(0 if compute(3) == wanted[3] else 1)
            codes.append(os.waitpid(pid, 0)[1])

        codes = []
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
        assert codes == [0]
    """)


def test_what_reopens_is_asked_in_the_child_alone(tmp_path: Path) -> None:
    class Holder:
        asked = 0

        def after_fork(self) -> None:
            self.asked += 1

    holder = Holder()
    reopen_in_child(holder)

    def check() -> None:
        assert holder.asked == 1

    check_in_child(check)
    assert holder.asked == 0
    _open.discard(holder)
    assert not any(type(each).__name__ == "Holder" for each in _open)
