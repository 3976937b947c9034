"""The waterfall and the live table: every number and reason appears, at 80 and 100 columns, and nothing is markup."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from factories import (
    make_interval,
    make_quality,
    make_recipe,
    make_rung,
    make_shipped_recipe,
    make_unchanged_recipe,
)
from torchwright.core.records import Budget, CaseTime, Event, Interval, Rate, Step
from torchwright.report import view, wording
from torchwright.report.html import render
from torchwright.report.terminal import LiveProgress, plain, waterfall


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(recipe: Any, width: int = 100, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(waterfall(recipe, **options))
    return console.file.getvalue()  # type: ignore[attr-defined]


def event(kind: Any, text: str = "", elapsed: float = 12.0, **fields: Any) -> Event:
    return Event(kind=kind, text=text, elapsed=elapsed, time_budget=300.0, **fields)


def words(text: str) -> str:
    """On one line: reasons wrap."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 100, 200])
def test_every_rung_appears_and_no_line_is_too_long(width: int) -> None:
    text = shown(make_recipe(), width, artifact="out", every=True)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    for rung in make_recipe().rungs:
        assert f"{rung.status}: " in text
        assert rung.step.name in text
        if rung.speedup is not None:
            assert wording.ratio(rung.speedup) in text
            assert wording.bounds(rung.speedup) in text


def test_reasons_are_whole_where_there_is_room() -> None:
    text = words(shown(make_recipe(), 120, every=True))
    for rung in make_recipe().rungs:
        if rung.speedup is None:
            assert rung.reason in text


REFUSED = tuple(
    make_rung("refused", step=Step(name=name), reason=f"{name} has nothing here")
    for name in ("alpha", "beta")
)


@pytest.mark.parametrize("width", [80, 110])
def test_what_was_refused_is_one_line_until_it_is_asked_for(width: int) -> None:
    recipe = make_recipe(rungs=(REFUSED[0], make_rung(), REFUSED[1]))
    text = shown(recipe, width, artifact="my out")
    assert "2 techniques do not apply or cannot pay (torchwright report 'my out' --all)" in words(text)
    assert "alpha" not in text
    assert "nothing here" not in text
    assert "2 techniques do not apply or cannot pay (result.steps)" in words(plain(recipe))
    text = shown(recipe, width, artifact="my out", every=True)
    assert all(f"refused: {name} has nothing here" in words(text) for name in ("alpha", "beta"))
    assert "do not apply" not in text
    assert max(cell_len(line) for line in text.splitlines()) <= width


def test_many_steps_that_were_not_tried_are_counted() -> None:
    untried = tuple(
        make_rung("untried", step=Step(name=f"later{number}"), reason="0 s were left") for number in range(7)
    )
    recipe = make_recipe(rungs=(*REFUSED, make_rung(), *untried), command="torchwright optimize model")
    text = shown(recipe, 110, artifact="out")
    assert "2 techniques do not apply or cannot pay; 7 untried (torchwright report out --all)" in words(text)
    assert text.count("later3") == 1, "once, where it says how to go on"
    assert "0 s were left" not in text
    assert words(shown(recipe, 110, artifact="out", every=True)).count("untried: 0 s were left") == 7


def test_twelve_steps_have_a_row_and_the_others_are_counted() -> None:
    kept = make_rung("kept", step=Step(name="first"), speedup=make_interval(1.01))
    dropped = [
        make_rung("dropped", step=Step(name=f"step{number:02d}"), speedup=make_interval(0.5 + number / 100))
        for number in range(20)
    ]
    recipe = make_recipe(rungs=(REFUSED[0], kept, *dropped))
    text = shown(recipe, 100, artifact="out")
    table = text.partition("─\n")[2].partition("\n─")[0]
    names = [line.split()[:2] for line in table.splitlines() if re.match(r"[ \d]\d \w", line)]
    assert names == [["1", "first"], *([str(number + 2), f"step{number:02d}"] for number in range(9, 20))]
    line = "1 technique does not apply or cannot pay; 9 dropped (torchwright report out --all)"
    assert line in words(text)
    assert "step03" in shown(recipe, 100, artifact="out", every=True)


