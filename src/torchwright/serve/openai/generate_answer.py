"""The answer to POST /generate, in SGLang's form: one object for each answer, with all its facts.

A streamed event has all of the text so far, as SGLang's clients expect. So that a long answer does not cost the square
of its length, an event comes when the answer has grown by a fixed share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchwright.serve.openai.answers import DONE, event, finite, version_spans
from torchwright.serve.openai.generate_request import PromptOptions
from torchwright.serve.openai.generation import ChoiceUpdate, Generation
from torchwright.serve.text.codec import Tokenizer
from torchwright.serve.wire.messages import TokenLogprob

GROWTH = 256
"""A stream's answer grows by one part in so many from one event to the next: each of its first tokens has one, and of
8,192 tokens the last ones come 32 at a time."""
SCORED_GROWTH = 16
"""The same with log-probabilities, which are many times as long as text."""


@dataclass
class _Answer:
    """One answer while it grows."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scored: list[TokenLogprob] = field(default_factory=list)
    prompt: list[TokenLogprob | None] = field(default_factory=list)
    finish: str | None = None
    matched: str | int | None = None
    told: int = 0
    """Tokens that the last event had."""


class GenerateAnswer:
    """Answers POST /generate."""

    def __init__(
        self,
        generation: Generation,
        prompts: Sequence[PromptOptions],
        tokenizer: Tokenizer,
        version: Callable[[], str],
        *,
        begun: float,
        many: bool,
        texts: bool,
    ) -> None:
        """`version` gives that of the engine's weights; `texts` says whether scored tokens have theirs.

        `begun` is when the request came, and `many` says whether its prompts were a list.
        """
        self._generation, self._prompts, self._tokenizer, self._version = (
            generation,
            prompts,
            tokenizer,
            version,
        )
        self._begun, self._texts = begun, texts
        self._n = generation.prepared.n
        self._listed = many or self._n > 1
        self._answers = [_Answer() for _ in range(len(prompts) * self._n)]

    def put(self, step: ChoiceUpdate) -> None:
        answer = self._answers[step.choice]
        answer.text += step.text
        answer.tokens.extend(step.tokens)
        answer.scored.extend(step.token_logprobs)
        answer.prompt = step.prompt_logprobs or answer.prompt
        if step.finish:
            self._end(answer, step)

    def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        answers = [self._answer(choice) for choice in range(len(self._answers))]
        return answers if self._listed else answers[0]

    def begin(self) -> bytes:
        return b""

    def events(self, step: ChoiceUpdate) -> bytes:
        self.put(step)
        answer = self._answers[step.choice]
        growth = SCORED_GROWTH if self._options(step.choice).return_logprob else GROWTH
        new = len(answer.tokens) - answer.told
        if not step.finish and (not new or new * growth < answer.told):
            return b""
        answer.told = len(answer.tokens)
        index = {"index": step.choice} if self._listed else {}
        return event(self._answer(step.choice) | index)

    def end(self) -> bytes:
        return DONE

    def _options(self, choice: int) -> PromptOptions:
        return self._prompts[choice // self._n]

    def _end(self, answer: _Answer, step: ChoiceUpdate) -> None:
        answer.finish, answer.matched = step.finish, step.stop_reason
        if answer.finish == "stop" and answer.matched is None and answer.tokens:
            answer.matched = answer.tokens[-1]  # the model's own end
        params = self._options(step.choice).params
        if params.no_stop_trim and answer.finish == "stop":
            if isinstance(answer.matched, str):
                answer.text += answer.matched
            elif not params.skip_special_tokens or answer.matched not in self._tokenizer.specials:
                answer.text += self._tokenizer.token(answer.matched)[0] if answer.matched is not None else ""

    def _answer(self, choice: int) -> dict[str, Any]:
        answer = self._answers[choice]
        return {"text": answer.text, "output_ids": answer.tokens, "meta_info": self._facts(choice)}

    def _facts(self, choice: int) -> dict[str, Any]:
        answer, options = self._answers[choice], self._options(choice)
        submit = self._generation.prepared.submits[choice // self._n]
        index = choice % self._n
        facts: dict[str, Any] = {
            "id": options.id if self._n == 1 else f"{options.id}_{index}",
            "finish_reason": _reason(answer),
            "prompt_tokens": len(submit.ids),
            "completion_tokens": len(answer.tokens),
            "weight_version": self._version(),
        }
        timing = self._generation.totals.timings.get(choice)
        if timing is not None:
            facts |= {
                "cached_tokens": timing.cached_tokens,
                "total_retractions": timing.preemptions,
                "e2e_latency": time.perf_counter() - self._begun,
            }
            facts |= version_spans(timing.versions)
        return facts | (self._scores(choice) if options.return_logprob else {})

    def _scores(self, choice: int) -> dict[str, Any]:
        answer, options = self._answers[choice], self._options(choice)
        submit = self._generation.prepared.submits[choice // self._n]
        # The n answers of one prompt share its scores, which come with the first.
        prompt = self._answers[choice - choice % self._n].prompt
        if options.logprob_start > 0:  # the token before, whose own score nothing gives
            prompt = prompt[1:]
        ids = submit.ids[len(submit.ids) - len(prompt) :]
        found: dict[str, list[Any]] = {
            "input_token_logprobs": [
                self._pair(None if score is None else score.logprob, id)
                for score, id in zip(prompt, ids, strict=True)
            ],
            "output_token_logprobs": [self._pair(score.logprob, score.token) for score in answer.scored],
        }
        if options.top_logprobs:
            found["input_top_logprobs"] = [self._top(score) for score in prompt]
            found["output_top_logprobs"] = [self._top(score) for score in answer.scored]
        if options.logprob_ids:
            found["input_token_ids_logprobs"] = [self._asked(score, choice) for score in prompt]
            found["output_token_ids_logprobs"] = [self._asked(score, choice) for score in answer.scored]
        return found

    def _top(self, score: TokenLogprob | None) -> list[Any] | None:
        return None if score is None else [self._pair(logprob, id) for id, logprob in score.top]

    def _asked(self, score: TokenLogprob | None, choice: int) -> list[Any] | None:
        ids = self._options(choice).logprob_ids
        if score is None:
            return None
        return [self._pair(logprob, id) for id, logprob in zip(ids, score.asked, strict=True)]

    def _pair(self, logprob: float | None, id: int) -> list[Any]:
        text = self._tokenizer.token(id)[0] if self._texts else None
        return [None if logprob is None else finite(logprob), id, text]


def _reason(answer: _Answer) -> dict[str, Any] | None:
    """Return why an answer has ended."""
    if answer.finish is None:
        return None
    if answer.finish == "stop":
        return {"type": "stop", "matched": answer.matched}
    if answer.finish == "length":
        return {"type": "length", "length": len(answer.tokens)}
    return {"type": "abort", "message": "the request was aborted"}
