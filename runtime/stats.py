"""What the engine has done since it was loaded, and what it holds now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stats:
    """Counters first; the gauges after `running` are of the moment they are asked for."""

    steps: int = 0
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # of those, not computed because the cache had them
    computed_tokens: int = 0  # that went through the model, drafts and recomputation included
    generated_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0  # times that draft tokens were verified
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of those, kept
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_total: int = 0
