"""Steps under the profiler: the trace, what it adds up to, each wait with its line; the run stays the same."""

from __future__ import annotations

import gzip
import inspect
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runs import assert_same, checkpoints, make_run, state
from torch.profiler import ProfilerActivity, profile

from torchwright.train.run.config.data_section import RunError
from torchwright.train.run.loop.train import train
from torchwright.train.run.observe.profiling import parse_steps
from torchwright.train.run.observe.waits import waits


def waiting(x: torch.Tensor) -> None:
    """Each line that waits says for what."""
    x.sum().item()  # item
    x.tolist()  # tolist
    x.cpu().numpy()  # cpu numpy
    dist.all_reduce(x)  # all_reduce
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()  # wait
    dist.barrier()  # barrier


def converting(x: torch.Tensor) -> float:
    return float(x.sum())


def test_each_wait_has_its_line() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        with profile(activities=[ProfilerActivity.CPU], with_stack=True, acc_events=True) as profiler:
            waiting(torch.ones(3))
            waiting(torch.ones(3))
            converting(torch.ones(3))
    finally:
        dist.destroy_process_group()
    lines, first = inspect.getsourcelines(waiting)
    expected = {
        (what, first + number)
        for number, line in enumerate(lines)
        for what in line.partition("  # ")[2].split()
    }
    found = waits(profiler)
    here = [wait for wait in found if wait.line.endswith(" waiting")]
    assert {(wait.what, int(wait.line.split(":")[1].split()[0])) for wait in here} == expected
    assert {wait.count for wait in here} == {2}
    assert all(wait.seconds > 0 for wait in here)
    # What is no call has the line in which its function begins.
    (other,) = (wait for wait in found if wait.line.endswith(" converting"))
    assert (other.what, other.count) == ("item", 1)
    assert f":{converting.__code__.co_firstlineno} " in other.line


@pytest.mark.slow
def test_a_profiled_run_is_the_same_run(tmp_path: Path) -> None:
    plain, run = make_run(tmp_path / "plain"), make_run(tmp_path / "profiled")
    train(plain, live=False)
    train(run, live=False, profile=range(3, 5))
    assert_same(state(checkpoints(run)[-1]), state(checkpoints(plain)[-1]))
    folder = run.parent / "out" / "profile"
    with gzip.open(folder / "steps-3-4.rank-0.trace.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"call step", "aten::mm"} <= names
    found = json.loads((folder / "steps-3-4.rank-0.json").read_text())
    assert 0 < found["idle_share"] < 1
    # More than all where a checkpoint is written beside the step, less where the machine does something else.
    assert sum(kind["share"] for kind in found["kinds"]) > 0.5
    assert any(wait["what"] == "tolist" and "objectives/step.py" in wait["line"] for wait in found["waits"])
    lines = [json.loads(line) for line in (run.parent / "out" / "metrics.jsonl").read_text().splitlines()]
    (event,) = (line for line in lines if line.get("event") == "profile")
    assert (event["first"], event["last"], event["at"]) == (3, 4, 4)


def test_steps_that_are_not_ahead(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(RunError, match=r"6:9: these steps are not ahead.*from step 1 to step 6"):
        train(run, live=False, profile=range(6, 10))


@pytest.mark.parametrize("text", ["10", "5:3", "0:3", "a:b", "1:2:3", "1:60"])
def test_what_are_no_steps(text: str) -> None:
    with pytest.raises(RunError, match="--profile"):
        parse_steps(text)
    assert parse_steps("10:20") == range(10, 21)
