"""Artifacts of strangers: none runs code, opens what is not its own, or fails in other words than ours."""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import torchwright as tw
from factories import make_recipe
from folders import causal, save
from language_artifacts import fixed_artifact, native_artifact
from mutations import mutate
from small_artifacts import copied, edit, made, mlp, seal
from torchwright.artifact import folder as artifact
from torchwright.artifact.fingerprint import fingerprint_here
from torchwright.artifact.load import load
from torchwright.artifact.tree import write_tree
from torchwright.engines.expressions import check_shape, guard
from torchwright.engines.operators import is_allowed
from torchwright.engines.program import read_programs, write_programs
from torchwright.errors import ArtifactError, TorchwrightError
from torchwright.workloads.module import ModuleWorkload

OWNED = "__import__('pathlib').Path('owned').touch()"


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("eager"), mlp(), ["dtype"])


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact whose graph has free sizes, guards, keywords and nested inputs and outputs."""
    return free_artifact(tmp_path_factory.mktemp("free") / "artifact")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    return native_artifact(save(causal(head_dim=16), folder / "model"), folder / "artifact")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder and a cache of the test's own; nothing may appear in the first."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "cache"))
    yield
    assert not list((tmp_path / "here").iterdir())


class Free(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor], how: str = "sum") -> dict[str, Any]:
        halves = x[: x.shape[0] // 2]
        y = self.linear(x).relu_() + more["a b"][: x.shape[0]]
        return {"y": y, "rest": (torch.einsum("ij,kj->ik", halves, y), [y.view(-1, 2, 3).sum(1)])}


def free_artifact(path: Path) -> Path:
    torch.manual_seed(0)
    model = Free().eval()
    args, kwargs = (torch.randn(8, 6),), {"more": {"a b": torch.randn(9, 6)}, "how": "sum"}
    sizes = {"x": (Dim.AUTO, Dim.AUTO), "more": {"a b": (Dim.AUTO, Dim.AUTO)}, "how": None}
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=sizes)
        output = torch.utils._pytree.tree_leaves(model(*args, **kwargs))
    workload = ModuleWorkload(model, kwargs)
    recipe = make_recipe(
        engine="eager",
        workload=workload.describe(),
        steps=(),
        fingerprint=fingerprint_here("cpu", measured=False),
    )
    with artifact.writing(path) as folder:
        write_programs(folder, {"forward": program})
        kept = {"name": "forward", "args": args, "kwargs": kwargs, "seed": 0, "output": output}
        write_tree(folder / "selftest", kept)
        artifact.finish(folder, recipe, {"engine": "eager", "dtype": "float32", "cases": ("forward",)})
    return path


def graphs(path: Path, change: Callable[[Any], Any]) -> Path:
    """Change the one graph of an artifact, as a forger can."""
    edit(path / "programs.json", lambda data: change(data["forward"]["graph"]))
    return path


def nodes(graph: Any) -> list[Any]:
    return graph["graph_module"]["graph"]["nodes"]


def call_signature(graph: Any) -> Any:
    return next(m["signature"] for m in graph["graph_module"]["module_call_graph"] if m["signature"])


# ------------------------------------------------------------------------------------------------- graphs


def test_a_good_artifact_loads(eager: Path, free: Path):
    assert load(eager).how == "graphs, uncompiled"
    assert load(free).how == "graphs, uncompiled"


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.from_file.default",
        "torch.ops.aten.set_.source_Tensor",
        "torch.ops.aten.resize_.default",
        "torch.ops.aten._reshape_alias.default",
        "torch.ops.aten.add.out",
        "torch.ops.torchwright.own_threads.default",
        "torch.ops.torchwright.use_isa.default",
        "torch.ops.mine.anything.default",
        "torch.ops.load_library",
        "torch.os.system",
        "torch.serialization.load",
        "_operator.methodcaller",
        "_operator.attrgetter",
        "math.__loader__.load_module",
        "torch.ops.higher_order.call_torchbind",
        "torch.ops.aten.add.__class__",
        "#extension:op",
    ],
)
def test_an_operator_that_is_not_on_the_list_is_refused(eager: Path, tmp_path: Path, target: str):
    def hostile(graph: Any) -> None:
        nodes(graph)[0]["target"] = target

    with pytest.raises(ArtifactError, match="an operator that no graph may call"):
        load(graphs(copied(eager, tmp_path), hostile))


def test_no_graph_opens_a_file_of_the_users(eager: Path, tmp_path: Path):
    """As found: one node that maps a file as shared memory, and in-place arithmetic after it."""
    precious = tmp_path / "precious"
    precious.write_bytes(bytes(range(256)) * 4)

    def hostile(graph: Any) -> None:
        node = nodes(graph)[0]
        node["target"] = "torch.ops.aten.from_file.default"
        node["inputs"] = [
            {"name": "filename", "arg": {"as_string": str(precious)}, "kind": 1},
            {"name": "shared", "arg": {"as_bool": True}, "kind": 1},
            {"name": "size", "arg": {"as_int": 64}, "kind": 1},
        ]

    with pytest.raises(ArtifactError, match=r"cannot be read"):
        load(graphs(copied(eager, tmp_path), hostile))
    assert precious.read_bytes() == bytes(range(256)) * 4


def test_trust_allows_operators_of_other_libraries(tmp_path: Path):
    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.tw_test.double(x)

    with torch.library._scoped_library("tw_test", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        write_programs(tmp_path, {"forward": torch.export.export(Other(), (torch.ones(3),))})
        with pytest.raises(ArtifactError, match=r"without trust: 'torch.ops.tw_test.double.default'"):
            read_programs(tmp_path)
        program = read_programs(tmp_path, trust=True)["forward"]
        assert program.module()(torch.ones(3)).tolist() == [2, 2, 2]
        text = (tmp_path / "programs.json").read_text()
        (tmp_path / "programs.json").write_text(
            text.replace("torch.ops.tw_test.double.default", "torch.os.system")
        )
        with pytest.raises(ArtifactError, match="an operator that no graph may call"):
            read_programs(tmp_path, trust=True)


def test_operators_are_listed_by_name():
    good = ("add.Tensor", "to.dtype_layout", "relu_.default", "index_put_.default")
    assert all(is_allowed(f"torch.ops.aten.{name}") for name in good)
    assert all(map(is_allowed, ("_operator.mul", "torch.sym_max", "torch.ops.higher_order.cond")))
    assert not any(
        map(is_allowed, ("", "torch", "torch.ops.aten.add", "torch.ops.aten.add.Tensor.x", "os.system"))
    )


@pytest.mark.parametrize(
    "text",
    [
        OWNED,
        f"L['x'].size()[0] == 3 and {OWNED}",
        "L['x'].__class__",
        "L['x'].size()[0] == 3, 1",
        'L["x\', 1)\\nimport os #"].size()[0] == 3',
        "torch.os.system('x')",
        "[x for x in L]",
        "9**9**9**9 == L['x']",
        "L",
        "1\n2",
        "(" * 300 + "1" + ")" * 300,
        f"'{OWNED}'",
    ],
)
def test_a_guard_that_is_code_is_refused(eager: Path, tmp_path: Path, text: str):
    path = graphs(copied(eager, tmp_path), lambda graph: graph.update(guards_code=[text]))
    with pytest.raises(ArtifactError, match="a guard that is not one"):
        load(path)


@pytest.mark.parametrize(
    "text",
    [
        "L['x'].size()[1] == 3",
        "(max(1, L['x'].size()[3] // 2)*max(1, L['x'].size()[2] // 2)) != 1",
        "L['a'].size()[0] == 1 or L['a'].size()[0] == L['more']['a b'].size()[0]",
        "((L['flat_args'][0].size()[1] // 2) % (2*(L['x'].size()[1] // 2))) != 0",
        "L['x'].size()[0] + (-1)*L['n'] >= 2 and not L['n'] < 0 and L['x'].stride()[0]**2 > 1",
    ],
)
def test_guards_of_torch_are_read(text: str):
    assert ast.dump(ast.parse(guard(text))) == ast.dump(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9**9",
        "Pow(Pow(Pow(Pow(Pow(9, 8), 8), 8), 8), 8)",
        "2**Symbol('s0')",
        "1e400",
        "Integer(2**63)",
        "s0" * 5000,
        "Symbol('s999999999')",
        "Symbol('__import__')",
        "s0.func",
        "Max(*s0)",
        "Add(s0, x=1)",
        "(" * 1000,
        "lambda: 1",
        "+".join(["s0"] * 500),
        "Float('1', precision=10**9)",
        "exit",
        "Symbol",
        "0x" + "f" * 400,
    ],
)
def test_a_shape_without_bounds_is_refused_at_once(text: str):
    start = time.process_time()
    with pytest.raises(ValueError, match="a shape expression that is not one"):
        check_shape(text)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "text",
    [
        "s0",
        "Mul(Integer(2), Pow(Symbol('s27', positive=True, integer=True), Integer(2)))",
        "2*s0 + (s1 // 4)**3",
        "Max(Integer(1), FloorDiv(Symbol('s0', integer=True), Integer(2)))",
        "Eq(Mod(s0, 2), 0)",
        "-1 + u0",
    ],
)
def test_shapes_of_torch_are_read(text: str):
    check_shape(text)


def test_a_shape_that_takes_for_ever_is_refused_at_once(eager: Path, tmp_path: Path):
    def hostile(graph: Any) -> None:
        first = next(iter(graph["graph_module"]["graph"]["tensor_values"].values()))
        first["sizes"][0] = {"as_expr": {"expr_str": "9**9**9**9", "hint": {"as_int": 4}}}

    path, start = graphs(copied(eager, tmp_path), hostile), time.process_time()
    with pytest.raises(ArtifactError, match="a shape expression that is not one"):
        load(path)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "name", ["x = 1\nimport os", "a'b", "a{b}", "a b", "0", "a.b", "", "ä", "a" * 2000, "lambda"]
)
def test_a_name_that_is_code_is_refused(eager: Path, tmp_path: Path, name: str):
    """Names of values become those of variables in generated Python."""

    def hostile(graph: Any) -> None:
        text = json.dumps(graph)
        output = nodes(graph)[0]["outputs"][0]["as_tensor"]["name"]
        graph.clear()
        graph.update(json.loads(text.replace(json.dumps(output), json.dumps(name))))

    with pytest.raises(ArtifactError, match=r"cannot be read.*a name that is none"):
        load(graphs(copied(eager, tmp_path), hostile))


@pytest.mark.parametrize(
    "path", ['w"; system("touch owned"); //', "a\\", "a\n", "__class__.x", "a..b", "{x}", "ä"]
)
def test_a_parameter_whose_name_is_code_is_refused(eager: Path, tmp_path: Path, path: str):
    """Names of parameters become texts in generated C++, and attributes of modules."""

    def hostile(data: Any) -> None:
        state = data["forward"]["state"]
        first = next(iter(state))
        text = json.dumps(data).replace(json.dumps(first), json.dumps(path))
        data.update(json.loads(text))

    copy = copied(eager, tmp_path)
    edit(copy / "programs.json", hostile)
    with pytest.raises(ArtifactError, match="a parameter or module of the name"):
        load(copy)


@pytest.mark.parametrize(("operator", "count"), [("mul", 20), ("pow", 5), ("lshift", 400)])
def test_sizes_do_not_grow_without_bounds(free: Path, tmp_path: Path, operator: str, count: int):
    """They are Python's own integers when a graph runs."""

    def hostile(graph: Any) -> None:
        inner = graph["graph_module"]["graph"]
        place = next(i for i, node in enumerate(nodes(graph)) if node["target"] == "_operator.floordiv")
        name = nodes(graph)[place]["outputs"][0]["as_sym_int"]["as_name"]
        for index in range(count):
            left = {"as_sym_int": {"as_name": name}}
            right = left if operator == "mul" else {"as_int": 8 if operator == "pow" else 62}
            name, inner["sym_int_values"][f"grown_{index}"] = f"grown_{index}", {"as_int": 1}
            grown = json.loads(json.dumps(nodes(graph)[place]))
            grown |= {
                "target": f"_operator.{operator}",
                "outputs": [{"as_sym_int": {"as_name": name}}],
                "name": name,
            }
            grown["inputs"] = [{"name": n, "arg": arg, "kind": 1} for n, arg in (("a", left), ("b", right))]
            nodes(graph).insert(place + index + 1, grown)

    with pytest.raises(ArtifactError, match="a graph whose sizes are too large"):
        load(graphs(copied(free, tmp_path), hostile))


