"""Render a row of any form to texts, with the spans of characters that are trained on.

Of conversations and completions that is the assistant's part. Spans are marked in the rendered text, so that tokens
find them by the places they come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from torchwright.hub.chat_template import ChatTemplate
from torchwright.train.data.layouts import NEEDS, ColumnLayout
from torchwright.train.data.messages import RowFault, plain_switches
from torchwright.train.data.turns import Marked, Stops, conversation, shared_length

TRANSCRIPT = re.compile(r"\n\n(Human|Assistant):")
"""Marks that begin a turn in the transcripts of HH-RLHF."""
SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def render(
    layout: ColumnLayout,
    values: Mapping[str, Any],
    columns: Mapping[str, str],
    chat: ChatTemplate,
    stops: Stops,
    labels: Sequence[str] = (),
) -> list[Marked]:
    """Return the texts of a row; none where its text is empty.

    A preference has two, the chosen one first. A conversation has several where its template asks for it. `labels`
    are the names of classes. Raises `RowFault`.
    """
    missing = [need for need in layout.needs if values.get(need) is None]
    if missing:
        raise RowFault(f"no '{missing[0]}' (columns: {', '.join(sorted(map(str, values)))})")
    if not layout.ours:
        values, columns = layout.convert(values), {}
    named = {need: columns.get(need, need) for need in ("prompt", *NEEDS[layout.form])}
    parts = [values[named[need]] for need in NEEDS[layout.form]]
    if layout.form == "text":
        text = _text(parts[0], named["text"])
        return [Marked(text=text)] if text.strip() else []
    if layout.form == "classification":
        return [Marked(text=_filled(parts[0], named["text"]), closing=_class(parts[1], labels))]
    if layout.form == "embedding":
        return [
            Marked(text=_filled(part, named[name]), closing=0)
            for part, name in zip(parts, NEEDS[layout.form], strict=True)
        ]
    speaker = _Speaker(chat, values.get("tools"), stops, plain_switches(values.get("chat_template_kwargs")))
    if layout.form == "chat":
        return speaker.talked(parts[0])
    if layout.form == "completion":
        if values.get("label") is False:
            raise RowFault("its 'label' is false: the completion is one that is not wanted")
        return speaker.answered(*parts)
    prompt = values.get(named["prompt"])
    if prompt is None and all(isinstance(part, dict) for part in parts):  # axolotl's pairs: one message each
        prompt = values.get("messages")
    return speaker.pair(prompt, *([part] if isinstance(part, dict) else part for part in parts))


class _Speaker:
    """Renders prompts and answers, which are texts or messages, by a chat template."""

    def __init__(self, chat: ChatTemplate, tools: Any, stops: Stops, switches: Mapping[str, Any]) -> None:
        self.chat, self.tools, self.stops, self.switches = chat, tools, stops, switches

    def talked(self, messages: Any, first: int = 0) -> list[Marked]:
        """Return the texts of a conversation."""
        return conversation(messages, self.chat, self.tools, self.stops, first, self.switches)

    def answered(self, prompt: Any, answer: Any) -> list[Marked]:
        """Return a prompt with what follows it; that alone is trained on."""
        if isinstance(answer, list) and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and isinstance(answer, list):
            return self.talked([*prompt, *answer], first=len(prompt))
        if isinstance(prompt, list) and isinstance(answer, str):
            return self.answered(prompt, [{"role": "assistant", "content": answer}])
        prompt, answer = _text(prompt, "prompt"), _text(answer, "completion")
        if not answer:
            raise RowFault("the completion is empty: nothing of the row is trained on")
        return [Marked(text=prompt + answer, spans=((len(prompt), len(prompt) + len(answer)),))]

    def pair(self, prompt: Any, chosen: Any, rejected: Any) -> list[Marked]:
        """Return the chosen and the rejected answer, each behind the prompt."""
        if chosen == rejected:
            raise RowFault("the chosen and the rejected answer are the same: nothing is preferred")
        answers = [_transcript(answer) for answer in (chosen, rejected)]
        if all(isinstance(answer, list) for answer in answers) and _holds_prompt(prompt, answers):
            shared = _shared(*answers)
            prompt, answers = answers[0][:shared], [answer[shared:] for answer in answers]
        elif prompt is None:
            if not all(isinstance(answer, str) for answer in answers):
                raise RowFault("no 'prompt', and the answers are neither both texts nor both conversations")
            prompt, *answers = _split_texts(*answers)
        found = [self.answered(prompt, answer) for answer in answers]
        if any(len(texts) != 1 for texts in found):
            raise RowFault(
                "the chat template writes earlier turns otherwise once others follow, and a preference has one "
                "text for each answer"
            )
        return [text for texts in found for text in texts]


def _transcript(answer: Any) -> Any:
    """Return the messages of a transcript as HH-RLHF has them; anything else unchanged."""
    if not isinstance(answer, str) or not TRANSCRIPT.match(answer):
        return answer
    _, *parts = TRANSCRIPT.split(answer)
    return [
        {"role": SPEAKERS[speaker], "content": text.strip()}
        for speaker, text in zip(parts[::2], parts[1::2], strict=True)
    ]


def _holds_prompt(prompt: Any, answers: Sequence[list[Any]]) -> bool:
    """Check whether conversations hold their prompt: no prompt is given, or they begin with it."""
    if prompt is None:
        return True
    if isinstance(prompt, list):
        return all(answer[: len(prompt)] == prompt for answer in answers)
    first = answers[0][0] if answers[0] else None
    return isinstance(first, dict) and first.get("role", first.get("from")) not in (
        "assistant",
        "gpt",
        "tool",
    )


def _shared(one: list[Any], other: list[Any]) -> int:
    """Return how many messages two conversations begin with alike; the last of each is an answer."""
    pairs = zip(one[:-1], other[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], pairs))


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return what two texts begin with alike, up to the space before the first word that differs, and their rests."""
    place = shared_length(chosen, rejected)
    if place and chosen[place - 1] == " ":
        place -= 1
    if not place:
        raise RowFault("no 'prompt', and the two answers begin with nothing in common that could be one")
    return chosen[:place], chosen[place:], rejected[place:]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowFault(f"'{name}' is no text, but {type(value).__name__}")
    return value


def _filled(value: Any, name: str) -> str:
    text = _text(value, name)
    if not text.strip():
        raise RowFault(f"'{name}' is empty")
    return text


def _class(label: Any, labels: Sequence[str]) -> int:
    """Return the place of a class that is named, or that is its place already, as a whole number in any type."""
    if isinstance(label, str) and label in labels:
        return labels.index(label)
    if isinstance(label, str) and label.isdecimal():  # CSV has text alone
        label = int(label)
    if isinstance(label, float) and label.is_integer():  # a column with gaps becomes floats in pandas
        label = int(label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(labels):
        return label
    raise RowFault(f"the unknown class {str(label)[:40]!r} (head.labels: {', '.join(labels)[:200]})")


def covered(offsets_N2: np.ndarray, spans: tuple[tuple[int, int], ...]) -> np.ndarray:
    """(N,): whether each token's last character lies in a span; of each token, where its characters begin and end."""
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
    if not len(ends):
        return np.zeros(len(offsets_N2), bool)
    first_N, behind_N = offsets_N2.T
    # Spans are in their order: the one that a token can lie in is the first that ends no earlier.
    at_N = np.minimum(np.searchsorted(ends, behind_N), len(ends) - 1)
    return (first_N < behind_N) & (behind_N > begins[at_N]) & (behind_N <= ends[at_N])
