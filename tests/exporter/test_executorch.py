"""ExecuTorch: every number of rows that was asked for, and language models that continue a text as eager mode does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from export_models import Drowned, small
from torch import nn

from torchwright.core.errors import RefusedTechnique
from torchwright.exporter.export import export
from torchwright.exporter.subject import make_subject
from torchwright.exporter.targets.executorch.target import MODEL, ExecuTorch, version_fault
from torchwright.exporter.verification.process import COMPLAINT
from torchwright.exporter.verification.reference import EXAMPLE, calls_of
from torchwright.optimization.engines.dispatch.input_capabilities import tensors_of
from torchwright.workloads.accuracy import relative_error
from torchwright.workloads.detect import from_target
from torchwright.workloads.module import ModuleWorkload

TOKENS = 40


@pytest.fixture
def _installed() -> None:
    if reason := ExecuTorch.unavailable():
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
def test_a_convolution_takes_the_largest_number_of_rows(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1)
    )
    made = make_subject(ModuleWorkload(model.eval(), (torch.randn(2, 3, 16, 16),)), most=16)
    written = ExecuTorch.write(made, "fp32", tmp_path)
    # At least the largest call's input and output lie there; values that live at once lie side by side.
    whole = written.planned["forward, all of it"]
    assert whole >= 4 * (16 * 3 * 16 * 16 + 16 * 4)
    assert max(size for name, size in written.planned.items() if "all of it" not in name) <= whole
    run = ExecuTorch.open(tmp_path, made.graph.spec, 1)
    for rows in (1, 2, 16):
        (x,) = torch.randn(rows, 3, 16, 16).split(rows)
        with torch.no_grad():
            assert relative_error([model(x)], run([x])).value < 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
def test_a_gru_takes_other_numbers_of_rows(tmp_path: Path) -> None:
    """Its gates are split from tensors whose first size is free, which ExecuTorch's own checks had frozen."""

    class Outputs(nn.GRU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(x)[0]

    model, x = Outputs(8, 16, batch_first=True).eval(), torch.randn(4, 3, 8)
    made = export(model, x, to="executorch", max_batch=9, out=tmp_path / "out")
    assert made.report["verdict"] == "holds"
    right = [(row["sizes"], row["outcome"]) for row in made.report["calls"]]
    assert [list(sizes.values()) for sizes, outcome in right if outcome == "right"][:3] == [[4], [1], [9]]
    with pytest.raises(RefusedTechnique, match=r"8 bits change nothing.*aten\.gru"):  # it was float32 before
        export(model, x, to="executorch", precision="int8", out=tmp_path / "int8")


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(("precision", "allowed"), [("fp32", 1e-4), ("8da4w", 0.3)])
def test_the_bundled_model_continues_through_its_cache(
    precision: str, allowed: float, tmp_path: Path
) -> None:
    made = make_subject(from_target(None), most=4, context=64)
    ExecuTorch.write(made, precision, tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    (example,) = [call for call in calls_of(made) if call.name == EXAMPLE]
    run = ExecuTorch.open(tmp_path, made.graph.spec, 1)
    assert relative_error(example.outputs, run(example.tensors)).value < allowed
    from executorch.runtime import Runtime  # pyright: ignore[reportMissingImports]

    program = Runtime.get().load_program(tmp_path / MODEL)
    asked = {name: program.load_method(name).execute([])[0] for name in program.method_names - {"forward"}}
    assert asked["use_kv_cache"] is True
    assert asked["get_max_context_len"] == 64
    assert asked["get_eos_ids"] == 1
    if precision != "fp32":
        return
    forward = program.load_method("forward")
    prompt = tensors_of(made.case)[0][:1, :8]
    ids, fed = prompt, prompt
    for _ in range(TOKENS):
        logits = forward.execute([fed, torch.tensor([ids.shape[1] - fed.shape[1]])])[0]
        fed = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, fed], dim=1)
    assert made.language is not None
    with torch.no_grad():
        wanted = made.language.generate(prompt, do_sample=False, max_new_tokens=TOKENS)  # type: ignore[operator]
    assert ids.tolist() == wanted.tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
def test_the_layer_at_which_8_bits_do_not_suffice_is_named(tmp_path: Path) -> None:
    made = export(
        Drowned().eval(), torch.randn(8, 16), to="executorch", precision="int8", out=tmp_path / "out"
    )
    assert made.report["verdict"] == "differs"
    assert any("part at last, aten.linear (" in finding for finding in made.report["findings"])
    sound = make_subject(ModuleWorkload(*small()), most=4)
    (tmp_path / "sound").mkdir()
    assert ExecuTorch.write(sound, "int8", tmp_path / "sound").parting == ""


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
def test_positions_stay_whole_beside_8_bits(tmp_path: Path) -> None:
    """The quantizer makes float32 of every number beside a tensor, and nothing is indexed by float32."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = torch.arange(4) + 2
            return self.inner(x[:, places] + 0.5)

    made = export(
        Shifted().eval(), torch.randn(3, 8, 16), to="executorch", precision="int8", out=tmp_path / "out"
    )
    assert made.report["verdict"] == "holds"


@pytest.mark.usefixtures("_installed")
def test_what_has_no_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedTechnique, match="a cache is a language model's"):
        export(*small(), to="executorch", max_context=64, out=tmp_path / "out")
    with pytest.raises(RefusedTechnique, match="the model takes 1,024 tokens"):
        export("bundled", to="executorch", max_context=4096, out=tmp_path / "out")
    with pytest.raises(RefusedTechnique, match="not written as int8 with its cache"):
        export("bundled", to="executorch", precision="int8", out=tmp_path / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("torch_version", "executorch", "said"),
    [
        ("2.12.1", "1.4.1", r"no release .* torch 2\.12, .*pip install 'torchwright\[executorch\]'"),
        (
            "2.13.0",
            "1.5.1",
            r"executorch 1\.5\.1 is not built for torch 2\.13: pip install 'executorch==1\.4\.\*'",
        ),
        ("2.13.0", None, r"executorch cannot be imported: pip install 'executorch==1\.4\.\*'"),
        ("2.14.0+cpu", "1.5.0", None),
    ],
)
def test_versions_that_do_not_go_together_are_refused(
    torch_version: str, executorch: str | None, said: str | None
) -> None:
    reason = version_fault(torch_version, executorch)
    assert reason is None if said is None else re.match(said, reason or "")


@pytest.mark.slow
@pytest.mark.usefixtures("_installed")
def test_an_operator_without_a_kernel_is_named_before_the_package_is_written(tmp_path: Path) -> None:
    """The runtime says "error 0x14" when it loads such a package."""

    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sort(x)[0]

    model = nn.Sequential(nn.Identity(), Sorted()).eval()
    with pytest.raises(RefusedTechnique, match=r"aten\.sort in 1 \(.*no kernel for aten::sort"):
        export(model, torch.randn(4, 3), to="executorch", out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_line_of_a_runtimes_log_that_says_what_is_wrong_is_found() -> None:
    log = (
        "[cpuinfo_utils.cpp:87] Failed to open midr file\n[method.cpp:12] begins\n"
        "[op_add.cpp:40] In function operator(), Check failed (a == b): sizes\n[method.cpp:99] it failed\n"
    )
    assert COMPLAINT.findall(log)[0] == "In function operator(), Check failed (a == b): sizes"
