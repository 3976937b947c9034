"""A served speech model: the same tokens alone, beside others, and after a neighbour that was cancelled."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
from http_support import command

from torchwright.models.speech import bundled
from torchwright.models.speech.load import load_speech
from torchwright.models.speech.transcript import Options, Segment
from torchwright.serve.engine.hear import ServedRecognizer
from torchwright.serve.wire.messages import Failed, Heard, RequestRefused, Transcribe
from whispers import noise, tiny

SPOKEN = Path(__file__).parents[1] / "models" / "speech" / "spoken.flac"


@pytest.fixture(autouse=True)
def _any_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep all text: a tiny model writes improbable text of noise."""
    defaults = Options.__init__.__kwdefaults__
    assert defaults
    monkeypatch.setitem(defaults, "only_speech", False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def served(folder: Path) -> ServedRecognizer:
    return ServedRecognizer(load_speech(folder), max_running=3, max_queue=2)


def sound(folder: Path, seconds: float) -> tuple[str, np.ndarray]:
    samples_T = noise(seconds)
    path = folder / f"{len(list(folder.iterdir()))}.samples"
    samples_T.tofile(path)
    return str(path), samples_T


def run(served: ServedRecognizer, found: dict[str, list[Segment]], steps: int = 10_000) -> None:
    for _ in range(steps):
        if served.idle:
            return
        heard = served.step()
        assert isinstance(heard, Heard)
        if heard.window is not None:
            found.setdefault(heard.id, []).extend(heard.window.segments)


def test_company_changes_nothing(served, folder, tmp_path):
    one, samples_T = sound(tmp_path, 6.3)
    two, three = (sound(tmp_path, seconds)[0] for seconds in (3.1, 4.7))
    alone = load_speech(folder).transcribe(samples_T, language="en").segments
    options = Options(language="en")
    found: dict[str, list[Segment]] = {}
    for id, path in (("two", two), ("one", one), ("three", three)):
        assert served.submit(Transcribe(id=id, samples=path, options=options)) is None
    run(served, found, steps=4)
    served.cancel("three")
    served.cancel("nobody")
    run(served, found)
    assert tuple(found["one"]) == alone
    assert len(found.get("three", [])) < len(alone) * 3
    assert found["two"]


def test_the_queue_is_bounded(served, tmp_path):
    path, _ = sound(tmp_path, 1)
    answers = [served.submit(Transcribe(id=str(i), samples=path, options=Options())) for i in range(6)]
    assert answers[:5] == [None] * 5
    assert isinstance(answers[5], RequestRefused)
    served.cancel_all()
    assert served.idle


def test_a_fault_is_its_own_sounds(served, tmp_path):
    path, _ = sound(tmp_path, 1)
    missing = served.submit(Transcribe(id="0", samples=str(tmp_path / "none"), options=Options()))
    assert isinstance(missing, Failed)
    served.submit(Transcribe(id="1", samples=path, options=Options(language="xx")))
    served.submit(Transcribe(id="2", samples=path, options=Options()))
    Path(path).unlink()  # the file may go once it was taken
    assert isinstance(served.step(), Failed)
    run(served, found := {})
    assert "2" in found or served.idle


@pytest.mark.slow
@pytest.mark.skipif(
    not (bundled.FOLDER / "model.safetensors").is_file(), reason="this checkout has no bundled speech model"
)
def test_the_command():
    """A served model keeps the text of a voice alone, so that this is speech and a model that was trained."""
    pytest.importorskip("python_multipart", reason="uploads are read with python-multipart")
    soundfile = pytest.importorskip("soundfile", reason="sound files are read with soundfile")
    samples_T, _ = soundfile.read(SPOKEN, dtype="float32")
    with command(str(bundled.FOLDER)) as running, httpx.Client(base_url=running.url, timeout=120) as http:
        answer = http.post(
            "/v1/audio/transcriptions",
            files={"file": ("a.flac", SPOKEN.read_bytes())},
            data={"response_format": "verbose_json", "language": "en"},
        ).json()
        assert http.get("/health_generate").status_code == 200
    alone = load_speech(bundled.FOLDER, dtype=None).transcribe(samples_T, language="en")  # as it is served
    assert alone.text
    assert [tuple(row["tokens"]) for row in answer["segments"]] == [row.tokens for row in alone.segments]
    assert answer["text"] == alone.text


@pytest.mark.parametrize("words", [["--kv", "int8"], ["--kv-memory", "1GiB"], ["--max-context", "9"]])
def test_options_of_text_are_refused(folder, words, capsys):
    pytest.importorskip("python_multipart", reason="uploads are read with python-multipart")
    pytest.importorskip("soundfile", reason="sound files are read with soundfile")
    from torchwright.cli import main

    assert main(["serve", str(folder), "--port", "0", *words]) == 2
    assert f"{words[0]}: not for" in capsys.readouterr().err
