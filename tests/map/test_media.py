"""Pictures and sounds: the files of a folder, or those that a table names, through a classifier and a recognizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from folders import image, save, write_json
from torchwright.core.errors import UnknownName
from torchwright.map.columns import choose
from torchwright.map.model import find_model
from torchwright.map.options import ModelOptions, TaskName, TaskOptions
from torchwright.map.sources import open_sources, parse
from torchwright.map.tasks.base import FACTS, Answer, Rejected, Task, TaskSpec
from torchwright.map.tasks.registry import open_task
from torchwright.workloads.image import ImageWorkload
from whispers import tiny

pillow = pytest.importorskip("PIL.Image")
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": 32, "width": 32},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def opened(
    target: Path, name: TaskName, sources: list[str], **options: Any
) -> tuple[Task, list[dict[str, Any]]]:
    """A task, and the rows of its inputs."""
    found = find_model(str(target), None)
    assert found.usual_task == name
    facts = FACTS[name, found.kind]
    inputs = open_sources(sources, None, facts.media)
    columns, _ = choose(inputs, name, facts, TaskOptions(**options), None)
    spec = TaskSpec(
        task=name,
        kind=found.kind,
        folder=str(found.folder),
        artifact=None,
        model=ModelOptions(model=str(target)),
        options=columns,
    )
    rows = [parse(record, source.kind).values for source in inputs for record in source.records()]
    return open_task(spec), rows


def answers(task: Task, rows: list[dict[str, Any]]) -> list[Answer]:
    found = dict(task.answer(rows))
    return [found[place] for place in range(len(rows))]


def test_pictures_of_a_folder_are_classified_and_a_broken_one_is_named(tmp_path: Path) -> None:
    folder = save(image("ViT"), tmp_path / "vit", tokenizer=False)
    write_json(folder / "preprocessor_config.json", PROCESSOR)
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(18):  # more than one call
        pixels = np.full((40, 30, 3), 14 * number, np.uint8)
        pillow.fromarray(pixels).save(pictures / f"{number:02}.png")
    (pictures / "18.jpg").write_bytes(b"no picture")
    task, rows = opened(folder, "classify", [str(pictures)], all_labels=True)
    *found, broken = answers(task, rows)
    assert isinstance(broken, Rejected)
    assert "18.jpg" in broken.reason
    model = ImageWorkload(folder, batch=1).build()
    for number, row in enumerate(found):
        assert isinstance(row, dict)
        pixels = torch.full((1, 3, 32, 32), (14 * number / 255 - 0.5) / 0.5)
        with torch.no_grad():
            wanted_C = model(pixels)[0].softmax(0)
        assert row["label"] == f"LABEL_{int(wanted_C.argmax())}"
        assert row["score"] == pytest.approx(wanted_C.max().item(), abs=1e-4)
        assert len(row["scores"]) == 7


def test_sounds_that_a_table_names_are_transcribed(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    folder = tiny(tmp_path / "whisper")
    draw = np.random.default_rng(0)
    soundfile.write(tmp_path / "a.wav", draw.normal(0, 0.1, 16000 * 5), 16000)
    (tmp_path / "b.wav").write_bytes(b"no sound")
    table = tmp_path / "list.csv"
    table.write_text(
        f"id,audio\n1,{tmp_path / 'a.wav'}\n2,{tmp_path / 'b.wav'}\n3,\n4,{tmp_path / 'c.wav'}\n"
    )
    request = {"language": "en", "only_speech": False}
    task, rows = opened(folder, "transcribe", [str(table)], request=request)
    first, broken, empty, missing = answers(task, rows)
    assert isinstance(first, dict)
    assert first["seconds"] == pytest.approx(5.0, abs=0.1)
    assert first["language"] == "en"
    assert first["text"] == " ".join(segment["text"] for segment in first["segments"])
    assert [type(one) for one in (broken, empty, missing)] == [Rejected] * 3
    with pytest.raises(UnknownName, match="did you mean 'language'"):
        opened(folder, "transcribe", [str(table)], request={"langauge": "en"})
