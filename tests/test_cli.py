"""The command line: help without torch, one line for every mistake, plain progress when piped."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.product import compressed, run_cli, write_recipe
from tests.tiny import tiny_model, write_texts


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized tiny model, made once."""
    return compressed(tmp_path_factory.mktemp("cli"), group_size=32)


def one_line(err: str) -> str:
    """The last line of stderr, which tells the error; there is no traceback."""
    assert "Traceback" not in err
    *before, last = err.strip().splitlines()
    assert not any(line.startswith("error:") for line in before)
    assert last.startswith("error: ")
    return last


def test_help_lists_the_commands() -> None:
    code, out, _ = run_cli("--help")
    assert code == 0
    for command in ("run", "plan", "inspect", "eval", "generate"):
        assert re.search(rf"^  {command} ", out, re.MULTILINE)


@pytest.mark.parametrize("command", ["run", "plan", "inspect", "eval", "generate"])
def test_every_option_is_explained(command: str) -> None:
    code, out, _ = run_cli(command, "--help")
    assert code == 0
    options = re.findall(r"^  (?:-\w, )?(--[\w-]+)", out, re.MULTILINE)
    assert "--help" in options


def test_an_unknown_command_names_the_nearest() -> None:
    code, _, err = run_cli("inspekt", "x")
    assert code == 2
    assert "no command 'inspekt'" in one_line(err)
    assert "did you mean 'inspect'" in err


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda source: None, None),
        (lambda source: source.rename(source.with_name("modle")), "model: no such directory; did you mean 'modle'"),
        (lambda source: (source / "config.json").unlink(), "config.json"),
        (lambda source: (source / "config.json").write_text("{broken"), "not valid JSON"),
        (lambda source: set_key(source, "model_type", "foo"), "model_type 'foo' is not supported; supported families"),
        (lambda source: set_key(source, "model_type", "lama"), "did you mean 'llama'"),
        (lambda source: (source / "model.safetensors").unlink(), "safetensors"),
        (lambda source: truncate(source / "model.safetensors"), "model.safetensors"),
    ],
)
def test_a_wrong_model_is_one_line_before_any_work(tmp_path: Path, break_it, message: str | None) -> None:
    """Row 38."""
    source = tiny_model(tmp_path / "model")
    recipe = write_recipe(tmp_path, source)
    break_it(source)
    code, _, err = run_cli("run", recipe)
    if message is None:
        assert code == 0
        return
    assert code == 2
    assert message in one_line(err)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.work").exists()


def set_key(source: Path, key: str, value: object) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {key: value}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_a_quantized_model_is_refused_as_input(tmp_path: Path, result: Path) -> None:
    """Row 38: our own int4 output."""
    code, _, err = run_cli("run", write_recipe(tmp_path, result))
    assert code == 2
    assert "already quantized with compressed-tensors; give the dense original" in one_line(err)


def test_a_group_size_that_does_not_fit_is_told_before_any_data(tmp_path: Path) -> None:
    """Row 7."""
    source = tiny_model(tmp_path / "model", intermediate_size=176)
    recipe = write_recipe(tmp_path, source, group_size=128)
    (tmp_path / "texts.jsonl").unlink()
    code, _, err = run_cli("run", recipe)
    line = one_line(err)
    assert code == 2
    assert "mlp.down_proj (176 columns: 16, 8 fit)" in line
    assert "set group_size: 16" in line
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.work").exists()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("lm_haed", "did you mean 'lm_head'"), ("re:.*foo", "matches no linear"), ("re:(", "not a regular expression")],
)
def test_an_ignore_pattern_without_a_match_is_an_error(tmp_path: Path, pattern: str, message: str) -> None:
    """Row 40."""
    source = tiny_model(tmp_path / "model")
    code, _, err = run_cli("run", write_recipe(tmp_path, source, ignore=[pattern]))
    assert code == 2
    assert "stages[0].quantize.ignore" in one_line(err)
    assert message in err


