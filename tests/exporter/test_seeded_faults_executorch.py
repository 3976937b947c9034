"""Seeded faults in ExecuTorch's programs: the verifier names each, and its layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from export_faults import (
    FROZEN,
    Fault,
    Made,
    bytes_of,
    every,
    exchange,
    made_or_skipped,
    named,
    negated,
    weight,
)

from torchwright.core.json_file import read_json
from torchwright.exporter.subject import Subject, make_subject
from torchwright.exporter.targets.executorch.read import (  # pyright: ignore[reportPrivateUsage]
    LAYERS,
    _digest,
    contents,
)
from torchwright.exporter.targets.executorch.target import MODEL, ExecuTorch
from torchwright.workloads.module import ModuleWorkload

pytestmark = pytest.mark.slow

GELU, SIGMOID = "XNNGelu", "XNNSigmoid"


def of(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """A tensor of the model's, which is in the file as it is."""

    def fault(folder: Path, subject: Subject) -> None:
        before = weight(subject, name)
        exchange(folder / MODEL, before, change(before))

    return fault


def constant(
    layer: str, role: str, dtype: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor]
) -> Fault:
    """A constant of a layer's, found by its digest."""

    def fault(folder: Path, subject: Subject) -> None:
        from executorch.exir._serialize._program import (  # pyright: ignore[reportMissingImports]
            deserialize_pte_binary,
        )

        (digest,) = (
            value
            for key, value in contents(folder / MODEL).items()
            if key.startswith(f"{layer}, ") and key.endswith(f": {role}")
        )
        content = (folder / MODEL).read_bytes()
        buffers = deserialize_pte_binary(content).named_data.buffers
        (found,) = {bytes(one) for one in buffers if _digest(one) == digest}
        after = bytes_of(change(torch.frombuffer(bytearray(found), dtype=dtype)))
        assert content.count(found) == 1
        (folder / MODEL).write_bytes(content.replace(found, after))

    return fault


def tried(before: bytes, after: bytes, right: Callable[[dict[str, Any], dict[str, Any]], bool]) -> Fault:
    """Bytes changed in the one place where what is read of the program is then `right`."""

    def fault(folder: Path, subject: Subject) -> None:
        whole, was = (folder / MODEL).read_bytes(), contents(folder / MODEL)
        start = -1
        while (start := whole.find(before, start + 1)) >= 0:
            (folder / MODEL).write_bytes(whole[:start] + after + whole[start + len(before) :])
            try:
                if right(was, contents(folder / MODEL)):
                    return
            except Exception:  # it is no program any more
                continue
        raise AssertionError("no such place")

    return fault


def kind_of(name: str) -> bytes:
    from executorch.backends.xnnpack import serialization  # pyright: ignore[reportMissingImports]

    schema = Path(serialization.__path__[0], "schema.fbs").read_text()
    kinds = schema.partition("union XNodeUnion {")[2].partition("}")[0].replace("_XNNNode1x1", "")
    names = [line.split(":")[0].strip() for line in kinds.split(",") if line.strip()]
    return bytes([names.index(name) + 1])


def is_replaced(was: dict[str, Any], now: dict[str, Any]) -> bool:
    gelus = [key for key, value in was.items() if value == GELU]
    changed = [key for key in was if was[key] != now.get(key) and not key.endswith("anything else")]
    return changed == [gelus[1]] and now[gelus[1]] == SIGMOID


def replaced(folder: Path, subject: Subject) -> None:
    tried(kind_of(GELU), kind_of(SIGMOID), is_replaced)(folder, subject)


def frozen(folder: Path, subject: Subject) -> None:
    key = "the model itself, input 0: sizes"
    rows, *rest = contents(folder / MODEL)[key]

    def sizes(first: int) -> bytes:
        return bytes_of(torch.tensor([3, first, *rest], dtype=torch.int32))

    tried(sizes(rows), sizes(1), lambda was, now: now[key] == [1, *rest])(folder, subject)


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor / 2


FAULTS: Mapping[str, Mapping[str, Mapping[str, tuple[Fault, str]]]] = {
    "executorch": {
        "fp32": {
            "flipped": (of("blocks.1.up.weight", negated), "blocks.1.up"),
            "halved": (of("blocks.0.norm.weight", halved), "blocks.0.norm"),
            "replaced": (replaced, "blocks.1"),
            "stale": (constant("conv", "bias", torch.float32, torch.zeros_like), "conv"),
            "frozen": (frozen, FROZEN),
        },
        "int8": {
            "flipped": (constant("blocks.1.up", "weight", torch.int8, negated), "blocks.1.up"),
            "halved": (constant("blocks.0.down", "weight, scales", torch.float32, halved), "blocks.0.down"),
            "replaced": (replaced, "blocks.1"),
            "stale": (constant("blocks.1.down", "bias", torch.int32, torch.zeros_like), "blocks.1.down"),
            "frozen": (frozen, FROZEN),
        },
    }
}


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    to, precision = request.param
    return made_or_skipped(to, precision, tmp_path_factory.mktemp("made") / "made")


@pytest.mark.parametrize(("made", "spoil", "wanted"), every(FAULTS), indirect=["made"], scope="module")
def test_a_fault_is_named(made: Made, spoil: Fault, wanted: str, tmp_path: Path) -> None:
    findings = made.findings(spoil, tmp_path / "spoiled")
    if wanted == FROZEN:
        assert any(finding.startswith(FROZEN) for finding in findings), findings
    else:
        assert named(findings) == wanted, findings


@pytest.mark.parametrize("made", [("executorch", "fp32")], indirect=True)
def test_every_operator_has_its_layer(made: Made) -> None:
    package = made.folder / "package"
    kinds = {
        key.partition(",")[0]: value for key, value in contents(package / MODEL).items() if ": kind" in key
    }
    assert kinds["blocks.0.norm"] == "aten::native_layer_norm.out"
    assert kinds["blocks.1.down"] == "XNNFullyConnected"
    assert kinds["conv"] == "XNNConv2d"
    modules = {name for name, _ in made.subject.original.named_modules()} | {"the model itself"}
    assert set(read_json(package / LAYERS)["handles"].values()) <= modules
    assert ExecuTorch.settings(package) == contents(package / MODEL)


def test_what_is_no_number_is_read_all_the_same(tmp_path: Path) -> None:
    if reason := ExecuTorch.unavailable():
        pytest.skip(reason)
    # An activation without an upper bound, within its convolution.
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    made = make_subject(ModuleWorkload(model.eval(), (torch.randn(2, 3, 8, 8),)), most=4)
    ExecuTorch.write(made, "fp32", tmp_path)
    bounds = [value for key, value in contents(tmp_path / MODEL).items() if key.endswith("output_max")]
    assert "inf" in [str(bound).lstrip("+") for bound in bounds]