def test_a_refusal_without_a_trial_is_counted_and_one_of_a_trial_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LiveProgress() as progress:
        for rung in (REFUSED[0], REFUSED[0], REFUSED[1]):
            progress(event("rung", rung=rung))
        progress(event("rung", rung=make_rung("untried", step=Step(name="late"), reason="0 s were left")))
        progress(event("trying", "gamma"))
        progress(event("rung", rung=make_rung("refused", step=Step(name="gamma"), reason="no such operator")))
    err = capsys.readouterr().err
    assert "nothing here" not in err
    assert " 1 refused  gamma: no such operator" in err
    assert "untried  late: 0 s were left" in err, "without a number"
    assert err.splitlines()[-1] == "2 techniques do not apply or cannot pay"


def test_a_step_that_was_removed_has_no_part_in_the_total() -> None:
    removed = make_rung("removed", speedup=make_interval(1.4), total_speedup=make_interval(52.69))
    assert "52.69x" not in shown(make_recipe(rungs=(removed, make_rung())))
    assert view.so_far(removed) is None


def test_one_kind_of_call_has_one_ratio() -> None:
    """The median of the paired ratios is what is claimed; the ratio of the two medians is another number."""
    measured = make_recipe()
    (case, _), (after, _) = measured.baseline.cases, measured.final.cases
    recipe = make_recipe(
        workload={"name": "m"},
        baseline=dataclasses.replace(
            measured.baseline, seconds=2.53, cases=(dataclasses.replace(case, seconds=2.53),)
        ),
        final=dataclasses.replace(
            measured.final, seconds=1.0, cases=(dataclasses.replace(after, seconds=1.0),)
        ),
        speedup=make_interval(2.36),
        rungs=(),
    )
    text = shown(recipe)
    assert "2.36x" in text
    assert "2.53x" not in text
    assert "prefill" not in text, "its line would say the total once more"
    assert [pair.speedup for pair in view.case_pairs(recipe)] == [2.36]


def test_the_words_of_the_table_are_explained_beneath_it() -> None:
    text = words(shown(make_recipe()))
    for name in ("speed-up", "pays back"):
        assert f" {name}: " in text
    assert "rung" not in text


def test_nothing_is_said_of_paying_back_where_no_speed_was_measured() -> None:
    over = make_rung("dropped", reason="over the budget", compile_seconds=1.8)
    assert "never" not in shown(make_recipe(rungs=(over,)))
    assert "never" in shown(make_recipe(rungs=(dataclasses.replace(over, speedup=make_interval(0.9)),)))


def test_totals() -> None:
    text = words(shown(make_recipe()))
    assert "total 3.35 s → 1.16 s 2.88x [2.79, 2.97]" in text
    assert "prefill 412 ms → 171 ms 2.41x 1,243 → 2,994 tok/s" in text
    assert "decode x127 23.1 ms → 7.80 ms 2.96x 43.3 → 128 tok/s" in text
    assert "perplexity 12.31 → 12.36: loss 0.41%, at most 0.55% (budget 1.00%)" in text
    assert "peak 1.24 GB → 598 MB, weights 538 MB → 191 MB" in text
    assert "aot, found in 212 s of 300 s allowed" in text


def test_a_busy_machine_is_told_of() -> None:
    text = words(shown(make_recipe(speedup=make_interval(2.0).on_busy_machine())))
    assert "1.94x [1.94, 2.06], measured on a busy machine" in text


def test_what_the_total_is_of() -> None:
    text = words(shown(make_shipped_recipe(), artifact="out"))
    assert "runs as ahead-of-time package; the total is of this, loaded in a fresh process" in text
    assert "holds no model" not in text
    assert "runs as the original as it is" in words(shown(make_unchanged_recipe()))
    assert "runs as" not in shown(make_recipe()), "a recipe of before does not say"


@pytest.mark.parametrize(("artifact", "folder"), [(None, "DIR"), ("out", "'out'")])
def test_an_artifact_without_a_model_says_what_it_needs(artifact: str | None, folder: str) -> None:
    text = words(shown(make_shipped_recipe(runs_as=view.OWN_MODULE), artifact=artifact))
    assert f"the artifact holds no model: tw.load({folder}, model=…) replays the recipe on your own" in text


