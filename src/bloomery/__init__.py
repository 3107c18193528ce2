"""bloomery pre-trains large language models and keeps the training alive.

`load`, `journal`, `recipe`, `fit` and `samples` are its Python API (docs/reference/api.md). Importing the
package loads nothing else.
"""

from typing import Any

__version__ = "0.1.0"
_API = ("SampleOrder", "LanguageModel", "fit", "journal", "load", "recipe", "samples")


def __getattr__(name: str) -> Any:  # Any: whatever the API offers under a name
    """Return a name of the API, which is imported with its first use."""
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("bloomery.api"), name)


def __dir__() -> list[str]:
    """Return the names of the package, those of the API among them."""
    return sorted((*globals(), *_API))
