"""Peak memory of GPTQ on a model of 8 shards and more than 1 GB, and what more samples add to it.

    python benchmarks/memory.py

Each run is a process of its own. The peak is what the kernel counts (VmHWM), less what was resident after the imports.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SAMPLES = (8, 64)
VOCAB = 32000

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, here and in each child
CHILD = "--child"


def build(directory: Path, hidden: int, intermediate: int, layers: int) -> int:
    """A random Llama in float32, in at least 8 shards; returns its bytes. Written block by block."""
    import torch

    from compress.arch import read_spec
    from compress.checkpoint import Checkpoint, LazyTensor, write_checkpoint

    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }

    def filled(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape)

    tensors = {
        name: LazyTensor(torch.float32, shape, lambda shape=shape: filled(shape))
        for name, shape in read_spec(config).tensors().items()
    }
    total = sum(4 * math.prod(shape) for shape in read_spec(config).tensors().values())
    write_checkpoint(directory, tensors, config, None, max_shard_bytes=total // 9)
    checkpoint = Checkpoint.open(directory)
    shards = len(list(directory.glob("*.safetensors")))
    assert shards >= 8, shards
    return checkpoint.total_bytes


def child(source: Path, place: Path, samples: int, sequence: int) -> None:
    """Quantize with GPTQ and print the peak above the imports, in bytes."""
    import torch

    from compress.calibration import Calibration
    from compress.memory import peak_bytes, reset_peak, resident_bytes
    from compress.progress import Reporter
    from compress.recipe import QuantizeSettings
    from compress.stages import StageRun, quantize

    imports = resident_bytes()
    reset_peak()
    ids = torch.randint(VOCAB, (samples * sequence,), generator=torch.Generator().manual_seed(0))
    calibration = Calibration(ids, (sequence,) * samples, None)  # type: ignore[arg-type]  # the stage reads no facts
    run = StageRun(source, place / "out", place / "walk", calibration, Reporter())
    quantize(run, QuantizeSettings.model_validate({"method": "gptq", "group_size": 128}))
    print(json.dumps({"imports": imports, "above": peak_bytes() - imports}))


def measure(place: Path, hidden: int, intermediate: int, layers: int, sequence: int) -> dict[int, dict[str, int]]:
    """For each number of samples: bytes of the model, of the imports, and of the peak above them."""
    source = place / "model"
    size = build(source, hidden, intermediate, layers)
    found = {}
    for samples in SAMPLES:
        work = place / str(samples)
        work.mkdir()
        command = [sys.executable, __file__, CHILD, str(source), str(work), str(samples), str(sequence)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[samples] = {"model": size, **json.loads(done.stdout.splitlines()[-1])}
        shutil.rmtree(work)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2816)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--sequence-length", type=int, default=512)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        found = measure(Path(place), options.hidden, options.intermediate, options.layers, options.sequence_length)
    for samples, told in found.items():
        print(
            f"{samples} samples of {options.sequence_length}: peak {told['above'] / 1e6:.0f} MB above the imports' "
            f"{told['imports'] / 1e6:.0f} MB, {told['above'] / told['model']:.2f} of the model's "
            f"{told['model'] / 1e6:.0f} MB"
        )
    added = found[SAMPLES[1]]["above"] - found[SAMPLES[0]]["above"]
    activations = (SAMPLES[1] - SAMPLES[0]) * options.sequence_length * options.hidden * 4
    print(f"more samples add {added / 1e6:.0f} MB; one block's activations of them are {activations / 1e6:.0f} MB")


if __name__ == "__main__":
    if CHILD in sys.argv:
        child(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
