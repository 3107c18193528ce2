from pathlib import Path

import pytest

from bloomery.events.rundir import RunDir


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()
