"""Six programs in SGLang's language against the server at argv[1]; prints what they found as JSON.

It runs in an environment of its own that has `sglang` without its dependencies.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang as sgl  # pyright: ignore[reportMissingImports]

LONG = "The quick brown fox jumps over the lazy dog near the river bank. " * 12


@sgl.function
def tree_of_thought(s: Any, question: str) -> None:
    s += LONG + question
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        fork += f"\nPlan {i}:"
        fork += sgl.gen("plan", max_tokens=8, temperature=0)
    forks.join()
    for i, fork in enumerate(forks):
        s += f"\nPlan {i}:" + fork["plan"]
    s += "\nBest:" + sgl.select("best", choices=[" 0", " 1", " 2"])


@sgl.function
def multi_turn_judge(s: Any, essay: str) -> None:
    s += LONG + essay
    for turn, respect in enumerate(("clarity", "style", "depth")):
        s += f"\nJudge the {respect}:" + sgl.gen(f"turn{turn}", max_tokens=6, stop="\n", temperature=0)
    s += "\nGrade:" + sgl.select(
        "grade", choices=[" A", " B", " C"], choices_method=sgl.greedy_token_selection
    )


@sgl.function
def parallel_expansion(s: Any, topic: str) -> None:
    s += LONG + topic
    forks = s.fork(4)
    forks += lambda i: f"\nTip {i}:"
    forks += sgl.gen("tip", max_tokens=8, temperature=0)
    s += "\n".join(fork["tip"] for fork in forks)
    s += sgl.gen("summary", max_tokens=4, temperature=0)


@sgl.function
def json_decoding(s: Any) -> None:
    s += "A record of a person:\n"
    s += sgl.gen("record", max_tokens=64, temperature=0, regex=r'\{"name": "[a-z]{2,6}", "age": [0-9]{1,2}\}')
    s += "\nA count:" + sgl.gen("count", max_tokens=8, dtype=int, temperature=0)
    schema = json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
    s += "\nA flag:" + sgl.gen("flag", max_tokens=128, temperature=0, json_schema=schema)


@sgl.function
def react(s: Any, question: str) -> None:
    s += LONG + question
    for turn in range(2):
        s += f"\nThought {turn}:" + sgl.gen(f"thought{turn}", max_tokens=6, stop="\n", temperature=0)
        s += "\nTool:" + sgl.select(f"tool{turn}", choices=[" add", " search", " finish"])
        s += f"\nObservation: {2 + turn}"  # the tool's answer
    s += "\nAnswer:" + sgl.gen("answer", max_tokens=6, temperature=0)


@sgl.function
def retrieval(s: Any, question: str) -> None:
    s += LONG + "\nQuestion: " + question + "\nAnswer:"
    s += sgl.gen("answer", max_tokens=8, temperature=0, return_logprob=True, top_logprobs_num=2)


def main() -> None:
    backend = sgl.RuntimeEndpoint(sys.argv[1])
    sgl.set_default_backend(backend)
    backend.flush_cache()
    backend.cache_prefix(LONG)
    found: dict[str, Any] = {"server": backend.get_server_info()["served_model_name"]}
    state = tree_of_thought.run(question="How?")
    found["tree_of_thought"] = {"best": state["best"], "text": state.text()}
    state = multi_turn_judge.run(essay="An essay.")
    found["multi_turn_judge"] = {"grade": state["grade"], "turns": [state[f"turn{i}"] for i in range(3)]}
    state = parallel_expansion.run(topic="Bread")
    found["parallel_expansion"] = {"summary": state["summary"]}
    state = json_decoding.run()
    found["json_decoding"] = {name: state[name] for name in ("record", "count", "flag")}
    state = react.run(question="What is 1 + 1?")
    found["react"] = {"tools": [state["tool0"], state["tool1"]], "answer": state["answer"]}
    questions = ("Who?", "When?", "Where?", "Why?", "How?")
    states = retrieval.run_batch([{"question": one} for one in questions], num_threads=4)
    found["retrieval"] = [one["answer"] for one in states]
    facts = states[0].get_meta_info("answer")
    found["scores"] = len(facts["output_token_logprobs"])
    found["alone"] = [retrieval.run(question=one)["answer"] for one in questions]
    stream = retrieval.run(question="Who?", stream=True)
    found["streamed"] = "".join(stream.text_iter("answer"))
    methods = (
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    )
    found["methods"] = [choose(backend, method) for method in methods]
    print(json.dumps(found))


def choose(backend: Any, method: Any) -> str:
    @sgl.function
    def chooses(s: Any) -> None:
        s += LONG + "\nThe animal is the"
        s += sgl.select("animal", choices=[" fox", " dog", " river bank"], choices_method=method)

    return chooses.run(backend=backend)["animal"]


if __name__ == "__main__":
    main()
