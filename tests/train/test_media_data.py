"""Pictures and sounds as strangers leave them: what is read, counted, told and refused."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from media_runs import make_classifier, make_images, make_pictures, make_sounds, make_speech, tone
from PIL import Image
from runs import before_checkpoints, losses, run_processes

from torchwright.cli.data import command as data_command
from torchwright.cli.train import command as train_command
from torchwright.core.errors import TorchwrightError
from torchwright.train.data.shards import DataError
from torchwright.train.kinds import kind_of, verb
from torchwright.train.media.config import ImageData, ImageRun, read_images, read_speech
from torchwright.train.media.images import augmented, list_pictures
from torchwright.train.media.listing import list_images
from torchwright.train.media.quick import files_run, from_words
from torchwright.train.media.survey import survey
from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.loop.session import TrainingStopped
from torchwright.train.run.observe.metrics import FILE


def train(run: Path, **how: Any) -> Any:
    return verb(kind_of(run), "train")(run, live=False, **how)


def spoil(folder: Path) -> None:
    """Three pictures that cannot be read, a note, and one that lies in no class."""
    whole = (folder / "disc" / "001.png").read_bytes()
    (folder / "disc" / "001.png").write_bytes(whole[: len(whole) // 2])
    (folder / "disc" / "002.png").write_bytes(b"")
    (folder / "disc" / "003.png").unlink()
    (folder / "disc" / "003.png").mkdir()  # a folder is no picture
    (folder / "check" / "notes.txt").write_text("hello")
    (folder / "stripes" / "000.png").write_bytes(b"GIF89a not really")
    Image.new("RGB", (9, 9)).save(folder / "stray.png")


def test_broken_pictures_are_counted_and_told(tmp_path: Path) -> None:
    run = make_images(tmp_path, samples=72)
    spoil(tmp_path / "train")
    (seen, held) = survey(read_images(run), tmp_path)
    assert (seen.report.rows, seen.report.documents, seen.report.broken) == (37, 32, 5)
    assert held.report.broken == 0
    outcome = train(run)
    assert outcome.broken == 3
    events = [json.loads(line) for line in (tmp_path / "out" / FILE).read_text().splitlines()]
    told = {Path(event["file"]).name for event in events if event.get("event") == "broken_rows"}
    assert told == {"train", "001.png", "002.png", "000.png"}
    assert all(np.isfinite(loss) for loss in losses(run).values())


@pytest.mark.slow
def test_strict_stops_on_every_process(tmp_path: Path) -> None:
    run = make_images(tmp_path, layout={"dp_shard": 2}, data={"train": ["train"], "strict": True})
    whole = tmp_path / "train" / "disc" / "001.png"
    whole.write_bytes(whole.read_bytes()[:60])
    for code, told in run_processes(run, world=2):
        assert code == 2, told
        assert "001.png" in told
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.slow
def test_nothing_that_can_be_read_is_told(tmp_path: Path) -> None:
    run = make_images(tmp_path)
    for path in (tmp_path / "train").rglob("*.png"):
        path.write_bytes(b"no picture")
    with pytest.raises(DataError, match="none of the 36 samples can be read"):
        train(run)
    for number, path in enumerate(sorted((tmp_path / "held").rglob("*.png"))):
        (tmp_path / "train" / "disc" / f"00{number}.png").write_bytes(path.read_bytes())
    shutil.rmtree(tmp_path / "out")
    run.write_text(
        run.read_text().replace("batch = 8", "batch = 1").replace("micro_batches = 2", "micro_batches = 1")
    )
    assert train(run).steps == 48, "a step whose sample is broken moves nothing"
    assert 0 < len(losses(run)) < 48


@pytest.mark.slow
def test_a_run_that_an_error_ends_writes_nothing_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is given up with the run: a checkpoint that the disk is slow to take is whole by then."""
    before_checkpoints(monkeypatch, lambda writer: time.sleep(0.5))
    run = make_images(tmp_path)
    for path in (tmp_path / "train").rglob("*.png"):
        path.write_bytes(b"no picture")
    with pytest.raises(DataError, match="none of the 36 samples can be read"):
        train(run)
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
    ]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_tables_name_pictures(tmp_path: Path, form: str) -> None:
    make_pictures(tmp_path / "p", 2)
    rows: list[dict[str, Any]] = [
        {"image": "p/disc/000.png", "label": "disc"},
        {"image": "p/check/000.png", "label": "check"},
        {"image": "../elsewhere.png", "label": "disc"},
        {"image": "/etc/hostname", "label": "disc"},
        {"image": None, "label": "disc"},
    ]
    path = tmp_path / f"rows.{form}"
    if form == "csv":
        text = "".join(f'"{row["image"] or ""}",{row["label"]}\n' for row in rows[:4])
        path.write_text("image,label\n" + text + "one field alone\n")
    elif form == "jsonl":
        path.write_text(
            "".join(json.dumps(row) + "\n" for row in rows[:4]) + '{"image": 3, "label": "disc"}\n'
        )
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    listing = list_images([path.name], ImageData(train=["x"]), tmp_path)
    assert [
        (item.path.relative_to(tmp_path.resolve()).as_posix(), item.target) for item in listing.items
    ] == [
        ("p/disc/000.png", "disc"),
        ("p/check/000.png", "check"),
    ]
    (report,) = listing.reports.values()
    assert (report.rows, report.broken) == (5, 3)
    assert sum("outside" in reason for _, reason in report.listed) == 2


