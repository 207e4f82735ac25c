"""Compiling ahead of time specialises as Triton's JIT does, and machine code is read rightly."""

# pyright: reportInvalidTypeForm=false
# A kernel annotates its parameters with Triton types.
from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="compiles with Triton")
import triton
import triton.language as tl
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from compress.kernels.aot import build, specialise, triton_target
from compress.kernels.launch import Launch, Target
from compress.kernels.machine_code import (
    ASYNCHRONOUS,
    LOAD,
    MATRIX,
    count,
    loops,
    main_loop,
    parse_amdgcn,
    parse_sass,
    reached,
)

CUDA, HIP = Target("cuda", 90), Target("hip", "gfx942")


@triton.jit(do_not_specialize=["plain"], do_not_specialize_on_alignment=["unaligned"])
def every_kind(
    x_ptr,
    y_ptr,
    read_ptr: tl.const,
    n,
    wide: tl.int64,
    plain,
    unaligned,
    scale,
    exact: tl.float32,
    flag,
    nothing,
    BLOCK: tl.constexpr,
    default=7,
):
    pass


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


INTEGERS = (0, 1, 2, 15, 16, -1, -16, 2**31 - 1, 2**31, -(2**31), 2**40, 2**63)


@pytest.mark.parametrize("target", [CUDA, HIP], ids=str)
@pytest.mark.parametrize("integer", INTEGERS)
@pytest.mark.parametrize("x", [meta(64, dtype=torch.bfloat16), meta(64, dtype=torch.int8)[3:], meta(1 << 31)])
def test_specialisation_is_the_jits(target: Target, integer: int, x: torch.Tensor) -> None:
    """Signature, constants and attributes of Triton's own binder: alignment, width, ones, sizes beyond 2 GB."""
    arguments: dict[str, Any] = {"x_ptr": x, "y_ptr": meta(8, dtype=torch.float8_e4m3fn), "read_ptr": x, "n": integer}
    arguments |= {"wide": integer % 2**40, "plain": integer, "unaligned": integer, "scale": 1.0, "exact": 0.5}
    arguments |= {"flag": integer > 2, "nothing": None, "BLOCK": 16}
    backend = make_backend(triton_target(target))
    bind = create_function_from_signature(every_kind.signature, every_kind.params, backend)
    bound, specialisation, options = bind(**arguments)
    _, signature, constants, attributes = every_kind._pack_args(backend, {}, bound, specialisation, options)
    found = specialise(every_kind, arguments, backend)
    assert found.signature == signature
    assert found.constants == constants
    assert found.attributes == {place: marks for place, marks in attributes.items() if marks}


def test_arguments_that_a_kernel_does_not_have() -> None:
    backend = make_backend(triton_target(CUDA))
    arguments = {"a_ptr": meta(16), "b_ptr": meta(16), "out_ptr": meta(16), "K": 16, "N": 16}
    with pytest.raises(TypeError, match="gemm has no parameter M"):
        specialise(gemm, arguments | {"M": 3}, backend)
    with pytest.raises(TypeError, match="gemm: argument out_ptr is missing"):
        specialise(gemm, {name: value for name, value in arguments.items() if name != "out_ptr"}, backend)
    with pytest.raises(TypeError, match="K: a kernel takes tensors, numbers and None, not str"):
        specialise(gemm, arguments | {"K": "16"}, backend)


@triton.jit
def gemm(a_ptr, b_ptr, out_ptr, K, N: tl.constexpr):
    n, k = tl.arange(0, N), tl.arange(0, 64)
    total = tl.zeros((N, N), tl.float32)
    for start in range(0, K, 64):
        a = tl.load(a_ptr + n[:, None] * K + start + k[None, :])
        b = tl.load(b_ptr + n[None, :] * K + start + k[:, None])
        total = tl.dot(a, b, total)
    tl.store(out_ptr + n[:, None] * N + n[None, :], total)


@triton.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def gemm_launch(k: int) -> Launch:
    arguments = {"a_ptr": meta(64, k), "b_ptr": meta(64, k), "out_ptr": meta(64, 64, dtype=torch.float32)}
    return Launch(gemm, (1,), {**arguments, "K": k, "N": 64}, num_stages=3)


