"""Makes the copy of uPlot in the dashboard anew from its npm package, and checks it against recorded hashes.

    python tools/vendor_uplot.py            fetch the package, check it, and write the files
    python tools/vendor_uplot.py --check    compare the files in the tree with the hashes; needs no network

npm must be on the PATH for the first form. The files are committed, so that a build needs neither.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "uplot@1.6.32"
PLACE = Path(__file__).parents[1] / "src" / "bloomery" / "operate" / "dashboard" / "static" / "uplot"
FILES = {
    "uPlot.iife.min.js": (
        "package/dist/uPlot.iife.min.js",
        "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    ),
    "uPlot.min.css": (
        "package/dist/uPlot.min.css",
        "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    ),
    "LICENSE": ("package/LICENSE", "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd"),
}
"""Each file, its place in the package, and the SHA-256 of its bytes."""


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    found = {name: (PLACE / name).read_bytes() for name in FILES} if arguments else fetched()
    wrong = [name for name, (_, digest) in FILES.items() if hashlib.sha256(found[name]).hexdigest() != digest]
    if wrong:
        print(f"not the files of {PACKAGE}: {', '.join(wrong)}")
        return 1
    for name, content in found.items():
        if not arguments:
            (PLACE / name).write_bytes(content)
    print(f"{PLACE} holds {PACKAGE}")
    return 0


def fetched() -> dict[str, bytes]:
    """Return the files of the package as npm has them."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(
            ["npm", "pack", "--silent", PACKAGE], cwd=place, check=True, timeout=120, stdout=subprocess.PIPE
        )
        (archive,) = Path(place).glob("*.tgz")
        with tarfile.open(archive) as package:
            return {name: package.extractfile(inside).read() for name, (inside, _) in FILES.items()}  # type: ignore[union-attr]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
