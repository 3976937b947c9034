"""The answer to POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchwright.serve.formats.reader import CallArguments, CallBegin, Event, Reasoning, Text
from torchwright.serve.openai.answers import Choice, Facts, finite
from torchwright.serve.openai.generation import ChoiceUpdate
from torchwright.serve.wire.messages import TokenLogprob


class ChatAnswer:
    """Answers POST /v1/chat/completions."""

    def __init__(self, facts: Facts, *, logprobs: bool) -> None:
        self._facts, self._logprobs = facts, logprobs
        self._choices = [Choice() for _ in range(facts.generation.prepared.n)]
        self._head = facts.head("chat.completion.chunk")

    def put(self, step: ChoiceUpdate) -> None:
        choice = self._choices[step.choice]
        choice.logprobs.extend(self._facts.scored(step))
        choice.tokens.extend(step.tokens)
        for item in self._read(step):
            if isinstance(item, Text):
                choice.text.append(item.text)
            elif isinstance(item, Reasoning):
                choice.reasoning.append(item.text)
            elif isinstance(item, CallBegin):
                function = {"name": item.name, "arguments": ""}
                choice.calls.append({"id": item.id, "type": "function", "function": function})
            else:
                choice.calls[item.index]["function"]["arguments"] += item.text

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self._choices):
            text = "".join(choice.text)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": None if choice.calls and not text else text,
                "refusal": None,
            }
            if choice.reasoning:
                message |= _reasoning("".join(choice.reasoning))
            if choice.calls:
                message["tool_calls"] = choice.calls
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._scores(choice.logprobs),
                    "finish_reason": choice.finish,
                    "stop_reason": choice.stop_reason,
                    **self._facts.ids(choice.tokens),
                }
            )
        head = self._facts.head("chat.completion") | self._facts.prompt_ids(0)
        return self._facts.whole(head, choices)

    def begin(self) -> bytes:
        return b"".join(
            self._chunk(index, {"role": "assistant", "content": ""}, more=self._facts.prompt_ids(index))
            for index in range(len(self._choices))
        )

    def events(self, step: ChoiceUpdate) -> bytes:
        deltas = [_delta(item) for item in self._read(step)]
        if not deltas and (step.finish or self._facts.scored(step) or self._facts.ids(step.tokens)):
            deltas = [{}]
        last = len(deltas) - 1
        return b"".join(
            self._chunk(step.choice, delta, step if place == last else None)
            for place, delta in enumerate(deltas)
        )

    def end(self) -> bytes:
        return self._facts.end(self._head)

    def _read(self, step: ChoiceUpdate) -> list[Event]:
        choice = self._choices[step.choice]
        choice.called |= any(isinstance(event, CallBegin) for event in step.events)
        if step.finish:
            choice.finish = "tool_calls" if choice.called and step.finish == "stop" else step.finish
            choice.stop_reason = step.stop_reason
        return step.events

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        step: ChoiceUpdate | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return one event; `more` are fields next to its choices."""
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if step is not None:
            choice["logprobs"] = self._scores(self._facts.scored(step))
            choice |= self._facts.ids(step.tokens)
            if step.finish:
                choice["finish_reason"] = self._choices[index].finish
                choice["stop_reason"] = self._choices[index].stop_reason
        return self._facts.chunk(self._head | dict(more or {}), choice)

    def _scores(self, scored: Sequence[TokenLogprob | None]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        token = self._facts.token
        content = []
        for score in scored:
            assert score is not None, "only a prompt's first token has no score"
            top = [_score(*token(id), logprob) for id, logprob in score.top]
            content.append(_score(*token(score.token), score.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}


def _reasoning(text: str) -> dict[str, Any]:
    """Return reasoning under both names that clients read: DeepSeek's, and vLLM's and OpenRouter's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _delta(item: Event) -> dict[str, Any]:
    if isinstance(item, Text):
        return {"content": item.text}
    if isinstance(item, Reasoning):
        return _reasoning(item.text)
    if isinstance(item, CallArguments):
        return {"tool_calls": [{"index": item.index, "function": {"arguments": item.text}}]}
    function = {"name": item.name, "arguments": ""}
    return {"tool_calls": [{"index": item.index, "id": item.id, "type": "function", "function": function}]}


def _score(text: str, raw: list[int], logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": raw}
