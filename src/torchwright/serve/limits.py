"""The most that one client can ask for. What goes beyond is refused by name, with the limit."""

from __future__ import annotations

from dataclasses import dataclass, replace

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes, counts and times that bound what a request costs."""

    body_bytes: int = 8 * MIB
    """Bytes of a request's body; more is a 413."""
    connections: int = 1024
    """Open connections; the next is answered 503 and closed. Fewer where few files may be open (`descriptors.py`)."""
    accepted_at_once: int = 2048
    """Connections that are accepted in one turn of the loop; others wait in the kernel."""
    header_bytes: int = 64 * 1024
    """A request's line and headers; more is a 400."""
    header_seconds: float = 10.0
    """From the connection, or a request's first byte, to the end of its headers."""
    body_seconds: float = 30.0
    """From the end of the headers to the end of the body."""
    idle_seconds: int = 30
    """Seconds that a connection is kept open without a request."""
    unread_seconds: float = 20.0
    """Seconds that a client may leave a stream unread before it is dropped."""
    unread_outputs: int = 65_536
    """Engine outputs waiting for one client before it is dropped."""
    grammar_bytes: int = 64 * 1024
    """A schema, regex or grammar as text."""
    grammar_seconds: float = 5.0
    """Compiling one grammar, of processor time."""
    grammar_compiled_bytes: int = 32 * MIB
    """A compiled grammar on its way to the engine."""
    grammar_memory_bytes: int = 1024 * MIB
    """Memory for compiling one grammar."""
    grammars_waiting: int = 32
    """Requests that wait for a grammar to be compiled; the next is a 429."""
    grammar_quick_seconds: float = 0.5
    """The first part of `grammar_seconds`; a grammar that needs more is compiled again, behind other slow ones."""
    grammars_kept: int = 64
    """Grammars that the engine keeps for the next request with the same grammar."""
    grammars_kept_bytes: int = 64 * MIB
    """Those grammars together, as JSON; in the engine's memory they take five times as much."""
    grammars_held_bytes: int = 128 * MIB
    """Grammars of running and waiting requests together; the next is a 429."""
    tokenized_bytes: int = 4 * MIB
    """Text of one prompt."""
    scored_values: int = 128 * 1024
    """Log-probabilities of a request's prompts: its tokens, times one more than `logprobs`."""
    scored_answers: int = 1024 * 1024
    """Log-probabilities of a POST /generate's answers: the new tokens that there may be, times those at a place."""
    probe_seconds: float = 20.0
    """From a GET /health_generate to the engine's one token."""
    read_here_bytes: int = 16 * 1024
    """A request's body that the HTTP process reads itself; a longer one gets a process of its own."""
    bodies_bytes: int = 64 * MIB
    """Longer bodies together, from their arrival until they are read; the next is a 429."""
    settings_bytes: int = 256 * 1024
    """Bytes of a request in addition to its prompt: instructions, tools, schemas."""
    read_seconds: float = 10.0
    """Reading one body: its fields, the chat template, tokens; of processor time."""
    read_quick_seconds: float = 0.5
    """The first part of that time; a body that needs more is read again from its beginning, behind other slow ones."""
    read_memory_bytes: int = 1024 * MIB
    """Memory for reading one body."""
    renders_waiting: int = 1024
    """Short requests that wait for their chat template to be rendered apart; the next is a 429."""
    reads_waiting: int = 32
    """Requests that wait for their body to be read; the next is a 429."""
    upload_bytes: int = 256 * MIB
    """A request's body that brings a sound file; more is a 413."""
    upload_seconds: float = 600.0
    """From the end of the headers to the end of such a body; each piece must come within `body_seconds`."""
    picture_body_bytes: int = 32 * MIB
    """A request's body, for a model that takes pictures; more is a 413."""
    picture_bodies_bytes: int = 256 * MIB
    """Bodies of such a model together, and what is fetched for them; the next is a 429."""
    picture_read_seconds: float = 30.0
    """Reading such a body with its pictures, of processor time."""
    picture_quick_seconds: float = 3.0
    """The first part of that time, as `read_quick_seconds`: a photo takes one second."""
    picture_memory_bytes: int = 2048 * MIB
    """Memory for that."""
    pictures_held_bytes: int = 2048 * MIB
    """Prepared pictures of all requests together; what goes beyond is a 429."""
    fetches: int = 8
    """Pictures that are fetched from other hosts at the same time."""
    fetch_seconds: float = 20.0
    """From the look-up of a host's name to the last byte of its picture."""
    sounds: int = 256
    """Uploads that are on their way, read, or transcribed; the next is a 429."""
    sounds_bytes: int = 4096 * MIB
    """Uploads and their samples together, in temporary files; what goes beyond is a 429."""
    sound_seconds: int = 3600
    """The most seconds of one sound; a longer one is a 400."""
    sound_read_seconds: float = 60.0
    """Reading one sound file, of processor time."""
    sound_memory_bytes: int = 1024 * MIB
    """Memory for reading one sound file."""
    batch_rows: int = 50_000
    """Requests of one batch; a batch of more fails."""
    batches_open: int = 64
    """Batches that have not ended; the next is a 429."""
    stored_batches: int = 4096
    """Batches that are remembered; those that ended first are forgotten."""
    stored_files: int = 2048
    """Uploaded files and files of results; the next upload is a 429."""
    stored_bytes: int = 8192 * MIB
    """All files together, results that are being written included; a further upload is a 413."""
    stored_seconds: int = 30 * 86_400
    """Age at which a file is deleted where nothing shorter is asked for, and at which an ended batch is forgotten."""

    def with_pictures(self) -> Limits:
        """Return the limits of a model that takes pictures: their bodies are larger, and take longer to read."""
        return replace(
            self,
            body_bytes=self.picture_body_bytes,
            bodies_bytes=self.picture_bodies_bytes,
            read_seconds=self.picture_read_seconds,
            read_quick_seconds=self.picture_quick_seconds,
            read_memory_bytes=self.picture_memory_bytes,
        )


# Counts that the request's schema states itself, so that the OpenAPI document and the table of parameters have them.
CHOICES = 64
"""n"""
PROMPTS = 256
"""Prompts of one completion request, and texts of one embedding request."""
READ_CHARACTERS = 100_000
"""One text that is scored, ranked or classified; a query is read with every document."""
PICTURES = 10
"""Pictures that one request asks for."""
INPUT_PICTURES = 64
"""Pictures in one request's messages."""
INPUT_PICTURE_BYTES = 20 * MIB
"""One picture's file."""
INPUT_VIDEOS = 4
"""Videos in one request's messages: each is as much work as many pictures."""
INPUT_VIDEO_BYTES = 20 * MIB
"""One video's file, or the pictures of its frames."""
PREPARED_BYTES = 512 * MIB
"""A request's pictures as the model's encoder reads them."""
PICTURE_PIXELS = 2048 * 2048
"""The most pixels of one picture: its memory grows with them."""
SEQUENCES = 512
"""Prompts times n."""
STOPS, STOP_CHARACTERS = 16, 256
LOGIT_BIASES = 1024
TOP_LOGPROBS = 20
SCORED_TOKENS = 128
"""Most likely tokens, and tokens of the client's choice, whose log-probabilities POST /generate gives at each place."""
MESSAGES = 2048
TOOLS = 128
PARTS = 1024
"""Parts of one message's content."""
TOKENS = 1 << 20
"""Token ids of one prompt, or of a text to be."""
FIELDS = 32
"""Fields of a request that comes as a form."""
NESTING = 128
"""Objects and lists in each other in a request's body."""
