"""benchmarks/board: rows in one form, changes between commits that are earned, and pages that run nothing of a row."""

from __future__ import annotations

import html.parser
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from benchmarks import regressions  # noqa: E402
from benchmarks.board import compare, keep, pages, rows, statistics, tables  # noqa: E402

HOSTILE = "</script><script>alert(1)</script>\" onload='x' &amp; \x1b[31m"


def record(interval: tuple[float, float, float], commit: str = "aaa", **changes: Any) -> dict[str, Any]:
    """A row in the uniform form."""
    figure = {"technique": "Torchwright", "measure": "over the original", "interval": list(interval)}
    plain = {
        "benchmark": "benchmarks.x.y",
        "workload": "net",
        "conditions": "batch 2",
        "device": "a processor",
        "threads": 2,
        "commit": commit,
        "date": "2026-11-30",
        "versions": {"torch": "2.13.0"},
        "command": "python -m benchmarks.x.y",
        "figures": [figure],
    }
    return plain | changes


def made(*records: dict[str, Any]) -> list[rows.Row]:
    return [rows.uniform_row(each, f"benchmarks/x.jsonl:{n}") for n, each in enumerate(records, 1)]


def write(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "x.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


# Regressions


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ((1.7, 1.65, 1.75), "regression"),
        ((1.7, 1.50, 1.96), "undecided"),  # 15% lower, but the intervals overlap
        ((1.85, 1.84, 1.86), "within 10%"),
        ((2.3, 2.20, 2.40), "improvement"),
        ((2.0, 1.90, 2.10), "undecided"),
    ],
)
def test_a_change_is_earned_by_its_interval_and_its_size(
    after: tuple[float, float, float], verdict: str
) -> None:
    (found,) = compare.changes(made(record((2.0, 1.95, 2.05)), record(after, "bbb")))
    assert found.verdict == verdict


def test_a_regression_stays_until_the_figure_recovers() -> None:
    fell = [record((2.0, 1.9, 2.1)), record((1.0, 0.9, 1.1), "bbb"), record((1.0, 0.95, 1.05), "ccc")]
    (found,) = compare.regressions(made(*fell))
    assert (found.before.label, found.after.label) == ("aaa", "ccc")
    assert not compare.regressions(made(*fell, record((1.95, 1.85, 2.05), "ddd")))


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "another"},
        {"threads": 1},
        {"conditions": "batch 4"},
        {"workload": "other"},
        {"benchmark": "benchmarks.x.z"},
        {"commit": "aaa"},
        {"commit": "bbb, changed"},
        {"commit": ""},
    ],
)
def test_other_machines_conditions_and_trees_with_changes_are_not_compared(changes: dict[str, Any]) -> None:
    fell = record((1.0, 0.9, 1.1), "bbb")
    assert not compare.changes(made(record((2.0, 1.9, 2.1)), fell | changes))


def test_of_one_commit_the_newest_row_counts() -> None:
    found = made(record((1.0, 0.9, 1.1)), record((2.0, 1.9, 2.1)), record((1.9, 1.85, 1.95), "bbb"))
    (change,) = compare.changes(found)
    assert change.before.value == 2.0


def test_the_command_names_regressions_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "rows", record((2.0, 1.9, 2.1)), record((1.0, 0.9, 1.1), "bbb"))
    assert regressions.main(["--rows", str(folder)]) == 1
    text = capsys.readouterr().out
    assert "net (batch 2), Torchwright over the original, on a processor, 2 threads: -50%" in text
    assert "2.00x [1.90, 2.10] at aaa" in text
    assert "python -m benchmarks.x.y" in text
    assert regressions.main(["--rows", str(folder), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert found["ratio"] == 0.5
    assert found["after"]["commit"] == "bbb"
    write(folder, record((2.0, 1.9, 2.1)), record((1.95, 1.9, 2.0), "bbb"))
    assert regressions.main(["--rows", str(folder)]) == 0
    assert "0 regressions in 1 comparisons" in capsys.readouterr().out


# Rows


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "JSONDecodeError"),
        ("[1]", "a row is a JSON object"),
        ("{}", "KeyError"),
        (json.dumps(record((1.0, 1.1, 1.2))), "not an interval"),
        (json.dumps(record((1.0, 0.0, 1.2))), "not an interval"),
        (json.dumps(record((float("nan"), 0.9, 1.2))), "not an interval"),
        (json.dumps(record((1.0, 0.9, float("inf")))), "not an interval"),
        (json.dumps(record((1.0, 0.9, 1.1), figures=[3])), "TypeError"),
        (json.dumps(record((1.0, 0.9, 1.1), versions=[])), "AttributeError"),
        ('"' + "x" * rows.LONGEST, "longer than"),
    ],
)
def test_a_line_that_is_no_row_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, says: str
) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(record((1.0, 0.9, 1.1))) + "\n" + line + "\n")
    with pytest.raises(rows.BadRow, match=says) as error:
        rows.read(tmp_path)
    assert "/x.jsonl:2: " in str(error.value)
    assert regressions.main(["--rows", str(tmp_path)]) == 2
    assert "/x.jsonl:2: " in capsys.readouterr().err


