"""The documentation as a site: built strictly, without a network, and it reads from disk."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="pip install 'bloomery[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"([^\"]+)\"", text)
        loaded += re.findall(r"<link[^>]*rel=\"(?:stylesheet|icon|preconnect)\"[^>]*href=\"([^\"]+)\"", text)
        assert [link for link in loaded if "//" in link] == [], page
        local = [
            link for link in re.findall(r"href=\"([^\"#?]+)", text) if "//" not in link and ":" not in link
        ]
        if page.name != "404.html":  # its links begin at the root of a server
            assert [link for link in local if not (page.parent / link).exists()] == [], page
