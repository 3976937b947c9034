"""From a task's spec to the task, in the process that computes."""

from __future__ import annotations

from torchwright.map.tasks.base import Task, TaskSpec


def open_task(spec: TaskSpec) -> Task:
    """Open the model and return its task. This imports torch; raises `TorchwrightError` as loading does."""
    match spec.task, spec.kind:
        case "embed" | "score" | "classify", "encoder" | "classifier":
            from torchwright.map.tasks.texts import TextTask

            return TextTask(spec)
        case "classify", "images":
            from torchwright.map.tasks.pictures import PictureTask

            return PictureTask(spec)
        case "transcribe", _:
            from torchwright.map.tasks.sounds import SoundTask

            return SoundTask(spec)
        case "openai", "encoder":
            from torchwright.map.tasks.openai_batch import EmbeddingBatch

            return EmbeddingBatch(spec)
        case "openai", _:
            from torchwright.map.tasks.openai_batch import RequestBatch

            return RequestBatch(spec)
        case _:
            from torchwright.map.tasks.generate import GenerateTask

            return GenerateTask(spec)


def fields_of(spec: TaskSpec) -> dict[str, str]:
    """Return the fields of a task's answers without opening it."""
    vector = {"embedding": "vector"}
    return {
        "embed": vector,
        "classify": {"label": "string", "score": "float"}
        | ({"scores": "json"} if spec.options.all_labels else {}),
        "score": {"score": "float"},
        "transcribe": {"text": "string", "language": "string", "seconds": "float", "segments": "json"},
        "generate": {
            "text": "string",
            "finish_reason": "string",
            "prompt_tokens": "int",
            "new_tokens": "int",
        },
        "openai": {},
    }[spec.task]
