"""The operator scorecard: a device against the CPU, on the samples that ship in PyTorch's wheel for its own tests.

card = take("xpu", Limits())          in child processes; `card.shares()` and `card.faults()`
"""
