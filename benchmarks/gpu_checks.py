"""Every kernel against float64, on fresh random inputs, with outputs and workspaces poisoned before it writes them.

The error is the root mean square of the difference over that of the expected values, in units of the output format's
rounding (2^-8 for bfloat16, 2^-11 for float16): one rounding to the nearest costs about 0.4 of such a unit, a lost
group, nibble or tail costs hundreds.

Shapes: T tokens, O out features, I in features, H query heads, K KV heads, D head dim, P pages, S slots of a page or
keys, L new tokens of a request, V vocabulary.
"""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu_clock import Bench
from benchmarks.gpu_inputs import Check, Inputs, error_of, poisoned
from benchmarks.gpu_paged import PAGE, latent_case, paged_cases
from benchmarks.gpu_replay import check_replays
from benchmarks.gpu_shapes import CHECKED, random_weight
from benchmarks.gpu_tables import Column, Deadline, Section
from compress.kernels import kv, matmul, narrow_matmul, token_quant
from compress.kernels.activation_triton import gated
from compress.kernels.kv_triton import copy_pages, store
from compress.kernels.logprob_triton import kl_divergence, token_logprobs
from compress.kernels.matmul_triton import prepare_matmul
from compress.kernels.narrow import quantize_float8
from compress.kernels.narrow_matmul_triton import prepare_w8a8
from compress.kernels.norm_triton import add_rms_norm, rms_norm
from compress.kernels.packing import pack_int32
from compress.kernels.rotary_triton import rotate
from compress.kernels.token_quant_triton import quantize_tokens
from compress.kernels.weights import PackedWeight

LINEAR_LIMIT = 1.5  # the output's rounding, and that of a scaled weight
ROUNDINGS_LIMIT = 2.5  # a few roundings in a row
ATTENTION_LIMIT = 2.5  # the softmax's weights are rounded too, and a score's error is multiplied


def check_linears(bench: Bench, inputs: Inputs) -> Iterator[Check]:
    """Every format at every path's token counts; a token's bits must not depend on the others of its path."""
    shapes = ((72, 288),) if bench.interpreted else ((264, 704), (4096, 4096), (1544, 2816))
    counts = (1, 3) if bench.interpreted else (1, 2, 16, 17, 64, 65, 130, 300)
    for kind in CHECKED:
        worst, batches = 0.0, 0
        for rows, columns in shapes:
            weight = random_weight(kind, rows, columns, bench.device, inputs.generator)
            dense_OI = matmul.dequantized(weight, torch.float64)
            bias_O = inputs.normal(rows)
            linear = prepare_matmul([weight], [bias_O], bench.device, inputs.dtype)
            for tokens in counts:
                x_TI = inputs.normal(tokens, columns)
                y_TO = linear(x_TI)
                expected_TO = x_TI.double() @ dense_OI.t() + bias_O.double()
                worst = max(worst, error_of(y_TO, expected_TO, inputs.dtype))
                if tokens > 2 and not torch.equal(linear(x_TI[-2:]), y_TO[-2:]) and tokens <= 64:
                    batches += 1
        yield Check(f"linear {kind}", inputs.name, worst, LINEAR_LIMIT)
        yield Check(f"linear {kind}, alone or in a batch", inputs.name, float(batches), 0.0)


def check_narrow_linears(bench: Bench, inputs: Inputs) -> Iterator[Check]:
    """8-bit weights and tokens against the reference, whose sums are exact."""
    rows, columns = (72, 256) if bench.interpreted else (1544, 2816)
    counts = (1, 3) if bench.interpreted else (1, 16, 17, 256, 300)
    dense_OI = inputs.normal(rows, columns).float()
    scale_OG = dense_OI.abs().amax(1, keepdim=True) / 127
    codes_OI = (dense_OI / scale_OG).round().to(torch.int8)
    weights = {
        "int8": PackedWeight(8, columns, pack_int32(codes_OI, 8), scale_OG, None),
        "fp8": quantize_float8(dense_OI, "channel"),
        "fp8 blocks": quantize_float8(dense_OI, (128, 128)),
    }
    for kind, weight in weights.items():
        linear = prepare_w8a8([weight], [None], bench.device, inputs.dtype)
        reference = narrow_matmul.prepare_w8a8([weight], [None], bench.device, inputs.dtype)
        worst = 0.0
        for tokens in counts:
            x_TI = inputs.normal(tokens, columns)
            worst = max(worst, error_of(linear(x_TI), reference(x_TI).double(), inputs.dtype))
        yield Check(f"W8A8 {kind}", inputs.name, worst, LINEAR_LIMIT)


