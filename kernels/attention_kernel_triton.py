"""The kernels of paged attention on a GPU: of one split of the keys of a few tokens, and of the splits' reduction.

A program takes the query heads of one KV head for a few tokens as the rows of a tile, and walks over the keys of one
split (flash attention, arXiv 2205.14135; splits of a fixed size, so no sum depends on the batch). The id of the page
after next is loaded before the present one is used: loads of keys and values then depend on no load of their own
iteration, and the compiler keeps two tiles of each in flight.

An item or a reduction that is all zeros fills a grid of fixed size, and is left at once. An item without keys is of
rows that belong to no request: their result is zero.

Shapes: T tokens, H query heads, K KV heads, D head dim, P pages, S slots of a page, B partial rows.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow_exact(x, dtype: tl.constexpr):
    """float32 that dtype can hold: for bfloat16 its upper half, as rounding takes many instructions where no machine
    instruction does it.
    """
    if dtype == tl.bfloat16:
        return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def decode_e4m3(codes, dtype: tl.constexpr):
    """float8_e4m3fn from its bytes: sign, exponent and fraction moved to where a wider float has them, and the
    difference of the exponents' biases made up by a factor. NaN becomes ±480.
    """
    signed = codes.to(tl.int8, bitcast=True)
    if dtype == tl.float16:
        return ((signed.to(tl.int16) << 7) & -0x4080).to(tl.float16, bitcast=True) * 256.0
    else:
        bits = (signed.to(tl.int32) << 20) & -0x78100000
        return narrow_exact(bits.to(tl.float32, bitcast=True) * 1.329227995784916e36, dtype)  # 2^120


@triton.jit
def load_codes(pointers, mask, dtype: tl.constexpr):
    """Numbers of a page in the dtype that the products are taken in; quantized ones without their scale."""
    codes = tl.load(pointers, mask=mask, other=0.0)
    if codes.dtype == tl.uint8:
        return decode_e4m3(codes, dtype)
    elif codes.dtype == tl.int8:
        return narrow_exact(codes.to(tl.float32), dtype)
    else:
        return codes.to(dtype)


@triton.jit
def widen_first(x):
    """x. The compiler would load the bytes of a product's second operand one by one, each to where the product wants
    it, and then widen them. It moves no conversion over a reduction, be it of a single row: so it loads vectors, widens
    them, and lets the matrix loads transpose them.
    """
    bits = tl.reshape(x.to(tl.int16, bitcast=True), (1, x.shape[0], x.shape[1]))
    return tl.reduce(bits, 0, tl.standard._elementwise_max).to(x.dtype, bitcast=True)


@triton.jit
def load_page_ids(table, key, columns, PAGE_BITS: tl.constexpr, KEYS: tl.constexpr):
    """The page of the tile of keys from `key` on, or of each of its keys where a page is smaller than a tile."""
    if 1 << PAGE_BITS >= KEYS:
        return tl.load(table + (key >> PAGE_BITS))
    else:
        return tl.load(table + ((key + columns) >> PAGE_BITS))


@triton.jit
def add_tile(scores, top, total):
    """Online softmax in powers of two: weights of a tile, the new maximum and sum, the factor of what was before."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
    decay = tl.exp2(top - finite_top)
    weights = tl.exp2(scores - finite_top[:, None])
    return weights, new_top, total * decay + tl.sum(weights, axis=1), decay


@triton.jit
def add_sink(top, total, sink):
    """Scale factor and sum after one more logit, whose value is zero."""
    new_top = tl.maximum(top, sink)
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    factor = tl.exp2(top - finite_top)
    return factor, total * factor + tl.exp2(sink - finite_top)


