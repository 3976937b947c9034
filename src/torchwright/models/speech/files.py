# pyright: reportMissingImports=false
"""Sound files, a few seconds at a time: WAV, FLAC, OGG and MP3 through soundfile, other containers through PyAV.

Files are untrusted: they are opened here and passed as streams, so that no library follows a name inside a file.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from torchwright.core.errors import TorchwrightError
from torchwright.core.regular_file import is_url
from torchwright.models.speech.mono import Mono
from torchwright.models.speech.riff import whole_wav
from torchwright.models.speech.sound_error import SoundError

INSTALL = "pip install 'torchwright[speech]'"
BLOCK_SECONDS, SHORT_SECONDS = 5, 0.1
"""Sound that is read at once, and where a longer block holds damage."""
SHORTER, SHORTER_SECONDS = 0.05, 1.0
"""The share and the seconds by which a file may be shorter than expected without a notice: estimates are as far off."""
LONGEST_SECONDS = 24 * 3600
RATES = (1_000, 768_000)
CHANNELS = 64
CONTAINERS = "aac,ac3,amr,asf,avi,caf,flac,flv,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,mpegts,ogg"
"""Those of FFmpeg's readers that hold their own sound: no playlists, no lists of other files."""


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """An open file: mono float32 blocks at its own rate."""

    name: str
    rate: int
    seconds: float | None
    blocks: Iterator[np.ndarray]
    notices: list[str]
    """Sentences for the user; the list grows while blocks are read."""


