"""Each mistake in a setting and across settings, with the whole of its problem and remedy.

findings.txt and values.txt have for each the overrides of a recipe, the setting with its problem, and the
remedy.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tests.config.test_load_recipe import MINIMAL

from bloomery.config.load import load_recipe, parse_recipe
from bloomery.config.validate import check_recipe
from bloomery.errors import ConfigError


def blocks(name: str) -> list[str]:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").rstrip().split("\n\n")


@pytest.mark.parametrize("finding", blocks("findings.txt"))
def test_a_mistake_across_settings_is_told_with_its_numbers_and_what_would_do(finding: str) -> None:
    overrides, problem, remedy = finding.split("\n  ")
    loaded = load_recipe("demo", shlex.split(overrides))
    with pytest.raises(ConfigError) as refused:
        check_recipe(loaded.recipe, loaded.sources)
    (mistake,) = refused.value.mistakes
    assert f"{mistake.key} {mistake.problem}" == problem and mistake.remedy == remedy
    assert mistake.source == loaded.sources[mistake.key]


@pytest.mark.parametrize("finding", blocks("values.txt"))
def test_a_value_that_cannot_be_used_is_told_with_what_the_setting_takes(finding: str) -> None:
    override, problem, remedy = finding.split("\n  ")
    with pytest.raises(ConfigError) as refused:
        parse_recipe(MINIMAL, [override], label="small.toml")
    (mistake,) = refused.value.mistakes
    assert f"{mistake.key} {mistake.problem}" == problem and mistake.remedy == remedy
    assert mistake.source == "command line"
