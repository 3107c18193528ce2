"""Stands for an agent, a trainer or an update, and keeps every call in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Recorder:
    """An object with any method. It notes (its name, method, arguments) in `calls`, and answers as told.

    answers: what methods return, or functions that compute it from the arguments; others return None.
    """

    def __init__(self, name: str, calls: list[tuple[Any, ...]], **answers: Any) -> None:
        self._name, self._calls, self._answers = name, calls, answers

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*given: Any, **named: Any) -> Any:
            self._calls.append((self._name, method, *given, *([named] if named else [])))
            answer = self._answers.get(method)
            return answer(*given, **named) if callable(answer) else answer

        return call
