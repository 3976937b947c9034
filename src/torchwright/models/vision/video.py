"""Videos as frames: RGB (N, H, W, 3) uint8, sampled from untrusted files, of bounded number, size and length.

Pillow reads GIF and animated WebP. Other files are read with FFmpeg (PyAV), of a few containers and codecs.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from torchwright.core.errors import first_line
from torchwright.models.vision.picture import MOST_BYTES, PictureError, check_pillow, read_picture

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mjpeg", "theora")
"""Decoders that are tried on a client's file: what cameras, browsers and telephones write."""
DECODERS = {"libdav1d": "av1", "libaom-av1": "av1", "libvpx-vp9": "vp9", "libvpx": "vp8"}
"""Names of decoders that differ from their codec's."""
RATES = (0.01, 1000.0)
"""Frames a second, at least and at most."""
UNSHOWN = 0.02
"""Share of a file's frames that a decoder may leave out at the end, such as those behind an edit list: the last frame
stands in for them."""
SAME_RATE = 0.05
"""Relative difference of rates that are one: containers round times to milliseconds, and a frame may come late."""
STILL_SECONDS = 0.1
"""Time of a frame whose file names none, as browsers show it."""
GIF, RIFF, WEBP = b"GIF8", b"RIFF", b"WEBP"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The most that is read of one video."""

    frames: int = 100_000
    """Frames of a file: almost an hour at 30 a second."""
    seconds: float = 3600.0
    sampled: int = 768
    """Frames that are kept, as many as the processors of Qwen's families ask for."""
    pixels: int = 4096 * 4096
    """Pixels of one frame: 8K is beyond what any of these models reads."""
    sampled_pixels: int = 128 * 2**20
    """Pixels of all kept frames together; larger frames are scaled down. They take 384 MiB, and their copies in a
    processor four times that."""


BOUNDS = Bounds()


@dataclass(frozen=True, kw_only=True)
class VideoFacts:
    """A video before it is decoded."""

    frames: int
    rate: float
    """Frames a second."""
    width: int
    height: int

    @property
    def seconds(self) -> float:
        return self.frames / self.rate


@dataclass(frozen=True, kw_only=True)
class Video:
    """The sampled frames of a video."""

    facts: VideoFacts
    indices: list[int]
    """The sampled frames' numbers in the file."""
    frames_NHWC: np.ndarray


Choose = Callable[[VideoFacts], Sequence[int]]
"""Returns the numbers of the frames to keep, in order."""


def read_video(source: bytes | Path, choose: Choose, bounds: Bounds = BOUNDS) -> Video:
    """Read the chosen frames of a file or of its content.

    Raises `PictureError` for a file that holds no video, is damaged or cut short, or exceeds a bound, and where a
    package is missing.
    """
    name, content = _content(source)
    check_pillow()
    if content[:4] == GIF or (content[:4] == RIFF and content[8:12] == WEBP):
        return _by_pillow(name, content, choose, bounds)
    return _by_av(name, content, choose, bounds)


def video_of_frames(pictures: Sequence[bytes], rate: float, bounds: Bounds = BOUNDS) -> Video:
    """Return a video whose frames come as pictures of one size, all of which are kept, so many a second."""
    if len(pictures) > bounds.sampled:
        raise PictureError(
            "the video has too many frames", found=f"{len(pictures)}", allowed=f"{bounds.sampled}"
        )
    frames = list[np.ndarray]()
    for picture in pictures:
        frames.append(read_picture(picture))
        if frames[-1].shape != frames[0].shape:
            sizes = " and ".join(f"{frame.shape[1]}x{frame.shape[0]}" for frame in (frames[0], frames[-1]))
            raise PictureError("the frames of the video have several sizes", found=sizes, allowed="one")
        if len(frames) * frames[0].shape[0] * frames[0].shape[1] > bounds.sampled_pixels:
            allowed = f"{bounds.sampled_pixels:,} pixels together"
            raise PictureError("the frames of the video are too large", allowed=allowed)
    height, width, _ = frames[0].shape
    facts = VideoFacts(frames=len(frames), rate=rate, width=width, height=height)
    return Video(facts=facts, indices=list(range(len(frames))), frames_NHWC=np.stack(frames))


