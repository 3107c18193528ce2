"""Builds native/ into one shared library beside the package; without a compiler, bloomery has none.

The library is loaded by ctypes (`bloomery/native.py`), so neither Python's headers nor its ABI matter, and
one wheel fits every Python 3 of a platform. With BLOOMERY_NEEDS_NATIVE=1 a missing compiler is an error.
Everything else about the package stands in pyproject.toml.
"""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]
SOURCES = sorted(path.as_posix() for path in Path("native/src").glob("*.cpp"))
HEADERS = sorted(path.as_posix() for path in Path("native/src").glob("*.h"))


class BuildLibrary(build_ext):
    """Name the result libbloomery.so: a plain library, not an extension module."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return where the library belongs."""
        return str(Path(*fullname.split(".")).with_name("libbloomery.so"))

    def build_extension(self, ext: Extension) -> None:
        """Compile the sources side by side, as many as there are cores."""
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_all([source], **options), sources)
                return [one for made in objects for one in made]

        self.compiler.compile = compile_each
        super().build_extension(ext)


class BuildPackage(build_py):
    """Write the commit beside the package, for `bloomery --version`; BLOOMERY_COMMIT names it without git."""

    def run(self) -> None:
        """Build the package; an editable one asks git itself."""
        super().run()
        commit = os.environ.get("BLOOMERY_COMMIT") or _commit_of_clone()
        if commit and not self.editable_mode:
            Path(self.build_lib, "bloomery", "commit.txt").write_text(f"{commit}\n", encoding="utf-8")


def _commit_of_clone() -> str:
    if not Path(".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class Wheel(bdist_wheel):
    """Tag the wheel for every Python 3 of its platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag: no interpreter's ABI is used."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    cmdclass={"build_ext": BuildLibrary, "build_py": BuildPackage, "bdist_wheel": Wheel},
    ext_modules=[
        Extension(
            "bloomery.libbloomery",
            sources=SOURCES,
            include_dirs=["native/include"],
            depends=["native/include/bloomery.h", *HEADERS],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
            optional=os.environ.get("BLOOMERY_NEEDS_NATIVE") != "1",
        )
    ],
)
