"""Random requests against `compress serve` on the loopback: good ones, bad ones, and clients that go.

    python -m benchmarks.soak                                   a tiny model, 10,000 requests, 64 connections
    python -m benchmarks.soak --checkpoint out/model --requests 2000 --seconds 600

What must hold: every answer is strict JSON with the status that its request deserves, every answer that is not
interrupted is complete, a greedy request says the same each time, and at the end no page is held, nothing runs or
waits, and the server's memory has stopped growing. Exit code 1 where one of these fails.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil

from benchmarks.soak_requests import KINDS, TIMEOUT, Failure, Tally

FLAT = 1.0  # MB per 1000 requests that memory may grow by, over the second half
WARM = 5000  # requests before which an allocator still grows, and growth is told but not judged
SAMPLES = 200  # readings of the server's memory


async def soak(port: int, process: psutil.Process, requests: int, connections: int, seconds: float, seed: int) -> Tally:
    tally = Tally()
    numbers = iter(range(requests))
    deadline = time.monotonic() + seconds

    async def client() -> None:
        for number in numbers:
            if time.monotonic() > deadline:
                return
            draw = random.Random(f"{seed}:{number}")
            kind = draw.choices([act for _, act in KINDS], [weight for weight, _ in KINDS])[0]
            tally.kinds[kind.__name__] += 1
            try:
                await asyncio.wait_for(kind(port, draw, tally), TIMEOUT)
            except (Failure, OSError, EOFError, ValueError, KeyError, asyncio.TimeoutError) as error:
                tally.failures.append(f"request {number}, {kind.__name__}: {type(error).__name__} {error}")
            tally.done += 1
            if tally.done % max(1, requests // SAMPLES) == 0:
                tally.memory.append((tally.done, process.memory_info().rss / 1e6))

    await asyncio.gather(*(client() for _ in range(connections)))
    return tally


def growth(memory: list[tuple[int, float]]) -> float:
    """MB per 1000 requests: the slope of a line through the second half."""
    half = memory[len(memory) // 2 :]
    if len(half) < 3:
        return 0.0
    requests, megabytes = np.array(half).T
    return float(np.polyfit(requests, megabytes, 1)[0] * 1000)


def gauges(port: int) -> dict[str, float]:
    """The server's metrics without labels' differences: name → sum."""
    from urllib.request import urlopen

    from prometheus_client.parser import text_string_to_metric_families

    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT) as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("compress:")
            found[name] = found.get(name, 0.0) + sample.value
    return found


def settled(port: int) -> dict[str, float]:
    """The metrics once nothing is left to do, or after a few seconds."""
    for _ in range(50):
        found = gauges(port)
        if found["num_requests_running"] == found["num_requests_waiting"] == found["kv_cache_pages_used"] == 0:
            break
        time.sleep(0.1)
    return found


def tiny_checkpoint(directory: Path) -> Path:
    from tests.tiny import tiny_model

    tiny_model(directory)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    return directory


def receipt() -> list[str]:
    """Where, on what and by which command."""
    root = Path(__file__).parent.parent
    told = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=root, check=False
    )
    return [
        f"command     python -m benchmarks.soak {' '.join(sys.argv[1:])}".rstrip(),
        f"at          {told.stdout.strip() or 'unknown'}: {platform.machine()}, {psutil.cpu_count()} CPUs, "
        f"Python {platform.python_version()}, torch {version('torch')}, uvicorn {version('uvicorn')}, "
        f"load average {psutil.getloadavg()[0]:.1f}",
    ]


def report(tally: Tally, found: dict[str, float], seconds: float) -> list[str]:
    """What failed; prints everything else."""
    slope = growth(tally.memory)
    failures = list(tally.failures)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_pages_used"):
        if found[name]:
            failures.append(f"{name} is {found[name]:g} at the end")
    if len(tally.greedy) > 1:
        failures.append(f"a greedy request had {len(tally.greedy)} different answers")
    if slope > FLAT and tally.done >= WARM:
        failures.append(f"memory grows by {slope:.2f} MB per 1000 requests")
    print(f"requests    {tally.done} in {seconds:.0f} s ({tally.done / seconds:.0f}/s): {dict(tally.kinds)}")
    print(f"statuses    {dict(sorted(tally.statuses.items()))}")
    print(
        f"engine      {found['generation_tokens_total']:.0f} tokens, {found['prompt_tokens_total']:.0f} of prompts, "
        f"{found['prefix_cache_hits_total']:.0f} from the cache, {found['num_preemptions_total']:.0f} preemptions; "
        f"{found['kv_cache_pages_used']:.0f} of {found['kv_cache_pages']:.0f} pages held at the end"
    )
    if tally.memory:
        first, last = tally.memory[0][1], tally.memory[-1][1]
        print(f"memory      {first:.0f} MB, then {last:.0f}; second half {slope:+.2f} MB per 1000 requests")
    print(f"failures    {len(failures)}")
    for failure in failures[:20]:
        print(f"            {failure}")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="default: a tiny Llama made for it")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3000.0, help="stop after so long")
    parser.add_argument("--pages", type=int, default=64, help="of the cache: few enough that requests are preempted")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        checkpoint = options.checkpoint or tiny_checkpoint(Path(place) / "tiny")
        command = [sys.executable, "-m", "compress.cli", "serve", str(checkpoint), "--port", "0"]
        command += ["--kv-pages", str(options.pages), "--max-queue", "1000"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            if "http://" not in line:
                raise SystemExit("the server did not start")
            port = int(line.rpartition(":")[2])
            start = time.monotonic()
            limits = (options.requests, options.connections, options.seconds, options.seed)
            tally = asyncio.run(soak(port, psutil.Process(server.pid), *limits))
            seconds = time.monotonic() - start
            found = settled(port)
            server.terminate()
            code = server.wait(60)
        finally:
            server.kill()
        for line in receipt():
            print(line)
        failures = report(tally, found, seconds)
        if code != 0:
            failures.append(f"exit code {code}")
            print(f"            the server ended with exit code {code}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
