"""The command line: what is passed on, what is printed, and how it leaves."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import torchwright.optimization
from factories import make_recipe, make_rung
from torchwright.cli import main
from torchwright.cli.group import VERBS, InOrder, cli
from torchwright.cli.printing import plain
from torchwright.cli.registries import BUILTINS, LISTED, describe_registry, imported_rows, list_rows
from torchwright.core.errors import Inconclusive, ModelError, RegressionFound, TechniqueFailed
from torchwright.core.records import Budget, Event, Recipe, Step
from torchwright.optimization.artifact import folder as artifact
from torchwright.optimization.techniques.base import techniques
from torchwright.workloads.base import workloads

pytestmark = pytest.mark.quick

HEAVY = ("torch", "transformers", "torchao", "rich", "matplotlib", "pydantic", "numpy", "jinja2")


class FakeAPI:
    """Stands where `torchwright.optimization.api` does: remembers its calls and returns, or raises, what a test
    sets."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.error: BaseException | None = None

    def _answer(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        if self.error is not None:
            raise self.error
        return value

    def optimize_cli(self, target: str | None, **kwargs: Any) -> Any:
        kwargs["on_event"](Event(kind="stage", text="measuring the original", elapsed=0.0, time_budget=150.0))
        return self._answer(SimpleNamespace(recipe=make_recipe(), path=Path("out")), target, **kwargs)

    def verify(self, path: str, **kwargs: Any) -> Any:
        return self._answer({"speedup": 3.5, "ok": True}, path, **kwargs)

    def asked_and_failed(self, result: Any, with_steps: Any, facts: Any, draft: Any) -> Any:
        return (
            TechniqueFailed("crash was asked for and not measured", facts=facts)
            if "crash" in with_steps
            else None
        )

    def bench(self, target: str, **kwargs: Any) -> Any:
        cases = [{"name": "prefill", "seconds": 0.25}, {"name": "decode", "seconds": 0.0123456}]
        return self._answer({"device": {"name": "cpu"}, "cases": cases, "notes": []}, target, **kwargs)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeAPI:
    fake = FakeAPI()
    monkeypatch.setitem(sys.modules, "torchwright.optimization.api", fake)  # type: ignore[arg-type]
    # The package keeps the real module as an attribute once any test has imported it.
    monkeypatch.setattr(torchwright.optimization, "api", fake, raising=False)
    return fake


# ---------------------------------------------------------------------------------------------------------- start-up


def imported_by(heavy: Sequence[str], *lines: list[str], folder: Path | None = None) -> list[Any]:
    """Return [exit code, the heavy modules that were imported so far] of each command line, in one process."""
    code = (
        "import contextlib, json, os, sys; from torchwright.cli import main\n"
        "found = []\n"
        f"for line in {list(lines)!r}:\n"
        "    with open(os.devnull, 'w') as null, contextlib.redirect_stdout(null):\n"
        "        code = main(line)\n"
        f"    found.append([code, [name for name in {list(heavy)!r} if name in sys.modules]])\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", cwd=folder, check=True
    )
    return json.loads(done.stdout)


def test_help_and_usage_errors_import_nothing_heavy():
    helps = [["--help"], ["optimize", "--help"], ["generate", "--help"], ["serve", "--help"]]
    found = imported_by(HEAVY, *helps, ["optimise"], [])
    assert found == [[0, []]] * len(helps) + [[2, []]] * 2


def test_what_only_lists_or_prints_imports_no_torch(tmp_path: Path):
    artifact = str(artifact_of(make_recipe(), tmp_path))
    lines = [["techniques"], ["workloads", "--json"], ["report", artifact], ["report", "--all", artifact]]
    found = imported_by(("torch", "transformers"), *lines, folder=tmp_path)
    assert found == [[0, []]] * len(lines)


def test_the_table_of_the_registries_is_that_of_the_code():
    imported = {kind: imported_rows(kind) for kind in LISTED}
    assert json.loads(BUILTINS.read_text(encoding="utf-8")) == json.loads(json.dumps(imported)), (
        "run `make docs`"
    )


def test_what_another_package_adds_is_listed_too(monkeypatch):
    point = EntryPoint("mine", "mine:Mine", "torchwright.workloads")
    monkeypatch.setattr("torchwright.core.registry._installed", lambda: EntryPoints([point]))
    monkeypatch.setattr(
        "torchwright.cli.registries.imported_rows", lambda kind: [{"name": f"mine of {kind}"}]
    )
    assert list_rows("workloads") == [{"name": "mine of workloads"}]
    assert len(list_rows("techniques")) > 20


def test_the_verbs_are_listed_in_the_order_of_the_work(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    verbs = [verb.command.name for verb in VERBS]
    assert verbs[:2] == ["optimize", "verify"]
    places = [out.index(f"\n  {verb} ") for verb in verbs]
    assert places == sorted(places)
    assert list(cli.commands) == verbs
    assert isinstance(cli, InOrder)


def test_python_m_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "torchwright", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("torchwright ")


@pytest.mark.parametrize(
    ("words", "proposed"), [("torchwright opt", "optimize"), ("torchwright report --a", "--all")]
)
def test_a_shell_completes_verbs_and_options(words, proposed):
    """By click's protocol, which the scripts of `_TORCHWRIGHT_COMPLETE=bash_source` speak."""
    given = {
        "_TORCHWRIGHT_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from torchwright.cli import main; main()"],
        env=os.environ | given, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [f"plain,{proposed}"]


def test_version_names_what_matters(capsys):
    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("torchwright ")
    assert "torch 2." in out


def test_every_verb_and_option_has_a_help_text():
    for command in cli.commands.values():
        assert command.help
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert getattr(parameter, "help", None), f"{command.name} {parameter.name}"


# ---------------------------------------------------------------------------------------------------------- optimize


def test_only_names_all_that_is_tried(api, capsys):
    assert main(["optimize", "--quiet", "--only", "dtype:dtype=bfloat16", "--only", "compile"]) == 0
    assert api.calls[0][1]["only"] == ["dtype:dtype=bfloat16", "compile"]
    assert main(["optimize", "--only", "crash", "--quiet"]) == 1
    assert "crash was asked for and not measured" in capsys.readouterr().err
    for other in ("--with", "--without"):
        assert main(["optimize", "--only", "dtype", other, "compile"]) == 2
        assert f"{other} would say otherwise" in capsys.readouterr().err


def test_optimize_takes_its_defaults_from_the_budget(api):
    assert main(["optimize", "--quiet"]) == 0
    (args, passed), budget = api.calls[0], Budget()
    assert args == (None,)
    assert (passed["max_drop"], passed["objective"]) == (budget.max_drop, budget.objective)
    assert passed["time_budget"] == budget.time_seconds
    assert (passed["with_steps"], passed["without"], passed["seed"]) == ([], [], 0)
    nothing = ("batch", "prompt_tokens", "new_tokens", "tokens", "eval_text", "device", "out")
    assert all(passed[name] is None for name in nothing)


def test_optimize_passes_every_option_on(api, tmp_path):
    text = tmp_path / "eval.txt"
    text.write_text("text")
    talk, pictures = tmp_path / "talk.wav", tmp_path / "pictures"
    talk.write_bytes(b"sound")
    pictures.mkdir()
    arguments = (
        "optimize model --max-drop 0.05 --objective memory --time-budget 20 --batch 2 --prompt-tokens 64 "
        f"--new-tokens 8 --tokens 40 --eval-text {text} --with dtype:dtype=bfloat16 --with compile --without threads "
        f"--device cpu -o {tmp_path}/out --seed 7 --resume --exhaustive --quiet --set alpha=2 --set beta-x=y "
        f"--audio {talk} --reference {text} --images {pictures} --points 4x2 "
        f"--steps 20 --size 512x768 --prompts {text}"
    )
    assert main(arguments.split()) == 0
    (args, passed) = api.calls[0]
    del passed["on_event"], passed["command"]
    assert args == ("model",)
    assert passed == {
        "max_drop": 0.05, "objective": "memory", "time_budget": 20.0, "batch": 2, "prompt_tokens": 64, "new_tokens": 8,
        "tokens": 40, "eval_text": str(text), "with_steps": ["dtype:dtype=bfloat16", "compile"], "without": ["threads"],
        "only": [],
        "device": "cpu", "out": f"{tmp_path}/out", "seed": 7, "resume": True, "exhaustive": True,
        "settings": ("alpha=2", "beta-x=y"), "draft": None, "audio": (str(talk),), "reference": (str(text),),
        "images": str(pictures), "points": "4x2", "steps": 20, "size": "512x768", "prompts": str(text),
    }  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), [("2m", 120.0), ("90s", 90.0), ("1h", 3600.0), ("45", 45.0)])
