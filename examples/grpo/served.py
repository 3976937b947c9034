"""The same by HTTP: answers drawn from `torchwright serve`, and the trainer's weights on their way there."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx

from rollouts import Answer
from sums import END, LONGEST_ANSWER, Sum, encode, question

STEPS_KEPT = "{:06d}"
"""Name of the folder of a step's weights."""


class Server:
    """A server that takes weights from one folder; the version of its weights is the step's number."""

    def __init__(self, url: str, weights: Path) -> None:
        self.url, self.weights = url, weights
        self._http = httpx.Client(base_url=url, timeout=120)
        self._step = 0

    def next_folder(self) -> Path:
        """Return a new folder for the next step's weights."""
        self._step += 1
        return self.weights / STEPS_KEPT.format(self._step)

    def update(self, folder: Path) -> None:
        """Have the server go on with the weights in a folder; answered when the next token comes of them."""
        self._post(
            "/update_weights_from_disk", {"model_path": folder.name, "weight_version": str(self._step)}
        )

    def draw(self, asked: Sum, *, count: int, **params: Any) -> list[Answer]:
        """Answers to one question, with the log-probability of each token when it was drawn."""
        params = {"max_new_tokens": LONGEST_ANSWER, "stop_token_ids": [END], "n": count} | params
        body = {"input_ids": encode(question(asked)), "sampling_params": params, "return_logprob": True}
        found = self._post("/generate", body)
        rows = [found] if count == 1 else found
        return [
            Answer(
                asked,
                row["output_ids"],
                [logprob for logprob, _, _ in row["meta_info"]["output_token_logprobs"]],
            )
            for row in rows
        ]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = self._http.post(path, json=body)
        if response.status_code != 200:
            raise RuntimeError(f"{path}: {response.text}")
        return response.json()


class ServedRollouts:
    """Keeps `load` questions with the server, each answered `group` times."""

    def __init__(self, server: Server, questions: Iterator[Sum], *, group: int, load: int) -> None:
        self._server, self._questions, self._group = server, questions, group
        self._threads = ThreadPoolExecutor(load)
        self._open: set[Future[list[Answer]]] = set()
        self._load, self._number = load, 0

    @property
    def under_way(self) -> int:
        """Questions whose answers are not whole."""
        return len(self._open)

    def take(self, groups: int) -> list[list[Answer]]:
        """The next so many groups, in the order in which they end; the next answers are begun when it returns."""
        whole = list[list[Answer]]()
        while len(whole) < groups:
            self._ask()
            ended, self._open = wait(self._open, return_when=FIRST_COMPLETED)
            whole += [one.result() for one in ended]
        self._ask()
        return whole

    def close(self) -> None:
        """Wait for what is under way."""
        self._threads.shutdown(cancel_futures=True)

    def _ask(self) -> None:
        while len(self._open) < self._load:
            self._number += 1
            asked = next(self._questions)
            params = {"count": self._group, "temperature": 1.0, "sampling_seed": self._number}
            self._open.add(self._threads.submit(self._server.draw, asked, **params))


def exact_match(server: Server, questions: list[Sum]) -> float:
    """Share of the questions whose most likely answer is right."""
    with ThreadPoolExecutor(32) as threads:
        drawn = threads.map(lambda asked: server.draw(asked, count=1, temperature=0.0), questions)
        return sum(answer.reward for (answer,) in drawn) / len(questions)


@contextlib.contextmanager
def serving(model: Path, *, answers: int) -> Iterator[Server]:
    """Yield `torchwright serve` with a model in bfloat16, ready; `answers` may be under way."""
    with tempfile.TemporaryDirectory() as weights:
        options = ["--dtype", "bf16", "--allow-weights", weights, "--speculate", "none"]
        options += ["--max-queue", str(answers), "--max-running", "256", "--step-tokens", "2048"]
        command = [sys.executable, "-u", "-m", "torchwright", "serve", str(model), "--port", "0", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if match := re.search(r" at (http://\S+) after ", line):
                    yield Server(match[1], Path(weights))
                    return
            raise RuntimeError(f"the server ended with {process.wait()}")
        finally:
            process.terminate()
            process.wait(60)
            process.stdout.close()
