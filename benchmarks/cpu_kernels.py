"""The compiled CPU linears beside torch's, FBGEMM's and onnxruntime's, on one thread, in turns.

    python benchmarks/cpu_kernels.py [--out docs/cpu-kernels.md]

Times are CPU time of the calling thread, medians over the rounds; ratios are medians of the ratios within a round, so
that a machine that slows down slows both sides. Weights rotate through copies that no cache holds. onnxruntime is
measured where it is installed (`pip install onnxruntime onnx`).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch and onnxruntime are imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import torch.nn.functional as F

from compress.kernels.cpu.isa import Isa, supported
from compress.kernels.cpu.linear import prepare_compiled
from compress.kernels.packing import pack_int32
from compress.kernels.weights import PackedWeight

ROUNDS = 7
TOKENS = (1, 4, 16, 256)
FOOTPRINT = 200 << 20  # bytes of weights to rotate through, at least, for the large shape


@dataclass(frozen=True)
class Shape:
    out_features: int
    in_features: int
    group: int

    def __str__(self) -> str:
        return f"{self.in_features}→{self.out_features} g{self.group}"


SHAPES = (Shape(11008, 4096, 128), Shape(1536, 576, 64))


@dataclass(frozen=True)
class Contender:
    """A call for each copy of the weights: x [T, I] to y [T, O]."""

    name: str
    calls: list[Callable[[torch.Tensor], torch.Tensor]]
    exact_OI: torch.Tensor  # the weight that the first copy means, float64


def codes_of(shape: Shape, bits: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal weights rounded to codes: int8 [O, I] and bfloat16 scales [O, G]."""
    generator = torch.Generator().manual_seed(seed)
    weight_OGg = torch.randn(shape.out_features, shape.in_features // shape.group, shape.group, generator=generator)
    scale_OG = (weight_OGg.abs().amax(-1) / ((1 << (bits - 1)) - 1)).bfloat16()
    codes = (weight_OGg / scale_OG.float()[..., None]).round().clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return codes.to(torch.int8).flatten(1), scale_OG


def meant(codes_OI: torch.Tensor, scale_OG: torch.Tensor) -> torch.Tensor:
    return codes_OI.double() * scale_OG.double().repeat_interleave(codes_OI.shape[1] // scale_OG.shape[1], 1)


def ours(shape: Shape, bits: int, exact: bool, isa: Isa, copies: int) -> Contender:
    """W4A8, W4A32, W8A8 or W8A32; 8-bit weights have one scale a row, as FBGEMM's."""
    shape = shape if bits == 4 else Shape(shape.out_features, shape.in_features, shape.in_features)
    calls, first = [], None
    for seed in range(copies):
        codes_OI, scale_OG = codes_of(shape, bits, seed)
        first = meant(codes_OI, scale_OG) if first is None else first
        weight = PackedWeight(bits, shape.in_features, pack_int32(codes_OI, bits), scale_OG, None)
        calls.append(prepare_compiled([weight], [None], isa, exact))
    assert first is not None
    return Contender(f"W{bits}A{32 if exact else 8} {isa}", calls, first)


def torch_int4(shape: Shape, copies: int) -> Contender:
    """torch's packed int4 op with bfloat16 activations, its fast path; w = (q − 8)·s + z."""
    calls, first = [], None
    for seed in range(copies):
        codes_OI, scale_OG = codes_of(shape, 4, seed)
        first = meant(codes_OI, scale_OG) if first is None else first
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((codes_OI + 8).int(), 1)
        scales_GO2 = torch.stack((scale_OG.t(), torch.zeros_like(scale_OG.t())), dim=-1).contiguous()
        calls.append(
            lambda x_TI, packed=packed, scales=scales_GO2: torch.ops.aten._weight_int4pack_mm_for_cpu(
                x_TI.bfloat16(), packed, shape.group, scales
            )
        )
    assert first is not None
    return Contender("torch int4 (bf16)", calls, first)


def sgemm(shape: Shape, copies: int) -> Contender:
    weights = [meant(*codes_of(shape, 4, seed)).float() for seed in range(copies)]
    return Contender("torch fp32", [lambda x, w=w: F.linear(x, w) for w in weights], weights[0].double())


def fbgemm(shape: Shape, copies: int, reduce_range: bool) -> Contender:
    """Dynamic int8: one activation scale for the whole input, one weight scale a row."""
    torch.backends.quantized.engine = "x86"
    wide = Shape(shape.out_features, shape.in_features, shape.in_features)
    calls, first = [], None
    for seed in range(copies):
        codes_OI, scale_OG = codes_of(wide, 8, seed)
        first = meant(codes_OI, scale_OG) if first is None else first
        weight = torch.ops.aten._make_per_channel_quantized_tensor(
            codes_OI, scale_OG[:, 0].double(), torch.zeros(shape.out_features, dtype=torch.int64), 0
        )
        packed = torch.ops.quantized.linear_prepack(weight, None)
        calls.append(lambda x, packed=packed: torch.ops.quantized.linear_dynamic(x, packed, reduce_range))
    assert first is not None
    return Contender(f"FBGEMM int8{' (7-bit activations)' if reduce_range else ''}", calls, first)


def onnxruntime_int4(shape: Shape, copies: int) -> Contender | None:
    """MatMulNBits at accuracy level 4, which quantizes activations to int8; inputs and outputs are bound in place."""
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports]
        from onnx import TensorProto, helper  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    calls, first = [], None
    for seed in range(copies):
        codes_OI, scale_OG = codes_of(shape, 4, seed)
        first = meant(codes_OI, scale_OG) if first is None else first
        nibbles = (codes_OI + 8).to(torch.uint8).view(shape.out_features, -1, shape.group // 2, 2)
        packed, scales = (nibbles[..., 0] | nibbles[..., 1] << 4).numpy(), scale_OG.float().flatten().numpy()
        node = helper.make_node(
            "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft",
            K=shape.in_features, N=shape.out_features, bits=4, block_size=shape.group, accuracy_level=4,
        )  # fmt: skip
        graph = helper.make_graph(
            [node],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", shape.in_features])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", shape.out_features])],
            [
                helper.make_tensor("w", TensorProto.UINT8, packed.shape, packed.tobytes(), raw=True),
                helper.make_tensor("s", TensorProto.FLOAT, scales.shape, scales.tobytes(), raw=True),
            ],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets)
        model.ir_version = 10
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        calls.append(_bound(session, shape))
    assert first is not None
    return Contender(f"onnxruntime {onnxruntime.__version__} int4, level 4", calls, first)


