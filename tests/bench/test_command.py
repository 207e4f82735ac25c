"""`compress bench` as a user runs it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.server import Behaviour, serving
from tests.product import run_cli
from tests.tiny import tiny_model

SMALL = ("--concurrency", "1,2", "--requests", 3, "--prompt-tokens", "8-12", "--output-tokens", 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    place = tmp_path_factory.mktemp("bench")
    return tiny_model(place / "base"), tiny_model(place / "small", num_hidden_layers=1)


def one_line(err: str) -> str:
    """The last line of stderr; before it stand progress lines at most."""
    assert "Traceback" not in err
    *before, last = [line for line in err.splitlines() if line.strip()]
    assert all(line.startswith("bench ") for line in before)
    return last


def test_an_engine_against_its_baseline(tmp_path: Path, models: tuple[Path, Path]) -> None:
    base, small = models
    record, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    files = ("--json", record, "--plot", plot)
    code, out, err = run_cli(
        "bench", small, "--baseline", base, *SMALL, *files, "--rounds", 2, "--goodput", "ttft=1e6", "--seed", 5
    )
    assert code == 0, err
    for title in ("TTFT ms", "TPOT ms", "ITL ms", "req/s", "good"):
        assert title in out
    assert re.search(
        r"^compressed  \d+\.\d\d times the baseline's output tok/s at 2 clients \(95 % ", out, re.MULTILINE
    )
    assert "1, 2 requests of each arm, not measured" in out
    told = json.loads(record.read_text())
    assert [level["load"] for level in told["levels"]] == [{"clients": 1}, {"clients": 2}]
    for level in told["levels"]:
        assert set(level["figures"]) == set(level["runs"]) == {"baseline", "compressed"}
        for role, one in level["figures"].items():
            assert (one["requests"], one["failed"], one["short"]) == (3 * 4, 0, 0)
            assert one["goodput"] == one["requests_per_s"] > 0
            assert one["ttft"]["median"] <= one["ttft"]["p90"] <= one["ttft"]["p99"] <= one["e2e"]["p99"]
            requests = [request for run in level["runs"][role] for request in run["requests"]]
            assert all(len(request["pieces_ms"]) == request["output_tokens"] == 4 for request in requests)
        assert set(level["ratios"]) == {"output_tokens_per_s", "tpot", "ttft"}
    assert told["workload"]["seed"] == 5
    assert told["arms"] == {"baseline": str(base), "compressed": str(small)}
    assert {"hardware", "versions", "load_before", "load_after", "command", "finished"} <= set(told["receipt"])
    assert "--baseline" in told["receipt"]["command"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_one_engine_under_arrivals(models: tuple[Path, Path]) -> None:
    """--exact reaches the engine; without warm-up that is said."""
    code, out, err = run_cli(
        "bench", models[0], "--rate", "50", "--requests", 4, "--output-tokens", 3, "--warmup", 0, "--exact"
    )
    assert code == 0, err
    assert "50 req/s" in out
    assert "warm-up     none" in out
    assert "times the baseline" not in out


def test_speculation_is_of_the_checkpoint_alone(tmp_path: Path, models: tuple[Path, Path]) -> None:
    """The model as its own draft: every guess is right, so pieces hold several tokens, and the baseline's one."""
    record = tmp_path / "bench.json"
    code, out, err = run_cli(
        *("bench", models[0], "--baseline", models[0], "--draft", models[0], "--draft-tokens", 3, "--rounds", 1),
        *("--concurrency", 1, "--requests", 2, "--prompt-tokens", 12, "--output-tokens", 24, "--json", record),
    )
    assert code == 0, err
    told = json.loads(record.read_text())
    [level] = told["levels"]
    assert level["figures"]["baseline"]["tokens_per_piece"] == 1
    assert level["figures"]["compressed"]["tokens_per_piece"] > 2
    assert "pieces      1 client, compressed" in out
    assert told["settings"]["draft"] == str(models[0])
    assert told["settings"]["speculate"] == 3


