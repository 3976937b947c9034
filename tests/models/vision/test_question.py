"""Questions about pictures: a chat template's places, each family's tokens, and `torchwright generate --image`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vlms
from in_process import own_cache
from torchwright.cli import main
from torchwright.core.errors import WorkloadError
from torchwright.hardware.kernels import ops
from torchwright.models.vision.picture import PictureError
from torchwright.models.vision.question import question_about
from torchwright.models.vision.reader import PictureReader, takes_pictures

TEMPLATE = """\
{%- for message in messages %}{{- '[' + message.role + ']' }}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '(PLACE)' }}{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"""


def file(folder: Path, seed: int, height: int = 60, width: int = 90) -> Path:
    found = folder / f"picture{seed}.png"
    Image.fromarray(vlms.picture(seed, height, width)).save(found)
    return found


def write_template(folder: Path) -> None:
    placeholder = PictureReader(folder).placeholder
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", placeholder))


@pytest.mark.plain("Qwen2_5_VL", "Idefics3")
@pytest.mark.parametrize("name", vlms.named_hosts())
def test_a_question_has_the_tokens_of_the_models_own_processor(name: str, tmp_path: Path) -> None:
    vlms.save(name, tmp_path)
    write_template(tmp_path)
    assert takes_pictures(tmp_path)
    question = question_about(tmp_path, "What?", [file(tmp_path, 0)])
    processor = vlms.processor_of(tmp_path)
    text = f"[user]({processor.image_token})What?[assistant]"
    expected = processor(text=text, images=[vlms.picture(0)], return_tensors="np", add_special_tokens=False)
    assert question.ids == np.asarray(expected["input_ids"])[0].tolist()
    [picture] = question.pictures
    assert picture.tokens == question.ids.count(PictureReader(tmp_path).tokens[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vision")
    vlms.save("Qwen2_5_VL", found)
    write_template(found)
    return found


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["generate", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_generate_looks_at_pictures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(monkeypatch, tmp_path / "cache")
    red, blue = file(tmp_path, 1), file(tmp_path, 2, 84, 56)
    options = ["--prompt", "What?", "--max-new-tokens", "12", "--json", "--dtype", "fp32"]
    found = {}
    for name, images in {"none": [], "red": [red], "blue": [blue], "both": [red, blue]}.items():
        words = [word for image in images for word in ("--image", str(image))]
        code, out, err = run(capsys, str(folder), *options, *words)
        assert code == 0, err
        found[name] = json.loads(out)
    tokens = {name: facts["prompt_tokens"] for name, facts in found.items()}
    assert tokens["both"] > tokens["red"] > tokens["none"]
    texts = {facts["text"] for facts in found.values()}
    assert len(texts) > 1  # the picture says something


def test_what_cannot_be_asked(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"abc")
    good = file(tmp_path, 1)
    code, _, err = run(capsys, str(folder), "--prompt", "What?", "--image", str(broken))
    assert code == 2
    assert "broken.png is no picture that can be read" in err
    code, _, err = run(capsys, str(folder), "--prompt", "What?", "--image", str(tmp_path / "none.png"))
    assert code == 2
    assert "there is no file" in err
    code, _, err = run(capsys, "--prompt", "What?", "--image", str(good))
    assert code == 2
    assert "takes text alone" in err
    word = PictureReader(folder).placeholder
    with pytest.raises(WorkloadError, match="has 2 places for pictures"):
        question_about(folder, f"What is {word}?", [good])
    with pytest.raises(PictureError):
        question_about(folder, "What?", [good, broken])


def test_the_encoders_precision_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if ops.fault("cpu"):
        pytest.skip("no kernels")
    own_cache(monkeypatch, tmp_path / "cache")
    words = [str(folder), "--prompt", "What?", "--max-new-tokens", "2", "--image", str(file(tmp_path, 1))]
    for options, kind in (
        ([], "bf16"),
        (["--quantize", "w4a8"], "w8a8"),
        (["--quantize", "w4a8", "--quantize-vision", "none"], "bf16"),
        (["--quantize-vision", "w8a8"], "w8a8"),
    ):
        code, _, err = run(capsys, *words, *options)
        assert code == 0, err
        assert f"pictures are encoded by our kernels in {kind}, cosine" in err
    code, _, err = run(capsys, "--prompt", "What?", "--quantize-vision", "w8a8")
    assert code == 2
    assert "takes text alone" in err
    code, _, err = run(capsys, *words, "--dtype", "fp32", "--quantize-vision", "w4a8")
    assert code == 2


@pytest.mark.slow
def test_an_artifact_answers_about_pictures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole search, over one technique: half a minute."""
    if ops.fault("cpu"):
        pytest.skip("no kernels")
    own_cache(monkeypatch, tmp_path / "cache")
    out, image = tmp_path / "out", file(tmp_path, 1)
    steps = ["--only", "native_vision", "--new-tokens", "4", "--max-drop", "0.2", "--time-budget", "60"]
    assert main(["optimize", str(folder), "-o", str(out), *steps]) == 0
    assert (out / "vision" / "schemes.json").read_text() == "{}"
    capsys.readouterr()
    options = ["--prompt", "What?", "--max-new-tokens", "6", "--json", "--image", str(image)]
    found = {}
    for name, target in {"artifact": out, "folder": folder}.items():
        code, text, err = run(capsys, str(target), *options)
        assert code == 0, err
        found[name] = json.loads(text)["text"]
    assert found["artifact"] == found["folder"]
    code, _, err = run(capsys, str(out), *options, "--quantize-vision", "w8a8")
    assert code == 2
    assert "is an artifact and has its own" in err
