"""What holds for every process of a test run; pytest-xdist starts its own after this file has been read."""

from __future__ import annotations

import os

# OpenMP's threads spin while they wait, for what another process's threads would compute on the same processor.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Tests of other processes are other programs to a search: what it chooses does not depend on them.
os.environ.setdefault("TORCHWRIGHT_ASSUME_QUIET", "1")
# pytest-xdist's workers have 80: tables are as wide as in a file without it.
os.environ.pop("COLUMNS", None)
