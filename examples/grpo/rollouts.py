"""Answers drawn from the engine, a group for each question, with the log-probability of each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sums import END, LONGEST_ANSWER, Sum, encode, question, reward
from torchwright.serve.engine.engine import ServingEngine
from torchwright.serve.wire.messages import SamplingOptions, Submit


@dataclass
class Answer:
    """One answer as it was drawn."""

    asked: Sum
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each token, under the weights that sampled it."""

    @property
    def reward(self) -> float:
        return reward(self.asked, self.tokens)


class Rollouts:
    """Keeps `load` questions with the engine, each answered `group` times."""

    def __init__(self, engine: ServingEngine, questions: Iterator[Sum], *, group: int, load: int) -> None:
        self.engine, self.questions, self.group, self.load = engine, questions, group, load
        self._number = 0
        self._open: dict[str, list[Answer]] = {}
        self._missing: dict[str, int] = {}
        self._whole: list[list[Answer]] = []

    @property
    def under_way(self) -> int:
        """Questions whose answers are not whole."""
        return len(self._open)

    def take(self, groups: int) -> list[list[Answer]]:
        """The next so many whole groups, in the order in which they end; the next answers are begun when it returns."""
        while len(self._whole) < groups:
            self._step()
        taken, self._whole = self._whole[:groups], self._whole[groups:]
        self._step()
        return taken

    def close(self) -> None:
        """End what is under way."""
        self.engine.cancel_all("training has ended")
        while not self.engine.idle:
            self.engine.step()

    def _step(self) -> None:
        """Ask until `load` questions are open, and let the engine draw a token of each answer."""
        while self.under_way < self.load:
            self._ask(next(self.questions))
        for output in self.engine.step().outputs:
            answer = self._open[output.id][output.index]
            answer.tokens += output.tokens
            answer.logprobs += [told.logprob for told in output.logprobs or []]
            if output.finish is not None:
                self._missing[output.id] -= 1
                if not self._missing[output.id]:
                    self._whole.append(self._open.pop(output.id))

    def _ask(self, asked: Sum) -> None:
        self._number += 1
        id = str(self._number)
        self._open[id] = [Answer(asked) for _ in range(self.group)]
        self._missing[id] = self.group
        sampling = SamplingOptions(temperature=1.0, seed=self._number)
        submit = Submit(
            id=id,
            ids=encode(question(asked)),
            max_tokens=LONGEST_ANSWER,
            stop_ids=[END],
            n=self.group,
            logprobs=0,
            sampling=sampling,
        )
        refused = self.engine.submit(submit)
        assert refused is None, refused


def exact_match(engine: ServingEngine, questions: list[Sum]) -> float:
    """Share of the questions whose most likely answer is right; the engine must be idle."""
    answers = {str(place): Answer(asked) for place, asked in enumerate(questions)}
    for id, answer in answers.items():
        ids, greedy = encode(question(answer.asked)), SamplingOptions(temperature=0.0)
        refused = engine.submit(
            Submit(id=id, ids=ids, max_tokens=LONGEST_ANSWER, stop_ids=[END], sampling=greedy)
        )
        assert refused is None, refused
    while not engine.idle:
        for output in engine.step().outputs:
            answers[output.id].tokens += output.tokens
    return sum(answer.reward for answer in answers.values()) / len(answers)
