"""What all small kernels keep: rows do not see each other, and may lie anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compress.kernels import activation, logprob, norm
from compress.kernels import activation_triton as gate_kernel
from compress.kernels import logprob_triton as logprob_kernel
from compress.kernels import norm_triton as norm_kernel
from compress.kernels import rotary_triton as rotary_kernel
from compress.kernels import token_quant_triton as quant_kernel
from compress.kernels.launch import run
from tests.kernels.interpreted.rounding import SM90, randn

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # of −∞ − −∞, not taken


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


def test_references_agree_in_float32() -> None:
    """Where nothing is rounded to a narrow dtype between, the references and the kernels differ by roundings alone."""
    x, weight = randn(3, 576, dtype=torch.float32), randn(576, dtype=torch.float32, seed=1)
    torch.testing.assert_close(norm_kernel.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5))
    for gate in ("silu", "gelu", "gelu_tanh"):
        torch.testing.assert_close(gate_kernel.gated(x, gate), activation.gated(x, gate))
    torch.testing.assert_close(logprob_kernel.kl_divergence(x, x * 0.5), logprob.kl_divergence(x, x * 0.5))