def test_tables_hold_pictures_as_datasets_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("TORCHWRIGHT_CACHE", str(tmp_path / "cache"))
    make_pictures(tmp_path / "p", 1)
    wanted = (tmp_path / "p" / "disc" / "000.png").read_bytes()
    rows = [
        {"image": {"bytes": wanted, "path": "000.png"}, "label": 1.0},
        {"image": {"bytes": None, "path": "p/disc/000.png"}, "label": 0.0},
        {"image": {"bytes": None, "path": None}, "label": 0.0},
        {"image": {"bytes": wanted, "path": None}, "label": 0.5},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    listing = list_images(["rows.parquet"], ImageData(train=["x"]), tmp_path)
    assert [(item.path.read_bytes() == wanted, item.target) for item in listing.items] == [
        (True, 1),
        (True, 0),
    ]
    assert listing.items[0].path.suffix == ".png"
    (report,) = listing.reports.values()
    assert report.broken == 2
    assert "'label' is float" in report.listed[1][1]


def test_numbers_are_places_among_classes_that_are_named(tmp_path: Path) -> None:
    run = make_images(tmp_path, samples=8, data={"train": ["rows.jsonl"], "labels": ["a", "b", "c"]})
    rows = [
        {"image": f"train/disc/00{n}.png", "label": label} for n, label in enumerate([0, 1, 2, "c", 3, -1])
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (seen,) = survey(read_images(run), tmp_path)
    assert (seen.report.documents, seen.report.broken) == (4, 2)
    assert "3 is none of the 3 classes" in seen.report.listed[0][1]
    outcome = train(run)
    config = json.loads((outcome.model / "config.json").read_text())
    assert config["id2label"] == {"0": "a", "1": "b", "2": "c"}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda folder: (folder / "train").rename(folder / "gone"), "no file matches 'train'"),
        (lambda folder: make_pictures(folder / "x", 0) and _move(folder, "x"), "holds nothing to train on"),
    ],
)
def test_data_that_is_not_there_is_refused(tmp_path: Path, make: Any, told: str) -> None:
    run = make_images(tmp_path)
    make(tmp_path)
    with pytest.raises(DataError, match=told):
        train(run)


def _move(folder: Path, name: str) -> None:
    (folder / "train").rename(folder / "gone")
    (folder / name).rename(folder / "train")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batch": 7}, "batch=7 cannot be divided"),
        ({"layout": {"tp": 2}}, "divides samples over processes"),
        ({"precision": "mxfp8"}, "precision"),
        ({"lora": {"base": "nf4"}}, "lora"),
        ({"evaluation": {"every_steps": 2}, "data": {"train": ["train"]}}, "nothing to evaluate"),
    ],
)
def test_run_files_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(TorchwrightError, match=told):
        read_images(make_images(tmp_path, each=1, **changes))


def test_a_folder_without_a_preprocessor_is_refused(tmp_path: Path) -> None:
    run = make_images(tmp_path)
    (tmp_path / "base" / "preprocessor_config.json").unlink()
    with pytest.raises(TorchwrightError, match="does not say how pictures become"):
        train(run)


