"""What the process that ranks are forked from loads once."""

import training  # noqa: F401