def test_a_zoo_row_has_its_ratios_and_the_best_variant_of_every_technique() -> None:
    tried = [
        "openvino: dropped, 1.5x",
        "openvino:precision=bf16: kept, 4.75x",
        "compile: untried, it would need about 47 s, and 2 s were left for trials",
    ]
    row = rows.zoo_row(
        {
            "model": "BertModel",
            "cut": "4 layers of 12",
            "budget": 0.01,
            "batch": 2,
            "kept": "openvino:precision=bf16",
            "claim": [5, 4.9, 5.1],
            "fresh_loss": 0.002,
            "over": {"original": [5.2, 5.0, 5.6], "openvino": [1.0, 0.9, 1.1]},
            "best": {"openvino": "bf16"},
            "tried": tried,
            "versions": {"torch": "2.13"},
            "cpu": "a processor",
            "threads": 1,
            "commit": "abc",
        },
        "benchmarks/hundred.jsonl:1",
    )
    assert row.conditions == "4 layers of 12, budget 1%, batch 2"
    assert row.device == "a processor, one thread"
    assert [(each.technique, each.measure, each.value, each.verdict) for each in row.figures] == [
        ("Torchwright", "over the original", 5.2, "faster"),
        ("Torchwright", "over OpenVINO", 1.0, "undecided"),
        ("openvino", rows.IN_SEARCH, 4.75, "no interval"),
        ("compile", rows.IN_SEARCH, None, "not measured"),
    ]
    assert "it would need about 47 s" in row.figures[-1].note


def test_tables_give_ratios_with_their_origin(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    origin = "2026-11-26 | abc1234 | torch 2.13 | `python x`"
    page.write_text(
        "## A machine\n\n### Nets\n\n"
        f"| case | cores | eager, ms | over eager | by hand | a note | {' | '.join(tables.ORIGIN)} |\n"
        f"{'|---' * 10}|\n"
        f"| a\\|b, batch 1 | one | 3.2 | 2.5x [2.0, 3.1] | autocast, 1.8x [1.7, 1.9] | 12\\* | {origin} |\n"
        f"| c | two | 3.2 |  |  | 1.2x, 0.5x | {origin} |\n"
        "| d | two | 3.2 | 3.0x (busy) |  |  | not recorded | (abc1234) | not recorded | `python x` |\n\n"
        "| no | origin |\n|---|---|\n| a | 2.0x [1.9, 2.1] |\n"
    )
    first, last = tables.read(page)
    assert first.workload == "Nets: a|b, batch 1, one"
    assert (first.device, first.commit, first.date, first.command) == (
        "A machine",
        "abc1234",
        "2026-11-26",
        "python x",
    )
    assert [(each.measure, each.value, each.low, each.high, each.note) for each in first.figures] == [
        ("over eager", 2.5, 2.0, 3.1, ""),
        ("by hand", 1.8, 1.7, 1.9, "autocast"),
    ]
    assert dict(first.facts) == {"eager, ms": "3.2", "a note": "12*"}
    assert (last.commit, last.date, last.versions) == (None, None, "not recorded")
    assert last.facts["written down by commit"] == "abc1234"
    assert (last.figures[0].verdict, last.figures[0].note) == ("no interval", "busy")
    page.write_text("## M\n\n| a | date | commit | versions | command |\n|---|---|---|---|---|\n| a | b |\n")
    with pytest.raises(rows.BadRow, match=r"results\.md:5: 2 cells under 5 columns"):
        tables.read(page)


def test_what_a_benchmark_measures_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="the harness names its version")
    from benchmarks.harness.run import Rows
    from torchwright.core.records import Interval

    file, kept = tmp_path / "run.json", tmp_path / "measured.jsonl"
    run = Rows(str(file))
    figures = {
        ("Torchwright", "over the original"): Interval(value=2.0, low=1.9, high=2.1),
        ("compile", "over the original"): [1.2, 1.1, 1.3],
    }
    run.measured("net", figures, "batch 2", kept="dtype")
    assert keep.main([str(file)], into=kept) == 0
    (row,) = rows.read_file(kept)
    assert (row.workload, row.conditions, dict(row.facts)) == ("net", "batch 2", {"kept": "dtype"})
    assert [(each.technique, each.value, each.low) for each in row.figures] == [
        ("Torchwright", 2.0, 1.9),
        ("compile", 1.2, 1.1),
    ]
    assert row.commit
    file.write_text(json.dumps({"machine": {}, "rows": []}))
    assert keep.main([str(file)], into=kept) == 2
    assert "not a benchmark's JSON file with records" in capsys.readouterr().err
    assert len(rows.read_file(kept)) == 1


# Statistics


