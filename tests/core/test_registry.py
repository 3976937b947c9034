from importlib.metadata import EntryPoint, EntryPoints

import pytest

from torchwright.core.errors import TorchwrightError, UnknownName
from torchwright.core.registry import Registry
from torchwright.hardware.devices import devices
from torchwright.hub.formats.base import formats
from torchwright.optimization.techniques.base import techniques
from torchwright.workloads.base import workloads

pytestmark = pytest.mark.quick


class One:
    name = "one"


class Three:
    name = "three"


class Nameless:
    def __init__(self) -> None:
        self.name = "three"


def make(*points: EntryPoint, **builtins: str) -> Registry[type]:
    """Return a registry where the installed packages declare `points`."""
    declared = builtins or {"one": f"{__name__}:One", "two": "nowhere:X"}
    return Registry("shelf", group="test.shelves", builtins=declared, installed=lambda: EntryPoints(points))


def test_a_built_in_is_imported_on_first_use():
    registry = make()
    assert registry.names() == ["one", "two"]
    assert registry.get("one") is One
    assert registry.get("one") is registry.get("one")


def test_an_entry_point_comes_through_the_same_door():
    registry = make(
        EntryPoint("three", f"{__name__}:Three", "test.shelves"),
        EntryPoint("other", "collections:deque", "another.group"),
    )
    assert registry.names() == ["one", "two", "three"]
    assert registry.get("three") is Three


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(UnknownName, match=r"unknown shelf 'onne'; did you mean 'one'\?") as caught:
        make().get("onne")
    assert "torchwright shelfs" in str(caught.value)


def test_a_name_that_two_packages_claim_is_refused():
    registry = make(EntryPoint("one", "collections:Counter", "test.shelves"))
    with pytest.raises(TorchwrightError, match="two packages register the shelf 'one'") as caught:
        registry.names()
    assert "collections:Counter" in str(caught.value)


def test_the_same_target_twice_is_no_clash():
    assert make(EntryPoint("one", f"{__name__}:One", "test.shelves")).names() == ["one", "two"]


@pytest.mark.parametrize("target", ["nowhere_at_all:X", "collections:NoSuchThing"])
def test_a_target_that_cannot_be_imported_is_named(target):
    registry = make(broken=target)
    with pytest.raises(TorchwrightError, match=f"'broken' is registered as {target} but cannot be imported"):
        registry.get("broken")


def test_iteration_imports_everything_in_order():
    registry = make(three=f"{__name__}:Three", one=f"{__name__}:One")
    assert list(registry) == [("three", Three), ("one", One)]


def test_more_names_are_there_for_the_duration_of_a_context():
    registry = make()
    assert registry.get("one") is One
    with registry.adding({"three": Three, "one": Nameless, "broken": "nowhere:X"}):
        assert registry.names() == ["one", "two", "three", "broken"]
        assert (registry.get("three"), registry.get("one")) == (Three, Nameless)
        with pytest.raises(TorchwrightError, match="cannot be imported"):
            registry.get("broken")
    assert registry.names() == ["one", "two"]
    assert registry.get("one") is One


@pytest.mark.parametrize(
    ("target", "found"), [("One", "name = 'one'"), ("Nameless", "no class attribute `name`")]
)
def test_a_class_of_another_name_is_refused_in_words(target, found):
    registry = make(EntryPoint("three", f"{__name__}:{target}", "test.shelves"))
    with pytest.raises(TorchwrightError, match="and that class has another name") as caught:
        registry.get("three")
    assert found in str(caught.value)
    assert "write name = 'three' in the class" in str(caught.value)


@pytest.mark.parametrize("registry", [devices, formats, techniques, workloads], ids=lambda found: found.kind)
def test_every_built_in_has_the_name_that_it_is_registered_under(registry: Registry[type]):
    assert [cls.name for _, cls in registry] == registry.names()  # type: ignore[attr-defined]
