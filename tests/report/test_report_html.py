"""The page: whole, escaped, self-contained, and sensible with whatever is missing."""

from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from PIL import Image

from factories import (
    make_device,
    make_interval,
    make_quality,
    make_recipe,
    make_roofline,
    make_rung,
    make_shipped_recipe,
    make_unchanged_recipe,
)
from torchwright.core.records import Budget, Coverage, Ranked, Step
from torchwright.report import drawing, figures, view, wording
from torchwright.report.html import render
from torchwright.report.pictures import WIDEST, row_of

VOID = {"meta", "br", "wbr", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Reads a page strictly: every tag is closed in its order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page() -> str:
    return render(make_recipe())


def test_every_number_and_reason_appears(page: str) -> None:
    text = Page(page).text
    for rung in make_recipe().rungs:
        assert rung.reason in text
        assert rung.status in text
        if rung.speedup is not None:
            assert wording.ratio(rung.speedup) in text
            assert wording.bounds(rung.speedup) in text
        if rung.memory_bytes is not None:
            assert wording.size(rung.memory_bytes) in text
    for fact in (
        "2.88x",
        "[2.79, 2.97]",
        "3.35 s",
        "1,243 → 2,994",
        "61.4 GB/s",
        "torch 2.13.0+cpu",
        "amx_int8",
    ):
        assert fact in text
    assert make_recipe().command in text
    assert "1.9% alone" in text
    assert "197 of 211 linear layers" in text
    assert "torchwright::int8_amx" in text


def test_nothing_is_loaded_and_nothing_runs(page: str) -> None:
    assert not re.search(r"https?:", page)
    tags = Page(page).tags
    assert {"script", "link", "img", "iframe", "object", "image"}.isdisjoint(tag for tag, _ in tags)
    for _, attributes in tags:
        assert not any(name.startswith("on") or name == "src" for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert "@import" not in page
    assert any(attributes.get("http-equiv") == "Content-Security-Policy" for _, attributes in tags)


def test_pictures_lie_in_the_page_itself() -> None:
    random = np.random.default_rng()
    small, wide = (random.integers(0, 256, size, np.uint8) for size in ((20, 30, 3), (50, 2 * WIDEST, 3)))
    row = row_of("<b>a cat</b>", "mean IoU 0.5", {"original": small, "optimized": wide})
    page = Page(render(make_recipe(), [row]))
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    shown = []
    for attributes in images:
        kind, _, data = (attributes["src"] or "").partition(",")
        assert kind == "data:image/png;base64"
        shown.append(np.array(Image.open(io.BytesIO(base64.b64decode(data)))))
        assert shown[-1].shape == (int(attributes["height"] or 0), int(attributes["width"] or 0), 3)
    assert np.array_equal(shown[0], small)
    assert shown[1].shape == (25, WIDEST, 3)
    assert images[1]["alt"] == "<b>a cat</b>: optimized"
    policy = [a["content"] or "" for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
    assert "<b>a cat</b>" in page.text
    assert "mean IoU 0.5" in page.text


def test_a_row_tells_what_its_own_step_changed() -> None:
    """Not what those before it did, in the recipe that it was tried on."""
    types = Coverage(technique="dtype", changed=0, total=9, unit="types")
    first, second = (
        Coverage(technique="int8_dynamic", changed=n, total=9, unit=unit)
        for n, unit in enumerate(["linears", "later linears"], 1)
    )
    rungs = (
        make_rung(step=Step(name="dtype"), coverage=(types,)),
        make_rung(
            step=Step(name="int8_dynamic", options={"parts": ["vae"]}), coverage=(types, first, second)
        ),
    )
    words = Page(render(make_recipe(rungs=rungs))).words
    assert words.count("0 of 9 types") == 1
    assert words.count("2 of 9 later linears") == 1


def make_ranked_rung(**overrides: Any) -> Any:
    """A quantization that left two of forty layers alone, by what they do to a picture."""
    names = ["transformer.proj_out", "transformer.blocks.0.ff", *(f"vae.{n}" for n in range(8))]
    ranking = tuple(Ranked(name=name, error=0.0133 / (n + 1), whole=True) for n, name in enumerate(names))
    step = Step(name="int8_dynamic", options={"skip": names[:2]})
    return make_rung(**({"step": step, "ranking": ranking, "ranked": 40} | overrides))


def test_the_layers_that_lose_most_are_named_with_what_they_lose() -> None:
    page = render(make_recipe(rungs=(make_ranked_rung(),)))
    words = " ".join(" ".join(Page(page).words).split())
    assert "int8_dynamic: the 2 worst of 40 layers were left alone" in words
    assert "transformer.proj_out 1.33% all that comes out left alone" in words
    assert "vae.0 0.44% all that comes out changed" in words
    assert "30 more lose less" in words
    (found,) = view.rankings(make_recipe(rungs=(make_ranked_rung(),)))
    assert found.said == (
        "int8_dynamic: the 2 worst of 40 layers were left alone (transformer.proj_out 1.33%, "
        "transformer.blocks.0.ff 0.66% of all that comes out, by itself)"
    )


def test_layers_that_stay_in_float32_are_left_alone() -> None:
    step = Step(
        name="dtype", options={"autocast": True, "keep_float32": ["transformer.proj_out"], "parts": ["vae"]}
    )
    (found,) = view.rankings(make_recipe(rungs=(make_ranked_rung(step=step),)))
    assert found.heading == "dtype: the worst of 40 layers was left alone"


def test_a_retreat_that_was_in_vain_says_so() -> None:
    own = (Ranked(name="a", error=0.1), Ranked(name="b", error=0.05))
    step = Step(name="w4a8", options={"skip": ["a"]})
    bold = make_ranked_rung(step=Step(name="w4a8", options={"skip": 7}), ranking=own, ranked=2)
    rung = make_rung("dropped", step=step, ranking=own, ranked=2)
    (found,) = view.rankings(make_recipe(rungs=(bold, rung)))
    assert found.said == (
        "w4a8: the worst of 2 layers was left alone, and the step was dropped all the same (a 10.00% of the layer's "
        "own output, by itself)"
    )
    assert "Which layers lose the most" in render(make_recipe(rungs=(bold,)))


def test_ids_are_unique_and_references_resolve(page: str) -> None:
    tags = Page(page).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = {name for _, attributes in tags for name in (attributes.get("aria-labelledby") or "").split()}
    used |= {(attributes.get("href") or "").removeprefix("#") for _, attributes in tags} - {""}
    used |= set(re.findall(r"url\(#([^)]+)\)", page))
    assert used
    assert used <= set(ids)


def test_figures_are_named_and_tables_have_headers(page: str) -> None:
    tags = Page(page).tags
    drawings = [attributes for tag, attributes in tags if tag == "svg"]
    assert len(drawings) == 6
    assert all(attributes["role"] == "img" and attributes["aria-labelledby"] for attributes in drawings)
    assert all("scope" in attributes for tag, attributes in tags if tag == "th")


def test_figures_follow_the_theme(page: str) -> None:
    """A colour that is no role would not change with the theme."""
    styles = [attributes.get("style") or "" for _, attributes in Page(page).tags]
    assert not [style for style in styles if re.search(r"(?<!, )#[0-9a-f]{6}", style)]
    roles = {role for style in styles for role in re.findall(r"var\(--([\w-]+)", style)}
    assert all(f"--{role}:" in page for role in roles)


def test_the_same_recipe_gives_the_same_page(page: str) -> None:
    assert render(make_recipe()) == page


HOSTILE = "</title></svg><script>alert(1)</script>\"'&{{ 7*7 }} \x1b[31m\x00\ud800 $\\frac{1}{$ \x0c"


def test_hostile_text_is_escaped() -> None:
    rung = make_rung(
        step=Step(name=HOSTILE, options={HOSTILE: HOSTILE}),
        reason=HOSTILE,
        speedup=make_interval(1.5),
        memory_bytes=1000,
        quality=make_quality(0.001, metric=HOSTILE, extras={HOSTILE: 1.0}),
        coverage=(
            Coverage(
                technique=HOSTILE,
                changed=1,
                total=2,
                unit=HOSTILE,
                kernel=HOSTILE,
                skipped={HOSTILE: HOSTILE},
            ),
        ),
    )
    recipe = make_recipe()
    case = dataclasses.replace(recipe.baseline.cases[0], name=HOSTILE)
    text = render(
        make_recipe(
            workload={"name": HOSTILE},
            rungs=(rung,),
            notes=(HOSTILE,),
            command=HOSTILE,
            baseline=dataclasses.replace(recipe.baseline, cases=(case,)),
            final=dataclasses.replace(recipe.final, cases=(case,), quality=rung.quality),
            roofline=tuple(
                dataclasses.replace(point, case=HOSTILE, dtype=HOSTILE) for point in make_roofline()
            ),
            fingerprint=dataclasses.replace(
                recipe.fingerprint,
                libraries={HOSTILE: HOSTILE},
                device=make_device(name=HOSTILE, isa=(HOSTILE,), tflops={HOSTILE: 1.0}),
            ),
        )
    )
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "alert(1)" in page.text
    assert "{{ 7*7 }}" in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
    text.encode()


def test_nothing_kept_and_everything_missing() -> None:
    page = Page(render(make_unchanged_recipe()))
    assert "The original is already the fastest within the budget" in page.text
    assert "no metric was measured" in page.text
    assert "best case 1.01x" in page.text
    assert "ceilings" not in page.text
    assert "None" not in page.text
    Page(render(make_unchanged_recipe(rungs=())))
    page = Page(
        render(make_unchanged_recipe(rungs=(make_rung("untried"),), command="torchwright optimize model"))
    )
    assert "Inconclusive: nothing faster was found" in page.text
    assert "none of these paid" not in page.text
    assert "torchwright optimize model --time-budget 300 --resume" in page.text


def test_what_was_refused_is_one_line_that_opens() -> None:
    refused = [
        make_rung("refused", step=Step(name=name), reason=f"no {name} here") for name in ("alpha", "beta")
    ]
    text = render(make_recipe(rungs=(refused[0], make_rung(), refused[1])))
    page = Page(text)
    assert "2 techniques do not apply or cannot pay" in page.text
    assert "no alpha here" in page.text
    assert text.index("<summary>2 techniques do not apply or cannot pay</summary>") < text.index(
        "no alpha here"
    )
    numbers = re.findall(r'class="index">(\d+)</span><span>', text)
    assert numbers == ["1"], "steps are numbered from 1, without those that are only counted"
    assert figures.waterfall(make_recipe(rungs=tuple(refused))).count("alpha") == 0


@pytest.mark.parametrize("count", [6, 7])
def test_many_steps_that_were_not_tried_do_not_stand_between_those_that_were(count: int) -> None:
    names = [f"later{number}" for number in range(count)]
    untried = [make_rung("untried", step=Step(name=name), reason=f"no time for {name}") for name in names]
    recipe = make_recipe(rungs=(make_rung(), *untried), command="torchwright optimize model")
    text, drawn = render(recipe), figures.waterfall(recipe)
    page = Page(text)
    assert all(f"no time for {name}" in page.text for name in names)
    assert f"Untried for lack of time: {', '.join(names)}. To go on" in page.text
    numbers = re.findall(r'class="index">(\d+)</span><span>', text)
    if count == 7:
        assert "<summary>7 untried</summary>" in text
        assert (len(numbers), "later" in drawn) == (1, False)
    else:
        assert "<summary>" not in text[: text.index("Reproduce it")]
        assert (len(numbers), "later" in drawn) == (7, True)


def test_a_step_that_was_removed_has_no_part_in_the_total() -> None:
    removed = make_rung("removed", speedup=make_interval(1.4), total_speedup=make_interval(52.69))
    assert "52.69x" not in Page(render(make_recipe(rungs=(make_rung(), removed)))).text


def test_the_page_speaks_of_steps(page: str) -> None:
    assert "rung" not in Page(page).text.partition("The recipe as JSON")[0]


def test_a_row_of_an_earlier_search_says_so() -> None:
    page = Page(render(make_recipe(rungs=(make_rung(earlier=True),))))
    assert "(earlier search) 1.52x is outside" in page.text


@pytest.mark.parametrize(
    "overrides",
    [
        {"rungs": (make_rung(), make_rung("dropped", quality=make_quality(-0.002)))},
        {"rungs": (make_rung(speedup=make_interval(0.9), total_speedup=make_interval(0.9)),)},
        {"budget": Budget(max_drop=0.0, objective="throughput")},
        {"rungs": (make_rung("refused", step=Step(name="量子化", options={"模型": "x" * 300})),) * 40},
        {"roofline": make_roofline()[:1]},
    ],
    ids=["kept without numbers", "slower but kept", "no loss allowed", "many and wide", "one point"],
)
def test_odd_recipes(overrides: dict[str, Any]) -> None:
    Page(render(make_recipe(**overrides)))


@pytest.mark.parametrize(
    "device", [{"read_gb_per_s": None}, {"tflops": {}}, {"read_gb_per_s": None, "tflops": {}}]
)
def test_roofline_needs_a_ceiling(device: dict[str, Any]) -> None:
    recipe = make_recipe()
    recipe = dataclasses.replace(
        recipe, fingerprint=dataclasses.replace(recipe.fingerprint, device=make_device(**device))
    )
    assert (figures.roofline(recipe) is None) == (len(device) == 2)
    Page(render(recipe))


def test_calls_at_one_place_of_the_roofline_have_labels_apart() -> None:
    point = make_roofline()[-1]
    points = tuple(dataclasses.replace(point, case=name) for name in ("encode", "decode", "write"))
    drawn = figures.roofline(make_recipe(roofline=points))
    assert drawn is not None
    heights = [
        float(
            element.get("y") or re.findall(r"translate\(\S+[ ,](\S+?)\)", element.get("transform") or "")[0]
        )
        for element in ET.fromstring(drawn).iter()
        if element.tag.endswith("text") and re.match("(encode|decode|write) ", element.text or "")
    ]
    assert len(heights) == 3
    assert min(abs(a - b) for a, b in itertools.combinations(heights, 2)) > 8


def test_what_the_speed_up_is_of() -> None:
    text = Page(render(make_shipped_recipe())).text
    assert (
        "loaded in a fresh process and called as its user calls it. What ran was ahead-of-time package ."
        in text
    )
    assert "Of the 2.88x, 1.62x [1.57, 1.67] is left without the allocator step" in text
    assert "1.75x [1.70, 1.80] against an original" in text
    for row in (
        "1 10.0 ms 1.90x [1.84, 1.96]",
        "16 (the example) 1.16 s 2.88x [2.79, 2.97]",
        "32 310 ms 2.40x",
    ):
        assert row in text
    assert "holds no model" not in text
    assert "What the speed-up is of" not in Page(render(make_recipe())).text


def test_a_busy_machine_is_told_of() -> None:
    assert "on a busy machine" not in Page(render(make_recipe())).text
    text = Page(render(make_recipe(speedup=make_interval(2.0).on_busy_machine()))).text
    assert "1.94x [1.94, 2.06], 95% interval of paired runs; measured on a busy machine" in text


def test_the_interval_of_the_loss() -> None:
    measured = make_recipe()
    quality = make_quality(0.004, drop_low=0.001)
    text = Page(render(make_recipe(final=dataclasses.replace(measured.final, quality=quality)))).text
    assert "95% interval of the loss 0.10% to 0.52%" in text
    assert "95% interval of the loss" not in Page(render(measured)).text, "a recipe of before has no low end"


def test_an_artifact_without_a_model_says_what_it_needs() -> None:
    text = Page(render(make_shipped_recipe(runs_as=view.OWN_MODULE))).text
    assert "The artifact holds no model: tw.load(DIR, model=…) replays the recipe on your own module." in text
    assert "What runs is the original as it is" in Page(render(make_unchanged_recipe())).text


def test_the_chain_of_kept_rungs_ends_where_the_last_one_was_measured() -> None:
    stages = view.stages(make_recipe())
    base = make_recipe().baseline.seconds
    assert stages[0].start == base
    assert stages[3].start == stages[1].end == pytest.approx(base / 1.58)
    assert stages[2].end == pytest.approx(stages[2].start / 1.83), (
        "a dropped rung is compared with the best so far"
    )
    assert stages[4].end is None
    assert stages[6].start == stages[7].start == stages[5].end, (
        "removed and dropped steps do not move the chain"
    )
    assert [stage.number for stage in stages] == list(range(1, 9))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (0.0, "0.00 s"),
        (1.0, "1.00 s"),
        (0.0123, "12.3 ms"),
        (4.5e-5, "45.0 µs"),
        (212.0, "212 s"),
        (None, "–"),
    ],
)
def test_seconds(given: float | None, text: str) -> None:
    assert wording.seconds(given) == text


@pytest.mark.parametrize(
    ("given", "text"),
    [(0, "±0 B"), (-310e6, "-310 MB"), (1.02e9, "+1.02 GB"), (1500, "+1.50 kB"), (None, "–")],
)
def test_signed_size(given: float | None, text: str) -> None:
    assert wording.size(given, signed=True) == text


@pytest.mark.parametrize(
    ("count", "spent", "text"),
    [(None, None, ""), (None, 2.0, "never"), (0.2, 2.0, "at once"), (1.0, 2.0, "1 call"), (3.1, 2.0, "4 calls"),
     (12_345.0, 2.0, "12.3k calls"), (3.2e6, 2.0, "3.20M calls")],
)  # fmt: skip
def test_payback(count: float | None, spent: float | None, text: str) -> None:
    assert wording.calls(count, spent) == text


def drawn(plate: drawing.Plate) -> list[ET.Element]:
    return [*ET.fromstring(plate.svg("key", "title", "about"))]


@pytest.mark.parametrize(
    ("low", "high", "most", "wanted"),
    [
        (0.3, 30, 9, [0.5, 1, 2, 5, 10, 20]),
        (0.3, 30, 4, [1, 10]),
        (1e-3, 1e6, 5, [1e-2, 1, 1e2, 1e4, 1e6]),
        (2.1, 4.9, 4, []),
    ],
)
def test_ticks_of_a_logarithmic_axis(low: float, high: float, most: int, wanted: list[float]) -> None:
    plate = drawing.Plate(400, 300, left=40, right=10, top=10, bottom=40)
    told: list[float] = []
    plate.axis("x", low, high, lambda value: told.append(value) or "", "", log=True, most=most)
    assert told == pytest.approx(wanted)


def test_places_are_pixels_of_the_axes() -> None:
    plate = drawing.Plate(400, 300, left=40, right=60, top=20, bottom=30)
    plate.axis("x", 0, 10, str, "seconds")
    plate.rows(5)
    plate.bar(2.5, 2, 4, 0.5, drawing.KEPT)
    plate.mark(10, 0, "o", drawing.PAPER, drawing.KEPT, extent=8)
    plate.text(7, 5, "words", drawing.INK, align="right")
    shapes = drawn(plate)
    (bar,) = (shape for shape in shapes if shape.tag == "rect")
    (circle,) = (shape for shape in shapes if shape.tag == "circle")
    (words,) = (shape for shape in shapes if shape.text == "words")
    place = {name: float(bar.attrib[name]) for name in ("x", "y", "width", "height")}
    assert place == {"x": 40 + 300 * 0.2, "y": 20 + 250 * 2.25 / 5, "width": 60, "height": 25}
    assert (circle.get("cx"), circle.get("cy"), circle.get("r")) == ("340", "20", "4")
    assert (words.get("x"), words.get("text-anchor")) == ("7", "end")
    assert float(words.attrib["y"]) == pytest.approx(270 + drawing.MIDDLE * drawing.TEXT)


@pytest.mark.parametrize("shape", ["o", "s", "D", "^", "v", "P", "X", "x"])
def test_every_mark_is_drawn_around_its_place(shape: str) -> None:
    plate = drawing.Plate(200, 200, left=0, right=0, top=0, bottom=0)
    before = len(drawn(plate))
    plate.mark(0.5, 0.5, shape, drawing.KEPT, extent=10)
    new = drawn(plate)[before:]
    assert new
    for element in new:
        if element.tag == "path":
            numbers = [float(number) for number in re.findall(r"[\d.]+", element.attrib["d"])]
            assert max(numbers) - 100 == pytest.approx(100 - min(numbers))
            assert max(numbers) - 100 == pytest.approx(7 if shape == "D" else 5)
