"""Pictures in the engine: embeddings in a batch, positions by axis, the prefix tree, whole pictures, faults.

The answers are those of `generate`, bit for bit, whatever a request's company.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import alone, answers, bundled, drain, engine, request

import vlms
from torchwright.core.errors import ModelError
from torchwright.models.decoder import PAGE, LoadedDecoder, load_decoder
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.models.vision.reader import PictureReader
from torchwright.models.vision.record import Picture
from torchwright.serve.engine.pictures import EncodedPictures
from torchwright.serve.wire.messages import Submit, decode_to_engine, encode

MODELS = ("Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "Gemma3")
RED, BLUE = vlms.picture(1), vlms.picture(2)


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedDecoder:
    folder: Path = tmp_path_factory.mktemp(request.param)
    vlms.save(request.param, folder)
    found = load_decoder(folder, torch.bfloat16)
    found.vision = PictureEncoder(folder, torch.bfloat16)
    return found


def shows(
    loaded: LoadedDecoder, id: str, *parts: str | np.ndarray, tokens: int = 8, **options: Any
) -> Submit:
    """A request with these texts and pictures, as it comes out of the wire."""
    reader, text, pictures = PictureReader(loaded.folder), "", list[Picture]()
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            prepared = reader.read(part)
            text += prepared.text
            pictures.append(prepared.picture)
    ids = vlms.processor_of(loaded.folder).tokenizer(text, add_special_tokens=False)["input_ids"]
    submit = request(id, ids, tokens, logprobs=1, pictures=pictures, **options)
    found = decode_to_engine(encode(submit))
    assert isinstance(found, Submit)
    return found


def same(found: Any, wanted: Any) -> None:
    assert (found.tokens, found.logprobs, found.finish) == (wanted.tokens, wanted.logprobs, wanted.finish)


@pytest.mark.plain("Qwen3VL")
def test_answers_are_those_of_generate_in_any_company(loaded: LoadedDecoder) -> None:
    asked = [
        shows(loaded, "a", "What is this? ", RED, " Say."),
        shows(loaded, "b", "No picture here."),
        shows(loaded, "c", RED, " ", BLUE, "Which is larger?", tokens=20),
        shows(loaded, "d", "And ", vlms.picture(3, 120, 60), "?", tokens=3),
    ]
    wanted = {
        one.id: loaded.generate([one.ids], pictures=[one.pictures], max_new_tokens=one.max_tokens, stop=[])[0]
        for one in asked
    }
    assert len({tuple(tokens[:3]) for tokens in wanted.values()}) > 1
    for step_tokens in (256, 9):
        found = answers(loaded, asked, step_tokens=step_tokens, prefix_cache=False, max_running=8)
        for one in asked:
            assert found[one.id, 0].tokens == wanted[one.id]
            same(found[one.id, 0], alone(loaded, one)[0])


@pytest.mark.plain("Qwen3_5", "Gemma3")
def test_a_second_question_on_the_same_picture_finds_it_cached(loaded: LoadedDecoder) -> None:
    long = "A text that is longer than a page comes first. "
    first = shows(loaded, "a", long, RED, " What is this?")
    second = shows(loaded, "b", long, RED, " And where was it taken?")
    other = shows(loaded, "c", long, BLUE, " What is this?")
    assert first.ids == other.ids
    made = engine(loaded)
    found = {}
    for one in (first, second, other, first):
        assert made.submit(one) is None
        found = drain(made) | {key: value for key, value in found.items() if key[0] != one.id}
        same(found[one.id, 0], alone(loaded, one)[0])
    assert found["a", 0].logprobs != found["c", 0].logprobs
    cached = {id: result.timing.cached_tokens for (id, _), result in found.items() if result.timing}
    start = first.ids.index(loaded.vision.tokens[0]) if loaded.vision else 0
    if not loaded.config.state_shapes:  # a state is kept behind some pages only
        common = next(n for n, (a, b) in enumerate(zip(first.ids, second.ids, strict=False)) if a != b)
        assert cached["b"] == common // PAGE * PAGE
        assert cached["c"] == start // PAGE * PAGE
    assert cached["a"] == (len(first.ids) - 1) // PAGE * PAGE


@pytest.mark.plain("Qwen3_5")
def test_turns_of_text_and_of_pictures_share_what_they_have_in_common(loaded: LoadedDecoder) -> None:
    """ztxz16/fastllm#750: a picture behind a cached text was not seen; ggml-org/llama.cpp#27931: a hybrid's server
    crashed where such turns alternate."""
    text = "A text that is longer than a page comes first. "
    made, asks = (
        engine(loaded),
        [(), (RED, "What?"), ("Say.",), (RED, "What?", BLUE, "And now?"), (), (BLUE, "What?")],
    )
    for n, rest in enumerate(asks):
        asked = shows(loaded, str(n), text, *rest, tokens=4)
        assert made.submit(asked) is None
        same(drain(made)[asked.id, 0], alone(loaded, asked)[0])
    assert made.stats().prefix_hits


@pytest.mark.plain("Qwen3VL")
def test_a_preempted_sequence_sees_its_pictures_again(loaded: LoadedDecoder) -> None:
    asked = [shows(loaded, str(n), f"Number {n}: ", RED, " ", BLUE, "?", tokens=40) for n in range(4)]
    pages = 3 + 2 * -(-(len(asked[0].ids) + 40) // PAGE)
    # Accepted drafts end some texts too soon to take others' pages.
    found = answers(loaded, asked, pages=pages, step_tokens=24, max_running=8, speculate="none")
    assert sum(result.timing.preemptions for result in found.values() if result.timing) > 0
    for one in asked:
        same(found[one.id, 0], alone(loaded, one)[0])


def test_siblings_share_what_their_prompt_shows(loaded: LoadedDecoder) -> None:
    asked = shows(loaded, "a", "Say of ", RED, ": ", n=3, temperature=1.0, seed=4)
    found = answers(loaded, [asked])
    for index, result in alone(loaded, asked).items():
        same(found["a", index], result)


def test_what_cannot_be_shown_is_refused_by_name(loaded: LoadedDecoder) -> None:
    made = engine(loaded)
    asked = shows(loaded, "a", RED, " ", BLUE)
    fewer = request("b", asked.ids, pictures=asked.pictures[:1])
    refused = made.submit(fewer)
    assert refused is not None
    assert (refused.reason, "1 pictures fill" in refused.text) == ("invalid", True)
    assert made.idle


def test_a_model_of_text_refuses_pictures(loaded: LoadedDecoder) -> None:
    asked = shows(loaded, "a", RED)
    refused = engine(bundled()).submit(request("b", [5, 6, 7], pictures=asked.pictures))
    assert refused is not None
    assert "takes text alone" in refused.text


def test_a_fault_of_the_encoder_ends_its_request_alone(
    loaded: LoadedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = shows(loaded, "a", RED, "?", n=2), shows(loaded, "b", BLUE, "?")
    vision = loaded.vision
    assert vision is not None
    embed = vision.embed

    def fails(picture: Picture) -> Any:
        if picture.digest == bad.pictures[0].digest:
            raise ModelError("the vision encoder fails on a picture")
        return embed(picture)

    monkeypatch.setattr(vision, "embed", fails)
    found = answers(loaded, [bad, good])
    assert [found["a", index].finish for index in (0, 1)] == ["error", "error"]
    assert "fails on a picture" in str(found["a", 0].message)
    same(found["b", 0], alone(loaded, good)[0])


@pytest.mark.plain("Qwen3VL")
def test_embeddings_are_kept_within_a_bound(loaded: LoadedDecoder) -> None:
    vision = loaded.vision
    assert vision is not None
    made = engine(loaded, prefix_cache=False)
    size = vision.embed(shows(loaded, "a", RED).pictures[0]).bytes
    calls: list[str] = []

    class Counting:
        tokens, whole, axes = vision.tokens, vision.whole, staticmethod(vision.axes)

        def embed(self, picture: Picture) -> Any:
            calls.append(picture.digest)
            return vision.embed(picture)

    made._pictures = EncodedPictures(Counting(), most_bytes=2 * size)
    for id, picture in enumerate((RED, BLUE, RED, vlms.picture(3), BLUE)):
        assert made.submit(shows(loaded, str(id), picture, "?")) is None
        drain(made)
        assert made._pictures.bytes <= 2 * size
    assert len(calls) == 4  # the second RED is known; BLUE went when the third picture came


def test_other_weights_see_by_the_same_encoder(loaded: LoadedDecoder) -> None:
    """Training sends a language model alone."""
    asked = shows(loaded, "a", "Say of ", RED, ": ")
    wanted = alone(loaded, asked)[0]
    made = engine(loaded)
    made.load_weights(load_decoder(loaded.folder, torch.bfloat16))
    assert made.submit(asked) is None
    same(drain(made)["a", 0], wanted)
