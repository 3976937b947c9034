"""A trained recommender as a folder: dense layers and every table, whole, in safetensors, and the run's model section.

MODEL/recommender.json           the model as the run file has it
MODEL/dense.safetensors          the dense layers
MODEL/tables/0000.safetensors    "weight" (rows, dim) of the first column, and so on, numbered by column
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from torchwright.train.recommender.config import RecommenderRun
from torchwright.train.recommender.learner import RecommenderLearner


def save_recommender(run: RecommenderRun, learner: RecommenderLearner, folder: Path | None) -> None:
    """Write the model into a new folder; every process takes part, the first has a folder."""
    if folder is not None:
        (folder / "tables").mkdir(parents=True)
        described = run.model_dump(mode="json", include={"dlrm", "two_tower"}, exclude_none=True)
        (folder / "recommender.json").write_text(json.dumps(described, indent=1), "utf-8")
        dense = {name: value.detach().cpu().contiguous() for name, value in learner.dense.named_parameters()}
        save_file(dense, folder / "dense.safetensors")
    for number, name in enumerate(run.model.columns):
        table = learner.tables.full(name)
        if folder is not None:
            save_file({"weight": table.cpu().contiguous()}, folder / "tables" / f"{number:04}.safetensors")