def test_a_loss_that_is_no_number_names_step_rows_and_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchwright.train.media import trainer

    run = make_images(tmp_path, micro_batches=1)
    build = trainer.classifier

    def spoiled(*arguments: Any) -> Any:
        network: Any = build(*arguments)

        def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
            return output.index_fill(0, torch.tensor([3]), float("nan"))

        name = [name for name, module in network.named_modules() if isinstance(module, torch.nn.Linear)][-2]
        network.get_submodule(name).register_forward_hook(spoil)
        return network

    monkeypatch.setattr(trainer, "classifier", spoiled)
    with pytest.raises(TrainingStopped, match=r"step 1 has a loss of nan") as stopped:
        train(run)
    assert "row 3, sample 3 (" in str(stopped.value)
    assert "first in the " in str(stopped.value)


def test_crops_and_mirrors_come_of_their_seed_alone() -> None:
    random = np.random.default_rng(0)
    picture = random.integers(0, 256, (30, 40, 3)).astype(np.uint8)
    made = [augmented(picture, ["crop", "flip"], np.random.default_rng(seed)) for seed in range(40)]
    again = [augmented(picture, ["crop", "flip"], np.random.default_rng(seed)) for seed in range(40)]
    assert all(np.array_equal(one, other) for one, other in zip(made, again, strict=True))
    assert len({one.shape for one in made}) > 20
    for one in made:
        assert 0.3 * 1200 < one.shape[0] * one.shape[1] <= 1200
    flips = [augmented(picture, ["flip"], np.random.default_rng(seed)) for seed in range(40)]
    mirrored = sum(np.array_equal(one, picture[:, ::-1]) for one in flips)
    assert mirrored + sum(np.array_equal(one, picture) for one in flips) == 40
    assert 8 < mirrored < 32


@pytest.mark.slow
def test_manifests_as_strangers_leave_them(tmp_path: Path) -> None:
    run = make_speech(tmp_path, samples=24)
    tone(tmp_path / "train" / "long.wav", 440, 4.5)
    (tmp_path / "train" / "cut.wav").write_bytes((tmp_path / "train" / "0.wav").read_bytes()[:200])
    rows = [
        {"audio": "train/long.wav", "text": "long"},
        {"audio": "train/cut.wav", "text": "cut"},
        {"audio": "train/none.wav", "text": "none"},
        {"audio": "train/1.wav", "text": "parole", "language": "xx"},
        {"audio": "train/1.wav", "text": "<|endoftext|>"},
        {"audio": "train/1.wav", "text": "word " * 60},
        {"audio": "train/1.wav", "text": " "},
        {"audio": "train/1.wav"},
        {"audio": "train/1.wav", "text": "hoch", "language": "de"},
    ]
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    (seen, _) = survey(read_speech(run), tmp_path)
    assert (seen.report.rows, seen.report.documents, seen.report.empty, seen.report.broken) == (22, 13, 1, 8)
    reasons = " ".join(reason for _, reason in seen.report.listed)
    for told in ("more than 4 s", "cut short", "cannot be opened", "unknown language 'xx'", "special token"):
        assert told in reasons
    assert "too long for a window" in reasons
    assert "no column 'text'" in reasons
    assert "no JSON" in reasons
    assert train(run).broken >= 3


@pytest.mark.slow
def test_the_command_line_of_pictures(tmp_path: Path) -> None:
    """Without a run file: a folder with train and val, the run file that it makes, and what data check and show say."""
    run = make_images(tmp_path / "made")
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (tmp_path / "made" / "train").rename(pictures / "train")
    (tmp_path / "made" / "held").rename(pictures / "val")
    base = str(run.parent / "base")
    spoil(pictures / "train")
    told = CliRunner().invoke(data_command, ["check", str(pictures), "--model", base])
    assert told.exit_code == 0, told.output
    assert "001.png is damaged or cut short" in told.output
    strict = ["check", str(pictures), "--model", base, "--strict"]
    assert CliRunner().invoke(data_command, strict, standalone_mode=False).return_value == 2
    shown = CliRunner().invoke(data_command, ["show", str(pictures), "--model", base, "--window", "1"])
    assert "input 3 x 32 x 32" in shown.output, shown.output
    made = CliRunner().invoke(
        train_command, ["--model", base, "--data", str(pictures), "-o", str(tmp_path / "out"), "--quiet"]
    )
    assert made.exit_code == 0, made.output
    written = read_images(tmp_path / "out" / "run.toml")
    assert written.data.validation == [str(pictures / "val")]
    assert (tmp_path / "out" / "model" / "preprocessor_config.json").is_file()
    with pytest.raises(RunError, match="--dpo is for language models"):
        CliRunner().invoke(
            train_command,
            ["--model", base, "--data", str(pictures), "--dpo", "beta=0.1", "-o", str(tmp_path / "other")],
            catch_exceptions=False,
        )


