"""Progress: piped output has plain lines with i/N, elapsed and ETA at least every interval (row 37)."""

from __future__ import annotations

import io
import re
import time

from compress.progress import Phase, Reporter, clock

LINE = re.compile(r"^quantize (\d+)/4  (\d+)%  elapsed \d+:\d\d  ETA (\d+:\d\d|unknown)")


def test_piped_lines_come_by_the_clock_and_parse() -> None:
    out = io.StringIO()
    with Reporter(out, interval=0.05).phase("quantize", 4) as phase:
        for block in range(4):
            time.sleep(0.12)
            phase.advance(1, f"block {block}")
    text = out.getvalue()
    assert "\r" not in text
    assert "\x1b" not in text
    first, *lines = text.splitlines()
    assert first == "quantize 0/4  started"
    assert len(lines) >= 6, "a line at every interval, though only four steps ended"
    assert all(LINE.match(line) for line in lines), lines
    assert lines[-1].startswith("quantize 4/4  100%")
    done = [int(LINE.match(line)[1]) for line in lines]  # type: ignore[index]
    assert done == sorted(done)


def test_resumed_steps_do_not_count_into_the_speed() -> None:
    phase = Phase("quantize", 10)
    phase.resume_at(8)
    phase.started -= 10
    assert "ETA unknown" in phase.line()
    phase.advance(1)
    assert "quantize 9/10" in phase.line()
    assert "ETA 0:10" in phase.line(), "one step took ten seconds, and one is left"


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.6, 61, 3661)] == ["0:00", "1:00", "1:01", "1:01:01"]
