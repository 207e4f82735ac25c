"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """A shell that runs the tests in the background has SIGINT ignored, and a program that is started inherits that: it
    could not be interrupted."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
