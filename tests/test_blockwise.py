"""The walk: what a technique sees, that it resumes to the same bytes, and that batching never shows."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.activations import Activations
from compress.arch import TAPS, read_spec
from compress.blockwise import Block, Changes, HeadBlock, Walk
from compress.checkpoint import Checkpoint
from compress.flow import arrange
from compress.progress import Reporter
from compress.quant.quantize import Quantizer
from compress.quant.scheme import QuantizedWeight, Scheme
from tests.tiny import tiny_model


def pack(name: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    return {f"{name}.codes": weight.codes_OI, f"{name}.scale": weight.scale_OG}


def sequences(lengths: list[int], seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def quantizer(checkpoint: Checkpoint, **changes: Any) -> Quantizer:
    spec = read_spec(checkpoint.config)
    settings = {
        "spec": spec,
        "schemes": {name: Scheme(4, 32, True) for name in spec.linears() if name != "lm_head"},
        "transform": "none",
        "range": "imatrix",
        "rounding": "gptq",
        "scale_dtype": torch.float16,
        "act_order": True,
        "dampening": 0.01,
        "refine": 0,
        "pack": pack,
    }
    return Quantizer(**(settings | changes))


def walk(checkpoint: Checkpoint, work: Path, ids: torch.Tensor, lengths: list[int], chunk_tokens: int = 256) -> Walk:
    tokens = arrange(ids, lengths, chunk_tokens)
    return Walk(checkpoint, read_spec(checkpoint.config), tokens, work, Reporter(io.StringIO()))


def digest(work: Path, layers: int) -> list[str]:
    return [hashlib.sha256((work / f"block-{i:05d}.safetensors").read_bytes()).hexdigest() for i in range(layers)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint.open(tiny_model(tmp_path / "model", num_hidden_layers=4))


LENGTHS = [60, 5, 33, 60, 17, 48, 9, 60, 21, 40, 60, 12]


def test_every_token_is_counted_at_every_linear(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Row 6: the statistics are of all calibration tokens, and GPTQ does better than RTN for having seen them."""
    changes = walk(checkpoint, tmp_path / "w", sequences(LENGTHS), LENGTHS).run(quantizer(checkpoint), "quantize")
    assert len(changes.layers) == 4 * 7
    assert all(layer["tokens"] == sum(LENGTHS) for layer in changes.layers)
    errors = [layer["error"] for layer in changes.layers]
    plain = [layer["rtn_error"] for layer in changes.layers]
    assert sum(errors) < 0.8 * sum(plain)


