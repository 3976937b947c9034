"""Faults seeded in real packages: a package is made once, copied, spoiled and verified, its processes played here."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import small

from in_process import InProcessRunner
from torchwright.exporter.base import exports
from torchwright.exporter.export import _write
from torchwright.exporter.package import PACKAGE, Export, empty_export
from torchwright.exporter.subject import Subject, make_subject
from torchwright.exporter.verification import verify as verifier
from torchwright.exporter.verification.locate import locate
from torchwright.workloads.module import ModuleWorkload

Fault = Callable[[Path, Subject], None]
"""Spoils a package's folder, knowing what it was made from."""
FROZEN = "its sizes are frozen: only those of the smallest call"


class Made:
    """A package that is sound, and what it is of."""

    def __init__(self, to: str, precision: str, folder: Path, subject: Subject | None = None) -> None:
        torch.manual_seed(0)
        self.folder, self.target = folder, exports.get(to)
        self.subject = subject or make_subject(ModuleWorkload(*small()), most=8, fixed=self.target.fixed)
        self.export: Export = _write(empty_export(folder), self.subject, self.target, precision, _silent)

    def findings(self, fault: Fault | None, folder: Path) -> list[str]:
        """What the verifier says of a copy with the fault; of the package itself, without one."""
        if fault is None:
            folder = self.folder
        else:
            shutil.copytree(self.folder, folder)
            fault(folder / PACKAGE, self.subject)
        changed = [] if fault is None else ["package"]
        report = verifier.verify(
            folder,
            self.export,
            changed,
            _silent,
            as_written=fault is None,
            start=InProcessRunner,  # pyright: ignore[reportArgumentType]
            turns=2,  # of one there is no interval
        )
        assert (report["verdict"] == "holds") == (fault is None), report
        return report["findings"]

    def parting(self, fault: Fault, folder: Path) -> str:
        """The module that is named of a copy with the fault, without what the verifier tries besides."""
        shutil.copytree(self.folder, folder)
        fault(folder / PACKAGE, self.subject)
        (scratch := folder / "scratch").mkdir()
        allowed = self.target.tolerances[self.export.precision]
        found = locate(
            folder, InProcessRunner(folder, scratch).ask, scratch, allowed, named=self.target.named
        )
        return "" if found is None else str(found)


def every(tables: Mapping[str, Mapping[str, Mapping[str, tuple[Fault, str]]]]) -> list[Any]:
    """Target → precision → name → (fault, what is named), as parameters ((target, precision), fault, named)."""
    packages = [((to, precision), tables[to][precision]) for to in tables for precision in tables[to]]
    return [  # a package is made again for what is no longer the same object
        pytest.param(package, fault, wanted, id=f"{'-'.join(package)}-{name}")
        for package, faults in packages
        for name, (fault, wanted) in faults.items()
    ]


def made_or_skipped(to: str, precision: str, folder: Path, subject: Subject | None = None) -> Made:
    if reason := exports.get(to).unavailable() or exports.get(to).unwritable():
        pytest.skip(reason)
    return Made(to, precision, folder, subject)


def weight(subject: Subject, name: str) -> torch.Tensor:
    return subject.original.state_dict()[name]


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """With the sign of the first quarter of its numbers turned."""
    changed = tensor.clone().flatten()
    changed[: len(changed) // 4] *= -1
    return changed.view(tensor.shape)


def exchange(file: Path, before: torch.Tensor, after: torch.Tensor) -> None:
    """Put the bytes of a tensor in place of another's, as they are or with its rows and columns in turn."""
    content = file.read_bytes()
    for old, new in ((before, after), *(((before.T, after.T),) if before.ndim == 2 else ())):
        if content.count(bytes_of(old)) == 1:
            file.write_bytes(content.replace(bytes_of(old), bytes_of(new)))
            return
    raise AssertionError(f"the tensor's bytes are not once in {file}")


def unshifted(folder: Path, subject: Subject) -> None:
    """The mean of a batch norm that is folded into the convolution as it was before training: none."""
    found = next(file for file in folder.rglob("*") if file.suffix in (".onnx", ".bin", ".pte"))
    scale = weight(subject, "norm.weight") / (weight(subject, "norm.running_var") + 1e-5).sqrt()
    mean = weight(subject, "norm.running_mean")
    before = (weight(subject, "conv.bias") - mean) * scale + weight(subject, "norm.bias")
    content, close = found.read_bytes(), None
    for start in range(len(content) - 11):
        value = torch.frombuffer(bytearray(content[start : start + 12]), dtype=torch.float32)
        if torch.allclose(value, before, rtol=1e-5, atol=1e-6):
            assert close is None
            close = value
    assert close is not None
    exchange(found, close, before + mean * scale)


def exchange_in_archive(file: Path, before: torch.Tensor, after: torch.Tensor) -> None:
    """The same of the one member of an archive that has them."""
    with zipfile.ZipFile(file) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    assert sum(content.count(bytes_of(before)) for _, content in members) == 1
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for info, content in members:
            archive.writestr(info, content.replace(bytes_of(before), bytes_of(after)))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def named(findings: Sequence[str]) -> str:
    """The module that the one finding on where outputs part names."""
    (parting,) = [finding for finding in findings if "part at" in finding]
    return parting.partition("part at ")[2].split(",")[0].split(":")[0]


def _silent(text: str) -> None: ...
