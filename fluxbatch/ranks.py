"""Which share of the job is ours. The environment is read here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fluxbatch.config import RunConfig
from fluxbatch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of `world_size`; `local` counts on its machine and picks the GPU where several are visible."""

    index: int = 0
    world_size: int = 1
    local: int = 0

    def owns(self, shard: int) -> bool:
        return shard % self.world_size == self.index


def resolve(run: RunConfig, environ: Mapping[str, str]) -> Rank:
    """`run.rank` and `run.world_size`; else torchrun's variables; else srun's, inside a step; else one process."""
    try:
        rank = _from(run, environ)
    except ValueError as error:
        raise ConfigError(f"the launcher's variables must be whole numbers: {error}") from error
    if not 0 <= rank.index < rank.world_size:
        raise ConfigError(f"the rank must be from 0 to the world size - 1, got {rank.index} of {rank.world_size}")
    return rank


def _from(run: RunConfig, environ: Mapping[str, str]) -> Rank:
    if run.rank is not None and run.world_size is not None:
        return Rank(run.rank, run.world_size, int(environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID", 0))))
    if all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return Rank(int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ["LOCAL_RANK"]))
    tasks = int(environ.get("SLURM_NTASKS", 1))
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        return Rank(int(environ["SLURM_PROCID"]), tasks, int(environ.get("SLURM_LOCALID", 0)))
    if tasks > 1:
        raise ConfigError(
            "run.rank must be given, or the command started with srun: "
            f"SLURM_NTASKS={tasks} without a step would do 1/{tasks} of the job"
        )
    return Rank()
