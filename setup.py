"""Builds native/ into one shared library beside the package; without a compiler, bloomery has none.

The library is loaded by ctypes (`bloomery/native.py`), so neither Python's headers nor its ABI matter.
Everything else about the package stands in pyproject.toml.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

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


setup(
    cmdclass={"build_ext": BuildLibrary},
    ext_modules=[
        Extension(
            "bloomery.libbloomery",
            sources=SOURCES,
            include_dirs=["native/include"],
            depends=["native/include/bloomery.h", *HEADERS],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ],
)
