"""Regional compilation, allocator, and the techniques that need a CUDA device."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import typing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchwright.core.errors import RefusedTechnique, TorchwrightError, UnknownName
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices import allocator as malloc
from torchwright.hardware.devices import get_device
from torchwright.optimization.engines.eager import Eager
from torchwright.optimization.engines.jit import Jit
from torchwright.optimization.techniques import Target
from torchwright.optimization.techniques.allocator import Allocator
from torchwright.optimization.techniques.base import Settings
from torchwright.optimization.techniques.cuda_graphs import CudaGraphs
from torchwright.optimization.techniques.dtype import Dtype
from torchwright.optimization.techniques.max_autotune import MaxAutotune
from torchwright.optimization.techniques.regional import Regional
from torchwright.optimization.techniques.shared.blocks import repeated_blocks
from torchwright.optimization.techniques.shared.wrapping import named
from torchwright.optimization.techniques.sparse24 import Sparse24, int8_fault, prune24
from torchwright.optimization.techniques.torchao import TorchAO
from torchwright.workloads.base import Case
from torchwright.workloads.module import ModuleWorkload

CPU = DeviceFacts(kind="cpu", name="test")
CUDA = DeviceFacts(kind="cuda", name="test")


def make(model: nn.Module, *inputs: torch.Tensor, device: DeviceFacts = CPU) -> Target:
    workload = ModuleWorkload(model, inputs)
    workload.device = next(iter(inputs), torch.empty(0)).device.type
    return Target(model=workload.build(), workload=workload, device=device, properties={"eager"})


def blocks(count: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 8), nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)]), nn.Linear(8, 2)
    )


class Residual(nn.Module):
    """A block as people write them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).relu()


class Pair(nn.Sequential):
    """A block that is a class of torch.nn but for its name."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Linear(inputs, outputs), nn.ReLU())


class Steps(nn.Module):
    """Blocks until the answer is large."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if x.abs().amax() > 1e6:
                break
        return x


