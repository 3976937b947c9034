"""A served pipeline: the same picture alone, beside others, and after a neighbour that was cancelled."""

from __future__ import annotations

import base64
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "models" / "diffusion"))
from http_support import command

from torchwright.serve.wire.messages import Failed, FromEngine, Paint, Painted, RequestRefused

pytest.importorskip("diffusers", reason="pipelines are opened with diffusers")
pytest.importorskip("PIL", reason="pictures are written with Pillow")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pixart import write_pixart

    return write_pixart(tmp_path_factory.mktemp("pixart"))


@pytest.fixture
def served(folder: Path):
    from torchwright.models.diffusion.load import load_diffuser
    from torchwright.serve.engine.paint import ServedDiffuser

    return ServedDiffuser(load_diffuser(folder), max_queue=3)


def asked(id: str, prompt: str = "a red dog", **more) -> Paint:
    return Paint(id=id, prompt=prompt, **({"seed": 3, "steps": 3, "size": (24, 16)} | more))


def run(served, listen: Callable[[list[FromEngine]], None] = lambda sent: None) -> list[FromEngine]:
    sent: list[FromEngine] = []
    while not served.idle:
        served.paint(sent.append, lambda: listen(sent))
    return sent


def pictures(sent: list[FromEngine]) -> dict[str, bytes]:
    return {one.id: one.pixels for one in sent if isinstance(one, Painted) and one.pixels is not None}


def test_company_changes_nothing(served, folder):
    from torchwright.models.diffusion.load import load_diffuser

    alone = load_diffuser(folder).draw("a red dog", seed=3, steps=3, size=(24, 16)).pixels_HW3
    for message in (asked("left", "a house", steps=5), asked("one"), asked("two", "the sea", seed=9)):
        assert served.submit(message) is None

    def listen(sent: list[FromEngine]) -> None:
        if sum(isinstance(one, Painted) and one.id == "left" for one in sent) == 2:
            served.cancel("left")

    sent = run(served, listen)
    found = pictures(sent)
    assert sorted(found) == ["one", "two"]
    assert found["one"] == alone.tobytes()
    assert found["two"] != found["one"]
    assert [one.done for one in sent if isinstance(one, Painted) and one.id == "left"] == [1, 2]
    assert [one.done for one in sent if isinstance(one, Painted) and one.id == "one"] == [1, 2, 3, 3]
    last = next(one for one in sent if isinstance(one, Painted) and one.pixels is not None)
    assert last.size == (24, 16)


def test_the_models_own_size(served):
    served.submit(asked("0", size=None))
    (picture,) = (one for one in run(served) if isinstance(one, Painted) and one.pixels is not None)
    assert picture.size == (16, 16)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"size": (18, 16)}, "multiples of"),
        ({"size": (1 << 16, 1 << 16)}, "at most"),
        ({"steps": 0}, "0 steps"),
        ({"seed": -1}, "seed -1"),
        ({"prompt": "a" * 10_001}, "10,001 characters"),
    ],
)
def test_what_no_picture_is_made_of(served, wrong, text):
    refused = served.submit(asked("0", **wrong))
    assert isinstance(refused, Failed)
    assert text in refused.text
    assert served.idle


def test_the_end_of_a_long_prompt_is_told(served):
    served.submit(asked("long", "a red dog " * 150))
    served.submit(asked("short"))
    last = {one.id: one for one in run(served) if isinstance(one, Painted) and one.pixels is not None}
    assert "left out" in last["long"].notices[0]
    assert last["short"].notices == []


def test_the_queue_is_bounded_and_forgets(served):
    assert [served.submit(asked(str(i))) for i in range(3)] == [None] * 3
    assert isinstance(served.submit(asked("3")), RequestRefused)
    served.cancel("1")
    served.cancel("nobody")
    assert served.submit(asked("3")) is None
    assert sorted(pictures(run(served))) == ["0", "2", "3"]
    served.submit(asked("4"))
    served.cancel_all()
    assert served.idle


def test_all_are_forgotten_while_one_is_made(served):
    served.submit(asked("0"))
    served.submit(asked("1"))
    sent = run(served, lambda sent: served.cancel_all())
    assert sent == []


def test_weights_have_a_name(served, folder, tmp_path):
    from torchwright.serve.engine.fingerprint import fingerprint_of_files

    files = sorted(folder.rglob("*.safetensors"))
    assert served.ready.fingerprint == fingerprint_of_files(files)
    other = tmp_path / files[0].parent.name
    other.mkdir()
    copy = Path(shutil.copy(files[0], other))
    assert fingerprint_of_files([copy]) == fingerprint_of_files(files[:1])
    data = bytearray(copy.read_bytes())
    data[-1 - len(data) % 8] ^= 1
    data[0] ^= 1
    copy.write_bytes(data)
    assert fingerprint_of_files([copy]) != fingerprint_of_files(files[:1])


@pytest.mark.parametrize("words", [["--kv", "int8"], ["--quantize", "w8a8"], ["--max-context", "9"]])
def test_options_of_text_are_refused(folder, words, capsys):
    from torchwright.cli import main

    assert main(["serve", str(folder), "--port", "0", *words]) == 2
    assert f"{words[0]}: not for" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(folder, tmp_path):
    openai = pytest.importorskip("openai", reason="OpenAI's own client")
    import httpx

    from torchwright.cli import main

    words = ["--seed", "5", "--steps", "2", "--size", "24x16", "-o", str(tmp_path / "a.png"), "--quiet"]
    assert main(["imagine", "a blue house", "--model", str(folder), *words]) == 0
    with (
        command(str(folder)) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        more = {"seed": 5, "steps": 2}
        found = client.images.generate(prompt="a blue house", size="16x24", n=2, extra_body=more)
        assert base64.b64decode(found.data[0].b64_json) == (tmp_path / "a.png").read_bytes()
        assert found.data[1].b64_json != found.data[0].b64_json
        with pytest.raises(openai.BadRequestError, match="multiples of"):
            client.images.generate(prompt="a house", size="17x17", extra_body=more)
        with pytest.raises(openai.BadRequestError, match="images/generations"):
            client.completions.create(model=folder.name, prompt="a house")
        assert httpx.get(running.url + "/health_generate", timeout=60).status_code == 200
        facts = httpx.get(running.url + "/model_info").json()
        assert facts["architectures"] == ["PixArtSigmaPipeline"]
