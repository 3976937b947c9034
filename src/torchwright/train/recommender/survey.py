"""A recommender's data looked at before it is trained on: what is read of each file, and refused."""

from __future__ import annotations

from pathlib import Path

from torchwright.train.data.shards import DataError
from torchwright.train.data.text import expand
from torchwright.train.recommender.columns import Columns
from torchwright.train.recommender.config import RecommenderRun
from torchwright.train.recommender.reading import form_of, read_blocks
from torchwright.train.run.observe.survey import FileSurvey


def survey(run: RecommenderRun, folder: Path) -> list[FileSurvey]:
    """Each file of the run, read as training reads it; nothing is written."""
    columns, found = Columns.of(run), []
    for source, patterns in (("train", run.data.train), ("validation", run.data.validation)):
        for path in expand(patterns, folder):
            seen = FileSurvey(file=path, source=source, holds="")
            try:
                seen.holds = form_of(path).removeprefix(".")
                for _ in read_blocks(path, columns, seen.report, header=run.data.header, strict=False):
                    pass
            except DataError as error:
                seen.refused = str(error)
            found.append(seen)
    return found
