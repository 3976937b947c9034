"""Usable cores and the load of other programs, read from files that a test writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchwright import cpu_load
from torchwright.cpu_load import CpuLoad, cpu_quota, physical_cores, read_load, whole_cores

CPUS = len(cpu_load.affinity())


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


def load_of(root: Path) -> CpuLoad:
    return read_load(root, root / "none", sleep=lambda seconds: None)


def test_runnable_threads_of_other_programs_are_the_load(tmp_path: Path) -> None:
    write(tmp_path, machine(25) | thread("7", "self", "R"))
    assert load_of(tmp_path).others == 24
    assert load_of(tmp_path).busy


def test_threads_of_this_process_and_its_descendants_do_not_count(tmp_path: Path) -> None:
    own = thread("7", "self", "R", "8 ") | thread("71", "self", "S")
    write(tmp_path, machine(5) | own | thread("8", "8", "R", "9 10") | thread("9", "9", "R"))
    write(tmp_path, thread("10", "10", "R") | thread("11", "10", "R"))
    assert load_of(tmp_path).others == 0
    assert not load_of(tmp_path).busy


def test_the_load_of_a_large_machine_is_shared_by_all_its_cpus(tmp_path: Path) -> None:
    write(tmp_path, machine(9, cpus=8 * CPUS) | thread("7", "self", "R"))
    assert load_of(tmp_path).others == 1.0


def test_without_proc_the_load_average_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_load.os, "getloadavg", lambda: (5.5, 0, 0), raising=False)
    assert load_of(tmp_path / "none").others == 4.5
    monkeypatch.delattr(cpu_load.os, "getloadavg")
    assert load_of(tmp_path / "none").others == 0.0


def test_a_reading_in_words() -> None:
    busy = CpuLoad(cores=2, quota=None, others=20.2)
    assert (str(busy), busy.busy, busy.threads) == ("load 20 on 2 cores", True, 2)
    limited = CpuLoad(cores=1, quota=0.5, others=0.1)
    assert (str(limited), limited.busy, limited.threads) == ("load 0.1 on 1 core, CPU quota 0.5", False, 1)
    assert CpuLoad(cores=2, quota=None, others=0.9).busy, "one neighbour halves a region of two threads"


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
