"""What must be cheap to import. The import law itself is held by import-linter (`[tool.importlinter]`)."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["facts", "errors", "registry", "report.terminal", "report.html", "cli", "devices"]
)
def test_no_torch_comes_with(module):
    code = f"import sys, torchwright.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