def test_the_original_may_need_the_callers_module_too() -> None:
    text = words(shown(make_unchanged_recipe(runs_as=view.OWN_MODULE)))
    assert "runs as the original on the caller's model load" in text
    assert "tw.load(DIR, model=…) takes your own module" in text


def test_other_numbers_of_rows_stand_beside_the_examples() -> None:
    assert "rows 1 / 8 / 16 / 32: 1.90x / 2.10x / 2.88x / 2.40x" in words(shown(make_shipped_recipe()))


@pytest.mark.parametrize(
    ("workload", "rows"),
    [
        ({"batch": 4}, 4),
        ({"shapes": [{"args": ["3", ["float32", 5, 16]], "kwargs": {}}]}, 5),
        ({"shapes": [{"args": [], "kwargs": {"x": [["int64", 6]]}}]}, 6),
        ({"shapes": [{"args": [["float32"]], "kwargs": {}}]}, None),
        ({"shapes": [{"args": [["float32", 5]], "kwargs": {}}] * 2}, None),
        ({"shapes": "odd"}, None),
        ({}, None),
    ],
)
def test_the_rows_of_the_example(workload: dict[str, Any], rows: int | None) -> None:
    recipe = make_shipped_recipe(workload=workload)
    assert view.example_rows(recipe) == rows
    assert [found.rows for found in view.row_times(recipe)] == sorted({1, 8, 32} | ({rows} - {None}))  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [80, 110])
def test_what_a_setting_of_the_process_is_worth_is_told_apart(width: int) -> None:
    text = shown(make_shipped_recipe(), width)
    assert "process 1.62x [1.57, 1.67] is left without the allocator step, which" in words(text)
    assert "1.75x [1.70, 1.80] against an original whose process keeps freed memory, too" in words(text)
    assert max(cell_len(line) for line in text.splitlines()) <= width


def test_no_rate_without_tokens() -> None:
    assert "tok/s" not in shown(make_recipe(workload={"name": "m"}))


def test_artifact_and_next_commands_are_quoted_for_a_shell() -> None:
    text = shown(make_recipe(), artifact="my out")
    for verb in ("bench", "verify", "report"):
        assert f"torchwright {verb} 'my out'" in text
    assert "torchwright bench" not in shown(make_recipe())


def test_nothing_kept() -> None:
    text = shown(make_unchanged_recipe(), 80, every=True)
    assert "The original is already the fastest within the budget." in text
    assert "no metric was measured" in text
    assert "best case 1.01x" in text
    assert "already the fastest" in shown(make_unchanged_recipe(rungs=()))


def test_what_failed_was_not_slower() -> None:
    failed, refused, dropped = make_rung("failed"), make_rung("refused"), make_rung("dropped")
    text = shown(make_unchanged_recipe(rungs=(failed, refused)))
    assert "Inconclusive: nothing was measured, for 1 of 2 steps failed." in text
    text = shown(make_unchanged_recipe(rungs=(failed, failed, dropped)))
    assert "Nothing faster was found within the budget, and 2 of 3 steps failed." in text


def test_a_ratio_that_others_hid_is_no_headline() -> None:
    wild = Interval(value=41.85, low=41.85, high=402.98, busy=True)
    text = shown(make_recipe(speedup=wild), 120)
    assert "runs faster than the original; other programs hid how much: 41.85x [41.85, 402.98]" in text
    assert "41.85x as fast" not in text


