"""Pictures in a prompt: what the whole model of transformers computes, on our decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import vlms
from torchwright.core.errors import WorkloadError
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.shown import Shown, with_pictures
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.models.vision.reader import PictureReader

PICTURES = [vlms.picture(0), vlms.picture(1, 100, 40)]
ALONE = ("LlavaOnevision",)
"""Models whose processor reads a picture in less detail beside others; here each is read as if it were alone."""


def prompt(folder: Path, pictures: list[np.ndarray]) -> tuple[list[int], list[Any]]:
    """A text around pictures: its tokens, and the pictures."""
    reader = PictureReader(folder)
    text, found = "What is this? ", []
    for place, picture in enumerate(pictures):
        prepared = reader.read(picture)
        text += f"{prepared.text} and {place}: "
        found.append(prepared.picture)
    ids = vlms.processor_of(folder).tokenizer(text + "Say.", add_special_tokens=False)["input_ids"]
    return ids, found


def expected(whole: Any, folder: Path, pictures: list[np.ndarray]) -> tuple[list[int], torch.Tensor]:
    """transformers' tokens and logits (T, V) of the same text."""
    processor = vlms.processor_of(folder)
    text = "What is this? " + "".join(
        f"{processor.image_token} and {place}: " for place in range(len(pictures))
    )
    inputs = processor(text=[text + "Say."], images=[pictures], return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        return inputs["input_ids"][0].tolist(), whole(**inputs, use_cache=False).logits[0].float()


def _text(folder: Path, pictures: list[np.ndarray]) -> str:
    mark = vlms.processor_of(folder).image_token
    return "What is this? " + "".join(f"{mark} and {place}: " for place in range(len(pictures))) + "Say."


def logits(loaded: Any, ids: list[int], pictures: list[Any], chunk: int) -> torch.Tensor:
    """Ours (T, V), in forward calls of so many tokens."""
    shown = Shown.of(loaded.vision, ids, pictures)
    cache = loaded.new_cache([len(ids)])
    sequence = cache.sequence(len(ids), shown.axes)
    found, start = [], 0
    with torch.inference_mode():
        while start < len(ids):
            stop = shown.places.end(start, min(start + chunk, len(ids)))
            batch = with_pictures(cache.append([(sequence, ids[start:stop])]), [(shown, start, stop - start)])
            found.append(loaded.decoder.logits(loaded.decoder(batch, cache)))
            start = stop
    return torch.cat(found)


@pytest.mark.plain("Qwen3VL")
@pytest.mark.parametrize("name", vlms.named_hosts())
def test_pictures_are_seen_as_by_the_whole_model(name: str, tmp_path: Path) -> None:
    whole = vlms.save(name, tmp_path)
    shown = PICTURES[: 1 if name in ALONE else 2]
    loaded = load_decoder(tmp_path, torch.float32)
    loaded.vision = PictureEncoder(tmp_path, torch.float32)
    ids, pictures = prompt(tmp_path, shown)
    told, want = expected(whole, tmp_path, shown)
    assert ids == told
    for chunk in (len(ids), 7, 1):
        torch.testing.assert_close(logits(loaded, ids, pictures, chunk), want, rtol=1e-4, atol=1e-4)


@pytest.mark.plain("Qwen2_5_VL")
@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3_5", "Gemma3"])
def test_answers_are_the_tokens_of_transformers_alone_and_beside_others(name: str, tmp_path: Path) -> None:
    whole = vlms.save(name, tmp_path)
    loaded = load_decoder(tmp_path, torch.float32)
    loaded.vision = PictureEncoder(tmp_path, torch.float32)
    prompts, pictures, want = [], [], []
    for shown in ([PICTURES[0]], [], PICTURES):
        ids, found = prompt(tmp_path, shown)
        prompts.append(ids)
        pictures.append(found)
        inputs = vlms.processor_of(tmp_path)(
            text=[_text(tmp_path, shown)],
            images=[shown] if shown else None,
            return_tensors="pt",
            add_special_tokens=False,
        )
        with torch.inference_mode():
            out = whole.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)
        want.append(out[0, len(ids) :].tolist())
    options = {"max_new_tokens": 12, "stop": []}
    assert loaded.generate(prompts, pictures=pictures, **options) == want
    assert loaded.generate(prompts, pictures=pictures, prefill_chunk=5, **options) == want
    for ids, found, tokens in zip(prompts, pictures, want, strict=True):
        assert loaded.generate([ids], pictures=[found], **options) == [tokens]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    vlms.save("Qwen2_5_VL", tmp_path)
    loaded = load_decoder(tmp_path, torch.float32)
    ids, pictures = prompt(tmp_path, PICTURES)
    with pytest.raises(WorkloadError, match="takes text alone"):
        loaded.generate([ids], pictures=[pictures])
    loaded.vision = PictureEncoder(tmp_path, torch.float32)
    with pytest.raises(WorkloadError, match="10 places for pictures, and its 1 pictures fill 6"):
        loaded.generate([ids], pictures=[pictures[:1]])
    with pytest.raises(WorkloadError, match="pictures for 2 of 1 prompts"):
        loaded.generate([ids], pictures=[pictures, pictures])


OLDER = {
    "Qwen2_5_VL": {"model.language_model.": "model.", "model.visual.": "visual."},
    "Llava": {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
}
"""Names of tensors in transformers' modules → those in published files."""


@pytest.mark.plain("Qwen2_5_VL-False", "Llava-True")
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("name", OLDER)
def test_tensors_are_found_by_their_published_and_their_present_names(
    name: str, older: bool, tmp_path: Path
) -> None:
    whole = vlms.save(name, tmp_path)
    tensors = {key: value.contiguous() for key, value in whole.state_dict().items()}
    for new, old in OLDER[name].items() if older else ():
        tensors = {
            key.replace(new, old) if key.startswith(new) else key: value for key, value in tensors.items()
        }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    [picture] = prompt(tmp_path, PICTURES[:1])[1]
    arguments = {key: torch.from_numpy(array.numpy().copy()) for key, array in picture.arrays.items()}
    with torch.inference_mode():
        want = whole.model.get_image_features(**arguments, return_dict=True).pooler_output
    found = PictureEncoder(tmp_path, torch.float32).embed(picture).rows_NE
    torch.testing.assert_close(found, torch.cat([part.flatten(0, -2) for part in want]))


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    """Neither for the processor, nor for its parts, nor for the encoder; pictures are read as if it were not there."""
    vlms.save("Qwen2_5_VL", tmp_path)
    wanted = PictureReader(tmp_path).read(PICTURES[0]).picture.digest
    (tmp_path / "theirs.py").write_text("raise SystemExit('code of the folder has run')")
    for name in ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json"):
        path = tmp_path / name
        data = json.loads(path.read_text()) if path.is_file() else {}
        auto = (
            "AutoConfig",
            "AutoModel",
            "AutoModelForImageTextToText",
            "AutoImageProcessor",
            "AutoProcessor",
        )
        data["auto_map"] = dict.fromkeys(auto, "theirs.Theirs") | {"AutoTokenizer": ["theirs.Theirs", None]}
        path.write_text(json.dumps(data))
    assert PictureReader(tmp_path).read(PICTURES[0]).picture.digest == wanted
    PictureEncoder(tmp_path, torch.float32).load()