@pytest.mark.parametrize(
    ("transform", "searched", "rounding"),
    [("none", "minmax", "rtn"), ("none", "imatrix", "gptq"), ("awq", "gram", "rtn"), ("awq", "imatrix", "gptq")],
)
def test_batches_do_not_show(
    checkpoint: Checkpoint, tmp_path: Path, transform: str, searched: str, rounding: str
) -> None:
    """Row 3: ragged sequences one by one or many at once give the same scales (to 1e-5) and the same codes.

    A user cannot set a batch size; this is the walk's own. float32 sums in another order may turn a tie, and GPTQ
    carries a turned code on into the columns and blocks after it: one in 50 may differ there, one in 500 where data
    decide ranges alone, none for plain RTN.
    """
    runs = []
    for chunk_tokens in (1, 240):
        technique = quantizer(checkpoint, transform=transform, rounding=rounding, range=searched)
        run = walk(checkpoint, tmp_path / f"w{chunk_tokens}", sequences(LENGTHS), LENGTHS, chunk_tokens)
        run.run(technique, "quantize")
        runs.append([Parts(path).tensors for path in run.parts(4)])
    different = total = 0
    for a, b in zip(*runs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            close = torch.isclose(a[name].float(), b[name].float(), rtol=1e-5, atol=0)
            different += int((~close).sum())
            total += close.numel()
    allowed = 0 if searched == "minmax" else total / 50 if rounding == "gptq" else total / 500
    assert different <= allowed


class Parts:
    def __init__(self, path: Path) -> None:
        from safetensors.torch import load_file

        self.tensors = load_file(path)


class Killed(Exception):
    pass


class Dies:
    """A technique that is killed in the middle of a block."""

    def __init__(self, inner: Quantizer, at: int) -> None:
        self.inner, self.at = inner, at

    @property
    def wants_head(self) -> bool:
        return self.inner.wants_head

    def head(self, head: HeadBlock) -> Changes:
        return self.inner.head(head)

    def block(self, block: Block) -> Changes:
        changes = self.inner.block(block)
        if block.index == self.at:
            raise Killed
        return changes


@pytest.mark.parametrize("transform", ["none", "awq"])
def test_a_killed_walk_resumes_to_the_same_bytes(checkpoint: Checkpoint, tmp_path: Path, transform: str) -> None:
    """Row 20: finished blocks are kept with the activations that follow them."""
    rounding = "gptq" if transform == "none" else "rtn"
    technique = quantizer(checkpoint, transform=transform, rounding=rounding)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = walk(checkpoint, whole, sequences(LENGTHS), LENGTHS).run(technique, "quantize")
    for at in (0, 2, 3):
        with pytest.raises(Killed):
            walk(checkpoint, broken, sequences(LENGTHS), LENGTHS).run(Dies(technique, at), "quantize")
        (broken / "hidden-00099.bin").write_bytes(b"left over")
    seen: list[int] = []

    class Watch(Dies):
        def block(self, block: Block) -> Changes:
            seen.append(block.index)
            return self.inner.block(block)

    resumed = walk(checkpoint, broken, sequences(LENGTHS), LENGTHS).run(Watch(technique, -1), "quantize")
    assert seen == [3], "only the unfinished block runs again"
    assert digest(broken, 4) == digest(whole, 4)
    assert [layer["codes_sha256"] for layer in resumed.layers] == [layer["codes_sha256"] for layer in expected.layers]


def test_lost_activations_start_the_walk_over(checkpoint: Checkpoint, tmp_path: Path) -> None:
    technique = quantizer(checkpoint)
    work = tmp_path / "w"
    with pytest.raises(Killed):
        walk(checkpoint, work, sequences(LENGTHS), LENGTHS).run(Dies(technique, 2), "quantize")
    (work / "hidden-00002.bin").unlink()
    walk(checkpoint, work, sequences(LENGTHS), LENGTHS).run(technique, "quantize")
    walk(checkpoint, tmp_path / "whole", sequences(LENGTHS), LENGTHS).run(technique, "quantize")
    assert digest(work, 4) == digest(tmp_path / "whole", 4)


def test_degenerate_samples_never_abort(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Row 1: two samples of one repeated token; finite results, and the report says what each layer needed."""
    lengths = [20, 20]
    ids = torch.tensor([7] * 20 + [9] * 20)
    changes = walk(checkpoint, tmp_path / "w", ids, lengths).run(quantizer(checkpoint), "quantize")
    assert len(changes.layers) == 28
    for layer in changes.layers:
        assert layer["dampening"] is not None or layer["fallback"] == "rtn"
    for i in range(4):
        for tensor in Parts(tmp_path / "w" / f"block-{i:05d}.safetensors").tensors.values():
            assert torch.isfinite(tensor.float()).all()


def test_sequential_taps_feel_the_quantized_prefix(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What is set after one tap changes what the next one sees, and what the next block starts from."""
    spec = read_spec(checkpoint.config)
    grams: dict[str, list[torch.Tensor]] = {"kept": [], "zeroed": []}
    for key in grams:

        class Look:
            wants_head = False

            def head(self, head: HeadBlock) -> Changes:
                raise AssertionError

            def block(self, block: Block, key: str = key) -> Changes:
                for found in block.sequential():
                    grams[key].append(found.statistics.gram())
                    if key == "zeroed" and block.index == 0 and found.tap is TAPS[0]:
                        name = "self_attn.v_proj.weight"
                        block.weights[name] = torch.zeros_like(block.weights[name])
                return Changes()

        walk(checkpoint, tmp_path / key, sequences(LENGTHS), LENGTHS).run(Look(), "look")
    assert len(grams["kept"]) == 4 * spec.layers
    assert torch.equal(grams["kept"][0], grams["zeroed"][0])
    assert float(grams["zeroed"][1].abs().max()) == 0.0, "the attention output is zero without values"
    assert not torch.allclose(grams["kept"][4], grams["zeroed"][4])


def test_observing_gives_the_same_statistics_as_walking_in_sequence(checkpoint: Checkpoint, tmp_path: Path) -> None:
    one, two = [], []

    class Look:
        wants_head = False

        def head(self, head: HeadBlock) -> Changes:
            raise AssertionError

        def block(self, block: Block) -> Changes:
            seen = block.observe(hold_out=True)
            for tap in TAPS:
                held_out = seen[tap.name].held_out
                assert held_out is not None
                one.append(seen[tap.name].statistics.merge(held_out).gram())
            two.extend(found.statistics.gram() for found in block.sequential())
            return Changes()

    walk(checkpoint, tmp_path / "w", sequences(LENGTHS), LENGTHS).run(Look(), "look")
    for a, b in zip(one, two, strict=True):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()


def test_activations_past_the_limit_read_back_alike(tmp_path: Path) -> None:
    rows = torch.randn(1000, 96)
    for limit in (1 << 30, 1024):
        with Activations(tmp_path / f"a{limit}", 1000, 96, resident_bytes=limit) as stored:
            for start in range(0, 1000, 77):
                stored.write(start, rows[start : start + 77])
            for start in range(0, 1000, 50):
                assert torch.equal(stored.read(start, start + 50), rows[start : start + 50])


def test_a_head_that_is_chosen_is_quantized_on_its_own_input(checkpoint: Checkpoint, tmp_path: Path) -> None:
    technique = quantizer(checkpoint, schemes={"lm_head": Scheme(4, 32, True)})
    changes = walk(checkpoint, tmp_path / "w", sequences(LENGTHS), LENGTHS).run(technique, "quantize")
    assert [(layer["name"], layer["tokens"]) for layer in changes.layers] == [("lm_head", sum(LENGTHS))]
    assert changes.layers[0]["error"] < changes.layers[0]["rtn_error"]
    assert changes.removed == ["lm_head.weight"]


def test_held_out_sequences_are_one_in_eight_whatever_the_order() -> None:
    lengths = [10 + i for i in range(16)]
    tokens = arrange(sequences(lengths), lengths, 50)
    apart = sum(int(chunk.held_out.sum()) for chunk in tokens.chunks)
    assert apart == lengths[7] + lengths[15]
    assert sum(chunk.stop - chunk.start for chunk in tokens.chunks) == sum(lengths)
    assert max(chunk.stop - chunk.start for chunk in tokens.chunks) <= 50
    flat = sorted(sequences(lengths).tolist())
    assert sorted(tokens.ids_T.tolist()) == flat
