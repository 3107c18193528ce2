"""The wheel: built with the native library, installed into an empty environment, run without a compiler.

BLOOMERY_WHEEL_INSTALLS_ALL=1 installs the dependencies too, from where pip gets them; else this environment's
are used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    """What a command printed. Nothing of this environment reaches it but what `more` says."""
    kept = {
        name: os.environ[name] for name in ("HOME", "LANG", "PIP_CERT", "SSL_CERT_FILE") if name in os.environ
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | more,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the clone's files, built beside it."""
    place = tmp_path_factory.mktemp("wheel")
    listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT, PATH=os.environ["PATH"])
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (place / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / "clone" / name)
    flags = {"BLOOMERY_NEEDS_NATIVE": "1", "BLOOMERY_COMMIT": "0123456789ab", "PATH": os.environ["PATH"]}
    options = ("--no-deps", "--no-build-isolation", "-w", place / "dist")
    run(sys.executable, "-m", "pip", "wheel", "-q", *options, ".", cwd=place / "clone", **flags)
    (built,) = (place / "dist").iterdir()
    return built


def test_a_wheel_runs_the_demo_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    assert wheel.name.endswith(".whl") and "-py3-none-" in wheel.name
    run(sys.executable, "-m", "venv", "venv", cwd=tmp_path, PATH=os.environ["PATH"])
    binaries = tmp_path / "venv" / "bin"
    python = binaries / "python"
    install = (python, "-m", "pip", "install", "-q")
    if os.environ.get("BLOOMERY_WHEEL_INSTALLS_ALL") == "1":
        run(*install, "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path, PATH="")
    else:  # the dependencies of this environment, without the bloomery in it: that is there by a .pth file
        packages = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
        places = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
        Path(packages, "dependencies.pth").write_text("\n".join(places) + "\n")
        run(*install, "--no-deps", "--ignore-installed", wheel, cwd=tmp_path, PATH="")
    alone = {"PATH": str(binaries), "OMP_NUM_THREADS": "1"}
    assert run(binaries / "bloomery", "--version", cwd=tmp_path, **alone).endswith("(0123456789ab)\n")
    asked = "import bloomery.native as n; print(n.__file__, n.library() is not None)"
    told = run(binaries / "python", "-c", asked, cwd=tmp_path, **alone)
    assert told.startswith(str(tmp_path)) and told.endswith("True\n")
    demo = run(
        binaries / "bloomery", "demo", "--json", "--no-kill", "--minutes", "0.5", cwd=tmp_path, **alone
    )
    assert json.loads(demo.splitlines()[-1])
