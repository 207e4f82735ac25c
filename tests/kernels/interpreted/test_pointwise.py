"""The small kernels, interpreted, against float64.

Bounds are sums of what is rounded: U is the unit roundoff of the dtype that is written, 2^-24 that of float32, in which
the kernels compute. A value below a dtype's normals has an absolute error instead: TINY.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels import activation, logprob, norm, token_quant
from compress.kernels import activation_triton as gate_kernel
from compress.kernels import logprob_triton as logprob_kernel
from compress.kernels import norm_triton as norm_kernel
from compress.kernels import rotary_triton as rotary_kernel
from compress.kernels import token_quant_triton as quant_kernel
from compress.kernels.launch import Target, run
from compress.kernels.logprob import TokenLogprobs

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # of −∞ − −∞, not taken
SM90 = Target("cuda", 90)
U = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TINY = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
U32 = 2.0**-24
DTYPES = list(U)
BOTH = [torch.float32, torch.float16]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def assert_within(actual: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """No element further from the exact one than its bound; NaN is as far as can be."""
    error = (actual.double() - exact).abs()
    assert actual.shape == exact.shape
    assert (error <= bound).all(), f"{float((error / bound).nan_to_num(math.inf).max()):.3g} times the bound"


def hard_rows(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, then an outlier in one row, a row of zeros, one of −0 and one of subnormals."""
    x = randn(rows, columns, dtype=dtype)
    x[0, columns // 2] = 3e4
    x[1], x[2] = 0.0, -0.0
    x[3] = TINY[dtype] * torch.arange(columns).fmod(7).to(torch.float64)
    return x


# --- RMSNorm


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    wide = x.double()
    gain = weight.double() + unit_offset
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def norm_bound(exact: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Two roundings to dtype (Llama; Gemma has one) and about 16 in float32: the mean's tree, rsqrt, products."""
    return (2.1 * U[dtype] + 16 * U32) * exact.abs() + TINY[dtype] * (1 + weight.double().abs())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("columns", [1, 64, 576, 4099])
def test_rms_norm(columns: int, unit_offset: bool, dtype: torch.dtype) -> None:
    x, weight = hard_rows(7, columns, dtype), randn(columns, dtype=dtype, seed=1)
    room = poisoned(7, columns + 5, dtype=dtype)
    run(norm_kernel.plan_rms_norm(x, weight, 1e-5, room[:, :columns], SM90, unit_offset=unit_offset))
    exact = exact_norm(x, weight, 1e-5, unit_offset)
    assert_within(room[:, :columns], exact, norm_bound(exact, weight, dtype))
    assert room[:, columns:].isnan().all()
    assert torch.equal(room[1:3, :columns].signbit(), (x[1:3].signbit() ^ (weight.double() + unit_offset).signbit()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
def test_add_rms_norm(unit_offset: bool, dtype: torch.dtype) -> None:
    """The sum is torch's to the bit; it may replace the residual."""
    x, residual, weight = hard_rows(5, 200, dtype), randn(5, 200, dtype=dtype, seed=2), randn(200, dtype=dtype, seed=1)
    normed, total = norm_kernel.add_rms_norm(x, residual, weight, 1e-6, unit_offset)
    assert torch.equal(total, x + residual)
    exact = exact_norm(total, weight, 1e-6, unit_offset)
    assert_within(normed, exact, norm_bound(exact, weight, dtype))
    out = poisoned(5, 200, dtype=dtype)
    run(
        norm_kernel.plan_rms_norm(
            x, weight, 1e-6, out, SM90, unit_offset=unit_offset, residual=residual, total=residual
        )
    )
    assert torch.equal(out, normed)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("shared", [True, False])
def test_norm_of_heads_in_place(shared: bool, dtype: torch.dtype) -> None:
    """Queries and keys of a fused projection, where they lie; the values beside them stay."""
    qkv_THD = randn(3, 9, 48, dtype=dtype)
    weight = randn(48, dtype=dtype, seed=1) if shared else randn(7, 48, dtype=dtype, seed=1)
    before = qkv_THD.clone()
    run(norm_kernel.plan_rms_norm(qkv_THD[:, :7], weight, 1e-6, qkv_THD[:, :7], SM90))
    exact = exact_norm(before[:, :7], weight, 1e-6, False)
    assert_within(qkv_THD[:, :7], exact, norm_bound(exact, weight, dtype))
    assert torch.equal(qkv_THD[:, 7:], before[:, 7:])


def test_norm_refuses_rows_that_no_program_holds() -> None:
    x = torch.empty(1, 40000, device="meta")
    with pytest.raises(ValueError, match="40000 channels"):
        norm_kernel.plan_rms_norm(x, x[0], 1e-6, x, SM90)


# --- Rotary


def exact_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair as a complex number, turned by multiplication."""
    pairs = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[:, None]
    wide, out = x.double(), x.double().clone()
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    turned = torch.complex(wide[..., first], wide[..., second]) * turn
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def rotation_bound(x: torch.Tensor, cos: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """One rounding to dtype; three in float32, of terms no larger than the largest |x| times the largest factor."""
    return U[x.dtype] * exact.abs() + 3 * U32 * x.double().abs().max() * 4 + TINY[x.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "pairs"), [(1, 64, 32), (5, 64, 12), (40, 128, 64), (3, 80, 40)])
def test_rotate(heads: int, head_dim: int, pairs: int, interleaved: bool, dtype: torch.dtype) -> None:
    x = randn(4, heads, head_dim, dtype=dtype)
    x[1, 0] = -0.0
    angle = randn(4, pairs, dtype=torch.float32, seed=1) * 3
    cos, sin = angle.cos() * 1.25, angle.sin() * 1.25
    out = rotary_kernel.rotate(x, cos, sin, interleaved)
    exact = exact_rotation(x, cos, sin, interleaved)
    assert_within(out, exact, rotation_bound(x, cos, exact))
    assert torch.equal(out[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [32, 10])
def test_rotate_in_place(pairs: int, interleaved: bool) -> None:
    qkv_THD = randn(3, 9, 64, dtype=torch.float16)
    before, angle = qkv_THD.clone(), randn(3, pairs, dtype=torch.float32, seed=1)
    qk_THD = qkv_THD[:, :7]
    run(rotary_kernel.plan_rotate(qk_THD, angle.cos(), angle.sin(), qk_THD, SM90, interleaved=interleaved))
    assert torch.equal(qk_THD, rotary_kernel.rotate(before[:, :7], angle.cos(), angle.sin(), interleaved))
    assert torch.equal(qkv_THD[:, 7:], before[:, 7:])


# --- Gated activations

EXACT_SHARE = {
    "silu": lambda x: torch.sigmoid(x),
    "gelu": lambda x: torch.special.ndtr(x),
    "gelu_tanh": lambda x: torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # 1 / (1 + ∞) is the 0 that is wanted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", list(EXACT_SHARE))
@pytest.mark.parametrize("channels", [3, 1025])
def test_gated(channels: int, gate: activation.Gate, dtype: torch.dtype) -> None:
    x = randn(5, 2 * channels, dtype=dtype) * 3
    x[0, 0], x[1, 0], x[2, 0], x[3, 0], x[4, 0] = -0.0, -90.0, 90.0, TINY[dtype], -9.0
    x[:, channels] = 2.0
    room = poisoned(5, channels + 2, dtype=dtype)
    run(gate_kernel.plan_gated(x, gate, room[:, :channels], SM90))
    gates, ups = x[:, :channels].double(), x[:, channels:].double()
    share = EXACT_SHARE[gate](gates)
    exact = gates * share * ups
    # The roundings of exp's argument z count |z| times; the cubic has four of them more. From z = 88.7 on, e^z is
    # infinite and the share 0. erf cancels below 0: an absolute error.
    cubic = 5 * (1.6 * gates.abs() + 0.0714 * gates.abs() ** 3)
    argument = cubic if gate == "gelu_tanh" else 2 * gates.abs()
    bound = (U[dtype] + U32 * (6 + argument)) * exact.abs() + TINY[dtype] * (1 + ups.abs())
    bound = bound + (2 * U32 if gate == "gelu" else 2.0**-127) * (gates * ups).abs()
    assert_within(room[:, :channels], exact, bound)
    assert room[:, channels:].isnan().all()
    assert room[0, 0].signbit()


# --- Log-probabilities


def exact_logprobs(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.double()
    return wide.log_softmax(1)[torch.arange(len(target)), target], wide.logsumexp(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 7, 8192, 8193, 20001])
def test_token_logprobs(vocabulary: int, dtype: torch.dtype) -> None:
    logits = randn(5, vocabulary, dtype=dtype) * 4
    logits[0, vocabulary // 2] = 200.0  # its probability is 1: all others vanish
    logits[1] = -0.0
    logits[2, : vocabulary - 1] = -math.inf
    target = torch.tensor([vocabulary // 2, vocabulary - 1, vocabulary - 1, 0, vocabulary // 3])
    out = logprob_kernel.token_logprobs(logits, target)
    exact, total = exact_logprobs(logits, target)
    # About 40 roundings in the tree of the sum, the same in its logarithm; then differences of that size.
    assert_within(out.logprob_T, exact, 40 * U32 + 4 * U32 * exact.abs())
    assert_within(out.logsumexp_T, total, 40 * U32 + 4 * U32 * total.abs())
    assert torch.equal(out.argmax_T, torch.from_numpy(logits.float().numpy().argmax(1)))  # numpy's is the first
    assert out.logprob_T[2] == 0


def test_strange_logits_and_targets() -> None:
    logits = torch.zeros(6, 9000)
    logits[0] = -math.inf
    logits[1, 5], logits[2, 8500] = math.inf, math.nan
    logits[5, 8999] = -math.inf
    target = torch.tensor([3, 4, 4, -1, 9000, 8999])
    with np.errstate(invalid="ignore", divide="ignore"):
        out = logprob_kernel.token_logprobs(logits, target)
    assert out.logprob_T[:5].isnan().all()
    assert out.logprob_T[5] == -math.inf
    assert torch.equal(out.logsumexp_T.isnan(), torch.tensor([False, True, True, False, False, False]))
    assert out.logsumexp_T[0] == -math.inf
    expected = logprob.token_logprobs(logits, target)
    assert torch.equal(out.logprob_T.isnan(), expected.logprob_T.isnan())
    assert torch.equal(out.logsumexp_T.isnan(), expected.logsumexp_T.isnan())


def test_argmax_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, 20000)
    logits[0, [8190, 8193, 19999]] = 2.0
    out = logprob_kernel.token_logprobs(logits, torch.tensor([0, 0]))
    assert out.argmax_T.tolist() == [8190, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [10, 9001])
def test_kl_divergence(vocabulary: int, dtype: torch.dtype) -> None:
    p, q = randn(5, vocabulary, dtype=dtype) * 3, randn(5, vocabulary, dtype=dtype, seed=1) * 3
    p[0, 3] = 60.0
    q[1] = p[1]
    p[2, :5] = q[2, :5] = -math.inf
    q[3, 1] = -math.inf
    log_p, log_q = p.double().log_softmax(1), q.double().log_softmax(1)
    exact = torch.where(log_p > -math.inf, log_p.exp() * (log_p - log_q), 0.0).sum(1)
    out = logprob_kernel.kl_divergence(p, q)
    assert out[3] == exact[3] == math.inf
    rest = torch.tensor([0, 1, 2, 4])
    # Three sums that cancel: each as rounded as a log-probability, of terms up to the largest |p − q|.
    largest = (p.double() - q.double()).nan_to_num(0, 0, 0).abs().amax(1)[rest]
    assert_within(out[rest], exact[rest], 60 * U32 * (1 + largest))


# --- 8-bit tokens


def same_codes(x: torch.Tensor, kind: token_quant.Kind, group: int | None = None) -> None:
    """The kernel's codes and scales are the reference's, to the bit."""
    codes, scale = quant_kernel.quantize_tokens(x, kind, group)
    wanted_codes, wanted_scale = token_quant.quantize_tokens(x, kind, group)
    assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8))
    assert torch.equal(scale.view(torch.int32), wanted_scale.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "e4m3"])
@pytest.mark.parametrize(("columns", "group"), [(1, None), (300, None), (300, 128), (4224, 128), (128, 128), (96, 48)])
def test_quantize_tokens(columns: int, group: int | None, kind: token_quant.Kind, dtype: torch.dtype) -> None:
    same_codes(hard_rows(6, columns, dtype), kind, group)


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_quantize_wide_rows(kind: token_quant.Kind) -> None:
    x = hard_rows(4, 20001, torch.float16)
    x[0, 20000] = -6e4
    same_codes(x, kind)


def neighbours(points: torch.Tensor) -> torch.Tensor:
    """Each float32 point, and the float32 numbers on both sides of it."""
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    return torch.cat((points, torch.nextafter(points, up), torch.nextafter(points, down)))


def test_int8_ties() -> None:
    """Rows whose largest is 127 have the scale 1: every half between two codes, and what stands beside it."""
    ties = neighbours(torch.arange(-127, 127) + 0.5)
    x = torch.cat((ties.clamp(-127, 127), torch.tensor([127.0, -0.0, 0.0])))[None]
    same_codes(x, "int8")
    assert quant_kernel.quantize_tokens(x, "int8")[1].item() == 1


def test_e4m3_codes_and_ties() -> None:
    """Rows whose largest is 448 have the scale 1: every code, every half between two, and what stands beside it."""
    values = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    signed = torch.cat((points, -points))
    x = torch.cat((neighbours(signed).clamp(-448, 448), torch.tensor([448.0])))[None]
    same_codes(x, "e4m3")
    codes, scale = quant_kernel.quantize_tokens(x, "e4m3")
    assert scale.item() == 1
    assert len(codes.view(torch.uint8).unique()) == 254  # all but the two NaN
    half = torch.empty(x.shape, dtype=torch.float16)
    run(quant_kernel.plan_quantize_tokens(x, half, scale, SM90))
    assert torch.equal(half.view(torch.int16), codes.half().view(torch.int16))


@pytest.mark.parametrize("group", [None, 4])
@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_numbers_that_are_not_finite(kind: token_quant.Kind, group: int | None) -> None:
    x = randn(4, 12, dtype=torch.float32)
    x[0, 5], x[1, 5], x[2, 5] = math.nan, math.inf, -math.inf
    same_codes(x, kind, group)
    codes, scale = quant_kernel.quantize_tokens(x, kind, group)
    spoilt = scale[:3] if group is None else scale[:3, 1]
    assert spoilt.isnan().all()
    assert scale[3].isfinite().all()
    assert (codes[:3, 4:8].float() == 0).all()


@settings(derandomize=True, max_examples=25, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_any_floats_are_quantized_as_by_torch(values: list[float]) -> None:
    for kind in ("int8", "e4m3"):
        same_codes(torch.tensor([values], dtype=torch.float32), kind)


def test_groups_wider_than_a_program_are_refused() -> None:
    x = torch.empty(1, 40000, device="meta")
    codes, scale = torch.empty(1, 40000, dtype=torch.int8, device="meta"), torch.empty(1, 2, device="meta")
    with pytest.raises(ValueError, match="groups of 20000"):
        quant_kernel.plan_quantize_tokens(x, codes, scale, SM90, group=20000)


# --- What all of them keep

COSINE = randn(1, 32, dtype=torch.float32, seed=3)


def everything(x: torch.Tensor) -> list[torch.Tensor]:
    """Every kernel on rows [T, 576]; each result's first dimension is T."""
    tokens = x.shape[0]
    table = COSINE.expand(tokens, 32)
    heads, weight = x.reshape(tokens, 9, 64), randn(576, dtype=x.dtype, seed=1)
    tokenwise = logprob_kernel.token_logprobs(x, torch.full((tokens,), 7))
    results = [norm_kernel.rms_norm(x, weight, 1e-5), *norm_kernel.add_rms_norm(x, x, weight, 1e-5, True)]
    results += [norm_kernel.rms_norm(heads, weight[:64], 1e-5)]
    results += [rotary_kernel.rotate(heads, table, table, interleaved) for interleaved in (False, True)]
    results += [gate_kernel.gated(x, gate) for gate in ("silu", "gelu", "gelu_tanh")]
    results += [tokenwise.logprob_T, tokenwise.logsumexp_T, tokenwise.argmax_T]
    results += [logprob_kernel.kl_divergence(x, x.flip(1))]
    for kind in ("int8", "e4m3"):
        for group in (None, 128):
            codes, scale = quant_kernel.quantize_tokens(x, kind, group)
            results += [codes.view(torch.uint8), scale]
    return results


def test_rows_do_not_depend_on_their_batch() -> None:
    x = randn(7, 576, dtype=torch.float16)
    together = everything(x)
    for first, last in ((0, 1), (3, 5), (6, 7)):
        for whole, part in zip(together, everything(x[first:last]), strict=True):
            assert torch.equal(whole[first:last], part)


def test_no_tokens() -> None:
    assert all(result.shape[0] == 0 for result in everything(torch.empty(0, 576)))


def far_rows(columns: int) -> torch.Tensor:
    """Three float16 rows 1.2 · 10^9 apart in memory that is only touched where they lie: 2.4 · 10^9 passes int32."""
    stride = 1_200_000_000
    memory = torch.from_numpy(np.zeros(2 * stride + columns, dtype=np.float16))
    rows = memory.as_strided((3, columns), (stride, 1))
    rows.copy_(randn(3, columns, dtype=torch.float16))
    return rows


def test_rows_far_apart() -> None:
    x, out = far_rows(64), far_rows(64)
    near, weight = x.contiguous(), randn(64, dtype=torch.float16, seed=1)
    run(norm_kernel.plan_rms_norm(x, weight, 1e-5, out, SM90))
    assert torch.equal(out, norm_kernel.rms_norm(near, weight, 1e-5))
    table = COSINE.expand(3, 32)
    run(rotary_kernel.plan_rotate(x[:, None], table, table, out[:, None], SM90))
    assert torch.equal(out[:, None], rotary_kernel.rotate(near[:, None], table, table))
    run(gate_kernel.plan_gated(x, "silu", out[:, :32], SM90))
    assert torch.equal(out[:, :32], gate_kernel.gated(near, "silu"))
    assert torch.equal(quant_kernel.quantize_tokens(x, "int8")[0], quant_kernel.quantize_tokens(near, "int8")[0])
    target = torch.tensor([1, 2, 3])
    assert torch.equal(
        logprob_kernel.token_logprobs(x, target).logprob_T, logprob_kernel.token_logprobs(near, target).logprob_T
    )
    assert torch.equal(logprob_kernel.kl_divergence(x, out), logprob_kernel.kl_divergence(near, out.contiguous()))


def test_scratch_is_written_before_it_is_read() -> None:
    logits, target = randn(2, 9000, dtype=torch.float16), torch.tensor([5, 8999])
    room = [poisoned(2, dtype=torch.float32) for _ in range(2)]
    out = TokenLogprobs(room[0], room[1], torch.full((2,), -7))
    partial, ids = poisoned(2, 2, 2, dtype=torch.float32), torch.full((2, 2), -7, dtype=torch.int32)
    run(logprob_kernel.plan_token_logprobs(logits, target, partial, ids, out, SM90))
    assert torch.equal(out.logprob_T, logprob_kernel.token_logprobs(logits, target).logprob_T)
    assert torch.equal(out.argmax_T, logits.argmax(1))


def test_references_agree_in_float32() -> None:
    """Where nothing is rounded to a narrow dtype between, the references and the kernels differ by roundings alone."""
    x, weight = randn(3, 576, dtype=torch.float32), randn(576, dtype=torch.float32, seed=1)
    torch.testing.assert_close(norm_kernel.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))
    for gate in ("silu", "gelu", "gelu_tanh"):
        torch.testing.assert_close(gate_kernel.gated(x, gate), activation.gated(x, gate))
    torch.testing.assert_close(logprob_kernel.kl_divergence(x, x * 0.5), logprob.kl_divergence(x, x * 0.5))