class TestRegional:
    def test_sets_the_runner_up(self) -> None:
        target = make(blocks(4), torch.randn(1, 4))
        assert Regional().refuse(target) is None
        Regional().apply(target)
        assert (target.settings.engine, target.settings.regional) == ("jit", True)
        assert target.settings.inductor == {"freezing": False}
        coverage = target.coverage[0]
        assert (coverage.changed, coverage.total) == (4, 6)
        assert coverage.kernel == "torch.compile of 4 Linear"

    def test_is_not_tried_on_what_compiles_ahead_of_time(self) -> None:
        target = make(blocks(4), torch.randn(1, 4))
        assert list(Regional().variants(target)) == [Regional()]
        target.properties.add("exportable")
        assert list(Regional().variants(target)) == []

    @pytest.mark.parametrize("kind", [nn.Linear, Residual, Pair])
    def test_one_graph_is_compiled_for_all_blocks(
        self, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Classes of torch.nn as well, around which control flow depends on the data."""
        monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="eager"))
        torch._dynamo.reset()
        counts = torch._dynamo.utils.counters  # pyright: ignore[reportAttributeAccessIssue]
        counts.clear()
        model = Steps(nn.ModuleList([kind(8, 8) for _ in range(6)])).eval().requires_grad_(False)
        x = torch.randn(2, 8)
        with torch.inference_mode():
            wanted = model(x)
            run = Jit(model, Settings(engine="jit", regional=True))
            assert torch.equal(run(Case("forward", (x,))), wanted)
        assert counts["stats"]["unique_graphs"] in (1, 2)  # the first block's input may be laid out otherwise
        run.check()

    def test_refuses_where_little_repeats(self) -> None:
        assert "has 2;" in (Regional().refuse(make(blocks(2), torch.randn(1, 4))) or "")
        assert "has 0;" in (Regional().refuse(make(nn.Linear(4, 4), torch.randn(1, 4))) or "")

    def test_blocks_of_several_kinds_do_not_count(self) -> None:
        mixed = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
        assert repeated_blocks(mixed) == []
        assert repeated_blocks(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU())) == []
        assert len(repeated_blocks(nn.ModuleDict({"a": blocks(5), "b": blocks(3)}))) == 5


class TestAllocator:
    def test_retain_keeps_freed_memory(self) -> None:
        """In a process of its own, since there is no way back: a large block that was freed stays resident."""
        code = """
import ctypes, os, sys
from torchwright.hardware.devices.allocator import apply_allocator
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
apply_allocator(None if sys.argv[1] == "default" else sys.argv[1])
size, before = 64 << 20, resident()
block = libc.malloc(size); ctypes.memset(block, 1, size); libc.free(block)
print(resident() - before)
"""
        kept = {}
        for kind in ("default", "retain"):
            result = subprocess.run(
                [sys.executable, "-c", code, kind], capture_output=True, text=True, check=True
            )
            kept[kind] = int(result.stdout)
        assert kept["default"] < 8 << 20
        assert kept["retain"] >= 60 << 20

    def test_only_retain_is_tried_unasked(self) -> None:
        target = make(nn.Linear(4, 4), torch.randn(1, 4))
        assert list(Allocator().variants(target)) == [Allocator()]
        assert Allocator().environment() == {}
        Allocator().apply(target)
        assert target.settings.allocator == "retain"

    def test_library_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(malloc, "FOLDERS", ())
        monkeypatch.setattr(malloc.ctypes.util, "find_library", lambda name: None)
        reason = Allocator(kind="tcmalloc").refuse(make(nn.Linear(4, 4), torch.randn(1, 4)))
        assert reason == "libtcmalloc is not installed; on Debian or Ubuntu: apt install libtcmalloc-minimal4"
        assert Allocator(kind="tcmalloc").environment() == {}

    def test_library_that_is_there(self, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
        (tmp_path / "libjemalloc.so.2").touch()
        monkeypatch.setattr(malloc, "FOLDERS", (str(tmp_path),))
        technique = Allocator(kind="jemalloc")
        assert technique.refuse(make(nn.Linear(4, 4), torch.randn(1, 4))) is None
        assert technique.environment() == {"LD_PRELOAD": str(tmp_path / "libjemalloc.so.2")}

    def test_one_that_was_not_preloaded_is_not_taken_for_granted(self) -> None:
        """An artifact that is loaded cannot bring an allocator: the process must have been started with it."""
        code = (
            "from torchwright.hardware.devices.allocator import apply_allocator; apply_allocator('mimalloc')"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "this process was started without mimalloc" in result.stderr

    def test_one_that_was_preloaded_is_seen(self, tmp_path: Path) -> None:
        """A library of that name, which replaces nothing."""
        library = tmp_path / "libmimalloc.so.2"
        (tmp_path / "empty.c").write_text("int torchwright_nothing;")
        compiler = ["gcc", "-shared", "-o", str(library), str(tmp_path / "empty.c")]
        subprocess.run(compiler, check=True)
        code = (
            "from torchwright.hardware.devices.allocator import apply_allocator; apply_allocator('mimalloc')"
        )
        environment = os.environ | {"LD_PRELOAD": str(library)}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)

    @pytest.mark.parametrize(
        ("said", "reason"),
        [
            ("always [madvise] never", None),
            ("[always] madvise never", "huge pages unasked"),
            ("always madvise [never]", "as root: echo madvise > "),
            (None, "no transparent huge pages"),
        ],
    )
    def test_huge_pages_where_the_kernel_gives_them_if_asked(
        self, tmp_path: Path, said: str | None, reason: str | None
    ) -> None:
        setting = tmp_path / "enabled"
        if said is not None:
            setting.write_text(said)
        found = malloc.huge_pages_fault(setting)
        assert found is None if reason is None else reason in (found or "")
        refused = Allocator(kind="huge_pages").refuse(make(nn.Linear(4, 4), torch.randn(1, 4)))
        assert refused == malloc.huge_pages_fault()

    @pytest.mark.slow
    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="transparent huge pages are Linux's")
    @pytest.mark.skipif(malloc.huge_pages_fault() is not None, reason=str(malloc.huge_pages_fault()))
    def test_huge_pages_are_had_from_the_start_or_not_at_all(self) -> None:
        """By the kernel's own count, of a tensor of 64 MB; a variable that Python sets is not counted on."""
        code = """
import os, sys
if sys.argv[1] == "late":
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
import torch
from torchwright.hardware.devices.allocator import is_there
x = torch.ones(16 << 20)
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(is_there("huge_pages"), next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")) >> 10)
"""
        started = Allocator(kind="huge_pages").environment()
        assert started == {"THP_MEM_ALLOC_ENABLE": "1"}
        told = {}
        for how, variables in (("start", started), ("never", {}), ("late", {})):
            result = subprocess.run(
                [sys.executable, "-c", code, how],
                env={name: value for name, value in os.environ.items() if name not in started} | variables,
                capture_output=True,
                text=True,
                check=True,
            )
            told[how] = result.stdout.split()
        assert told["start"][0] == "True"
        assert int(told["start"][1]) >= 60
        assert told["never"] == ["False", "0"]
        assert told["late"][0] == "False"

    def test_off_the_cpu(self) -> None:
        assert "cuda memory" in (
            Allocator().refuse(make(nn.Linear(4, 4), torch.randn(1, 4), device=CUDA)) or ""
        )

    def test_refused_settings_are_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(malloc, "retain_fault", lambda: "another C library")
        with pytest.raises(TorchwrightError, match="another C library"):
            malloc.apply_allocator("retain")
        malloc.apply_allocator(None)


@pytest.mark.parametrize("cls", [CudaGraphs, Sparse24, TorchAO])
def test_cuda_techniques_say_why_not_on_the_cpu(cls: type) -> None:
    assert "CUDA" in (cls.available(CPU) or "") or "CPU" in (cls.available(CPU) or "")


def test_cuda_graphs_run_through_torch_compile() -> None:
    target = make(nn.Linear(4, 4), torch.randn(1, 4), device=CUDA)
    target.settings.engine = "aot"
    CudaGraphs().apply(target)
    assert (target.settings.engine, target.settings.mode) == ("jit", "reduce-overhead")


class TestMaxAutotune:
    def test_each_device_has_its_back_ends(self) -> None:
        for device, backends in ((CPU, "CPP,ATEN"), (CUDA, "TRITON,ATEN")):
            target = make(nn.Linear(4, 4), torch.randn(1, 4), device=device)
            technique, *_ = MaxAutotune().variants(target)
            assert technique.backends == backends
            assert technique.refuse(target) is None
            technique.apply(target)
            assert target.settings.inductor["max_autotune_gemm_backends"] == backends

    def test_others_are_refused(self) -> None:
        target = make(nn.Linear(4, 4), torch.randn(1, 4))
        assert "not for cpu" in (MaxAutotune(backends="TRITON").refuse(target) or "")
        assert MaxAutotune(backends="CPP").refuse(target) is None
        assert "have prologues" in (MaxAutotune(prologue_fusion=False).refuse(target) or "")
        on_card = make(nn.Linear(4, 4), torch.randn(1, 4), device=CUDA)
        MaxAutotune(backends="TRITON", prologue_fusion=False).apply(on_card)
        assert on_card.settings.inductor["prologue_fusion"] is False

    def test_templates_of_others_are_refused_where_they_are_not(self, monkeypatch, tmp_path) -> None:
        """No card is needed to say what is missing."""
        cutlass, ck = MaxAutotune(backends="CUTLASS,TRITON,ATEN"), MaxAutotune(backends="CK,TRITON,ATEN")
        on_card = make(nn.Linear(4, 4), torch.randn(1, 4), device=CUDA)
        assert list(MaxAutotune().variants(on_card))[1] == cutlass
        assert "not for cpu" in (cutlass.refuse(make(nn.Linear(4, 4), torch.randn(1, 4))) or "")
        monkeypatch.setattr(torch.version, "hip", None)
        with torch._inductor.config.patch({"cutlass.cutlass_dir": str(tmp_path)}):
            assert "TORCHINDUCTOR_CUTLASS_DIR" in (cutlass.refuse(on_card) or "")
            (tmp_path / "python" / "cutlass_library").mkdir(parents=True)
            assert cutlass.refuse(on_card) is None
        dsl, gemm = MaxAutotune(backends="CUTEDSL,TRITON,ATEN"), MaxAutotune(backends="NVGEMM,TRITON,ATEN")
        assert list(MaxAutotune().variants(on_card))[2:] == [dsl, gemm]
        assert "for sm_10x" in (dsl.refuse(on_card) or "")
        blackwell = make(nn.Linear(4, 4), torch.randn(1, 4), device=replace(CUDA, isa=("sm_100",)))
        assert "nvidia-cutlass-dsl" in (dsl.refuse(blackwell) or "")
        assert "NVGEMM needs the package" in (gemm.refuse(on_card) or "")
        assert "AMD" in (ck.refuse(on_card) or "")
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert list(MaxAutotune().variants(on_card))[1] == ck
        for other in (cutlass, dsl, gemm):
            assert "AMD have CK" in (other.refuse(blackwell) or "")
        assert "ck4inductor" in (ck.refuse(on_card) or "")


def test_modules_that_keep_float32_are_looked_up() -> None:
    target = make(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(1, 4))
    with pytest.raises(UnknownName, match="unknown layer in dtype:keep_float32 'fc1'"):
        Dtype(keep_float32=("fc1",)).apply(target)
    Dtype(keep_float32=("1",)).apply(target)
    assert [p.dtype for p in target.model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2


@pytest.mark.parametrize("kept", ["0", "2", "3"])
def test_autocast_with_layers_in_float32_casts_the_other_layers_alone(kept: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Conv1d(1, 4, 3))
    x = torch.randn(8, 1, 16)
    target = make(model, x)
    step = Dtype(autocast=True).retreat((kept,))
    assert step is not None
    assert step.refuse(target) is None
    step.apply(target)
    wanted = x
    for name, layer in model.named_children():
        lower = isinstance(layer, nn.Linear | nn.Conv1d) and name != kept
        with torch.autocast("cpu", torch.bfloat16, enabled=lower):
            wanted = layer(wanted).float()
    with torch.no_grad():
        assert torch.equal(target.model(x), wanted)
        program = torch.export.export(target.model, (x,), strict=False)
        torch.testing.assert_close(program.module()(x), wanted)
    assert [name for name, _ in target.model.named_modules()] == [name for name, _ in model.named_modules()]
    [coverage] = target.coverage
    assert (coverage.changed, coverage.total) == (2, 4)
    assert coverage.skipped == {kept: "kept in float32 by option", "1": "no layer"}
    assert not any("forward" in vars(layer) for layer in model)


class Scaled(nn.Linear):
    """Computes with its weights before it multiplies by them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight / self.weight.norm(), self.bias)


class Tied(nn.Module):
    """Its last layer has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.attention, self.conv = nn.MultiheadAttention(16, 2, batch_first=True), nn.Conv1d(16, 16, 3)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
        self.scaled = Scaled(16, 16)
        self.last.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids))
        x = x + self.attention(x, x, x)[0]
        x = self.conv(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(self.scaled(x))


def test_what_autocast_would_cast_in_every_call_is_kept_in_its_type_where_nothing_compiles() -> None:
    model, ids = Tied().eval(), torch.randint(0, 50, (3, 8))
    models, answers = [], []
    for ends in (False, True):
        target = make(copy.deepcopy(model), ids)
        Dtype(autocast=True).apply(target)
        if ends:
            Eager.prepare(target)
        with torch.no_grad():
            answers.append(target.model(ids))
        models.append(target.model)
    assert torch.equal(*answers)
    before, after = ({name: t.dtype for name, t in m.inner.named_parameters()} for m in models)
    assert set(before.values()) == {torch.float32}
    lower = {"conv.weight", "conv.bias", "first.weight", "first.bias"}
    assert {name for name, dtype in after.items() if dtype == torch.bfloat16} == lower


def test_prune_keeps_the_two_largest_of_four() -> None:
    w_NK = torch.tensor([[1.0, -4.0, 3.0, 2.0, 0.0, 0.0, 5.0, 0.1]])
    assert prune24(w_NK).tolist() == [[0, -4, 3, 0, 0, 0, 5, pytest.approx(0.1)]]
    random = torch.randn(32, 64)
    assert bool((prune24(random).reshape(-1, 4).count_nonzero(1) == 2).all())
    assert float((random - prune24(random)).norm() / random.norm()) < 0.5


@pytest.fixture
def sparse_library(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """`sparse_library(True)`: make torch a build with cuSPARSELt."""
    return lambda there: monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: there)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_build_for_cards_without_one_refuses_8_bit_sparsity_in_words(
    sparse_library: Callable[[bool], None],
) -> None:
    """Its cuSPARSELt is there, and no driver to run it."""
    sparse_library(True)
    int8_fault.cache_clear()
    assert "no CUDA device" in (Sparse24(bits=8).refuse(make(nn.Linear(8, 8), torch.randn(1, 8))) or "")
    int8_fault.cache_clear()


def test_sparse_torch_has_no_cpu_kernel() -> None:
    """The refusal's claim, held against torch itself."""
    from torch.sparse import to_sparse_semi_structured

    with pytest.raises((RuntimeError, NotImplementedError)):
        _ = to_sparse_semi_structured(prune24(torch.randn(64, 64)).half()) @ torch.randn(64, 64).half()


def test_sparse_integers_are_refused_without_their_library(sparse_library: Callable[[bool], None]) -> None:
    assert "of 16 bits or 8: the best case is 1.00x" in (Sparse24.available(CPU) or "")
    target = make(nn.Sequential(nn.Linear(512, 512)), torch.randn(2, 512), device=CUDA)
    sparse_library(False)
    assert "cuSPARSELt's" in (Sparse24(bits=8).refuse(target) or "")
    assert Sparse24().refuse(target) is None


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_sparse_integers_compute_what_pruned_weights_do(
    rows: int, sparse_library: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a plain product in the place of cuSPARSELt's, and its demands."""

    def multiply(a_NK, b_KM, *, alpha, out_dtype):
        assert b_KM.shape[1] % 16 == 0
        assert b_KM.t().is_contiguous()
        return ((a_NK.double() @ b_KM.double()) * alpha.double()[:, None]).to(out_dtype)

    monkeypatch.setattr(torch.ops.aten, "_cslt_compress", lambda a_NK: a_NK)
    monkeypatch.setattr(torch.ops.aten, "_cslt_sparse_mm", multiply)
    sparse_library(True)
    target = make(nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 10)), torch.randn(2, 512))
    x = torch.randn(rows, 512)
    layers: Any = target.model
    wide, narrow = layers
    expected = nn.functional.linear(x, prune24(wide.weight.detach()), wide.bias)
    Sparse24(bits=8).apply(target)
    assert target.coverage[0].skipped == {"1": "narrower than 512 features"}
    assert layers[1] is narrow
    # over 1024 outputs: over the ten of the narrow layer the norms vary by more than the tolerance
    assert float((layers[0](x) - expected).norm() / expected.norm()) < 0.02


