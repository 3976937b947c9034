"""Language models: prompts, conversations and OpenAI's batch files through the engine in the worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from folders import causal, save, write_json
from torchwright.core.errors import WorkloadError
from torchwright.map.model import find_model
from torchwright.map.options import ModelOptions, TaskName, TaskOptions
from torchwright.map.tasks.base import Answer, Rejected, Task, TaskSpec
from torchwright.map.tasks.registry import open_task

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}assistant:"
TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(causal(hidden_size=64, head_dim=16), tmp_path_factory.mktemp("causal") / "tiny")
    write_json(path / "tokenizer_config.json", {"eos_token": "</s>", "chat_template": TEMPLATE})
    return path


def opened(folder: Path, name: TaskName, column: str | None = None, **options: Any) -> Task:
    found = find_model(str(folder), name)
    return open_task(
        TaskSpec(
            task=name,
            kind=found.kind,
            folder=str(found.folder),
            artifact=None,
            model=ModelOptions(model=str(folder), kv_memory=2**22, max_running=4),
            options=TaskOptions(text_column=column, **options),
            name=found.name,
        )
    )


@pytest.fixture
def closing() -> Iterator[list[Task]]:
    tasks = list[Task]()
    yield tasks
    for task in tasks:
        task.close()


def answers(task: Task, rows: list[dict[str, Any]]) -> list[Answer]:
    found = dict(task.answer(rows))
    return [found[place] for place in range(len(rows))]


def test_texts_are_continued_and_conversations_answered(folder: Path, closing: list[Task]) -> None:
    task = opened(folder, "generate", "prompt", request={"max_tokens": 6})
    closing.append(task)
    rows: list[dict[str, Any]] = [
        {"prompt": "once"},
        {"prompt": TALK},
        {"prompt": None},
        {"prompt": "x" * 400},
        {"prompt": [{"role": "nobody", "content": "hi"}]},
        {"prompt": "once"},
    ]
    text, talk, none, long, wrong, again = answers(task, rows)
    assert isinstance(text, dict)
    assert isinstance(talk, dict)
    assert text == again  # greedy, whatever runs beside it
    assert 1 <= text["new_tokens"] <= 6
    assert talk["prompt_tokens"] > text["prompt_tokens"]
    assert none == Rejected("there is no 'prompt'")
    assert isinstance(long, Rejected)
    assert "context is 256 tokens" in long.reason
    assert isinstance(wrong, Rejected)


def test_chat_makes_a_text_a_message(folder: Path, closing: list[Task]) -> None:
    task = opened(folder, "generate", "prompt", chat=True, request={"max_tokens": 6})
    closing.append(task)
    as_text, as_talk = answers(task, [{"prompt": "hi"}, {"prompt": TALK}])
    assert as_text == as_talk


@pytest.mark.parametrize("name", ["n", "stream", "messages"])
def test_fields_that_rows_decide_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(WorkloadError, match=f"may not have {name}"):
        opened(folder, "generate", "prompt", request={name: 1})


def test_a_batch_file_is_answered_in_its_own_form(folder: Path, closing: list[Task]) -> None:
    task = opened(folder, "openai")
    closing.append(task)
    head = {"method": "POST", "url": "/v1/chat/completions"}
    body = {"messages": TALK, "max_tokens": 4, "temperature": 0}
    rows: list[dict[str, Any]] = [
        {**head, "custom_id": "same", "body": body},
        {**head, "custom_id": "same", "body": body},
        {**head, "custom_id": "model", "body": {**body, "model": "tiny"}},
        {**head, "custom_id": "other", "body": {**body, "model": "gpt-4o"}},
        {**head, "custom_id": "url", "url": "/v1/embeddings", "body": {"input": "x"}},
        {**head, "custom_id": "none"},
    ]
    one, two, named, *failed = answers(task, rows)
    texts = []
    for answer in (one, two, named):
        assert isinstance(answer, dict)
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        texts.append(answer["response"]["body"]["choices"][0]["message"]["content"])
    assert len(set(texts)) == 1
    assert isinstance(one, dict)
    assert isinstance(two, dict)
    assert one["custom_id"] == two["custom_id"] == "same"
    assert one["id"] != two["id"]
    statuses = [
        one.body["response"]["status_code"] for one in failed if isinstance(one, Rejected) and one.body
    ]
    assert statuses == [404, 404, 400]
