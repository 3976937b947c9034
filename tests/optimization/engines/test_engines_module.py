"""An optimized model as an `nn.Module`: what it does, what it refuses in words, alone, as a child, and compiled."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from engine_calls import FORMS, Calls, call_of, dispatcher_of, mlp
from torchwright.core.errors import TorchwrightError
from torchwright.optimization.engines.compiled.program import FreeSizes
from torchwright.optimization.engines.dispatch import opaque
from torchwright.optimization.engines.dispatch.call import parameters_of
from torchwright.optimization.engines.dispatch.call_dispatcher import CallDispatcher
from torchwright.optimization.engines.dispatch.module import OptimizedModule
from torchwright.optimization.engines.dispatch.spec import InputCapabilities
from torchwright.testing.instances import Batch, Pair, build, call

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
IN_PIECES = {"batched": (0,), "pieces": True}
compiles = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module", params=FORMS)
def dispatcher(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CallDispatcher:
    to = tmp_path_factory.mktemp("module") / "mlp.pt2" if request.param == "package" else None
    return dispatcher_of(mlp(), torch.randn(4, 16), to=to, takes=IN_PIECES)


@pytest.fixture
def model(dispatcher: CallDispatcher) -> OptimizedModule:
    return OptimizedModule(CallDispatcher(dispatcher.calls, takes=dispatcher.takes))


@pytest.fixture
def parent(model: OptimizedModule) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 16), model, nn.Linear(8, 3)).eval()


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch.compiler.reset()


def answers(model: nn.Module) -> None:
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x), mlp()(x).detach(), **CLOSE)


# ------------------------------------------------------------------------------------------- as any module


@pytest.mark.slow
def test_copies_share_the_code_and_nothing_else(model: OptimizedModule):
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("first"))
    for copied in (copy.copy, copy.deepcopy):
        other = copied(model)
        answers(other)
        assert other._call is model._call
        assert calls.pop() == "first"
    other = copy.deepcopy(model)
    other.register_forward_hook(lambda *_: calls.append("second"))
    answers(model)
    assert calls == ["first"]
    twice = copy.deepcopy(nn.ModuleList([model, model]))
    assert twice[0] is twice[1]


def test_it_is_not_pickled(model: OptimizedModule, parent: nn.Module):
    for module in (model, parent):
        with pytest.raises(TorchwrightError, match=r"cannot be pickled.*result.save\(DIR\)"):
            pickle.dumps(module)
        with pytest.raises(TorchwrightError, match=r"cannot be pickled.*result.save\(DIR\)"):
            torch.save(module, io.BytesIO())


REFUSED: dict[str, Callable[[Any], Any]] = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "to a type": lambda m: m.to(torch.bfloat16),
    "to a device": lambda m: m.to("meta"),
    "train": lambda m: m.train(),
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict({"1.weight": torch.ones(1)}),
}
OF_ITSELF: dict[str, Callable[[Any], Any]] = {
    "parameters": lambda m: m.parameters(),
    "named_parameters": lambda m: m.named_parameters(),
    "buffers": lambda m: m.buffers(),
    "named_buffers": lambda m: m.named_buffers(),
    "requires_grad_": lambda m: m.requires_grad_(),
    "zero_grad": lambda m: m.zero_grad(),
}


@pytest.mark.parametrize("what", [*REFUSED, *OF_ITSELF])
def test_what_needs_weights_is_refused_in_words(model: OptimizedModule, what: str):
    with pytest.raises(TorchwrightError, match=r"an optimized model cannot .*weights are inside.*Next: "):
        (REFUSED | OF_ITSELF)[what](model)
    answers(model)


@pytest.mark.parametrize("what", REFUSED)
def test_so_it_is_for_a_child(parent: nn.Module, what: str):
    with pytest.raises(TorchwrightError, match=r"an optimized model cannot .*Next: "):
        REFUSED[what](parent)


def test_what_changes_nothing_is_done(model: OptimizedModule, parent: nn.Module):
    for module in (model, parent):
        assert module.eval() is module
        assert module.train(False) is module
        assert module.to("cpu") is module
        assert module.to(torch.float32) is module
        assert module.float() is module
        assert module.cpu() is module
        assert module.to(memory_format=torch.channels_last) is module
        assert module.share_memory() is module
        assert module.requires_grad_(False) is module
        assert "OptimizedModule" in repr(module)
    assert [name for name, _ in parent.named_modules()] == ["", "0", "1", "2"]
    assert [name for name, _ in parent.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    answers(model)


def test_a_model_of_doubles_may_be_said_to_be_one():
    model = OptimizedModule(dispatcher_of(mlp().double(), torch.randn(4, 16, dtype=torch.float64)))
    assert model.double() is model
    with pytest.raises(TorchwrightError, match="float32"):
        model.float()


def test_hooks_run_around_it(model: OptimizedModule):
    model.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model.register_forward_hook(lambda _, args, out: out + 1)
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x), (mlp()(2 * x) + 1).detach(), **CLOSE)


def test_modes_of_the_caller_change_nothing(model: OptimizedModule):
    x = torch.randn(4, 16, requires_grad=True)
    wanted = mlp()(x).detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
        assert torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(found, wanted, **CLOSE)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), wanted, **CLOSE)
        torch.testing.assert_close(model(x.clone()), wanted, **CLOSE)
    found = model(x)
    assert not found.requires_grad
    assert torch.is_grad_enabled()
    with torch.device("meta"):
        torch.testing.assert_close(model(x.data.t().contiguous().t()), wanted, **CLOSE)


def test_modes_are_restored_when_a_call_fails():
    def fail(tensors: list[torch.Tensor]) -> Any:
        raise RuntimeError("in the middle")

    call = call_of(mlp(), (torch.randn(4, 16),))
    call.run = fail  # pyright: ignore[reportAttributeAccessIssue]
    before = torch.get_num_threads()
    model = OptimizedModule(CallDispatcher([call], threads=before + 1))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="in the middle"):
        model(torch.randn(4, 16))
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == before


def test_it_runs_on_its_own_threads_and_gives_them_back():
    seen: list[int] = []
    call = call_of(mlp(), (torch.randn(4, 16),))
    run = call.run
    call.run = lambda tensors: seen.append(torch.get_num_threads()) or run(tensors)  # pyright: ignore[reportAttributeAccessIssue]
    before = torch.get_num_threads()
    answers(OptimizedModule(CallDispatcher([call], threads=before + 1)))
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_several_threads_get_their_own_answers(model: OptimizedModule):
    original, wrong = mlp(), list[int]()

    def work(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for number in range(200):
                x = torch.randn(4 if number % 3 else number % 7, 16, generator=random)
                if not torch.allclose(model(x), original(x), rtol=1e-4, atol=1e-5):
                    wrong.append(seed)

    model(torch.randn(4, 16))
    with pytest.warns(UserWarning, match="in|by compiled calls"):
        model(torch.randn(3, 16))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ----------------------------------------------------------------------------------- inside a compiled model


@compiles
def test_a_model_around_it_compiles_whole_for_any_number_of_rows(parent: nn.Module):
    compiled = torch.compile(parent, fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match="by compiled calls of 4"):  # noqa: PT031
        for rows in (4, 3, 9, 1, 4, 8):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(compiled(x), parent(x), **CLOSE)


@compiles
def test_free_rows_compile_and_gradients_stop_there_as_they_do_outside():
    torch.manual_seed(2)
    inner = OptimizedModule(dispatcher_of(mlp(), torch.randn(4, 16), free=FreeSizes(rows=(0,))))
    whole = nn.Sequential(nn.Linear(16, 16), inner, nn.Linear(8, 3))
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    for rows in (4, 7, 12):
        x = torch.randn(rows, 16, requires_grad=True)
        found = compiled(x)
        torch.testing.assert_close(found, whole(x), **CLOSE)
        found.sum().backward()
        assert x.grad is None
        assert whole[2].weight.grad is not None  # pyright: ignore[reportAttributeAccessIssue]


@compiles
def test_dictionaries_constants_and_what_is_passed_through_compile():
    def function(inputs: dict[str, torch.Tensor], scale: float = 1.0) -> Any:
        x = inputs["x"] * scale
        return {"t": x.t(), "same": inputs["y"], "part": inputs["y"][1:], "none": None, "n": 3, "b": (x, x)}

    model = Calls(function)
    named = {"inputs": {"x": torch.randn(3, 4), "y": torch.randn(5)}}
    inner = OptimizedModule(dispatcher_of(model, named=named))
    around = lambda x, y: inner(inputs={"y": y, "x": x + 1})
    compiled = torch.compile(around, fullgraph=True, backend="aot_eager")
    x, y = torch.randn(4, 3).t(), torch.randn(10)[::2]
    found, wanted = compiled(x, y), function({"x": x + 1, "y": y})
    assert found.keys() == wanted.keys()
    assert (found["none"], found["n"]) == (None, 3)
    for name in ("t", "same", "part"):
        torch.testing.assert_close(found[name], wanted[name])
    torch.testing.assert_close(found["b"][1], wanted["b"][1])


@compiles
def test_other_types_compile():
    inner = Calls(lambda x: (x.float() * 2, x))
    substitutes = ({"types": {0: "int64"}, "outputs": ("float32", "int64")},)
    from torchwright.optimization.engines.dispatch.spec import Substitute

    takes = {"substitutes": tuple(Substitute(**s) for s in substitutes)}
    model = OptimizedModule(dispatcher_of(inner, torch.randn(3), takes=takes))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match="tensors brought to float32"):
        found = compiled(torch.tensor([1, 2, 3]))
    torch.testing.assert_close(found[0], torch.tensor([2.0, 4.0, 6.0]))
    torch.testing.assert_close(found[1], torch.tensor([1, 2, 3]))


@compiles
def test_what_only_the_original_takes_compiles_as_the_original():
    inner = OptimizedModule(dispatcher_of(mlp(), torch.randn(4, 16), original=mlp()))
    compiled = torch.compile(inner, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(compiled(x), mlp()(x).detach(), **CLOSE)


@compiles
def test_one_that_changes_its_inputs_breaks_the_graph_and_says_so():
    def add(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2

    inner = OptimizedModule(dispatcher_of(Calls(add), torch.randn(3)))
    around = lambda x: inner(x) + x
    x = torch.ones(3)
    torch.testing.assert_close(torch.compile(around, backend="aot_eager")(x), torch.full((3,), 6.0))
    torch.testing.assert_close(x, torch.full((3,), 2.0))
    torch.compiler.reset()
    with pytest.raises(Exception, match="changes its inputs"):
        torch.compile(around, fullgraph=True, backend="aot_eager")(x)


@compiles
@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_is_refused_in_words(parent: nn.Module, strict: bool):
    with pytest.raises(Exception, match=r"torch.export cannot look into an optimized model"):
        torch.export.export(parent, (torch.randn(4, 16),), strict=strict)


def test_a_tracers_tensors_are_refused_in_words(model: OptimizedModule):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(4, 16))
        with pytest.raises(TorchwrightError, match="cannot look into"):
            model(fake)


@compiles
def test_the_operator_answers_with_the_strides_that_it_promised():
    """Also where the compiled code lays its answer out otherwise than it was traced."""
    inner = dispatcher_of(Calls(lambda x: x.t() * 2), torch.randn(3, 4))
    build = inner.calls[0].build
    inner.calls[0].build = lambda outputs: build([t.contiguous() for t in outputs])  # pyright: ignore[reportAttributeAccessIssue]
    compiled = torch.compile(OptimizedModule(inner), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), x.t() * 2)
    assert opaque._dispatchers[id(inner)] is inner


def test_takes_are_kept_of_its_own_signature():
    assert parameters_of(mlp().forward)[0].name == "input"
    assert InputCapabilities().parameters == ()


@compiles
def test_a_model_around_one_with_instances_compiles_with_a_break_and_says_why():
    inner = OptimizedModule(dispatcher_of(build(), named=call()))

    class Around(nn.Module):
        def forward(self, batch: Batch, pair: Pair) -> Any:
            moved = Batch(
                batch.x_BE + 0,
                batch.scale,
                batch.mask_BF,
                batch.extras,
                batch.sign,
                batch.level,
                batch.note,
                batch.options,
            )
            answer = inner(moved, pair=pair)
            return answer.output.logits + answer.many[0], answer

    given = call(seed=2)
    total, answer = torch.compile(Around(), backend="aot_eager")(**given)
    wanted = build()(**given)
    torch.testing.assert_close(total, 2 * wanted.output.logits + 1, **CLOSE)
    assert type(answer) is type(wanted)
    assert (answer.hidden.name, answer.nothing, answer.count) == ("hidden", None, 3)
    torch.testing.assert_close(answer.output["logits"], wanted.output.logits, **CLOSE)
    torch.compiler.reset()
    with pytest.raises(Exception, match="returns a dataclass instance or a named tuple"):
        torch.compile(Around(), fullgraph=True, backend="aot_eager")(**given)


@compiles
def test_a_model_that_takes_a_dataclass_breaks_the_graph_around_it():
    class Total(nn.Module):
        def forward(self, batch: Batch) -> torch.Tensor:
            return batch.x_BE.sum(1) * batch.scale

    batch = call()["batch"]
    inner = OptimizedModule(dispatcher_of(Total(), batch))
    compiled = torch.compile(nn.Sequential(inner, nn.ReLU()), backend="aot_eager")
    torch.testing.assert_close(compiled(batch), batch.x_BE.sum(1) * batch.scale)
