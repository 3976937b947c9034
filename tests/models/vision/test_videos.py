"""Videos in a prompt: frames as transformers samples them, and what the whole model computes of them."""

from __future__ import annotations

import io
import itertools
import json
import re
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import videos
import vlms
from in_process import own_cache
from torchwright.cli import main
from torchwright.core.errors import WorkloadError
from torchwright.models.decoder import load_decoder
from torchwright.models.decoder.shown import Shown
from torchwright.models.vision import video
from torchwright.models.vision.encoder import PictureEncoder
from torchwright.models.vision.picture import PictureError
from torchwright.models.vision.reader import PictureReader
from torchwright.models.vision.video import Bounds, VideoFacts, read_video, video_of_frames

pytest.importorskip(
    "torchvision", reason="transformers prepares videos with torchvision, which is not installed"
)
pytest.importorskip("av", reason="videos are read with PyAV, which is not installed")

FRAMES = videos.frames(26)
MP4 = videos.encoded(FRAMES)


def every(facts: VideoFacts) -> list[int]:
    return list(range(facts.frames))


def logits(loaded: Any, ids: list[int], shown: Shown, chunk: int) -> torch.Tensor:
    from torchwright.models.decoder.shown import with_pictures

    cache = loaded.new_cache([len(ids)])
    sequence, found = cache.sequence(len(ids), shown.axes), []
    with torch.inference_mode():
        for start in range(0, len(ids), chunk):
            piece = ids[start : start + chunk]
            batch = with_pictures(cache.append([(sequence, piece)]), [(shown, start, len(piece))])
            found.append(loaded.decoder.logits(loaded.decoder(batch, cache)))
    return torch.cat(found)


def asked(folder: Path, content: bytes, picture: np.ndarray) -> tuple[list[int], list[Any], Any]:
    """A text around a video and a picture: our tokens and media, and transformers' inputs of the same text."""
    processor = vlms.processor_of(folder, videos=True)
    reader = PictureReader(folder)
    moving, still = reader.read_video(content), reader.read(picture)
    ours = f"See {moving.text} and {still.text}: say."
    ids = processor.tokenizer(ours, add_special_tokens=False)["input_ids"]
    everything = videos.decoded(content)
    inputs = processor(
        text=[f"See {processor.video_token} and {processor.image_token}: say."],
        images=[picture],
        videos=[everything],
        video_metadata=[{"total_num_frames": len(everything), "fps": videos.RATE}],
        do_sample_frames=True,
        fps=2.0,
        return_tensors="pt",
        add_special_tokens=False,
    )
    return ids, [moving.picture, still.picture], inputs


