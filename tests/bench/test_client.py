"""The client against servers whose delays and faults are known."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from compress.bench.client import HttpArm
from compress.bench.timing import Run, figures
from compress.bench.workload import Arrivals, Ask, Clients, Level
from compress.errors import RunError, UserError
from tests.bench.server import Behaviour, serving

SLACK = 0.25  # seconds by which a busy machine may be late


def asks(count: int, output: int = 5, gap: float = 0.0) -> list[Ask]:
    return [Ask([3, 1, 4, i], output, i * gap) for i in range(count)]


@contextmanager
def connected(behaviour: Behaviour, **settings: object) -> Iterator[HttpArm]:
    with serving(behaviour) as url:
        arm = HttpArm(url, **settings)  # pyright: ignore[reportArgumentType]
        try:
            arm.connect()
            yield arm
        finally:
            arm.close()


def run(behaviour: Behaviour, asked: list[Ask], level: Level, **settings: object) -> Run:
    with connected(behaviour, **settings) as arm:
        return arm.run(asked, level)


@pytest.mark.parametrize("halves", [False, True])
def test_known_delays(halves: bool) -> None:
    """A piece has come when its last byte has; the closing event and the usage are no pieces."""
    behaviour = Behaviour(first=0.15, gap=0.04, halves=halves)
    found = run(behaviour, asks(3), Clients(1))
    for timing in found.timings:
        assert timing.error is None
        assert len(timing.pieces) == timing.output_tokens == 5
        assert 0.15 <= timing.ttft < 0.15 + SLACK
        assert timing.tpot is not None
        assert 0.9 * 0.04 <= timing.tpot < 0.04 + SLACK / 4
        assert timing.prompt_tokens == 4
    assert found.seconds >= 3 * (0.15 + 5 * 0.04)


def test_the_request_is_what_servers_understand() -> None:
    behaviour = Behaviour(first=0, gap=0)
    run(behaviour, asks(1), Clients(1), key="s3cret")
    assert behaviour.asked == [
        {
            "model": "tiny",
            "prompt": [3, 1, 4, 0],
            "max_tokens": 5,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert behaviour.authorizations == ["Bearer s3cret"]


def test_pieces_of_several_tokens_are_counted_by_the_usage() -> None:
    [timing] = run(Behaviour(width=4, first=0.05, gap=0.06), asks(1, output=13), Clients(1)).timings
    assert timing.output_tokens == 13
    assert len(timing.pieces) == 4
    assert timing.tpot == pytest.approx(sum(timing.gaps) / 12)


def test_clients_overlap_and_are_no_more_than_asked() -> None:
    """Eight requests of 0.3 s by four clients take two turns: 0.6 s, not 2.4."""
    found = run(Behaviour(first=0.2, gap=0.02), asks(8), Clients(4))
    assert 0.6 <= found.seconds < 1.6
    starts = sorted(timing.start for timing in found.timings)
    assert starts[3] - starts[0] < 0.2
    assert starts[4] - starts[0] >= 0.28


def test_arrivals_do_not_wait_for_answers() -> None:
    found = run(Behaviour(first=0.5, gap=0), asks(4, gap=0.1), Arrivals(10))
    starts = sorted(timing.start for timing in found.timings)
    assert [start - starts[0] for start in starts] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert found.seconds < 0.8 + 2 * SLACK
    assert all(timing.ttft >= 0.5 for timing in found.timings)


def test_refusals_are_counted_and_shown_in_one_line() -> None:
    found = figures([run(Behaviour(first=0, gap=0, refuse_every=3), asks(7), Clients(2))], None)
    assert (found.requests, found.failed) == (7, 2)
    assert found.errors == {"HTTP 503: queue is full": 2}


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        (Behaviour(first=0, gap=0, cut_after=2), "the server closed the connection"),
        (Behaviour(first=0, gap=0, error_after=2), "the engine failed"),
        (Behaviour(first=0, gap=0, usage=False), "the stream ended without usage"),
        (Behaviour(first=0, gap=0, refuse_every=1, body="<html>no</html>"), "HTTP 503: <html>no</html>"),
        (Behaviour(first=0, gap=0, refuse_every=1, status=400, body='{"detail": "bad"}'), "HTTP 400: bad"),
        (Behaviour(first=3), "no answer within 0.5 s"),
    ],
)
def test_where_every_request_fails_the_first_reason_is_told(behaviour: Behaviour, error: str) -> None:
    with pytest.raises(RunError, match=f"all 3 requests failed; the first: .*{error}") as caught:
        run(behaviour, asks(3), Clients(3), timeout=0.5)
    assert "\n" not in str(caught.value)


def test_a_server_that_dies_ends_the_run_at_once() -> None:
    with pytest.raises(RunError, match=r"^http://127\.0\.0\.1:\d+: no server answers: "):
        run(Behaviour(dies_after=2), asks(400), Clients(2))


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        arm = HttpArm(f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(RunError, match="no server answers"):
            arm.connect()
        arm.close()


def test_the_model_is_the_first_or_the_named_one() -> None:
    with connected(Behaviour(), model="other") as arm:
        assert arm.name.startswith("other at http://127")
    with (
        pytest.raises(UserError, match=r"^--model othr: http\S+ serves tiny, other; did you mean 'other'\?$"),
        connected(Behaviour(), model="othr"),
    ):
        pass
    with pytest.raises(RunError, match="not a list of models"), connected(Behaviour(models=3)):
        pass