def test_counts_are_those_of_the_rows() -> None:
    itself = [record((1.0, 0.9, 1.1)), record((1.3, 1.2, 1.4)), record((0.97, 0.95, 0.99))]
    found = made(
        *(each | {"facts": {"kept": "the original"}} for each in itself), record((2.0, 1.9, 2.1), "b")
    )
    counted = statistics.of(found)
    assert (counted.rows, counted.clean, counted.figures, counted.intervals) == (4, 4, 4, 4)
    assert counted.verdicts == {"undecided": 1, "faster": 2, "slower": 1}
    assert counted.itself is not None
    assert (counted.itself.count, counted.itself.of, counted.far) == (1, 3, 1)
    assert counted.changes == {"improvement": 1}
    assert counted.half_widths[0] == pytest.approx(0.02 / 0.97)
    assert counted.half_widths[-1] == pytest.approx(0.1)
    assert statistics.of([]).itself is None


def test_a_claim_is_compared_with_its_timing_again() -> None:
    zoo = {"model": "m", "cut": "", "cpu": "c", "threads": 1, "commit": "a", "versions": {}}
    over = {"over": {"original": [2.0, 1.9, 2.1]}}
    claims = [[2.05, 2.0, 2.3], [3.0, 2.5, 3.5], [1.5, 1.4, 1.6]]
    found = [rows.zoo_row(zoo | over | {"claim": claim}, "x") for claim in claims]
    counted = statistics.of(found)
    assert counted.claims is not None
    assert counted.kept_claims is not None
    assert (counted.claims.count, counted.claims.of) == (1, 3)
    assert counted.kept_claims.count == 2  # the third is faster than it was claimed


# Pages


class Found(html.parser.HTMLParser):
    """Elements with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.script = ""
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.script += data


@pytest.fixture(scope="module")
def hostile() -> dict[str, str]:
    """Pages of rows whose every text is hostile, with a regression."""
    texts = dict.fromkeys(("benchmark", "workload", "conditions", "device", "date", "command"), HOSTILE)
    figure = {"technique": HOSTILE, "measure": HOSTILE, "note": HOSTILE}
    records = [
        record(interval, commit)
        | texts
        | {"versions": {HOSTILE: HOSTILE}, "facts": {HOSTILE: HOSTILE}}
        | {"figures": [figure | {"interval": list(interval)}]}
        for interval, commit in [((2.0, 1.9, 2.1), HOSTILE), ((1.0, 0.9, 1.1), HOSTILE + "2")]
    ]
    return pages.render(made(*records))


@pytest.mark.parametrize("path", [pages.BOARD, pages.STATISTICS])
def test_a_page_holds_every_text_of_a_row_escaped(hostile: dict[str, str], path: str) -> None:
    found = Found(hostile[path])
    assert "\x1b" not in hostile[path]
    assert "alert" not in found.script
    assert sum(tag == "script" for tag, _ in found.elements) == (path == pages.BOARD)
    for tag, attributes in found.elements:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "action"):
            assert re.fullmatch(r"(index|statistics)?(\.html)?(#[\w-]+)?", attributes.get(name) or "")


def test_the_policy_allows_the_pages_own_script_alone(hostile: dict[str, str]) -> None:
    found = Found(hostile[pages.BOARD])
    policy = next(
        attributes["content"]
        for tag, attributes in found.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src '{pages.digest(found.script)}'"
    )
    assert "script-src" not in hostile[pages.STATISTICS].partition("</head>")[0]


def test_every_link_of_a_figure_leads_to_its_row_and_a_regression_is_red() -> None:
    fell = made(
        record((2.0, 1.9, 2.1)), record((1.0, 0.9, 1.1), "bbb"), record((1.5, 1.4, 1.6), "bbb", device="b")
    )
    text = pages.render(fell)
    found = Found(text[pages.BOARD])
    names = {attributes.get("id") for _, attributes in found.elements}
    links = [attributes["href"] or "" for tag, attributes in found.elements if tag == "a"]
    assert {link[1:] for link in links if link.startswith("#")} <= names
    assert {f"row-{number}" for number in range(3)} <= names
    others = [link for link in Found(text[pages.STATISTICS]).elements if link[0] == "a"]
    assert {(link["href"] or "").partition("#")[2] for _, link in others} - {""} <= names
    by_device = {
        attributes["data-device"]: attributes["data-verdict"]
        for tag, attributes in found.elements
        if tag == "tr" and "data-device" in attributes
    }
    assert by_device == {"a processor, 2 threads": "regression", "b, 2 threads": "faster"}
    assert 'class="falls"' in text[pages.BOARD]
    assert text[pages.BOARD].count("python -m benchmarks.x.y</pre>") == 3


def test_the_rows_of_this_repository_are_on_the_board() -> None:
    found = pages.all_rows()
    sources = {row.source.partition(":")[0] for row in found}
    assert {"benchmarks/hundred.jsonl", "docs/results.md"} <= sources
    texts = pages.render(found)
    assert texts[pages.BOARD].count("<article ") == len(found)
    assert f"taken from its {len(found)} rows" in texts[pages.STATISTICS]


def test_the_site_has_the_boards_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs", reason="the site's generator")
    from mkdocs.config.base import load_config
    from mkdocs.structure.files import Files

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import site_board  # pyright: ignore[reportMissingImports]

    files = site_board.on_files(Files([]), load_config(str(ROOT / "mkdocs.yml")))
    assert {file.dest_uri for file in files} == {pages.BOARD, pages.STATISTICS}
