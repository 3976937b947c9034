"""Language models on a CPU: Torchwright's decoder against the machine's bounds and, if given, its peers.

    python -m benchmarks.llm.cpu [--models DIR] [--shape NAME …] [--scheme none|w8a8|w4a8|w4a16 …] [--kv bf16|int8]
        [--quick] [--openvino PYTHON FOLDER …] [--llama PYTHON FILE …] [--json FILE]

Random weights of real shapes (speed does not depend on the values); --models keeps them. The bound of a decode step is
its bytes (packed weights, keys and values) over the measured read bandwidth. That of a prompt is its operations over
the measured matrix rate of the products' type. Both are those of `torchwright bench`. A shared machine's rates change
within seconds: they are measured before and after each turn, and the better one is that turn's bound. "of
bound" is the median of the turns' shares; "of the best" is against the best rate of the whole run. Ratios to peers are
medians of turns in one run. --quick runs the prompt of 512 and its decode only. llama.cpp's files are written by
`benchmarks.llm.gguf_shapes`, folders for OpenVINO as `benchmarks.llm.shapes` says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import run
from benchmarks.harness.peers import Peer
from benchmarks.harness.run import Row
from benchmarks.llm import native, shapes
from benchmarks.llm.native import Native, Turn
from torchwright.core.records import DeviceFacts
from torchwright.hardware.devices import get_device

PROMPT, NEW = 512, 32
ROUNDS = 7
CONTEXTS = (128, 512, 2048, 8192)
BATCHES = (1, 4, 16, 64)
STEPS = 24
"""Decode steps of which the median counts."""
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 13, 16, 24, 25, 32, 48, 64, 96, 128, 256, 512)
CALLS = ("prefill", "decode")
COLUMNS = (
    *("contender", "prefill, tok/s", "of bound (of the best)", "decode, tok/s", "of bound (of the best)"),
    "over the best peer: prefill, decode",
)


class Machine:
    """The device's ceilings, measured around the contenders' turns; `facts` has the best so far."""

    def __init__(self) -> None:
        self._device = get_device("cpu")
        self.facts = self._device.facts()

    def around(self, turn: Callable[[], Turn]) -> tuple[Turn, DeviceFacts]:
        """Return a turn, and the better of the device's rates just before and just after the turn."""
        before = self._measured()
        found = turn()
        now = _better(before, self._measured())
        self.facts = _better(self.facts, now)
        return found, now

    def say(self) -> None:
        rates = ", ".join(f"{name} {rate:.2f}" for name, rate in self.facts.tflops.items())
        read = f"{self.facts.read_gb_per_s:.1f} GB/s"
        print(f"measured at best: read {read}; tera-operations per second: {rates}\n")

    def _measured(self) -> DeviceFacts:
        found = self._device.measure()
        return dataclasses.replace(self.facts, read_gb_per_s=found.read_gb_per_s, tflops=dict(found.tflops))


def _better(one: DeviceFacts, other: DeviceFacts) -> DeviceFacts:
    rates = {kind: max(rate, one.tflops.get(kind, 0)) for kind, rate in other.tflops.items()}
    bandwidth = max(one.read_gb_per_s or 0, other.read_gb_per_s or 0)
    return dataclasses.replace(one, read_gb_per_s=bandwidth, tflops=rates)


def main() -> None:
    options = run.options(
        __doc__,
        models=str,
        shape=["llama-3.2-1b"],
        scheme=list(native.SCHEMES),
        kv=run.Option(default="bf16", choices=("bf16", "int8")),
        quick=False,
        **native.peer_options("openvino", "llama"),
    )
    rows = run.Rows(options.json)
    machine = Machine()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        peers = native.start_peers("benchmarks.llm.cpu_peer", options, ("openvino", "llama"), stack)
        for shape in options.shape:
            folder, ours = shapes.make(shape, Path(options.models or scratch)), list[Native]()
            for scheme in options.scheme:
                begun = time.perf_counter()
                ours.append(Native(folder, scheme, options.kv))
                run.say(f"{ours[-1].name}: loaded and packed in {time.perf_counter() - begun:.1f} s")
            rows += compare(shape, ours, peers, machine)
            for model in () if options.quick else ours:
                rows += sweep(shape, model, machine)
            rows.write()


