"""A batch script for a job of one's own: the scripts of jobs/ with its settings filled in. Submits nothing.

The scripts stand in one place: what a person reads there, this fills in line by line, and the tests run.
"""

from __future__ import annotations

import argparse
import logging
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from fluxbatch import config, config_rules
from fluxbatch.compose import with_config
from fluxbatch.config import JobConfig
from fluxbatch.errors import EXIT_DONE, ConfigError, FluxbatchError
from fluxbatch.manifest.files import open_manifest
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.processes import devices
from fluxbatch.storage.folder import RunFolder
from fluxbatch.telemetry.progress import counted

log = logging.getLogger(__name__)

USAGE = "jobs slurm [--array N | --tasks N] [--python PATH] [--to FILE] key=value ..."
HEADER = "# Made by `python -m fluxbatch jobs slurm`. Give sbatch your limits beside it: -t 4:00:00 --cpus-per-task=4"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; usage: python -m fluxbatch {USAGE}")


def write_script(arguments: Sequence[str]) -> str:
    """The words behind `jobs` to a script, or to a sentence where `--to` names its file."""
    if "--help" in arguments:
        return f"python -m fluxbatch {USAGE}"
    parser = _Parser(prog="fluxbatch jobs", add_help=False, allow_abbrev=False)
    parser.add_argument("scheduler", choices=["slurm"])
    parser.add_argument("--array", type=_number)
    parser.add_argument("--tasks", type=_number)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--to", type=Path)
    words, settings = parser.parse_known_args(arguments)
    if words.array and words.tasks:
        raise ConfigError(f"--array and --tasks are two ways to start ranks, got {words.array} and {words.tasks}")
    cfg = _checked(settings)
    if cfg is not None:
        _warn_of_idle_ranks(cfg, tasks=words.array or words.tasks or 1)
    name = config.run_name(cfg) if cfg is not None else "fluxbatch"
    text = slurm_script(settings, name=name, array=words.array, tasks=words.tasks, python=words.python)
    if words.to is None:
        return text.rstrip("\n")
    words.to.write_text(text)
    return f"written: {words.to}\nnext: sbatch {shlex.quote(str(words.to))}"


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _checked(settings: list[str]) -> JobConfig | None:
    """The job that these settings make; ConfigError where they make none. None where they only ask for words."""
    made: list[JobConfig] = []

    def check(cfg: JobConfig) -> int:
        config_rules.check(cfg)
        if not cfg.manifest.path:
            raise ConfigError("manifest.path must be given, or a job= that has it")
        if cfg.run.rank is not None:
            raise ConfigError(f"run.rank must be left to the script, got {cfg.run.rank}")
        made.append(cfg)
        return EXIT_DONE

    with_config(settings, check)
    return made[0] if made else None


def _warn_of_idle_ranks(cfg: JobConfig, *, tasks: int) -> None:
    ranks = tasks * (len(devices.named(cfg.run.devices)) if cfg.run.devices is not None else 1)  # of `all` one at least
    shards = _num_shards(cfg)
    if shards is not None and shards < ranks:
        log.warning("%d ranks for %s: %d of them would have nothing to draw; ask for fewer, or plan smaller shards "
                    "(plan.shard_size=%d)", ranks, counted(shards, "shard"), ranks - shards,
                    cfg.plan.shard_size)  # fmt: skip


def _num_shards(cfg: JobConfig) -> int | None:
    """Those of the plan that stands, else as many as the manifest may fill; None where neither is to be seen here."""
    paths = cfg.manifest.path if isinstance(cfg.manifest.path, list) else [cfg.manifest.path]
    if any("://" in path for path in [*paths, cfg.output.dir or ""]):
        return None  # a script is made without a network
    try:
        plan = RunPlan.open(RunFolder(config.output_dir(cfg)))
        if plan is not None:
            return sum(part.num_shards for part in plan.parts)
        return -(-open_manifest(cfg.manifest).num_rows // cfg.plan.shard_size)
    except (FluxbatchError, OSError) as error:
        log.debug("the run will say so too, where it runs: %s", error)
        return None


def slurm_script(
    settings: Sequence[str], *, name: str, array: int | None, tasks: int | None, python: str, folder: Path | None = None
) -> str:
    """An array of one-GPU ranks, or one job of `tasks` ranks. It works in `folder`, else where we stand now."""
    filled = {
        "#SBATCH --job-name=": re.sub(r"[^\w.-]+", "_", name),
        "# sbatch ": None,
        "PYTHON=": shlex.quote(python),
        "FOLDER=": shlex.quote(str(folder or Path.cwd())),
        "SETTINGS=": f"({shlex.join(settings)})",
    }
    if tasks:
        return _filled("slurm_tasks.sh", {**filled, "#SBATCH --ntasks=": str(tasks)})
    ranks = array or 1
    return _filled("slurm_array.sh", {**filled, "#SBATCH --array=": f"0-{ranks - 1}", "WORLD_SIZE=": str(ranks)})


def _filled(script: str, values: Mapping[str, str | None]) -> str:
    """The script with other values in the lines that begin so; None: the line of usage, which becomes our header."""
    lines, left = [], dict(values)
    for line in (scripts_folder() / script).read_text().splitlines():
        start = next((start for start in left if line.startswith(start)), None)
        value = left.pop(start) if start else None
        lines.append(line if start is None else HEADER if value is None else f"{start}{value}")
    assert not left, f"jobs/{script} has no line for {', '.join(left)}"
    return "\n".join(lines) + "\n"


def scripts_folder() -> Path:
    """jobs/ beside the package in a checkout, inside it in an installed wheel."""
    here = Path(__file__).resolve().parent
    inside = here / "jobs"
    return inside if inside.is_dir() else here.parent / "jobs"
