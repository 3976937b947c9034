from __future__ import annotations

import json
import logging
import mmap
import os
import platform
import sys
import time
from pathlib import Path

import pytest
import torch

from torchwright.core import system
from torchwright.core.errors import TorchwrightError, UnknownName
from torchwright.core.paths import cache_folder
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices import check_name, cpu, cuda, default_name, devices, get_device
from torchwright.hardware.devices.base import DISTURBED_SECONDS, Ceilings, Device, fast_seconds
from torchwright.hardware.devices.cpu import CPU
from torchwright.hardware.devices.cuda import CUDA

needs_no_cuda = pytest.mark.skipif(
    torch.cuda.is_available(), reason="says what happens without a CUDA device"
)


class Toy(Device):
    """A device whose ceilings count how often they were measured."""

    name = "toy"

    def __init__(self) -> None:
        self.measured = 0
        self.busy: str | None = None
        """Why the machine is busy now."""
        self.disturbed: str | None = None
        """What a measurement notices."""

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def identify(self) -> DeviceFacts:
        return DeviceFacts(kind="toy", name="a toy")

    def measure(self) -> Ceilings:
        self.measured += 1
        return Ceilings(read_gb_per_s=10.0 * self.measured, tflops={"float32": 0.5}, disturbed=self.disturbed)

    def disturbance(self) -> str | None:
        return self.busy

    def synchronize(self) -> None: ...

    def reset_peak_memory(self) -> bool:
        return True

    def peak_memory_bytes(self) -> int:
        return 0

    def free_memory_bytes(self) -> int:
        return 0


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path))
    return tmp_path


def kept(cache: Path) -> Path:
    (path,) = (cache / "ceilings").iterdir()
    return path


# ------------------------------------------------------------------------------------------- choosing


def test_the_registry_knows_its_devices():
    assert devices.names() == ["cpu", "cuda", "xpu", "mps", "npu", "hpu", "hip"]
    assert check_name("cuda") == "cuda"
    assert all(cls.name == name for name, cls in devices)


def test_an_unknown_device_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownName, match=r"unknown device 'cpuu'; did you mean 'cpu'\?"):
        get_device("cpuu")


def test_the_cpu_is_always_there():
    assert isinstance(get_device("cpu"), CPU)


@needs_no_cuda
def test_without_cuda_the_cpu_is_the_default_and_cuda_is_refused_in_words():
    assert default_name() == "cpu"
    with pytest.raises(TorchwrightError, match="the device 'cuda' was asked for") as caught:
        get_device("cuda")
    assert caught.value.allowed == "cpu"
    assert torch.__version__ in str(caught.value.found)
    assert "driver" in str(caught.value.next)


def test_a_cuda_build_without_a_card_says_so(cuda_build):
    cuda_build(False)
    assert "no card or driver answers" in str(CUDA.unavailable())


def test_where_cuda_answers_it_is_the_default(cuda_build):
    cuda_build(True)
    assert default_name() == "cuda"
    assert isinstance(get_device(), CUDA)


# ------------------------------------------------------------------------------------------ ceilings and their file


def test_ceilings_are_measured_once(cache):
    toy = Toy()
    assert toy.facts() == DeviceFacts(kind="toy", name="a toy", read_gb_per_s=10.0, tflops={"float32": 0.5})
    assert toy.facts().read_gb_per_s == 10.0
    assert toy.measured == 1
    measured_on = json.loads(kept(cache).read_text())["measured_on"]
    assert measured_on == json.loads(json.dumps(toy.identity()))


def test_refresh_measures_again(cache):
    toy = Toy()
    toy.facts()
    assert toy.facts(refresh=True).read_gb_per_s == 20.0
    assert toy.facts().read_gb_per_s == 20.0


def test_another_torch_or_thread_count_is_measured_apart(cache, monkeypatch):
    toy = Toy()
    toy.facts()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    toy.facts()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    toy.facts()
    assert toy.measured == 3
    assert len(list((cache / "ceilings").iterdir())) == 3


def made_old(cache: Path) -> None:
    old = time.time() - DISTURBED_SECONDS - 1
    os.utime(kept(cache), (old, old))


