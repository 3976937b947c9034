"""The files of deploy/, compared with the commands, paths and metrics that there are; nothing is deployed.

Manifests go through Helm and Kubernetes' own schemas where these are installed (helm or helm-python-sdk, and
kubernetes-validate), Slurm scripts run with a Slurm of shell scripts, and the image's steps in a virtual environment.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from torchwright.cli.group import cli
from torchwright.hardware.kernels.cpu.build import AHEAD
from torchwright.serve.command import KEY_VARIABLE
from torchwright.serve.http.app import OPERATIONS
from torchwright.serve.wire.metrics import ServerMetrics

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "torchwright"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
FOREIGN = {"ScaledObject", "PodMonitor", "JobSet"}
"""Kinds of operators, which Kubernetes' own schemas do not have."""


@pytest.fixture
def manifests(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import manifests  # pyright: ignore[reportMissingImports]

    if shutil.which("helm") is None:
        pytest.importorskip("helm_python", reason="neither helm nor helm-python-sdk is installed")
    return manifests


def documents(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if isinstance(each, dict)]


def objects() -> list[dict[str, Any]]:
    """Every Kubernetes object of deploy/kubernetes."""
    return [each for path in MANIFESTS for each in documents(path.read_text()) if "kind" in each]


def validate(each: dict[str, Any]) -> None:
    """Hold an object against Kubernetes' schema; of a JobSet the Jobs that it makes."""
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    if each["kind"] == "JobSet":
        for number, replicated in enumerate(each["spec"]["replicatedJobs"]):
            validate(
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": str(number)}}
                | replicated["template"]
            )
    elif each["kind"] not in FOREIGN:
        schemas.validate(each, "1.34", strict=True)


def pods(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The pod templates of Deployments and of JobSets."""
    for each in found:
        if each["kind"] == "Deployment":
            yield each["spec"]["template"]["spec"]
        if each["kind"] == "JobSet":
            for replicated in each["spec"]["replicatedJobs"]:
                yield replicated["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_follow_kubernetes_schemas(path: Path) -> None:
    for each in documents(path.read_text()):
        validate(each)


def test_a_wrong_field_is_found() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    (server, *_) = [each for each in objects() if each["kind"] == "Deployment"]
    server["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(schemas.ValidationError):
        validate(server)


def test_manifests_are_the_charts(manifests: Any) -> None:
    for name in manifests.WRITTEN:
        assert (DEPLOY / "kubernetes" / name).read_text() == manifests.manifest(name), (
            "run scripts/manifests.py"
        )


@pytest.mark.parametrize(
    "values",
    [
        {"model": "/models/a b", "modelClaim": "claim", "serveArgs": ["--quantize=w4a8"], "replicas": 1},
        {
            "gateway": {"enabled": False},
            "env": [{"name": "HF_TOKEN", "value": "x"}],
            "nodeSelector": {"a": "b"},
        },
        {"autoscaling": {"kind": "hpa"}, "monitor": True, "tolerations": [{"operator": "Exists"}]},
        {"autoscaling": {"kind": "keda"}, "drain": {"preStopSeconds": 5, "answerSeconds": 60}},
    ],
)
def test_the_chart_is_right_with_other_values(manifests: Any, values: dict[str, Any]) -> None:
    found = [each for text in manifests.rendered(values).values() for each in documents(text)]
    for each in found:
        validate(each)
    server = next(each for each in found if each["metadata"]["name"] == "torchwright-server")
    assert ("replicas" in server["spec"]) == ("autoscaling" not in values)
    for words in commands_of(found):
        parse(words)


def test_an_unknown_kind_of_autoscaling_is_refused(manifests: Any) -> None:
    with pytest.raises(Exception, match="allowed: none, hpa, keda"):
        manifests.rendered({"autoscaling": {"kind": "vpa"}})


# ------------------------------------------------------------------------------------------------- commands


def commands_of(found: list[dict[str, Any]]) -> list[list[str]]:
    """The words after `torchwright` of every pod's container."""
    commands = []
    for pod in pods(found):
        for container in pod["containers"]:
            words = container.get("command", [])
            if "--no-python" in words:
                commands.append(words[words.index("--no-python") + 2 :])
            elif container["image"].startswith("torchwright:"):
                commands.append(container["args"])
    return commands


def commands_in(path: Path) -> Iterator[list[str]]:
    """The words after `torchwright` of every command line in a file of shell, or in the code of a page."""
    text = path.read_text().replace("\\\n", " ")
    if usage := re.search(rf"^# +sbatch .*{path.name} (.*)$", text, re.MULTILINE):
        text = text.replace('"$@"', usage[1])
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    if path.suffix == ".md":
        blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        spans = re.findall(r"`(torchwright [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        lines = [*itertools.chain.from_iterable(map(str.splitlines, blocks)), *spans]
    for line in lines:
        line = VARIABLE.sub("1", COUNT.sub("2", line))
        words = list(shlex.shlex(line, posix=True, punctuation_chars=True))
        for at, word in enumerate(words[:-1]):
            if word == "torchwright" and words[at + 1] in cli.commands:
                yield list(itertools.takewhile(lambda each: not set(each) <= set("();<>|&"), words[at + 1 :]))


VARIABLE = re.compile(r"\$\w+|\$\{[^}]*\}")
"""An expansion of the shell's, which is 1 in a test."""
COUNT = re.compile(r"\$count\b")
"""The number of an array's tasks, which is 2: place 1 of them is one."""


def parse(words: list[str]) -> None:
    """Let the real command parse the words, without running it."""
    command = cli.commands[words[0]]
    with command.make_context(words[0], list(words[1:])) as context:
        if isinstance(command, click.Group):
            name, inner, rest = command.resolve_command(context, [*context.protected_args, *context.args])
            assert inner is not None
            inner.make_context(name, rest, parent=context)


SHELL = [
    DEPLOY / "Dockerfile",
    *sorted((DEPLOY / "slurm").iterdir()),
    *sorted((DEPLOY / "skypilot").iterdir()),
    ROOT / "docs" / "deploy.md",
]


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_every_command_line_is_one(path: Path) -> None:
    found = list(commands_in(path))
    assert found
    for words in found:
        parse(words)


def test_every_container_runs_a_command_that_is_one() -> None:
    found = commands_of(objects())
    assert len(found) == 2
    for words in found:
        parse(words)
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name in ("server-0", "server-1"):
        parse(shlex.split(re.sub(r"\$\{\w+:-(\w*)\}", r"\1", compose["services"][name]["command"])))
    entry, words = (
        json.loads(re.findall(rf"^{key} (\[.*\])$", dockerfile_stage("server"), re.MULTILINE)[0])
        for key in ("ENTRYPOINT", "CMD")
    )
    assert entry == ["torchwright"]
    parse(words)


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(click.UsageError, match="No such option"):
        parse(["serve", "--hots=0.0.0.0"])


def test_the_gateways_options_exist() -> None:
    pytest.importorskip("smg", reason="the extra `gateways` is not installed")
    known = subprocess.run(
        [sys.executable, "-m", "smg", "launch", "--help"], capture_output=True, text=True
    ).stdout
    files = (
        DEPLOY / "kubernetes" / "torchwright.yaml",
        DEPLOY / "compose.yaml",
        DEPLOY / "slurm" / "serve.sbatch",
    )
    launches = [path.read_text().split("launch", 1)[1] for path in files]
    launches[0] = launches[0].split("env:")[0]
    named = {name for text in launches for name in re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text)}
    assert len(named) > 8
    assert [name for name in sorted(named) if name not in known] == []


# ------------------------------------------------------------------------------------------- paths and metrics


def test_probes_ask_paths_that_the_server_has() -> None:
    paths = {path for operation in OPERATIONS for path in (operation.path, *operation.also)}
    (server,) = [
        each
        for each in objects()
        if each["metadata"]["name"] == "torchwright-server" and each["kind"] == "Deployment"
    ]
    container = server["spec"]["template"]["spec"]["containers"][0]
    probes = {
        name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")
    }
    assert probes == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
    assert set(probes.values()) <= paths
    assert (
        yaml.safe_load((DEPLOY / "skypilot" / "serve.yaml").read_text())["service"]["readiness_probe"]["path"]
        in paths
    )
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (asked,) = re.findall(r":8000(/\w+)", compose["services"]["server-0"]["healthcheck"]["test"][-1])
    assert asked in paths
    (monitor,) = [each for each in objects() if each["kind"] == "PodMonitor"]
    assert monitor["spec"]["podMetricsEndpoints"][0]["path"] in paths


def test_metrics_that_scale_are_those_of_the_server() -> None:
    class Client:
        """An engine that has not said anything yet."""

        state, stats, restarts = "ready", None, 0

        def __init__(self) -> None:
            self.before = Counter[str]()

    rendered = ServerMetrics(Client(), "m").render().decode()  # type: ignore[arg-type]
    named = {
        name
        for path in MANIFESTS
        for name in re.findall(r"torchwright:\w+", path.read_text())
        if "0.1.0" not in name
    }
    named = {name for name in named if not re.match(r"torchwright:\d", name)}
    assert named == {"torchwright:num_requests_waiting"}
    assert "\ntorchwright:num_requests_waiting{" in rendered
    adapter = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())[0]
    (hpa,) = [each for each in objects() if each["kind"] == "HorizontalPodAutoscaler"]
    assert hpa["spec"]["metrics"][0]["pods"]["metric"]["name"] == adapter["name"]["as"]


def test_variables_are_those_that_the_program_reads() -> None:
    texts = "".join(path.read_text() for path in DEPLOY.rglob("*") if path.is_file())
    assert set(re.findall(r"TORCHWRIGHT_\w+", texts)) == {KEY_VARIABLE, AHEAD}


def test_pods_have_time_to_drain_and_no_privileges() -> None:
    found = list(pods(objects()))
    assert len(found) == 3
    for pod in found:
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            if "lifecycle" in container:
                sleeps = container["lifecycle"]["preStop"]["sleep"]["seconds"]
                probe = container["readinessProbe"]
                assert sleeps > probe["periodSeconds"] * probe["failureThreshold"]
                assert pod["terminationGracePeriodSeconds"] > sleeps + 60
    texts = [(DEPLOY / "Dockerfile").read_text(), (CHART / "templates" / "_helpers.tpl").read_text()]
    assert all("10001" in text for text in texts)


@pytest.mark.parametrize("path", sorted((DEPLOY / "skypilot").iterdir()), ids=lambda path: path.name)
def test_skypilot_reads_its_tasks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sky: Any = pytest.importorskip("sky", reason="skypilot is not installed")
    monkeypatch.chdir(ROOT)
    assert sky.Task.from_yaml(str(path)).run


# ---------------------------------------------------------------------------------------------------- Slurm

SLURM = {
    "scontrol": 'if [ "$1" = show ]; then printf "node%d\\n" 1 2; else echo "scontrol $*" >> "$RAN"; fi',
    "srun": 'echo "srun $*" >> "$RAN"; sleep "${SRUN_SECONDS:-0}"; exit "${SRUN_CODE:-0}"',
    "torchwright": 'echo "torchwright $*" >> "$RAN"; printf "event\\n%s\\n" "$LAST"; eval "${MAP:-}"',
    "python": 'echo "python $*" >> "$RAN"; sleep 5',
}


def submit(script: str, folder: Path, *arguments: str, **environment: str) -> tuple[int, list[str]]:
    """Run a batch script as sbatch would on two nodes: its exit code, and the commands that it ran."""
    for name, text in SLURM.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    ran = folder / "ran"
    ran.write_text("")
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[1-2]", "RAN": str(ran)}
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(DEPLOY / "slurm" / script), *arguments]
    done = subprocess.run(
        command, env={**os.environ, **slurm, **path, **environment}, timeout=30, check=False
    )
    return done.returncode, ran.read_text().splitlines()


