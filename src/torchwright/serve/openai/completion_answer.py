"""The answer to POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchwright.hub.text_stream import TextStream
from torchwright.serve.openai.answers import Choice, Facts, finite
from torchwright.serve.openai.generation import ChoiceUpdate
from torchwright.serve.wire.messages import TokenLogprob


class CompletionAnswer:
    """Answers POST /v1/completions."""

    def __init__(self, facts: Facts, *, echo: Sequence[list[int]] | None, logprobs: bool) -> None:
        self._facts, self._logprobs = facts, logprobs
        n = facts.generation.prepared.n
        self._choices = [Choice() for _ in range(n * len(facts.generation.prepared.submits))]
        self._head = facts.head("text_completion")
        self._prompt_logprobs: dict[int, list[TokenLogprob | None]] = {}
        self._echo = {
            choice: facts.tokenizer.whole(echo[choice // n]) for choice in range(len(self._choices)) if echo
        }
        contexts = facts.generation.prepared.contexts
        self._texts = [
            TextStream(facts.tokenizer, *(([], "") if echo else contexts[choice // n]))
            for choice in range(len(self._choices) if logprobs else 0)
        ]
        """Return the offset of each scored token in a choice's text."""

    def put(self, step: ChoiceUpdate) -> None:
        choice = self._choices[step.choice]
        choice.text.append(step.text)
        choice.logprobs.extend(self._facts.scored(step))
        choice.tokens.extend(step.tokens)
        if step.prompt_logprobs is not None:
            self._prompt_logprobs[step.choice] = step.prompt_logprobs
        if step.finish:
            choice.finish, choice.stop_reason = step.finish, step.stop_reason

    def whole(self) -> dict[str, Any]:
        n = self._facts.generation.prepared.n
        choices = []
        for index, choice in enumerate(self._choices):
            # The n answers of one prompt share its scores, which come with the first.
            scored = [*self._prompt_logprobs.get(index - index % n, []), *choice.logprobs]
            text = self._echo.get(index, "") + "".join(choice.text)
            ids = self._facts.prompt_ids(index) | self._facts.ids(choice.tokens)
            choices.append(self._choice(index, text, choice, scored) | ids)
        return self._facts.whole(self._head, choices)

    def begin(self) -> bytes:
        chunks = (self._choice(index, text, Choice(), []) for index, text in self._echo.items())
        return b"".join(self._facts.chunk(self._head, chunk) for chunk in chunks)

    def events(self, step: ChoiceUpdate) -> bytes:
        choice = self._choices[step.choice]
        if step.finish:
            choice.finish, choice.stop_reason = step.finish, step.stop_reason
        chunk = self._choice(step.choice, step.text, choice, list(self._facts.scored(step)))
        if not choice.tokens:  # the first event
            chunk |= self._facts.prompt_ids(step.choice)
            choice.tokens.extend(step.tokens[:1])
        chunk |= self._facts.ids(step.tokens)
        return self._facts.chunk(self._head, chunk)

    def end(self) -> bytes:
        return self._facts.end(self._head)

    def _choice(
        self, index: int, text: str, choice: Choice, scored: list[TokenLogprob | None]
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._scores(choice, scored, index) if self._logprobs else None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }

    def _scores(self, choice: Choice, scored: list[TokenLogprob | None], index: int) -> dict[str, Any]:
        """OpenAI's older form. A prompt's first token has no probability."""
        token = self._facts.token
        prepared = self._facts.generation.prepared
        ids = prepared.submits[index // prepared.n].ids
        texts = [token(ids[0])[0] if score is None else token(score.token)[0] for score in scored]
        offsets = []
        for place, score in enumerate(scored):
            offsets.append(choice.offset)
            choice.offset += len(self._texts[index].put(ids[place] if score is None else score.token))
        return {
            "tokens": texts,
            "token_logprobs": [None if score is None else finite(score.logprob) for score in scored],
            "top_logprobs": [
                None if score is None else {token(id)[0]: finite(logprob) for id, logprob in score.top}
                for score in scored
            ],
            "text_offset": offsets,
        }
