"""DSPy against the server at argv[1], which serves its model as argv[2]; prints what it found as JSON.

It runs in an environment of its own that has DSPy.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import dspy  # pyright: ignore[reportMissingImports]

SENTENCES = ["The bread is fresh.", "Nothing works here.", "It rained all day."]


class Judge(dspy.Signature):
    """Judge a sentence."""

    sentence: str = dspy.InputField()
    verdict: Literal["good", "bad"] = dspy.OutputField()
    topic: Literal["food", "weather", "other"] = dspy.OutputField()
    sure: bool = dspy.OutputField()


class Panel(dspy.Module):
    """Two judges, the second of whom reads what the first said."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = dspy.Predict(Judge), dspy.Predict(Judge)

    def forward(self, sentence: str) -> Any:
        said = self.first(sentence=sentence)
        return self.second(sentence=f"{sentence} One judge says: {said.verdict}, of {said.topic}.")


def fields(found: Any) -> dict[str, Any]:
    return {name: found[name] for name in ("verdict", "topic", "sure")}


def main() -> None:
    url, name = sys.argv[1:3]
    model = dspy.LM(
        f"openai/{name}", api_base=f"{url}/v1", api_key="unused", cache=False, max_tokens=200, temperature=0.0
    )
    dspy.configure(lm=model, adapter=dspy.JSONAdapter())
    panel = Panel()
    examples = [dspy.Example(sentence=sentence).with_inputs("sentence") for sentence in SENTENCES]
    found = {
        "alone": [fields(panel(sentence=sentence)) for sentence in SENTENCES],
        "at once": [fields(each) for each in panel.batch(examples, num_threads=3)],
        "usage": model.history[-1]["usage"]["completion_tokens"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
