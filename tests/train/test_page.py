"""The page of a run: its figures, its time, its data, and nobody's words as markup."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from runs import make_run

from browser_support import PHONE, chromium
from torchwright.cli.group import cli
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.loop.train import train
from torchwright.train.run.observe import page
from torchwright.train.run.observe.history import read_history
from torchwright.train.run.observe.metrics import FILE, is_run
from torchwright.train.run.observe.page import LivePage
from torchwright.train.run.observe.page_charts import epoch_marks

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J"


class Page(HTMLParser):
    """The tags of a page, and its text by the heading above."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.words: dict[str, list[str]] = {"": []}
        self._inside, self._heading = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside == "h2" and data.strip():
            self._heading = data.strip()
        self.words.setdefault(self._heading, []).extend(data.split())


@pytest.mark.slow
def test_no_page_of_a_run_is_wider_than_a_phone(tmp_path: Path) -> None:
    """Tables scroll inside of the page, and the timeline of the ledger fits it."""
    run = make_run(tmp_path, tokens=8 * 256)
    train(run, live=False)
    out = run.parent / "out"
    CliRunner().invoke(cli, ["report", str(out)], standalone_mode=False)
    CliRunner().invoke(
        cli, ["time-report", str(out), "--html", str(tmp_path / "time.html")], standalone_mode=False
    )
    pages = [out / page.PAGE, out / "report.html", tmp_path / "time.html"]
    with chromium(tmp_path / "profile") as browser:
        browser.show(PHONE)
        for file in pages:
            browser.ask("Page.navigate", url=file.as_uri())
            browser.reload()
            assert browser.count("h2"), file.name
            assert browser.run("document.documentElement.scrollWidth") <= PHONE[0], file.name


def test_a_run_has_a_page(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        tokens=8 * 256,
        data={"mixture": {name: {"files": [f"{name}.npy"], "weight": 1} for name in "ab"}},
    )
    train(run, live=False)
    out = run.parent / "out"
    left = (out / page.PAGE).read_text()
    assert "finished" in left, "the run leaves its page"
    assert 'http-equiv="refresh"' not in left
    assert "0 → 8" in left
    answer = CliRunner().invoke(cli, ["report", str(out)], standalone_mode=False)
    assert answer.output.strip() == str(out / "report.html"), answer.output
    found = Page((out / "report.html").read_text())
    assert {"Loss", "Learning rate", "Gradient norm", "Tokens per second", "Starts", "Events"} <= set(
        found.words
    )
    assert "0 → 8" in " ".join(found.words["Starts"])
    # Half of 2,048 tokens come from each source, of 3,000 and of 2,000.
    assert found.words["Data"][7:] == ["a", "1", "3,000", "0.34", "times", "b", "1", "2,000", "0.51", "times"]
    loss = read_history(out).latest()["loss"]
    assert f"{loss:.4f}" in found.words["Next"], "the tiles follow the box of the next command"


def test_what_is_held_out_has_its_figures_and_curves(tmp_path: Path) -> None:
    """Of a run of any kind: the report of one with an evaluation was once a fault."""
    lines: list[dict[str, Any]] = [
        {"event": "start", "at": 0, "steps": 4, "torch": "2", "world": 1, "run": {}},
        *(
            {"step": step, "samples": 8 * step, "loss": 3.0 / step, "accuracy": step / 8}
            for step in (1, 2, 3)
        ),
        {"event": "evaluation", "at": 2, "validation_loss": 1.23456, "validation_accuracy": 0.25},
        {"event": "evaluation", "at": 3, "validation_loss": 1.12345, "validation_accuracy": 0.625},
    ]
    (tmp_path / FILE).write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = Page(page.render(tmp_path, read_history(tmp_path)))
    tiles = " ".join(found.words[""])
    assert "Validation loss 1.1235" in tiles or "1.1235 Validation loss" in tiles
    assert "62.5%" in tiles
    assert "37.5%" in tiles
    assert {"Loss", "Accuracy"} <= set(found.words)
    assert "validation" in found.words["Accuracy"]


def test_nobodys_words_are_markup(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {
            "event": "start",
            "at": 0,
            "steps": 9,
            "torch": HOSTILE,
            "world": 1,
            "run": {"out": HOSTILE},
            "data": {HOSTILE: {"files": 1, "tokens": 5}},
        },
        {"event": "broken_rows", "file": HOSTILE, "broken": 3, "rows": [[1, HOSTILE], "no pair"]},
        {"step": 1, "loss": 2.0, "lr": float("nan"), HOSTILE: 1.0},
        {"event": "sample", "at": 1, "text": HOSTILE},
        {"event": "qat_receipt", "at": 1, "scheme": HOSTILE},
        {"event": "stopped", "at": 1, "reason": HOSTILE},
    ]
    (tmp_path / FILE).write_text("\n".join(map(json.dumps, lines)) + "\n")
    text = page.render(tmp_path, read_history(tmp_path))
    found = Page(text)
    assert not {"script", "img"} & found.tags
    assert "\x1b" not in text
    assert text.count("&lt;script&gt;alert(1)") == 9
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