def spec(kind: str, context: str, *children: Any) -> Any:
    return {"type": kind, "context": context, "children_spec": list(children)}


@pytest.mark.parametrize(
    ("field", "root"),
    [
        ("out_spec", spec("collections.defaultdict", json.dumps({"default_factory_module": "owned_module"}))),
        (
            "out_spec",
            spec("builtins.dict", json.dumps([{"__enum__": True, "fqn": "owned_module:X", "name": "a"}])),
        ),
        ("out_spec", spec("collections.namedtuple", '"owned_module.X"')),
        (
            "out_spec",
            spec("transformers.X", json.dumps({"__enum__": True, "fqn": "owned_module:X", "name": "a"})),
        ),
        ("in_spec", spec("builtins.tuple", "null")),
        (
            "in_spec",
            spec(
                "builtins.tuple",
                "null",
                spec("builtins.tuple", "null"),
                spec(
                    "builtins.dict", '["x): import os"]', {"type": None, "context": None, "children_spec": []}
                ),
            ),
        ),
    ],
)
def test_a_structure_that_imports_is_refused(
    eager: Path, tmp_path: Path, field: str, root: Any, monkeypatch: Any
):
    (tmp_path / "owned_module.py").write_text("import pathlib; pathlib.Path('owned').touch()")
    monkeypatch.syspath_prepend(str(tmp_path))

    def hostile(graph: Any) -> None:
        call_signature(graph)[field] = json.dumps([1, root])

    with pytest.raises(ArtifactError, match="cannot be read"):
        load(graphs(copied(eager, tmp_path), hostile))
    assert "owned_module" not in sys.modules


