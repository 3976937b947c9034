"""Prompts and conversations through a language model: continuations and answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from torchwright.core.errors import WorkloadError
from torchwright.map.options import ModelOptions
from torchwright.map.tasks.base import Answer, Rejected, Task, TaskSpec
from torchwright.map.tasks.texts import text_fault
from torchwright.serve.api_error import ApiError
from torchwright.serve.offline.requests import CHAT, COMPLETIONS, Asked, OfflineServer
from torchwright.serve.options import EngineOptions

NEW_TOKENS = 64
"""The default of `torchwright generate`: a base model does not end by itself."""
ALONE = ("messages", "prompt", "stream", "model", "n")
"""Fields of a request that the rows and the task decide."""


def engine_options(model: ModelOptions) -> EngineOptions:
    """Return the engine's options for those of a run."""
    return EngineOptions(
        model=model.model,
        trust=model.trust,
        quantize=model.quantize,
        kv=model.kv,
        dtype=model.dtype,
        adapter=model.adapter,
        kv_memory=model.kv_memory,
        max_running=model.max_running,
        deterministic=model.deterministic,
        # A part's requests are bounded here already.
        max_queue=max(EngineOptions.max_queue, 4 * model.max_running),
    )


class GenerateTask(Task):
    """Continues texts, and answers conversations through the chat template; greedy unless asked otherwise."""

    def __init__(self, spec: TaskSpec) -> None:
        options = spec.options
        if decided := [name for name in ALONE if name in options.request]:
            raise WorkloadError(
                f"--request may not have {', '.join(decided)}", next="--openai takes whole requests"
            )
        assert options.text_column is not None, "the plan names the column"
        self._column, self._chat = options.text_column, options.chat
        self._request = {"temperature": 0, **options.request}
        self._server = OfflineServer(engine_options(spec.model))
        self.notices = self._server.engine.ready.notices

    def answer(self, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[int, Answer]]:
        places, requests = list[int](), list[Asked]()
        for place, row in enumerate(rows):
            value = row.get(self._column)
            if not isinstance(value, list) and (fault := text_fault(row, self._column)):
                yield place, Rejected(fault)
                continue
            places.append(place)
            requests.append(self._asked(value))
        for place, found in zip(places, self._server.answer(requests), strict=True):
            yield place, Rejected(found.message) if isinstance(found, ApiError) else _shortened(found)

    def close(self) -> None:
        self._server.close()

    def _asked(self, value: Any) -> Asked:
        if self._chat and isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if isinstance(value, list):
            return Asked(CHAT, msgspec.json.encode({"messages": value, **self._request}))
        # A translation ends where the model ends it.
        most = {} if self._server.engine.ready.answer is not None else {"max_tokens": NEW_TOKENS}
        completion = {"prompt": value, **most, **self._request}
        return Asked(COMPLETIONS, msgspec.json.encode(completion))


def _shortened(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what a row's user wants of an answer in OpenAI's form."""
    choice, usage = answer["choices"][0], answer["usage"]
    message = choice.get("message")
    found = {
        "text": choice["text"] if message is None else message["content"] or "",
        "finish_reason": choice["finish_reason"],
        "prompt_tokens": usage["prompt_tokens"],
        "new_tokens": usage["completion_tokens"],
    }
    extra = (
        {}
        if message is None
        else {key: message[key] for key in ("reasoning", "tool_calls") if key in message}
    )
    return found | extra
