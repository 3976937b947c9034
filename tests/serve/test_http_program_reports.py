"""Reports from users of other servers about programs, grammars and weights that change: each is tried here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_support import Command, command, error, wait_until
from safetensors.torch import load_file, save_file

from torchwright.workloads.language import BUNDLED

pytestmark = pytest.mark.slow
"""`test_engine_weights`, `test_engine_control`, `test_http_generate` and `test_grammar_lark` drive each by itself."""
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
PROMPT = list(range(5, 105))


def write(folder: Path, scale: float) -> None:
    """The bundled model with one tensor scaled; files that are there are overwritten in place."""
    folder.mkdir(exist_ok=True)
    for file in BUNDLED.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(BUNDLED / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith("mlp.down_proj.weight"))
    tensors[name] = tensors[name] * scale
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, Path]]:
    folder = tmp_path_factory.mktemp("weights")
    for name, scale in (("one", 1.0), ("half", 0.5)):
        write(folder / name, scale)
    with command("--allow-weights", str(folder)) as running:
        yield running, folder


@pytest.fixture(scope="module")
def http(real: tuple[Command, Path]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real[0].url, timeout=60) as client:
        yield client


def generate(http: httpx.Client, **fields: Any) -> Any:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY} | fields
    response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def update(http: httpx.Client, name: str, **fields: Any) -> None:
    response = http.post("/update_weights_from_disk", json={"model_path": name} | fields)
    assert response.status_code == 200, response.text


def test_no_key_of_old_weights_is_reused(http: httpx.Client) -> None:
    """lmdeploy#4917: the prefix cache answered for weights that were gone."""
    update(http, "one")
    first = generate(http)
    assert generate(http)["meta_info"]["cached_tokens"] == 96
    update(http, "half")
    changed = generate(http)
    assert changed["meta_info"]["cached_tokens"] == 0
    assert changed["output_ids"] != first["output_ids"]
    update(http, "one")
    assert generate(http)["output_ids"] == first["output_ids"]


def test_weights_change_while_requests_run(http: httpx.Client) -> None:
    """AReaL#140: an engine ended because its cache could not be emptied during a change."""
    update(http, "one")
    found: list[Any] = []
    params = GREEDY | {"max_new_tokens": 700, "n": 4}
    thread = threading.Thread(target=lambda: found.append(generate(http, sampling_params=params)))
    thread.start()
    wait_until(lambda: http.get("/v1/loads").json()["loads"][0]["num_running_reqs"] > 0)
    for name in ("half", "one"):
        update(http, name)
    thread.join(60)
    assert [len(row["output_ids"]) for row in found[0]] == [700] * 4


@pytest.mark.slow
def test_a_folder_that_is_written_again_is_read_again(http: httpx.Client, real: tuple[Command, Path]) -> None:
    """vllm#32718: weights of the same path came from a cache."""
    folder = real[1] / "again"
    write(folder, 1.0)
    update(http, "again")
    first = generate(http)["output_ids"]
    write(folder, 0.5)
    assert generate(http)["output_ids"] == first, "what is served does not change with the files"
    update(http, "again")
    assert generate(http)["output_ids"] != first
    update(http, "half")
    halved = generate(http)["output_ids"]
    update(http, "again")
    assert generate(http)["output_ids"] == halved


def test_an_id_that_is_in_use_is_refused_and_the_first_request_goes_on(http: httpx.Client) -> None:
    """sglang#8089, vllm#10583: the second of two requests with one id had no answer, or ended the engine."""
    params = GREEDY | {"max_new_tokens": 800}
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(generate(http, rid="same", sampling_params=params)))
    thread.start()
    wait_until(lambda: http.get("/v1/loads").json()["loads"][0]["num_running_reqs"] > 0)
    again = http.post("/generate", json={"input_ids": PROMPT, "rid": "same", "sampling_params": GREEDY})
    assert (again.status_code, error(again)["code"]) == (400, "id_in_use")
    thread.join(60)
    assert len(found[0]["output_ids"]) == 800
    assert len(generate(http, rid="same")["output_ids"]) == 12


def test_scores_of_a_cached_prompt_are_those_of_a_new_one(http: httpx.Client) -> None:
    """vllm#3251, #8268 and #42019: scores behind a cached prefix ended the engine, or were another request's."""
    scored = {"return_logprob": True, "top_logprobs_num": 2, "sampling_params": {"max_new_tokens": 0}}
    http.post("/flush_cache").raise_for_status()
    new = generate(http, logprob_start_len=0, **scored)["meta_info"]
    generate(http)
    for start in (0, 16, 17, 32, 33, 95, 96, 99):
        again = generate(http, logprob_start_len=start, **scored)["meta_info"]
        assert again["input_token_logprobs"] == new["input_token_logprobs"][start:]
        assert again["input_top_logprobs"] == new["input_top_logprobs"][start:]


def test_the_token_at_the_border_has_its_score(http: httpx.Client) -> None:
    """strands-sglang#34, sglang#1257: the first scored token had no log-probability, or one too many was scored."""
    scored = {"return_logprob": True, "sampling_params": {"max_new_tokens": 0}}
    found = generate(http, logprob_start_len=98, **scored)["meta_info"]["input_token_logprobs"]
    assert [id for _, id, _ in found] == PROMPT[98:]
    assert all(logprob is not None for logprob, _, _ in found)


@pytest.mark.plain('?start: select\\n?select: "SELECT " name\\n?name: WORD\\n?WORD: /[a-c]/-allowed3')
@pytest.mark.parametrize(
    ("grammar", "allowed"),
    [
        # vllm#11118: EBNF with alternatives was taken for Lark.
        ('root ::= term "=" term\nterm ::= "x" | "y"', ["x=x", "x=y", "y=x", "y=y"]),
        # vllm#9433 and #16911: Lark's grammars of the documentation failed.
        (
            '?start: "It is rated " rating " stars."\n?rating: /[1-2]/',
            [f"It is rated {i} stars." for i in (1, 2)],
        ),
        # outlines#1610: this ended the engine's processes.
        ('?start: term (("+" | "-") term)~1\n?term: DIGIT\n%import common.DIGIT', None),
        # vllm#3536: a terminal with the mark of a rule.
        (
            '?start: select\n?select: "SELECT " name\n?name: WORD\n?WORD: /[a-c]/',
            ["SELECT a", "SELECT b", "SELECT c"],
        ),
    ],
)
def test_grammars_of_both_kinds_are_told_apart(
    http: httpx.Client, grammar: str, allowed: list[str] | None
) -> None:
    body = {"prompt": "x", "max_tokens": 40, "guided_grammar": grammar}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert allowed is None or choice["text"] in allowed


def test_requests_that_come_while_others_are_aborted_are_answered_or_aborted(http: httpx.Client) -> None:
    """sglang#13338: requests on their way while all were aborted held a change of weights up for ever."""
    params = GREEDY | {"max_new_tokens": 600}
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(generate(http, sampling_params=params)))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    assert http.post("/pause_generation", json={"mode": "abort"}).status_code == 200
    update(http, "one")
    assert http.post("/continue_generation").status_code == 200
    for thread in threads:
        thread.join(60)
    kinds = [answer["meta_info"]["finish_reason"]["type"] for answer in found]
    assert len(kinds) == 12
    assert set(kinds) <= {"abort", "length"}