@pytest.mark.parametrize(
    "names", [["x=__import__('os').system('touch owned')"], ["x", "lambda"], ["x\n"], ["x", "x"]]
)
def test_an_argument_whose_name_is_code_is_refused(eager: Path, tmp_path: Path, names: list[str]):
    def hostile(graph: Any) -> None:
        call_signature(graph)["forward_arg_names"] = names

    with pytest.raises(ArtifactError, match=r"a name that is none|two arguments of one name"):
        load(graphs(copied(eager, tmp_path), hostile))


def test_a_constant_text_that_is_code_is_refused(free: Path, tmp_path: Path):
    """A constant input is compared with its value in a guard that torch generates."""

    def hostile(data: Any) -> None:
        data.update(
            json.loads(json.dumps(data).replace('{"as_string": "sum"}', '{"as_string": "\' or x or \'"}'))
        )

    copy = copied(free, tmp_path)
    edit(copy / "programs.json", hostile)
    with pytest.raises(ArtifactError, match="a constant text that is none"):
        load(copy)


def test_what_a_graph_says_of_its_modules_is_not_read(eager: Path, tmp_path: Path):
    def hostile(graph: Any) -> None:
        for node in nodes(graph):
            node["metadata"] = {
                "nn_module_stack": "x",
                "from_node": "[[",
                "source_fn_stack": "a,torch.os.system",
            }
        graph["graph_module"]["metadata"] = {"custom": "["}

    assert load(graphs(copied(eager, tmp_path), hostile)).how == "graphs, uncompiled"