def _bound(session, shape: Shape) -> Callable[[torch.Tensor], torch.Tensor]:
    bindings: dict[int, tuple] = {}

    def call(x_TI: torch.Tensor) -> torch.Tensor:
        if x_TI.data_ptr() not in bindings:
            y_TO, binding = torch.empty(len(x_TI), shape.out_features), session.io_binding()
            binding.bind_cpu_input("x", x_TI.numpy())
            binding.bind_output("y", "cpu", 0, np.float32, tuple(y_TO.shape), y_TO.data_ptr())
            bindings[x_TI.data_ptr()] = binding, y_TO, x_TI
        binding, y_TO, _ = bindings[x_TI.data_ptr()]
        session.run_with_iobinding(binding)
        return y_TO

    return call


def contenders(shape: Shape) -> list[Contender]:
    large = shape.out_features * shape.in_features > 1 << 22
    weights = shape.out_features * shape.in_features
    int4 = max(2, -(-FOOTPRINT // (weights // 2))) if large else 60
    int8, dense = max(2, int4 // 2), 2 if large else 8
    isas = supported()
    found = [
        onnxruntime_int4(shape, int4),
        torch_int4(shape, int4),
        sgemm(shape, dense),
        fbgemm(shape, int8, reduce_range=False),
        fbgemm(shape, int8, reduce_range=True),
        *(
            ours(shape, bits, exact, isas[-1], int4 if bits == 4 else int8)
            for bits in (4, 8)
            for exact in (False, True)
        ),
        *(ours(shape, 4, False, isa, int4) for isa in isas[:-1] if isa != "portable"),
    ]
    return [contender for contender in found if contender is not None]


def measure(field: list[Contender], x_TI: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of CPU time a call, by contender: one sweep over its copies in each round, all contenders in turns."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in field}
    for number in range(rounds + 1):
        for contender in field:
            calls = contender.calls if len(x_TI) <= 16 else contender.calls[:2]
            start = time.thread_time()
            for call in calls:
                call(x_TI)
            if number:  # the first sweep warms up
                seconds[contender.name].append((time.thread_time() - start) / len(calls))
    return seconds


def error(contender: Contender, x_TI: torch.Tensor) -> float:
    """‖y − x·Wᵀ‖ / ‖x·Wᵀ‖ against float64 products of the weight that the contender was given."""
    expected = x_TI.double() @ contender.exact_OI.t()
    return float((contender.calls[0](x_TI).double() - expected).norm() / expected.norm())


def table(shape: Shape, rounds: int) -> list[str]:
    field = contenders(shape)
    torch.manual_seed(0)
    inputs = {count: torch.randn(count, shape.in_features) for count in TOKENS}
    times = {count: measure(field, x_TI, rounds) for count, x_TI in inputs.items()}
    reference = field[0].name
    lines = [
        f"## {shape}",
        "",
        f"µs a call, and in brackets the ratio to {reference} in the same rounds.",
        "",
        "| | relative error | " + " | ".join(f"M = {count}" for count in TOKENS) + " |",
        "|---|---|" + "---|" * len(TOKENS),
    ]
    for contender in field:
        cells = []
        for count in TOKENS:
            own, other = times[count][contender.name], times[count][reference]
            ratio = statistics.median(a / b for a, b in zip(own, other, strict=True))
            cells.append(f"{1e6 * statistics.median(own):.0f} ({ratio:.2f})")
        lines.append(f"| {contender.name} | {error(contender, inputs[16]):.1e} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def receipt(rounds: int) -> list[str]:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()
    load = f"{os.getloadavg()[0]:.1f}"
    return [
        "# CPU linears against their peers",
        "",
        f"`python {' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}` at {commit}: {model}, one thread, CPU time, "
        f"medians of {rounds} interleaved rounds; torch {torch.__version__}; load average {load}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the tables to this Markdown file as well")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    if not supported():
        raise SystemExit("no C compiler on this machine: there are no compiled kernels to measure")
    torch.set_num_threads(1)
    lines = receipt(arguments.rounds)
    for shape in SHAPES:
        lines += table(shape, arguments.rounds)
        print("\n".join(lines[-20:]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
