"""What users see on standard error of other people's libraries: nothing that they could not mend."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from torchwright.core.quiet import TALKATIVE, quiet_import, unreported

pytest.importorskip("torchao")
WAYS = {
    "transformers": "from torchwright.workloads.huggingface import model_class; model_class('BertModel')",
    "torchao": "from torchwright.train.run.objectives.precision import mx_round; "
    "mx_round(torch.zeros(1, 32).bfloat16(), 'mxfp8')",
}


@pytest.mark.slow  # `test_wait_ready` finds nothing of an engine on standard error
@pytest.mark.parametrize("library", WAYS)
def test_nothing_of_their_imports_reaches_standard_error(library: str) -> None:
    code = f"import sys, torch; {WAYS[library]}; assert 'torchao' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_their_loggers_are_as_loud_as_before() -> None:
    logger = logging.getLogger(TALKATIVE[1])
    before = logger.level
    with quiet_import():
        assert logger.level == logging.ERROR
    assert logger.level == before


def test_what_keeps_libraries_from_reporting_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "no")
    monkeypatch.delenv("NNCF_CI", raising=False)
    with unreported():
        assert (os.environ["CI"], os.environ["NNCF_CI"]) == ("true", "1")
    assert os.environ["CI"] == "no"
    assert "NNCF_CI" not in os.environ
