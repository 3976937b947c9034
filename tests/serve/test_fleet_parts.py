"""The parts of a fleet: places, cores, figures, the gateway's options, and what is refused beforehand."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from torchwright import cli
from torchwright.cli.serve import command, read_options
from torchwright.core.errors import TorchwrightError, WorkloadError
from torchwright.core.process.waited import how_it_ended
from torchwright.serve.fleet import command as room
from torchwright.serve.fleet.child import Child
from torchwright.serve.fleet.cores import divide, on_cores
from torchwright.serve.fleet.fleet import Lines
from torchwright.serve.fleet.gateway import GatewayOptions, arguments
from torchwright.serve.fleet.metrics import join
from torchwright.serve.fleet.options import FleetOptions, Replicas
from torchwright.serve.fleet.status import own
from torchwright.serve.options import EngineOptions, ServerOptions

GIB = 1 << 30


def test_replicas_are_a_number_or_places() -> None:
    assert Replicas.parse("4") == Replicas(count=4)
    places = ("a.example:8000", "10.0.0.5:1", "[fd00::5]:65535")
    assert Replicas.parse(",".join(places)) == Replicas(places=places)


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-1",
        "1025",
        "two",
        "a",
        "a:0",
        "a:65536",
        "a:1,",
        "a:1,a:1",
        "a:1/x",
        "http://a:1",
        "a b:1",
        "1:2:3",
    ],
)
def test_other_replicas_are_refused(text: str) -> None:
    with pytest.raises(WorkloadError, match="--replicas"):
        Replicas.parse(text)


def _machine(folder: Path, places: list[tuple[int, int]]) -> Path:
    """Write a topology as Linux shows it: (socket, core) of each processor."""
    for number, (socket, core) in enumerate(places):
        inner = folder / f"cpu{number}" / "topology"
        inner.mkdir(parents=True)
        (inner / "physical_package_id").write_text(f"{socket}\n")
        (inner / "core_id").write_text(f"{core}\n")
    return folder


def test_the_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    """Two sockets of two cores with two threads each, numbered as Linux does: the second threads come last."""
    machine = _machine(tmp_path, [(0, 0), (0, 1), (1, 0), (1, 1)] * 2)
    assert divide(range(8), 2, machine) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert divide(range(8), 4, machine) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert divide([1, 4, 5, 7], 2, machine) == [[1, 4], [5, 7]] or divide([1, 4, 5, 7], 2, machine)[1] == [
        5,
        7,
    ]


@pytest.mark.parametrize("processors", [1, 2, 3, 7, 16, 96])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
def test_cores_are_divided_without_rest(processors: int, count: int, tmp_path: Path) -> None:
    numbers = list(range(3, 3 + processors))  # a container has some of the machine's, and no topology
    if count > processors:
        with pytest.raises(WorkloadError, match=f"{processors} processors"):
            divide(numbers, count, tmp_path)
        return
    shares = divide(numbers, count, tmp_path)
    assert sorted(number for share in shares for number in share) == numbers
    assert {len(share) for share in shares} <= {processors // count, processors // count + 1}


def test_threads_for_the_whole_machine_are_cut_to_a_replicas_cores() -> None:
    assert on_cores({"OMP_NUM_THREADS": "64"}, [1, 2]) == {"OMP_NUM_THREADS": "2"}
    for kept in ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "many"}, {}):
        assert on_cores(kept, [1, 2]) == kept


A = """\
# HELP steps_total Steps.
# TYPE steps_total counter
steps_total 3.0
# HELP seconds Times, with "quotes" and {braces}.
# TYPE seconds histogram
seconds_bucket{le="0.1",model="a{b}"} 1.0
seconds_bucket{le="+Inf",model="a{b}"} 2.0
seconds_count{model="a{b}"} 2.0
seconds_sum{model="a{b}"} 0.5
"""
B = """\
# HELP up Up.
# TYPE up gauge
up{} 1
untyped_one 7 1700000000
this is no line of figures
# HELP steps_total Steps.
# TYPE steps_total counter
steps_total 4.0
"""


def test_figures_are_joined_with_their_server() -> None:
    """The reference is Prometheus's own reader, of each text alone and of the joined one."""
    texts = {"replica 0": A, 'odd "name"\\': B.replace("this is no line of figures\n", "")}
    expected = {
        (sample.name, frozenset({**sample.labels, "server": server}.items()), sample.value)
        for server, text in texts.items()
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    joined = join({**texts, 'odd "name"\\': B})
    families = list(text_string_to_metric_families(joined))
    found = {
        (one.name, frozenset(one.labels.items()), one.value) for each in families for one in each.samples
    }
    assert found == expected
    assert joined.count("# TYPE steps_total counter") == 1
    assert joined.count("# HELP seconds ") == 1
    names = [line.split("{")[0] for line in joined.splitlines() if line.startswith("steps")]
    assert joined.index('steps_total{server="replica 0"}') < joined.index("seconds_bucket")
    assert names == ["steps_total"] * 2


def test_figures_of_nobody_are_empty() -> None:
    assert join({}) == ""
    assert 'fleet_up{server="gateway"} 0' in own({"gateway": False}, {"gateway": 2})
    assert 'fleet_restarts_total{server="gateway"} 2' in own({"gateway": False}, {"gateway": 2})


def _gateway(**given: Any) -> list[str]:
    fields = {
        "host": "127.0.0.1",
        "port": 1,
        "policy": "cache_aware",
        "keys": [],
        "origins": [],
        "body_bytes": 9,
    }
    return arguments(GatewayOptions(**{**fields, "models": ["m"], "aliases": [], **given}), Path("/m"), 2)


def test_the_gateway_takes_every_key_and_a_secret_one_for_its_replicas() -> None:
    words = _gateway(keys=["one", "two", "three"], origins=["https://a", "https://b"])
    assert _values(words, "--api-key") == ["one"]
    assert _values(words, "--tenant-api-key") == ["key2:two", "key3:three"]
    at = words.index("--cors-allowed-origins")
    assert words[at + 1 : at + 3] == ["https://a", "https://b"]
    (secret,), (other,) = (_values(each, "--control-plane-api-keys") for each in (words, _gateway()))
    assert len(secret) > 64
    assert secret != other
    assert _values(_gateway(), "--api-key") == []


def test_the_gateway_knows_every_name_of_the_model() -> None:
    assert _values(_gateway(aliases=["two", "three"]), "--model-alias") == ["two=m", "three=m"]


def test_the_gateway_takes_keys_and_names_that_look_like_options() -> None:
    """By its own parser, which took a key such as -aB for an option that it does not have."""
    parse = pytest.importorskip("smg.launch_router").parse_router_args
    found = parse(_gateway(keys=["-aB", "--port", "-c:d"], aliases=["-v"], origins=["https://a"]))
    assert (found.api_key, found.tenant_api_keys) == ("-aB", [("key2", "--port"), ("key3", "-c:d")])
    assert (found.model_aliases, found.cors_allowed_origins) == ({"-v": "m"}, ["https://a"])
    assert (found.port, found.max_payload_size) == (1, 9)


def _values(words: list[str], flag: str) -> list[str]:
    return [word.removeprefix(f"{flag}=") for word in words if word.startswith(f"{flag}=")]


def test_a_childs_lines_have_its_name_and_nothing_that_a_terminal_acts_on() -> None:
    code = "import sys; sys.stdout.write(sys.stdin.read()); "
    code += "sys.stderr.write('\\x1b[31mred\\x1b[0m\\x1b[2J\\nno end'); sys.exit(3)"
    lines: list[tuple[str, str]] = []

    async def run() -> int:
        child = Child.start(
            "one",
            [sys.executable, "-c", code],
            given=b"given\n\xff\n",
            relay=lambda *line: lines.append(line),
        )
        return await child.ended()

    assert asyncio.run(run()) == 3
    assert sorted(text for _, text in lines) == sorted(["given", "\ufffd", "red\\x1b[2J", "no end"])
    assert {name for name, _ in lines} == {"one"}
    assert how_it_ended(3) == "exit code 3"
    assert how_it_ended(-signal.SIGKILL) == "signal SIGKILL"


def test_a_fault_of_all_replicas_is_said_once_while_they_start(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    for name in ("replica 0", "replica 1"):
        lines.relay(name, "the model cannot be read")
    lines.starting = False
    for name in ("replica 0", "replica 1"):
        lines.relay(name, "out of memory")
    assert capsys.readouterr().err.splitlines() == [
        "[replica 0] the model cannot be read",
        "[replica 0] out of memory",
        "[replica 1] out of memory",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--policy random", "--policy is for --replicas"),
        ("--metrics-port 0", "--metrics-port is for --replicas"),
        ("model --replicas a:1,b:2", "a model is not for servers that run elsewhere"),
        ("--replicas a:1 --max-running 3", "--max-running is not for servers"),
        ("--replicas 0", "1 to 1024"),
        ("--replicas 1 --allow-adapters .", "--allow-adapters is not for --replicas"),
        ("--replicas 1 --allow-weights .", "--allow-weights is not for --replicas"),
        ("--replicas 1 --batches .", "--batches is not for --replicas"),
        ("--replicas a:1 --adapter a=.", "--adapter is not for servers"),
        ("--replicas 1 --served-model-name a --served-model-name b=c", "'b=c' is not for --replicas"),
        ("--replicas a:1 --log-requests", "--log-requests is not for servers"),
        ("--replicas 1 --allowed-host a.example", "--allowed-host is not for --replicas"),
        ("--replicas 1000", "processors that this process may use"),
        ("--replicas 1 --tool-call-format none-such", "no such format"),
    ],
)
def test_options_without_effect_are_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "find_spec", lambda name: object())
    assert cli.main(["serve", *words.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_missing_gateway_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    assert cli.main(["serve", "--replicas", "2"]) == 2
    assert "torchwright[fleet]" in capsys.readouterr().err


def test_every_option_of_a_fleet_is_read() -> None:
    words = "--replicas 3 --policy least_load --metrics-port 5 --port 7 --drain-seconds 2.5 --max-running 8"
    options = read_options(command.make_context("serve", words.split()))
    assert isinstance(options, FleetOptions)
    assert (options.replicas, options.policy, options.metrics_port) == (Replicas(count=3), "least_load", 5)
    server = ServerOptions(port=7, drain_seconds=2.5, engine=EngineOptions(max_running=8))
    assert options.server == server


def test_replicas_share_the_memory_for_keys_and_values() -> None:
    checked = room.check_replicas(ServerOptions(api_keys=["k"], port=99), 4, 8 * GIB)
    assert checked.options.engine.kv_memory == GIB
    assert (checked.options.port, checked.options.api_keys) == (0, ["k"])
    asked = ServerOptions(engine=EngineOptions(kv_memory=5))
    assert room.check_replicas(asked, 4, 8 * GIB).options.engine.kv_memory == 5


def test_more_replicas_than_memory_are_refused() -> None:
    memory = 60 << 20
    assert room.check_replicas(ServerOptions(), 2, memory).figures is not None  # weights of 24 MiB
    with pytest.raises(TorchwrightError, match=r"--replicas 3.*60.0 MiB of memory for 3 times.*at most 2"):
        room.check_replicas(ServerOptions(), 3, memory)


def test_replicas_share_no_device() -> None:
    with pytest.raises(WorkloadError, match=r"--replicas 2 on cuda.*one server on cuda, without --replicas"):
        room.check_replicas(ServerOptions(engine=EngineOptions(device="cuda")), 2)


def test_more_names_than_the_gateway_registers_are_refused(tmp_path: Path) -> None:
    adapters = tuple((f"a{number}", str(tmp_path)) for number in range(600))
    server = ServerOptions(engine=EngineOptions(adapters=adapters))
    with pytest.raises(WorkloadError, match=r"1202 places for the gateway.*at most 1024"):
        room.check_replicas(server, 2)


def test_the_options_of_a_replica_are_plain_json() -> None:
    """They go through the replica's standard input."""
    checked = room.check_replicas(ServerOptions(api_keys=["k"], allowed_origins=["https://a"]), 1)
    fields = {name: value for name, value in vars(checked.options).items() if name != "engine"}
    again = ServerOptions(
        **json.loads(json.dumps(fields))
        | {"engine": EngineOptions.from_json(checked.options.engine.to_json())}
    )
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    assert {name: getattr(again, name) for name in fields} == lists
    assert again.engine == checked.options.engine
