"""What is written is read back bit for bit, by us and by compressed-tensors; what cannot be read is refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig

from compress.checkpoint import Checkpoint, write_checkpoint
from compress.errors import UserError
from compress.formats import quantization_method, read_linear, require_dense, stored_scheme
from compress.formats.compressed_tensors import pack, quantization_config, read_schemes
from compress.quant.scheme import QuantizedWeight, Scheme

NAME = "model.layers.0.mlp.up_proj"
SCHEMES = [
    Scheme(bits, group, symmetric)
    for bits, group, symmetric in itertools.product((2, 3, 4, 5, 6, 8), (32, None), (True, False))
]


def random_weight(scheme: Scheme, scale_dtype: torch.dtype, rows: int = 24, columns: int = 96) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(scheme.bits)
    groups = scheme.groups(columns)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(scheme.qmin, scheme.qmax + 1, shape, generator=generator, dtype=torch.int8)

    scale = (torch.rand(rows, groups, generator=generator) + 0.01).to(scale_dtype)
    return QuantizedWeight(scheme, codes(rows, columns), scale, None if scheme.symmetric else codes(rows, groups))


def stored(directory: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None) -> Checkpoint:
    config: dict[str, Any] = {"model_type": "llama"}
    if quantization is not None:
        config["quantization_config"] = quantization
    write_checkpoint(directory, tensors, config, sidecars_from=None)
    return Checkpoint.open(directory)


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_written_then_read_is_bit_equal(scheme: Scheme, scale_dtype: torch.dtype, tmp_path: Path):
    """Rows 15 and 21: every scheme, every scale type."""
    weight = random_weight(scheme, scale_dtype)
    checkpoint = stored(tmp_path / "out", pack(NAME, weight), quantization_config({NAME: scheme}, ["lm_head"]))
    assert stored_scheme(checkpoint, NAME) == scheme
    back = read_linear(checkpoint, NAME)
    assert isinstance(back, QuantizedWeight)
    assert back.scale_OG.dtype == scale_dtype
    assert torch.equal(back.codes_OI, weight.codes_OI)
    assert torch.equal(back.dequantize(), weight.dequantize())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_compressed_tensors_reads_the_same_weight(scheme: Scheme):
    """Row 16: the reference implementation, with our config, decompresses to the same numbers."""
    weight = random_weight(scheme, torch.float32)
    parsed = QuantizationConfig.model_validate(quantization_config({NAME: scheme}, ["lm_head"]))
    local = {name.rpartition(".")[2]: tensor for name, tensor in pack(NAME, weight).items()}
    decompressed = PackedQuantizationCompressor.decompress(local, parsed.config_groups["group_0"])
    assert torch.equal(decompressed["weight"], weight.dequantize())


def test_one_scheme_targets_every_linear():
    schemes = {NAME: Scheme(4, 32, True), "model.layers.1.mlp.up_proj": Scheme(4, 32, True)}
    config = quantization_config(schemes, ["lm_head"])
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert config["ignore"] == ["lm_head"]


def test_mixed_schemes_are_named_and_read_back(tmp_path: Path):
    """Row 16: one group for each scheme, modules by name; what is ignored stays dense and bit-equal."""
    other, head = "model.layers.1.mlp.up_proj", "lm_head"
    schemes = {NAME: Scheme(4, 32, True), other: Scheme(8, None, False)}
    tensors = {f"{head}.weight": torch.randn(8, 96)}
    for module, scheme in schemes.items():
        tensors |= pack(module, random_weight(scheme, torch.float16))
    config = quantization_config(schemes, [head])
    QuantizationConfig.model_validate(config)
    checkpoint = stored(tmp_path / "out", tensors, config)
    assert {module: stored_scheme(checkpoint, module) for module in (NAME, other, head)} == {**schemes, head: None}
    assert torch.equal(read_linear(checkpoint, head), tensors[f"{head}.weight"])  # pyright: ignore[reportArgumentType]


def test_patterns_and_names_of_other_writers():
    config = quantization_config({NAME: Scheme(4, 32, True)}, ["re:.*lm_head", "model.layers.0.mlp.down_proj"])
    table = read_schemes(config)
    assert table.of(NAME) == Scheme(4, 32, True)
    assert table.of("lm_head") is None
    assert table.of("model.layers.0.mlp.down_proj") is None
    config["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    assert read_schemes(config).of(NAME) == Scheme(4, 32, True)
    assert read_schemes(config).of("model.layers.0.self_attn.q_proj") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "float-quantized"}, "format 'float-quantized' is not supported"),
        ({"input_activations": {"num_bits": 8}}, "quantized activations are not supported"),
        ({"weights": {"actorder": "group"}}, "actorder: 'group' is not supported"),
        ({"weights": {"num_bits": 16}}, "num_bits: 16 is not supported"),
        ({"weights": {"group_size": 0}}, "group_size: must be a positive integer"),
    ],
)
def test_what_cannot_be_read_is_refused(change: dict[str, Any], message: str):
    config = quantization_config({NAME: Scheme(4, 32, True)}, [])
    group = config["config_groups"]["group_0"]
    group |= change | {"weights": group["weights"] | change.get("weights", {})}
    with pytest.raises(UserError, match=message):
        read_schemes(config)


def test_config_and_tensors_must_agree(tmp_path: Path):
    """Row 16: a module that config.json calls quantized but is dense, and the other way round."""
    scheme = Scheme(4, 32, True)
    config = quantization_config({NAME: scheme}, [])
    dense = stored(tmp_path / "dense", {f"{NAME}.weight": torch.zeros(8, 32)}, config)
    with pytest.raises(UserError, match="stored dense"):
        read_linear(dense, NAME)
    packed = pack(NAME, random_weight(scheme, torch.float16))
    ignored = stored(tmp_path / "packed", packed, config | {"ignore": [NAME]})
    with pytest.raises(UserError, match="gives no scheme"):
        read_linear(ignored, NAME)
    packed.pop(f"{NAME}.weight_scale")
    with pytest.raises(UserError, match="weight_scale is missing"):
        read_linear(stored(tmp_path / "partial", packed, config), NAME)


def test_shapes_must_fit_the_scheme(tmp_path: Path):
    packed = pack(NAME, random_weight(Scheme(4, 32, True), torch.float16))
    config = quantization_config({NAME: Scheme(4, 16, True)}, [])
    with pytest.raises(UserError, match=r"weight_scale: shape \[24, 3\].*needs \[24, 6\]"):
        read_linear(stored(tmp_path / "out", packed, config), NAME)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes", "modelopt", "mxfp4"])
def test_unreadable_methods_are_named(method: str, tmp_path: Path):
    """Row 38: quantized input is refused by the name of its method."""
    checkpoint = stored(tmp_path / "out", {f"{NAME}.weight": torch.zeros(8, 8)}, {"quant_method": method})
    assert quantization_method(checkpoint.config) == method
    for refuse in (lambda: require_dense(checkpoint), lambda: read_linear(checkpoint, NAME)):
        with pytest.raises(UserError, match=method) as caught:
            refuse()
        assert "\n" not in str(caught.value)


def test_require_dense_sees_tensors_that_the_config_does_not_mention(tmp_path: Path):
    with pytest.raises(UserError, match=r"it stores .*qweight"):
        require_dense(stored(tmp_path / "a", {f"{NAME}.qweight": torch.zeros(8, 8, dtype=torch.int32)}, None))
    with pytest.raises(UserError, match="float8_e4m3fn"):
        require_dense(stored(tmp_path / "b", {f"{NAME}.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}, None))
    require_dense(stored(tmp_path / "c", {f"{NAME}.weight": torch.zeros(8, 8)}, None))
