"""The options of `compress bench`, read and checked before anything is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from compress.bench.timing import Limits
from compress.bench.workload import Arrivals, Clients, Level, Span
from compress.errors import UserError, nearest

Number = TypeVar("Number", int, float)
PICTURES = (".png", ".svg", ".pdf")
SERVERS_VOCABULARY = 32000  # ids that the vocabularies of served models have; the smallest in wide use is Llama 2's


@dataclass(frozen=True)
class Options:
    """As they stand on the command line; None where nothing was given. Raises UserError for wrong ones when made."""

    checkpoint: Path | None = None
    baseline: Path | None = None
    url: str | None = None
    baseline_url: str | None = None
    model: str | None = None
    api_key: str | None = None
    vocab: int | None = None
    concurrency: str | None = None
    rate: str | None = None
    prompt_tokens: str = "128"
    output_tokens: str = "64"
    shared_prefix: int = 0
    requests: int | None = None
    warmup: int | None = None
    rounds: int | None = None
    seed: int = 0
    goodput: str | None = None
    timeout: float = 300.0
    device: str = "cpu"
    exact: bool = False
    draft: Path | None = None
    speculate: str | None = None
    draft_tokens: int | None = None
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        check(self)


def check(options: Options) -> None:
    """Raises UserError for options that are wrong or contradict each other, or a file that cannot be written."""
    check_arms(options)
    if options.shared_prefix >= span(options.prompt_tokens, "--prompt-tokens").low:
        raise UserError(
            f"--shared-prefix {options.shared_prefix}: must be below --prompt-tokens {options.prompt_tokens}, so that "
            "no two prompts are the same"
        )
    check_requests(options.requests, levels(options))
    limits(options.goodput)
    output = span(options.output_tokens, "--output-tokens")
    if options.plot is not None and output.low < 2:
        raise UserError(f"--plot: draws TPOT, which needs --output-tokens of at least 2, not {output}")
    if options.plot is not None and options.plot.suffix.lower() not in PICTURES:
        raise UserError(f"--plot {options.plot}: must end in {', '.join(PICTURES)}")
    for name, file in (("--json", options.json), ("--plot", options.plot)):
        if file is not None and not file.absolute().parent.is_dir():
            raise UserError(f"{name} {file}: no such directory: {file.absolute().parent}")


def check_requests(requests: int | None, loads: list[Level]) -> None:
    """A client without a request is none: its level would bear a number that was never reached."""
    most = max((level.count for level in loads if isinstance(level, Clients)), default=0)
    if requests is not None and requests < most:
        raise UserError(
            f"--requests {requests}: below the {most} clients of --concurrency; give {most} or more, or fewer clients"
        )


def check_arms(options: Options) -> None:
    """Both arms are engines, or both are servers."""
    if options.checkpoint is None and options.url is None:
        raise UserError("compress bench: give a CHECKPOINT to load, or --url of a server")
    if options.baseline is not None and options.baseline_url is not None:
        raise UserError("--baseline and --baseline-url: give one of them")
    if options.url is not None and options.baseline is not None:
        raise UserError("--baseline: with --url, both arms are servers: give --baseline-url")
    if options.baseline_url is not None and options.url is None:
        raise UserError("--baseline-url: needs --url, so that both arms are measured alike")
    if options.url is not None:
        for name in ("exact", "draft", "speculate", "draft_tokens"):
            if getattr(options, name):
                raise UserError(f"--{name.replace('_', '-')}: with --url, that is the server's to decide; start it so")
    elif options.model is not None:
        raise UserError("--model: names a model of a server; it needs --url")
    if options.draft is not None and options.speculate is not None:
        raise UserError("--draft and --speculate: give one of the two")
    if options.draft_tokens is not None and options.draft is None and options.speculate is None:
        raise UserError("--draft-tokens needs --draft or --speculate")
    for option, url in (("--url", options.url), ("--baseline-url", options.baseline_url)):
        if url is not None:
            server_url(url, option)


def span(text: str, option: str) -> Span:
    """`128`, or `64-256` for lengths drawn uniformly between both."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if found is None:
        raise UserError(f"{option} {text}: must be a number of tokens, as 128, or a range, as 64-256")
    low, high = int(found[1]), int(found[2] or found[1])
    if not 1 <= low <= high:
        raise UserError(f"{option} {text}: must be at least 1, and a range must ascend")
    return Span(low, high)


def levels(options: Options) -> list[Level]:
    """One for each number of clients, or each rate of arrivals, in the order given."""
    if options.rate is None:
        return [Clients(count) for count in numbers(options.concurrency or "1,4,16", "--concurrency", int)]
    if options.concurrency is not None:
        raise UserError("--rate: arrivals do not wait for clients; give --rate or --concurrency")
    return [Arrivals(rate) for rate in numbers(options.rate, "--rate", float)]


def numbers(text: str, option: str, read: Callable[[str], Number]) -> list[Number]:
    """A list as `1,4,16`: positive, each once."""
    try:
        values = [read(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values) or len(set(values)) < len(values):
        kind = "whole numbers" if read is int else "numbers"
        raise UserError(f"{option} {text}: must be positive {kind}, each once, as 1,4,16")
    return values


def limits(text: str | None) -> Limits | None:
    """`ttft=500,tpot=50,e2e=5000`, in milliseconds; any of them."""
    if text is None:
        return None
    known = [field.name for field in fields(Limits)]
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in known:
            raise UserError(
                f"--goodput {text}: unknown limit {name!r}; known: {', '.join(known)}{nearest(name, known)}"
            )
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < math.inf:
            raise UserError(f"--goodput {text}: {name} must be milliseconds above 0, as {name}=500")
    return Limits(**found)


def server_url(text: str, option: str) -> str:
    """The server's root; a trailing `/v1` is taken off. Raises UserError where it is no http address."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        valid = False
    if not valid:
        raise UserError(f"{option} {text}: must be the address of a server, as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def requests_of(options: Options, level: Level) -> int:
    """Enough to keep every client busy twice over; 32 arrivals."""
    if options.requests is not None:
        return options.requests
    return max(8, 2 * level.count) if isinstance(level, Clients) else 32


def warmup_of(options: Options, level: Level) -> int:
    """One for each client; 4 arrivals."""
    if options.warmup is not None:
        return options.warmup
    return level.count if isinstance(level, Clients) else 4


def rounds_of(options: Options) -> int:
    """With a baseline three, which give six pairs: the fewest with a signed-rank interval; alone, one."""
    return options.rounds or (3 if options.baseline or options.baseline_url else 1)
