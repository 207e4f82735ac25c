"""Linears against float64 products of the weight that is stored, on every path of the CPU."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from compress.kernels import dispatch
from compress.kernels.cpu.isa import supported
from compress.kernels.dispatch import force, prepare_linear
from compress.kernels.linear import FEW_ROWS, DenseLinear, DenseLinearCPU, SideBySide
from compress.kernels.matmul import dequantized
from compress.kernels.packing import pack_int32
from compress.kernels.weights import PackedWeight

CPU = torch.device("cpu")


def packed(rows: int, columns: int, group: int, bits: int = 4, asymmetric: bool = False, seed: int = 0) -> PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows, columns // group, generator=generator) * 0.02 + 0.001
    zero = torch.randint(-half, half, scale.shape, generator=generator, dtype=torch.int8) if asymmetric else None
    return PackedWeight(bits, columns, pack_int32(codes, bits), scale.bfloat16(), zero)


@pytest.mark.parametrize("kind", [DenseLinear, DenseLinearCPU])
@pytest.mark.parametrize("tokens", [1, 2, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("biased", [False, True])
def test_dense(kind: type[DenseLinear] | type[DenseLinearCPU], tokens: int, biased: bool) -> None:
    """To 3e-5 where outputs reach 30: 96 float32 terms in another order."""
    torch.manual_seed(0)
    x_TI, weight_OI, bias_O = torch.randn(tokens, 96), torch.randn(40, 96), torch.randn(40)
    ours = kind(weight_OI, bias_O if biased else None)(x_TI)
    expected = x_TI.double() @ weight_OI.double().t() + (bias_O.double() if biased else 0)
    assert ours.shape == (tokens, 40)
    assert ours.is_contiguous()
    assert (ours.double() - expected).abs().max() < 3e-5


@pytest.mark.parametrize("path", ["reference", "compiled"])
def test_parts_of_different_kinds_are_side_by_side(path: str) -> None:
    """Row 9: a bias where one part has one, none where another has none."""
    torch.manual_seed(0)
    weights = [
        torch.randn(4, 64),
        torch.randn(2, 64).bfloat16(),
        packed(19, 64, 32),
        packed(3, 64, 8),
        packed(5, 64, 32),
    ]
    biases = [None, torch.randn(2), None, torch.randn(3), torch.randn(5)]
    x_TI = torch.randn(5, 64)
    if path == "compiled":
        linear = prepare_linear(weights, biases, CPU, torch.float32, exact=True)
        assert isinstance(linear, SideBySide)
    else:
        with force(path):
            linear = prepare_linear(weights, biases, CPU, torch.float32)
    parts = [
        x_TI @ dispatch.dense(weight, CPU, torch.float32).t() + (0 if bias is None else bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    torch.testing.assert_close(linear(x_TI), torch.cat(parts, dim=1))


def test_a_dense_weight_is_held_not_copied() -> None:
    """A tied head shares the embedding's memory."""
    weight_OI = torch.randn(4, 8)
    linear = prepare_linear([weight_OI], [None], CPU, torch.float32)
    assert linear.nbytes == weight_OI.nbytes
    before = linear(torch.ones(1, 8))
    weight_OI += 1
    torch.testing.assert_close(linear(torch.ones(1, 8)), before + 8)


def test_what_no_kernel_reads_is_dequantized_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    dispatch._say.cache_clear()
    weight = packed(8, 48, 24)
    with caplog.at_level(logging.WARNING):
        linears = [prepare_linear([weight], [None], CPU, torch.float32) for _ in range(3)]
    x_TI = torch.randn(2, 48)
    torch.testing.assert_close(linears[0](x_TI), x_TI @ dequantized(weight, torch.float32).t())
    if supported():
        assert [record.getMessage() for record in caplog.records] == [
            "the compiled CPU kernels do not read groups of 24 columns, which is not a multiple of 16: "
            "such weights are dequantized, which takes more memory and time"
        ]
        with force("compiled"), pytest.raises(ValueError, match="groups of 24 columns"):
            prepare_linear([weight], [None], CPU, torch.float32)


def test_a_path_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed(32, 64, 32)
    with force("reference"):
        assert isinstance(prepare_linear([weight], [None], CPU, torch.float32), DenseLinearCPU)
    monkeypatch.setenv("COMPRESS_KERNELS", "reference")
    assert isinstance(prepare_linear([weight], [None], CPU, torch.float32), DenseLinearCPU)
    with force("auto"):  # a program's word goes before the environment's
        assert isinstance(prepare_linear([weight], [None], CPU, torch.float32), DenseLinearCPU) != bool(supported())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with force("triton"), pytest.raises(ValueError, match=r"triton: on a CPU.*TRITON_INTERPRET=1|not installed"):
        prepare_linear([weight], [None], CPU, torch.float32)
    monkeypatch.setenv("COMPRESS_KERNELS", "compild")
    with pytest.raises(ValueError, match=r"COMPRESS_KERNELS: unknown path 'compild'; known: auto, .*\(compiled\?\)"):
        prepare_linear([weight], [None], CPU, torch.float32)


@pytest.mark.parametrize(("path", "device"), [("triton", "cpu"), ("auto", "cuda")])
def test_without_triton_its_path_is_refused(path: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with force(path), pytest.raises(ValueError, match=f"{path}: {device} needs triton, which is not installed"):
        dispatch.path_of(torch.device(device))
