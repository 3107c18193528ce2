"""The planned memory of trainings, counted: `make soak PART=memory` has the rows that the suite lacks."""

from __future__ import annotations

from tests.layouts import conftest, test_planned_memory

matrix = conftest.matrix
test_eager = test_planned_memory.test_an_eager_training_takes_what_is_planned
test_compiled = test_planned_memory.test_a_compiled_training_takes_what_is_planned
test_16_bytes = (
    test_planned_memory.test_a_compiled_training_that_rounds_by_block_holds_16_bytes_a_parameter_between_steps
)
