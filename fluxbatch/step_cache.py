"""Which denoising steps are computed, and which are extrapolated from those before: an approximation, when asked for.

A schedule is fixed before the first step and the same for every row of a bucket, so that no row depends on another and
nothing has to be looked at while the GPU works. Knows no tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# The share of the steps that are computed at the beginning, where the picture is decided, and the distance after it.
SCHEDULES = {"conservative": (0.5, 2), "medium": (0.3, 2), "aggressive": (0.2, 3)}
CHOICES = ("off", *SCHEDULES)
LEAST_STEPS = 5  # of fewer, which distilled models take, each is computed
LEAST_AT_FIRST = 4  # a line through the first two steps of eight leads far away from where the picture goes


@dataclass(frozen=True, slots=True)
class StepCache:
    """`schedule`: one of CHOICES, or the numbers of the steps that are computed. `order` of the polynomial: 1 or 2."""

    schedule: str | tuple[int, ...] = "off"
    order: int = 1

    def computed(self, num_steps: int) -> tuple[int, ...]:
        """The steps of a row that go through the transformer, the first one always among them."""
        if isinstance(self.schedule, tuple):
            return tuple(step for step in self.schedule if step < num_steps)
        if self.schedule == "off" or num_steps < LEAST_STEPS:
            return tuple(range(num_steps))
        share, distance = SCHEDULES[self.schedule]
        head = max(LEAST_AT_FIRST, math.ceil(share * num_steps))
        return tuple(step for step in range(num_steps) if step < head or (step - head + 1) % distance == 0
                     or step == num_steps - 1)  # fmt: skip

    def __str__(self) -> str:
        told = self.schedule if isinstance(self.schedule, str) else f"steps {','.join(map(str, self.schedule))}"
        return told if told == "off" else f"{told}, order {self.order}"


EVERY_STEP = StepCache()
