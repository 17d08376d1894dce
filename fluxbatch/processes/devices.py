"""Which devices `run.devices` names, one process each, and how a process is held to its own. Starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from fluxbatch.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Seat:
    """One device as one process sees it: as the only one."""

    name: str
    environ: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


def seats(devices: Any, environ: Mapping[str, str], *, count: Callable[[], int]) -> list[Seat]:
    """`all`, or a list of indices, UUIDs (`GPU-...`, `MIG-...`) and `cpu`; ConfigError for what is not there.

    Indices count in CUDA_VISIBLE_DEVICES where that is set, so a scheduler's choice is kept to; `count` answers how
    many GPUs there are where it is not.
    """
    wanted = named(devices)
    visible = visible_gpus(environ) if VISIBLE in environ else [str(index) for index in _counted(wanted, count)]
    if wanted == ["all"]:
        if not visible:
            raise ConfigError("run.devices=all needs a GPU, and none is visible here; run.devices=[cpu,cpu] works too")
        wanted = [str(index) for index in range(len(visible))]
    found = [_seat(name, visible) for name in wanted]
    gpus = [seat.name for seat in found if seat.environ[VISIBLE]]
    twice = next((name for name in gpus if gpus.count(name) > 1), None)
    if twice:
        raise ConfigError(f"run.devices must name a GPU once, got {twice} twice")
    return found


def named(devices: Any) -> list[str]:
    """The words of `run.devices`: a list, or text with commas."""
    words = devices if isinstance(devices, list) else str(devices).split(",")
    return [str(word).strip() for word in words]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """As CUDA reads its variable: up to the first name that is none, as -1 and NoDevFiles, which schedulers write."""
    names = (name.strip() for name in environ[VISIBLE].split(","))
    return list(takewhile(lambda name: name.isdigit() or name.startswith(("GPU-", "MIG-")), names))


def _counted(wanted: list[str], count: Callable[[], int]) -> range:
    needs_count = any(name == "all" or _is_index(name) for name in wanted)
    return range(count()) if needs_count else range(0)


def _is_index(name: str) -> bool:
    return name.removeprefix("cuda:").isdigit()


def _seat(name: str, visible: list[str]) -> Seat:
    if name == "cpu":
        return Seat("cpu", {VISIBLE: ""}, ("model.device=cpu",))
    if not _is_index(name):
        return Seat(name, {VISIBLE: name})
    index = int(name.removeprefix("cuda:"))
    if index >= len(visible):
        raise ConfigError(f"run.devices must be below {len(visible)}, the number of visible GPUs, got {index}")
    return Seat(visible[index], {VISIBLE: visible[index]})
