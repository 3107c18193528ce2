"""What a check across settings found, and how the findings become one refusal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bloomery.config.recipe import Recipe
from bloomery.errors import ConfigError, Mistake

_LOGIN = re.compile(r"://[^/@]+@")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One setting (`section.key`) that does not fit the others."""

    key: str
    problem: str
    remedy: str


def refuse(recipe: Recipe, sources: Mapping[str, str], findings: Sequence[Finding]) -> None:
    """Raise ConfigError with all findings, each with its value and where it came from; none is no error."""
    if not findings:
        return
    raise ConfigError(
        [
            Mistake(
                key=finding.key,
                value=_without_password(setting_value(recipe, finding.key)),
                source=sources.get(finding.key, "default"),
                problem=finding.problem,
                remedy=finding.remedy,
            )
            for finding in findings
        ]
    )


def setting_value(recipe: Recipe, key: str) -> object:
    """The value of `section.key`."""
    section, _, name = key.partition(".")
    value: object = getattr(getattr(recipe, section), name)
    return value


def _without_password(value: object) -> object:
    """What a message may show of a value: of a URL, neither who logs in nor how."""
    return _LOGIN.sub("://***@", value) if isinstance(value, str) else value