@triton.jit
def divide_sums(sums, total):
    """Weighted sums by their weights; zero where there are none."""
    return sums / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def attend_kernel(
    items,
    table,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    out,
    partial_sums,
    partial_norms,
    score_scale,
    cap,
    window,
    kv_heads,
    query_t,
    query_h,
    key_p,
    key_s,
    key_h,
    value_p,
    value_s,
    value_h,
    key_scale_p,
    key_scale_s,
    key_scale_h,
    value_scale_p,
    value_scale_s,
    value_scale_h,
    out_t,
    out_h,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PAGE_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_SCALED: tl.constexpr,
    VALUE_SCALED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    kv_head = (program % kv_heads).to(tl.int64)
    item = items + (program // kv_heads).to(tl.int64) * 8
    first_token = tl.load(item)
    tokens = tl.load(item + 1)
    first_position = tl.load(item + 2)
    first_key = tl.load(item + 3)
    end_key = tl.load(item + 4)
    table += tl.load(item + 5)
    if tokens == 0:  # asked when all loads are on their way, so that none waits for another
        return
    dtype: tl.constexpr = queries.dtype.element_ty

    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, KEYS)
    dims = tl.arange(0, DIMS)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    used = (token < tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    token_row = (first_token + token).to(tl.int64)
    q = tl.load(queries + (token_row * query_t + head * query_h)[:, None] + dims[None, :], mask=used, other=0.0)
    position = first_position + token

    keys += kv_head * key_h
    values += kv_head * value_h
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIMS), tl.float32)
    if WINDOWED:
        oldest = tl.maximum(first_position - window + 1, 0)
        seen = (end_key - oldest).to(tl.uint32, bitcast=True)
    ids = load_page_ids(table, first_key, columns, PAGE_BITS, KEYS)
    for key in range(first_key, end_key, KEYS):
        next_ids = load_page_ids(table, key + KEYS, columns, PAGE_BITS, KEYS)
        page = ids.to(tl.int64)
        slot = (key + columns) & ((1 << PAGE_BITS) - 1)
        # a slot that nobody wrote, or another request's, may hold NaN
        if WINDOWED:  # noqa: SIM108 (one value is compiled); below `oldest` the difference is a large number
            written = (key - oldest + columns).to(tl.uint32, bitcast=True) < seen
        else:
            written = key + columns < end_key
        mask = written[:, None] & (dims < HEAD_DIM)[None, :]
        k = load_codes(keys + (page * key_p + slot * key_s)[:, None] + dims[None, :], mask, dtype)
        if KEY_SCALED and dtype != tl.float32:
            k = widen_first(k)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale
        if KEY_SCALED:
            scale_at = key_scales + page * key_scale_p + slot * key_scale_s + kv_head * key_scale_h
            scores *= tl.load(scale_at, mask=written, other=0.0)[None, :]
        if CAPPED:
            scores = cap - 2 * cap / (tl.exp2(scores) + 1)  # cap · tanh, by powers of two
        visible = written[None, :] & (key + columns[None, :] <= position[:, None])
        if WINDOWED:
            visible &= key + columns[None, :] > position[:, None] - window
        weights, top, total, decay = add_tile(tl.where(visible, scores, float("-inf")), top, total)
        v = load_codes(values + (page * value_p + slot * value_s)[:, None] + dims[None, :], mask, dtype)
        if VALUE_SCALED:
            if dtype != tl.float32:
                v = widen_first(v)
            scale_at = value_scales + page * value_scale_p + slot * value_scale_s + kv_head * value_scale_h
            value_scale = tl.load(scale_at, mask=written, other=0.0)
            if dtype == tl.float16:
                # relative to the tile's largest: weight · scale itself can be too small for float16
                largest = tl.max(value_scale, axis=0)
                relative = value_scale / tl.where(largest > 0, largest, 1.0)
                product = tl.dot((weights * relative[None, :]).to(dtype), v)
                sums = sums * decay[:, None] + product * largest
            else:
                weights *= value_scale[None, :]
                sums = tl.dot(weights.to(dtype), v, sums * decay[:, None], input_precision=PRECISION)
        else:
            sums = tl.dot(weights.to(dtype), v, sums * decay[:, None], input_precision=PRECISION)
        ids = next_ids

    partial = tl.load(item + 6)
    token_row = (tl.load(item + 7) + token).to(tl.int64)  # loaded anew: no register need hold it through the loop
    if partial < 0:
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            factor, total = add_sink(top, total, sink)
            sums *= factor[:, None]
        result = divide_sums(sums, total)
        out_rows = token_row * out_t + head * out_h
        tl.store(out + out_rows[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=used)
    else:
        row = (partial + token).to(tl.int64) * (kv_heads * GROUP) + head
        tl.store(partial_sums + row[:, None] * HEAD_DIM + dims[None, :], sums, mask=used)
        tl.store(partial_norms + row * 2, top, mask=token < tokens)
        tl.store(partial_norms + row * 2 + 1, total, mask=token < tokens)


@triton.jit
def reduce_kernel(
    reductions,
    partial_sums,
    partial_norms,
    sinks,
    out,
    heads,
    out_t,
    out_h,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    reduction = reductions + (program // heads).to(tl.int64) * 5
    token = tl.load(reduction).to(tl.int64)
    base = tl.load(reduction + 1)
    step = tl.load(reduction + 2)
    first = tl.load(reduction + 3)
    end = tl.load(reduction + 4)
    if end == 0:
        return
    dims = tl.arange(0, DIMS)
    used = dims < HEAD_DIM
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((1, DIMS), tl.float32)
    for start in range(0, end, SPLITS):
        split = start + tl.arange(0, SPLITS)
        present = (split >= first) & (split < end)
        row = (base + split * step).to(tl.int64) * heads + head
        tops = tl.load(partial_norms + row * 2, mask=present, other=float("-inf"))
        totals = tl.load(partial_norms + row * 2 + 1, mask=present, other=0.0)
        mask = present[:, None] & used[None, :]
        parts = tl.load(partial_sums + row[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp2(top - finite_top)
        weights = tl.exp2(tops - finite_top)
        total = total * decay + tl.sum(totals * weights, axis=0)
        sums = sums * decay[:, None] + tl.sum(parts * weights[:, None], axis=0)[None, :]
        top = new_top
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        factor, total = add_sink(top, total, sink)
        sums *= factor[:, None]
    result = sums / total[:, None]
    at = out + token * out_t + head * out_h + dims[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=used[None, :])