def test_a_server_and_another(tmp_path: Path) -> None:
    """Ids stay below --vocab; the key is in no file; failures have their column and their reason."""
    slow, fast = Behaviour(first=0.08, gap=0.02), Behaviour(first=0.02, gap=0.005, refuse_every=5)
    record = tmp_path / "bench.json"
    with serving(slow) as baseline, serving(fast) as url:
        code, out, err = run_cli(
            *("bench", "--url", url + "/v1", "--baseline-url", baseline, "--api-key", "s3cret", "--vocab", 50),
            *(*SMALL, "--rounds", 2, "--json", record),
        )
    assert code == 0, err
    assert re.search(r"compressed  \d\.\d\d times .* at 2 clients", out)
    assert "failed" in out
    assert "HTTP 503: queue is full" in out
    assert max(token for body in fast.asked for token in body["prompt"]) < 50
    text = record.read_text()
    assert "s3cret" not in text
    assert "--api-key '***'" in json.loads(text)["receipt"]["command"]
    assert len(fast.asked) == len(slow.asked) == 1 + 2 + 2 * 4 * 3


def test_a_server_that_dies_is_one_line_and_exit_code_1() -> None:
    with serving(Behaviour(first=0, gap=0.01, dies_after=3)) as url:
        code, _, err = run_cli("bench", "--url", url, *SMALL)
    assert code == 1
    assert one_line(err).startswith(f"failed: {url}: no server answers: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt-tokens", 600), "has 512 positions"),
        (("--vocab", 300), "--vocab 300: the model has 256 token ids"),
        (("--baseline", "nowhere"), "nowhere: no such directory"),
        (("--concurrency", "a"), "--concurrency a: must be positive whole numbers"),
        (("--device", "cudaa"), "did you mean 'cuda'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    models: tuple[Path, Path], arguments: tuple[object, ...], message: str
) -> None:
    code, _, err = run_cli("bench", models[0], *arguments)
    assert code == 2
    assert one_line(err).startswith("error: ")
    assert message in err


@pytest.mark.parametrize("option", ["--baseline", "--draft"])
def test_a_directory_that_is_missing_is_told_with_its_option(models: tuple[Path, Path], option: str) -> None:
    code, _, err = run_cli("bench", models[0], option, "/nope")
    assert code == 2
    assert one_line(err) == f"error: {option} /nope: no such directory"


def test_a_model_that_is_not_served_is_wrong_usage() -> None:
    with serving(Behaviour()) as url:
        code, _, err = run_cli("bench", "--url", url, "--model", "nope", *SMALL)
    assert code == 2
    assert one_line(err) == f"error: --model nope: {url} serves tiny, other"


@pytest.mark.parametrize(
    ("told", "advised"),
    [
        ("prompt token id 31999 is out of range; ids go from 0 to 255", True),
        ("Token id 31999 is out of vocabulary", True),
        ("max_tokens is out of range", False),
        ("queue is full", False),
    ],
)
def test_ids_that_the_servers_model_lacks_lead_to_vocab(told: str, advised: bool) -> None:
    with serving(Behaviour(refuse_every=1, status=400, body=json.dumps({"error": {"message": told}}))) as url:
        code, _, err = run_cli("bench", "--url", url, "--concurrency", 1, "--prompt-tokens", 4, "--output-tokens", 2)
    assert code == 1
    assert f"{url}: the request failed: HTTP 400: {told}" in one_line(err)
    assert ("--vocab N keeps the ids below N" in err) is advised


def test_a_request_beyond_the_servers_model_is_told_before_any_is_sent() -> None:
    behaviour = Behaviour()
    with serving(behaviour) as url:
        code, _, err = run_cli("bench", "--url", url, "--prompt-tokens", 61, "--output-tokens", 4)
    assert code == 2
    assert "together up to 65, but tiny at" in one_line(err)
    assert not behaviour.asked


def test_the_bundled_server_and_the_engine_inside_it(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Every token that was asked for is counted by the server; its tokens a second are finite and real."""
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "compress.cli", "serve", str(models[0]), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        record = tmp_path / "bench.json"
        code, _, err = run_cli("bench", models[0], "--url", url, *SMALL, "--json", record)
    finally:
        server.terminate()
        server.wait(60)
    assert code == 0, err
    told = json.loads(record.read_text())
    for level in told["levels"]:
        one = level["figures"]["compressed"]
        assert (one["failed"], one["short"]) == (0, 0)
        assert {request["output_tokens"] for run in level["runs"]["compressed"] for request in run["requests"]} == {4}
    assert told["settings"]["served"] is True


def test_ctrl_c_is_one_line() -> None:
    behaviour = Behaviour(first=30, models=[{"id": "long"}])
    with serving(behaviour) as url:
        command = [sys.executable, "-m", "compress.cli", "bench", "--url", url, "--concurrency", "2"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while len(behaviour.asked) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert one_line(err) == "interrupted"