def need_cuda() -> DeviceFacts:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return get_device("cuda").identify()


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [16, 8])
def test_sparse24_on_cuda(bits) -> None:
    facts = need_cuda()
    model = (
        nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.Linear(512, 10)).cuda().half()
    )
    x = torch.randn(64, 512, device="cuda", dtype=torch.float16)
    target = make(model, x, device=facts)
    target.compute_dtype = torch.float16
    technique = Sparse24(bits=bits)
    if reason := technique.refuse(target):
        pytest.skip(reason)
    pruned = target.workload.build()
    for name in ("0.weight", "2.weight"):
        pruned.get_parameter(name).data = prune24(pruned.get_parameter(name).data)
    technique.apply(target)
    assert target.coverage[0].skipped == {"3": "narrower than 512 features"}
    torch.testing.assert_close(target.model(x), pruned(x), rtol=1e-2, atol=1e-2 if bits == 16 else 3e-2)


@pytest.mark.parametrize(
    ("config", "had", "wanted"),
    [
        ("nvfp4", (9, 0), "10.0"),
        ("mxfp8", (9, 0), "10.0"),
        ("float8_weight_only", (8, 6), "8.9"),
        ("int4_hqq", (7, 5), "8.0"),
    ],
)
def test_torchao_is_refused_below_the_card_that_has_it(config, had, wanted, monkeypatch) -> None:
    target = make(nn.Linear(64, 64), torch.randn(4, 64), device=CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: had)
    reason = TorchAO(config=config).refuse(target) or ""
    assert f"{config} needs compute capability {wanted}; this card has {had[0]}.{had[1]}" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert TorchAO(config=config).refuse(target) is None