def test_the_plan_names_every_layer_and_touches_nothing(tmp_path: Path) -> None:
    """Row 40: --dry-run prints layer → scheme, from the config alone."""
    source = tiny_model(tmp_path / "model")
    recipe = write_recipe(tmp_path, source)
    (source / "model.safetensors").unlink()
    (tmp_path / "texts.jsonl").unlink()
    for arguments in (("plan", recipe), ("run", recipe, "--dry-run")):
        code, out, err = run_cli(*arguments)
        assert code == 0, err
        assert re.search(r"mlp\.down_proj ×2 +64 × 192 +int4 sym g32", out)
        assert re.search(r"lm_head +256 × 64 +kept", out)
        assert "peak memory" in out
    assert not (tmp_path / "out.work").exists()


@pytest.mark.parametrize("recipe", ["llama2-13b-awq", "llama3.1-8b-gptq", "qwen2.5-7b-awq"])
def test_the_recipes_of_large_models_plan_offline(recipe: str) -> None:
    path = Path(__file__).parent.parent / "recipes" / f"{recipe}.yaml"
    code, out, err = run_cli("plan", path)
    assert code == 0, err
    assert "int4" in out


def test_nothing_usable_for_calibration_is_told_before_the_weights_are_read(tmp_path: Path) -> None:
    """Row 4."""
    source = tiny_model(tmp_path / "model")
    recipe = write_recipe(tmp_path, source)
    (tmp_path / "texts.jsonl").write_text("")
    code, _, err = run_cli("run", recipe)
    assert code == 2
    assert "texts.jsonl" in one_line(err)
    assert not (tmp_path / "out.work").exists()


def test_a_device_that_is_not_there_is_one_line(tmp_path: Path, result: Path) -> None:
    """Row 36."""
    for device, message in (("cuda", "no CUDA device"), ("cudaa", "did you mean 'cuda'")):
        for arguments in (("generate", result, "--prompt", "x"), ("run", tmp_path / "none.yaml")):
            code, _, err = run_cli(*arguments, "--device", device)
            assert code == 2
            if arguments[0] == "generate":
                assert message in one_line(err)


def test_a_data_free_method_needs_no_data(tmp_path: Path) -> None:
    """Row 39."""
    import yaml

    source = tiny_model(tmp_path / "model")
    path = write_recipe(tmp_path, source, method="rtn")
    recipe = yaml.safe_load(path.read_text())
    del recipe["calibration"]
    path.write_text(yaml.safe_dump(recipe))
    (tmp_path / "texts.jsonl").unlink()
    code, out, err = run_cli("run", path)
    assert code == 0, err
    assert "warning     not evaluated" in out
    layers = json.loads((tmp_path / "out" / "report.json").read_text())["stages"][0]["layers"]
    assert {layer["error_of"] for layer in layers} == {"weights"}


def test_inspect_tells_schemes_and_bytes(result: Path) -> None:
    code, out, _ = run_cli("inspect", result)
    assert code == 0
    assert "int4 sym g32" in out
    code, out, _ = run_cli("inspect", result, "--json")
    told = json.loads(out)
    assert code == 0
    assert "lm_head" in json.dumps(told)


def test_generate_continues_several_prompts(result: Path) -> None:
    code, out, err = run_cli("generate", result, "--prompt", "abc", "--prompt", "xyz", "--max-tokens", 5)
    assert code == 0, err
    assert out.startswith("abc")
    assert "\nxyz" in out
    again = run_cli("generate", result, "--prompt", "xyz", "--max-tokens", 5, "--temperature", 0.8, "--seed", 4)
    assert (
        again[1]
        == run_cli("generate", result, "--prompt", "xyz", "--max-tokens", 5, "--temperature", 0.8, "--seed", 4)[1]
    )


