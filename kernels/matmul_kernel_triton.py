"""y = x·Wᵀ over weights that are decoded on their way to the multipliers: the kernels, without their launches.

Weights lie as quarter.py lays them out. Two neighbouring 16-bit words are decoded at a time, in one 32-bit register:

int4   fp16: 0x6400 | n is 1024 + n, and 0x6400 | n << 4 is 1024 + 16·n; bf16: 0x4300 | n is 128 + n. What is subtracted
       holds the zero point too.
int8   fp16: as int4. bf16: 0x4300 | (low seven bits) is 128 + those, and 0x4300 | (sign bit) is 128 or 256.
e4m3   its bits where the wider format has them; the exponents' other biases are a factor of 2^−8 (fp16) or 2^−120.
e2m1   likewise, 2^−14 or 2^−126.

All of this is exact. bf16 multiplies its factor away at once, since such products would be lost to float32; with fp16
the factor is left to the end of the sum (FACTOR). The products run as W·xᵀ, so that a weight is decoded in the
registers from which the matrix instruction reads its first operand.

Shapes: T tokens, O out features, I in features, W words of 32 bits, G groups along I; _ is a broadcast dimension.
"""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    """Each 32-bit register as its two 16-bit numbers, side by side along the last dimension."""
    low = pairs.to(tl.uint16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(dtype, bitcast=True)
    both = tl.join(low, high)
    if len(pairs.shape) == 2:
        return tl.reshape(both, (pairs.shape[0], 2 * pairs.shape[1]))
    else:
        return tl.reshape(both, (pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]))


@triton.jit
def _less(value, zero, BASE: tl.constexpr, ZERO: tl.constexpr):
    """value − (BASE + zero point)."""
    if ZERO:
        return value - (zero + BASE).to(value.dtype)
    else:
        return value - BASE


