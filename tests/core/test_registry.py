from importlib.metadata import EntryPoint, EntryPoints

import pytest

from torchwright.core import registry as registry_module
from torchwright.core.errors import TorchwrightError, UnknownName
from torchwright.core.registry import Registry
from torchwright.hardware.devices import devices
from torchwright.hub.formats.base import formats
from torchwright.optimization.techniques.base import techniques
from torchwright.workloads.base import workloads

pytestmark = pytest.mark.quick


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """What installed packages declare; the list is read when a registry is first used."""
    declared: list[EntryPoint] = []
    monkeypatch.setattr(registry_module, "_installed", lambda: EntryPoints(declared))
    return declared


class One:
    name = "one"


class Three:
    name = "three"


class Nameless:
    def __init__(self) -> None:
        self.name = "three"


def make() -> Registry[type]:
    return Registry("shelf", group="test.shelves", builtins={"one": f"{__name__}:One", "two": "nowhere:X"})


def test_a_built_in_is_imported_on_first_use(points):
    registry = make()
    assert registry.names() == ["one", "two"]
    assert registry.get("one") is One
    assert registry.get("one") is registry.get("one")


def test_an_entry_point_comes_through_the_same_door(points):
    points.append(EntryPoint("three", f"{__name__}:Three", "test.shelves"))
    points.append(EntryPoint("other", "collections:deque", "another.group"))
    registry = make()
    assert registry.names() == ["one", "two", "three"]
    assert registry.get("three") is Three


def test_an_unknown_name_is_refused_with_the_nearest_one(points):
    with pytest.raises(UnknownName, match=r"unknown shelf 'onne'; did you mean 'one'\?") as caught:
        make().get("onne")
    assert "torchwright shelfs" in str(caught.value)


def test_a_name_that_two_packages_claim_is_refused(points):
    points.append(EntryPoint("one", "collections:Counter", "test.shelves"))
    with pytest.raises(TorchwrightError, match="two packages register the shelf 'one'") as caught:
        make().names()
    assert "collections:Counter" in str(caught.value)


def test_the_same_target_twice_is_no_clash(points):
    points.append(EntryPoint("one", f"{__name__}:One", "test.shelves"))
    assert make().names() == ["one", "two"]


@pytest.mark.parametrize("target", ["nowhere_at_all:X", "collections:NoSuchThing"])
def test_a_target_that_cannot_be_imported_is_named(points, target):
    registry = Registry("shelf", group="test.shelves", builtins={"broken": target})
    with pytest.raises(TorchwrightError, match=f"'broken' is registered as {target} but cannot be imported"):
        registry.get("broken")


def test_iteration_imports_everything_in_order(points):
    here = {"three": f"{__name__}:Three", "one": f"{__name__}:One"}
    registry = Registry("shelf", group="test.shelves", builtins=here)
    assert list(registry) == [("three", Three), ("one", One)]


@pytest.mark.parametrize(
    ("target", "found"), [("One", "name = 'one'"), ("Nameless", "no class attribute `name`")]
)
def test_a_class_of_another_name_is_refused_in_words(points, target, found):
    points.append(EntryPoint("three", f"{__name__}:{target}", "test.shelves"))
    with pytest.raises(TorchwrightError, match="and that class has another name") as caught:
        make().get("three")
    assert found in str(caught.value)
    assert "write name = 'three' in the class" in str(caught.value)


@pytest.mark.parametrize("registry", [devices, formats, techniques, workloads], ids=lambda found: found.kind)
def test_every_built_in_has_the_name_that_it_is_registered_under(registry: Registry[type]):
    assert [cls.name for _, cls in registry] == registry.names()  # type: ignore[attr-defined]
