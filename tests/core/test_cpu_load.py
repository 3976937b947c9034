"""Usable cores and the load of other programs, read from files that a test writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchwright.core import cpu_load
from torchwright.core.cpu_load import QUIET, Load, cpu_quota, physical_cores, whole_cores

CPUS = len(cpu_load.affinity())


@pytest.fixture(autouse=True)
def _read_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(QUIET, raising=False)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def thread(name: str, pid: str, state: str, children: str = "") -> dict[str, str]:
    return {
        f"{pid}/task/{name}/stat": f"{name} (a (odd) name) {state} 1 2",
        f"{pid}/task/{name}/children": children,
    }


def machine(running: int, cpus: int = CPUS) -> dict[str, str]:
    rows = [f"cpu{index} 1 2 3" for index in range(cpus)]
    return {"stat": "\n".join(["cpu 1 2 3", *rows, f"procs_running {running}", "procs_blocked 0"])}


def load_of(root: Path) -> Load:
    return Load.sampled(root, root / "none", sleep=lambda seconds: None)


def test_a_machine_that_is_said_to_be_quiet_has_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, machine(25) | thread("7", "self", "R"))
    assert load_of(tmp_path).busy
    monkeypatch.setenv(QUIET, "1")
    assert load_of(tmp_path).running == 0.0


def test_runnable_threads_of_other_programs_are_the_load(tmp_path: Path) -> None:
    write(tmp_path, machine(25) | thread("7", "self", "R"))
    assert load_of(tmp_path).running == 24
    assert load_of(tmp_path).busy


def test_threads_of_this_process_and_its_descendants_do_not_count(tmp_path: Path) -> None:
    own = thread("7", "self", "R", "8 ") | thread("71", "self", "S")
    write(tmp_path, machine(5) | own | thread("8", "8", "R", "9 10") | thread("9", "9", "R"))
    write(tmp_path, thread("10", "10", "R") | thread("11", "10", "R"))
    assert load_of(tmp_path).running == 0
    assert not load_of(tmp_path).busy


def test_the_load_of_a_large_machine_is_shared_by_all_its_cpus(tmp_path: Path) -> None:
    write(tmp_path, machine(9, cpus=8 * CPUS) | thread("7", "self", "R"))
    assert load_of(tmp_path).running == 1.0


def test_time_that_a_hypervisor_takes_is_load(tmp_path: Path) -> None:
    write(tmp_path, machine(0))

    def steal(seconds: float) -> None:
        """Another machine has a core of ours for a whole second."""
        rows = ["cpu 0", f"cpu0 0 0 0 0 0 0 0 {os.sysconf('SC_CLK_TCK')} 0 0", "procs_running 0"]
        write(tmp_path, {"stat": "\n".join(rows)})

    write(tmp_path, {"stat": "cpu 0\ncpu0 0 0 0 0 0 0 0 0 0 0\nprocs_running 0"})
    assert Load.sampled(tmp_path, tmp_path / "none", sleep=steal).busy


def test_without_proc_the_load_average_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_load.os, "getloadavg", lambda: (5.5, 0, 0), raising=False)
    assert load_of(tmp_path / "none").running == 4.5
    monkeypatch.delattr(cpu_load.os, "getloadavg")
    assert load_of(tmp_path / "none").running == 0.0


def test_a_reading_in_words() -> None:
    busy = Load(cores=2, quota=None, running=20.2)
    assert (str(busy), busy.busy, busy.threads) == ("load 20 on 2 cores", True, 2)
    limited = Load(cores=1, quota=0.5, running=0.1)
    assert (str(limited), limited.busy, limited.threads) == ("load 0.1 on 1 core, CPU quota 0.5", False, 1)
    assert Load(cores=2, running=0.9).busy, "one neighbour halves a region of two threads"
    assert [Load(cores=2, running=running).crowded for running in (0, 0.9, 2, 24)] == [
        False,
        False,
        True,
        True,
    ]
    assert [Load(cores=2, running=running).slowdown for running in (0, 1, 23)] == [1.0, 1.0, 12.0]
    assert Load(cores=2, running=0, quota=0.25).slowdown == 4.0


def test_cores_are_physical_ones_within_the_quota(tmp_path: Path) -> None:
    for cpu in range(8):
        folder = f"cpu{cpu}/topology"
        write(tmp_path, {f"{folder}/physical_package_id": "0\n", f"{folder}/core_id": f"{cpu // 2}\n"})
    assert physical_cores(range(8), tmp_path) == 4
    assert physical_cores(range(3), tmp_path / "none") == 3, "without a topology each CPU is a core"
    assert [whole_cores(4, quota) for quota in (None, 2.5, 0.5, 64.0)] == [4, 2, 1, 4]


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ({"proc/self/cgroup": "0::/../elsewhere\n", "cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n0::/\n",
                "cpu/a/cpu.cfs_quota_us": "400000",
                "cpu/a/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            4.0,
        ),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({}, None),
    ],
    ids=["v2", "v2 in a container", "v1", "no limit", "no cgroups"],
)
def test_the_tightest_cgroup_quota_counts(tmp_path: Path, files: dict[str, str], cpus: float | None) -> None:
    write(tmp_path, files)
    assert cpu_quota(tmp_path / "proc", tmp_path) == cpus
