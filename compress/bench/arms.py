"""The models that are measured: engines loaded here, or servers that run already."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from compress.arch import ModelSpec, read_spec
from compress.bench.client import HttpArm
from compress.bench.offline import OfflineArm
from compress.bench.options import SERVERS_VOCABULARY, Options, server_url, span
from compress.bench.sweep import Arm
from compress.bench.workload import Clients, Level, Workload, check_fits
from compress.errors import UserError
from compress.runtime.drafting import DEFAULT_DRAFTS
from compress.runtime.engine import Engine
from compress.shards import read_config

ENGINE_RUNS = 64  # requests that an engine runs at once unless it is told otherwise


def spec_of(path: Path, option: str | None = None) -> ModelSpec:
    """From the config alone. `option`: what gave the path, to be named where it is wrong."""
    return read_spec(read_config(path, option), str(path / "config.json"))


def workload_of(options: Options) -> Workload:
    """Ids are below the smallest vocabulary that is known. Raises UserError for a request that fits no model."""
    given = ((None, options.checkpoint), ("--baseline", options.baseline))
    specs = {path: spec_of(path, option) for option, path in given if path is not None}
    if options.draft is not None:  # its size limits nothing: what it does not take, it does not draft
        spec_of(options.draft, "--draft")
    known = min((spec.vocab for spec in specs.values()), default=None)
    if options.vocab is not None and known is not None and options.vocab > known:
        raise UserError(f"--vocab {options.vocab}: the model has {known} token ids")
    workload = Workload(
        prompt=span(options.prompt_tokens, "--prompt-tokens"),
        output=span(options.output_tokens, "--output-tokens"),
        vocab=options.vocab or known or SERVERS_VOCABULARY,
        seed=options.seed,
        shared_prefix=options.shared_prefix,
    )
    for path, spec in specs.items():
        check_fits(workload, spec.max_positions, str(path))
    return workload


def engine_arms(options: Options, levels: Sequence[Level]) -> dict[str, Arm]:
    """The baseline runs plainly; --exact, --draft and --speculate are of CHECKPOINT alone."""
    clients = max((level.count for level in levels if isinstance(level, Clients)), default=ENGINE_RUNS)
    arms: dict[str, Arm] = {}
    if options.baseline is not None:
        arms["baseline"] = engine_arm(options.baseline, options.device, clients, {})
    assert options.checkpoint is not None
    arms["compressed"] = engine_arm(options.checkpoint, options.device, clients, engine_settings(options))
    return arms


def engine_settings(options: Options) -> dict[str, Any]:
    """What of the engine's own settings was asked for."""
    tokens = options.draft_tokens or (DEFAULT_DRAFTS if options.speculate else None)
    settings = {"exact": options.exact, "draft": options.draft, "speculate": tokens}
    return {name: value for name, value in settings.items() if value}


def engine_arm(path: Path, device: str, clients: int, settings: dict[str, Any]) -> OfflineArm:
    """Computes in float32 on a CPU, where 16-bit products are slower, and as stored on a GPU."""
    dtype = torch.float32 if device == "cpu" else getattr(torch, spec_of(path).dtype)
    running = max(ENGINE_RUNS, clients)
    return OfflineArm(str(path), Engine.load(path, device=device, dtype=dtype, max_running=running, **settings))


def server_arms(options: Options, workload: Workload, stack: ExitStack) -> dict[str, Arm]:
    """Servers that answer. Raises RunError for one that does not, UserError where its model is too short."""
    arms: dict[str, Arm] = {}
    asked = (("baseline", "--baseline-url", options.baseline_url), ("compressed", "--url", options.url))
    for role, option, url in asked:
        if url is None:
            continue
        model = options.model if role == "compressed" else None
        arm = HttpArm(server_url(url, option), model, options.api_key, options.timeout)
        stack.callback(arm.close)
        entry = arm.connect()
        if isinstance(entry.get("max_model_len"), int):
            check_fits(workload, entry["max_model_len"], f"{entry['id']} at {url}")
        arms[role] = arm
    return arms
