"""Requests as coding agents and Open WebUI send them, field by field; their texts and lengths are shortened.

`clients.py` sends them and writes the results. Each agent has a first turn with its tools, and a later one
in which a tool's result comes back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command."},
        "timeout": {"type": "number"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
ASKED, SYSTEM = "List the files.", "You are a coding agent."
RESULT = "README.md\nsrc"
ANSWER_TOKENS = 32
"""Agents ask for thousands; the bundled model's context is short."""
FUNCTION = {"name": "shell", "description": "Run a command.", "parameters": PARAMETERS}
REMINDER = {"role": "system", "content": "Available agent types: general."}
"""Claude Code's second message, behind the question."""


def claude_code(model: str, *, later: bool) -> dict[str, Any]:
    cached = {"cache_control": {"type": "ephemeral"}}
    text = lambda words: {"type": "text", "text": words, **cached}
    call = {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_01",
        "content": RESULT,
        "is_error": False,
        **cached,
    }
    thought = {"type": "thinking", "thinking": "ls", "signature": ""}
    turns = [{"role": "assistant", "content": [thought, call]}, {"role": "user", "content": [result]}]
    return {
        "model": model,
        "max_tokens": ANSWER_TOKENS,
        "system": [text(SYSTEM), text("Be brief.")],
        "messages": [{"role": "user", "content": [text(ASKED)]}, REMINDER, *(turns if later else [])],
        "tools": [{"name": "Bash", "description": "Run a command.", "input_schema": PARAMETERS}],
        "metadata": {"user_id": "user_1_account__session_1"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }


def codex(model: str, *, later: bool) -> dict[str, Any]:
    def message(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    turns = [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"command":"ls"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": RESULT},
    ]
    begun = [message("developer", SYSTEM), message("developer", "Be brief."), message("user", ASKED)]
    return {
        "model": model,
        "input": [*begun, *(turns if later else [])],
        "tools": [{"type": "function", "strict": False, **FUNCTION}, {"type": "web_search"}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-1",
        "text": {"verbosity": "medium"},
        "max_output_tokens": ANSWER_TOKENS,
    }


USAGE: Any = {"stream_options": {"include_usage": True}}


def chat(parts: bool = False, tools: bool = True, **more: Any) -> Callable[..., dict[str, Any]]:
    """Return a request of /v1/chat/completions as a function of the model and the turn."""

    def request(model: str, *, later: bool) -> dict[str, Any]:
        asked: Any = [{"type": "text", "text": ASKED}] if parts else ASKED
        function = {"name": "shell", "arguments": '{"command": "ls"}'}
        call = {"id": "call_1", "type": "function", "index": 0, "function": function}
        turns: list[dict[str, Any]] = [
            {"role": "assistant", "content": "README.md"},
            {"role": "user", "content": "More."},
        ]
        if tools:
            turns = [
                {"role": "assistant", "content": None if parts else "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
            ]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
        body = {"model": model, "messages": [*messages, *(turns if later else [])], "stream": True}
        body |= {"max_tokens": ANSWER_TOKENS, **more}
        return body | ({"tools": [{"type": "function", "function": FUNCTION}]} if tools else {})

    return request


CHAT = "/v1/chat/completions"
AGENTS: Mapping[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "Claude Code": ("/v1/messages?beta=true", claude_code),
    "Codex": ("/v1/responses", codex),
    "Continue": (CHAT, chat(parallel_tool_calls=False, **USAGE)),
    "Cline": (CHAT, chat(parts=True, temperature=0, tool_choice="auto", parallel_tool_calls=False, **USAGE)),
    "aider": (CHAT, chat(tools=False, temperature=0, **USAGE)),
    "Open WebUI": (CHAT, chat(tools=False, **USAGE)),
}
"""Agent → the path that it posts to, and its request."""
WITH_TOOLS = ("Claude Code", "Codex", "Continue", "Cline")


def agent_checks(name: str, url: str, model: str, key: str) -> dict[str, Callable[[], object]]:
    """Return checks of an agent's features, each of which raises or is empty unless the feature works."""
    path, request = AGENTS[name]
    headers = {"authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}

    def post(body: dict[str, Any], to: str = path) -> httpx.Response:
        response = httpx.post(url + to, json=body, headers=headers, timeout=120)
        response.raise_for_status()
        return response

    def streamed(*, later: bool) -> bool:
        found = [
            json.loads(line[6:])
            for line in post(request(model, later=later)).text.splitlines()
            if line.startswith("data: {")
        ]
        return len(found) > 2 and not any("error" in event and event["error"] for event in found)

    def models() -> bool:
        found = httpx.get(f"{url}/v1/models", headers=headers, timeout=60).json()
        return model in [one["id"] for one in found["data"]]

    def counted() -> int:
        body = request(model, later=True)
        asked = {key: body[key] for key in ("model", "system", "messages", "tools", "thinking")}
        return post(asked, "/v1/messages/count_tokens?beta=true").json()["input_tokens"]

    whole = request(model, later=False) | {"stream": False}
    whole.pop("stream_options", None)
    checks: dict[str, Callable[[], object]] = {
        "models": models,
        "chat": lambda: post(whole).json(),
        "stream": lambda: streamed(later=False) and streamed(later=True),
    }
    if name in WITH_TOOLS:
        checks["tools"] = lambda: streamed(later=True)
    return checks | ({"token count": counted} if name == "Claude Code" else {})