@pytest.mark.parametrize("stride", [[2**50, 1], [-1, 1], [1], [16, 2**40]])
def test_a_tensor_takes_no_more_memory_than_its_values(eager: Path, tmp_path: Path, stride: list[int]):
    def hostile(data: Any) -> None:
        entry = next(value for value in data["forward"]["state"].values() if len(value["stride"]) == 2)
        entry["stride"] = stride

    copy = copied(eager, tmp_path)
    edit(copy / "programs.json", hostile)
    with pytest.raises(ArtifactError, match=r"strides|spread over"):
        load(copy)


def test_parts_and_repetitions_of_tensors_keep_their_layout(tmp_path: Path):
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(4, 12)
            self.register_buffer("part", whole[:, 4:8])
            self.register_buffer("turned", whole.t())
            self.register_buffer("repeated", whole[:1, :4].expand(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.part @ self.repeated @ self.turned[:4]

    x, model = torch.randn(3, 4), Parts()
    write_programs(tmp_path, {"forward": torch.export.export(model, (x,))})
    program = read_programs(tmp_path)["forward"]
    assert {name: tensor.stride() for name, tensor in program.state_dict.items()} == {
        name: tensor.stride() for name, tensor in model.state_dict().items()
    }
    torch.testing.assert_close(program.module()(x), model(x))


def test_a_graph_that_lies_about_a_tensor_is_refused(eager: Path, tmp_path: Path):
    def hostile(graph: Any) -> None:
        for value in graph["graph_module"]["graph"]["tensor_values"].values():
            if len(value["sizes"]) == 2:
                value["sizes"][0] = {"as_int": 1000}

    with pytest.raises(ArtifactError, match="not as its graph says"):
        load(graphs(copied(eager, tmp_path), hostile))


# ------------------------------------------------------------------------------------------------ recipes


def test_a_factory_is_not_imported_without_trust(
    eager: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "owned_factory.py").write_text(
        "import pathlib, torch\n"
        f"pathlib.Path({str(tmp_path / 'owned')!r}).touch()\n"
        "def make():\n    return torch.nn.Linear(16, 8), torch.ones(4, 16)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    copy = copied(eager, tmp_path)
    for name in ("programs.json", "programs.safetensors", "selftest.json", "selftest.safetensors"):
        (copy / name).unlink()

    def hostile(recipe: Any) -> None:
        recipe["workload"] |= {"kind": "module", "model": "owned_factory:make", "metric": None}

    edit(copy / "recipe.json", hostile)
    with pytest.raises(ArtifactError, match="trust"):
        load(copy)
    with pytest.raises(ArtifactError, match="trust"):
        tw.api.verify(copy)
    assert not (tmp_path / "owned").exists()
    assert "owned_factory" not in sys.modules


@pytest.mark.parametrize("change", [{"eval_text": "/etc/hostname"}, {"model": "/etc"}])
def test_nothing_that_a_recipe_names_is_opened_without_trust(tmp_path: Path, change: dict[str, str]):
    path = fixed_artifact(save(causal(head_dim=16), tmp_path / "model"), tmp_path / "artifact")
    (path / "signature").unlink()
    edit(path / "recipe.json", lambda recipe: recipe["workload"].update(change))
    if "model" in change:
        shutil.rmtree(path / "model")
        seal(path)
    with pytest.raises(ArtifactError, match=r"to open .*trust"):
        tw.api.verify(path)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("encoder", "layout", {"shapes": [[1, 8]], "pad": 0, "prompt": "", "cut": None, "part": "../../etc"}),
        ("encoder", "layout", {"shapes": [], "pad": 0, "prompt": "", "cut": None, "part": "."}),
        ("encoder", "layout", {"shapes": [[1, "8"]]}),
        ("encoder", "layout", 5),
        ("language", "geometry", {}),
        ("language", "geometry", {"layers": 2**40}),
        ("encoder", "layout", None),
        ("forward", "layout", {"shapes": [[1, 8]]}),
        ("image", "batch", 2**40),
        ("language", "batch", "1"),
        ("encoder", "tokens", 0),
    ],
)
def test_a_workload_of_odd_numbers_is_damaged(eager: Path, tmp_path: Path, kind: str, field: str, value: Any):
    copy = copied(eager, tmp_path)
    edit(copy / "recipe.json", lambda recipe: recipe["workload"].update({"kind": kind, field: value}))
    with pytest.raises(ArtifactError, match=r"is damaged.*workload"):
        load(copy)


# -------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["recipe.json", "manifest.json", "programs.json", "selftest.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100000,
        b'{"a":' * 100000,
        b"\xff\xfe",
        b"",
        b"\x00",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b"9" * 10000,
        b'"\\ud800"',
        b'"' + b"a" * 10**6,
        b'{"format": 1e999}',
        b'{"format": true}',
    ],
    ids=lambda value: repr(value)[:20],
)
def test_odd_bytes_are_damage_and_found_at_once(eager: Path, tmp_path: Path, name: str, content: bytes):
    copy = copied(eager, tmp_path)
    (copy / name).write_bytes(content)
    if name != "manifest.json":
        seal(copy)
    start = time.process_time()
    with pytest.raises(ArtifactError, match=r"is damaged|cannot be read"):
        load(copy)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"0" * 63, b"0" * 65, b"G" * 64, b"0" * 64 + b"\n\n"])
