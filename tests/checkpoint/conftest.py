import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bloomery.events.rundir import RunDir


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()