def test_a_folder_of_neither_kind_is_none(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    (tmp_path / FILE).write_text("")
    assert is_run(tmp_path)
    assert "Step 0" in page.render(tmp_path, read_history(tmp_path))


def lines(folder: Path, *told: dict[str, Any]) -> None:
    (folder / FILE).write_text("".join(json.dumps(line) + "\n" for line in told))


START: dict[str, Any] = {"event": "start", "at": 0, "steps": 8, "torch": "2", "world": 1, "run": {"seed": 0}}


def test_epochs_are_marked_where_they_end(tmp_path: Path) -> None:
    steps = [{"step": step, "loss": 1.0, "epoch": 0.3 * step} for step in (2, 4, 6, 8)]
    lines(tmp_path, START, *steps)
    assert epoch_marks(read_history(tmp_path)) == [(3, 1.0), (7, 2.0)]
    # One line may pass several epochs.
    lines(tmp_path, START, {"step": 4, "loss": 1.0, "epoch": 2.0}, {"step": 8, "loss": 1.0, "epoch": 4.0})
    assert epoch_marks(read_history(tmp_path)) == [(2, 1.0), (4, 2.0), (6, 3.0), (8, 4.0)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"event": "start", "at": 0, "steps": 9, "run": {"data": 5}, "data": {"a": {"files": 1}}},
        {"event": "start", "at": 0, "steps": 9, "run": {}, "data": {"a": 7}},
        {"event": "start", "at": 0, "steps": 9, "run": {"evaluation": 3}},
    ],
    ids=["mixture", "source", "evaluation"],
)
def test_figures_that_no_run_writes_are_refused_in_words(tmp_path: Path, wrong: dict[str, Any]) -> None:
    lines(tmp_path, wrong)
    with pytest.raises(RunError, match="are damaged"):
        page.write(tmp_path)


def test_an_epoch_of_any_number_ends_no_report(tmp_path: Path) -> None:
    lines(tmp_path, START, {"step": 4, "loss": 1.0, "epoch": 1.0}, {"step": 8, "loss": 1.0, "epoch": 1e18})
    assert epoch_marks(read_history(tmp_path)) == [(4, 1.0)]


def test_a_run_at_work_writes_its_page_but_not_all_the_time(tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5  # what writing the page seems to take
        return now

    shown = LivePage(tmp_path, clock)
    lines(tmp_path, START, {"step": 2, "loss": 1.0, "tokens": 10, "tokens_per_s": 1.0})
    shown.refresh()
    assert not (tmp_path / page.PAGE).exists()
    now = page.RELOAD + 1.0
    shown.refresh()
    text = (tmp_path / page.PAGE).read_text()
    found = Page(text)
    assert 'http-equiv="refresh"' in text
    assert {"progress", "meta"} <= found.tags
    assert "30.0" in found.words[""], "seconds left"
    assert "--watch" in found.words["Next"]
    (tmp_path / page.PAGE).unlink()
    now += page.RELOAD + 5
    shown.refresh()
    assert not (tmp_path / page.PAGE).exists(), "half a second may be spent in 25, not in 10"
    now += 0.5 / page.SHARE
    shown.refresh()
    assert (tmp_path / page.PAGE).exists()
    LivePage(None, clock).refresh()


def test_samples_are_shown_by_step_with_their_prompts(tmp_path: Path) -> None:
    samples = [
        {"event": "sample", "at": step, "prompt": "The", "text": f"The {word}"}
        for step, word in ((2, "cat"), (4, "dog"))
    ]
    lines(tmp_path, START, *samples)
    text = page.render(tmp_path, read_history(tmp_path))
    assert "<b>The</b> dog" in text
    assert text.index("dog") < text.index("Earlier samples") < text.index("cat")
    lines(tmp_path, START | {"run": {"evaluation": {"prompts": []}}})
    assert "evaluation.prompts" in page.render(tmp_path, read_history(tmp_path))


def test_losses_that_part_are_told_on_the_page(tmp_path: Path) -> None:
    held_out = [
        {"event": "evaluation", "at": step, "validation_loss": loss}
        for step, loss in ((2, 1.5), (4, 1.25), (6, 1.75))
    ]
    told = {"event": "memorizes", "at": 6, "best": 4, "loss": 1.25}
    lines(
        tmp_path,
        START,
        {"step": 2, "loss": 1.0},
        *held_out,
        told,
        {"event": "stopped", "at": 6, "reason": "no"},
    )
    found = Page(page.render(tmp_path, read_history(tmp_path)))
    words = " ".join(found.words[""])
    assert "From step 4 to step 6 the validation loss rose" in words
    assert "stopped" in words
    assert "1.7500 best 1.2500 at step 4" in words


@pytest.mark.parametrize("name", ["report/run", "report/report", "report/profile", "train/ledger/timeline"])
def test_every_table_scrolls_and_shows_it(name: str) -> None:
    """On a phone: a table wider than the page is cut off without a container that scrolls and has a shadow."""
    templates = Path(page.__file__).parents[3]
    text = (templates / f"{name}.html.j2").read_text()
    before = [part.rstrip()[-60:] for part in text.split("<table")[:-1]]
    assert before
    assert all('class="scroll"' in part or "class='scroll'" in part for part in before)
    assert "min-width: 40rem" not in text
    assert "scroll;" in (templates / "report" / "report.css.j2").read_text()
