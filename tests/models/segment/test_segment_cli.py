"""`torchwright segment`: masks as files, several pictures, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sams import picture, tiny_sam

from torchwright.cli import main
from torchwright.models.segment.masks import from_run_lengths


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_sam(tmp_path_factory.mktemp("sam")))


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    Image.fromarray(picture(60, 90)).save(tmp_path / "cat.png")
    return tmp_path / "cat.png"


def test_masks_are_written(model: str, cat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = [
        "segment",
        str(cat),
        "--model",
        model,
        "-o",
        str(out),
        "--box",
        "5,5,50,50",
        "--box",
        "20,5,80,50",
    ]
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert main([*words, "--json"]) == 0  # masks that were there are replaced
    (row,) = json.loads(capsys.readouterr().out)["files"]
    told = json.loads((out / "cat" / "masks.json").read_text())
    assert sorted(path.name for path in (out / "cat").iterdir()) == [
        "000.png", "001.png", "masks.json", "overlay.png",
    ]  # fmt: skip
    assert (told["height"], told["width"], len(row["masks"])) == (60, 90, 2)
    for mask in told["masks"]:
        drawn = np.asarray(Image.open(out / "cat" / mask["file"])) > 127
        assert (drawn == from_run_lengths(mask["segmentation"])).all()
        assert drawn.sum() == mask["area"]
    with Image.open(out / "cat" / "overlay.png") as overlay:
        assert overlay.size == (90, 60)


def test_several_pictures_and_one_of_them_bad(
    model: str, cat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.png").write_bytes(b"no picture")
    words = ["segment", str(tmp_path / "bad.png"), str(cat), "--model", model, "-o", str(tmp_path / "out")]
    assert main([*words, "--everything", "--grid", "2"]) == 2
    out, err = capsys.readouterr()
    assert "bad.png is no picture" in err
    assert "cat.png: " in out
    assert (tmp_path / "out" / "cat" / "overlay.png").is_file()
    assert not (tmp_path / "out" / "bad").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "say which object"),
        (["--outside", "3,3"], "say which object"),
        (["--point", "3"], "'3' is not X,Y"),
        (["--point", "a,b"], "'a,b' is not X,Y"),
        (["--everything", "--point", "3,3"], "asks for no --point"),
        (["--point", "3,3", "--grid", "4"], "--grid is for --everything"),
        (["--point", "300,3"], "beside the picture"),
        (["--point", "nan,3"], "2 finite numbers"),
        (["--box", "50,50,5,5"], "a box is empty"),
    ],
)
def test_bad_words(
    model: str, cat: Path, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["segment", str(cat), "--model", model, "-o", str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["file/below", "/proc/none"])
def test_a_place_where_nothing_can_be_written(
    cat: Path, tmp_path: Path, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told before the model is opened: it is not there."""
    (tmp_path / "file").write_text("keep me")
    assert (
        main(["segment", str(cat), "--model", "no/model", "-o", str(tmp_path / out), "--point", "3,3"]) == 2
    )
    assert "nothing can be written" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "keep me"


def test_a_folder_of_something_else_is_left_alone(
    model: str, cat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out" / "cat").mkdir(parents=True)
    (tmp_path / "out" / "cat" / "letter.txt").write_text("keep me")
    words = ["segment", str(cat), "--model", model, "-o", str(tmp_path / "out"), "--point", "3,3"]
    assert main(words) == 2
    assert "holds no masks" in capsys.readouterr().err
    assert (tmp_path / "out" / "cat" / "letter.txt").read_text() == "keep me"
    assert main([*words[:2], str(cat), *words[2:]]) == 2
    assert "two of the pictures" in capsys.readouterr().err
