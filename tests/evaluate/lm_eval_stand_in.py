"""What our model and harness use of `lm-eval`, for machines without it: windows as its documents say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

Window = tuple[list[int], list[int]]


def rolling_windows(
    *, token_list: list[int], prefix_token: int, max_seq_len: int, context_len: int
) -> Iterator[Window]:
    """Yield (input, predicted) of a text, each window as long as may be; later ones see what came before."""
    done = min(max_seq_len, len(token_list))
    if done:
        yield [prefix_token, *token_list[: done - 1]], token_list[:done]
    while done < len(token_list):
        stop = min(len(token_list), done + max_seq_len - context_len + 1)
        yield token_list[stop - max_seq_len - 1 : stop - 1], token_list[done:stop]
        done = stop


def disjoint(pair: Window) -> Window:
    """Return a window's context without what is predicted."""
    context, predicted = pair
    return context[: len(context) - len(predicted) + 1], predicted


class TemplateLM:
    """The base of models."""


class TaskManager:
    """Knows three tasks by name, and those of a directory."""

    asked: ClassVar[dict[str, Any]] = {}

    def __init__(self, **asked: Any) -> None:
        TaskManager.asked = asked
        self.all_tasks = ["arc", "boolq", "winogrande"]


class StandIn(ModuleType):
    """The package: `simple_evaluate` notes what it is asked and returns `outcome`."""

    asked: dict[str, Any]
    outcome: dict[str, Any]

    def __init__(self) -> None:
        super().__init__("lm_eval")
        self.asked, self.outcome = {}, {"results": {}}
        self.utils = ModuleType("lm_eval.utils")
        self.utils.get_rolling_token_windows = rolling_windows  # type: ignore[attr-defined]
        self.utils.make_disjoint_window = disjoint  # type: ignore[attr-defined]
        self.tasks = ModuleType("lm_eval.tasks")
        self.tasks.TaskManager = TaskManager  # type: ignore[attr-defined]
        self.model = ModuleType("lm_eval.api.model")
        self.model.TemplateLM = TemplateLM  # type: ignore[attr-defined]

    def simple_evaluate(self, **asked: Any) -> dict[str, Any]:
        """Return the outcome."""
        self.asked = asked
        return self.outcome

    def modules(self) -> dict[str, ModuleType]:
        """Return the package and its parts by name."""
        api = ModuleType("lm_eval.api")
        parts = (self, self.utils, self.tasks, api, self.model)
        return {part.__name__: part for part in parts}


OURS = "bloomery.evaluate.lm_eval_model"


def put_in_place() -> tuple[StandIn, dict[str, ModuleType | None]]:
    """Put the stand-in among the modules; returns it, and what was there before by name."""
    package = StandIn()
    names = [*package.modules(), OURS]
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.modules.update(package.modules())
    return package, before