@pytest.mark.parametrize("path", sorted((DEPLOY / "slurm").iterdir()), ids=lambda path: path.name)
def test_slurm_scripts_are_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize(
    ("code", "last", "requeued"),
    [("0", "end", False), ("1", "left", True), ("1", "stopped", False), ("9", "", False), ("137", "", True)],
)
def test_a_run_that_was_cut_off_goes_back_to_the_queue(
    tmp_path: Path, code: str, last: str, requeued: bool
) -> None:
    got, ran = submit("train.sbatch", tmp_path, "runs/RUN.toml", SRUN_CODE=code, LAST=last)
    assert got == int(code)
    assert "--rdzv-endpoint node1:20077" in ran[0]
    assert ran[0].endswith("--no-python torchwright train runs/RUN.toml")
    assert ran[1].startswith("torchwright query runs/out SELECT event")
    assert ("scontrol requeue 77" in ran) == requeued


ARRAY = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
"""Task 3 of an array; its MIN, MAX and COUNT are Slurm's for the whole array."""


@pytest.mark.parametrize(
    ("least", "most", "count", "shard"),
    [("0", "15", "16", "3/16"), ("1", "4", "4", "2/4"), ("3", "3", "1", "0/1")],
)
def test_an_array_counts_its_shards_from_its_first_task(
    tmp_path: Path, least: str, most: str, count: str, shard: str
) -> None:
    array = {
        **ARRAY,
        "SLURM_ARRAY_TASK_MIN": least,
        "SLURM_ARRAY_TASK_MAX": most,
        "SLURM_ARRAY_TASK_COUNT": count,
    }
    code, ran = submit("map.sbatch", tmp_path, "a model", "in.jsonl", "-o", "out.jsonl", **array)
    assert (code, ran) == (0, [f"torchwright map a model in.jsonl -o out.jsonl --shard {shard}"])


