"""Synthetic clicks from a hidden model, in files like Criteo's, or users' items: learnable data of any length.

    python examples/clicks/clicks.py FILE [--shape criteo|pairs] [--rows N] [--first N] [--seed N]

Every block of rows has its own generator, seeded by the world's seed and the block's number. So a row does not depend
on how it is requested: held-out rows are later rows of the same world.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

from torchwright.core.errors import TorchwrightError
from torchwright.core.process.files import replacing
from torchwright.train.data.shards import DataError
from torchwright.train.recommender.config import CATEGORIES, LABEL, NUMBERS
from torchwright.train.recommender.reading import form_of

Shape = Literal["criteo", "pairs"]
BLOCK = 1 << 12
HIDDEN = 6
"""Numbers of a hidden vector."""
MISSING_NUMBER, MISSING_CATEGORY = 0.1, 0.03
USERS, ITEMS, COUNTRIES, KINDS = 5_000, 2_000, 40, 30
CANDIDATES = 50
"""Items of which a user takes the one that fits best."""


def cardinality(place: int) -> int:
    """Ids of Criteo-like category `place`: from ten to some thousands."""
    return int(10 ** (1 + 2.8 * ((place * 7) % 26) / 25))


def zipf(generator: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Ids below `size`, of which id i comes with a density near 1 / (i + 1)."""
    return np.minimum((size + 1) ** generator.random(count) - 1, size - 1).astype(np.int64)


def hidden(seed: int, name: int, count: int) -> np.ndarray:
    """The hidden vectors (count, HIDDEN) of a column's ids."""
    return np.random.default_rng([seed, 1, name]).standard_normal((count, HIDDEN))


@dataclass(frozen=True)
class World:
    """The hidden model."""

    seed: int
    vectors: dict[int, np.ndarray] = field(default_factory=dict)

    def of(self, name: int, count: int) -> np.ndarray:
        """A column's hidden vectors, drawn once."""
        if name not in self.vectors:
            self.vectors[name] = hidden(self.seed, name, count)
        return self.vectors[name]


def clicks(world: World, block: int) -> list[list[str]]:
    """Return a block of Criteo-like rows by column: label, 13 numbers, 26 hexadecimal categories; "" is missing.

    The logit of a click is a sum: an effect of each id, products of hidden vectors of neighbouring categories, and a
    slope of each number's logarithm.
    """
    generator = np.random.default_rng([world.seed, 2, block])
    slopes = world.of(100, len(NUMBERS))[:, 0]
    logit = np.full(BLOCK, -1.6)
    numbers = []
    for place in range(len(NUMBERS)):
        value = np.floor(np.exp(generator.normal(1 + place % 4, 1.2, BLOCK))).astype(np.int64) - (place == 1)
        there = generator.random(BLOCK) >= MISSING_NUMBER
        logit += 0.3 * slopes[place] * np.where(there, np.log1p(value.clip(0)) - 1 - place % 4, 0)
        numbers.append([str(v) if t else "" for v, t in zip(value.tolist(), there.tolist(), strict=True)])
    before, categories = np.zeros((BLOCK, HIDDEN)), []
    for place in range(len(CATEGORIES)):
        size = cardinality(place)
        ids = zipf(generator, BLOCK, size)
        there = generator.random(BLOCK) >= MISSING_CATEGORY
        vectors = world.of(place, size)[ids] * there[:, None]
        logit += 0.4 * vectors[:, 0] + 0.25 * (vectors * before)[:, 1:].sum(1)
        before = vectors
        hashed = (ids * 2_654_435_761 + place * 40_503 + 12_345) % 2**32
        categories.append(
            [f"{h:08x}" if t else "" for h, t in zip(hashed.tolist(), there.tolist(), strict=True)]
        )
    label = generator.random(BLOCK) < 1 / (1 + np.exp(-logit))
    return [list(map(str, label.astype(int).tolist())), *numbers, *categories]


