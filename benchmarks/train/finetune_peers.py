"""The third-party contenders of `finetune.py`: a loop by hand over transformers and peft, and TRL's trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any

import torch

from torchwright.train.model.foreign import Foreign

Stepped = tuple[Callable[[], float], torch.nn.Module]
"""A function that makes a step and returns its loss, and the model."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job of all contenders."""

    model: Path
    text: Path
    scratch: Path
    context: int
    rows: int
    """Windows of a step."""
    rank: int | None
    """Rank of adapters on all linear layers; None trains all weights."""
    rate: float

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return torch.float32 if self.rank is None else torch.bfloat16


def windows(job: Job) -> Any:
    """Return the windows that this trainer reads, in their order."""
    from torchwright.train.data.shards import Shards
    from torchwright.train.data.streams import Windows
    from torchwright.train.data.text import token_shards

    files = token_shards([job.text], ["*.txt"], job.model, 1, job.scratch / "tokens")
    return Windows(Shards(files, 4096), job.context, 0)


def lora_settings(rank: int) -> Any:
    from peft import LoraConfig  # pyright: ignore[reportMissingImports]

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def by_hand(job: Job) -> Stepped:
    """Return a step of a plain loop with transformers and peft."""
    from transformers import AutoModelForCausalLM

    data = windows(job)
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype)
    if job.rank is not None:
        from peft import get_peft_model  # pyright: ignore[reportMissingImports]

        model = get_peft_model(model, lora_settings(job.rank))
    model.train()
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=job.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    done = 0

    def step() -> float:
        nonlocal done
        rows = data.batch(done * job.rows, job.rows)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=rows.ids_BT, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows.labels_BT.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        return loss.item()

    return step, Foreign(model)


def trl(job: Job, steps: int) -> Stepped:
    """Return a step of TRL's trainer, which waits for its turn before each of `steps` steps.

    Its labels are shifted inside, so that a row has one token more than ours, and as many labels. It goes without the
    recomputation of activations that is its default, as do the others.
    """
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    batch = windows(job).batch(0, job.rows * steps)
    ids = torch.cat([batch.ids_BT, batch.labels_BT[:, -1:]], 1).tolist()
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype)
    go, done, losses, failed = Semaphore(0), Semaphore(0), list[float](), list[BaseException]()

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            go.acquire()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            done.release()

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **options)
            losses.append(loss.item())
            return loss

    settings = SFTConfig(
        output_dir=str(job.scratch / "trl"),
        per_device_train_batch_size=job.rows,
        max_steps=steps,
        max_length=None,
        learning_rate=job.rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = InOrder(
        model,
        settings,
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        peft_config=None if job.rank is None else lora_settings(job.rank),
        callbacks=[Turns()],
    )
    threads = torch.get_num_threads()

    def train() -> None:
        torch.set_num_threads(threads)  # which each thread has its own of
        try:
            trainer.train()
        except BaseException as error:
            failed.append(error)
            done.release()

    Thread(target=train, daemon=True).start()

    def step() -> float:
        go.release()
        done.acquire()
        if failed:
            raise failed[0]
        return losses[-1]

    return step, Foreign(trainer.model)