def compare(shape: str, ours: list[Native], peers: dict[str, Peer], machine: Machine) -> list[Row]:
    """Time a prompt of PROMPT tokens and NEW after that, all contenders in turn."""
    everyone = {model.name: model.turn for model in ours} | {name: peer.ask for name, peer in peers.items()}
    for turn in everyone.values():
        turn(PROMPT, 4)
    timed: dict[str, list[tuple[Turn, DeviceFacts]]] = {name: [] for name in everyone}
    for _ in range(ROUNDS):
        for name, turn in everyone.items():
            timed[name].append(machine.around(lambda turn=turn: turn(PROMPT, NEW)))
    middle = {
        name: {call: statistics.median(turn[call] for turn, _ in all_turns) for call in CALLS}
        for name, all_turns in timed.items()
    }
    machine.say()
    print(f"### {shape}: prompt of {PROMPT}, decode at {PROMPT} to {PROMPT + NEW}\n")
    run.head(COLUMNS)
    rows: list[Row] = []
    native_of = {model.name: model for model in ours}
    for name, seconds in middle.items():
        row: Row = {"shape": shape, "contender": name}
        row |= {"prefill_tok_s": PROMPT / seconds["prefill"], "decode_tok_s": 1 / seconds["decode"]}
        bounds, ratios = ["", ""], list[str]()
        if model := native_of.get(name):
            for place, call in enumerate(CALLS):
                bound = lambda facts, call=call, model=model: model.bounds(facts, PROMPT, NEW)[call]
                row[f"{call}_of_bound"] = statistics.median(
                    bound(now) / turn[call] for turn, now in timed[name]
                )
                row[f"{call}_of_best"] = bound(machine.facts) / seconds[call]
                bounds[place] = f"{row[f'{call}_of_bound']:.0%} ({row[f'{call}_of_best']:.0%})"
                if peers:
                    row[f"{call}_over_peers"] = min(middle[peer][call] for peer in peers) / seconds[call]
                    ratios.append(f"{row[f'{call}_over_peers']:.2f}x")
        rows.append(row)
        speeds = f"{row['prefill_tok_s']:.0f}", f"{row['decode_tok_s']:.1f}"
        print(run.line((name, speeds[0], bounds[0], speeds[1], bounds[1], ", ".join(ratios))), flush=True)
    print()
    return rows


def sweep(shape: str, model: Native, machine: Machine) -> list[Row]:
    """Time contexts at batch 1, batches at a context of 128, and token counts of one forward call."""
    rows: list[Row] = []
    print(f"### {shape}, {model.name}: decode\n")
    run.head(("context", "batch", "tok/s", "of the bytes' bound"))
    for context, batch in [*((context, 1) for context in CONTEXTS), *((128, batch) for batch in BATCHES[1:])]:
        turn, now = machine.around(lambda at=(context, STEPS, batch): model.turn(*at))
        seconds = turn["step"]
        row: Row = {"context": context, "batch": batch, "decode_s": seconds, "tok_s": batch / seconds}
        row["of_bound"] = model.bounds(now, context, STEPS, batch)["decode"] / seconds
        rows.append(row)
        print(run.line((context, batch, f"{row['tok_s']:.1f}", f"{row['of_bound']:.0%}")), flush=True)
    print(f"\n### {shape}, {model.name}: tokens of one forward call\n")
    run.head(("rows", "ms", "tok/s"))
    for count in ROWS:
        prefills = [model.turn(count, 0)["prefill"] for _ in range(6)][1:]  # the first warms up
        seconds = statistics.median(prefills)
        rows.append({"rows": count, "prefill_s": seconds, "tok_s": count / seconds})
        print(run.line((count, f"{1e3 * seconds:.1f}", f"{count / seconds:.0f}")), flush=True)
    print()
    return [{"shape": shape, "contender": model.name, **row} for row in rows]


if __name__ == "__main__":
    main()
