"""Messages between the HTTP process and the engine process: MessagePack over one ZeroMQ pair, nothing pickled.

HTTP → engine: Grammar, Forget, Submit, Cancel, Embed, Transcribe, Paint, LoadAdapter, UnloadAdapter, FlushCache,
UpdateWeights, NameWeights, Pause, Resume, Shutdown.
Engine → HTTP: Loading, EngineReady, RequestRefused, StepOutput, Embedded, Heard, Painted, AdapterLoaded,
AdapterUnloaded, Controlled, WeightsUpdated, Failed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from torchwright.models.diffusion.limits import Style
from torchwright.models.speech.transcript import Options, Window
from torchwright.models.vision.record import Picture

OUT_OF_MEMORY = 12
"""Exit code of an engine that could not get memory: the number of ENOMEM."""

Finish = Literal["stop", "length", "cancelled", "abort", "timeout", "grammar", "error"]
"""Why a sequence ended; `stop` is a stop token or a grammar that is complete, `grammar` one that is too slow.

`cancelled` has no reader any more; `abort` was asked for by somebody else, and its reader gets what there is."""
PauseMode = Literal["abort", "retract", "in_place"]
"""Running requests end, give up their pages and are computed again later, or keep their pages."""


Activation = Literal["none", "sigmoid", "softmax"]
"""Copy of the type in `workloads.encoding`, which needs torch."""


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling options of one request, with the meaning that they have in `decoder.sampling.Sampling`."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens before the penalties."""
    seed: int = 0
    """Sequence i of a request draws from a generator of its own, made from the seed and i."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, tag="grammar"):
    """A compiled xgrammar grammar as its own JSON: one copy for all requests that name its key, until a `Forget`."""

    key: str
    json: str


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """Drop a grammar: no later request names it; running requests keep it."""

    key: str


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A bound of the reasoning that comes before the answer."""

    begin: str
    """The text by which reasoning begins; empty where the prompt has begun it."""
    end: str
    end_ids: list[int]
    """Tokens of `end`, which come next when the budget is spent."""
    tokens: int


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """One prompt, to be continued `n` times."""

    id: str
    ids: list[int]
    max_tokens: int
    """New tokens at most; 0 computes the prompt only (for `echo` with `logprobs`)."""
    sampling: SamplingOptions
    n: int = 1
    stop_ids: list[int] = []
    """Tokens that end a sequence; the last token is then one of them."""
    min_tokens: int = 0
    """Stop tokens cannot be chosen before this many."""
    grammar: str | None = None
    """The key of a `Grammar` that was sent before and is not forgotten."""
    thinking: ThinkingBudget | None = None
    """The bound of reasoning, with a grammar or without."""
    logprobs: int | None = None
    """Top tokens to report for each new token (0: only the token's own log-probability); None: nothing."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    prompt_logprobs_from: int = 0
    """The first of the prompt's tokens that is reported; what comes before it may be found in the prefix cache."""
    logprob_ids: list[int] = []
    """Tokens whose log-probabilities are reported wherever others are."""
    priority: int = 0
    """Lower is sooner."""
    timeout_s: float | None = None
    """Seconds from its arrival at the engine after which the request ends with what it has."""
    pictures: list[Picture] = []
    """In the order of their places among the ids: tokens that stand for pictures."""
    adapter: str | None = None
    """The name of a loaded adapter that its tokens are computed with."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """The request's reader has what it wants, or has gone; its pages are free after the current step."""

    id: str
    index: int | None = None
    """One of its n sequences; None is all of them."""
    reason: str
    finish: Literal["stop", "cancelled", "abort"] = "cancelled"
    """`stop`: the answer is complete, such as a text up to a stop string."""