def test_a_signature_that_cannot_be_one_is_damage(eager: Path, tmp_path: Path, content: bytes):
    copy = copied(eager, tmp_path)
    (copy / "signature").write_bytes(content)
    assert not artifact.is_own(copy)
    with pytest.raises(ArtifactError, match="the signature is not one"):
        load(copy)


def test_without_a_signature_an_artifact_is_whole_and_nobodys_own(eager: Path, tmp_path: Path):
    copy = copied(eager, tmp_path)
    (copy / "signature").unlink()
    assert load(copy).how == "graphs, uncompiled"
    assert not artifact.is_own(copy)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/../../b", "a\\b", "", ".", "a//b", "a\nb", "\ud800"]
)
def test_a_file_name_that_leads_out_is_damage(eager: Path, tmp_path: Path, name: str):
    copy = copied(eager, tmp_path)
    edit(copy / "manifest.json", lambda manifest: manifest["files"].update({name: "0" * 64}))
    with pytest.raises(ArtifactError, match="is damaged"):
        load(copy)


def test_a_file_whose_name_is_no_text_is_named_all_the_same(eager: Path, tmp_path: Path):
    copy = copied(eager, tmp_path)
    Path(os.fsdecode(os.fsencode(copy) + b"/\xff\xfe")).write_text("x")
    with pytest.raises(ArtifactError, match=r"\\xff\\xfe does not belong to it") as caught:
        load(copy)
    str(caught.value).encode()


