"""Row 35: lm-eval over HTTP tells what lm-eval tells of the same model inside Hugging Face."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.live import live
from tests.tiny import byte_tokenizer, tiny_model

ITEMS = 50
CHOICES = 3
LENGTH = 512  # positions of the model
KEPT = LENGTH - 1  # tokens that lm-eval's HTTP client keeps: one is left for an answer
LETTERS = "abcdefghijklmnopqrstuvwxyz .,ABC012é汉"
TASK = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
target_delimiter: " "
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


def write_task(directory: Path) -> None:
    """Ragged items, and one that is longer than the model's context."""
    draw = random.Random(0)

    def text(length: int) -> str:
        return "".join(draw.choice(LETTERS) for _ in range(length))

    items = [
        {"question": text(draw.randint(3, 120)), "choices": [text(draw.randint(1, 12)) for _ in range(CHOICES)]}
        for _ in range(ITEMS)
    ]
    items.append({"question": text(KEPT + 200), "choices": [text(5) for _ in range(CHOICES)]})
    data = directory / "letters.json"
    data.write_text("\n".join(json.dumps(item | {"answer": i % CHOICES}) for i, item in enumerate(items)))
    (directory / "letters.yaml").write_text(TASK.replace("FILE", str(data)))


def evaluate(directory: Path, model: str, arguments: dict[str, Any], batch: int) -> tuple[list[Any], dict[str, Any]]:
    """For each item its choices' (log-likelihood, greedy); and the task's metrics."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(directory), include_defaults=False)
    told: Any = simple_evaluate(
        model, arguments, tasks=["letters"], task_manager=tasks, batch_size=batch, bootstrap_iters=0, device="cpu"
    )
    assert told is not None
    samples = sorted(told["samples"]["letters"], key=lambda sample: sample["doc_id"])
    answers = [[(float(value), bool(greedy)) for value, greedy in sample["filtered_resps"]] for sample in samples]
    return answers, {key: told["results"]["letters"][key] for key in ("acc,none", "acc_norm,none")}


@pytest.mark.slow
def test_lm_eval_over_http_equals_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    write_task(tmp_path)
    model = tiny_model(tmp_path / "model", vocab_size=260)
    byte_tokenizer(model, eos_token="</s>", pad_token="<pad>")
    # its own truncation keeps max_length tokens and the one after them
    expected, metrics = evaluate(
        tmp_path, "hf", {"pretrained": str(model), "max_length": KEPT - 1, "dtype": "float32"}, 1
    )
    with live(model) as server:
        for batch in (1, 16):
            arguments = {
                "base_url": f"{server.url}/v1/completions", "model": "tiny", "tokenizer": str(model),
                "max_length": LENGTH, "num_concurrent": 4, "tokenized_requests": True,
            }  # fmt: skip
            with caplog.at_level(logging.WARNING):
                caplog.clear()
                got, told = evaluate(tmp_path, "local-completions", arguments, batch)
            assert len(got) == len(expected) == ITEMS + 1
            for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
                for (value, greedy), (value_hf, greedy_hf) in zip(mine, theirs, strict=True):
                    assert abs(value - value_hf) < 1e-3, f"item {number}, batches of {batch}"
                    assert greedy == greedy_hf
            assert told == metrics
            cut = [record for record in caplog.records if "Left truncating context" in record.getMessage()]
            assert len(cut) == CHOICES, "the one long item, once for each choice"
        # the server itself cuts nothing unless asked, and then counts it
        assert server.metric("compress:prompts_truncated_total") == 0
        long = {"prompt": [5] * (LENGTH + 1), "max_tokens": 1, "logprobs": 1, "echo": True}
        assert server.post("/v1/completions", **long)[0] == 400
        assert server.post("/v1/completions", **long, truncate_prompt_tokens=KEPT)[0] == 200
        assert server.metric("compress:prompts_truncated_total") == 1