def test_what_was_not_tried_is_no_verdict_and_the_command_goes_on() -> None:
    rungs = (make_rung("untried", reason="it would need about 25 s"), make_rung("dropped"))
    recipe = make_unchanged_recipe(rungs=rungs, more_seconds=24.0, command="torchwright optimize model")
    text = shown(recipe)
    assert "Inconclusive: nothing faster was found, and the time budget left 1 of 2 steps untried." in text
    assert "already the fastest" not in text
    seconds = 10 * math.ceil((recipe.budget.time_seconds + 24) / 10)
    assert f"torchwright optimize model --time-budget {seconds} --resume" in text
    again = make_unchanged_recipe(rungs=rungs, command=f"{view.more(recipe)[1]} -o dir --time-budget=9")
    assert view.more(again)[1] == "torchwright optimize model -o dir --time-budget 300 --resume"
    python = make_unchanged_recipe(rungs=rungs, command="torchwright.optimize(…)")
    assert view.more(python)[1] == "time_budget=300, resume=result"


def test_a_row_of_an_earlier_search_says_so() -> None:
    text = shown(make_recipe(rungs=(make_rung(earlier=True), make_rung("dropped", reason="slower"))))
    assert "kept: (earlier search) 1.52x is outside" in text
    assert "dropped: slower" in text


def test_less_memory_is_said_for_that_objective() -> None:
    text = shown(make_recipe(budget=Budget(objective="memory"), speedup=make_interval(0.97)))
    assert "needs 52% less memory at 0.97x the speed" in text


def test_a_loss_over_the_budget_is_red() -> None:
    console = Console(
        file=io.StringIO(), width=100, force_terminal=True, color_system="standard", no_color=False
    )
    console.print(waterfall(make_recipe(rungs=(make_rung("dropped", quality=make_quality(0.02)),), notes=())))
    assert re.search("\x1b\\[[0-9;]*31m2.00%", console.file.getvalue())  # type: ignore[attr-defined]


HOSTILE = "[red]not markup[/red] \x1b[2J\x07 $x_1$ <b>\nsecond\tline"


def test_text_is_neither_markup_nor_escape() -> None:
    step = Step(name="[bold]x[/bold]", options={"path": "a" * 150, "日本": "模型" * 30})
    recipe = make_recipe(rungs=(make_rung(step=step, reason=HOSTILE),), notes=(HOSTILE,))
    text = shown(recipe, 80, artifact="a\x1b]0;title\x07b")
    assert "[red]not markup[/red]" in text
    assert "[bold]x[/bold]" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)


def test_plain_is_100_columns_without_colour() -> None:
    text = plain(make_recipe())
    assert max(map(len, text.splitlines())) == 100
    assert "\x1b" not in text
    assert text == text.strip("\n")
    assert "2.88x [2.79, 2.97]" in text


def test_ascii_terminal_gets_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=90, color_system=None).print(waterfall(make_recipe(), artifact="out"))
    file.flush()
    assert b"->" in file.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_narrow_terminal_does_not_fail() -> None:
    assert "kept" in shown(make_recipe(), 30)


def test_a_pipe_gets_one_line_per_event(capsys: pytest.CaptureFixture[str]) -> None:
    rungs = make_recipe().rungs
    with LiveProgress() as progress:
        progress(event("baseline", "3.35 s"))
        progress(event("trying", "dtype:to=bfloat16"))
        progress(event("rung", rung=rungs[2]))
        progress(event("notice", HOSTILE))
        progress(event("done", "2.88x"))
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 5
    assert lines[0] == "[   12.0 s] baseline 3.35 s"
    assert "dropped  quantize:weights=int4,group_size=64 1.83x" in lines[2]
    assert rungs[2].reason in lines[2]
    assert "\x1b" not in err


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveProgress(quiet=True) as progress:
        progress(event("baseline", "3.35 s"))
    assert capsys.readouterr() == ("", "")


def live(width: int = 100, height: int = 20) -> tuple[LiveProgress, Terminal]:
    file = Terminal()
    console = Console(
        file=file, width=width, height=height, force_terminal=True, color_system=None, _environ={}
    )
    return LiveProgress(console=console), file


