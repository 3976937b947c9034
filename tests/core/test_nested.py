"""Dataclass instances and named tuples taken apart and put together again, in memory and through files."""

from __future__ import annotations

import enum
import functools
import json
import subprocess
import sys
import types
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchwright.core import nested
from torchwright.core.errors import ArtifactError, StandIn
from torchwright.testing.instances import Answer, Batch, Hidden, Output, Pair, build, call

T = TypeVar("T")
Old = namedtuple("Old", "first second")


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    note: str | None = None


@dataclass
class Computed(Generic[T]):
    """Has attributes that are no fields, one that is computed when it is asked for, and one that was never set."""

    x: torch.Tensor
    late: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = len(self.x)
        MADE.append(self.rows)

    @functools.cached_property
    def total(self) -> torch.Tensor:
        return self.x.sum()


MADE: list[int] = []
"""The calls of its constructor."""


@dataclass
class Several:
    inner: Frozen
    many: list[Any]
    pair: Old | None = None
    nothing: torch.Tensor | None = None


def test_leaves_are_found_at_any_depth_and_classes_come_back() -> None:
    x = torch.ones(2)
    computed = Computed[int](x)
    assert float(computed.total) == 2
    value = Several(Frozen(x, "n"), [1, {"c": computed}], Old(x, 2.0))
    MADE.clear()
    found = nested.map_tensors(lambda tensor: tensor + 1, value)
    assert not MADE, "a constructor ran"
    assert (type(found), type(found.inner), type(found.pair)) == (Several, Frozen, Old)
    again = found.many[1]["c"]
    assert (type(again), again.rows, hasattr(again, "late")) == (Computed, 2, False)
    assert float(again.total) == 4, "what was cached is computed again"
    assert found.inner.note == "n"
    assert found.nothing is None
    assert torch.equal(found.pair.first, x + 1)
    assert len(nested.tensors(value)) == 3
    assert torch.equal(value.inner.x, x)


def test_values_without_instances_are_left_as_pytree_has_them() -> None:
    for value in (1, torch.ones(1), (torch.ones(1), [2, {"a": None}]), OrderedDict(a=1), torch.Size([1, 2])):
        assert nested.opened(value) is value
        assert nested.closed(value) is value
        assert nested.flatten(value)[1] == pytree.tree_structure(value)


def test_modules_and_classes_are_no_values_to_take_apart() -> None:
    @dataclass(eq=False)
    class Layer(nn.Module):
        width: int = 2

        def __post_init__(self) -> None:
            super().__init__()

    layer = Layer()
    assert nested.leaves((layer, Frozen)) == [layer, Frozen]


def test_a_class_with_a_flattening_of_its_own_keeps_it() -> None:
    @dataclass
    class Registered:
        x: torch.Tensor
        settings: Any

    pytree.register_pytree_node(
        Registered,
        lambda one: ([one.x], one.settings),
        lambda x, settings: Registered(next(iter(x)), settings),
    )
    try:
        found = nested.map_tensors(lambda tensor: tensor + 1, Registered(torch.zeros(1), object))
        assert (float(found.x), found.settings) == (1.0, object)
        assert len(nested.leaves(found)) == 1
    finally:
        pytree._deregister_pytree_node(Registered)  # pyright: ignore[reportPrivateUsage]


def test_results_of_torch_with_names_keep_them() -> None:
    found = nested.map_tensors(torch.clone, torch.ones(2, 3).max(1))
    assert type(found) is torch.return_types.max  # pyright: ignore[reportAttributeAccessIssue]
    assert found.indices.shape == (2,)


def test_a_mapping_keeps_its_items_and_its_empty_fields() -> None:
    found = nested.map_tensors(torch.clone, Output(logits=torch.ones(1)))
    assert (type(found), list(found), found.states) == (Output, ["logits"], None)
    assert found.logits is found["logits"]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1


class Flags(enum.Flag):
    A = 1
    B = 2


def test_members_of_enums_are_part_of_the_structure() -> None:
    """They are no leaves, even where they are numbers; flags and names that are no identifiers stay leaves."""
    value = {"color": Color.RED, "size": Size.SMALL, "x": 1}
    leaves, spec = nested.flatten(value)
    assert leaves == [None, None, 1]
    assert spec != nested.flatten(value | {"color": Color.BLUE})[1]
    found = nested.unflatten(leaves, spec)
    assert found == value
    assert found["color"] is Color.RED
    assert type(found["size"]) is Size
    odd: Any = enum.Enum("odd", {"a-b": 1})
    assert nested.leaves([Flags.A | Flags.B, odd["a-b"]]) == [Flags.A | Flags.B, odd["a-b"]]


def test_members_of_enums_are_read_from_a_file() -> None:
    spec = pytree.treespec_loads(_written([Color.BLUE]))
    assert nested.unflatten([None], spec) == [Color.BLUE]
    text = _written([Color.BLUE]).replace("BLUE", "GREEN")
    with pytest.warns(StandIn, match="Color"):
        (found,) = nested.unflatten([None], pytree.treespec_loads(text))
    assert found.name == "GREEN"