def _content(source: bytes | Path) -> tuple[str, bytes]:
    if isinstance(source, bytes):
        return "the video", source
    if not source.is_file():
        raise PictureError(f"there is no file {source}")
    size = source.stat().st_size
    if size > MOST_BYTES:
        raise PictureError(
            f"{source.name} is too large", found=f"{size:,} bytes", allowed=f"{MOST_BYTES:,} bytes"
        )
    try:
        return source.name, source.read_bytes()
    except OSError as error:
        raise PictureError(f"{source} cannot be read", found=error.strerror) from error


def _checked(name: str, facts: VideoFacts, bounds: Bounds) -> VideoFacts:
    if not 1 <= facts.frames <= bounds.frames:
        raise PictureError(
            f"{name} cannot be used", found=f"{facts.frames:,} frames", allowed=f"1 to {bounds.frames:,}"
        )
    if not RATES[0] <= facts.rate <= RATES[1]:
        raise PictureError(
            f"{name} cannot be used",
            found=f"{facts.rate:g} frames a second",
            allowed=f"{RATES[0]:g} to {RATES[1]:g}",
        )
    if facts.seconds > bounds.seconds:
        raise PictureError(
            f"{name} is too long", found=f"{facts.seconds:,.0f} s", allowed=f"{bounds.seconds:,.0f} s"
        )
    return facts


def _check_size(name: str, width: int, height: int, bounds: Bounds) -> None:
    if min(width, height) < 1 or width * height > bounds.pixels:
        raise PictureError(
            f"{name} has frames of an unusable size",
            found=f"{width:,}x{height:,} pixels",
            allowed=f"1 to {bounds.pixels:,} pixels",
        )


def _chosen(name: str, facts: VideoFacts, choose: Choose, bounds: Bounds) -> list[int]:
    found = [int(index) for index in choose(facts)]
    if len(found) > bounds.sampled:
        raise PictureError(f"{name} would be sampled in {len(found)} frames", allowed=f"{bounds.sampled}")
    ordered = found and found == sorted(found)
    if not ordered or found[0] < 0 or found[-1] >= facts.frames:
        raise PictureError(f"{name} has too few frames to be sampled", found=f"{facts.frames}")
    return found


def _size(facts: VideoFacts, count: int, bounds: Bounds) -> tuple[int, int]:
    """Return the width and height of kept frames: the file's, or smaller ones in the same proportion."""
    ratio = math.sqrt(bounds.sampled_pixels / (count * facts.width * facts.height))
    if ratio >= 1:
        return facts.width, facts.height
    return max(1, int(facts.width * ratio)), max(1, int(facts.height * ratio))


def _collected(
    name: str,
    facts: VideoFacts,
    indices: list[int],
    frames: Iterator[Callable[[tuple[int, int]], np.ndarray]],
    bounds: Bounds,
) -> Video:
    """Convert the frames with these numbers; the iterator yields every frame's conversion to a size."""
    wanted, size, found = set(indices), _size(facts, len(indices), bounds), dict[int, np.ndarray]()
    count, convert = 0, None
    for convert in frames:
        if count in wanted:
            found[count] = convert(size)
        count += 1
        if count > indices[-1]:
            break
    if late := wanted - found.keys():
        if convert is None or count < (1 - UNSHOWN) * facts.frames:
            raise PictureError(
                f"{name} is damaged or cut short", found=f"{count:,} of {facts.frames:,} frames"
            )
        found |= dict.fromkeys(late, convert(size))
    frames_NHWC = np.stack([found[index] for index in indices])
    return Video(facts=facts, indices=indices, frames_NHWC=frames_NHWC)


def _by_pillow(name: str, content: bytes, choose: Choose, bounds: Bounds) -> Video:
    from PIL import Image

    with (
        _damage(name),
        warnings.catch_warnings(),
        Image.open(io.BytesIO(content), formats=("GIF", "WEBP")) as image,
    ):
        warnings.simplefilter("ignore")
        width, height = image.size
        _check_size(name, width, height, bounds)
        milliseconds, count = 0.0, 0
        for count in range(1, bounds.frames + 2):
            try:
                image.seek(count - 1)
            except EOFError:
                count -= 1
                break
            if image.format == "WEBP":
                image.load()  # which reads the frame's duration
            milliseconds += image.info.get("duration") or 1000 * STILL_SECONDS
        facts = VideoFacts(frames=count, rate=1000 * count / milliseconds, width=width, height=height)
        indices = _chosen(name, _checked(name, facts, bounds), choose, bounds)
        return _collected(name, facts, indices, _pillow_frames(image, facts), bounds)