def test_nothing_is_measured_on_a_busy_machine(cache):
    toy = Toy()
    toy.busy = "machine busy (load 20 on 2 cores)"
    assert toy.ceilings() == Ceilings(disturbed=toy.busy)
    assert (toy.facts(), toy.measured) == (toy.identify(), 0)
    toy.busy = None
    assert toy.facts().read_gb_per_s == 10.0


def test_disturbed_ceilings_are_no_facts_and_are_measured_again_when_it_is_quiet(cache):
    toy = Toy()
    toy.disturbed = "machine busy (runs of one measurement are 3.1x apart)"
    assert toy.facts() == toy.identify()
    assert toy.ceilings() == Ceilings(read_gb_per_s=10.0, tflops={"float32": 0.5}, disturbed=toy.disturbed)
    assert toy.measured == 1, "not at every call"
    made_old(cache)
    toy.busy = "machine busy (load 20 on 2 cores)"
    assert toy.ceilings() == Ceilings(read_gb_per_s=10.0, tflops={"float32": 0.5}, disturbed=toy.busy)
    assert toy.measured == 1, "the machine is still busy"
    toy.busy = toy.disturbed = None
    assert toy.facts().read_gb_per_s == 20.0
    made_old(cache)
    toy.facts()
    assert toy.measured == 2


def test_disturbed_ceilings_never_replace_undisturbed_ones(cache):
    toy = Toy()
    toy.facts()
    toy.disturbed = "machine busy"
    assert toy.ceilings(refresh=True).disturbed
    assert toy.facts().read_gb_per_s == 10.0


def test_a_measurement_notices_lost_cores_and_uneven_runs():
    assert cpu._disturbed(1.97, 2, 1.2) is None
    assert cpu._disturbed(1.0, 2, 1.2) == "machine busy (measured on 1.0 of 2 cores)"
    assert cpu._disturbed(2.0, 2, 5.0) == "machine busy (runs of one measurement are 5.0x apart)"


@pytest.mark.parametrize("text", ["", "[]", '{"ceilings": {}}', '{"ceilings": {"read_gb_per_s": "fast"}}'])
def test_a_damaged_file_is_measured_again_with_a_notice(cache, caplog, text):
    toy = Toy()
    toy.facts()
    kept(cache).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert toy.facts().read_gb_per_s == 20.0
    assert "measuring the ceilings again" in caplog.text
    assert json.loads(kept(cache).read_text())["ceilings"]["read_gb_per_s"] == 20.0


def test_a_cache_that_cannot_be_written_costs_a_notice_and_nothing_else(cache, caplog):
    (cache / "ceilings").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert Toy().facts().read_gb_per_s == 10.0
    assert "cannot be kept" in caplog.text


def test_nothing_half_written_stays_behind(cache, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", refuse)
    Toy().facts()
    assert list((cache / "ceilings").iterdir()) == []


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHWRIGHT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "torchwright"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "torchwright"
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def test_timing_warms_up_and_keeps_to_its_budget():
    calls: list[int] = []
    assert fast_seconds(lambda: calls.append(1), budget=10.0, synchronize=lambda: None, runs=3) >= 0
    assert len(calls) == 4
    calls.clear()
    fast_seconds(lambda: (calls.append(1), time.sleep(0.01)), budget=0.0, synchronize=lambda: None)
    assert len(calls) == 2


# ----------------------------------------------------------------------------------------------------------- the CPU


def test_the_cpu_is_identified_without_measuring():
    facts = CPU().identify()
    assert facts.kind == "cpu"
    assert facts.name
    assert 1 <= facts.cores <= (os.cpu_count() or 1)
    assert facts.memory_bytes > 2**28
    assert (facts.read_gb_per_s, facts.tflops) == (None, {})


class Brief(CPU):
    """Measured in a moment."""

    batch_sizes = (16,)
    read_bytes = 1 << 22


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_cpu_measures_every_dtype():
    threads = torch.get_num_threads()
    ceilings = Brief().measure()
    assert (ceilings.read_gb_per_s or 0) > 0
    assert {"float32", "bfloat16", "float16"} <= set(ceilings.tflops)
    assert all(rate > 0 for rate in ceilings.tflops.values())
    assert torch.get_num_threads() == threads


def test_a_processor_without_the_int8_kernel_has_no_int8_ceiling():
    def refuse(rows: int) -> None:
        raise RuntimeError("no kernel")

    assert set(cpu._matmuls((1,), int8=refuse)) == {"float32", "bfloat16", "float16"}


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        (
            "fpu avx2 fma avx512f avx512_vnni amx_tile amx_int8",
            "avx2 fma avx512f avx512_vnni amx_tile amx_int8",
        ),
        ("fp asimd asimdhp asimddp i8mm bf16 sve", "neon fp16 dotprod i8mm bf16 sve"),
    ],
)
def test_instruction_sets_have_one_name_each(flags, isa):
    assert cpu._named(flags.split()) == tuple(isa.split())


