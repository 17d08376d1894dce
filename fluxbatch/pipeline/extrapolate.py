"""The velocities of steps that are not computed: a polynomial in the noise level through those that were.

As in the multistep methods of Adams, whose derivatives come from earlier steps, and in TaylorSeer (Liu et al. 2025,
arXiv:2503.06923), which does so with features. Nothing waits for the device. Legend: B rows, L tokens, C channels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from fluxbatch.models import Flow


def extrapolated(flow: Flow, sigmas: Tensor, *, computed: Sequence[int], num_steps: int, order: int) -> Flow:
    """The flow, asked at the computed steps only; of both passes together where there are two.

    The same function where every step is computed. `sigmas` float32 on the device.
    """
    if len(computed) == num_steps:
        return flow
    asked = frozenset(computed)
    known: deque[tuple[int, Tensor]] = deque(maxlen=order + 1)

    def velocity(latents: Tensor, step: int) -> Tensor:
        if step not in asked:
            return _polynomial(known, sigmas, step)
        known.append((step, flow(latents, step)))
        return known[-1][1]

    return velocity


def _polynomial(known: Sequence[tuple[int, Tensor]], sigmas: Tensor, step: int) -> Tensor:
    """Lagrange's, through (sigma, velocity) of the known steps, at the sigma of this one; in float32, rounded once."""
    total = torch.zeros_like(known[-1][1], dtype=torch.float32)
    for own, velocity in known:
        weight = torch.ones_like(sigmas[step])
        for other, _ in known:
            if other != own:
                weight = weight * (sigmas[step] - sigmas[other]) / (sigmas[own] - sigmas[other])
        total += weight * velocity
    return total.to(known[-1][1].dtype)