class Embed(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """Texts to be read: embedded by a sentence encoder, or given its logits by a classifier."""

    id: str
    texts: list[str]
    pairs: list[str] | None = None
    """For a classifier: a second text for each, which it reads with the first."""
    special: bool = True
    """For a classifier: add the special tokens that the model expects around a text."""


class Transcribe(msgspec.Struct, frozen=True, kw_only=True, tag="transcribe"):
    """A recording to transcribe."""

    id: str
    samples: str
    """A file of mono float32 samples at 16 kHz, which is there until the first answer."""
    options: Options


class Paint(msgspec.Struct, frozen=True, kw_only=True, tag="paint"):
    """A picture to generate."""

    id: str
    prompt: str
    seed: int
    steps: int | None
    """None: the number that the model was trained for."""
    size: tuple[int, int] | None
    """(height, width) in pixels; the model's own without it."""
    style: Style = Style()


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="load_adapter"):
    """Load an adapter for single requests; answered by AdapterLoaded or RequestRefused."""

    id: str
    name: str
    folder: str
    replace: bool = False
    """Take the place of the adapter that has the name; its running requests keep it."""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """Refuse further requests with an adapter; answered by AdapterUnloaded when its running ones have ended."""

    id: str
    name: str


class FlushCache(msgspec.Struct, frozen=True, kw_only=True, tag="flush_cache"):
    """Empty the prefix cache; answered by Controlled, or RequestRefused while sequences hold pages."""

    id: str


class UpdateWeights(msgspec.Struct, frozen=True, kw_only=True, tag="update_weights"):
    """Go on with the weights in a folder; answered by WeightsUpdated or RequestRefused, which changes nothing."""

    id: str
    folder: str
    version: str | None = None
    """Its name in answers; the weights' fingerprint by default."""
    abort: bool = False
    """End all requests before the first step with the new weights."""
    pause: bool = False
    """Compute nothing afterwards, until a Resume."""


class NameWeights(msgspec.Struct, frozen=True, kw_only=True, tag="name_weights"):
    """Give the weights another version; answered by WeightsUpdated."""

    id: str
    version: str
    abort: bool = False


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Compute nothing until a Resume; requests that come meanwhile wait. Answered by Controlled."""

    id: str
    mode: PauseMode


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Go on computing; answered by Controlled."""

    id: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """End: after the running requests (`drain`), or at once."""

    drain: bool


Control = FlushCache | UpdateWeights | NameWeights | Pause | Resume
"""Messages about the engine rather than about one request."""
ToEngine = (
    Grammar
    | Forget
    | Submit
    | Cancel
    | Embed
    | Transcribe
    | Paint
    | LoadAdapter
    | UnloadAdapter
    | Control
    | Shutdown
)


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """The engine's progress before it is ready."""

    text: str


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded and the engine takes requests."""

    kind: Literal["decoder", "encoder", "classifier", "recognizer", "painter"]
    vocabulary: int
    context: int
    """Tokens of prompt and answer together, at most; of a source alone where `answer` has its own."""
    answer: int | None = None
    """Tokens of an answer at most, where an encoder reads the prompt."""
    chunk: int = 1
    """Prompts take room in whole chunks of so many tokens."""
    pages: int
    page_tokens: int
    stop_ids: list[int]
    max_running: int
    """Sequences that run at once, at most."""
    weight_bytes: int
    kv_bytes: int
    fingerprint: str
    """Hash of the weights; part of every prefix-cache key."""
    pictures: bool = False
    """True if prompts may have pictures."""
    notices: list[str] = []
    labels: list[str] = []
    """Labels of a classifier, by index."""
    activation: Activation = "none"
    """Turns a classifier's logits into probabilities."""
    score_activation: Activation = "none"
    """Turns the logit into a score, for a classifier with one."""


class RequestRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """A request that the engine does not take: the queue is full, or the prompt can never fit."""

    id: str
    reason: Literal["queue_full", "too_long", "invalid"]
    text: str
    retry_after_s: float | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities: of the token, and of the most likely ones."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    asked: list[float] = []
    """Those of the request's `logprob_ids`."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence's seconds per phase in the engine, and the sources of its prompt tokens."""

    queue_s: float
    prefill_s: float
    decode_s: float
    grammar_s: float
    preempted_s: float
    preemptions: int
    cached_tokens: int
    computed_tokens: int
    speculated_tokens: int
    accepted_tokens: int
    proposed_at: list[int] = []
    accepted_at: list[int] = []
    """The two before by a token's place among the proposals of its step."""
    versions: list[tuple[str, int]] = []
    """Versions of the weights that the answer's tokens were chosen with, in order, and where each one's tokens end."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one sequence, in order, and its end if this is it."""

    id: str
    index: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One for each prompt token from `prompt_logprobs_from` on, None for the first of them; sent once, with the first
    output of index 0."""
    finish: Finish | None = None
    message: str | None = None
    """With `error` and `grammar`: what went wrong."""
    timing: Timing | None = None
    """With the finish."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state after a step; counters run from the engine's start."""

    running: int
    waiting: int
    pages_used: int
    pages_cached: int
    """Pages that only the prefix tree holds: free when they are needed."""
    pages: int
    prompt_tokens: int
    generated_tokens: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix tree."""
    prefix_hits: int
    """Prompt tokens found there."""
    preemptions: int
    speculated_tokens: int
    accepted_tokens: int
    steps: int
    step_s: float
    step_tokens: int
    core_share: float
    """Share of the engine's recent time in which it had a core: below 1 if other programs use the cores."""
    proposed_at: list[int] = []
    accepted_at: list[int] = []
    """Proposed and accepted tokens by their place among the proposals of a step."""


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Outputs of one engine step; also sent, empty, when the engine becomes idle."""

    outputs: list[TokenOutput]
    stats: Stats


class Embedded(msgspec.Struct, frozen=True, kw_only=True, tag="embedded"):
    """Embeddings of some of an Embed's texts; it is answered when all have come."""

    id: str
    places: list[int]
    """Indices of the texts."""
    vectors: list[list[float]]
    tokens: int
    """Tokens in these texts."""


class Heard(msgspec.Struct, frozen=True, kw_only=True, tag="heard"):
    """The next window of a transcript."""

    id: str
    window: Window | None
    """None after the last one."""


class Painted(msgspec.Struct, frozen=True, kw_only=True, tag="painted"):
    """Progress of a picture, or the finished picture."""

    id: str
    done: int
    """Steps."""
    pixels: bytes | None = None
    """(height, width, 3) in uint8, with the last step."""
    size: tuple[int, int] = (0, 0)
    """(height, width) of the pixels."""
    notices: list[str] = []
    """Parts of the prompt that were left out; sent with the last step."""


class AdapterLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="adapter_loaded"):
    """An adapter that requests may name."""

    id: str
    digest: str
    """SHA-256 of its matrices."""
    bytes: int
    """Memory that it takes."""


class AdapterUnloaded(msgspec.Struct, frozen=True, kw_only=True, tag="adapter_unloaded"):
    """An adapter is gone, and so are its requests."""

    id: str


class Controlled(msgspec.Struct, frozen=True, kw_only=True, tag="controlled"):
    """A FlushCache, Pause or Resume is done."""

    id: str
    requests: int = 0
    """Requests that wait for a Resume."""


class WeightsUpdated(msgspec.Struct, frozen=True, kw_only=True, tag="weights_updated"):
    """From the next StepOutput on, tokens are chosen with these weights."""

    id: str
    version: str
    fingerprint: str
    requests: int = 0
    """Requests that go on with other weights than they began with."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The model cannot be loaded, or a request cannot be computed: the fields of a `TorchwrightError`."""

    text: str
    id: str | None = None


Reply = (
    RequestRefused
    | Embedded
    | Heard
    | Painted
    | AdapterLoaded
    | AdapterUnloaded
    | Controlled
    | WeightsUpdated
)
"""Messages for the one request whose `id` they have."""
FromEngine = Loading | EngineReady | StepOutput | Reply | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    return _from_engine.decode(data)
