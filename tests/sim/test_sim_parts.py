"""packages/sim: its settings, what crosses the border of processes, and missing synchronisation."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "packages" / "sim"))
from torchwright_sim import wire
from torchwright_sim.order import Order, Use
from torchwright_sim.settings import Fault, Settings, parse


def test_settings():
    assert parse("") == Settings()
    found = parse(
        "devices=8, memory=512MiB,sync=warn,fault=oom@sim:2#1000,fault=wrong@aten::sin,fault=hang@aten.cos#3"
    )
    assert (found.devices, found.memory, found.sync) == (8, 512 << 20, "warn")
    assert found.faults[0] == Fault("oom", 2, None, 1000)
    assert found.on_device(2) == {"oom": 1000}
    assert found.on_operators() == {"aten::sin": ("wrong", 1), "aten::cos": ("hang", 3)}


@pytest.mark.parametrize(
    "text",
    [
        *("devices", "cards=2", "devices=0", "devices=65", "devices=2,devices=3", "memory=2", "memory=1B"),
        *("memory=9999999GiB", "sync=maybe", "fault=oom", "fault=oom@aten::sin", "fault=wrong@sim:0"),
        *("fault=kill@sim:1", "fault=kill@sim:0#0", "fault=melt@sim:0"),
    ],
)
def test_settings_that_are_none(text: str):
    with pytest.raises(ValueError, match=r"^TORCHWRIGHT_SIM: .*(allowed|is not|twice|but devices=1)"):
        parse(text)


def test_a_frame_crosses_the_border():
    here, there = socket.socketpair()
    with here, there:
        x = torch.randn(7).to(torch.bfloat16)
        place = wire.Place(512, 64, torch.bfloat16, 3, (7,), (1,), conj=True)
        wire.send(here, {"to": place.encode(), "x": float("inf")}, wire.raw(x))
        header, payload = wire.receive(there, 14)
        assert wire.Place.decode(header["to"]) == place
        assert header["x"] == float("inf")
        assert wire.from_raw(payload, torch.bfloat16, (7,)).equal(x)
        wire.send(here, {}, b"15 bytes of it.")
        with pytest.raises(wire.Closed, match="more than is allowed"):
            wire.receive(there, 14)
        here.close()
        with pytest.raises(wire.Closed):
            wire.receive(there, 14)


def use(stream: int, number: int) -> Use:
    return Use(stream, number, f"op{number}")


def test_a_read_waits_for_the_write():
    order = Order("sim:0")
    assert order.hazard(use(1, 1), [], [7]) is None
    assert order.hazard(use(1, 2), [7], []) is None
    assert "op3 on stream 2 reads a tensor that op1 wrote on stream 1" in (
        order.hazard(use(2, 3), [7], []) or ""
    )
    order.stream_waits(3, 1, 1)
    assert order.hazard(use(3, 4), [7], []) is None
    assert "op5 on stream 4 writes a tensor that op2 reads on stream 1" in (
        (order.stream_waits(4, 1, 1), order.hazard(use(4, 5), [], [7]))[1] or ""
    )


def test_waiting_is_transitive_through_events():
    order = Order("sim:0")
    order.hazard(use(1, 5), [], [7])
    order.stream_waits(2, 1, 5)
    order.recorded(2, 9)
    order.stream_waits(3, 2, 9)
    assert order.hazard(use(3, 1), [7], []) is None


def test_the_host_orders_what_comes_after_it_waited():
    order = Order("sim:0")
    order.hazard(use(1, 5), [], [7])
    order.host_waited(1, 4)
    assert order.hazard(use(2, 1), [7], []) is not None
    order.host_waited(1, 5)
    assert order.hazard(use(2, 2), [7], []) is None


def test_it_agrees_with_the_order_that_was_drawn():
    """Against a slow reference: who happened before whom, by walking all commands of random programs."""
    generator = torch.Generator().manual_seed(0)

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    for _ in range(60):
        order, done, last = Order("sim:0"), [], {}
        edges: dict[tuple[int, int], set[tuple[int, int]]] = {}
        uses: list[tuple[tuple[int, int], int, bool]] = []
        waiting: dict[int, set[tuple[int, int]]] = {}
        for _ in range(30):
            stream = draw(3)
            if draw(3) == 0 and done:
                other, number = done[draw(len(done))]
                event = (other, number)
                if last[other] == number:  # an event is recorded after the newest command
                    order.recorded(other, number)
                    order.stream_waits(stream, other, number)
                    waiting.setdefault(stream, set()).update(waiting.get(other, set()) | {event})
                continue
            number = last.get(stream, 0) + 1
            before = waiting.get(stream, set()) | ({(stream, number - 1)} if number > 1 else set())
            edges[stream, number] = set(before)
            serial, writes = draw(2), draw(2) == 1
            seen, todo = set(), list(before)
            while todo:
                each = todo.pop()
                if each not in seen:
                    seen.add(each)
                    todo.extend(edges.get(each, ()))
            hazard = False
            for command, used, wrote in reversed(uses):
                if used == serial and (writes or wrote):
                    hazard = hazard or command not in seen
                if used == serial and wrote:
                    break
            found = order.hazard(use(stream, number), [] if writes else [serial], [serial] if writes else [])
            assert (found is not None) == hazard
            last[stream] = number
            done.append((stream, number))
            uses.append(((stream, number), serial, writes))
