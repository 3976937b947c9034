"""Graphs of strangers: none runs code, opens what is not its own, or fails in other words than ours."""

from __future__ import annotations

import ast
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forged_graphs import call_signature, graphs, nodes
from small_artifacts import copied, edit
from torchwright.core.errors import ArtifactError
from torchwright.optimization.artifact.load import load
from torchwright.optimization.engines.compiled.program import read_programs, write_programs
from torchwright.optimization.engines.safety.expressions import check_shape, guard
from torchwright.optimization.engines.safety.operators import is_allowed

OWNED = "__import__('pathlib').Path('owned').touch()"
pytestmark = pytest.mark.usefixtures("elsewhere")


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
