"""Tensors, memory and numbers of simulated devices; run by tests/sim/test_sim_device.py, with two of 64 MiB."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

SIM = torch.device("sim", 0)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.device.type == "sim"
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


def test_nothing_runs_before_the_first_use():
    import torchwright_sim.driver as driver

    assert torch.sim.device_count() == 2
    assert all(each.pid is None for each in driver.links())
    same(torch.ones(3, device="sim") + 1, torch.full((3,), 2.0))
    assert [each.pid is None for each in driver.links()] == [False, True]


def test_devices_are_found_and_numbered():
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.ones(1, device="sim:1").device == torch.device("sim", 1)
    with torch.sim.device(1):
        assert torch.ones(1, device="sim").device.index == 1
    assert torch.ones(1, device="sim").device.index == 0
    with pytest.raises(RuntimeError, match="this process has 2 simulated devices"):
        torch.ones(1, device="sim:2")


def test_views_are_of_one_memory():
    x = torch.arange(24.0).reshape(4, 6)
    there = x.to(SIM)
    same(there[1:, ::2].t().contiguous(), x[1:, ::2].t())
    same(there.view(24)[7:9], x.view(24)[7:9])
    same(there.unfold(1, 2, 2), x.unfold(1, 2, 2))
    there[1].mul_(2)
    x[1].mul_(2)
    same(there, x)
    same(copy.deepcopy(there), x)
    z = torch.randn(3, 4, dtype=torch.complex64)
    same(torch.view_as_real(z.to(SIM)), torch.view_as_real(z))
    same(z.to(SIM).conj().clone(), z.conj().resolve_conj())
    same(z.to(SIM).conj() @ z.to(SIM).mT, z.conj() @ z.mT)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.complex128]
)
def test_every_dtype_travels(dtype: torch.dtype):
    x = torch.tensor([0, 1, 2, 3]).to(dtype)
    assert x.to(SIM).cpu().equal(x) or dtype == torch.float8_e4m3fn
    assert x.to(SIM).cpu().to(torch.complex128).equal(x.to(torch.complex128))


def test_numbers_promote_as_on_the_cpu():
    for x in (torch.tensor(0.3), torch.tensor([1, 2]), torch.tensor(3), torch.rand(4, dtype=torch.bfloat16)):
        for number in (0.1, 2, True, 1 + 2j):
            wanted, found = x * number, x.to(SIM) * number
            assert found.dtype == wanted.dtype
            same(found, wanted)
    x = torch.tensor([-3, 4])
    same(torch.copysign(x.to(SIM), -0.5), torch.copysign(x, -0.5))
    same(torch.remainder(torch.tensor(5).to(SIM), 3), torch.remainder(torch.tensor(5), 3))


def test_devices_do_not_mix():
    x, there = torch.randn(3), torch.randn(3).to(SIM)
    with pytest.raises(RuntimeError, match=r"same device.*sim:0 and cpu"):
        there + x
    with pytest.raises(RuntimeError, match=r"same device.*sim:0 and sim:1"):
        there + x.to("sim:1")
    with pytest.raises(TypeError, match=r"Tensor.cpu"):
        there.numpy()
    same(x.to("sim:1").to("sim:0"), x)
    assert x.to("sim:0").to("sim:1").device.index == 1


def test_errors_are_those_of_the_operator():
    x = torch.randn(3, 4, device=SIM)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        x @ x
    with pytest.raises(IndexError, match="out of range"):
        torch.embedding(x, torch.tensor([7], device=SIM))
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(torch.zeros(2, 2, device=SIM))
    same(torch.ones(2, device=SIM), torch.ones(2))


def test_outputs_are_resized():
    out = torch.empty(0, device=SIM)
    x = torch.randn(2, 3)
    assert torch.sort(x.to(SIM), out=(out, torch.empty(0, dtype=torch.int64, device=SIM)))[0] is out
    same(out, x.sort().values)
    out = torch.empty(0, device=SIM)
    torch.nonzero(x.to(SIM), out=(found := torch.empty(0, dtype=torch.int64, device=SIM)))
    same(found, x.nonzero())
    torch.add(x.to(SIM), 1, out=out)
    same(out, x + 1)
    out.resize_(4, 4)
    same(out.flatten()[:6], (x + 1).flatten())


def test_torch_accelerator_says_the_same():
    accelerator = torch.accelerator
    assert accelerator.current_accelerator() == torch.device("sim")
    assert accelerator.device_count() == torch.sim.device_count()
    with accelerator.device_index(1):
        assert accelerator.current_device_index() == torch.sim.current_device() == 1
        accelerator.reset_peak_memory_stats()
        accelerator.reset_accumulated_memory_stats()
        before = accelerator.memory_allocated()
        kept, gone = torch.empty(1 << 20, device="sim"), torch.empty(1 << 20, device="sim")
        del gone
        assert kept.device.index == 1
        assert accelerator.memory_allocated() == torch.sim.memory_allocated() == before + (4 << 20)
        assert accelerator.max_memory_allocated() == torch.sim.max_memory_allocated() == before + (8 << 20)
        assert accelerator.memory_stats()["allocation.all.allocated"] == 2
        assert accelerator.get_memory_info() == torch.sim.mem_get_info()
        accelerator.empty_cache()
        accelerator.synchronize()
    types = accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.float8_e4m3fn} < types
    assert torch.qint8 not in types


def test_memory_has_an_end():
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    large = torch.empty(40 << 18, device=SIM)
    assert torch.sim.memory_allocated() == before + (40 << 20)
    with pytest.raises(torch.OutOfMemoryError, match=r"sim:0, which has 67108864 bytes"):
        torch.empty(40 << 18, device=SIM)
    same(torch.ones(2, device="sim:1"), torch.ones(2))
    assert torch.sim.mem_get_info()[0] < 25 << 20
    del large
    assert torch.sim.memory_allocated() == before
    assert torch.sim.max_memory_allocated() >= 40 << 20
    torch.empty(40 << 18, device=SIM)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_layers(kind: type[nn.Module], bias: bool):
    """Outputs, states and gradients, in training and in inference mode."""
    torch.manual_seed(0)
    layer = kind(5, 6, bias=bias)
    x = torch.randn(3, 5) if kind in (nn.LSTMCell, nn.GRUCell) else torch.randn(4, 3, 5)
    there, close = copy.deepcopy(layer).to(SIM), torch.testing.assert_close

    def results(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = pytree.tree_leaves(layer(x))
        sum(each.square().sum() for each in outputs).backward()
        return [each.detach().cpu() for each in (*outputs, *(one.grad for one in layer.parameters()))]

    close(results(there, x.to(SIM)), results(layer, x))
    with torch.inference_mode():
        found, wanted = pytree.tree_leaves(there(x.to(SIM))), pytree.tree_leaves(layer(x))
        close([each.cpu() for each in found], wanted)


def test_random_numbers_are_the_cpus():
    torch.manual_seed(3)
    wanted = [torch.rand(5), torch.randn(33), torch.randperm(9), nn.functional.dropout(torch.ones(64))]
    torch.manual_seed(3)
    found = [
        torch.rand(5, device=SIM),
        torch.randn(33, device=SIM),
        torch.randperm(9, device=SIM),
        nn.functional.dropout(torch.ones(64, device=SIM)),
    ]
    for one, other in zip(found, wanted, strict=True):
        same(one, other)
    generator = torch.Generator("sim").manual_seed(5)
    state = generator.get_state()
    first = torch.randn(4, generator=generator, device=SIM)
    generator.set_state(state)
    same(torch.randn(4, generator=generator, device=SIM), first.cpu())
    same(first, torch.randn(4, generator=torch.Generator().manual_seed(5)))
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(4, generator=torch.Generator(), device=SIM)
    with torch.random.fork_rng(device_type="sim", devices=[0]):
        inside = torch.rand(2, device=SIM)
    same(torch.rand(2, device=SIM), inside.cpu())


def test_a_copy_to_pinned_memory_arrives_when_it_is_waited_for():
    x = torch.arange(6.0)
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert not x.is_pinned()
    there = pinned.to(SIM, non_blocking=True)
    host = torch.zeros(6).pin_memory()
    host.copy_(there, non_blocking=True)
    assert host.equal(torch.zeros(6))
    torch.sim.synchronize()
    assert host.equal(x)


def test_gradients():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU()), torch.randn(5, 6)
    placed = copy.deepcopy(model).to(SIM)
    model(x).square().sum().backward()
    placed(x.to(SIM)).square().sum().backward()
    for one, other in zip(placed.parameters(), model.parameters(), strict=True):
        same(one.grad, other.grad)
    a = torch.randn(3, requires_grad=True)
    b = a.detach().to(SIM).requires_grad_()
    for each in (a, b):
        (first,) = torch.autograd.grad(each.sin().sum(), each, create_graph=True)
        first.square().sum().backward()
    same(b.grad, a.grad)


def test_attention_is_the_cpus():
    attention = nn.functional.scaled_dot_product_attention
    query = torch.randn(2, 3, 16, 8, requires_grad=True)
    there = query.detach().to(SIM).requires_grad_()
    wanted, found = (
        attention(query, query, query, is_causal=True),
        attention(there, there, there, is_causal=True),
    )
    same(found.detach(), wanted.detach())
    wanted.sum().backward()
    found.sum().backward()
    same(there.grad, query.grad)


def test_mixed_precision():
    model = nn.Linear(8, 8).to(SIM)
    scaler = torch.amp.GradScaler("sim", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8, device=SIM)
    before = model.weight.detach().cpu()
    with torch.autocast("sim", dtype=torch.bfloat16):
        y = model(x)
        assert y.dtype == torch.bfloat16
        assert y.exp().dtype == torch.float32
    scaler.scale(y.float().square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not model.weight.detach().cpu().equal(before)
    model.weight.grad.fill_(torch.inf)
    before = model.weight.detach().cpu()
    scaler._per_optimizer_states.clear()
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.detach().cpu().equal(before)
    assert scaler.get_scale() == 4.0


def test_tensors_are_saved_and_loaded():
    x = torch.randn(3, 4)
    file = io.BytesIO()
    torch.save({"x": x.to(SIM)}, file)
    file.seek(0)
    same(torch.load(file)["x"], x)
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].equal(x)
    file.seek(0)
    assert torch.load(file, map_location="sim:1")["x"].device.index == 1


def test_lists_and_dictionaries_of_states():
    model = nn.Linear(4, 4)
    placed = nn.Linear(4, 4, device=SIM)
    placed.load_state_dict(model.state_dict())
    same(placed.weight.detach(), model.weight.detach())
    assert "device='sim:0'" in repr(placed.weight)