def _written(value: Any) -> str:
    return pytree.treespec_dumps(nested.flatten(value)[1])


def test_a_structure_read_from_a_file_makes_instances_of_imported_classes() -> None:
    value = build()(**call())
    spec = pytree.treespec_loads(_written(value))
    found = nested.unflatten(nested.leaves(value), spec)
    assert (type(found), type(found.output), type(found.many[2])) == (Answer, Output, Pair)
    assert spec == nested.flatten(value)[1]


def test_a_class_of_the_running_script_is_found_under_its_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType("__main__")
    script.__dict__["Frozen"] = Frozen
    monkeypatch.setitem(sys.modules, "__main__", script)
    text = _written(Frozen(torch.ones(1), "n")).replace(__name__, "__mp_main__")
    assert type(nested.unflatten([torch.ones(1), "n"], pytree.treespec_loads(text))) is Frozen


@pytest.mark.parametrize(
    ("value", "module"),
    [
        (Frozen(torch.ones(1), "n"), "nowhere"),
        (Old(torch.ones(1), 1), "nowhere"),
        (Output(logits=torch.ones(1)), "nowhere.at.all"),
    ],
    ids=["dataclass", "named tuple", "mapping"],
)
def test_a_class_that_is_not_imported_has_a_stand_in_and_one_notice(value: Any, module: str) -> None:
    nested._stand_in.cache_clear()  # pyright: ignore[reportPrivateUsage]
    leaves, spec = nested.flatten(value)
    text = pytree.treespec_dumps(spec).replace(type(value).__module__, module)
    with pytest.warns(StandIn, match=rf"{module}\.{type(value).__name__}"):
        found = nested.unflatten(leaves, pytree.treespec_loads(text))
    with warnings.catch_warnings(action="error"):
        nested.unflatten(leaves, pytree.treespec_loads(text))
    names = list(value) if isinstance(value, Output) else getattr(value, "_fields", None)
    names = names or [each.name for each in fields(value)]
    assert [getattr(found, name) for name in names] == [getattr(value, name) for name in names]
    assert type(found) is not type(value)
    assert module not in sys.modules
    assert nested.flatten(found) == (leaves, pytree.treespec_loads(text)), "it is called as the class was"


def test_a_class_with_other_fields_is_not_the_one_meant() -> None:
    text = _written(Frozen(torch.ones(1), "n")).replace("note", "title")
    with pytest.warns(StandIn, match="title"):
        found = nested.unflatten([torch.ones(1), "n"], pytree.treespec_loads(text))
    assert type(found) is not Frozen
    assert found.title == "n"


@dataclass
class Closes:
    path: str

    def __del__(self) -> None:
        """Act on a field, as a class that removes its file does."""


def test_no_class_with_a_destructor_is_made_from_a_file() -> None:
    assert nested.class_of(nested.from_json(nested.to_json(nested.opened(Closes("a")).type))) is None


@pytest.mark.slow
def test_reading_imports_no_module() -> None:
    """A lazy module answers `getattr` by an import; nothing that a file names may cause one."""
    code = """if True:
        import sys, types
        from torchwright.core import nested
        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                raise SystemExit(f"asked for {name}")
        sys.modules["lazy"] = Lazy("lazy")
        assert nested.class_of(nested.from_json('["dataclass", "lazy", "Outer.Inner", ["a"]]')) is None
        assert nested.class_of(nested.from_json('["dataclass", "this", "Zen", ["a"]]')) is None
        assert "this" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "text",
    [
        "[]", "{}", "[" * 200, '["class", "m", "N", []]', '["tuple", "m", "N", ["__class__"]]',
        '["tuple", "m", "N", ["a b"]]', '["tuple", "m", "N", ["if"]]', '["tuple", "m;n", "N", []]',
        '["tuple", "m", "", []]', '["dataclass", "m", "N", [1]]', json.dumps(["tuple", "m" * 600, "N", []]),
    ],
)  # fmt: skip
def test_what_is_no_class_is_refused(text: str) -> None:
    with pytest.raises((ValueError, ArtifactError)):
        nested.from_json(text)


def test_nothing_of_a_users_is_registered() -> None:
    model, given = build(), call()
    args, kwargs = nested.opened(((), given))
    with nested.takes_records(model):
        program = torch.export.export(model, args, kwargs, strict=False)
    assert not {Answer, Output, Pair, Batch, Hidden} & set(pytree.SUPPORTED_NODES)
    assert "forward" not in vars(model)
    found = nested.closed(program.module()(**kwargs))
    torch.testing.assert_close(found.output.logits, model(**given).output.logits)


def test_plain_structures_have_dicts_and_tuples() -> None:
    value = nested.opened(build()(**call()))
    found = nested.plain(value)
    assert (type(found), type(found["many"][2])) == (dict, tuple)
    assert nested.plain_spec(pytree.tree_structure(value)) == pytree.tree_structure(found)
