"""Which process of how many this is. The environment of launchers is read here and nowhere else.

Which shards a rank makes is for `deal`.
"""

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


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables in which a launcher tells a process its rank; `sign`: it is this launcher's process if set."""

    name: str
    rank: str
    world_size: str
    local: str
    sign: str = ""
    needs_local: bool = False


# In this order: torchrun may run inside a Slurm step, and a step may set an MPI's variables too.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", needs_local=True),
    Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", sign="SLURM_STEP_ID"),
    Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


def resolve(run: RunConfig, environ: Mapping[str, str]) -> Rank:
    """`run.rank` and `run.world_size`; else torchrun's variables, srun's inside a step, an MPI's; else one process.

    ConfigError for variables that are half set or no numbers, and for a batch script of several tasks without srun.
    """
    rank = _from_settings(run, environ) or _from_launcher(environ)
    if not 0 <= rank.index < rank.world_size:
        raise ConfigError(f"the rank must be from 0 to the world size - 1, got {rank.index} of {rank.world_size}")
    return rank


def _from_settings(run: RunConfig, environ: Mapping[str, str]) -> Rank | None:
    if run.rank is None or run.world_size is None:
        return None
    local = next((launcher.local for launcher in LAUNCHERS if launcher.local in environ), None)
    return Rank(run.rank, run.world_size, _number(environ, local) if local else 0)


def _from_launcher(environ: Mapping[str, str]) -> Rank:
    launcher = next((launcher for launcher in LAUNCHERS if _is_set(launcher, environ)), None)
    if launcher is None:
        _refuse_tasks_without_step(environ)
        return Rank()
    _refuse_half(launcher, environ)
    local = _number(environ, launcher.local) if launcher.local in environ else 0
    return Rank(_number(environ, launcher.rank), _number(environ, launcher.world_size), local)


def _is_set(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    if launcher.sign:
        return launcher.sign in environ
    return launcher.rank in environ or launcher.world_size in environ


def _refuse_half(launcher: Launcher, environ: Mapping[str, str]) -> None:
    needed = [launcher.rank, launcher.world_size, *([launcher.local] if launcher.needs_local else [])]
    missing = [name for name in needed if name not in environ]
    if missing:
        found = [f"{name}={environ[name]}" for name in (*needed, launcher.sign) if name in environ]
        raise ConfigError(
            f"{', '.join(needed)} must be set together, as {launcher.name} does, got {', '.join(found)} without "
            f"{' and '.join(missing)}; unset {'it' if len(found) == 1 else 'them'}, or give run.rank and run.world_size"
        )


def _refuse_tasks_without_step(environ: Mapping[str, str]) -> None:
    tasks = _number(environ, "SLURM_NTASKS") if "SLURM_NTASKS" in environ else 1
    if tasks > 1:
        raise ConfigError(
            "run.rank must be given, or the command started with srun: "
            f"SLURM_NTASKS={tasks} without a step would do 1/{tasks} of the job"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {environ[name]!r}") from None
