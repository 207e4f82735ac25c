"""Launches run where their tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from compress.kernels.launch import Launch, run


class Recorder:
    """A kernel that notes the device that was current, and its grid."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, tuple[int, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: self.seen.append((torch.cuda.current_device(), grid))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", on)


@pytest.mark.usefixtures("two_gpus")
def test_a_launch_runs_on_the_device_of_its_tensors() -> None:
    """A model on cuda:1: the process's current device is cuda:0."""
    kernel = Recorder()
    with FakeTensorMode():
        tensors = [torch.empty(4, device=f"cuda:{index}") for index in (1, 0)]
    run([Launch(kernel, (3,), {"n": 4, "x": x}) for x in tensors])
    assert kernel.seen == [(1, (3,)), (0, (3,))]


def test_an_empty_grid_is_not_launched() -> None:
    kernel = Recorder()
    run([Launch(kernel, (0, 2), {"x": torch.empty(0)})])
    assert kernel.seen == []
