"""Faults of a fleet, with the real gateway: replicas and gateway die, hang or are replaced, and what a client sees.

`docs/fleet.md` has the table of these.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from fleet_support import RunningFleet, alive, children, fleet, paused
from http_support import MODEL, command, wait_until

pytestmark = pytest.mark.slow

BACK_SECONDS = 120.0
"""A replica loads its model again, on a machine that others use."""


@pytest.fixture(scope="module")
def two() -> Iterator[RunningFleet]:
    with fleet("--replicas", "2") as running:
        yield running


@pytest.fixture(autouse=True)
def whole(two: RunningFleet) -> None:
    """Before each test both replicas take requests."""
    wait_until(lambda: two.figure("torchwright:engine_ready") == 2, BACK_SECONDS)
    wait_until(lambda: two.routed() == 2, BACK_SECONDS)


def restarts(two: RunningFleet, name: str) -> float:
    return two.figure("torchwright:fleet_restarts_total", f'server="{name}"')


class Load(threading.Thread):
    """Short requests one after the other, until the block ends; none of them may be the same as another."""

    def __init__(self, two: RunningFleet) -> None:
        super().__init__(daemon=True)
        self._two, self._ended = two, threading.Event()
        self.answers: Counter[int | str] = Counter()

    def __enter__(self) -> Load:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(120)

    def run(self) -> None:
        while not self._ended.is_set():
            try:
                answer: int | str = self._two.complete(f"{self.answers.total()} of many").status_code
            except httpx.HTTPError as error:
                answer = repr(error)
            self.answers[answer] += 1


def test_a_replica_killed_in_mid_stream_gives_an_error_event_and_no_other_request_fails(
    two: RunningFleet,
) -> None:
    stream = two.stream()
    assert stream.begun.wait(60)
    ((name, pid),) = two.busy().items()
    before = restarts(two, name)
    with Load(two) as load:
        os.kill(pid, signal.SIGKILL)
        stream.done()
        wait_until(lambda: two.replicas().get(name, pid) != pid, BACK_SECONDS)
        wait_until(lambda: two.routed() == 2, BACK_SECONDS)  # added again, under load
    assert not stream.whole
    assert stream.cut is None
    assert '"type":"stream_error"' in "".join(stream.events[-2:])
    assert set(load.answers) == {200}, load.answers
    assert restarts(two, name) == before + 1


def test_a_replica_killed_before_the_first_token_is_not_seen(two: RunningFleet) -> None:
    """Both engines stand still, so that the request waits wherever it went; the other one goes on."""
    engines = {
        name: children(pid, "torchwright.serve.engine.process")[0] for name, pid in two.replicas().items()
    }
    one, other = engines.values()
    with paused(one), paused(other):
        stream = two.stream(n=1, max_tokens=8)
        wait_until(lambda: len(two.busy()) == 1)
        (pid,) = two.busy().values()
        assert not stream.events
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid))
    assert stream.done().whole
    assert stream.status == 200
    assert two.figure("smg_worker_retries_total", 'endpoint="completions"', 'worker_type="regular"') >= 1


def test_a_replica_that_is_replaced_loses_nothing(two: RunningFleet) -> None:
    """A rolling restart of one: its stream ends, other requests go to the other one, and it comes back."""
    stream = two.stream()
    assert stream.begun.wait(60)
    ((name, pid),) = two.busy().items()
    with Load(two) as load:
        os.kill(pid, signal.SIGTERM)
        assert stream.done().whole, (stream.cut, stream.events[-2:])
        wait_until(lambda: two.replicas().get(name, pid) != pid, BACK_SECONDS)
        wait_until(lambda: two.routed() == 2, BACK_SECONDS)
    assert set(load.answers) == {200}, load.answers


def test_a_killed_gateway_comes_back_on_its_port_and_nothing_goes_on_for_nobody(two: RunningFleet) -> None:
    stream = two.stream()
    assert stream.begun.wait(60)
    pid = two.gateway()
    os.kill(pid, signal.SIGKILL)
    stream.done()
    assert isinstance(stream.cut, httpx.RemoteProtocolError)  # nobody is there to send an event
    wait_until(lambda: not two.busy())

    def answers() -> bool:
        try:
            return two.complete().status_code == 200
        except httpx.TransportError:
            return False

    wait_until(answers, 30)
    assert two.gateway() != pid
    assert restarts(two, "gateway") == 1


def test_a_replica_that_hangs_gets_no_further_requests_and_those_that_it_has_are_answered(
    two: RunningFleet,
) -> None:
    name, pid = next(iter(two.replicas().items()))
    os.kill(pid, signal.SIGSTOP)
    # Requests of two beginnings, so that some of them go to it before anybody knows.
    held = [two.stream(f"{place} hangs", n=1, max_tokens=4) for place in range(8)]
    wait_until(lambda: two.routed() == 1, 60)
    begun = time.monotonic()
    for place in range(20):
        assert two.complete(f"{place} afterwards").status_code == 200
    assert time.monotonic() - begun < 40  # none of them waits until it is killed
    for stream in held:
        assert stream.done().whole
    wait_until(lambda: two.replicas().get(name, pid) != pid, BACK_SECONDS)


def test_faults_of_clients_open_no_circuit_and_leave_nothing_behind(two: RunningFleet) -> None:
    """Refused requests, and clients that leave: the gateway counts neither against a replica."""
    for _ in range(12):
        assert two.complete("far too long " * 1000).status_code == 400
    for place in range(24):
        with httpx.stream(
            "POST",
            two.url + "/v1/completions",
            json={
                "model": MODEL,
                "prompt": f"{place}",
                "max_tokens": 900,
                "ignore_eos": True,
                "stream": True,
            },
            timeout=60,
        ) as answer:
            next(answer.iter_lines())
    wait_until(lambda: two.figure("smg_worker_requests_active") == 0)
    wait_until(lambda: two.figure("torchwright:num_requests_running") == 0)
    assert two.figure("smg_worker_cb_state") == 0
    assert two.complete().status_code == 200


def bound(taken: socket.socket, port: int) -> bool:
    try:
        taken.bind(("127.0.0.1", port))
        return True
    except OSError:
        return False


def test_a_replica_whose_port_is_taken_gets_another(two: RunningFleet) -> None:
    name, pid = next(iter(two.replicas().items()))
    place = two.place(name)
    port = int(place.rpartition(":")[2])
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with paused(two.process.pid):  # or the fleet would be sooner
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: bound(taken, port))  # its last thread closes the port
            taken.listen()
        wait_until(lambda: two.routed() == 2 and two.place(name) != place, BACK_SECONDS)
        with Load(two) as load:
            wait_until(lambda: load.answers.total() > 20, 60)
        assert set(load.answers) == {200}


def test_without_a_replica_clients_are_asked_to_come_again(two: RunningFleet) -> None:
    for pid in two.replicas().values():
        os.kill(pid, signal.SIGKILL)
    answer = two.complete()
    assert answer.status_code == 503, answer.text
    wait_until(lambda: two.complete().status_code == 200, BACK_SECONDS)


def test_while_all_replicas_hang_clients_are_asked_to_come_again(two: RunningFleet) -> None:
    """Unless it is told not to, the gateway forgets a model whose servers fail probes for a while, and says 404."""
    with contextlib.ExitStack() as stack:
        for pid in two.replicas().values():
            stack.enter_context(paused(pid))
        wait_until(lambda: two.routed() == 0, 60)
        for _ in range(20):
            answer = two.complete()
            assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1"), answer.text
            time.sleep(1)
    wait_until(lambda: two.complete().status_code == 200, BACK_SECONDS)


def test_servers_that_run_elsewhere_are_joined_left_out_and_taken_back() -> None:
    """A restarted server at the same place included: SMG's own list of addresses would not take it back."""
    with command() as one, command() as other:
        places = [each.url.removeprefix("http://") for each in (one, other)]
        with fleet_of(places) as joined:
            wait_until(lambda: joined.routed() == 2, 30)
            assert joined.figure("torchwright:fleet_up") == 3
            with Load(joined) as load:
                other.process.send_signal(signal.SIGSTOP)
                wait_until(lambda: joined.routed() == 1, 60)
                other.process.send_signal(signal.SIGCONT)
                wait_until(lambda: joined.routed() == 2, 60)
            assert set(load.answers) == {200}, load.answers
            joined.process.send_signal(signal.SIGTERM)
            assert joined.process.wait(30) == 0
        assert one.process.poll() is None  # they are not the fleet's


def fleet_of(places: list[str]):
    return fleet("--replicas", ",".join(places), kv=None)