def test_a_chat_prompt_asks_for_the_assistants_turn(tmp_path: Path, result: Path) -> None:
    """Prompt and template together give what the same text gives as a plain prompt."""
    directory = shutil.copytree(result, tmp_path / "chatty")
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
    )
    asked = run_cli("generate", directory, "--prompt", "hi", "--chat", "--max-tokens", "8")
    spelled = run_cli("generate", directory, "--prompt", "[user]hi[me]", "--max-tokens", "8")
    assert asked[0] == spelled[0] == 0
    assert "[user]hi[me]" + asked[1] == spelled[1]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "{}", "\x00"])
def test_a_damaged_tokenizer_is_one_line(tmp_path: Path, result: Path, file: str, content: str) -> None:
    directory = shutil.copytree(result, tmp_path / "broken")
    (directory / file).write_text(content)
    code, _, err = run_cli("generate", directory, "--prompt", "x", "--max-tokens", "1")
    if (file, content) == ("tokenizer_config.json", "{}"):
        assert code == 0
    else:
        assert code == 2
        assert str(directory) in one_line(err)


def test_half_a_surrogate_pair_is_a_replacement_character(result: Path) -> None:
    code, _, err = run_cli("generate", result, "--prompt", "a\ud83d", "--max-tokens", "1")
    assert "Traceback" not in err
    assert code == 0


