"""The machine's load: see `torchwright.cpu_load`."""

from torchwright.cpu_load import Load as Load
