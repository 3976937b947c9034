"""Streams and events of simulated devices; run by tests/sim/test_sim_device.py, with two devices."""

from __future__ import annotations

import pytest
import torch

from torchwright.hardware.devices.transfer import begin_fetch, send


def test_commands_of_a_stream_keep_their_order():
    x = torch.zeros(4, device="sim")
    torch.sim._sleep(0.3)
    for step in range(20):
        x.copy_(torch.full((4,), float(step)))
    assert x.tolist() == [19.0] * 4


def test_an_event_is_reached_when_its_stream_is_there():
    stream = torch.sim.Stream()
    event = torch.sim.Event()
    assert event.query()
    with torch.sim.stream(stream):
        torch.sim._sleep(0.4)
        event.record(stream)
    assert not event.query()
    assert not stream.query()
    assert torch.sim.current_stream().query()
    event.synchronize()
    assert event.query()
    assert stream.query()


def test_time_between_events():
    first, last = torch.sim.Event(enable_timing=True), torch.sim.Event(enable_timing=True)
    first.record()
    torch.sim._sleep(0.2)
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) >= 199
    plain = torch.sim.Event()
    plain.record()
    with pytest.raises((RuntimeError, ValueError), match="enable_timing"):
        first.elapsed_time(plain)


def test_a_stream_waits_for_an_event():
    side = torch.sim.Stream()
    source, to = torch.ones(4, device="sim"), torch.zeros(4, device="sim")
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        torch.sim._sleep(0.3)
        to.copy_(source)
        done = side.record_event()
    torch.sim.current_stream().wait_event(done)
    assert (to + 1).tolist() == [2.0] * 4


def test_an_event_of_another_device():
    with torch.sim.device(1):
        there = torch.sim.Stream("sim:1")
        there.wait_stream(torch.sim.current_stream())
        with torch.sim.stream(there):
            torch.sim._sleep(0.3)
            event = there.record_event()
    torch.sim.current_stream("sim:0").wait_event(event)
    assert event.query()


def test_a_missing_synchronisation_is_named():
    x = torch.ones(4, device="sim")
    side = torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        x.mul_(2)
    message = r"sim:0: aten::add.out on stream 0 reads a tensor that aten::mul.* wrote on stream [1-9]"
    with pytest.raises(RuntimeError, match=message):
        x + 1
    torch.sim.current_stream().wait_stream(side)
    assert (x + 1).tolist() == [3.0] * 4


def test_a_write_waits_for_readers():
    x = torch.ones(4, device="sim")
    side = torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        y = x + 1
    with pytest.raises(
        RuntimeError, match=r"aten::zero_.* writes a tensor that aten::add.out reads on stream [1-9]"
    ):
        x.zero_()
    torch.sim.synchronize()
    x.zero_()
    assert y.tolist() == [2.0] * 4


def test_backward_runs_where_forward_ran():
    side = torch.sim.Stream()
    x = torch.ones(4, device="sim", requires_grad=True)
    side.wait_stream(torch.sim.current_stream())
    with torch.sim.stream(side):
        loss = (x * 3).sum()
    torch.sim.current_stream().wait_stream(side)
    loss.backward()
    torch.sim.synchronize()
    assert x.grad.tolist() == [3.0] * 4


def test_a_fetch_waits_for_nothing_behind_it():
    fetched = begin_fetch(torch.arange(3, device="sim"))
    torch.sim._sleep(0.4)
    assert fetched() == [0, 1, 2]
    assert not torch.sim.current_stream().query()


def test_what_is_sent_arrives_in_its_turn():
    """Whatever becomes of the memory that it was sent from."""
    torch.sim._sleep(0.4)
    first = send(torch.full((1000,), 5.0), torch.device("sim"))
    second = send(torch.full((1000,), 7.0), torch.device("sim"))
    assert not torch.sim.current_stream().query()
    assert (first.sum().item(), second.sum().item()) == (5000.0, 7000.0)
