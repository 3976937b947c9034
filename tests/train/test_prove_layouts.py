"""Layouts proved: every pair of axes and the triples that carry experts, and what the prover chooses to run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from tiny import COMMON, MODELS

from torchwright.cli import main
from torchwright.decoder import read_decoder_config
from torchwright.train.layout import Layout, LayoutError
from torchwright.train.prove import Divergence, Proof, Run, proof, prove
from torchwright.train.prove.proof import choose, used
from torchwright.train.prove.shrink import shrink_config, shrink_layout

ALL = Layout(dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=2)
DENSE = Layout(dp_replicate=2, dp_shard=2, cp=2, tp=2)


def config_folder(name: str, folder: Path) -> Path:
    """A folder with nothing but a config.json, which is all that a proof reads."""
    kind, overrides = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(COMMON | overrides))
    config.architectures = [f"{kind.removesuffix('Text')}ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def proved(folder: Path, layout: Layout, processes: int = 4) -> Proof:
    result = prove(folder, layout, processes)
    assert result.passed, result.divergence
    for run in result.runs:
        assert set(run.errors) == {"float64", "float32"}
        assert run.errors["float64"] <= 1e-10
        assert run.errors["float32"] <= 1e-5
        assert run.errors["float32"] > 0, "nothing was computed in another order"
    return result


SWEEP = choose(ALL, 4)[0]
"""All pairs of axes, and the triples with experts, in four processes each."""


def test_the_sweep_holds_every_pair_of_axes() -> None:
    done = [set(used(layout)) for layout in SWEEP]
    pairs = [{one, other} for one in used(ALL) for other in used(ALL) if one < other]
    assert all(any(pair <= axes for axes in done) for pair in pairs)
    assert {"dp_shard", "tp", "ep"} in done


@pytest.mark.parametrize("layout", SWEEP, ids=str)
def test_every_pair_of_axes_and_every_triple_with_experts(layout: Layout, tmp_path: Path) -> None:
    result = proved(config_folder("qwen3-moe", tmp_path), layout)
    assert [run.layout for run in result.runs] == [layout]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gemma2", DENSE),  # soft caps, windows, tied
        ("gemma3", DENSE),  # two rotary embeddings, norms by head, offsets
        ("olmo2", DENSE),  # norms over all heads together
        ("llama-tied-biases", DENSE),
        ("llama-one-kv-head", Layout(dp_replicate=2, dp_shard=2, cp=2)),  # ring attention
        ("phi3-longrope", DENSE),  # an embedding that depends on the whole length
        ("llama-dynamic", Layout(dp_shard=2, cp=4, tp=2)),
        ("granite", DENSE),
        ("smollm3-window", DENSE),
        ("mixtral", Layout(dp_shard=4, cp=2, tp=2, ep=2)),
        ("olmoe", ALL),
    ],
    ids=lambda value: str(value),
)
def test_families_in_all_pairs(model: str, layout: Layout, tmp_path: Path) -> None:
    proved(config_folder(model, tmp_path), layout)


@pytest.mark.slow
@pytest.mark.sweep
def test_triples_in_eight_processes(tmp_path: Path) -> None:
    result = proved(config_folder("qwen3-moe", tmp_path), ALL, processes=8)
    assert result.not_run == ("dp_replicate with dp_shard with cp with tp",)


def test_experts_over_fewer_processes_than_share_parameters() -> None:
    runs, _ = choose(Layout(dp_shard=2, ep=2), 4, spread=True)
    assert Layout(dp_shard=4, ep=2) in runs


def test_what_is_left_out_is_said() -> None:
    runs, missing = choose(DENSE, 4)
    assert len(runs) == 6
    assert all(run.processes == 4 for run in runs)
    assert len(missing) == 4
    runs, missing = choose(DENSE, 16)
    assert (runs, missing) == ([DENSE], ())
    with pytest.raises(LayoutError, match="fits into 1"):
        choose(DENSE, 1)


def test_the_small_model_keeps_what_the_layout_divides(tmp_path: Path) -> None:
    config = read_decoder_config(config_folder("gemma3", tmp_path / "gemma"))
    layout = Layout(dp_shard=8, tp=2, cp=4)
    small = shrink_config(config, layout)
    assert shrink_layout(layout) == Layout(dp_shard=2, tp=2, cp=2)
    assert len({(rope, window) for rope, window in zip(small.ropes, small.windows, strict=True)}) == 2
    assert small.groups == config.groups
    # One key-value head for each process of tp, and four processes of cp: a ring, in the small model as well.
    assert (small.kv_heads // 2) % 2 == 1
    assert shrink_config(config, Layout(cp=2)).kv_heads % 2 == 0
    experts = read_decoder_config(config_folder("qwen3-moe", tmp_path / "moe"))
    small = shrink_config(experts, Layout(dp_shard=2, ep=2))
    assert set(small.sparse) == {True, False}
    assert small.experts
    assert small.experts.count % 2 == 0


def test_nothing_to_prove_is_refused(tmp_path: Path) -> None:
    folder = config_folder("llama", tmp_path)
    with pytest.raises(LayoutError, match="nothing to prove"):
        prove(folder, Layout())
    with pytest.raises(LayoutError, match="2 key-value heads"):
        prove(folder, Layout(tp=4))


def test_command_prints_json_and_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", str(config_folder("llama", tmp_path)), "--layout", "cp=2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["passed"]
    assert said["divergence"] is None
    assert [run["layout"]["cp"] for run in said["runs"]] == [2]
    assert said["runs"][0]["errors"]["float64"] < 1e-10


def test_command_names_the_fault_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = config_folder("llama", tmp_path)
    config = shrink_config(read_decoder_config(folder), Layout(cp=2))
    wrong = Run(
        layout=Layout(cp=2),
        errors={"float64": 1.0, "float32": float("inf")},
        worst={"float64": "loss"},
        seconds=1.0,
    )
    found = Divergence(
        tensor="loss", dtype="float64", error=1.0, ratio=2.0, axis="cp", cause="a mean missing on cp"
    )

    def fake(target: str, layout: Layout, processes: int, announce: object) -> Proof:
        assert callable(announce)
        announce(wrong)
        return Proof(model=target, layout=layout, config=config, runs=(wrong,), divergence=found, not_run=())

    monkeypatch.setattr(proof, "prove", fake)
    assert main(["prove", str(folder), "--layout", "cp=2"]) == 1
    said = capsys.readouterr().out
    assert "wrong" in said
    assert "first difference: loss (float64, relative error 1.0e+00)" in said
    assert "likely cause: 2.000x: a mean missing on cp" in said
    assert main(["prove", str(folder), "--layout", "cp=2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["runs"][0]["errors"]["float32"] is None


def test_command_refuses_a_layout_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", str(config_folder("llama", tmp_path)), "--layout", "cp=two"]) == 2
    assert "AXIS=NUMBER" in capsys.readouterr().err
