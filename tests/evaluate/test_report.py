"""report.json's keys, the page and the model card: complete, self-contained, parseable, and sensible when empty."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from matplotlib.figure import Figure
from safetensors.torch import save_file

from compress.arch import read_spec
from compress.checkpoint import Checkpoint
from compress.evaluate import contract
from compress.evaluate.card import render_card
from compress.evaluate.contract import Layer
from compress.evaluate.page import flattened, grouped, number, plain_text, render_page, size_text, worst_layers
from compress.evaluate.plots import layer_errors
from compress.evaluate.report import hub_id, measure_size, plain, source_notes, stated_license, write_report
from tests.evaluate.sample import empty_report, sample_layers, sample_report
from tests.tiny import tiny_model

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and collects identifiers and everything that would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.identifiers: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.identifiers += [values["id"] or ""] if "id" in values else []
        self.fetched += [
            v or "" for k, v in attrs if k in ("src", "href", "xlink:href") and not (v or "").startswith("#")
        ]
        assert tag != "script"
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(sample_report())


def test_page_is_self_contained_and_well_formed(page: str):
    parsed = Page(page)
    assert parsed.fetched == []
    assert "http" not in re.sub(r"https?://www\.w3\.org\S*", "", page)
    assert len(parsed.identifiers) == len(set(parsed.identifiers))
    assert len(page) < 400_000
    assert "None" not in re.sub(r"<[^>]*>", "", page).replace("None came out worse", "")


def test_every_reference_inside_a_figure_has_its_target(page: str):
    identifiers = set(Page(page).identifiers)
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page)
    assert len(used) > 10
    assert {a or b for a, b in used} <= identifiers


def test_figures_follow_light_and_dark(page: str):
    figures = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert page.count("<svg") == 4
    assert "var(--compressed)" in figures
    assert "<text" in figures
    colours = set(re.findall(r"#[0-9a-f]{6}", re.sub(r'(?:id|href)="[^"]*"', "", figures)))
    assert colours <= {"#ffffff", "#000000"}, f"colours that do not follow the scheme: {colours}"


def test_page_shows_the_evidence(page: str):
    text = re.sub(r"<[^>]*>", " ", page)
    for shown in ("2.37", "no ratio lowers the error", "rtn (1)", "compress run recipes/smollm2-135m-awq.yaml"):
        assert shown in text
    report = sample_report()
    assert report.accuracy is not None
    assert f"{report.accuracy.perplexity.compressed:.4f}" in text
    assert all(layer.name in text for layer in worst_layers(sample_layers()))


def test_an_empty_report_renders(tmp_path: Path):
    text = render_page(empty_report())
    Page(text)
    assert "Not measured" in text
    assert "<svg" not in text
    write_report(tmp_path, empty_report())
    assert "Accuracy was not measured." in (tmp_path / "README.md").read_text()


def test_names_are_escaped():
    report = empty_report()
    report.provenance.model = "a<script>alert(1)</script>"
    report.warnings = ["<b>&"]
    text = render_page(report)
    assert "<script>" not in text
    assert "&lt;b&gt;&amp;" in text


def test_report_json_is_strict_and_has_the_contract(tmp_path: Path):
    report = sample_report()
    report.stages[0].layers[3].error = math.nan
    told = write_report(tmp_path, report)

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} in report.json")

    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert read == json.loads(json.dumps(told))
    assert read["stages"][0]["layers"][3]["error"] is None
    assert "stages[0].layers[3].error was not a finite number" in read["warnings"]
    assert {"provenance", "stages", "size", "accuracy", "speed", "verified"} <= set(read)
    assert {"tokens", "window", "perplexity", "kl", "top1_agreement"} <= set(read["accuracy"])
    assert {"baseline", "compressed", "ratio", "ci95"} <= set(read["accuracy"]["perplexity"])
    assert {"mean", "ci95", "p99", "max"} <= set(read["accuracy"]["kl"])
    row = {"batch", "prompt", "output", "baseline", "compressed", "ratio", "ci95", "predicted_ratio"}
    assert row <= set(read["speed"][0])
    assert {"ttft_ms", "tpot_ms", "tokens_per_s"} <= set(read["speed"][0]["baseline"])
    assert {"reload_bit_equal", "engine_matches_reference", "unquantized"} <= set(read["verified"])
    assert contract.Report.model_validate(read).size == report.size


def test_card_has_front_matter_that_the_hub_reads(tmp_path: Path):
    write_report(tmp_path, sample_report())
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "tags": ["compressed-tensors", "int4", "4-bit", "w4a16", "compress-llm"],
    }
    assert "CompressedTensorsConfig(dequantize=True)" in card.text
    assert "not tested here" in card.text
    assert "compress generate smollm2-135m-awq --prompt" in card.text
    assert "| **all tensors** | 269.03 MB | 113.46 MB | **2.37** |" in card.text


def test_card_of_a_local_symmetric_model(tmp_path: Path):
    """No base_model that the Hub would refuse, and no dequantize where it is not needed."""
    report = sample_report()
    report.provenance.base_model = report.provenance.license = None
    for layer in report.stages[0].layers:
        layer.scheme = "int8 sym channel"
    text = render_card(report, "x")
    (tmp_path / "README.md").write_text(text)
    data = ModelCard.load(tmp_path / "README.md").data.to_dict()
    assert set(data) == {"library_name", "pipeline_tag", "tags"}
    assert "int8" in data["tags"]
    assert "dequantize" not in text
    assert "licence is not stated" in text


def test_licence_is_the_base_cards(tmp_path: Path):
    assert stated_license(tmp_path) is None
    (tmp_path / "README.md").write_text("---\nlicense: mit\ntags: [a]\n---\n# Model\n")
    assert stated_license(tmp_path) == "mit"
    (tmp_path / "README.md").write_text("# Model\n---\nlicense: mit\n---\n")
    assert stated_license(tmp_path) is None
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")
    assert stated_license(tmp_path) is None
    (tmp_path / "source.json").write_text('{"license": "apache-2.0", "source": "x.gguf"}')
    assert stated_license(tmp_path) == "apache-2.0", "what the GGUF file said"


def test_a_source_that_is_quantized_itself_is_said(tmp_path: Path):
    """The demo's model is a file of 84 MB: a reader must not take the 269 MB that it decodes to for it."""
    file = tmp_path / "source.json"
    assert source_notes(file) == []
    file.write_text('{"license": "mit", "stored": {"F16": 2000000, "F32": 1000}}')
    assert source_notes(file) == []
    file.write_text('{"stored": {"F32": 1000000, "Q4_1": 83000000, "Q6_K": 500000}}')
    (note,) = source_notes(file)
    assert note.startswith("the source file holds its weights in Q4_1, Q6_K, 84.5 MB in all; sizes")


