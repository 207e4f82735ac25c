"""Programs of the compiled kernels: what is recorded is what was computed, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from compress.kernels.cpu.build import library
from compress.kernels.cpu.program import Arena, NotRecordable, record
from compress.kernels.dispatch import prepare_linear, prepare_operations
from compress.kernels.packing import pack_int32
from compress.kernels.weights import PackedWeight

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")
CPU = torch.device("cpu")


def codes(rows: int, columns: int) -> PackedWeight:
    words_OW = pack_int32(torch.randint(-8, 8, (rows, columns), dtype=torch.int8), 4)
    return PackedWeight(4, columns, words_OW, torch.rand(rows, columns // 32) * 0.1, None)


def chain(layers: int, width: int = 64) -> Callable[[torch.Tensor], torch.Tensor]:
    """Norms, linears and gates one after the other, as in a decoder."""
    torch.manual_seed(0)
    operations = prepare_operations(CPU)
    weight_C = torch.rand(width) + 0.5
    ups = [prepare_linear([torch.randn(2 * width, width).half()], [None], CPU, torch.float32) for _ in range(layers)]
    downs = [prepare_linear([codes(width, width)], [None], CPU, torch.float32) for _ in range(layers)]

    def run(x_TC: torch.Tensor) -> torch.Tensor:
        update_TC = x_TC
        for up, down in zip(ups, downs, strict=True):
            normed_TC, x_TC = operations.add_rms_norm(update_TC, x_TC, weight_C, 1e-6)
            update_TC = down(operations.gated(up(normed_TC), "silu"))
        return operations.add_rms_norm(update_TC, x_TC, weight_C, 1e-6)[1]

    return run


def test_a_replay_gives_the_bits_of_a_run_with_new_inputs() -> None:
    run = chain(3)
    held_TC = torch.randn(5, 64)
    program = record(lambda: run(held_TC), Arena())
    first_TC = program.output.clone()
    assert torch.equal(first_TC, run(held_TC))
    other_TC = torch.randn(5, 64)
    held_TC.copy_(other_TC)
    replayed_TC = program.replay().clone()
    assert torch.equal(replayed_TC, run(other_TC))
    assert not torch.equal(replayed_TC, first_TC)


def test_programs_of_one_arena_share_memory_and_take_turns() -> None:
    run = chain(3)
    arena = Arena()
    inputs = [torch.randn(tokens, 64) for tokens in (4, 7, 2)]
    programs = [record(lambda x_TC=x_TC: run(x_TC), arena) for x_TC in inputs]
    for index in (2, 0, 1, 0, 2, 1):
        assert torch.equal(programs[index].replay(), run(inputs[index]))


def test_memory_does_not_grow_with_the_layers() -> None:
    sizes = []
    for layers in (4, 40):
        arena = Arena()
        run, x_TC = chain(layers), torch.randn(8, 64)
        program = record(lambda run=run, x_TC=x_TC: run(x_TC), arena)
        assert len(program.calls) == 4 * layers + 1
        sizes.append(arena.nbytes)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "computation",
    [
        lambda x_TC: x_TC + 1,
        lambda x_TC: x_TC.t().contiguous(),
        lambda x_TC: x_TC.mul_(2),
        lambda x_TC: x_TC if x_TC[0, 0] > 0 else x_TC.view(-1),
        lambda x_TC: torch.empty(3),
        lambda x_TC: x_TC.t().flatten(),
    ],
    ids=["sum", "copy", "in place", "a branch on a number", "memory of its own", "a flattening that copies"],
)
def test_what_torch_computes_is_refused(computation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    run, x_TC = chain(1), torch.randn(5, 64)
    with pytest.raises(NotRecordable):
        record(lambda: run(computation(x_TC)), Arena())
    # and nothing is noted any more
    before = run(x_TC)
    assert torch.equal(record(lambda: run(x_TC), Arena()).replay(), before)


def test_views_are_not_computations() -> None:
    run = chain(1)
    held_TC = torch.randn(10, 128)

    def views() -> torch.Tensor:
        left_TC, _ = held_TC.split((64, 64), dim=1)
        return run(left_TC[2:7].unsqueeze(0).expand(1, 5, 64).squeeze(0).detach())

    program = record(views, Arena())
    assert torch.equal(program.replay(), run(held_TC[2:7, :64]))
