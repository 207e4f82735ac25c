"""Memory stays bounded: half the model at most, whatever the number of samples (row 5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory import measure


@pytest.mark.slow
def test_gptq_needs_less_than_half_the_model_and_samples_add_little(tmp_path: Path) -> None:
    """A model of 0.4 GB in eight shards; 8 and 64 samples of 256 tokens, each in a process of its own."""
    hidden, sequence = 512, 256
    found = measure(tmp_path, hidden, 1408, 24, sequence)
    few, many = found[8], found[64]
    assert many["model"] > 400_000_000
    assert max(few["above"], many["above"]) < many["model"] / 2
    one_block = (64 - 8) * sequence * hidden * 4
    noise = 16 << 20  # what malloc keeps differs from run to run
    assert many["above"] - few["above"] < one_block + noise
