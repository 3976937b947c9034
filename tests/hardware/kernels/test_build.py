"""The library is compiled once for each set of sources, flags and compiler; without it the reference serves."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from torchwright.core.scheme import MADE
from torchwright.hardware.kernels import ops, reference
from torchwright.hardware.kernels.cpu import build
from torchwright.hardware.kernels.cpu.build import BuildError
from torchwright.hardware.kernels.linear import PackedLinear

Compiler = Callable[..., Path]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Makes a script the compiler: it writes each command to a log and an empty file where the output belongs."""
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "cache"))

    def make(version: str = "fake 1.0", known: str = "*", work: str = ":") -> Path:
        script, log = tmp_path / f"compiler {len(list(tmp_path.iterdir()))}", tmp_path / "log"
        script.write_text(
            f"""#!/bin/sh
case " $* " in
    *" --version "*) echo "{version}"; exit 0 ;;
    *" /dev/null "*) case " $* " in {known}) exit 0 ;; *) exit 1 ;; esac ;;
esac
echo "$*" >> "{log}"
{work}
while [ $# -gt 1 ]; do
    if [ "$1" = -o ]; then : > "$2"; fi
    shift
done
"""
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return log

    return make


def commands(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def test_built_once(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    """A line says so, since it takes a while."""
    caplog.set_level(
        logging.WARNING, logger="torchwright.hardware.kernels"
    )  # a library may have set one for all
    log = compiler()
    path = build.library()
    assert path.is_file()
    assert caplog.messages == ["torchwright: compiling the kernels, once for this version"]
    once = commands(log)
    assert sum("-shared" in command for command in once) == 1
    assert sum("table.cpp" in command for command in once) == len(once) - 2
    assert build.library() == path
    assert commands(log) == once
    assert len(caplog.messages) == 1
    assert sorted(file.name for file in path.parent.iterdir()) == ["lock", path.name]


def test_built_once_by_many_at_a_time(compiler: Compiler) -> None:
    log = compiler(work="sleep 0.05")
    with ThreadPoolExecutor(4) as pool:
        paths = {future.result() for future in [pool.submit(build.library) for _ in range(4)]}
    assert len(paths) == 1
    assert sum("-shared" in command for command in commands(log)) == 1


def test_another_compiler_source_or_flag_builds_again(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler()
    paths = [build.library()]
    compiler(version="fake 2.0")
    paths.append(build.library())
    monkeypatch.setattr(build, "COMMON", (*build.COMMON, "-g"))
    paths.append(build.library())
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    shutil.copytree(Path(build.__file__).with_name("csrc"), build.SOURCES)
    assert build.library() == paths[-1], "another checkout of the same sources"
    with (build.SOURCES / "vec.h").open("a") as source:
        source.write("// changed\n")
    paths.append(build.library())
    assert len(set(paths)) == 4
    assert all(path.is_file() for path in paths)


def test_only_instruction_sets_that_the_compiler_knows(compiler: Compiler) -> None:
    log = compiler(known='*" -march=x86-64-v3 "*')
    build.library()
    found = [command for command in commands(log) if "table.cpp" in command]
    if "avx2" in build.instruction_sets(os.environ["CXX"]):
        assert not any("avx512" in command for command in found)
    assert sum("-DTW_ISA=portable" in command for command in found) == 1
    (main,) = [command for command in commands(log) if "ops.cpp" in command]
    assert "-DTW_HAVE_PORTABLE" in main
    assert "-DTW_HAVE_AVX512" not in main


@pytest.mark.parametrize("machine", ["aarch64", "arm64", "ARM64"])
def test_arm_has_instruction_sets_of_its_own(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    """Each with the flags of its own file: nothing is compiled for the machine that compiles."""
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    log = compiler()
    build.library()
    found = [command for command in commands(log) if "table.cpp" in command]
    levels = [command.split("-DTW_ISA=")[1].split()[0] for command in found]
    assert sorted(levels) == ["bf16", "dotprod", "i8mm", "neon", "portable"]
    assert not any("native" in command for command in commands(log))
    (main,) = [command for command in commands(log) if "ops.cpp" in command]
    assert "-march" not in main
    assert {f"-DTW_HAVE_{name.upper()}" for name in levels} <= set(main.split())


def test_an_assembler_older_than_its_compiler_costs_only_what_it_lacks(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    compiler(known='*armv8-a*|*"+dotprod "*')
    assert [*build.instruction_sets(os.environ["CXX"])] == ["dotprod", "neon", "portable"]


def test_the_least_instruction_set_is_linked_first(compiler: Compiler) -> None:
    """Of an inline function in several objects the linker keeps the first, which has to run everywhere."""
    log = compiler()
    build.library()
    (linked,) = [command for command in commands(log) if "-shared" in command]
    objects = [Path(word).stem for word in linked.split() if word.endswith(".o")]
    assert objects[:2] == ["ops", "portable"]
    assert objects[2:] == [*build.architecture()][::-1]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"no-such-compiler.*apt-get install g\+\+`, or set CXX"):
        build.library()
    assert not list(tmp_path.iterdir())


def test_a_library_in_a_folder_that_others_can_write_to_is_not_loaded(compiler: Compiler) -> None:
    """A neighbour knows the name of the library, which depends on what is installed alone."""
    compiler()
    planted = build.library()
    planted.parent.chmod(0o777)
    with pytest.raises(BuildError, match="others may write to it"):
        build.library()
    assert "others may write to it" in str(build.attempt())


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            "echo 'a.cpp: In function f' >&2; echo 'a.cpp:7:3: error: no such thing' >&2; echo 'error: 2' >&2; exit 1",
            "the C\\+\\+ compiler failed: a.cpp:7:3: error: no such thing$",
        ),
        ("echo killed >&2; exit 137", "the C\\+\\+ compiler failed: killed$"),
        ("exit 1", "the C\\+\\+ compiler failed: no message$"),
        (
            "case $* in *-shared*) echo 'ld: error: no space' >&2; exit 1;; esac",
            "failed: ld: error: no space$",
        ),
    ],
)
def test_a_compiler_that_fails(compiler: Compiler, work: str, message: str) -> None:
    compiler(work=work)
    with pytest.raises(BuildError, match=message):
        build.library()
    folder = Path(os.environ["TORCHWRIGHT_CACHE"]) / "kernels"
    assert {file.suffix for file in folder.iterdir()} == {"", ".failed"}


def test_a_failure_is_told_again_for_a_while(compiler: Compiler) -> None:
    log = compiler(work="echo 'a.cpp:7:3: error: no header' >&2; exit 1")
    assert not build.ready()
    for _ in range(3):
        with pytest.raises(BuildError, match="no header"):
            build.library()
    once = commands(log)
    assert once
    assert build.ready()  # it cannot be
    (kept,) = Path(os.environ["TORCHWRIGHT_CACHE"]).glob("kernels/*.failed")
    long_ago = time.time() - build.TOLD_AGAIN - 1
    os.utime(kept, (long_ago, long_ago))
    with pytest.raises(BuildError, match="no header"):
        build.library()
    assert len(commands(log)) > len(once)
    build.forget()
    assert not build.ready()


def test_an_interrupted_build_leaves_nothing(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder, none of the compilers' own temporary files, and none of the processes that they started."""
    notes = tmp_path / "notes"
    notes.mkdir()
    compiler(work=f'sleep 60 & note="$! $(mktemp)"; echo "$note" > "{notes}/$$"; wait')

    def interrupted(process: subprocess.Popen[str]) -> None:
        wait_for(lambda: any(file.read_text().endswith("\n") for file in notes.iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build.library()
    for note in notes.iterdir():
        if note.read_text():
            child, temporary = note.read_text().split()
            wait_for(lambda child=child: not alive(int(child)))
            assert not Path(temporary).exists()
    assert [file.name for file in (tmp_path / "cache" / "kernels").iterdir()] == ["lock"]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_a_killed_build_left_is_removed_by_the_next(compiler: Compiler, tmp_path: Path) -> None:
    compiler()
    left = tmp_path / "cache" / "kernels" / f"{build.SCRATCH}0a1b2c3d"
    left.mkdir(parents=True)
    (left / "amx.o").touch()
    path = build.library()
    assert sorted(file.name for file in path.parent.iterdir()) == ["lock", path.name]


@pytest.mark.parametrize("when", ["*", "*-shared*", "*--version*"])
def test_a_compiler_that_hangs(compiler: Compiler, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(work=f"case $* in {when}) exec sleep 20;; esac")
    if "version" in when:
        script = Path(os.environ["CXX"])
        script.write_text("#!/bin/sh\nexec sleep 20\n")
    monkeypatch.setattr(build, "SECONDS", 0.5)
    with pytest.raises(BuildError, match=r"took more than 0\.5 s"):
        build.library()


def test_a_cache_that_cannot_be_written(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "file"))
    assert "Not a directory" in str(build.attempt())


def test_what_cannot_be_loaded_is_a_reason(compiler: Compiler) -> None:
    compiler()
    assert "file too short" in str(build.attempt())  # the fake compiler's library is empty


def test_no_compiler_is_a_reason(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "set CXX" in str(build.attempt())


def test_the_reference_serves_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load_fault", lambda: "no C++ compiler was found")
    monkeypatch.setattr(ops, "native", None)
    assert ops.fault("cpu") is not None
    torch.manual_seed(0)
    x, weight = torch.randn(3, 96), torch.randn(96)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(ops.add_rms_norm(x, x, weight, 1e-5)[0], reference.add_rms_norm(x, x, weight, 1e-5)[0])
    assert torch.equal(ops.gated(x, "silu"), reference.gated(x, "silu"))
    for scheme in MADE.values():
        layer = PackedLinear(torch.randn(70, 96), None, scheme)
        assert torch.equal(layer(x), layer.reference(x))
    k, v = torch.zeros(2, 2, 16, 16), torch.zeros(2, 2, 16, 16)
    still, at = torch.empty(3, 0), torch.arange(3)
    q = ops.rope_store(torch.randn(3, 96), still, still, at, at, k, v, None, None, 2, 2, None, None, 1e-5)
    table, starts, contexts = (torch.tensor(values).int() for values in ([[0]], [0, 3], [3]))
    out = ops.paged_attention(q, k, v, None, None, table, starts, contexts, 0.25, 0, 0.0)
    assert out.shape == (3, 2, 16)
    assert k[0, :, :, :3].any()


@pytest.mark.slow
def test_an_unknown_instruction_set_is_refused(native: object) -> None:
    """With the list; a known one is then taken."""
    script = """
import os, torch
from torchwright.hardware.kernels.cpu import build; from torchwright.hardware.kernels import ops
assert build.load_fault() is None
try:
    ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5)
except ValueError as error:
    print(str(error).splitlines()[0])
os.environ["TORCHWRIGHT_ISA"] = "portable"
ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5)
print(ops.native.isa())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TORCHWRIGHT_ISA": "avx1024"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    names = ", ".join(ops.native.isas())
    assert done.stdout.splitlines() == [
        f"TORCHWRIGHT_ISA=avx1024 cannot run here; this machine has: {names}",
        "portable",
    ]


@pytest.mark.slow  # the library is disassembled
@pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("objdump") is None, reason="no objdump, or no x86-64"
)
def test_only_an_instruction_sets_own_code_has_its_instructions(native: object) -> None:
    """All else runs on processors without them, inline functions of the standard library too."""
    found = {"avx512": 0, "avx2": 0, "portable": 0, "shared": 0}
    wide = {
        "avx512": r"$^",
        "avx2": r"zmm|[xy]mm(?:1[6-9]|2\d|3[01])|\{%k[1-7]\}",
        "portable": r"[yz]mm|%k[1-7]",
    }
    wide["shared"] = wide["portable"]
    command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", str(build.library())]
    owner = function = "shared"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        for line in shown.stdout:
            if line.endswith(">:\n"):
                named = re.search(r"\b(portable|avx2|avx512|amx)(?:_vnni)?::", line)
                name = named[1] if named else "shared"
                owner = "avx512" if name == "amx" else name
                function = line
            elif "mm" in line or "%k" in line:
                assert not re.search(wide[owner], line), function + line
                found[owner] += 1
    assert all(found.values()), found


@pytest.mark.slow
def test_a_real_build(native: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an empty cache, portable only, and used in a process of its own."""
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "architecture", dict)
    path = build.library()
    script = f"""
import torch
torch.ops.load_library({str(path)!r})
print(torch.ops.torchwright.isas(), torch.ops.torchwright.rms_norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[0] == "['portable'] [[1.0, 1.0, 1.0, 1.0]]", done.stderr


def test_a_library_built_ahead_needs_no_compiler(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = compiler()
    image = tmp_path / "image"
    ahead = build.build_ahead(image)
    assert {line.split("-DTW_ISA=")[1].split()[0] for line in commands(log) if "-DTW_ISA=" in line} == {
        "amx",
        "avx512",
        "avx2_vnni",
        "avx2",
        "portable",
    }
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHWRIGHT_KERNELS", str(image))
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "empty"))
    assert build.library() == ahead
    assert build.ready()
    assert not (tmp_path / "empty").exists()


def test_a_library_built_ahead_for_another_torch_is_named_and_not_taken(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler()
    build.build_ahead(tmp_path / "image")
    monkeypatch.setenv("TORCHWRIGHT_KERNELS", str(tmp_path / "image"))
    monkeypatch.setattr(torch, "__version__", "9.9")
    with pytest.raises(BuildError, match=r"torch 9\.9.*found: torchwright-ahead-"):
        build.library()
    monkeypatch.setenv("TORCHWRIGHT_KERNELS", str(tmp_path / "open"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(BuildError, match="others may write"):
        build.library()


@pytest.fixture
def wheel(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """An installation from a wheel that has a library for this torch, and an empty cache; counts later commands."""
    log = compiler()
    build.build_ahead(tmp_path / "prebuilt")
    compiled = len(commands(log))
    monkeypatch.setattr(build, "PACKAGED", tmp_path / "prebuilt")
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "empty"))
    return lambda: len(commands(log)) - compiled


def test_a_wheels_own_library_is_taken_before_a_compiler_is_asked(
    wheel: Callable[[], int], tmp_path: Path
) -> None:
    assert build.ready()
    assert build.library().parent == tmp_path / "prebuilt"
    assert wheel() == 0


def test_with_a_torch_that_a_wheel_has_no_library_for_the_sources_are_compiled(
    wheel: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert not build.ready()
    assert build.library().is_relative_to(tmp_path / "empty")
    assert wheel() > 0


def test_builds_of_one_torch_for_cards_and_for_cpus_share_a_library() -> None:
    name = build.name_ahead("9.9.0+cpu")
    assert build.name_ahead("9.9.0+cu130") == name
    assert build.name_ahead("9.9.1") != name
