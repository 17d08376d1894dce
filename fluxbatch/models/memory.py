"""How much of a GPU this process may use, and what its parts take. Knows nothing of what the parts compute."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from fluxbatch.errors import ConfigError

logger = logging.getLogger("fluxbatch")

GIB = 2**30
FREE_SHARE = 0.9  # of what is free at the start; the rest is for other processes and for what the allocator cannot see


@dataclass(frozen=True, slots=True)
class Budget:
    """What one process may hold on one GPU, in GiB."""

    gpu: str
    total_gib: float
    free_gib: float
    budget_gib: float


def budget(device: torch.device | str, *, wanted_gib: float | None) -> Budget:
    """`wanted_gib`, or nine tenths of what is free. ConfigError where the card is smaller."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    free_bytes += torch.cuda.memory_reserved(device)  # ours already
    total_gib = round(total_bytes / GIB, 2)
    if wanted_gib is not None and wanted_gib > total_gib:
        raise ConfigError(
            f"model.memory_budget_gib must be at most {total_gib}, the memory of {device}, got {wanted_gib:g}"
        )
    allowed_gib = FREE_SHARE * free_bytes / GIB if wanted_gib is None else wanted_gib
    return Budget(torch.cuda.get_device_name(device), total_gib, free_bytes / GIB, allowed_gib)


def enforce(limit: Budget, device: torch.device) -> None:
    """From here on torch refuses what goes beyond the budget, as a smaller card would."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit.budget_gib / limit.total_gib), device)
    logger.info(
        "%s: %s, %.1f GiB, %.1f free, budget %.1f (model.memory_budget_gib)",
        device, limit.gpu, limit.total_gib, limit.free_gib, limit.budget_gib,
    )  # fmt: skip


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> tuple[float, float] | None:
    """Allocated and reserved at their highest since the last reset; None on a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(device) / GIB
