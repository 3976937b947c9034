"""Programs that branch, as SGLang's language runs them, against clients that ask for one branch after another.

    python -m benchmarks.serve.programs [MODEL] [--context 600] [--new 24] [--rounds 5] [--json FILE]

Both send the same prompts to POST /generate, greedy, and get the same texts. The program sends the prompt that its
branches share once with no new tokens, and then all branches at the same time; choices go in one request that scores
only what follows the prompt. The naive client waits for each answer before it asks again, and scores whole prompts; it
talks to a server without a prefix cache (`--no-prefix-cache`). `in turn` is the program one request at a time, with the
cache: what is left of the gain without concurrency. The bundled model without MODEL; `--context` is the length of the
shared text in tokens. Times are medians over rounds, in which the three alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.harness import run
from benchmarks.harness.turns import in_turns
from benchmarks.serve.server import server

AT_ONCE = 16
"""Branches that a program has under way at the same time."""


CHOICE_TOKENS = 2
"""Tokens at the end of a prompt that score a choice."""


class Asker:
    """Sends requests of one program; `forks` says whether branches go at the same time, behind a warmed prefix."""

    def __init__(self, url: str, new: int, *, forks: bool, warms: bool) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        self._new, self._forks, self._warms = new, forks, warms
        self._pool = ThreadPoolExecutor(AT_ONCE)

    def gen(self, text: str, new: int | None = None, **params: Any) -> str:
        tokens = self._new if new is None else new
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} | params
        return self._post({"text": text, "sampling_params": params})["text"]

    def fork(self, text: str, branches: Sequence[str]) -> list[str]:
        """Answers to each branch behind the same text."""
        if self._warms:
            self.gen(text, new=0)
        if self._forks:
            return list(self._pool.map(lambda branch: self.gen(text + branch), branches))
        return [self.gen(text + branch) for branch in branches]

    def select(self, text: str, choices: Sequence[str]) -> str:
        """Return the most likely choice, by the mean log-probability of its tokens."""
        prompts = [text + choice for choice in choices]
        start = 0
        if self._warms:
            prompt = self._post({"text": text, "sampling_params": {"max_new_tokens": 0}})
            start = max(0, prompt["meta_info"]["prompt_tokens"] - CHOICE_TOKENS)
        scored = {
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start,
        }
        if self._forks:
            found = self._post({"text": prompts} | scored)
        else:
            found = [self._post({"text": prompt} | scored) for prompt in prompts]
        tails = [one["meta_info"]["input_token_logprobs"][-CHOICE_TOKENS:] for one in found]
        means = [statistics.mean(score for score, _, _ in tail) for tail in tails]
        return choices[means.index(max(means))]

    def _post(self, body: dict[str, Any]) -> Any:
        response = self._http.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()


def tree_of_thought(ask: Asker, context: str) -> list[str]:
    """Three plans, three solutions of each, and the choice among them."""
    plans = ask.fork(context, [f"\nPlan {i}:" for i in range(3)])
    solutions = [
        ask.fork(f"{context}\nPlan: {plan}", [f"\nSolution {i}:" for i in range(3)]) for plan in plans
    ]
    best = [ask.select(f"{context}\nThe best solution is number", [f" {i}" for i in range(3)])]
    return [*plans, *(text for row in solutions for text in row), *best]


def multi_turn_judge(ask: Asker, context: str) -> list[str]:
    """Judgments of one essay in six respects, and the verdict behind all of them."""
    respects = ("clarity", "originality", "evidence", "style", "depth", "relevance")
    found = ask.fork(context, [f"\nJudge the {respect} of the essay:" for respect in respects])
    return [*found, ask.select(context + "\nThe grade is", [" A", " B", " C", " D"])]


def parallel_expansion(ask: Asker, context: str) -> list[str]:
    """Eight tips, each written out by itself."""
    return ask.fork(context, [f"\nTip number {i}, in detail:" for i in range(8)])


def json_decoding(ask: Asker, context: str) -> list[str]:
    """One record from the text; its fields come one after another in both."""
    form = r'\{"name": "[a-z]{3,8}", "year": [0-9]{4}\}'
    return [ask.gen(f"{context}\nRecord {i}:", new=64, regex=form, ignore_eos=False) for i in range(2)]


def react(ask: Asker, context: str) -> list[str]:
    """Three turns of a thought, a tool that is chosen and its answer, in one growing text."""
    text, found = context, list[str]()
    for turn in range(3):
        found.append(ask.gen(f"{text}\nThought {turn}:"))
        text += f"\nThought {turn}:{found[-1]}\nTool:"
        found.append(ask.select(text, [" search", " compute", " finish"]))
        text += f"{found[-1]}\nObservation: {turn}"
    return found


def retrieval(ask: Asker, context: str) -> list[str]:
    """Five questions to the same document."""
    questions = ("Who?", "When?", "Where?", "Why?", "How?")
    return ask.fork(context, [f"\nQuestion: {question}\nAnswer:" for question in questions])


PROGRAMS: tuple[Callable[[Asker, str], list[str]], ...] = (
    tree_of_thought,
    multi_turn_judge,
    parallel_expansion,
    json_decoding,
    react,
    retrieval,
)


def main() -> None:
    options = run.options(__doc__, "model?", context=600, new=24, rounds=5)
    columns = ("program", "naive, s", "in turn, s", "program, s", "over naive", "over in turn")
    rows = run.Rows(options.json, columns)
    text = (run.BUNDLED / "eval.txt").read_text("utf-8")
    with server(options.model) as (url, _), server(options.model, "--no-prefix-cache") as (plain, _):
        tokens = httpx.post(f"{url}/tokenize", json={"prompt": text[: 8 * options.context]}).json()["tokens"]
        asked = {"tokens": tokens[: options.context]}
        context = httpx.post(f"{url}/detokenize", json=asked).json()["prompt"]
        askers = {
            "naive": Asker(plain, options.new, forks=False, warms=False),
            "in turn": Asker(url, options.new, forks=False, warms=True),
            "program": Asker(url, options.new, forks=True, warms=True),
        }
        for program in PROGRAMS:
            rows.add(*_row(program, askers, context, url, options.rounds))


def _row(
    program: Callable[[Asker, str], list[str]], askers: dict[str, Asker], context: str, url: str, rounds: int
) -> tuple[run.Row, Sequence[Any]]:
    texts: dict[str, list[str]] = {}

    def timed(name: str) -> Callable[[], float]:
        def call() -> float:
            httpx.post(f"{url}/flush_cache").raise_for_status()
            begun = time.perf_counter()
            found = program(askers[name], context)
            seconds = time.perf_counter() - begun
            assert texts.setdefault(program.__name__, found) == found, "the answers differ"
            return seconds

        return call

    for name in askers:
        timed(name)()  # grammars are compiled
    found = in_turns({name: timed(name) for name in askers}, rounds)
    middle = {name: statistics.median(times) for name, times in found.items()}
    ratios = [middle["naive"] / middle["program"], middle["in turn"] / middle["program"]]
    row = {"program": program.__name__, "seconds": found, "over_naive": ratios[0], "over_in_turn": ratios[1]}
    times = [f"{middle[name]:.3f}" for name in ("naive", "in turn", "program")]
    return row, (program.__name__, *times, *(f"{ratio:.2f}x" for ratio in ratios))


if __name__ == "__main__":
    main()
