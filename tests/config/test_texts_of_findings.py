"""Each mistake across settings, with the whole of its problem and remedy.

findings.txt has for each the overrides of the demo's recipe, the setting with its problem, and the remedy.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from bloomery.config.load import load_recipe
from bloomery.config.validate import check_recipe
from bloomery.errors import ConfigError

FINDINGS = Path(__file__).with_name("findings.txt").read_text(encoding="utf-8").rstrip().split("\n\n")


@pytest.mark.parametrize("finding", FINDINGS)
def test_a_mistake_is_told_with_its_numbers_and_what_would_do(finding: str) -> None:
    overrides, problem, remedy = finding.split("\n  ")
    loaded = load_recipe("demo", shlex.split(overrides))
    with pytest.raises(ConfigError) as refused:
        check_recipe(loaded.recipe, loaded.sources)
    (mistake,) = refused.value.mistakes
    assert f"{mistake.key} {mistake.problem}" == problem and mistake.remedy == remedy
    assert mistake.source == loaded.sources[mistake.key]
