"""Agents against the server: the requests that they send, and openai-agents with both of its model classes.

The fake engine repeats the last message, so that a person's words are a call and a tool's result the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from http_support import MODEL, Running, serving
from test_http_reasoning import ECHO

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.serve.agent_requests import AGENTS, agent_checks

PROGRAM = f"""
import asyncio, json
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

class Found(BaseModel):
    ok: bool

@function_tool
def add(a: int, b: int) -> str:
    return str(a + b)

async def talk(model):
    agent = Agent(name="a", instructions="Be brief.", model=model, tools=[add])
    call = '{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}'
    called = await Runner.run(agent, f"<think>hm</think><tool_call>{{call}}</tool_call>")
    again = await Runner.run(agent, [*called.to_input_list(), {{"role": "user", "content": "<think>so</think>Again."}}])
    streamed = Runner.run_streamed(agent, "Streamed.")
    events = [event.type async for event in streamed.stream_events()]
    formed = await Runner.run(Agent(name="b", model=model, output_type=Found), '{{"ok": true}}')
    return [called.final_output, again.final_output, streamed.final_output, len(events) > 1, formed.final_output.ok]

async def main():
    set_tracing_disabled(True)
    chat = OpenAIChatCompletionsModel("{MODEL}", AsyncOpenAI())
    print(json.dumps([await talk("{MODEL}"), await talk(chat)]))

asyncio.run(main())
"""


@pytest.mark.slow
def test_agents_call_tools_and_go_on() -> None:
    python = os.environ.get("OPENAI_AGENTS_PYTHON") or (sys.executable if find_spec("agents") else None)
    if python is None:
        pytest.skip("no openai-agents here: OPENAI_AGENTS_PYTHON=PATH names another environment's Python")
    with serving(template=ECHO) as running:
        names = {"OPENAI_BASE_URL": f"{running.url}/v1", "OPENAI_API_KEY": "unused", "PYTHONPATH": ""}
        done = subprocess.run(
            [python, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env={**os.environ, **names}
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [["3", "Again.", "Streamed.", True, True]] * 2


# As Qwen 3.5's: one system message, and only at the beginning.
SYSTEM_FIRST = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{- raise_exception('System message must be first.') }}{%- endif %}
{{- '<' + message.role + '>' }}{%- if message.content %}{{- message.content }}{%- endif %}
{%- endfor %}{%- if tools %}{{- tools | tojson }}{%- endif %}<assistant>"""


@pytest.fixture(scope="module", params=[None, SYSTEM_FIRST], ids=["plain", "one system message"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving(template=request.param) as found:
        yield found


@pytest.mark.plain("plain-Codex")
@pytest.mark.parametrize("name", AGENTS)
def test_what_an_agent_sends_is_answered(name: str, running: Running) -> None:
    for feature, check in agent_checks(name, running.url, MODEL, "unused").items():
        assert check(), feature