def test_a_time_budget_has_a_unit_or_is_seconds(api, text, seconds):
    assert main(["optimize", "--quiet", "--time-budget", text]) == 0
    assert api.calls[0][1]["time_budget"] == seconds


def test_the_command_that_reproduces_a_result_can_be_pasted(api, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/torchwright", "optimize", "my model", "--quiet"])
    assert main() == 0
    assert api.calls[0][1]["command"] == "torchwright optimize 'my model' --quiet"


def test_optimize_ends_with_the_waterfall_and_shows_progress_apart(api, capsys):
    assert main(["optimize"]) == 0
    captured = capsys.readouterr()
    assert make_recipe().steps[0].name in captured.out
    assert "out" in captured.out
    assert "measuring the original" in captured.err


def test_optimize_tells_what_was_refused_with_all(api, capsys):
    refused = [make_rung("refused", step=Step(name=name), reason=f"no {name}") for name in ("one", "two")]
    result = SimpleNamespace(recipe=make_recipe(rungs=tuple(refused)), path=Path("out"))
    api.optimize_cli = lambda *args, **kwargs: result
    assert main(["optimize", "--quiet"]) == 0
    assert "refused: no one" not in capsys.readouterr().out
    assert main(["optimize", "--quiet", "--all"]) == 0
    assert "refused: no one" in capsys.readouterr().out


def test_quiet_shows_no_progress(api, capsys):
    assert main(["optimize", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_optimize_json_is_the_recipe_and_where_it_lies(api, capsys):
    assert main(["optimize", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["path"] == "out"
    assert data["recipe"]["steps"][0]["name"] == make_recipe().steps[0].name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("optimize --max-drop nan", "is not a share"),
        ("optimize --max-drop inf", "is not a share"),
        ("optimize --max-drop -1", "is not a share"),
        ("optimize --time-budget 0", "not in the range"),
        ("optimize --time-budget soon", "'soon' is no time. Allowed: 90s, 2m, 1h"),
        ("optimize --batch 0", "not in the range"),
        ("optimize --objective speed", "'latency', 'throughput', 'memory'"),
        ("optimize --eval-text nowhere.txt", "does not exist"),
        ("optimize --device cudo", "did you mean 'cuda'?"),
        ("optimize --max-dropp 1", "Did you mean '--max-drop'?"),
        ("optimize one two", "unexpected extra argument"),
        ("optimise", "Did you mean 'optimize'?"),
        ("verify", "Missing argument 'DIR'"),
        ("bench", "Missing argument"),
        ("generate", "Missing option '--prompt'"),
        ("generate --prompt a --max-new-tokens 0", "not in the range"),
        ("generate --prompt a --seed -1", "not in the range"),
        ("generate --prompt a --quantise w8a8", "Did you mean one of: '--quantize'"),
    ],
)
def test_bad_input_is_refused_by_name(api, capsys, arguments, said):
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert api.calls == []


# ------------------------------------------------------------------------------------------------------- other verbs


def test_verify_and_bench_pass_their_options_on(api):
    assert main(["verify", "out", "--trust", "--retries", "5", "--tolerance", "0.2"]) == 0
    assert main(["bench", "out", "--prompt-tokens", "64", "--new-tokens", "8", "--batch", "2"]) == 0
    given = {"prompt_tokens": 64, "new_tokens": 8, "batch": 2}
    given |= {"quantize": None, "kv": None, "dtype": None, "device": None}
    verified, benched = api.calls
    assert verified[1].pop("on_event")
    assert verified == (("out",), {"trust": True, "retries": 5, "tolerance": 0.2})
    assert benched == (("out",), given | {"trust": False})


def test_bench_passes_on_how_the_decoder_runs(api):
    words = "bench folder --quantize w4a8:group_size=64 --kv int8 --dtype bf16"
    assert main(words.split()) == 0
    passed = api.calls[0][1]
    assert (passed["quantize"], passed["kv"], passed["dtype"]) == ("w4a8:group_size=64", "int8", "bf16")


def test_results_are_readable_without_json(api, capsys):
    assert main(["bench", "out"]) == 0
    out = capsys.readouterr().out
    assert "prefill" in out
    assert "12.3 ms" in out
    assert "seconds" not in out


def test_a_size_has_a_label_and_a_unit_for_people(api, capsys):
    facts = {
        "peak_memory_bytes": 435_642_368,
        "files": [{"name": "a", "bytes": 2_000}],
        "ready_seconds": None,
        "forward_s": 0.0005,
    }
    api.bench = lambda model, **options: facts
    assert main(["bench", "out"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["peak", "memory", "436", "MB"] in lines
    assert ["files", "name", "size"] in lines
    assert ["a", "2.00", "kB"] in lines
    assert ["ready", "none"] in lines
    assert ["forward", "500", "µs"] in lines


@pytest.mark.parametrize(
    ("value", "text"),
    [(21170.4, "21,170"), (0.00002117, "0.00002117"), (0.0, "0"), (12.3456, "12.35"), (1e300, None)],
)
def test_no_number_has_an_exponent(api, capsys, value, text):
    api.bench = lambda model, **options: {"tokens_per_s": value}
    assert main(["bench", "out"]) == 0
    shown = capsys.readouterr().out.split()[-1]
    assert "e" not in shown
    assert text in (shown, None)


def test_sentences_of_a_result_are_one_a_line(api, capsys):
    api.bench = lambda model, **options: {"notices": ["no fast kernels", "busy"]}
    assert main(["bench", "out"]) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["out", "kernels", "busy"]


def test_results_are_data_with_json(api, capsys):
    assert main(["bench", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cases"][0] == {"name": "prefill", "seconds": 0.25}
    assert main(["verify", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"speedup": 3.5, "ok": True}


def test_report_prints_the_path(capsys, tmp_path):
    assert main(["report", str(tmp_path)]) == 2
    assert "no report.html" in capsys.readouterr().err
    (tmp_path / "report.html").touch()
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"


def test_report_with_all_is_the_whole_waterfall(capsys, tmp_path):
    refused = [make_rung("refused", step=Step(name=name), reason=f"no {name}") for name in ("one", "two")]
    out = artifact_of(make_recipe(rungs=tuple(refused)), tmp_path)
    assert main(["report", str(out), "--all"]) == 0
    assert "refused: no one" in capsys.readouterr().out
    (out / "report.html").write_text("another", encoding="utf-8")
    assert main(["report", str(out), "--all"]) == 2
    assert "report.html" in capsys.readouterr().err


def artifact_of(recipe: Recipe, parent: Path) -> Path:
    out = parent / "out"
    out.mkdir()
    (out / artifact.REPORT).write_text("a page", encoding="utf-8")
    artifact.finish(out, recipe, {"engine": "eager", "dtype": "float32"})
    return out


class Shelf:
    """Holds things.

    More than one line of it.
    """

    def __init__(self, size: int, *, names: tuple[str, ...] = ()) -> None:
        self.size, self.names = size, names


def test_any_registry_can_be_described():
    (row,) = describe_registry([("shelf", Shelf)])
    assert (row["name"], row["summary"], row["detail"]) == (
        "shelf",
        "Holds things.",
        "More than one line of it.",
    )
    assert [tuple(option.values()) for option in row["options"]] == [
        ("size", "int", None, "", True),
        ("names", "tuple[str, ...]", (), "", False),
    ]


@pytest.mark.parametrize(("verb", "registry"), [("techniques", techniques), ("workloads", workloads)])
def test_the_registries_are_printed_whole(verb, registry, capsys):
    names = registry.names()
    assert main([verb, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == names
    assert all(row["summary"] for row in rows)
    assert main([verb]) == 0
    out = capsys.readouterr().out
    for row in rows:
        assert row["name"] in out
        for option in row["options"]:
            assert option["name"] in out


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "none"), (True, "true"), (("a", "b"), "a+b"), ((), "none"), (0.5, "0.5"), ("x", "x")],
)
def test_option_values_read_as_they_are_typed(value, text):
    assert plain(value) == text


# ------------------------------------------------------------------------------------------------------ how it leaves


def test_what_a_user_can_mend_is_one_paragraph(api, capsys):
    api.error = ModelError("the folder 'x' is no model", found="no config.json", next="name another folder")
    assert main(["optimize", "x", "--quiet"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "torchwright: the folder 'x' is no model. Found: no config.json. Next: name another folder.\n"
    )


def test_with_json_the_error_is_json_too(api, capsys):
    api.error = ModelError("no model", found="nothing", allowed="something")
    assert main(["bench", "x", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {
        "error": {
            "type": "ModelError",
            "message": "no model. Found: nothing. Allowed: something.",
            "exit_code": 2,
            "found": "nothing",
            "allowed": "something",
            "next": None,
        }
    }


def test_a_usage_error_is_json_too(api, capsys):
    assert main(["bench", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "MissingParameter"


@pytest.mark.parametrize(("error", "code"), [(RegressionFound, 1), (Inconclusive, 3)])
def test_a_verdict_has_its_exit_code_and_all_that_was_measured(api, capsys, error: Any, code: int):
    api.error = error("slower than the recipe promises", facts={"speedup": "1.20x", "drop": 0.5})
    assert main(["verify", "out"]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert "1.20x" in captured.out
    assert main(["verify", "out", "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert (printed["speedup"], printed["drop"], printed["error"]["exit_code"]) == ("1.20x", 0.5, code)


def test_what_was_asked_for_and_not_measured_exits_with_1_and_the_result(api, capsys):
    assert main(["optimize", "--with", "crash"]) == 1
    captured = capsys.readouterr()
    assert make_recipe().steps[0].name in captured.out
    assert "crash was asked for and not measured" in captured.err
    assert main(["optimize", "--with", "crash", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["path"], printed["error"]["type"]) == ("out", "TechniqueFailed")


def test_ctrl_c_exits_with_130(api, capsys):
    api.error = KeyboardInterrupt()
    assert main(["optimize", "--quiet"]) == 130
    err = capsys.readouterr().err
    assert err.strip() == "interrupted"


def test_an_internal_fault_keeps_its_traceback(api, capsys):
    api.error = ZeroDivisionError("in the middle")
    assert main(["verify", "out", "--json"]) == 1
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert "ZeroDivisionError: in the middle" in captured.err
    assert "Please report it" in captured.err
    assert json.loads(captured.out)["error"]["message"] == "internal fault: in the middle"


def test_the_end_of_a_file_is_a_fault_and_no_interrupt(api, capsys):
    api.error = EOFError("cut short")
    assert main(["verify", "out"]) == 1
    assert "EOFError: cut short" in capsys.readouterr().err


def test_a_full_disk_is_something_the_user_can_mend(api, capsys):
    api.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/model.safetensors")
    assert main(["optimize", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert "the disk is full while writing out/model.safetensors" in err
    assert "Traceback" not in err


def test_a_limit_of_files_sizes_is_something_the_user_can_mend(api, capsys):
    api.error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert main(["optimize", "--quiet"]) == 2
    assert "a file may not be so large. Found: File too large" in capsys.readouterr().err


def test_another_failure_of_the_system_is_a_fault(api, capsys):
    api.error = PermissionError(errno.EACCES, "no")
    assert main(["verify", "out"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["optimize", "--help"], ["techniques"], ["workloads", "--json"]])
def test_a_reader_that_left_ends_it_quietly(words: list[str]):
    code = f"import sys; from torchwright.cli import main; sys.exit(main({words}))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.parametrize(("columns", "widest"), [(None, 100), ("40", 40), ("none", 100)])
def test_a_table_in_a_file_is_as_wide_as_asked_for(monkeypatch, capsys, columns: str | None, widest: int):
    monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["workloads"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= widest
    assert "\x1b" not in text
