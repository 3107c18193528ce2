"""Runs a call on a thread of its own, so that the training goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class BackgroundCall(Generic[Result]):
    """A call on a daemon thread, which begins at once.

    call: what is called. name: of the thread.
    """

    def __init__(self, call: Callable[[], Result], *, name: str) -> None:
        self._call = call
        self._results: list[Result] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def is_over(self, timeout_s: float = 0.0) -> bool:
        """Wait for the end of the call, at most `timeout_s`; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> Result:
        """Wait for the end of the call; return what it returned, or raise what it raised."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as failure:  # noqa: BLE001  — the thread's edge: raised again in `result`
            self._failure = failure