@pytest.mark.parametrize("folder", [False, True])
def test_a_link_that_leads_out_is_damage(eager: Path, tmp_path: Path, folder: bool):
    copy = copied(eager, tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "tokenizer.json").write_text("{}")
    (copy / "model").symlink_to(tmp_path / "outside" / ("" if folder else "tokenizer.json"))
    seal(copy)
    with pytest.raises(ArtifactError, match="model leads out of it"):
        load(copy)


def test_a_link_within_is_a_file(eager: Path, tmp_path: Path):
    copy = copied(eager, tmp_path)
    (copy / "programs.safetensors").rename(copy / "report2.html")
    (copy / "programs.safetensors").symlink_to("report2.html")
    seal(copy)
    assert load(copy).how == "graphs, uncompiled"


# ------------------------------------------------------------------------------------------ key and folder


def test_where_no_key_can_be_kept_the_artifact_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    with artifact.writing(tmp_path / "out") as folder:
        notice = artifact.finish(folder, make_recipe(), {"engine": "eager", "dtype": "float32"})
    assert notice is not None
    assert "not signed" in notice
    artifact.open_artifact(tmp_path / "out")
    assert not (tmp_path / "out" / "signature").exists()
    assert not artifact.is_own(tmp_path / "out")


def test_a_signed_artifact_is_nobodys_own_where_the_key_cannot_be_read(
    eager: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("x")
    for cache in (tmp_path / "file" / "cache", tmp_path / "odd"):
        monkeypatch.setenv("TORCHWRIGHT_CACHE", str(cache))
        if cache.name == "odd":
            (cache / "signing.key").mkdir(parents=True)
        assert not artifact.is_own(eager)
        assert load(eager).how == "graphs, uncompiled"


def test_two_processes_agree_on_the_key(tmp_path: Path):
    code = "from torchwright.artifact.folder import _key; print(_key().hex())"
    command = [sys.executable, "-c", code]
    with ThreadPoolExecutor(4) as pool:
        done = pool.map(
            lambda _: subprocess.run(command, check=True, capture_output=True, text=True), range(4)
        )
    assert len({process.stdout for process in done}) == 1


def test_a_key_that_was_never_finished_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(artifact, "KEY_SECONDS", 0.05)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "signing.key").write_bytes(b"half")
    (tmp_path / "file").write_text("x")
    assert artifact.sign(tmp_path / "file") is None


