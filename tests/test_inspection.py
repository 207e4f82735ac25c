"""Inspection counts what is in the files, to the byte."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from compress.arch import read_spec
from compress.checkpoint import Checkpoint, write_checkpoint
from compress.errors import UserError
from compress.formats.compressed_tensors import pack, quantization_config
from compress.inspection import inspect_checkpoint, render
from compress.quant.scheme import QuantizedWeight, Scheme
from tests.tiny import tiny_model


def quantized_model(directory: Path, scheme: Scheme, keep: tuple[str, ...]) -> Path:
    """A tiny model whose linears, but for `keep`, hold zero codes of `scheme`."""
    source = Checkpoint.open(tiny_model(directory / "source", dtype="float16"))
    spec = read_spec(source.config)
    tensors = {name: source.read(name) for name in source.names}
    schemes = {name: scheme for name in spec.linears() if name not in keep}
    for module in schemes:
        rows, columns = tensors.pop(f"{module}.weight").shape
        shape = (rows, scheme.groups(columns))
        zero_point = None if scheme.symmetric else torch.zeros(shape, dtype=torch.int8)
        codes = torch.zeros(rows, columns, dtype=torch.int8)
        tensors |= pack(module, QuantizedWeight(scheme, codes, torch.ones(shape, dtype=torch.float16), zero_point))
    config = source.config | {"quantization_config": quantization_config(schemes, keep)}
    write_checkpoint(directory / "out", tensors, config, source.path)
    return directory / "out"


def text(path: Path) -> str:
    out = io.StringIO()
    Console(width=120, file=out).print(render(inspect_checkpoint(path)))
    return out.getvalue()


def test_dense_model(tmp_path: Path):
    path = tiny_model(tmp_path / "model", dtype="float16", tie_word_embeddings=True)
    checkpoint, found = Checkpoint.open(path), inspect_checkpoint(path)
    assert found.method is None
    assert found.tied
    assert found.total().bytes == checkpoint.total_bytes == found.dense_bytes
    assert found.total().bits_per_weight == 16
    assert found.total("dense linears").modules == 14
    assert found.total("embeddings").modules == 1
    assert found.unquantized == []


@pytest.mark.parametrize("scheme", [Scheme(4, 32, True), Scheme(4, 32, False), Scheme(3, None, True)], ids=str)
def test_quantized_model(scheme: Scheme, tmp_path: Path):
    kept = ("model.layers.1.mlp.down_proj", "lm_head")
    path = quantized_model(tmp_path, scheme, kept)
    found = inspect_checkpoint(path)
    assert found.total().bytes == Checkpoint.open(path).total_bytes
    assert sorted(found.unquantized) == sorted(kept)
    assert found.total("quantized linears").modules == 13
    up = next(module for module in found.modules if module.name == "model.layers.0.mlp.up_proj")
    assert (up.scheme, up.shape) == (str(scheme), (192, 64))
    shape_bits = 8 * 16 / up.parameters  # weight_shape: two int64
    assert up.bits_per_weight == pytest.approx(scheme.bits_per_weight(64) + shape_bits)
    assert found.dense_bytes == 2 * sum(module.parameters for module in found.modules)


def test_json_and_table_say_the_same(tmp_path: Path):
    path = quantized_model(tmp_path, Scheme(4, 32, True), ("lm_head",))
    content = json.loads(inspect_checkpoint(path).to_json())
    assert content["bytes"] == Checkpoint.open(path).total_bytes
    assert content["quantization_method"] == "compressed-tensors"
    assert content["unquantized"] == ["lm_head"]
    assert sum(total["bytes"] for total in content["totals"].values()) == content["bytes"]
    assert {linear["scheme"] for linear in content["linears"]} == {"int4 sym g32", "float16"}
    table = text(path)
    assert "int4 sym g32" in table
    assert "0-1" in table
    assert "linears left dense: lm_head" in table
    assert f"{content['bytes'] / 1e6:.2f} MB" in table


def test_a_layer_that_differs_has_its_own_row(tmp_path: Path):
    path = quantized_model(tmp_path, Scheme(8, None, True), ("model.layers.1.mlp.down_proj", "lm_head"))
    rows = [line for line in text(path).splitlines() if "mlp.down_proj" in line and "│" in line]
    assert len(rows) == 2
    assert "int8 sym channel" in rows[0]
    assert "float16" in rows[1]


def test_unreadable_method_is_named(tmp_path: Path):
    write_checkpoint(
        tmp_path / "out",
        {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)},
        {"model_type": "llama", "quantization_config": {"quant_method": "awq"}},
        sidecars_from=None,
    )
    with pytest.raises(UserError, match="quantized with awq"):
        inspect_checkpoint(tmp_path / "out")
