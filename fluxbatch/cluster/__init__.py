"""A job on a Ray cluster: a driver deals the shards of one plan to workers, one a GPU, who draw and commit them.

    run_job -> drawing (the driver's loop) -> dealer (which shard next)
                                           -> crew (Ray's actors) -> worker (one GPU)

Only `crew` calls Ray. Ray's own retries are off: what is done stands in the run folder, and a shard that does not come
back done is dealt again.
"""

from __future__ import annotations

import importlib.util
import os

from fluxbatch import config
from fluxbatch.config import JobConfig
from fluxbatch.errors import ConfigError
from fluxbatch.processes.ranks import Rank
from fluxbatch.storage.objects import ObjectPath


def require_ray(cfg: JobConfig, rank: Rank) -> None:
    """ConfigError where `run.engine=ray` cannot work: without Ray, as one of several ranks, through a client."""
    if cfg.run.engine != "ray":
        return
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("run.engine=ray needs fluxbatch[ray], which is not installed: pip install 'fluxbatch[ray]'")
    if rank.world_size > 1:
        raise ConfigError(
            f"run.engine=ray must be started once, for all GPUs, got rank {rank.index} of {rank.world_size}"
        )
    if isinstance(config.output_dir(cfg), ObjectPath):
        raise ConfigError(
            f"run.engine=ray needs an output.dir on a file system that all nodes share, got {cfg.output.dir}"
        )
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ConfigError(
            f"run.engine=ray must be started on a node of the cluster (ray job submit), got RAY_ADDRESS={address}"
        )
