"""Noise levels of rectified flow as FLUX shifts them. Knows nothing of models but their scheduler's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from fluxbatch.models import Schedule


def flux1_mu(num_tokens: int, scheduler_config: Mapping[str, Any]) -> float:
    """Shift of FLUX.1, linear in image tokens: diffusers' `calculate_shift`."""
    base_tokens = scheduler_config.get("base_image_seq_len", 256)
    max_tokens = scheduler_config.get("max_image_seq_len", 4096)
    base_shift = scheduler_config.get("base_shift", 0.5)
    max_shift = scheduler_config.get("max_shift", 1.15)
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return num_tokens * slope + (base_shift - slope * base_tokens)


def flux2_mu(num_tokens: int, num_inference_steps: int) -> float:
    """Shift of FLUX.2, fitted by its authors to image tokens and steps: diffusers' `compute_empirical_mu`."""
    at_200_steps = 0.00016927 * num_tokens + 0.45666666
    if num_tokens > 4300:
        return at_200_steps
    at_10_steps = 8.73809524e-05 * num_tokens + 1.89833333
    slope = (at_200_steps - at_10_steps) / 190.0
    return slope * num_inference_steps + (at_200_steps - 200.0 * slope)


def flow_schedule(
    scheduler_config: Mapping[str, Any], *, num_inference_steps: int, mu: float, device: torch.device
) -> Schedule:
    """Sigmas `linspace(1, 1/n, n)`, shifted by diffusers' scheduler.

    The scheduler is private to the call: it counts steps, and two threads on one instance break each other.
    """
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler_config))
    sigmas = np.linspace(1.0, 1.0 / num_inference_steps, num_inference_steps)
    scheduler.set_timesteps(sigmas=sigmas.tolist(), mu=mu, device=device)
    return Schedule(timesteps=scheduler.timesteps, sigmas=scheduler.sigmas)