@pytest.mark.parametrize(
    ("target", "matrix"),
    [(Target("cuda", 80), "HMMA"), (CUDA, "HGMMA"), (Target("cuda", 100), "UTCHMMA"), (HIP, "v_mfma")],
    ids=str,
)
def test_the_loop_of_a_matmul(target: Target, matrix: str) -> None:
    """64 × 64 outputs, 64 columns a step: the work of 2·64³ operations over the size of one instruction."""
    built = build(gemm_launch(4096), target)
    assert 0 < len(built.loop) < len(built.program.instructions)
    found = count(built.loop, MATRIX)
    assert all(name.startswith(matrix) for name in found)
    if target == Target("cuda", 80):
        # m16n8k16 is 2·16·8·16 operations of a warp; four warps
        assert found.total() * 4 == 64**3 // (16 * 8 * 16)
    if target.backend == "cuda":
        assert count(built.loop, ASYNCHRONOUS).total() > 0
        assert built.shared >= 2 * 2 * 64 * 64 * 2  # two stages of two tiles
    assert count(built.loop, LOAD).total() > 0
    assert 0 < built.registers <= 512
    assert not built.spills
    assert built.threads == (128 if target.backend == "cuda" else 256)
    assert built.per_element(64 * 64) == len(built.loop) * built.threads / 4096


def test_alignment_makes_wide_copies() -> None:
    """Rows of 4096 numbers start at multiples of 16; rows of 4097 do not, and are copied piecemeal."""
    aligned, ragged = (count(build(gemm_launch(k), Target("cuda", 80)).loop) for k in (4096, 4097))
    assert any(name.endswith(".128") for name in aligned if name.startswith("LDGSTS"))
    assert not any(name.endswith(".128") for name in ragged if name.startswith("LDGSTS"))


@pytest.mark.parametrize("target", [CUDA, HIP], ids=str)
def test_without_a_loop_all_that_runs_counts(target: Target) -> None:
    launch = Launch(double, (4,), {"x_ptr": meta(4096), "out_ptr": meta(4096), "n": 4096, "BLOCK": 1024})
    built = build(launch, target)
    assert main_loop(built.program) == []
    assert 10 < len(built.loop) < 200
    assert "NOP" not in count(built.loop)


SASS = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P3 BRA `(.L_x_4) ;
.L_x_1:
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
.L_x_2:
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0050*/              @!P0 BRA `(.L_x_2) ;
        /*0060*/             @!UP0 BRA `(.L_x_5) ;
.L_x_3:
        /*0070*/                   BRA.U UP1, `(.L_x_1) ;
        /*0080*/                   LDG.E R4, desc[UR4][R2.64] ;
.L_x_4:
        /*0090*/                   STG.E R4, desc[UR4][R2.64] ;
        /*00a0*/                   EXIT ;
.L_x_5:
        /*00b0*/                   NANOSLEEP 0x14 ;
        /*00c0*/                   BRA `(.L_x_3) ;
.L_x_6:
        /*00d0*/                   BRA `(.L_x_6);
        /*00e0*/                   NOP;
"""


def test_loops_of_sass() -> None:
    """The wait inside the loop is a loop of its own, its slow path behind the exit is none; the padding is nothing."""
    program = parse_sass(SASS)
    assert len(program.instructions) == 15
    assert sorted(len(body) for body in loops(program)) == [2, 8]
    names = [instruction.mnemonic for instruction in main_loop(program)]
    assert names[:2] == ["LDG.E.128", "HMMA.16816.F32"]
    assert names[-2:] == ["NANOSLEEP", "BRA"]
    assert len(reached(program)) == 13


AMDGCN = """
\t.text
kernel:
; %bb.0:
\ts_load_dwordx2 s[0:1], s[4:5], 0x0
\ts_cbranch_scc1 .LBB0_3
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\tglobal_load_dwordx4 v[0:3], v4, s[0:1]
\tv_mfma_f32_16x16x16_f16 a[0:3], v[0:1], v[2:3], a[0:3]
\ts_cbranch_scc0 .LBB0_1
; %bb.2:
\ts_branch .LBB0_3
.LBB0_3:
\ts_endpgm
\t.section .rodata
"""


def test_loops_of_amd() -> None:
    program = parse_amdgcn(AMDGCN)
    assert len(program.instructions) == 7
    names = [instruction.mnemonic for instruction in main_loop(program)]
    assert names == ["global_load_dwordx4", "v_mfma_f32_16x16x16_f16", "s_cbranch_scc0"]