def frame(progress: LiveProgress, width: int = 100, height: int = 20) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(progress.__rich__())
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_live_table_shows_rows_and_what_is_tried(width: int) -> None:
    progress, file = live(width)
    with progress:
        progress(event("baseline", "3.35 s"))
        for rung in make_recipe().rungs:
            progress(event("rung", rung=rung, best=make_interval(1.58)))
        progress(event("notice", "[b]little memory is free"))
        progress(event("trying", "compile:mode=max-autotune"))
        text = frame(progress, width)
    lines = text.splitlines()
    assert max(map(cell_len, lines)) <= width
    tried = [rung for rung in make_recipe().rungs if rung.status != "refused"]
    assert len(lines) == 1 + len(tried) + 2
    assert "compile:mode=max-autotune" in lines[-2]
    assert "of 300 s" in lines[-1]
    assert "best 1.58x [1.53, 1.63]" in lines[-1]
    assert [line.split()[:2] for line in lines[1:-2]] == [
        [str(number), rung.status] for number, rung in enumerate(tried, start=1)
    ]
    assert "[b]little memory is free" in file.getvalue()


def test_live_table_keeps_to_the_screen() -> None:
    progress, _ = live(100, 12)
    with progress:
        for rung in make_recipe().rungs * 10:
            progress(event("rung", rung=rung))
        text = frame(progress, 100, 12)
    assert len(text.splitlines()) <= 12
    assert "… 74 earlier" in text


def test_live_table_stays_after_a_fault() -> None:
    progress, file = live()
    progress.__enter__()
    progress(event("rung", rung=make_recipe().rungs[0]))
    progress.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert "attention:kernel=sdpa" in file.getvalue().rsplit("\x1b[2K", 1)[-1]


def test_force_color_in_a_pipe_moves_no_cursor() -> None:
    file = io.StringIO()
    with LiveProgress(console=Console(file=file, force_terminal=True, color_system=None)) as progress:
        progress(event("trying", "dtype"))
    assert file.getvalue() == "[   12.0 s] trying   dtype\n"


def test_the_shares_of_parts_add_up_their_calls() -> None:
    """A part that is called in two shapes is one part; what steps are left out of still counts as it did before."""
    recipe = make_recipe()
    cases = {
        "baseline": {"encoder": (1.0, 2), "denoiser": (0.5, 20), "vae": (8.0, 1)},
        "final": {"encoder": (0.5, 2), "denoiser": (0.2, 5), "denoiser 2": (0.1, 10), "vae": (5.0, 1)},
    }
    for name, calls in cases.items():
        times = tuple(CaseTime(name=n, seconds=s, repeat=r) for n, (s, r) in calls.items())
        measured = dataclasses.replace(getattr(recipe, name), cases=times)
        recipe = dataclasses.replace(recipe, **{name: measured})
    found = [(each.name, each.before, each.after) for each in view.shares(recipe)]
    assert found == [("denoiser", 0.5, 0.25), ("vae", 0.4, 0.625), ("encoder", 0.1, 0.125)]
    assert [each.speedup for each in view.shares(recipe)] == pytest.approx([10 / 2, 8 / 5, 2 / 1])
    assert "denoiser x20 → 5" in words(shown(recipe))
    assert "time in denoiser 50% → 25%, vae 40% → 62%, encoder 10% → 12%" in words(shown(recipe))
    alone = dataclasses.replace(recipe.baseline, cases=(CaseTime(name="all", seconds=1.0),))
    assert view.shares(dataclasses.replace(recipe, baseline=alone)) == []


def test_what_a_workload_counts_by_is_told_once() -> None:
    """Not what a call's own line says: the time of a token, and tokens per second."""
    calls = make_recipe().final.cases
    recipe = make_recipe(
        rates=(
            Rate(name="real_time_factor", before=0.0412, after=0.0123),
            Rate(name="first_word_s", before=0.512, after=0.179),
            Rate(name="pictures_per_s", before=2.5, after=7.25),
            Rate(name="tpot_s", before=0.0231, after=calls[1].seconds),
            Rate(name="decode_tokens_per_s", before=43.3, after=1 / calls[1].seconds),
        )
    )
    told = "real time factor 0.0412 → 0.0123; first word 512 ms → 179 ms; pictures 2.50/s → 7.25/s"
    assert f"rates {told}" in words(shown(recipe))
    assert view.rates(recipe) == told.split("; ")
    assert f"<p>{told}</p>" in render(recipe)
    assert view.rates(make_recipe()) == []