def test_torchao_proposes_each_of_its_configurations_once() -> None:
    target = make(nn.Linear(64, 64), torch.randn(4, 64), device=CUDA)
    configs = [variant.config for variant in TorchAO().variants(target)]
    assert sorted(configs) == sorted(typing.get_args(typing.get_type_hints(TorchAO)["config"]))
    for config in configs:
        assert replace(TorchAO(), config=config)._config() is not None, "torchao has no such configuration"


@pytest.mark.parametrize("config", ["int8_weight_only", "float8_weight_only"])
def test_torchao_weights_alone(config) -> None:
    """What torchao computes slowly where it has no kernels; in bfloat16, as the technique casts."""
    target = make(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), torch.randn(4, 64))
    x = torch.randn(4, 64)
    expected = target.model(x)
    TorchAO(config=config).apply(target)
    assert target.coverage[0].changed == 2
    assert float((target.model(x).float() - expected).norm() / expected.norm()) < 0.08


@pytest.mark.parametrize("config", ["int8_dynamic", "int8_weight_only", "float8_weight_only"])
def test_torchao_leaves_its_most_sensitive_layers_alone(config) -> None:
    """What torchao computes slowly where it has no kernels."""
    x = torch.randn(20, 64)
    target = make(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), x)
    first, last = target.model[0].weight, target.model[1].weight
    technique = TorchAO(config=config)
    error, stand_in = technique.module_error(target.model[0], x), technique.stand_in(target.model[0])
    assert error
    assert stand_in
    assert 1e-4 < error < 0.08
    exact = target.model[0](x)
    assert float((stand_in(x).float() - exact).norm() / exact.norm()) == pytest.approx(error, rel=1e-3)
    assert target.model[0].weight is first, "ranking changed the model"
    milder = technique.retreat(("1",))
    assert milder.retreat(("0",)).skip == ("0", "1")
    milder.apply(target)
    assert target.coverage[0].changed == 1
    assert target.coverage[0].skipped == {"1": "left in float: among the most sensitive"}
    left = dict(named(target.model, nn.Linear))["1"].weight
    assert torch.equal(left, last.to(left.dtype))
    with pytest.raises(UnknownName, match="torchao:skip"):
        TorchAO(config=config, skip=("2",)).apply(target)