@pytest.mark.parametrize("name", vlms.VIDEO)
def test_videos_are_seen_as_by_the_whole_model(name: str, tmp_path: Path) -> None:
    whole = vlms.save(name, tmp_path, videos=True)
    loaded = load_decoder(tmp_path, torch.float32)
    loaded.vision = PictureEncoder(tmp_path, torch.float32)
    ids, media, inputs = asked(tmp_path, MP4, vlms.picture(0))
    assert ids == inputs["input_ids"][0].tolist()
    with torch.inference_mode():
        want = whole(**inputs, use_cache=False).logits[0].float()
    shown = Shown.of(loaded.vision, ids, media)
    for chunk in (len(ids), 7):
        torch.testing.assert_close(logits(loaded, ids, shown, chunk), want, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        out = whole.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert loaded.generate([ids], pictures=[media], max_new_tokens=8, stop=[]) == [
        out[0, len(ids) :].tolist()
    ]


def test_positions_in_time_may_go_beyond_the_prompt_but_not_the_context(tmp_path: Path) -> None:
    """One token a frame, and two seconds between frames: Qwen2.5-VL counts four positions a second."""
    whole = vlms.save("Qwen2_5_VL", tmp_path, videos=True)
    loaded = load_decoder(tmp_path, torch.float32)
    loaded.vision = PictureEncoder(tmp_path, torch.float32)
    slow = videos.encoded(videos.frames(20, 32, 32), rate=1)
    reader = PictureReader(tmp_path)
    found = reader.read_video(slow)
    ids = vlms.processor_of(tmp_path).tokenizer(found.text + "?", add_special_tokens=False)["input_ids"]
    shown = Shown.of(loaded.vision, ids, [found.picture])
    assert shown.axes is not None
    assert shown.axes.of_prompt_AP.max() >= len(ids)
    arrays = {name: torch.from_numpy(array.numpy().copy()) for name, array in found.picture.arrays.items()}
    types = torch.tensor([[2 * (token == vlms.mark("<|video_pad|>")) for token in ids]])
    with torch.inference_mode():
        want = whole(
            input_ids=torch.tensor([ids]), mm_token_type_ids=types, **arrays, use_cache=False
        ).logits[0]
    torch.testing.assert_close(logits(loaded, ids, shown, 5), want.float(), rtol=1e-4, atol=1e-4)
    still = videos.encoded(videos.frames(60, 32, 32), rate=Fraction(1, 20))
    late = reader.read_video(still)
    ids = vlms.processor_of(tmp_path).tokenizer(late.text, add_special_tokens=False)["input_ids"]
    with pytest.raises(WorkloadError, match="beyond the model's context"):
        loaded.generate([ids], pictures=[[late.picture]], max_new_tokens=1)


def times(folder: Path, content: bytes) -> list[int]:
    """The positions in time of a video's places."""
    found = PictureReader(folder).read_video(content)
    ids = vlms.processor_of(folder).tokenizer(found.text, add_special_tokens=False)["input_ids"]
    shown = Shown.of(PictureEncoder(folder, torch.float32), ids, [found.picture])
    assert shown.axes is not None
    return np.unique(shown.axes.of_prompt_AP[0]).tolist()


def test_a_videos_rate_decides_its_positions_in_time(tmp_path: Path) -> None:
    """vllm-project/vllm#47736: a rate that was lost; EvolvingLMMs-Lab/lmms-eval#1393: steps below a second became 0."""
    vlms.save("Qwen2_5_VL", tmp_path, videos=True)
    frames = videos.frames(8, 56, 56)
    fast, slow = (times(tmp_path, videos.encoded(frames, rate=rate)) for rate in (2, 1))
    assert fast == [0, 4, 8, 12]
    assert slow == [0, 8, 16, 24]
    path = tmp_path / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["video_processor"]["fps"] = 8
    path.write_text(json.dumps(settings))
    assert times(tmp_path, videos.encoded(frames, rate=8)) == [0, 1, 2, 3]


def test_each_video_has_times_of_its_own(tmp_path: Path) -> None:
    """huggingface/transformers#41229: the first video's rate; vllm-project/vllm#35909: a number of frames, no rate."""
    vlms.save("Qwen3VL", tmp_path, videos=True)

    def last_times() -> list[float]:
        reader = PictureReader(tmp_path)
        texts = [reader.read_video(videos.encoded(FRAMES, rate=rate)).text for rate in (8, 2)]
        return [float(re.findall(r"<([0-9.]+) seconds>", text)[-1]) for text in texts]

    assert last_times() == pytest.approx([3.0, 12.0], abs=0.5)
    path = tmp_path / "processor_config.json"
    settings = json.loads(path.read_text())
    settings["video_processor"] |= {"num_frames": 8, "fps": None}
    path.write_text(json.dumps(settings))
    assert last_times() == pytest.approx([3.0, 12.0], abs=1.0)


def test_times_of_frames_count_where_the_header_states_another_rate() -> None:
    """Browsers record WebM with a thousand frames a second in its header, or none."""
    for form in ("matroska", "mp4"):  # an MP4 states the mean rate, with a last frame of a millisecond
        found = read_video(videos.encoded(FRAMES, form, rate=1000, every=125), every)
        assert found.facts.rate == pytest.approx(8, rel=0.05)
    assert read_video(MP4, every).facts.rate == 8
    with pytest.raises(PictureError, match="frames a second"):
        read_video(videos.encoded(FRAMES, "matroska", rate=1000, every=200_000), every)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "frames"])
def test_animations_and_lists_of_frames_are_videos(form: str, tmp_path: Path) -> None:
    vlms.save("Qwen3VL", tmp_path, videos=True)
    reader = PictureReader(tmp_path)
    if form == "frames":
        files = []
        for frame in FRAMES[:6]:
            file = io.BytesIO()
            Image.fromarray(frame).save(file, "PNG")
            files.append(file.getvalue())
        found, times = reader.read_frames(files), "<0.2 seconds>"
    else:
        found = reader.read_video(
            videos.animated(FRAMES, form, **({} if form == "GIF" else {"lossless": True}))
        )
        times = "<0.3 seconds>"
    assert times in found.text
    assert found.picture.moves
    assert found.picture.arrays["video_grid_thw"].numpy()[0, 0] == 3


def test_frames_are_those_of_transformers_own_reader(tmp_path: Path) -> None:
    from transformers.video_utils import load_video

    path = tmp_path / "a.mp4"
    path.write_bytes(MP4)
    indices = [0, 5, 6, 25]
    theirs, facts = load_video(str(path), backend="pyav", sample_indices_fn=lambda metadata, **_: indices)
    ours = read_video(MP4, lambda facts: indices)
    assert (ours.facts.frames, ours.facts.rate) == (facts.total_num_frames, facts.fps) == (26, 8.0)
    np.testing.assert_array_equal(ours.frames_NHWC, theirs)


@pytest.mark.parametrize(
    ("form", "codec"), [("mp4", "libx264"), ("matroska", "mpeg4"), ("webm", "libvpx-vp9"), ("avi", "mjpeg")]
)
def test_common_containers_and_codecs_are_read(form: str, codec: str) -> None:
    import av

    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV encodes no {codec}")
    content = videos.encoded(FRAMES[:9], form, codec)
    found = read_video(content, every)
    assert found.frames_NHWC.shape == (9, 48, 64, 3)
    assert found.facts.rate == pytest.approx(8, rel=0.05)


