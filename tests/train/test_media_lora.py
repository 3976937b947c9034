"""Adapters beside the weights of image classifiers and recognizers: what they learn, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from media_runs import make_classifier, make_images, make_pictures, make_speech
from runs import assert_same, checkpoints, losses, state
from safetensors.torch import load_file
from test_media_run import copy_until, train

from torchwright.core.errors import ModelError, UnknownName
from torchwright.train.media.adapt import adapt
from torchwright.train.media.config import ImageData, MediaLora, SpeechData
from torchwright.train.media.listing import list_images, list_sounds
from torchwright.train.media.model import Media, recognizer
from torchwright.train.model.foreign import save_foreign
from torchwright.train.model.lora import adapters

LORA = {"r": 4, "alpha": 8.0}
SAME = 1e-5
"""Merged and unmerged, relative, in float32: one rounding of each weight."""


def stirred(model: Media) -> Media:
    """With adapters that do something."""
    for adapter in adapters(model).values():
        torch.nn.init.normal_(adapter.B, std=0.05)
    return model.eval()


@pytest.mark.plain("True")
@pytest.mark.parametrize("dora", [False, True])
def test_merged_and_unmerged_answer_alike(tmp_path: Path, dora: bool) -> None:
    import transformers

    transformers_: Any = transformers
    (tmp_path / "vit").mkdir()
    vit = transformers_.ViTForImageClassification.from_pretrained(make_classifier(tmp_path / "vit"))
    make_speech(tmp_path / "speech", count=1)
    whisper = recognizer(tmp_path / "speech" / "base")
    for network, classes, inputs in (
        (vit, 3, {"pixel_values": torch.randn(2, 3, 32, 32)}),
        (
            whisper,
            None,
            {"input_features": torch.randn(2, 80, 400), "decoder_input_ids": torch.arange(10).view(2, 5)},
        ),
    ):
        model = Media(network)
        adapt(model, MediaLora(r=4, dora=dora), classes, seed=0)
        with torch.no_grad():
            base = network.eval()(**inputs).logits
            wanted = stirred(model).network(**inputs).logits
            folder = tmp_path / f"merged {classes}"
            source = tmp_path / ("vit" if classes else "speech/base")
            save_foreign(network, folder, source=source, writes=True)
            found = type(network).from_pretrained(folder).eval()(**inputs).logits
        assert float((wanted - base).norm() / base.norm()) > 100 * SAME
        assert float((found - wanted).norm() / wanted.norm()) < SAME


@pytest.mark.plain("make_images")
@pytest.mark.parametrize("make", [make_images, make_speech])
def test_a_run_writes_both_and_goes_on_bit_for_bit(tmp_path: Path, make: Any) -> None:
    run = make(tmp_path / "whole", lora=LORA)
    outcome = train(run)
    out = tmp_path / "whole" / "out"
    assert (outcome.model, outcome.adapter) == (out / "model", out / "adapter")
    told = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"]) == (4, 8.0)
    assert told["modules_to_save"] == (["classifier"] if make is make_images else None)
    tensors = load_file(out / "adapter" / "adapter_model.safetensors")
    assert any(value.any() for name, value in tensors.items() if "lora_B" in name)
    again = copy_until(run, 2, tmp_path / "again")
    (again.parent / "out" / "metrics.jsonl").unlink()
    train(again, resume=True)
    assert_same(state(checkpoints(again)[-1]), state(checkpoints(run)[-1]))
    assert losses(again) == {step: loss for step, loss in losses(run).items() if step > 2}


def test_peft_loads_them_and_answers_alike(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    transformers_: Any = transformers
    train(make_images(tmp_path, lora=LORA))
    base = transformers_.ViTForImageClassification.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
    merged = transformers_.ViTForImageClassification.from_pretrained(tmp_path / "out" / "model").eval()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(pixel_values=pixels).logits, merged(pixel_values=pixels).logits, rtol=1e-4, atol=1e-5
        )


def test_what_has_no_adapters_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no linear layers in its blocks"):
        train(make_images(tmp_path / "resnet", norms=True, lora=LORA))
    with pytest.raises(UnknownName, match=r"layer in lora\.targets 'q_prj'"):
        train(make_speech(tmp_path / "whisper", lora={"targets": ["q_prj"]}))


def test_the_command_line_makes_adapters(tmp_path: Path) -> None:
    from torchwright.train.media.quick import from_words

    make_pictures(tmp_path / "train", 4)
    (tmp_path / "base").mkdir()
    base = str(make_classifier(tmp_path / "base"))
    with from_words(base, [str(tmp_path / "train")], world=1, out=tmp_path / "o", lora="r=8") as (text, _):
        assert "[lora]\nr = 8" in text


def test_folders_with_metadata_are_read_as_datasets_reads_them(tmp_path: Path) -> None:
    """`imagefolder` and `audiofolder`: a table beside the files, whose column file_name names them."""
    for kind, column in (("images", "label"), ("sounds", "transcription")):
        folder = tmp_path / kind
        (folder / "a").mkdir(parents=True)
        rows = [{"file_name": "a/1.bin", column: "yes"}, {"file_name": "a/2.bin", column: "no"}]
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "a" / "1.bin").write_bytes(b"")
    images = list_images(["images"], ImageData(train=["x"]), tmp_path)
    sounds = list_sounds(["sounds"], SpeechData(train=["x"]), tmp_path)
    for listing in (images, sounds):
        assert [(item.path.name, item.target) for item in listing.items] == [
            ("1.bin", "yes"),
            ("2.bin", "no"),
        ]


def test_columns_of_published_tables_are_known(tmp_path: Path) -> None:
    """Common Voice: path and sentence."""
    (tmp_path / "a.csv").write_text("path,sentence\nclips/1.mp3,hello\n")
    listing = list_sounds(["a.csv"], SpeechData(train=["x"]), tmp_path)
    assert [(item.path.name, item.target) for item in listing.items] == [("1.mp3", "hello")]
