"""A report of realistic shape and size for tests: 30 blocks of 7 linears, figures drawn from a seed."""

from __future__ import annotations

import random

import numpy as np

from compress.arch import BLOCK_LINEARS
from compress.evaluate import contract
from compress.evaluate.divergence import TokenScores, summarize
from compress.evaluate.speed import Round, Timing, Workload
from compress.evaluate.speed import summarize as summarize_speed


def sample_layers(blocks: int = 30, seed: int = 0) -> list[contract.Layer]:
    chance = random.Random(seed)
    layers = []
    for block in range(blocks):
        for linear in BLOCK_LINEARS:
            rtn = 0.004 * (1 + block / 15) * chance.lognormvariate(0, 0.3) * (3 if "down" in linear else 1)
            layers.append(
                contract.Layer(
                    name=f"model.layers.{block}.{linear}",
                    scheme="int4 asym g64",
                    tokens=131072,
                    error=rtn * chance.uniform(0.35, 0.8),
                    rtn_error=rtn,
                    fallback="rtn" if (block, linear) == (29, "mlp.down_proj") else None,
                    dampening=0.01,
                )
            )
    return layers


def sample_transforms(blocks: int = 30) -> list[contract.Transform]:
    taps = ("input_layernorm -> q_proj, k_proj, v_proj", "post_attention_layernorm -> gate_proj, up_proj")
    made = [
        contract.Transform(
            name=f"model.layers.{i}.{t}", applied=True, reason="", ratio=0.5, error_before=0.01, error_after=0.0062
        )
        for i in range(blocks)
        for t in taps
    ]
    made.append(
        contract.Transform(
            name="model.layers.0.mlp.up_proj -> down_proj", applied=False, reason="no ratio lowers the error"
        )
    )
    return made


def sample_accuracy(windows: int = 32, tokens: int = 511, shift: float = 0.03, seed: int = 0) -> contract.Accuracy:
    random = np.random.default_rng(seed)
    scores = []
    for _ in range(windows):
        nll = random.gamma(1.2, 2.2, tokens) * random.uniform(0.8, 1.2)
        kl = random.lognormal(-4.2, 1.5, tokens)
        agree = random.random(tokens) > 0.07
        scores.append(TokenScores(nll, nll + shift + random.normal(0, 0.25, tokens), kl, agree))
    accuracy = summarize(scores, tokens + 1)
    accuracy.text = {
        "source": {"name": "book.txt", "description": "1 text", "sha256": "a1" * 32, "skipped": {}},
        "sha256": "0c" * 32,
        "window": tokens + 1,
        "stride": tokens,
        "windows": windows,
        "bos": "one at start",
        "overlap_with_calibration": 0.0004,
    }
    return accuracy


def sample_speed(batch: int, speedup: float, noise: float = 0.02, seed: int = 0) -> contract.SpeedRow:
    chance = random.Random(seed)

    def timing(factor: float) -> Timing:
        return Timing(0.41 * batch * chance.gauss(1, noise), 0.046 * chance.gauss(1, noise) / factor)

    rounds = [Round((timing(1), timing(1)), (timing(speedup), timing(speedup))) for _ in range(6)]
    load = {"load_before": 0.4, "load_after": 1.9}
    return summarize_speed(rounds, Workload(batch, 512, 128), predicted_ratio=1.0 if speedup == 1.0 else 1.4, load=load)


def sample_report() -> contract.Report:
    """Everything measured."""
    provenance = contract.Provenance(
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        recipe_sha256="5e" * 32,
        data_sha256="9b" * 32,
        tool_version="0.1.0",
        commit="12" * 20,
        hardware={
            "processor": "Example CPU @ 2.60 GHz",
            "cores": 8,
            "threads": 8,
            "memory_bytes": 33_000_000_000,
            "gpus": [],
        },
        versions={"python": "3.12.3", "torch": "2.13.0", "transformers": "5.24.0"},
        seed=0,
        command="compress run recipes/smollm2-135m-awq.yaml",
        license="apache-2.0",
        base_model="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
    stage = contract.Stage(
        name="quantize",
        seconds=312.4,
        peak_rss_bytes=1_450_000_000,
        layers=sample_layers(),
        transforms=sample_transforms(),
        method={"transform": "awq", "range": "gram", "rounding": "rtn"},
    )
    parts = {
        "linears": contract.SizePart(baseline_bytes=212_336_640, compressed_bytes=56_770_560),
        "embedding": contract.SizePart(baseline_bytes=56_623_104, compressed_bytes=56_623_104),
        "head": contract.SizePart(baseline_bytes=0, compressed_bytes=0),
        "other": contract.SizePart(baseline_bytes=70_272, compressed_bytes=70_272),
    }
    settings = {"method": "awq", "bits": 4, "group_size": 64, "symmetric": False, "ignore": ["lm_head"]}
    return contract.Report(
        provenance=provenance,
        stages=[stage],
        calibration={
            "sources": [{"name": "chats.jsonl", "description": "812 chats", "skipped": {}}],
            "sha256": "9b" * 32,
            "seed": 0,
            "sequence_length": 512,
            "requested": 256,
            "samples": 256,
            "tokens": 131072,
            "dropped": {"no tokens": 2},
            "first_ids": [[1, 4093, 198, 2683], [1, 4093, 198, 11], [1, 4093, 198, 504]],
        },
        size=contract.Size(
            baseline_bytes=269_030_016, compressed_bytes=113_463_936, bits_per_weight=6.748, parts=parts
        ),
        accuracy=sample_accuracy(),
        speed=[sample_speed(1, 1.0), sample_speed(8, 1.31, seed=1)],
        verified=contract.Verified(
            reload_bit_equal=True, engine_matches_reference=True, unquantized=["lm_head"], largest_difference=2.1e-6
        ),
        warnings=["calibration: 256 sequences of 1024 asked for"],
        recipe={
            "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "output": "out/smollm2-135m-awq",
            "stages": [{"quantize": {**settings, "format": "compressed-tensors"}}],
        },
    )


def empty_report() -> contract.Report:
    """Nothing measured but that it ran."""
    return contract.Report(provenance=contract.Provenance(model="models/mine"))