class OfTwoSizes(nn.Module):
    """One layer of all rows, one of their mean, as what a time step modulates."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.mean = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x) + self.mean(x.mean(0, keepdim=True))


def test_torchao_leaves_alone_what_is_called_on_too_few_rows() -> None:
    """torch._int_mm takes 17 rows at least; on an H100 a denoiser's modulation of two rows failed."""
    target = make(OfTwoSizes(), torch.randn(20, 64))
    TorchAO(config="int8_dynamic").apply(target)
    reason = "called on 1 rows, and its product takes 17 or more"
    assert (target.coverage[0].changed, target.coverage[0].skipped) == (1, {"mean": reason})
    target = make(OfTwoSizes(), torch.randn(20, 64))
    TorchAO(config="int8_weight_only").apply(target)
    assert target.coverage[0].changed == 2
    with pytest.raises(RefusedTechnique, match="changes nothing"):
        TorchAO(config="int8_dynamic").apply(make(nn.Linear(64, 64), torch.randn(4, 64)))


def test_torchao_has_no_stand_in_for_what_its_format_does_not_take() -> None:
    layer = nn.Linear(48, 64)
    assert TorchAO(config="mxfp8").stand_in(layer) is None
    assert TorchAO(config="mxfp8").module_error(layer, torch.randn(2, 48)) is None
    assert TorchAO(config="int8_weight_only").stand_in(layer) is not None
    assert TorchAO(config="int8_weight_only").stand_in(nn.Conv2d(3, 4, 3)) is None


@pytest.mark.cuda
@pytest.mark.parametrize("config", typing.get_args(typing.get_type_hints(TorchAO)["config"]))
def test_torchao_on_cuda(config) -> None:
    facts = need_cuda()
    target = make(
        nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).cuda(),
        torch.randn(64, 512).cuda(),
        device=facts,
    )
    technique = TorchAO(config=config)
    reason = technique.refuse(target)
    if reason:
        pytest.skip(reason)
    technique.apply(target)
    x = torch.randn(64, 512, device="cuda")
    expected = target.workload.build()(x)
    assert float((target.model(x).float() - expected).norm() / expected.norm()) < 0.15
    assert target.coverage[0].changed == 2
