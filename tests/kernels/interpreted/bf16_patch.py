"""Makes Triton's interpreter right about bfloat16 and 8-bit floats.

The interpreter holds bfloat16 as its uint16 bits and computes on these as if they were integers: sums, products, dots
and comparisons are silently wrong. It truncates float32 → bfloat16 and rounds ties of float32 → e4m3 away from zero.
Here every such operation widens to float32, computes, and rounds once, to nearest even, as torch does. Values beyond
an 8-bit format become its largest finite one, as a GPU's conversion makes them. What cannot be made right, a reduction
over bfloat16 whose rounding order is the compiler's, is refused.

The patch replaces private methods, so it is installed for the versions that its test passed with, and no others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

VERSIONS = ("3.7.1", "3.9.0")
NARROW: dict[Any, tuple[torch.dtype, type[np.unsignedinteger[Any]]]] = {
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8),
}
Handle = Any  # triton's TensorHandle: `data`, a NumPy array, and `dtype`, the element's Triton type


def unsupported() -> str | None:
    """Why the patch cannot be installed here, or None."""
    if triton.__version__ in VERSIONS:
        return None
    return f"the interpreter's bfloat16 is patched for Triton {', '.join(VERSIONS)}, not {triton.__version__}"


def _floats(handle: Handle) -> np.ndarray[Any, Any]:
    """The exact float32 values of narrow bits."""
    dtype, _ = NARROW[handle.dtype.scalar]
    bits = torch.from_numpy(np.array(handle.data, copy=True, order="C"))
    return bits.view(dtype).float().numpy().reshape(np.shape(handle.data))


def _bits(values: np.ndarray[Any, Any], narrow: Any) -> np.ndarray[Any, Any]:
    """Narrow bits of floats: one rounding to nearest even; 8-bit formats saturate, NaN stays NaN."""
    dtype, unsigned = NARROW[narrow]
    floats = torch.from_numpy(np.array(values, dtype=np.float32, copy=True, order="C"))
    if dtype.itemsize == 1:
        floats = floats.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return floats.to(dtype).view(torch.int16 if unsigned is np.uint16 else torch.uint8).numpy().view(unsigned)


def _widened(handle: Handle) -> Handle:
    if handle.dtype.scalar in NARROW:
        return interpreter.TensorHandle(_floats(handle), tl.float32)
    return handle


def _is_bfloat16(*handles: Handle) -> bool:
    return any(handle.dtype.scalar == tl.bfloat16 for handle in handles)


def install() -> None:
    """Replace the builder's methods; once a process, before the first launch."""
    builder, reduction = interpreter.InterpreterBuilder, interpreter.ReduceOps
    handle_of = interpreter.TensorHandle
    cast, round_to, binary, unary, ternary, fma, reduce_ = (
        builder.cast_impl,
        builder.create_fp_to_fp,
        builder.binary_op,
        builder.unary_op,
        builder.ternary_op,
        builder.create_fma,
        reduction.apply_impl,
    )

    def cast_impl(self: Any, source: Handle, to: Any) -> Handle:
        source = _widened(source)
        if to.scalar in NARROW:
            return handle_of(_bits(source.data, to.scalar), to.scalar)
        return cast(self, source, to)

    def create_fp_to_fp(self: Any, source: Handle, to: Any, rounding: Any) -> Handle:
        nearest = rounding is None or rounding == interpreter._ir.ROUNDING_MODE.RTNE
        if nearest and (source.dtype.scalar in NARROW or to.scalar in NARROW):
            return cast_impl(self, source, to)
        return round_to(self, source, to, rounding)

    def rounded(values: np.ndarray[Any, Any]) -> Handle:
        if values.dtype == np.bool_:
            return handle_of(values, tl.int1)
        return handle_of(_bits(values, tl.bfloat16), tl.bfloat16)

    def binary_op(self: Any, left: Handle, right: Handle, op: Any) -> Handle:
        if _is_bfloat16(left, right):
            return rounded(op(_widened(left).data, _widened(right).data))
        return binary(self, left, right, op)

    def unary_op(self: Any, source: Handle, op: Any) -> Handle:
        return rounded(op(_floats(source))) if _is_bfloat16(source) else unary(self, source, op)

    def ternary_op(self: Any, first: Handle, second: Handle, third: Handle, op: Any) -> Handle:
        if op is not np.where and _is_bfloat16(third):  # a selection moves bits, and may
            return rounded(op(*(_widened(handle).data for handle in (first, second, third))))
        return ternary(self, first, second, third, op)

    def create_fma(self: Any, x: Handle, y: Handle, z: Handle) -> Handle:
        if _is_bfloat16(z):  # 8 + 8 bits of a product are exact in float64, and so is nearly every sum
            return rounded(_floats(x).astype(np.float64) * _floats(y) + _floats(z))
        return fma(self, x, y, z)

    def create_dot(self: Any, a: Handle, b: Handle, sum_: Handle, *_: Any) -> Handle:
        product = np.matmul(_widened(a).data, _widened(b).data, dtype=sum_.data.dtype)
        return handle_of(product + sum_.data, sum_.dtype.scalar)

    def apply_impl(self: Any, operands: Any) -> Any:
        if any(operand.dtype.scalar in NARROW for operand in operands):
            raise TypeError("cast to float32 before a reduction: its rounding order is the compiler's")
        return reduce_(self, operands)

    def create_fabs(self: Any, source: Handle) -> Handle:
        return self.unary_op(source, np.abs)

    def get_bf16(self: Any, value: float) -> Handle:  # Triton 3.7 has no such constants
        return rounded(np.array([value], dtype=np.float32))

    methods = (cast_impl, create_fp_to_fp, binary_op, unary_op, ternary_op, create_fma, create_dot, create_fabs)
    for method in (*methods, get_bf16):
        setattr(builder, method.__name__, method)
    setattr(reduction, apply_impl.__name__, apply_impl)
