"""Contract tests of every registered device; a device that this machine lacks only gives its reason."""

from __future__ import annotations

import dataclasses
import json

import pytest

from torchwright.core.errors import TorchwrightError
from torchwright.hardware.devices import devices, get_device
from torchwright.hardware.devices.base import Device


@pytest.fixture(scope="module", params=devices.names())
def device(request: pytest.FixtureRequest) -> Device:
    cls = devices.get(request.param)
    reason = cls.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return get_device(cls.name)


@pytest.mark.parametrize("name", devices.names())
def test_a_reason_is_in_words(name: str) -> None:
    cls = devices.get(name)
    assert cls.remedy is None or len(cls.remedy.split()) > 2
    reason = cls.unavailable()
    if reason is None:
        return
    assert len(reason.split()) > 2
    with pytest.raises(TorchwrightError) as refused:
        get_device(name)
    assert reason in str(refused.value)


class TestDevice:
    def test_it_says_what_it_is(self, device: Device) -> None:
        facts = device.identify()
        assert facts == device.identify()
        assert facts.kind == device.name
        assert facts.name
        assert facts.cores >= 1
        assert facts.memory_bytes > 0
        assert facts.read_gb_per_s is None, "ceilings are `measure`'s to find"
        assert facts.tflops == {}
        json.dumps(dataclasses.asdict(facts))

    def test_its_identity_is_plain_data(self, device: Device) -> None:
        """By which measured ceilings are found again."""
        assert json.dumps(device.identity(), sort_keys=True) == json.dumps(device.identity(), sort_keys=True)

    def test_ceilings_are_positive(self, device: Device) -> None:
        ceilings = device.measure()
        assert (ceilings.read_gb_per_s or 0) > 0
        assert all(rate > 0 for rate in ceilings.tflops.values())

    def test_memory_is_counted(self, device: Device) -> None:
        device.synchronize()
        assert isinstance(device.reset_peak_memory(), bool)
        assert device.peak_memory_bytes() >= 0
        assert 0 <= device.free_memory_bytes() <= device.identify().memory_bytes