@pytest.mark.parametrize(
    "stated",
    [
        "x",
        [1],
        {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {}}},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"targets": "x"}}},
    ],
)
def test_a_damaged_quantization_config_is_one_line(tmp_path: Path, stated: object) -> None:
    source = tiny_model(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    code, _, err = run_cli("inspect", source)
    assert code == 2
    assert "quantization_config" in one_line(err)


def test_eval_alone_and_against_a_baseline(tmp_path: Path, result: Path) -> None:
    text = write_texts(tmp_path / "prose.jsonl", 8, seed=9)
    arguments = ("eval", result, "--text", text, "--window", 64, "--tokens", 512, "--json", tmp_path / "e.json")
    code, out, err = run_cli(*arguments)
    assert code == 0, err
    assert "perplexity" in out
    record = json.loads((tmp_path / "e.json").read_text())
    assert record["settings"]["window"] == 64
    code, out, err = run_cli(*arguments, "--baseline", result)
    assert code == 0, err
    assert "KL          0.0000" in out, "a model does not differ from itself"
    code, _, err = run_cli("eval", result, "--text", text, "--window", 4096)
    assert code == 2
    assert "--window 4096: the model has 512 positions" in one_line(err)


def retold(directory: Path, order: list[int], **settings: Any) -> Path:
    """A tiny model whose tokenizer has the single-byte tokens at the ids of `order`."""
    model = tiny_model(directory, **settings)
    file = model / "tokenizer.json"
    told = json.loads(file.read_text())
    told["model"]["vocab"] = {token: order[i] for token, i in told["model"]["vocab"].items()}
    file.write_text(json.dumps(told))
    return model


def test_eval_refuses_a_baseline_of_other_tokens(tmp_path: Path) -> None:
    """Either way round: ids beyond the baseline's embedding, and ids that mean something else to it."""
    text = write_texts(tmp_path / "prose.jsonl", 4, seed=9)
    plain = tiny_model(tmp_path / "plain")
    wide = retold(tmp_path / "wide", [i + 100 for i in range(256)], vocab_size=400)
    for checkpoint, baseline in ((wide, plain), (plain, wide)):
        code, _, err = run_cli(
            "eval", checkpoint, "--baseline", baseline, "--text", text, "--window", 32, "--tokens", 64
        )
        assert code == 2
        assert f"--baseline {baseline}: its tokenizer is not the model's: 156 of 256 token ids differ" in one_line(err)
    (plain / "tokenizer.json").unlink()
    code, _, err = run_cli("eval", wide, "--baseline", plain, "--text", text, "--window", 32, "--tokens", 64)
    assert code == 2
    assert "--baseline: it has only 256 tokens, and CHECKPOINT's tokenizer gives id" in one_line(err)
    code, _, err = run_cli("eval", wide, "--baseline", tmp_path / "plane", "--text", text)
    assert code == 2
    assert f"--baseline {tmp_path / 'plane'}: no such directory; did you mean 'plain'?" in one_line(err)


def test_a_padded_vocabulary_is_compared(tmp_path: Path) -> None:
    text = write_texts(tmp_path / "prose.jsonl", 4, seed=9)
    plain, padded = tiny_model(tmp_path / "plain"), tiny_model(tmp_path / "padded", vocab_size=320)
    for pair in ((plain, padded), (padded, plain)):
        code, out, err = run_cli("eval", pair[0], "--baseline", pair[1], "--text", text, "--window", 32, "--tokens", 64)
        assert code == 0, err
        assert "KL " in out


def test_a_piped_run_tells_phases_in_plain_lines(tmp_path: Path) -> None:
    """Row 37, and row 36: everything works where there is no GPU."""
    source = tiny_model(tmp_path / "model", num_hidden_layers=12)
    command = [sys.executable, "-m", "compress.cli", "run", str(write_recipe(tmp_path, source, evaluate=True))]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    text = done.stderr.decode()
    assert "\r" not in text
    assert "\x1b" not in text
    for phase in ("quantize (gptq)", "evaluate", "speed, batch 1"):
        assert f"{phase} 0/" in text
    assert re.search(r"quantize \(gptq\) 12/12  100%  elapsed \d+:\d\d  ETA 0:00", text)


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    import signal
    import time

    source = tiny_model(tmp_path / "model", num_hidden_layers=12)
    recipe = write_recipe(tmp_path, source)
    command = [sys.executable, "-m", "compress.cli", "run", str(recipe)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    walk = tmp_path / "out.work" / "00-quantize" / "walk"
    deadline = time.monotonic() + 120
    while not (walk / "block-00001.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1] == ("interrupted; the same command, without --fresh, resumes where it stopped")
    assert "Traceback" not in err
    code, _, err = run_cli("run", recipe)
    assert code == 0
    assert "resuming after block" in err


def test_nothing_reaches_for_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 39: a local model and a local text need none, for GPTQ with evaluation and for `eval`."""
    import socket

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"connects to {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    source = tiny_model(tmp_path / "model")
    code, _, err = run_cli("run", write_recipe(tmp_path, source, evaluate=True))
    assert code == 0, err
    code, _, err = run_cli("eval", tmp_path / "out", "--text", tmp_path / "prose.jsonl", "--window", 64)
    assert code == 0, err
    code, _, err = run_cli("generate", tmp_path / "out", "--prompt", "abc", "--max-tokens", 2)
    assert code == 0, err


def test_eval_against_a_record_of_an_earlier_eval(tmp_path: Path, result: Path) -> None:
    """Row 33: two results are compared only if text, window and tokens agree."""
    text = write_texts(tmp_path / "prose.jsonl", 8, seed=9)
    record = tmp_path / "baseline.json"
    arguments = ("eval", result, "--text", text, "--tokens", 512)
    assert run_cli(*arguments, "--window", 64, "--json", record)[0] == 0
    code, out, err = run_cli(*arguments, "--window", 64, "--baseline", record)
    assert code == 0, err
    assert "x1.0000" in out
    code, _, err = run_cli(*arguments, "--window", 128, "--baseline", record)
    assert code == 2
    assert "the records differ in" in one_line(err)
    assert "window" in err or "text_sha256" in err
    (tmp_path / "broken.json").write_text("{}")
    code, _, err = run_cli(*arguments, "--window", 64, "--baseline", tmp_path / "broken.json")
    assert code == 2
    assert "not a record of `compress eval --json`" in one_line(err)
