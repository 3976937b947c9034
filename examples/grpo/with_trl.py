"""TRL's GRPOTrainer with `torchwright serve` as its sampler.

    torchwright serve MODEL --dtype bf16 --allow-weights /dev/shm/weights
    python examples/grpo/with_trl.py MODEL http://127.0.0.1:8000 /dev/shm/weights [--steps 8]

TRL sends weights to vLLM over NCCL, which no CPU has. Here a rollout function draws the completions over HTTP, and a
callback writes the weights after each optimizer step and has the server read them. The reward is the share of letters
"e" in a completion, which a model learns in a few steps. The last line printed is JSON: the mean reward of each step,
and the versions of the weights that its completions came from.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

PROMPTS = ["The", "A small", "Once there was", "In the morning"]


class Sampler(TrainerCallback):
    """Draws completions from the server, and gives it the weights of each step."""

    def __init__(self, url: str, weights: Path) -> None:
        self._http, self._weights = httpx.Client(base_url=url, timeout=600), weights
        self.versions: list[list[str]] = []
        """Versions of the weights by call: one for each, if the server keeps its promise."""

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL's `rollout_func`: one completion for each prompt, which come as often as they are to be answered."""
        ids = trainer.processing_class(prompts)["input_ids"]
        params = {
            "temperature": trainer.args.temperature,
            "max_new_tokens": trainer.args.max_completion_length,
        }
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        answers = self._post("/generate", body)
        facts = [answer["meta_info"] for answer in answers]
        self.versions.append(sorted({each["version"] for fact in facts for each in fact["weight_versions"]}))
        return {
            "prompt_ids": ids,
            "completion_ids": [answer["output_ids"] for answer in answers],
            "logprobs": [[logprob for logprob, _, _ in fact["output_token_logprobs"]] for fact in facts],
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Return when the server's next token is one of the new weights'."""
        folder = self._weights / str(state.global_step)
        kwargs["model"].save_pretrained(folder)
        body = {"model_path": folder.name, "weight_version": str(state.global_step)}
        self._post("/update_weights_from_disk", body)
        shutil.rmtree(folder)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        response = self._http.post(path, json=body)
        if response.status_code != 200:
            raise RuntimeError(f"{path}: {response.text}")
        return response.json()


def letters(completions: list[str], **fields: Any) -> list[float]:
    """The reward."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="the folder that is served")
    parser.add_argument("url")
    parser.add_argument("weights", type=Path, help="the folder of --allow-weights")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    options = parser.parse_args()
    sampler = Sampler(options.url, options.weights)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        reward_funcs=letters,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * options.steps}),
        rollout_func=sampler,
        callbacks=[sampler],
        args=GRPOConfig(
            output_dir=str(options.weights / "trainer"),
            max_steps=options.steps,
            per_device_train_batch_size=2 * options.group,
            num_generations=options.group,
            max_completion_length=24,
            learning_rate=3e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(json.dumps({"rewards": rewards, "versions": sampler.versions}))


if __name__ == "__main__":
    main()
