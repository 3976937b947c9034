"""Speech models of a Hugging Face folder: encoder, prompt and decode measured apart, judged by words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from torchwright.core.errors import ArtifactError, ModelError, WorkloadError
from torchwright.core.records import Quality
from torchwright.hub.folder import model_files
from torchwright.models.speech.base import Recognizer
from torchwright.models.speech.calls import (
    CHUNK,
    CacheSizes,
    CalledSpeech,
    CallsModel,
    encoding,
    new_cache,
    new_memory,
    reading,
)
from torchwright.models.speech.families import FAMILIES
from torchwright.models.speech.load import family
from torchwright.models.speech.score import edits, normalizer, rate, word_errors
from torchwright.models.speech.sound import RATE
from torchwright.models.speech.utterances import Recordings, first_window, made_up, some_text
from torchwright.workloads import accuracy
from torchwright.workloads.base import (
    CALIBRATION_BATCHES,
    Case,
    Optimized,
    Run,
    Served,
    Workload,
    batches_to_judge,
    check_sizes,
    to_dtype,
)
from torchwright.workloads.huggingface import cache_keyword, load_model

WINDOWS = 8
"""Windows of synthetic sound that judge a model without recordings, and recordings that are read in the same way."""
FORCED = 64
"""Tokens of each that are read, whatever the model would say."""
NEW_TOKENS = 64
"""Default new tokens per window, if the model's context allows."""
DECODED = 8
"""So many of them one at a time."""
CALIBRATION = 1_000_000
"""Seeds from here on are of sounds that the metric never has."""