@pytest.mark.slow
def test_the_command_line_of_speech(tmp_path: Path) -> None:
    run = make_speech(tmp_path)
    base, manifest = str(run.parent / "base"), str(make_sounds(tmp_path, "more", 3))
    told = CliRunner().invoke(data_command, ["check", manifest, "--model", base])
    assert told.exit_code == 0, told.output
    shown = CliRunner().invoke(data_command, ["show", manifest, "--model", base])
    assert "<|transcribe|>" in shown.output, shown.output
    made = CliRunner().invoke(
        train_command, ["--model", base, "--data", manifest, "-o", str(tmp_path / "out"), "--quiet"]
    )
    assert made.exit_code == 0, made.output
    assert read_speech(tmp_path / "out" / "run.toml").samples == 30, "so few are read ten times"


def test_a_part_of_the_pictures_is_held_out_and_every_class_is_trained_on(tmp_path: Path) -> None:
    """As of text: 5%, drawn by the seed; --no-validation trains on all."""
    pictures = make_pictures(tmp_path / "pictures", 20)
    for path in sorted((pictures / "disc").iterdir())[1:]:
        path.unlink()
    (tmp_path / "base").mkdir()
    base = str(make_classifier(tmp_path / "base"))
    run = files_run(base, [str(pictures)], Path(), {"hold_out": 0.5})
    assert isinstance(run, ImageRun)
    listed = list_pictures(run, Path())
    parts = [{item.path for item in part.items} for part in (listed.train, listed.validation)]
    assert [len(part) for part in parts] == [21, 20]
    assert not parts[0] & parts[1]
    assert (pictures / "disc" / "000.png") in parts[0]
    assert {item.target for item in listed.validation.items} == {"check", "stripes"}
    assert list_pictures(run, Path()).validation.items == listed.validation.items
    other = files_run(base, [str(pictures)], Path(), {"hold_out": 0.5, "seed": 1})
    assert isinstance(other, ImageRun)
    assert list_pictures(other, Path()).validation.items != listed.validation.items
    with from_words(base, [str(pictures)], world=1, out=tmp_path / "o") as (text, _):
        assert "hold_out = 0.05  # 2 samples are held out" in text
        assert "[evaluation]" in text
    with from_words(base, [str(pictures)], world=1, out=tmp_path / "o", no_validation=True) as (text, _):
        assert "hold_out" not in text
    few = make_pictures(tmp_path / "few", 3)
    with from_words(base, [str(few)], world=1, out=tmp_path / "o") as (text, _):
        assert "too few to hold some out" in text


@pytest.mark.plain("make_images")
@pytest.mark.parametrize("make", [make_images, make_speech])
def test_a_run_judges_by_what_it_holds_out(tmp_path: Path, make: Any) -> None:
    """The checkpoint with the best loss stays, and a run that goes on holds out the same."""
    held = {"train": ["train" if make is make_images else "train.jsonl"], "hold_out": 0.2}
    evaluation = {"every_steps": 2} | ({} if make is make_images else {"transcribed": 0})
    path = make(tmp_path, data=held, evaluation=evaluation, checkpoint={"every_steps": 2, "keep": 1})
    outcome = train(path)
    assert outcome.best_step in (2, 4, 6)
    assert outcome.best_validation_loss is not None
    kept = {int(folder.name[5:]) for folder in (tmp_path / "out" / "checkpoints").iterdir()}
    assert kept == {outcome.best_step, outcome.steps}
    read = verb(kind_of(path), "read")
    surveyed = survey(read(path), tmp_path)
    assert [part.source for part in surveyed] == ["train", "validation"]
    with pytest.raises(RunError, match="either `validation` or `hold_out`"):
        read(make(tmp_path / "both", data=held | {"validation": ["held"]}))