def pairs(world: World, block: int) -> list[list[str]]:
    """A block of users with an item that each took: of some items, drawn by popularity, the one that fits best."""
    generator = np.random.default_rng([world.seed, 3, block])
    user = zipf(generator, BLOCK, USERS)
    country = user % COUNTRIES
    wants = world.of(200, USERS)[user] + world.of(201, COUNTRIES)[country]
    offered = zipf(generator, BLOCK * CANDIDATES, ITEMS).reshape(BLOCK, CANDIDATES)
    has = world.of(202, ITEMS) + world.of(203, KINDS)[np.arange(ITEMS) % KINDS]
    fit = np.einsum("bh,bch->bc", wants, has[offered]) + generator.gumbel(size=offered.shape)
    item = offered[np.arange(BLOCK), fit.argmax(1)]
    named = {"u": user, "country": country, "i": item, "kind": item % KINDS}
    return [[f"{name}{value}" for value in values.tolist()] for name, values in named.items()]


COLUMNS: dict[Shape, list[str]] = {
    "criteo": [LABEL, *NUMBERS, *CATEGORIES],
    "pairs": ["user", "country", "item", "kind"],
}


def generate(path: Path, shape: Shape, rows: int, *, seed: int = 0, first: int = 0) -> None:
    """Write rows `first` to `first + rows` of a seed's world; the name says as what. Raises `DataError`.

    TSV as Criteo's, without a header for "criteo" and with one for "pairs"; *.tsv.gz is compressed; *.parquet.
    """
    form, world = form_of(path), World(seed)
    make = clicks if shape == "criteo" else pairs
    blocks = (_cut(make(world, block), block, first, rows) for block in _blocks(first, rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        if form == ".parquet":
            _write_parquet(new, COLUMNS[shape], blocks)
            return
        with _opened(new, form) as file:
            if shape == "pairs":
                file.write(("\t".join(COLUMNS[shape]) + "\n").encode())
            for block in blocks:
                file.writelines(("\t".join(row) + "\n").encode() for row in zip(*block, strict=True))


def _blocks(first: int, rows: int) -> range:
    return range(first // BLOCK, -(-(first + rows) // BLOCK))


def _cut(block: list[list[str]], number: int, first: int, rows: int) -> list[list[str]]:
    begin = number * BLOCK
    return [column[max(0, first - begin) : max(0, first + rows - begin)] for column in block]


def _opened(path: Path, form: str) -> Any:
    # No time in the header: the same rows are the same file.
    return gzip.GzipFile(path, "wb", compresslevel=3, mtime=0) if form == ".tsv.gz" else path.open("wb")


def _write_parquet(path: Path, names: list[str], blocks: Iterator[list[list[str]]]) -> None:
    """Labels and numbers as integers, and what is missing as null."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{path} is written by pyarrow, which is not installed", next="write *.tsv.gz"
        ) from error
    whole = {LABEL, *NUMBERS}
    kinds = [(name, pa.int64() if name in whole else pa.string()) for name in names]
    with parquet.ParquetWriter(path, pa.schema(kinds)) as file:
        for block in blocks:
            columns: list[Any] = [
                [None if text == "" else int(text) if name in whole else text for text in column]
                for name, column in zip(names, block, strict=True)
            ]
            file.write_table(pa.table(dict(zip(names, columns, strict=True)), schema=pa.schema(kinds)))


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--shape", type=click.Choice(["criteo", "pairs"]), default="criteo", show_default=True)
@click.option("--rows", type=click.IntRange(min=1), default=100_000, show_default=True)
@click.option(
    "--first", type=click.IntRange(min=0), default=0, show_default=True, help="The first row's number."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the hidden model.")
def main(file: Path, shape: Shape, rows: int, first: int, seed: int) -> None:
    """Write synthetic clicks to FILE (*.tsv, *.tsv.gz, *.parquet) for a recommender.

    `criteo` has a label, 13 numbers and 26 hexadecimal categories, as Criteo's files; `pairs` has users with an item
    that each took. Rows from another `--first` are held-out rows of the same hidden model.
    """
    try:
        generate(file, shape, rows, seed=seed, first=first)
    except TorchwrightError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{file}: {rows:,} rows")


if __name__ == "__main__":
    main()