@pytest.mark.parametrize(
    "array", [{}, {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "3", "SLURM_ARRAY_TASK_COUNT": "2"}]
)
def test_an_array_with_gaps_and_a_job_without_an_array_are_refused(
    tmp_path: Path, array: dict[str, str]
) -> None:
    code, ran = submit("map.sbatch", tmp_path, "model", "in.jsonl", "-o", "out.jsonl", **ARRAY, **array)
    assert (bool(code), ran) == (True, [])


def test_a_shard_whose_time_is_over_goes_back_to_the_queue(tmp_path: Path) -> None:
    """Slurm sends USR1 to the script alone; the task is requeued, and not the array that has its number."""
    array = {"SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "3", "SLURM_ARRAY_TASK_COUNT": "4"}
    words = ("model", "in.jsonl", "-o", "out.jsonl")
    ends = "kill -USR1 $PPID; sleep 0.5; exit 7"
    code, ran = submit("map.sbatch", tmp_path, *words, MAP=ends, **ARRAY, **array)
    assert code == 7
    assert ran[1:] == ["scontrol requeue 70_3"]


@pytest.mark.slow
def test_servers_of_all_nodes_stand_behind_the_gateway(tmp_path: Path) -> None:
    code, ran = submit(
        "serve.sbatch", tmp_path, "model", TORCHWRIGHT_API_KEY="k", SRUN_CODE="3", SRUN_SECONDS="2"
    )
    assert code == 3
    (gateway,) = [line for line in ran if line.startswith("python -m smg")]
    assert gateway.endswith("--worker-urls http://node1:8000 http://node2:8000")
    assert any(line.startswith("srun torchwright serve model --host 0.0.0.0") for line in ran)


# ---------------------------------------------------------------------------------------------- the image's steps


def dockerfile_stage(name: str) -> str:
    """The lines of a stage, each instruction on one."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL))
    return stages[name]


AS_ROOT = ("apt-get", "useradd")
"""Steps that change the machine: a test does not run them."""


@pytest.mark.slow  # installs the package into a new environment and compiles the kernels
@pytest.mark.timeout(1800)
def test_the_images_steps_make_a_server_without_a_compiler(tmp_path: Path) -> None:
    """The steps of both stages run in a virtual environment that has this one's packages, without a network."""
    image, source = tmp_path / "image", tmp_path / "source"
    image.mkdir(mode=0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PATH": f"{image}/venv/bin{os.pathsep}{os.environ['PATH']}",
        "TORCHWRIGHT_CACHE": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "TORCH": "torch",
    }

    def run(line: str, **more: str) -> str:
        line = line.replace("/opt/torchwright", str(image)).replace("/source", str(source))
        done = subprocess.run(
            ["sh", "-ec", line], env={**environment, **more}, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    for line in dockerfile_stage("build").splitlines():
        word, _, rest = line.partition(" ")
        if word == "COPY":
            *names, target = rest.split()
            place = Path(target.replace("/source", str(source)))
            place.mkdir(parents=True, exist_ok=True)
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, place, dirs_exist_ok=True)
                else:
                    shutil.copy(ROOT / name, place)
        if word == "RUN" and not any(each in rest for each in AS_ROOT):
            run(rest)
            if "-m venv" in rest:
                (packages,) = (image / "venv" / "lib").glob("python*/site-packages")
                here = [path for path in sys.path if path.endswith("site-packages")]
                for old in packages.glob("setuptools*"):  # would hide the one that the packages here ask for
                    shutil.rmtree(old)
                (packages / "here.pth").write_text("\n".join(here))
    assert len(list((image / "kernels").glob("torchwright-ahead-*"))) == 1
    shutil.rmtree(tmp_path / "cache")
    without = {"CXX": "no-compiler", "TORCHWRIGHT_KERNELS": f"{image}/kernels"}
    assert re.search(
        r"^ENV TORCHWRIGHT_KERNELS=/opt/torchwright/kernels$", dockerfile_stage("server"), re.MULTILINE
    )
    steps = [line[4:] for line in dockerfile_stage("server").splitlines() if line.startswith("RUN ")]
    for line in steps:
        if not any(each in line for each in AS_ROOT):
            assert "torchwright-ahead-" in run(line, **without)
    generate = "torchwright generate --prompt 'The module' --max-new-tokens 4 --quantize w4a8"
    assert run(generate, **without)