class SpeechWorkload(Workload):
    """A speech model: one window through the encoder, a prompt, and new tokens one by one.

    Metric: with recordings the growth of the word error rate against their references, or else the words that differ
    from the original's own; without any, perplexity of the original's predictions over made-up sound.
    """

    name = "speech"
    supports = "Whisper and Moonshine, …ForConditionalGeneration"
    opens = frozenset({"audio", "reference"})

    def __init__(
        self,
        folder: str | Path,
        *,
        new_tokens: int | None = None,
        audio: list[str] | None = None,
        reference: list[str] | None = None,
        language: str | None = None,
    ) -> None:
        self.folder, self.label = Path(folder), str(folder)
        self.language = language
        self.audio, self.reference = audio, reference
        self.recordings = Recordings.of(audio, reference)
        self.cache = family(self.folder).cache(self.folder)
        opened = self._recognizer(lambda case: None, torch.float32)
        most = opened.positions - CHUNK
        self.new_tokens = min(NEW_TOKENS, most) if new_tokens is None else new_tokens
        if not 1 <= self.new_tokens <= most:
            raise WorkloadError(
                f"--new-tokens {new_tokens}", allowed=f"1 to {most} after a prompt of {CHUNK}"
            )
        self.window = opened.window

    @classmethod
    def accepts(cls, folder: Path, config: dict[str, Any]) -> bool:
        named = config.get("architectures") or []
        return config.get("model_type") in FAMILIES and any(
            str(name).endswith("ForConditionalGeneration") for name in named
        )

    def build(self) -> nn.Module:
        return load_model(self.folder, "AutoModelForSpeechSeq2Seq")

    def adapt(self, model: nn.Module) -> nn.Module:
        return CallsModel(model, self.cache.positions)

    def cases(self, dtype: torch.dtype) -> list[Case]:
        def read(tokens: int, start: int, repeat: int) -> Case:
            memory = new_memory(self.cache, dtype, self.device)
            cache = new_cache(self.cache, dtype, self.device)
            return reading([0] * tokens, start, memory, cache, repeat=repeat)

        return [self._encoding(0), read(CHUNK, 0, 1), read(1, CHUNK, self.new_tokens)]

    @classmethod
    def check(cls, description: dict[str, Any]) -> None:
        check_sizes(description, "new_tokens")
        CacheSizes.from_dict(description.get("cache"))
        seconds, language = description.get("window_seconds"), description.get("language")
        if not (isinstance(seconds, int | float) and 0 < seconds <= 3600):
            raise ArtifactError("the window's length is damaged", found=str(seconds)[:80])
        if not isinstance(language, str | None):
            raise ArtifactError("the language is damaged", found=str(language)[:80])

    @classmethod
    def answerer(cls, optimized: Optimized) -> Recognizer:
        sizes = CacheSizes.from_dict(optimized.description.get("cache"))
        called = CalledSpeech(optimized.run, sizes, optimized.dtype, "this recipe", optimized.device)
        return family(optimized.folder)(optimized.folder, called)

    @classmethod
    def served_as(cls, description: dict[str, Any]) -> Served:
        return "recognizer"

    @classmethod
    def rates(cls, description: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
        """Rates of one window: its time over the sound's, the time to the first word, and the decoder's time."""
        written = seconds["prefill"] + description["new_tokens"] * seconds["decode"]
        return {
            "real_time_factor": (seconds["encode"] + written) / description["window_seconds"],
            # The first token is a timestamp, or the word's.
            "first_word_s": seconds["encode"] + seconds["prefill"] + seconds["decode"],
            "decoder_s": written,
            "tpot_s": seconds["decode"],
        }

    def original_run(self, model: nn.Module) -> Run:
        """transformers' own way: growing caches, keys and values of the states made by the first call of a window."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        whole: Any = model
        decoder, head = whole.get_decoder(), whole.get_output_embeddings()
        own = next(whole.parameters())
        keyword = cache_keyword(decoder)

        def encode(case: Case) -> torch.Tensor:
            return whole.get_encoder()(case.args[0].to(own)).last_hidden_state

        def step(ids_1T: torch.Tensor, past: EncoderDecoderCache) -> torch.Tensor:
            out = decoder(input_ids=ids_1T, encoder_hidden_states=states, use_cache=True, **{keyword: past})
            return head(out.last_hidden_state)

        def fresh() -> EncoderDecoderCache:
            return EncoderDecoderCache(DynamicCache(), DynamicCache())

        with torch.no_grad():
            states, filled = encode(self._encoding(0)), fresh()
            step(torch.zeros(1, CHUNK, dtype=torch.long, device=own.device), filled)

        def run(case: Case) -> torch.Tensor:
            if case.name == "encode":
                return encode(case)
            if case.name == "prefill":
                return step(case.args[1], fresh())
            logits = step(case.args[1], filled)
            filled.self_attention_cache.crop(-1)
            return logits

        return run

    def cast(self, model: nn.Module, dtype: torch.dtype, keep) -> nn.Module:
        # Caches are arguments that the model writes into, so they have its type from the start.
        to_dtype(model, dtype, keep)
        return model

    def observe(self, run: Run, dtype: torch.dtype) -> dict[str, Any]:
        """Log-probabilities (N, V) in float16 of forced tokens; of recordings what was heard, too: texts and tokens."""
        model = self._recognizer(run, dtype)
        judged = self.sample or range(self._count())
        forced = [self._forced(model, index) for index in judged[:WINDOWS]]
        references = self.recordings.references
        recorded = [index for index in judged if index < len(self.recordings.audio)]
        heard = [model.transcribe(self.recordings.audio[index], language=self.language) for index in recorded]
        return {
            "log_probabilities": torch.cat(forced),
            "texts": [found.text for found in heard],
            "tokens": [[token for segment in found.segments for token in segment.tokens] for found in heard],
            "language": self.language or next((found.language for found in heard), None) or "en",
            "references": [references[index] for index in recorded if index < len(references)],
        }

    def unseen(self) -> Self | None:
        return self.judged_after(self._count(), len(self.recordings.audio) or None)

    def compare(self, reference: Any, candidate: Any) -> Quality:
        predicted = accuracy.predictions(
            reference["log_probabilities"], candidate["log_probabilities"], FORCED
        )
        if not reference["texts"]:
            return predicted
        said = words(reference, candidate, self.folder)
        return replace(said, extras=said.extras | predicted.extras)

    def calibration(self, dtype: torch.dtype) -> list[Case]:
        return [
            *(self._encoding(CALIBRATION + index) for index in range(CALIBRATION_BATCHES)),
            *self.cases(dtype)[1:],
        ]

    def calibrates_apart(self) -> bool:
        return True

    def files(self, *, weights: bool) -> dict[str, Path]:
        judged = {Path(name).absolute() for name in (*(self.audio or ()), *(self.reference or ()))}
        files = model_files(self.folder, weights=weights)
        return {name: path for name, path in files.items() if path.absolute() not in judged}

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.name,
            "model": self.label,
            "new_tokens": self.new_tokens,
            "audio": list(map(str, self.recordings.audio)) or None,
            "reference": [str(Path(name).absolute()) for name in self.reference or ()] or None,
            "language": self.language,
            "window_seconds": self.window / RATE,
            "cache": self.cache.as_dict(),
        }

    def properties(self, model: nn.Module) -> set[str]:
        return {"speech", "two_stacks"}

    def check_adapted(self, original: nn.Module, adapted: nn.Module) -> None:
        """Raises `ModelError` unless encoder, prompt and one more token give transformers' own logits."""
        whole: Any = original
        heard_1, ids = self._encoding(0).args[0], list(range(CHUNK + 1))
        cache = new_cache(self.cache, torch.float32, self.device)
        with torch.no_grad():
            states = whole.get_encoder()(heard_1).last_hidden_state
            out = whole.get_decoder()(
                input_ids=torch.tensor([ids], device=self.device),
                encoder_hidden_states=states,
                use_cache=False,
            )
            expected = whole.get_output_embeddings()(out.last_hidden_state)
            memory = adapted(heard_1)
            parts = [
                reading(part, start, memory, cache) for part, start in ((ids[:-1], 0), (ids[-1:], CHUNK))
            ]
            found = torch.cat([adapted(*part.args) for part in parts], 1)
        difference = (expected - found).abs().max().item()
        if not difference < 1e-3 * max(1.0, expected.abs().max().item()):
            raise ModelError(
                f"{type(original).__name__} does not work with a fixed-size key-value cache",
                found=f"its logits differ by {difference:.3g} from transformers' own",
            )

    def _recognizer(self, run: Run, dtype: torch.dtype) -> Recognizer:
        return family(self.folder)(
            self.folder, CalledSpeech(run, self.cache, dtype, "this model", self.device)
        )

    def _encoding(self, seed: int) -> Case:
        model = self._recognizer(lambda case: None, torch.float32)
        return encoding(model.heard(made_up(seed, model.window)).to(self.device))

    def _count(self) -> int:
        """Number of recordings, or synthetic windows, that judge the search."""
        there = len(self.recordings.audio)
        return min(batches_to_judge(there, there), there) if there else WINDOWS

    def _forced(self, model: Recognizer, index: int) -> torch.Tensor:
        """Log-probabilities (T, V) in float16 of what follows each of some tokens over a window."""
        recordings = self.recordings
        samples = (
            first_window(recordings.audio[index], model.window)
            if recordings.audio
            else made_up(index, model.window)
        )
        ids = (
            model.tokenizer.encode(f" {recordings.references[index]}", add_special_tokens=False).ids
            if recordings.references
            else some_text(model.tokenizer, index, FORCED)
        )
        begin = model.begin(self.language)
        ids = [*begin, *ids][: min(len(begin) + FORCED, model.positions)]
        steps = model.model.steps(model.model.encode(model.heard(samples)))
        pieces = [ids[:-DECODED], *([token] for token in ids[-DECODED:])]
        hidden_TE = torch.cat([steps.read(piece) for piece in pieces if piece])
        return steps.logits(hidden_TE[len(begin) :]).log_softmax(-1).half().cpu()


def words(reference: dict[str, Any], candidate: dict[str, Any], folder: Path) -> Quality:
    """Word error rate of what was heard; the drop is its growth, or against the original's own words itself.

    Its interval is that of a bootstrap over utterances, in which both have the same ones; so is the error rate's own.
    """
    normalize = normalizer(reference["language"], folder)
    wanted = reference["references"] or reference["texts"]
    words_U, errors_U = word_errors(wanted, candidate["texts"], normalize)
    _, before_U = word_errors(wanted, reference["texts"], normalize)
    found, growth = rate(words_U, errors_U), rate(words_U, errors_U - before_U)
    pairs = list(zip(reference["tokens"], candidate["tokens"], strict=True))
    changed = sum(edits(before, after) for before, after in pairs)
    total = max(1, sum(len(before) for before, _ in pairs))
    return Quality(
        metric="word error rate" if reference["references"] else "words other than the original's",
        value=found.value,
        reference=rate(words_U, before_U).value,
        drop=growth.value,
        drop_low=growth.low,
        drop_high=growth.high,
        higher_is_better=False,
        samples=int(words_U.sum()),
        extras={
            "error_rate_low": found.low,
            "error_rate_high": found.high,
            "token_agreement": max(0.0, 1 - changed / total),
        },
    )