class _SoundFile(io.BufferedReader):
    """An open file that stays where it is when a header sends libsndfile to a place that no file has."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return super().seek(offset, whence)
        except (OSError, ValueError, OverflowError):  # a traceback on the terminal, since C cannot raise it
            return self.tell()


@contextlib.contextmanager
def decoded(path: str, *, skip_damage: bool = False) -> Generator[Decoded, None, None]:
    """Open a sound file. Raises `SoundError`, now or while blocks are read, naming the file, what and where.

    `skip_damage` leaves out packets of a container that cannot be decoded, and adds a notice.
    """
    need("soundfile")
    import soundfile

    if is_url(path):
        raise SoundError(f"{path} is a URL", allowed="the name of a file: nothing is downloaded")
    name = Path(path).name
    if Path(path).exists() and not Path(path).is_file():
        raise SoundError(f"{path} is no file")
    try:
        file = _SoundFile(io.FileIO(path))  # closed below
    except OSError as error:
        raise SoundError(f"{path} cannot be opened", found=error.strerror) from error
    with file:
        if not file.read(1):
            raise SoundError(f"{name} is empty", found="0 bytes")
        file.seek(0)
        readable: Any = whole_wav(name, file)
        try:
            source = soundfile.SoundFile(readable)
        except soundfile.LibsndfileError as error:
            file.seek(0)
            with _by_av(name, file, str(error).rpartition(": ")[2], skip_damage) as found:
                yield found
            return
        with source:
            _check(name, source.samplerate, source.channels, source.frames)
            seconds = source.frames / source.samplerate
            mono = Mono()
            yield Decoded(
                name=name,
                rate=source.samplerate,
                seconds=seconds,
                blocks=_blocks(name, source, mono),
                notices=mono.notices,
            )


def _blocks(name: str, source: Any, mono: Mono) -> Iterator[np.ndarray]:
    import soundfile

    done, rate = 0, source.samplerate
    count = BLOCK_SECONDS * rate
    while True:
        try:
            block = source.read(count, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            if count == BLOCK_SECONDS * rate and _returns(source, done):
                count = max(1, int(SHORT_SECONDS * rate))  # what is whole of the block
                continue
            raise _cut_short(name, done / rate, str(error)) from error
        if not len(block):
            break
        done += len(block)
        yield mono(block)
    if done < source.frames and source.format in ("FLAC", "WAV", "WAVEX", "AIFF"):  # others only estimate
        raise _cut_short(name, done / rate, f"{done:,} frames where its header says {source.frames:,}")
    _notice_shorter(mono, done / rate, source.frames / rate)


def _returns(source: Any, frame: int) -> bool:
    """Go back to a frame; return False where the file does not let one."""
    import soundfile

    try:
        return source.seek(frame) == frame
    except soundfile.LibsndfileError:
        return False


def _notice_shorter(mono: Mono, found: float, expected: float | None) -> None:
    """Notice a file that ends early, as a download that broke off does."""
    if expected is not None and expected - found > max(SHORTER_SECONDS, SHORTER * expected):
        mono.notices.append(
            f"it ends at {found:.1f} s where {expected:.1f} s were expected, and may be cut short"
        )


@contextlib.contextmanager
def _by_av(name: str, file: BinaryIO, refused: str, skip_damage: bool) -> Generator[Decoded, None, None]:
    """A file that soundfile refused, by FFmpeg."""
    if find_spec("av") is None:
        raise SoundError(
            f"{name} is no sound that soundfile reads",
            found=refused,
            allowed="WAV, FLAC, OGG, MP3, AIFF; MP4, WebM and other containers with PyAV",
            next=f"`{INSTALL}` brings PyAV",
        )
    import av.error

    try:
        container = av.open(file, "r", options={"format_whitelist": CONTAINERS}, metadata_errors="ignore")
    except (av.error.FFmpegError, ValueError) as error:
        raise SoundError(
            f"{name} is no sound that can be read",
            found=f"soundfile: {refused} FFmpeg: {str(error).partition(':')[0]}.",
            allowed="WAV, FLAC, OGG, MP3, AIFF, MP4, WebM and what else FFmpeg reads",
        ) from error
    with container:
        if not container.streams.audio:
            raise SoundError(
                f"{name} has no sound", found=f"{container.format.long_name} without a sound track"
            )
        stream = container.streams.audio[0]
        seconds = container.duration / av.time_base if container.duration else None
        if stream.codec_context is None or not stream.rate or not stream.channels:
            missing = (
                "codec" if stream.codec_context is None else "sample rate" if not stream.rate else "channel"
            )
            raise SoundError(
                f"{name} is damaged: its sound track names no {missing}",
                found=container.format.long_name,
                next="write the file again from its source",
            )
        _check(name, stream.rate, stream.channels, round((seconds or 1) * stream.rate))
        mono = Mono()
        yield Decoded(
            name=name,
            rate=stream.rate,
            seconds=seconds,
            blocks=_av_blocks(name, container, stream, mono, seconds, _Damage(skip=skip_damage)),
            notices=mono.notices,
        )


def _av_blocks(
    name: str, container: Any, stream: Any, mono: Mono, seconds: float | None, damage: _Damage
) -> Iterator[np.ndarray]:
    import av.error

    floats = av.AudioResampler(format="fltp", rate=stream.rate)  # its own mix to mono would not be the mean
    done, held = 0, list[np.ndarray]()
    try:
        for frame in itertools.chain(damage.whole_frames(container, stream), [None]):
            held += [part.to_ndarray() for part in floats.resample(frame)]
            count = sum(part_CT.shape[1] for part_CT in held)
            if count >= BLOCK_SECONDS * stream.rate or frame is None:
                done += count
                if done > LONGEST_SECONDS * stream.rate:
                    raise _too_long(name)
                yield mono(np.concatenate(held, 1).T) if held else np.empty(0, np.float32)
                held = []
    except av.error.FFmpegError as error:
        raise _cut_short(name, done / stream.rate, str(error)) from error
    if damage.fault is not None or (damage.packets and not done):
        raise _cut_short(name, done / stream.rate, str(damage.fault or damage.first)) from damage.fault
    if damage.packets:
        packets = f"{damage.packets:,} packet{'s' if damage.packets > 1 else ''} of sound"
        place = damage.before / stream.rate
        mono.notices.append(f"it is damaged: {packets} left out, the first at {place:.1f} s")
    _notice_shorter(mono, done / stream.rate, seconds)


class _Damage:
    """The damage of a sound track."""

    def __init__(self, *, skip: bool) -> None:
        self._skip = skip
        self.packets, self.before = 0, 0
        """Packets that cannot be decoded; samples before the first of them."""
        self.first: Exception | None = None
        """FFmpeg's word on the first of them."""
        self.fault: Exception | None = None
        """The reason why nothing behind a place can be read."""

    def whole_frames(self, container: Any, stream: Any) -> Iterator[Any]:
        """Yield the frames of a track. Damaged packets are passed over, as FFmpeg's own program does, or raised."""
        import av.error

        samples, packets = 0, container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
            except av.error.FFmpegError as error:
                self.fault = error
                return
            if packet is None:
                return
            try:
                for frame in packet.decode():
                    samples += frame.samples
                    yield frame
            except av.error.InvalidDataError as error:
                if not self._skip:
                    raise
                self.packets += 1
                if self.first is None:
                    self.first, self.before = error, samples


def _check(name: str, rate: int, channels: int, frames: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise SoundError(
            f"{name} cannot be resampled", found=f"{rate} Hz", allowed=f"{RATES[0]:,} to {RATES[1]:,} Hz"
        )
    if not 1 <= channels <= CHANNELS:
        raise SoundError(f"{name} has {channels} channels", allowed=f"1 to {CHANNELS}")
    if not frames:
        raise SoundError(f"{name} is empty", found="0 samples")
    if frames > LONGEST_SECONDS * rate:
        raise _too_long(name, frames / rate)


def _cut_short(name: str, seconds: float, why: str) -> SoundError:
    return SoundError(f"{name} is damaged or cut short at {seconds:.1f} s", found=why)


def _too_long(name: str, seconds: float = math.inf) -> SoundError:
    long = f"{seconds / 3600:,.0f} hours" if math.isfinite(seconds) else "no end"
    return SoundError(f"{name} is too long", found=long, allowed=f"{LONGEST_SECONDS // 3600} hours")


def need(package: str) -> None:
    """Raises `TorchwrightError` where a package of the extra is not installed."""
    if find_spec(package) is None:
        raise TorchwrightError(
            f"sound files are read with {package}, which is not installed", next=f"`{INSTALL}`"
        )
