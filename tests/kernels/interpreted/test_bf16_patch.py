"""The interpreter's bfloat16 and 8-bit floats against torch, bit for bit: what the other tests here stand on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

BLOCK = 512
OPERATIONS = (
    "add",
    "sub",
    "mul",
    "neg",
    "maximum",
    "where",
    "times 1.1",
    "max",
    "sum after cast",
    "to float16",
    "int to bf16",
)


@triton.jit
def operate(x_ptr, y_ptr, out_ptr, OPERATION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    if OPERATION == "add":
        tl.store(out_ptr + i, x + y)
    elif OPERATION == "sub":
        tl.store(out_ptr + i, x - y)
    elif OPERATION == "mul":
        tl.store(out_ptr + i, x * y)
    elif OPERATION == "neg":
        tl.store(out_ptr + i, -x)
    elif OPERATION == "maximum":
        tl.store(out_ptr + i, tl.maximum(x, y))
    elif OPERATION == "where":
        tl.store(out_ptr + i, tl.where(x < y, x, y))
    elif OPERATION == "times 1.1":
        tl.store(out_ptr + i, x * 1.1)
    elif OPERATION == "max":
        tl.store(out_ptr, tl.max(x, axis=0))
    elif OPERATION == "sum after cast":
        tl.store(out_ptr, tl.sum(x.to(tl.float32), axis=0))
    elif OPERATION == "to float16":
        tl.store(out_ptr + i, x.to(tl.float16))
    elif OPERATION == "int to bf16":
        tl.store(out_ptr + i, (i * 37).to(tl.bfloat16))


@triton.jit
def convert(x_ptr, out_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


@triton.jit
def multiply(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    square = i[:, None] * N + i[None, :]
    tl.store(out_ptr + square, tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square)))


@triton.jit
def sum_narrow(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.reduce(tl.load(x_ptr + tl.arange(0, BLOCK)), 0, tl.standard._sum_combine))


def awkward(seed: int) -> torch.Tensor:
    """Random float32 of many magnitudes, with both zeros, infinities, halfway cases and subnormals of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BLOCK, generator=generator) * 2.0 ** torch.randint(-20, 20, (BLOCK,), generator=generator)
    special = [0.0, -0.0, float("inf"), -float("inf"), 1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 1e-40, 3.3e38]
    x[: len(special)] = torch.tensor(special)
    return x


def expected_of(operation: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    results = {
        "add": lambda: x + y,
        "sub": lambda: x - y,
        "mul": lambda: x * y,
        "neg": lambda: -x,
        "maximum": lambda: torch.maximum(x, y),
        "where": lambda: torch.where(x < y, x, y),
        "times 1.1": lambda: x * torch.tensor(1.1, dtype=torch.bfloat16),
        "max": lambda: x.max()[None],
        "to float16": lambda: x.to(torch.float16),
        "int to bf16": lambda: (torch.arange(BLOCK) * 37).to(torch.bfloat16),
    }
    return results[operation]()


def bits(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(
        torch.int16 if x.itemsize == 2 else torch.uint8
    )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bf16_operation(operation: str) -> None:
    """The same bits as torch; a sum of float32 in another order, to 1e-6 of the sum of magnitudes."""
    x, y = awkward(0).to(torch.bfloat16), awkward(1).flip(0).to(torch.bfloat16)
    if operation == "sum after cast":
        x = x[torch.isfinite(x)].repeat(2)[:BLOCK].clamp(-1e4, 1e4).contiguous()
        out = torch.full((1,), 7.0)
        run(operate, x, y, out, operation)
        assert abs(out.item() - x.double().sum().item()) <= 1e-6 * x.double().abs().sum().item()
        return
    expected = expected_of(operation, x, y)
    out = torch.full_like(expected, 7.0)
    run(operate, x, y, out, operation)
    if operation == "neg":  # Triton 3.7 subtracts from 0, which gives -0 no sign
        out, expected = out + 0, expected + 0
    assert torch.equal(bits(out), bits(expected))


def run(kernel: Any, *arguments: Any) -> None:
    kernel[(1,)](*arguments, BLOCK)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float32_rounds_to_nearest_even(to: torch.dtype) -> None:
    """As torch, except that 8-bit formats saturate."""
    x = awkward(2)
    step = torch.arange(1, 200) * 2.0**-10  # ties and subnormals of e4m3
    x[100:299] = torch.where(torch.arange(199) % 2 == 0, step, -17 * step)
    if to.itemsize == 1:
        x[300:303] = torch.tensor([1.0625, 449.0, 1e6])
    expected = x.clamp(torch.finfo(to).min, torch.finfo(to).max).to(to) if to.itemsize == 1 else x.to(to)
    out = torch.zeros(BLOCK, dtype=to)
    run(convert, x, out)
    kind = torch.int16 if to.itemsize == 2 else torch.uint8
    assert torch.equal(out.view(kind), expected.view(kind))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_narrow_value_widens_exactly(source: torch.dtype) -> None:
    """All 256 values of the 8-bit formats, NaN included; bfloat16's largest, smallest and subnormal."""
    if source.itemsize == 1:
        x = torch.arange(BLOCK, dtype=torch.int32).to(torch.uint8).view(source)
    else:
        x = (torch.arange(BLOCK, dtype=torch.int32) * 128 - 32768).to(torch.int16).view(source)
    out = torch.zeros(BLOCK)
    run(convert, x, out)
    torch.testing.assert_close(out, x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dot(dtype: torch.dtype) -> None:
    """To 32 float32 roundings of the sum of magnitudes."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    out = torch.zeros(32, 32)
    launch: Any = multiply
    launch[(1,)](a, b, out, 32)
    expected, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert ((out.double() - expected).abs() <= 32 * 2.0**-24 * magnitude).all()


def test_a_reduction_over_bf16_is_refused() -> None:
    with pytest.raises(Exception, match="cast to float32 before a reduction"):
        run(sum_narrow, torch.randn(BLOCK).to(torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16))
