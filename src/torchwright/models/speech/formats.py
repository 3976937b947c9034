"""A transcript as text, subtitles or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

from torchwright.models.speech.transcript import Segment, Transcript, Word


def as_text(transcript: Transcript) -> str:
    """A line for each segment."""
    return "".join(f"{segment.text}\n" for segment in transcript.segments)


def as_srt(transcript: Transcript) -> str:
    """SubRip: numbered cues, a word each where words have times."""
    cues = enumerate(_cues(transcript.segments), 1)
    return "\n".join(f"{number}\n{_times(cue, ',')}\n{cue.text.strip()}\n" for number, cue in cues)


def as_vtt(transcript: Transcript) -> str:
    """Return WebVTT, with "&", "<" and "-->" of the text escaped."""
    cues = "".join(
        f"\n{_times(cue, '.')}\n{_escaped(cue.text.strip())}\n" for cue in _cues(transcript.segments)
    )
    return f"WEBVTT\n{cues}"


def as_json(transcript: Transcript) -> str:
    """Return all fields of the transcript."""
    return json.dumps(facts(transcript), ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def facts(transcript: Transcript) -> dict[str, Any]:
    """A transcript as plain data."""
    return {"text": transcript.text, **dataclasses.asdict(transcript)}


FORMATS: dict[str, Callable[[Transcript], str]] = {
    "text": as_text,
    "srt": as_srt,
    "vtt": as_vtt,
    "json": as_json,
}


def clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds."""
    thousandths = round(seconds * 1000)
    hours, thousandths = divmod(thousandths, 3_600_000)
    minutes, thousandths = divmod(thousandths, 60_000)
    return f"{hours:02}:{minutes:02}:{thousandths // 1000:02}{point}{thousandths % 1000:03}"


def _times(cue: Segment | Word, point: str) -> str:
    """Return when a cue begins and ends: at least a millisecond later, since players leave out empty cues."""
    begin = round(cue.start, 3)
    return f"{clock(begin, point)} --> {clock(max(cue.end, begin + 0.001), point)}"


def _cues(segments: Iterable[Segment]) -> list[Segment | Word]:
    return [cue for segment in segments for cue in (segment.words or (segment,))]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