@triton.jit
def decode(words, zero, PART: tl.constexpr, CODE: tl.constexpr, ZERO: tl.constexpr, dtype: tl.constexpr):
    """The numbers of one part of a block of words, in `dtype` (fp16 or bf16), short of the code's factor in fp16."""
    if CODE == "int4":
        if dtype == tl.float16:
            # Only every other part is shifted: the odd ones are read 16 times too large.
            pairs = words >> (8 * (PART // 2))
            if PART % 2 == 0:
                value = _less(_halves((pairs & 0x000F000F) | 0x64006400, dtype), zero, 1032.0, ZERO)
            else:
                value = _less(_halves((pairs & 0x00F000F0) | 0x64006400, dtype) * 0.0625, zero, 72.0, ZERO)
        else:
            pairs = ((words >> (4 * PART)) & 0x000F000F) | 0x43004300
            value = _less(_halves(pairs, dtype), zero, 136.0, ZERO)
    elif CODE == "int8":
        pairs = words >> (8 * PART)
        if dtype == tl.float16:
            value = _less(_halves(((pairs & 0x00FF00FF) ^ 0x00800080) | 0x64006400, dtype), zero, 1152.0, ZERO)
        else:
            value = _halves((pairs & 0x007F007F) | 0x43004300, dtype) - _halves(
                (pairs & 0x00800080) | 0x43004300, dtype
            )
            if ZERO:
                value = value - zero.to(dtype)
    elif CODE == "e4m3":
        pairs = words << (8 * (1 - PART))
        if dtype == tl.float16:
            value = _halves((pairs & 0x80008000) | ((pairs >> 1) & 0x3F803F80), dtype)
        else:
            value = _halves((pairs & 0x80008000) | ((pairs >> 4) & 0x07F007F0), dtype) * 1.329227995784916e36  # 2^120
    else:  # e2m1
        pairs = words << (4 * (3 - PART))
        if dtype == tl.float16:
            value = _halves((pairs & 0x80008000) | ((pairs >> 3) & 0x0E000E00), dtype)
        else:
            value = _halves((pairs & 0x80008000) | ((pairs >> 6) & 0x01C001C0), dtype) * 8.507059173023462e37  # 2^126
    return value


@triton.jit
def load_scale(pointers, mask, SCALE: tl.constexpr):
    """Scales as float32."""
    if SCALE == "e4m3":
        bits = tl.load(pointers, mask=mask, other=0).to(tl.uint16)
        return (bits << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif SCALE == "e8m0":
        bits = tl.load(pointers, mask=mask, other=0).to(tl.int32)
        return tl.maximum(bits << 23, 0x00400000).to(tl.float32, bitcast=True)  # 2^−127 is subnormal
    else:
        return tl.load(pointers, mask=mask, other=0).to(tl.float32)


@triton.jit
def _load(ptr, k, I, O, out, GROUP: tl.constexpr, SCALE: tl.constexpr):
    """Scales or zero points [BLOCK_O] of the group at column k, float32; past the last column, any number."""
    # In 32 bits: G · O passes 2^31 only with 2^35 weights.
    return load_scale(ptr + k // GROUP * O + out, out < tl.where(k < I, O, 0), SCALE)


@triton.jit
def _load_block(ptr, k, I, O, out, GROUP: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr, SCALE: tl.constexpr):
    """A tuple of STEPS: those at columns k, k + STEP, ..."""
    first = _load(ptr, k, I, O, out, GROUP, SCALE)
    if STEPS == 1:
        return (first,)
    elif STEPS == 2:
        return (first, _load(ptr, k + STEP, I, O, out, GROUP, SCALE))
    else:
        return (
            first,
            _load(ptr, k + STEP, I, O, out, GROUP, SCALE),
            _load(ptr, k + 2 * STEP, I, O, out, GROUP, SCALE),
            _load(ptr, k + 3 * STEP, I, O, out, GROUP, SCALE),
        )


@triton.jit
def matmul_kernel(
    x_ptr,  # [T, I]
    w_ptr,  # int32 [O, W]
    scale_ptr,  # [G, O]; None where one scale of a row is its gain
    zero_ptr,  # int8 [G, O] or None
    gain_ptr,  # float32 [O] or None: what the whole sum of a row is multiplied by
    bias_ptr,  # [O] or None
    y_ptr,  # [T, O], or with several splits float32 [splits, T, O] without gain and bias
    T,
    O,
    I,
    x_stride,
    w_stride,
    y_stride,
    split_stride,
    blocks,  # of columns
    split_blocks,  # blocks that one split sums
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale and zero point, 0: all
    STEPS: tl.constexpr,  # times that scales may change in a block
    EARLY: tl.constexpr,  # whether scales multiply the weights, not their sums
    FACTOR: tl.constexpr,
    EVEN: tl.constexpr,  # whether blocks are full
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """y = FACTOR · x·Wᵀ · gain + bias for BLOCK_T tokens and BLOCK_O rows of W, over one split of the columns."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    HALF: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    BLOCK: tl.constexpr = PARTS * WIDTH
    STEP: tl.constexpr = BLOCK // STEPS
    # Programs that run together share rows of W: the tiles of tokens are the grid's first axis.
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    out = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    split = tl.program_id(2)
    in_out, in_token = out < O, token < T
    first = split * split_blocks
    last = tl.minimum(first + split_blocks, blocks)

    column = tl.arange(0, WIDTH)
    x_at = x_ptr + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    w_at = w_ptr + out.to(tl.int64)[:, None] * w_stride + tl.arange(0, WIDTH // 2)[None, :]
    total = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    scales, zeros = (0.0,), (0.0,)
    if GROUP > 0:
        scales = _load_block(scale_ptr, first * BLOCK, I, O, out, GROUP, STEP, STEPS, SCALE)
    if zero_ptr is not None:
        zeros = _load_block(zero_ptr, first * BLOCK, I, O, out, GROUP if GROUP > 0 else 1 << 30, STEP, STEPS, "plain")
    for block in range(first, last):
        words = tl.load(w_at + block * (WIDTH // 2), mask=in_out[:, None], other=0).to(tl.uint32, bitcast=True)
        next_scales, next_zeros = scales, zeros
        if GROUP > 0:  # a block ahead: these loads are too narrow for the pipeline to issue early
            next_scales = _load_block(scale_ptr, (block + 1) * BLOCK, I, O, out, GROUP, STEP, STEPS, SCALE)
            if zero_ptr is not None:
                next_zeros = _load_block(zero_ptr, (block + 1) * BLOCK, I, O, out, GROUP, STEP, STEPS, "plain")
        for step in tl.static_range(STEPS):
            partial = total
            if GROUP > 0 and not EARLY:
                partial = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
            for part in tl.static_range(step * (PARTS // STEPS), (step + 1) * (PARTS // STEPS)):
                k = block * BLOCK + part * WIDTH
                mask = in_token[:, None]
                if not EVEN:
                    mask = mask & (k + column < I)[None, :]
                x = tl.load(x_at + k, mask=mask, other=0.0)
                zero = 0.0
                if zero_ptr is not None:
                    zero = zeros[step][:, None]
                weight = decode(words, zero, part, CODE, zero_ptr is not None, HALF).to(dtype)
                if EARLY:
                    # 2^6 keeps the product with a half's factor away from the smallest numbers
                    weight = weight * (scales[step] * (64.0 if FACTOR != 1 else 1.0)).to(dtype)[:, None]
                partial = tl.dot(weight, tl.trans(x), partial, input_precision="ieee")
            if GROUP > 0 and not EARLY:
                total += partial * scales[step][:, None]
            else:
                total = partial
        scales, zeros = next_scales, next_zeros

    total = total * FACTOR
    mask = in_out[:, None] & in_token[None, :]
    if not SPLIT:
        if gain_ptr is not None:
            total = total * tl.load(gain_ptr + out, mask=in_out, other=0.0)[:, None]
        if bias_ptr is not None:
            total = total + tl.load(bias_ptr + out, mask=in_out, other=0.0).to(tl.float32)[:, None]
    y_at = y_ptr + split.to(tl.int64) * split_stride + token.to(tl.int64)[None, :] * y_stride + out[:, None]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_splits_kernel(
    part_ptr,  # float32 [splits, T, O]
    gain_ptr,
    bias_ptr,
    y_ptr,  # [T, O]
    O,
    y_stride,
    split_stride,
    SPLITS: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """y = (sum over splits, in their order) · gain + bias; one token and BLOCK_O outputs."""
    token = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    mask = out < O
    at = part_ptr + token * O + out
    total = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * split_stride, mask=mask, other=0.0)
    if gain_ptr is not None:
        total = total * tl.load(gain_ptr + out, mask=mask, other=0.0)
    if bias_ptr is not None:
        total = total + tl.load(bias_ptr + out, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * y_stride + out, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gemv_kernel(
    x_ptr,  # [1, I]
    w_ptr,  # int32 [O, W]
    scale_ptr,  # [G, O] or None
    zero_ptr,  # int8 [G, O] or None
    gain_ptr,  # float32 [O] or None
    bias_ptr,  # [O] or None
    y_ptr,  # [1, O]
    O,
    I,
    w_stride,
    blocks,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    STEPS: tl.constexpr,
    FACTOR: tl.constexpr,
    EVEN: tl.constexpr,  # whether every turn of the loop has all its columns
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # of columns, in one turn
    BLOCK_O: tl.constexpr,
):
    """One token: float32 products, summed where they arise until the end."""
    BLOCK: tl.constexpr = PARTS * WIDTH
    out = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    in_out = out < O
    column = tl.arange(0, WIDTH)
    w_at = w_ptr + out.to(tl.int64)[:, None, None] * w_stride + tl.arange(0, WIDTH // 2)[None, None, :]
    total = tl.zeros((BLOCK_O, BLOCKS, WIDTH), tl.float32)
    row_zero = 0.0
    if GROUP == 0 and zero_ptr is not None:
        row_zero = tl.load(zero_ptr + out, mask=in_out, other=0).to(tl.float32)[:, None, None]
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        mask = in_out[:, None, None]
        if not EVEN:
            mask = mask & (block < blocks)[None, :, None]
        words = tl.load(w_at + (block * (WIDTH // 2))[None, :, None], mask=mask, other=0).to(tl.uint32, bitcast=True)
        for step in tl.static_range(STEPS):
            partial, zero = total, row_zero
            if GROUP > 0:
                partial = tl.zeros((BLOCK_O, BLOCKS, WIDTH), tl.float32)
                k = block * BLOCK + step * (BLOCK // STEPS)
                at = (k // GROUP)[None, :] * O + out[:, None]
                mask = in_out[:, None]
                if not EVEN:
                    mask = mask & (k < I)[None, :]
                scale = load_scale(scale_ptr + at, mask, SCALE)[:, :, None]
                if zero_ptr is not None:
                    zero = tl.load(zero_ptr + at, mask=mask, other=0).to(tl.float32)[:, :, None]
            for part in tl.static_range(step * (PARTS // STEPS), (step + 1) * (PARTS // STEPS)):
                k = (block * BLOCK + part * WIDTH)[:, None] + column[None, :]
                x = tl.load(x_ptr + k) if EVEN else tl.load(x_ptr + k, mask=k < I, other=0.0)
                weight = decode(words, zero, part, CODE, zero_ptr is not None, tl.float16).to(tl.float32)
                partial += weight * x.to(tl.float32)[None, :, :]
            if GROUP > 0:
                total += partial * scale
            else:
                total = partial
    result = tl.sum(tl.sum(total, axis=2), axis=1) * FACTOR
    if gain_ptr is not None:
        result = result * tl.load(gain_ptr + out, mask=in_out, other=0.0)
    if bias_ptr is not None:
        result = result + tl.load(bias_ptr + out, mask=in_out, other=0.0).to(tl.float32)
    tl.store(y_ptr + out, result.to(y_ptr.dtype.element_ty), mask=in_out)
