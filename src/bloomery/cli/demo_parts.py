"""The steps of the demo that compute something. Imported when the demo runs: they load torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bloomery.cli.bars import data_bar
from bloomery.config.load import LoadedRecipe, load_recipe
from bloomery.config.recipe import Recipe
from bloomery.data.batches import held_out_batches
from bloomery.data.indexed import IndexedDataset
from bloomery.data.prepare import Prepared, prepare
from bloomery.events.rundir import RunDir
from bloomery.parallel.precision import measure_peak_flops
from bloomery.plan.compute import token_cost

EFFICIENCY = 0.6
"""Share of the measured matmul peak that a step of the demo's model reached where it was tuned."""
