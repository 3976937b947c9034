"""Write deploy/kubernetes from the Helm chart, for clusters without Helm.

    python scripts/manifests.py            writes the manifests
    python scripts/manifests.py --check    exit code 1 and a diff when one of them is out of step

The chart is rendered by `helm` where it is installed, else by the package helm-python-sdk, which is Helm as a library.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocks import ROOT, settle

CHART = ROOT / "deploy" / "helm" / "torchwright"
OUT = ROOT / "deploy" / "kubernetes"
NAME, NAMESPACE = "torchwright", "torchwright"
WRITTEN: dict[str, tuple[list[str], dict[str, Any]]] = {
    "torchwright.yaml": (["server.yaml", "gateway.yaml"], {}),
    "hpa.yaml": (["autoscaling.yaml"], {"autoscaling": {"kind": "hpa"}}),
    "keda.yaml": (["autoscaling.yaml"], {"autoscaling": {"kind": "keda"}}),
    "monitor.yaml": (["monitor.yaml"], {"monitor": True}),
}
"""File → the templates that it is made from, and the values that differ from values.yaml."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 when out of step")
    check = parser.parse_args().check
    faults = [fault for name in WRITTEN for fault in settle(OUT / name, manifest(name), check)]
    print("\n".join(faults) if faults else f"{len(WRITTEN)} manifests are in step with the chart")
    return 1 if faults else 0


def manifest(name: str) -> str:
    """Return the text of a file in deploy/kubernetes."""
    templates, values = WRITTEN[name]
    found = rendered(values)
    header = "# Written by scripts/manifests.py from deploy/helm/torchwright; edit the templates instead.\n"
    if name != "torchwright.yaml":
        header += (
            "# With autoscaling, leave `replicas` out of the server's Deployment in torchwright.yaml.\n"
            * (name in ("hpa.yaml", "keda.yaml"))
        )
    parts = [found[template].strip().removeprefix("---").strip() for template in templates]
    return header + "---\n" + "\n---\n".join(parts) + "\n"


def rendered(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the chart's templates as Helm renders them with these values. Raises `RuntimeError` without Helm."""
    if shutil.which("helm"):
        return _by_command(values)
    try:
        from helm_python.chart import Chart  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise RuntimeError("neither helm nor helm-python-sdk is installed") from None
    with Chart.load(CHART) as chart:
        found = chart.render(values=dict(values), name=NAME, namespace=NAMESPACE)
    return {Path(name).name: text for name, text in found.items()}


def _by_command(values: Mapping[str, Any]) -> dict[str, str]:
    command = ["helm", "template", NAME, str(CHART), "--namespace", NAMESPACE, "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, str] = {}
    for part in done.stdout.split("---\n# Source: ")[1:]:
        source, _, text = part.partition("\n")
        name = Path(source).name
        found[name] = f"{found[name]}---\n{text}" if name in found else text
    return found


if __name__ == "__main__":
    sys.exit(main())