def _pillow_frames(image: Any, facts: VideoFacts) -> Iterator[Callable[[tuple[int, int]], np.ndarray]]:
    for place in range(facts.frames):
        image.seek(place)

        def convert(size: tuple[int, int]) -> np.ndarray:
            frame = image.convert("RGB")
            return np.asarray(frame if frame.size == size else frame.resize(size))

        yield convert


@contextlib.contextmanager
def _damage(name: str) -> Iterator[None]:
    """Turn what Pillow's readers raise of damaged files into a `PictureError`."""
    from PIL import Image

    try:
        yield
    except PictureError:
        raise
    except Image.DecompressionBombError as error:
        raise PictureError(f"{name} has frames of an unusable size", found=first_line(error)) from error
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, ZeroDivisionError, RuntimeError) as error:
        raise PictureError(f"{name} is damaged or cut short", found=first_line(error)) from error


def _by_av(name: str, content: bytes, choose: Choose, bounds: Bounds) -> Video:
    if find_spec("av") is None:
        raise PictureError(
            f"{name} is neither GIF nor WebP; other videos are read with PyAV, which is not installed",
            next="pip install 'torchwright[speech]'",
        )
    import av.error  # pyright: ignore[reportMissingImports]

    try:
        facts = _facts(name, content, bounds)
        indices = _chosen(name, facts, choose, bounds)
        with _opened(content) as container:
            return _collected(name, facts, indices, _av_frames(name, container, bounds), bounds)
    except av.error.FFmpegError as error:
        raise PictureError(
            f"{name} is no video that can be read, or is damaged or cut short",
            found=str(error).partition(":")[0],
            allowed="MP4, MOV, WebM, Matroska, AVI, GIF and animated WebP",
        ) from error


def _opened(content: bytes) -> Any:
    import av  # pyright: ignore[reportMissingImports]

    return av.open(
        io.BytesIO(content), "r", options={"format_whitelist": CONTAINERS}, metadata_errors="ignore"
    )


def _facts(name: str, content: bytes, bounds: Bounds) -> VideoFacts:
    """Read a file's facts; its frames are counted, because a header may say anything."""
    with _opened(content) as container:
        if not container.streams.video:
            raise PictureError(f"{name} has no pictures", found=container.format.long_name)
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise PictureError(f"{name} is damaged: its video track names no codec")
        codec = DECODERS.get(stream.codec_context.name, stream.codec_context.name)
        if codec not in CODECS:
            raise PictureError(
                f"{name} cannot be used", found=f"the codec {codec}", allowed=", ".join(CODECS)
            )
        stated, announced = float(stream.average_rate or stream.guessed_rate or 0), stream.frames
        size = {"width": stream.codec_context.width, "height": stream.codec_context.height}
        _check_size(name, **size, bounds=bounds)
        count, times = 0, list[float]()
        for packet in container.demux(stream):
            count += packet.size > 0
            times += [] if packet.pts is None or not packet.size else [float(packet.pts * packet.time_base)]
            if count > bounds.frames:
                break
    if count < announced and count <= bounds.frames:
        raise PictureError(f"{name} is damaged or cut short", found=f"{count:,} of {announced:,} frames")
    return _checked(name, VideoFacts(frames=count, rate=_rate(stated, times), **size), bounds)


def _rate(stated: float, times: list[float]) -> float:
    """Return the rate that a header states, or that of the frames' times where it is another one: browsers record a
    thousand frames a second.
    """
    seconds = max(times, default=0.0) - min(times, default=0.0)
    if seconds <= 0:
        return stated
    measured = (len(times) - 1) / seconds
    return stated if math.isclose(stated, measured, rel_tol=SAME_RATE) else measured


def _av_frames(
    name: str, container: Any, bounds: Bounds
) -> Iterator[Callable[[tuple[int, int]], np.ndarray]]:
    for frame in container.decode(video=0):
        _check_size(name, frame.width, frame.height, bounds)  # which a stream may change

        def convert(size: tuple[int, int], frame: Any = frame) -> np.ndarray:
            if (frame.width, frame.height) == size:
                return frame.to_ndarray(format="rgb24")
            return frame.reformat(*size, format="rgb24").to_ndarray()

        yield convert