def test_large_frames_are_scaled_to_the_bound() -> None:
    bounds = Bounds(sampled_pixels=26 * 24 * 32)
    found = read_video(MP4, every, bounds)
    assert found.frames_NHWC.shape == (26, 24, 32, 3)
    gif = read_video(videos.animated(FRAMES), every, bounds)
    assert gif.frames_NHWC.shape == (26, 24, 32, 3)


def cut(content: bytes, share: float) -> bytes:
    return content[: int(len(content) * share)]


FAST = videos.encoded(FRAMES, movflags="faststart")
LYING = bytearray(videos.animated(FRAMES[:3]))
LYING[6:10] = struct.pack("<HH", 65_535, 65_535)
BROKEN: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "no video that can be read"),
    "a text": (b"hello", "no video that can be read"),
    "a picture": (videos.animated(FRAMES[:1], "PNG"), "codec png|no video that can be read"),
    "cut before its index": (cut(MP4, 0.5), "no video that can be read"),
    "cut behind its index": (cut(FAST, 0.6), "damaged or cut short"),
    "a cut GIF": (cut(videos.animated(FRAMES), 0.5), "cut short"),
    "a cut WebP": (cut(videos.animated(FRAMES, "WEBP"), 0.5), "damaged or cut short"),
    "a GIF of 65,535 x 65,535": (bytes(LYING), "unusable size"),
    "a playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "no video that can be read"),
    "a list of files": (b"ffconcat version 1.0\nfile /etc/passwd\n", "no video that can be read"),
    "a sound": (
        b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x80\x3e\0\0\2\0\x10\0data\0\0\0\0",
        "no video",
    ),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no video that can be read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_whole_video_is_refused(name: str) -> None:
    content, reason = BROKEN[name]
    with pytest.raises(PictureError, match=reason):
        read_video(content, every)


@pytest.mark.parametrize(
    ("content", "bounds", "said"),
    [
        (MP4, Bounds(frames=20), "21 frames"),
        (videos.animated(FRAMES), Bounds(frames=20), "21 frames"),
        (MP4, Bounds(seconds=2.0), "too long"),
        (MP4, Bounds(pixels=1000), "unusable size"),
        (MP4, Bounds(sampled=10), "sampled in 26 frames"),
    ],
    ids=["frames", "frames of a GIF", "seconds", "pixels", "sampled"],
)
def test_bounds_are_checked_before_frames_are_decoded(content: bytes, bounds: Bounds, said: str) -> None:
    with pytest.raises(PictureError, match=said):
        read_video(content, every, bounds)


def test_the_last_frame_stands_in_for_a_few_that_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """QwenLM/Qwen3-VL#1770: a decoder gives one frame fewer than the file counts."""
    content = videos.encoded(videos.frames(120, 16, 16))
    whole = read_video(content, every).frames_NHWC
    decode = video._av_frames
    monkeypatch.setattr(video, "_av_frames", lambda *of: itertools.islice(decode(*of), 119))
    found = read_video(content, lambda facts: [0, 60, 119]).frames_NHWC
    np.testing.assert_array_equal(found, whole[[0, 60, 118]])
    monkeypatch.setattr(video, "_av_frames", lambda *of: itertools.islice(decode(*of), 100))
    with pytest.raises(PictureError, match="100 of 120 frames"):
        read_video(content, lambda facts: [0, 60, 119])


def test_frames_of_several_sizes_are_refused() -> None:
    files = []
    for size in ((32, 32), (32, 40)):
        file = io.BytesIO()
        Image.new("RGB", size).save(file, "PNG")
        files.append(file.getvalue())
    with pytest.raises(PictureError, match="32x32 and 32x40"):
        video_of_frames(files, 2.0)


def test_generate_looks_at_videos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(monkeypatch, tmp_path / "cache")
    folder = tmp_path / "model"
    vlms.save("Qwen2_5_VL", folder, videos=True)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
        "{% else %}<|{{ p.type }}_pad|>{% endif %}{% endfor %}{% endfor %}"
    )
    (tmp_path / "a.mp4").write_bytes(MP4)
    (tmp_path / "b.mp4").write_bytes(videos.encoded(videos.frames(26, seed=5)))
    texts = []
    for name in ("a.mp4", "b.mp4"):
        words = ["--prompt", "What?", "--max-new-tokens", "12", "--json", "--dtype", "fp32"]
        code = main(["generate", str(folder), *words, "--video", str(tmp_path / name)])
        said = capsys.readouterr()
        assert code == 0, said.err
        facts = json.loads(said.out)
        assert facts["prompt_tokens"] > 10
        texts.append(facts["text"])
    assert texts[0] != texts[1]
    assert main(["generate", str(folder), "--prompt", "x", "--video", str(tmp_path / "none.mp4")]) == 2
    assert "there is no file" in capsys.readouterr().err
    vlms.save("Llava", tmp_path / "still")
    assert (
        main(["generate", str(tmp_path / "still"), "--prompt", "x", "--video", str(tmp_path / "a.mp4")]) == 2
    )
    assert "--video is not for this model" in capsys.readouterr().err
