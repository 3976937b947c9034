"""Transcripts in the formats of OpenAI's API, and as events during recognition."""

from __future__ import annotations

from typing import Any

import msgspec

from torchwright.models.speech.formats import as_srt, as_vtt
from torchwright.models.speech.transcript import Segment, Transcript, Window, compression_ratio
from torchwright.serve.openai.transcription_request import TranslationRequest

MEDIA_TYPES = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}
"""Media types of the formats other than JSON."""
NOTICES = "X-Torchwright-Notices"
SEEKS_PER_SECOND = 100


class TranscriptionAnswer:
    """Windows of one sound, taken in as they come."""

    def __init__(self, body: TranslationRequest, notices: tuple[str, ...] = ()) -> None:
        self._body, self._found = body, Transcript(notices=notices)
        self._seeks = list[float]()
        """Start of each segment's window, in seconds."""

    @property
    def media_type(self) -> str:
        return MEDIA_TYPES.get(self._body.response_format, "application/json")

    def put(self, window: Window) -> bytes:
        """Take one more window; returns its text as events."""
        before = self._found
        self._seeks += [before.seconds] * len(window.segments)
        self._found = before.and_then(window)
        delta = self._found.text[len(before.text) :]
        return _event({"type": "transcript.text.delta", "delta": delta}) if delta else b""

    def end(self) -> bytes:
        """The last event."""
        return _event({"type": "transcript.text.done", "text": self._found.text, **self._notices()})

    def headers(self) -> dict[str, str]:
        """Return the header that carries the notices of an answer that is not JSON."""
        if self.media_type == "application/json" or not (notices := self._found.remarks()):
            return {}
        return {NOTICES: "; ".join(notices).encode("ascii", "replace").decode()}

    def _notices(self) -> dict[str, list[str]]:
        """Return what the client should know: the reason for missing text, and notices about the sound."""
        return {"notices": notices} if (notices := self._found.remarks()) else {}

    def whole(self) -> bytes:
        """The answer in the form that was asked for."""
        found = self._found
        match self._body.response_format:
            case "text":
                return f"{found.text}\n".encode()
            case "srt":
                return as_srt(found).encode()
            case "vtt":
                return as_vtt(found).encode()
            case "verbose_json":
                return msgspec.json.encode(self._verbose())
        return msgspec.json.encode({"text": found.text, "usage": _usage(found), **self._notices()})

    def _verbose(self) -> dict[str, Any]:
        found, wanted = self._found, self._body.timestamp_granularities
        facts: dict[str, Any] = {
            "task": "translate" if self._body.options().translate else "transcribe",
            "language": found.language,
            "duration": found.seconds,
            "text": found.text,
            "usage": _usage(found),
            **self._notices(),
        }
        if "segment" in wanted:
            rows = zip(found.segments, self._seeks, strict=True)
            facts["segments"] = [_segment(i, segment, seek) for i, (segment, seek) in enumerate(rows)]
        if "word" in wanted:
            facts["words"] = [
                {"word": word.text.strip(), "start": word.start, "end": word.end}
                for segment in found.segments
                for word in segment.words
            ]
        return facts


def _segment(id: int, segment: Segment, seek: float) -> dict[str, Any]:
    return {
        "id": id,
        "seek": round(seek * SEEKS_PER_SECOND),
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": segment.temperature,
        "avg_logprob": segment.mean_logprob,
        "compression_ratio": compression_ratio(segment.text),
        "no_speech_prob": segment.no_speech,
    }


def _usage(found: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": found.seconds}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
