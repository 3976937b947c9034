"""The contract of devices: the tests are shipped, `pytest --pyargs torchwright.testing` runs them anywhere."""

from torchwright.testing.test_devices import TestDevice, device, test_a_reason_is_in_words

__all__ = ["TestDevice", "device", "test_a_reason_is_in_words"]
