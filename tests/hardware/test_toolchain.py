"""The reason why generated C++ cannot be compiled here."""

from __future__ import annotations

from pathlib import Path

from torchwright.hardware.measure import toolchain


def test_the_compilers_error_is_the_reason_and_not_its_last_line(tmp_path: Path) -> None:
    """GCC's last line on a full disk says "compilation terminated." alone."""
    compiler = tmp_path / "full-g++"
    said = ("fatal error: writing to a.s: No space left on device", "compilation terminated.")
    compiler.write_text("#!/bin/sh\n" + "".join(f"echo '{line}' >&2\n" for line in said) + "exit 1\n")
    compiler.chmod(0o755)
    fault = toolchain._cpu_fault.__wrapped__(str(compiler))  # pyright: ignore[reportPrivateUsage]
    assert "No space left on device" in str(fault)