def check_pointwise(bench: Bench, inputs: Inputs) -> Iterator[Check]:
    tokens, channels = (3, 80) if bench.interpreted else (37, 5120)
    x_TC, residual_TC, weight_C = (
        inputs.normal(tokens, channels),
        inputs.normal(tokens, channels),
        inputs.normal(channels),
    )

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight_C.double()

    yield _check("rms_norm", inputs, rms_norm(x_TC, weight_C, 1e-6), norm(x_TC.double()))
    out_TC, sum_TC = add_rms_norm(x_TC, residual_TC, weight_C, 1e-6)
    yield _check("add_rms_norm, sum", inputs, sum_TC, x_TC.double() + residual_TC.double())
    yield _check("add_rms_norm", inputs, out_TC, norm(x_TC.double() + residual_TC.double()))
    gate, up = x_TC.double().chunk(2, dim=1)
    yield _check("silu_mul", inputs, gated(x_TC, "silu"), F.silu(gate) * up)
    heads_THD = x_TC.view(tokens, -1, 16 if bench.interpreted else 128)
    angle_TF = torch.rand(tokens, heads_THD.shape[2] // 2, device=bench.device, generator=inputs.generator) * 6
    cos_TF, sin_TF = angle_TF.cos().to(inputs.dtype), angle_TF.sin().to(inputs.dtype)
    low, high = heads_THD.double().chunk(2, dim=-1)
    cos, sin = cos_TF.double()[:, None], sin_TF.double()[:, None]
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    yield _check("rotate", inputs, rotate(heads_THD, cos_TF, sin_TF), rotated)
    for kind in ("int8", "e4m3"):
        codes_TI, scale_TG = quantize_tokens(x_TC, kind)
        expected_TI, expected_TG = token_quant.quantize_tokens(x_TC, kind)
        wrong = (codes_TI.view(torch.uint8) != expected_TI.view(torch.uint8)).sum() + (scale_TG != expected_TG).sum()
        yield Check(f"quantize_tokens {kind}, differing", inputs.name, float(wrong), 0.0)


def check_logprobs(bench: Bench, inputs: Inputs) -> Iterator[Check]:
    tokens, vocabulary = (3, 300) if bench.interpreted else (33, 151936)
    logits_TV, other_TV = (inputs.normal(tokens, vocabulary) * 3 for _ in range(2))
    target_T = torch.randint(vocabulary, (tokens,), device=bench.device, generator=inputs.generator)
    found = token_logprobs(logits_TV, target_T)
    wide_TV, other_wide_TV = logits_TV.double().log_softmax(1), other_TV.double().log_softmax(1)
    expected_T = wide_TV.gather(1, target_T[:, None])[:, 0]
    ids = (found.argmax_T != logits_TV.float().argmax(1)) & (
        logits_TV.gather(1, found.argmax_T[:, None])[:, 0] != logits_TV.amax(1)
    )
    yield Check("token_logprobs", inputs.name, error_of(found.logprob_T, expected_T, torch.float32), 64.0)
    yield Check("token_logprobs, wrong argmax", inputs.name, float(ids.sum()), 0.0)
    kl_T = (wide_TV.exp() * (wide_TV - other_wide_TV)).sum(1)
    yield Check("kl_divergence", inputs.name, error_of(kl_divergence(logits_TV, other_TV), kl_T, torch.float32), 64.0)


def check_attention(bench: Bench, inputs: Inputs) -> Iterator[Check]:
    for case in paged_cases(bench.interpreted):
        got_THD, expected_THD = case.run(bench.device, inputs.dtype, inputs.generator)
        error = error_of(got_THD, expected_THD, inputs.dtype)
        yield Check(f"attention {case.name}", inputs.name, error, ATTENTION_LIMIT)
    shape, lengths, contexts = (128, 512, 64), (1, 1, 1, 3, 1), (1, 511, 512, 1030, 4100)
    if bench.interpreted:
        shape, lengths, contexts = (4, 32, 16), (1, 3, 1), (40, 19, 1)
    got_THR, expected_THR = latent_case(shape, lengths, contexts, bench.device, inputs.dtype, inputs.generator)
    yield Check("latent attention", inputs.name, error_of(got_THR, expected_THR, inputs.dtype), ATTENTION_LIMIT)


def check_cache(bench: Bench, inputs: Inputs) -> Iterator[Check]:
    """Storing and copying pages writes the reference's bits, and nothing elsewhere."""
    tokens, pages, heads = (5, 4, (2, 16)) if bench.interpreted else (300, 64, (8, 128))
    k_TKD, v_TKD = inputs.normal(tokens, *heads), inputs.normal(tokens, *heads)
    slots_T = torch.randperm(pages * PAGE, device=bench.device, generator=inputs.generator)[:tokens]
    slots_T[1] = -1
    copies = [(0, 3), (1, 2)]
    for codes in (None, torch.float8_e4m3fn, torch.int8):
        ours, theirs = (_empty_cache(pages, heads, codes, inputs) for _ in range(2))
        store(k_TKD, v_TKD, ours, 0, slots_T)
        copy_pages(ours, copies)
        kv.store(k_TKD, v_TKD, theirs, 0, slots_T)
        kv.copy_pages(theirs, copies)
        wrong = sum(
            int((a.view(torch.uint8) != b.view(torch.uint8)).sum())
            for a, b in zip(ours.written, theirs.written, strict=True)
        )
        kind = inputs.name if codes is None else str(codes).removeprefix("torch.")
        yield Check(f"store and copy {kind} pages, differing bytes", inputs.name, float(wrong), 0.0)


def _empty_cache(pages: int, heads: tuple[int, int], codes: torch.dtype | None, inputs: Inputs) -> kv.KVCache:
    shape = (pages, PAGE, *heads)
    keys, values = (torch.ones(shape, device=inputs.device).to(codes or inputs.dtype) for _ in range(2))
    if codes is None:
        return kv.KVCache((keys,), (values,))
    scales = [torch.ones(shape[:3], device=inputs.device) for _ in range(2)]
    return kv.KVCache((keys,), (values,), (scales[0],), (scales[1],))


def _check(name: str, inputs: Inputs, got: torch.Tensor, expected: torch.Tensor) -> Check:
    return Check(name, inputs.name, error_of(got, expected, inputs.dtype), ROUNDINGS_LIMIT)


GROUPS: tuple[Callable[[Bench, Inputs], Iterator[Check]], ...] = (
    check_linears,
    check_attention,
    check_replays,
    check_cache,
    check_narrow_linears,
    check_pointwise,
    check_logprobs,
)


def check_kernels(bench: Bench, deadline: Deadline) -> Section:
    seed = secrets.randbits(31)
    section = Section(
        f"Correctness, seed {seed}",
        (Column("kernel"), Column("dtype"), Column("error", ".2f"), Column("limit", ".1f"), Column("verdict")),
    )
    for dtype in bench.dtypes:
        generator = torch.Generator(bench.device).manual_seed(seed)
        for group in GROUPS:
            if deadline.passed(f"{group.__name__.removeprefix('check_')} in {dtype}"):
                continue
            try:
                with poisoned():
                    for check in group(bench, Inputs(bench.device, dtype, generator)):
                        tell(section, check)
                        if deadline.passed(f"what comes after {check.name} in {dtype}"):
                            break
            except Exception as error:  # the other kernels' verdicts are worth having
                traceback.print_exc()
                section.failures.append(f"{group.__name__} in {dtype}: {type(error).__name__}: {error}")
    section.notes += deadline.note()
    return section


def tell(section: Section, check: Check) -> None:
    good = check.error <= check.limit
    section.add(check.name, check.what, check.error, check.limit, "ok" if good else "WRONG")
    if not good:
        section.failures.append(f"{check.name}, {check.what}: {check.error:.3g} > {check.limit:.3g}")
