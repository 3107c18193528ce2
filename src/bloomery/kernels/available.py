"""Whether Triton's kernels can run here. Triton comes with torch's builds for CUDA, and not with those for
CPUs.
"""

from __future__ import annotations

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
