"""Pictures in prompts of models that run on transformers' own code: its tokens, over pages or one answer at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vlms
from torchwright.models.decoder.generation.generate import LoadedPagedModel
from torchwright.models.decoder.transformers_backend.writer import TransformersWriter
from torchwright.models.vision.on_transformers import shows_on_transformers
from torchwright.models.vision.reader import PictureReader, takes_pictures
from torchwright.optimization.open_model import open_model
from torchwright.serve.engine.write import WritingEngine
from torchwright.serve.folder import find
from torchwright.serve.options import EngineOptions
from torchwright.serve.wire.messages import SamplingOptions, Submit

PICTURES = [vlms.picture(0), vlms.picture(1, 100, 40)]
PAGED = ("AyaVision", "Gemma4", "Glm4v")
ALONE = {"Gemma4, pictures seen whole": "differ from its own"}
NEW = 8


def asked(folder: Path, shown: list[np.ndarray]) -> tuple[list[int], list[Any], dict[str, Any]]:
    """Our tokens and pictures of a text, and transformers' inputs of the same text."""
    processor, reader = vlms.processor_of(folder), PictureReader(folder)
    prepared = [reader.read(picture) for picture in shown]
    ours = "See " + "".join(f"{one.text} and {place} " for place, one in enumerate(prepared)) + "say."
    theirs = "See " + "".join(f"{processor.image_token} and {place} " for place in range(len(shown))) + "say."
    inputs = processor(
        text=[theirs], images=[shown] if shown else None, return_tensors="pt", add_special_tokens=False
    )
    ids = processor.tokenizer(ours, add_special_tokens=False)["input_ids"]
    assert ids == inputs["input_ids"][0].tolist()
    return ids, [one.picture for one in prepared], inputs


def tokens(whole: Any, inputs: dict[str, Any]) -> list[int]:
    count = inputs["input_ids"].shape[1]
    with torch.inference_mode():
        out = whole.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return out[0, count:].tolist()


@pytest.mark.plain("Glm4v")
@pytest.mark.parametrize("name", PAGED)
def test_pictures_are_seen_over_pages(name: str, tmp_path: Path) -> None:
    whole = vlms.save(name, tmp_path)
    assert takes_pictures(tmp_path)
    assert find(str(tmp_path)).fixed
    opened = open_model(str(tmp_path), dtype="fp32", device="cpu")
    assert any("it takes text and pictures" in notice for notice in opened.notices), opened.notices
    loaded: Any = opened.model
    assert isinstance(loaded, LoadedPagedModel)
    cases = [asked(tmp_path, shown) for shown in (PICTURES[:1], [], PICTURES)]
    want = [tokens(whole, inputs) for _, _, inputs in cases]
    prompts, pictures = [ids for ids, _, _ in cases], [found for _, found, _ in cases]
    for chunk in (512, 5):
        found = loaded.generate(prompts, pictures=pictures, max_new_tokens=NEW, stop=[], prefill_chunk=chunk)
        assert found == want


def test_pictures_that_are_seen_whole_are_answered_one_at_a_time(tmp_path: Path) -> None:
    name = "Gemma4, pictures seen whole"
    whole = vlms.save(name, tmp_path)
    opened = open_model(str(tmp_path), dtype="fp32", device="cpu")
    writer = opened.model
    assert isinstance(writer, TransformersWriter)
    assert any(
        "one answer at a time" in notice and "text and pictures" in notice for notice in opened.notices
    )
    engine = WritingEngine(writer, tmp_path, tokenizer=tmp_path, options=EngineOptions(max_running=4))
    assert engine.ready.pictures
    want: dict[str, list[int]] = {}
    for place, shown in enumerate((PICTURES[:1], [], PICTURES)):
        ids, found, inputs = asked(tmp_path, shown)
        want[f"r{place}"] = tokens(whole, inputs)
        submit = Submit(
            id=f"r{place}", ids=ids, pictures=found, max_tokens=NEW, sampling=SamplingOptions(temperature=0)
        )
        assert engine.submit(submit) is None
    answers: dict[str, list[int]] = {id: [] for id in want}
    while not engine.idle:
        for output in engine.step().outputs:
            answers[output.id] += output.tokens
    assert answers == want
    bad = Submit(id="bad", ids=[5], pictures=found, max_tokens=1, sampling=SamplingOptions())
    refused = engine.submit(bad)
    assert refused is not None
    assert "places for pictures" in refused.text
    engine.close()


def test_a_model_that_cannot_be_shown_pictures_answers_text_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlms.save("AyaVision", tmp_path)
    opened = open_model(str(tmp_path), dtype="fp32", device="cpu")
    whole = opened.model
    assert shows_on_transformers(tmp_path) is not None
    import torchwright.models.decoder.transformers_backend.pictures as pictures

    monkeypatch.setattr(pictures, "handed", lambda embedded, form: {})
    opened = open_model(str(tmp_path), dtype="fp32", device="cpu")
    assert any("it takes text alone" in notice for notice in opened.notices)
    assert isinstance(opened.model, type(whole))
    assert opened.model.vision is None