def test_a_few_tiny_errors_do_not_press_the_others_together(monkeypatch: pytest.MonkeyPatch):
    layers = [
        Layer(name=f"model.layers.{i}.mlp.down_proj", error=1e-9 if i == 7 else 0.01 + i / 1e4, rtn_error=0.02)
        for i in range(40)
    ]
    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (drawn.append(figure), save(figure, *a, **k)))
    layer_errors(layers)
    axes = drawn[0].axes[0]
    low, high = axes.get_ylim()
    assert 0.001 < low < 0.01 < 0.02 < high < 0.1
    triangles = [np.column_stack(line.get_data()) for line in axes.get_lines() if line.get_marker() == "v"]
    assert [row.tolist() for row in np.concatenate(triangles)] == [[7.0, low]]


def test_hub_ids(tmp_path: Path):
    assert hub_id("org/Model-1.5") == "org/Model-1.5"
    assert hub_id(str(tmp_path)) is None
    assert hub_id("wheel://dist==1.0/a/b.gguf") is None


@pytest.mark.parametrize("tied", [False, True])
def test_size_by_part_adds_up(tmp_path: Path, tied: bool):
    dense = Checkpoint.open(tiny_model(tmp_path / "dense", tie_word_embeddings=tied))
    spec = read_spec(dense.config)
    size = measure_size(dense, dense, spec)
    assert size.baseline_bytes == sum(part.baseline_bytes for part in size.parts.values())
    assert size.parts["embedding"].baseline_bytes == 256 * 64 * 4
    assert size.parts["head"].baseline_bytes == (0 if tied else 256 * 64 * 4)
    assert size.parts["other"].baseline_bytes == 5 * 64 * 4
    assert size.bits_per_weight == 32.0


def test_packed_tensors_count_as_linears(tmp_path: Path):
    path = tiny_model(tmp_path / "dense")
    spec = read_spec(Checkpoint.open(path).config)
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "config.json").write_text((path / "config.json").read_text())
    prefix = "model.layers.0.mlp.down_proj"
    tensors = {f"{prefix}.weight_packed": torch.zeros(4, dtype=torch.int32), f"{prefix}.weight_scale": torch.zeros(3)}
    save_file(tensors, packed / "model.safetensors")
    assert measure_size(Checkpoint.open(path), Checkpoint.open(packed), spec).parts["linears"].compressed_bytes == 28


def test_numbers_and_facts_in_words():
    assert [number(x) for x in (None, 46.0, 0.019, 1234.5, 2e-6, 0.0, math.inf)] == [
        "—", "46.0", "0.0190", "1,230", "2.00e-06", "0.00", "not finite"
    ]  # fmt: skip
    assert size_text(113_463_936) == "113.46 MB"
    assert plain_text([1, 2]) == "[1 2]"
    assert plain_text(True) == "yes"
    facts = {"sources": [{"name": "a"}, {"name": "b"}], "memory_bytes": 2_000_000_000, "dropped": {}}
    assert flattened(facts) == {"sources 1 name": "a", "sources 2 name": "b", "memory": "2.00 GB", "dropped": {}}


def test_reasons_that_differ_by_block_are_one_group():
    found = grouped([("a", "model.layers.1.x stays"), ("b", "model.layers.22.x stays"), ("c", "other")])
    assert found == [("model.layers.*.x stays", ["a", "b"]), ("other", ["c"])]


def test_plain_keeps_what_is_finite():
    told = plain(sample_report())
    assert told["warnings"] == sample_report().warnings
