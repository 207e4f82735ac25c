"""Compile a launch for a target that is not there, as Triton would compile it at its first run on one.

A launch specialises its kernel: a pointer or integer that 16 divides is marked so, an integer 1 becomes a constant.
Without the same marks a build would have other loads than the kernel that runs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_manager

from compress.kernels.launch import Launch, Target
from compress.kernels.machine_code import (
    SPILL,
    Instruction,
    Program,
    count,
    main_loop,
    parse_amdgcn,
    parse_sass,
    reached,
)

TYPES = {
    torch.bool: "u1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.uint16: "u16",
    torch.int16: "i16",
    torch.uint32: "u32",
    torch.int32: "i32",
    torch.uint64: "u64",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e5m2fnuz: "fp8e5b16",
}
SASS_FILE = "disassembly.sass"
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Specialisation:
    """What a launch's arguments fix of its kernel, in the words of triton.compiler.ASTSource."""

    signature: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], list[list[Any]]]


@dataclass(frozen=True)
class Build:
    """The machine code of one launch. Registers and stack bytes of a thread, shared memory in bytes of a block."""

    registers: int
    stack: int
    vector_spills: int  # AMD: vector registers spilled to memory
    scalar_spills: int  # AMD: scalar registers spilled to lanes of vector registers
    shared: int
    threads: int
    disassemble: Callable[[], Program]  # on demand: nvdisasm takes longer than many a compile

    @cached_property
    def program(self) -> Program:
        return self.disassemble()

    @cached_property
    def loop(self) -> list[Instruction]:
        """The loop that does the work; all that runs where there is none."""
        return main_loop(self.program) or reached(self.program)

    @property
    def spill_instructions(self) -> int:
        return count(self.program.instructions, SPILL).total()

    @property
    def spills(self) -> bool:
        """Whether a thread's values go to memory because registers ran out."""
        return self.vector_spills > 0 or (self.stack > 0 and self.spill_instructions > 0)

    def per_element(self, elements: int) -> float:
        """Instructions of the loop in all threads of a program, for each of the elements that one iteration handles."""
        return len(self.loop) * self.threads / elements


def triton_target(target: Target) -> GPUTarget:
    return GPUTarget(target.backend, target.arch, 32 if target.backend == "cuda" else 64)


def specialise(kernel: Any, arguments: Mapping[str, Any], backend: Any) -> Specialisation:
    """Types, constants and attributes of a kernel's parameters, by the rules of Triton's JIT.

    Raises TypeError for an argument that is missing, unknown, or of a kind that kernels here do not take.
    """
    names = [parameter.name for parameter in kernel.params]
    if strangers := set(arguments) - set(names):
        raise TypeError(f"{kernel.__name__} has no parameter {', '.join(sorted(strangers))}")
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        if parameter.name not in arguments and not parameter.has_default:
            raise TypeError(f"{kernel.__name__}: argument {parameter.name} is missing")
        value = arguments.get(parameter.name, parameter.default)
        kind, marks = _specialise_one(parameter, value, backend)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(index,)] = value
        elif marks:
            attributes[(index,)] = backend.parse_attr(marks)
    return Specialisation(signature, constants, attributes)


def _specialise_one(parameter: Any, value: Any, backend: Any) -> tuple[str, str]:
    """The type, or "constexpr", and the backend's letters for what is known of the value."""
    if parameter.is_constexpr or value is None:
        return "constexpr", ""
    specialised, aligned = not parameter.do_not_specialize, not parameter.do_not_specialize_on_alignment
    if isinstance(value, torch.Tensor):
        kind = ("*k" if parameter.is_const else "*") + TYPES[value.dtype]
        return kind, backend.get_tensor_specialization(value, align=aligned) if specialised else ""
    given = parameter.annotation_type
    if isinstance(value, bool):
        return given or "u1", ""
    if isinstance(value, float):
        return given or "fp32", ""
    if not isinstance(value, int):
        raise TypeError(f"{parameter.name}: a kernel takes tensors, numbers and None, not {type(value).__name__}")
    if given.startswith(("fp", "bf", "u1")):
        return given, ""
    if specialised and value == 1 and not given:
        return "constexpr", ""
    kind = given or ("i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64")
    return kind, backend.get_int_specialization(value, align=aligned) if specialised else ""


def build(launch: Launch, target: Target) -> Build:
    """Compile one launch; whatever the compiler raises, it raises."""
    backend = make_backend(triton_target(target))
    known = specialise(launch.kernel, launch.arguments, backend)
    source = ASTSource(launch.kernel, known.signature, known.constants, known.attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=triton_target(target), options=options)
    return (_read_cubin if target.backend == "cuda" else _read_amdgcn)(compiled, launch.num_warps)


def _read_cubin(compiled: Any, warps: int) -> Build:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output_of("cuobjdump", "-res-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump told no resource usage: {usage.strip()}")
    shared, threads = compiled.metadata.shared, 32 * warps
    return Build(int(found[1]), int(found[2]), 0, 0, shared, threads, lambda: parse_sass(_sass(compiled)))


def _sass(compiled: Any) -> str:
    """The disassembly, kept beside the build in Triton's cache."""
    cache = get_cache_manager(compiled.hash)
    kept = cache.get_file(SASS_FILE)
    if kept is not None:
        return Path(kept).read_text()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = _output_of("nvdisasm", "-c", file.name)
    cache.put(text, SASS_FILE, binary=False)
    return text


def _read_amdgcn(compiled: Any, warps: int) -> Build:
    text = compiled.asm["amdgcn"]

    def stated(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found[1]) if found else 0

    return Build(
        registers=stated("vgpr_count"),
        stack=stated("private_segment_fixed_size"),
        vector_spills=stated("vgpr_spill_count"),
        scalar_spills=stated("sgpr_spill_count"),
        shared=compiled.metadata.shared,
        threads=64 * warps,
        disassemble=lambda: parse_amdgcn(text),
    )


def _output_of(program: str, *arguments: str) -> str:
    done = subprocess.run([str(BINARIES / program), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