def test_only_a_whole_artifact_is_replaced(eager: Path, tmp_path: Path):
    """A folder that happens to hold a recipe.json is somebody's work."""
    extra, changed, bare = (tmp_path / name for name in ("extra", "changed", "bare"))
    for copy in (extra, changed):
        shutil.copytree(eager, copy)
    bare.mkdir()
    (extra / "thesis.tex").write_text("years of work")
    with (changed / "report.html").open("a") as file:
        file.write("notes of mine")
    (bare / "recipe.json").write_text("{}")
    for path, found in (
        (extra, "thesis.tex"),
        (changed, "report.html has changed"),
        (bare, "no manifest.json"),
    ):
        before = sorted(path.rglob("*"))
        with (
            pytest.raises(ArtifactError, match=rf"exists and is not an artifact.*{found}.*-o"),
            artifact.writing(path),
        ):
            pass
        assert sorted(path.rglob("*")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "changed", "extra", "here"]


# ---------------------------------------------------------------------------------------------- mutations


class Watch:
    """What this process does to files and other programs while a block runs, by Python's audit events."""

    def __init__(self, allowed: Path) -> None:
        self.allowed, self.on = str(allowed), False
        self.seen: list[tuple[str, str]] = []
        sys.addaudithook(self._event)  # for ever: there is no way to remove one

    def __enter__(self) -> None:
        self.on = True

    def __exit__(self, *error: object) -> None:
        self.on = False

    def _event(self, name: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if name in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"):
            self.seen.append((name, str(arguments)[:200]))
        writes = name == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or name in ("os.remove", "os.rename", "os.mkdir", "shutil.rmtree"):
            where = str(arguments[0])
            if not where.startswith((self.allowed, "/dev/", "/proc/")):
                self.seen.append((name, where))


def mutated(
    sources: list[Path], count: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    (tmp_path / "work").mkdir()
    for source in sources:
        load(source)  # imports what loading imports
    watch = Watch(tmp_path)
    # Graphs of a forged engine would be compiled, which takes seconds each, and is no fault.
    monkeypatch.setattr("torchwright.measure.toolchain.compiler_fault", lambda device: "there is none here")
    for index in range(count):
        source = chance.choice(sources)
        copy = Path(shutil.copytree(source, tmp_path / "work" / "artifact"))
        # Half a character of a mutated name would be too much for what carries a failure to the terminal.
        what = ascii(f"{index} of seed {seed}, {source.parent.name}: {mutate(copy, chance)}")
        start = time.process_time()
        try:
            with watch:
                load(copy)
        except TorchwrightError as error:
            str(error).encode()
        except Exception as error:
            raise AssertionError(f"{what} is told as {type(error).__name__}: {str(error)!a}") from None
        assert time.process_time() - start < 10, what
        assert not watch.seen, what
        shutil.rmtree(copy)


def test_a_file_with_anything_wrong_in_it_loads_or_is_told_in_words(
    eager: Path, free: Path, native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mutated([eager, free, free, native], 300, 0, tmp_path, monkeypatch)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_thousands_of_files_with_anything_wrong_in_them(
    eager: Path, free: Path, native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
):
    mutated([eager, free, free, native], 1000, seed, tmp_path, monkeypatch)
