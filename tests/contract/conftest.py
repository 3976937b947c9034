"""What is collected here comes from the package, which pytest would not rewrite the assertions of.

The examples of speech and diffusion are made here: the folders they need are no part of the package.
"""

from pathlib import Path

import pytest

pytest.register_assert_rewrite("torchwright.testing")

import torch  # noqa: E402

from torchwright.testing.examples import BUILT_IN  # noqa: E402
from torchwright.workloads.base import Workload  # noqa: E402
from torchwright.workloads.detect import from_target  # noqa: E402


def _speech(folder: Path) -> Workload:
    from whispers import tiny

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return from_target(str(tiny(folder)), new_tokens=8)


def _diffusion(folder: Path) -> Workload:
    from pixart import write_pixart

    return from_target(str(write_pixart(folder)), steps=3)


def _vision_language(folder: Path) -> Workload:
    import vlms
    from torchwright.models.vision.reader import PictureReader

    vlms.save("Llava", folder)  # whose pictures have no sizes that other values would break
    place = PictureReader(folder).placeholder
    template = "{% for message in messages %}{% for part in message.content %}"
    template += f"{{% if part.type == 'image' %}}{place}"
    template += "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return from_target(str(folder), new_tokens=4)


BUILT_IN |= {"speech": _speech, "diffusion": _diffusion, "vision_language": _vision_language}


COVERED = [
    ("engine", ("aot", "perceptron")),
    ("engine", ("aot", "parts")),
    ("engine", ("jit", "parts")),
    ("engine", ("jit", "perceptron")),
    ("numbers", "aot"),
    ("numbers", "jit"),
    ("model", "windowed"),
    ("model", "torch encoder"),
]
"""Values of fixtures that meet in the sweep alone: a C++ compiler takes 8 to 20 s of processor time for each.

Every model has an engine in the plain run, where `test_api` and `test_trial` compile. Limits of numbers are held there
by `test_engines_guards` and `test_engines_inner_nan`, which give the same checks graphs without a compiler.
"""
COVERED_TESTS = {
    "test_an_engine_and_its_artifacts_keep_the_classes": ("aot", "jit"),
    "test_what_changes_its_inputs_is_refused_or_changes_them": ("aot", "jit"),
    "test_ceilings_are_positive": ("cpu",),
}
"""Tests by name, likewise: `eager` keeps the classes in the plain run, `test_engines_call_dispatcher` gives graphs
whose inputs change, and `test_devices` measures the CPU with smaller sizes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what neighbours cover, before pytest selects by marks."""
    for item in items:
        here = item.path.parent == Path(__file__).parent
        if not here or not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        values = item.callspec.params
        if any(values.get(name) == value for name, value in COVERED) or (
            {values.get("name"), values.get("device")} & set(COVERED_TESTS.get(item.originalname, ()))
        ):
            item.add_marker("sweep")
