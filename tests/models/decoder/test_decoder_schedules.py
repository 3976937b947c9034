"""However prompts are cut and mixed into batches, each sequence's logits are those of the sequence alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import build, save, token_ids

from torchwright.models.decoder import LoadedDecoder, load_decoder

LENGTHS = (40, 17, 33)


@pytest.fixture(
    scope="module",
    params=["mistral-window", "gemma2", "phi3-longrope", "llama-dynamic", "olmoe", "gemma4", "deepseek-v3"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedDecoder:
    return load_decoder(save(build(request.param), tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def alone(model: LoadedDecoder) -> list[torch.Tensor]:
    return [model.logits(token_ids(1, length, seed=length))[0] for length in LENGTHS]


@pytest.mark.plain("olmoe", "mistral-window", "deepseek-v3", "gemma4")
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    schedule=st.lists(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 20)), min_size=1, max_size=3, unique_by=lambda p: p[0]
        ),
        max_size=8,
    )
)
def test_any_schedule_gives_the_same_logits(
    model: LoadedDecoder, alone: list[torch.Tensor], schedule: list[list[tuple[int, int]]]
) -> None:
    ids = [token_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]
    cache = model.new_cache(LENGTHS)
    sequences = [cache.sequence(length) for length in LENGTHS]
    for step in [*schedule, [(row, max(LENGTHS)) for row in (2, 0, 1)]]:
        rows = [(row, count) for row, count in step if sequences[row].length < LENGTHS[row]]
        starts = {row: sequences[row].length for row, _ in rows}
        pieces = [(sequences[row], ids[row][starts[row] : starts[row] + count]) for row, count in rows]
        if not pieces:
            continue
        with torch.no_grad():
            batch = cache.append(pieces)
            logits = model.decoder.logits(model.decoder(batch, cache))
        parts = logits.split([len(piece) for _, piece in pieces])
        for (row, _), part in zip(rows, parts, strict=True):
            wanted = alone[row][starts[row] : starts[row] + len(part)]
            torch.testing.assert_close(part, wanted, rtol=0, atol=2e-5)
    assert [sequence.length for sequence in sequences] == list(LENGTHS)