def test_emulated_arm_has_its_own_instruction_sets_not_the_hosts():
    """Under qemu-user /proc/cpuinfo may be the x86 host's."""
    vector = {cpu.AT_HWCAP: 1 << 1 | 1 << 20, cpu.AT_HWCAP2: 1 << 13 | 1 << 14}
    assert cpu.instruction_sets(machine="aarch64", auxiliary=vector.__getitem__) == (
        "neon",
        "dotprod",
        "i8mm",
        "bf16",
    )


def test_the_auxiliary_vector_is_read():
    assert cpu._auxiliary(6) == os.sysconf("SC_PAGE_SIZE")  # AT_PAGESZ


def test_without_proc_torch_tells_the_instruction_sets(tmp_path):
    capabilities = {"avx2": True, "avx512_f": True, "avx512_vnni": False, "num_sockets": 1}
    assert cpu._named(cpu._torchs_flags(capabilities, "x86_64")) == ("avx2", "avx512f")
    assert "neon" in cpu._named(cpu._torchs_flags({}, "arm64"))
    assert cpu.instruction_sets(cpuinfo=tmp_path / "cpuinfo") == cpu._named(
        cpu._torchs_flags(torch.cpu.get_capabilities(), platform.machine())
    )


def test_a_cgroup_limits_the_memory():
    files = {
        ("", "memory.max"): ["max", "1000000"],
        ("memory", "memory.limit_in_bytes"): ["9223372036854771712"],
    }
    assert cpu.usable_memory_bytes(lambda controller, file: files.get((controller, file), [])) == 1_000_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_sees_what_was_freed_and_can_start_afresh():
    device, size = CPU(), 128 << 20
    resets = device.reset_peak_memory()
    before = device.peak_memory_bytes()
    # Not malloc's memory: what that has kept of the tests before would be taken again, and nothing would grow.
    with mmap.mmap(-1, size) as memory:
        torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    grown = device.peak_memory_bytes()
    assert grown >= before + size * 0.9 if resets else grown >= before
    if resets:
        device.reset_peak_memory()
        assert device.peak_memory_bytes() < grown - size * 0.5


def test_where_the_kernel_tells_nothing_the_peak_is_the_whole_life(tmp_path):
    device = CPU(process=tmp_path / "no-such-process")
    assert device.reset_peak_memory() is False
    assert device.peak_memory_bytes() == system.peak_memory_bytes()


def test_a_kernel_that_counts_no_peak_is_read_as_such(tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t  2048 kB\n")
    device = CPU(process=tmp_path)
    assert device.reset_peak_memory() is False
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  2048 kB\n")
    assert device.reset_peak_memory() is True
    assert device.peak_memory_bytes() == 2048 * 1024


# -------------------------------------------------------------------------------------------------------------- CUDA


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_card_is_identified_measured_and_counted():
    device = CUDA()
    facts = device.identify()
    assert facts.isa[0].startswith("sm_")
    ceilings = device.measure()
    assert (ceilings.read_gb_per_s or 0) > 0
    assert {"float32", "bfloat16", "float16"} <= set(ceilings.tflops)
    assert device.reset_peak_memory()
    before = device.peak_memory_bytes()
    x = torch.ones(before // 4 + (64 << 20), device="cuda")  # more than what torch has kept can hold
    device.synchronize()
    assert device.peak_memory_bytes() >= x.numel() * 4


def test_importing_the_cuda_device_touches_no_driver():
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
    assert cuda.CUDA.name == "cuda"
