"""`python -m bloomery`: the same as `bloomery`."""

from __future__ import annotations

import sys

from bloomery.cli import main

sys.exit(main())
