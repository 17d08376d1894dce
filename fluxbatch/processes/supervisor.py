"""One process a device of this machine (`run.devices`), seen from outside as one run: one bar, one log, one exit code.

Each process is the same command with a rank of its own. A signal is passed on; a process that dies of its GPU, or is
killed, is started again; processes whose supervisor is gone find their standard input closed, and stop. Knows neither
plan nor pixels: how far the job is, it reads in the run folder like anybody else.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fluxbatch import config
from fluxbatch.config import JobConfig
from fluxbatch.errors import (
    EXIT_BUSY,
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_FATAL,
    EXIT_INTERRUPTED,
    EXIT_LOST,
    EXIT_MANIFEST,
    EXIT_ROW_ERRORS,
    ConfigError,
    FluxbatchError,
    Interrupted,
    end_code,
)
from fluxbatch.process import SUPERVISED
from fluxbatch.processes import devices, ranks
from fluxbatch.processes.crew_view import CrewView
from fluxbatch.processes.devices import Seat
from fluxbatch.processes.ranks import Rank
from fluxbatch.records import RowCounts
from fluxbatch.stop import signals_to
from fluxbatch.storage.folder import RunFolder

log = logging.getLogger(__name__)

POLL_S = 0.2
WORST_FIRST = (EXIT_CONFIG, EXIT_MANIFEST, EXIT_FATAL, EXIT_BUSY, EXIT_INTERRUPTED, EXIT_ROW_ERRORS, EXIT_DONE)


class CrewError(FluxbatchError):
    """The processes of a supervisor have ended, and the job is not done."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@dataclass
class Member:
    """One rank on one device, over all starts of its process."""

    seat: Seat
    rank: Rank
    process: subprocess.Popen[str] | None = None
    starts: int = 0
    code: int | None = None  # that of its last process; None while one runs
    threads: list[threading.Thread] = field(default_factory=list)


def supervise(cfg: JobConfig) -> tuple[RowCounts, int]:
    """Run the job on all devices of `run.devices`. Returns the rows by state, and the exit code.

    A job that is complete, its report and _SUCCESS too, ends with 0 or 4 if any rank did, whatever became of another
    one on the way. Otherwise the worst code of the ranks is raised as an error: 2, 3, 1, 6, 75, in this order.
    """
    members, folder = _members(cfg), RunFolder(config.output_dir(cfg))
    with CrewView(folder, cfg.telemetry) as view:
        crew = Crew(members, view, max_restarts=cfg.run.max_restarts)
        with signals_to(crew.forward):
            crew.work()
        counts = view.counts()
    return counts, _exit_code(members, counts, cfg, finished=folder.success.exists())


def _members(cfg: JobConfig) -> list[Member]:
    """The ranks of this machine. Where it is one of several (a task a node), all must have as many devices."""
    if sys.argv[1:2] == ["-m"]:
        raise ConfigError("run.devices must be left out under -m, which runs one job after another in one process")
    seats = devices.seats(cfg.run.devices, os.environ, count=_count_gpus)
    machine = ranks.resolve(cfg.run, os.environ)
    first, world_size = machine.index * len(seats), machine.world_size * len(seats)
    return [Member(seat, Rank(first + place, world_size)) for place, seat in enumerate(seats)]


def _count_gpus() -> int:
    import torch  # asks the driver and takes no memory of a GPU

    return torch.cuda.device_count()


class Crew:
    """Starts the processes of all members, and again what may be started again, until none is left."""

    def __init__(self, members: Sequence[Member], view: CrewView, *, max_restarts: int) -> None:
        self._members = members
        self._view = view
        self._max_restarts = max_restarts
        self._stopping = False
        self._starting = threading.Lock()  # a signal must not miss a process that is just being started

    def forward(self, number: int) -> None:
        """Pass a signal on to every process. A second one makes them end at once, as it would without us."""
        with self._starting:
            self._stopping = True
            for member in self._members:
                if member.process is not None and member.code is None:
                    member.process.send_signal(number)

    def work(self) -> None:
        """Until every member has ended."""
        try:
            for member in self._members:
                self._start(member)
            while any(member.code is None for member in self._members):
                for member in self._members:
                    self._look_after(member)
                self._view.look()
                time.sleep(POLL_S)
        finally:
            for member in self._members:
                _let_go(member)
        self._view.look(last=True)

    def _start(self, member: Member) -> None:
        with self._starting:
            if self._stopping:
                member.code = EXIT_INTERRUPTED
                return
            member.starts += 1
            member.code = None
            # Of a process group of its own, or a terminal's Ctrl-C would reach it twice: by itself and by us.
            member.process = subprocess.Popen(
                _command(member),
                env={**os.environ, **member.seat.environ, SUPERVISED: "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,
            )
        reader = threading.Thread(target=self._pass_on, args=(member, member.process), daemon=True)
        reader.start()
        member.threads.append(reader)

    def _pass_on(self, member: Member, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._view.note(f"[rank {member.rank.index}] {line.rstrip()}")

    def _look_after(self, member: Member) -> None:
        if member.code is not None or member.process is None or member.process.poll() is None:
            return
        code = member.process.returncode
        _let_go(member)
        if _may_start_again(code) and self._stopping:
            member.code = EXIT_INTERRUPTED  # also one that the signal found before it could listen
        elif _may_start_again(code) and member.starts <= self._max_restarts:
            self._view.note(f"[rank {member.rank.index}] {_end(code)} on {member.seat.name}: started again")
            self._start(member)
        else:
            member.code = code if code in WORST_FIRST else EXIT_FATAL
            if _may_start_again(code):
                self._view.note(
                    f"[rank {member.rank.index}] {_end(code)} on {member.seat.name}, {member.starts} times"
                    f" (run.max_restarts={self._max_restarts}): its open shards are left to the others"
                )


def _command(member: Member) -> list[str]:
    """This process's own command, for one rank."""
    rank = (f"run.rank={member.rank.index}", f"run.world_size={member.rank.world_size}", "run.devices=null")
    return [sys.executable, *sys.orig_argv[1:], *rank, "telemetry.progress=off", *member.seat.overrides]


def _may_start_again(code: int) -> bool:
    """After a lost GPU, a hang, or a kill. What a process could explain, the next one would run into as well."""
    return code < 0 or code == EXIT_LOST


def _end(code: int) -> str:
    return f"died of {signal.Signals(-code).name}" if code < 0 else "lost its GPU or hung"


def _let_go(member: Member) -> None:
    """Close our end of its standard input: a process that still lives takes that for our end, and stops."""
    if member.process is None or member.process.stdin is None:
        return
    member.process.stdin.close()
    if member.process.poll() is not None:
        for thread in member.threads:
            thread.join(5.0)
        member.threads.clear()


def _exit_code(members: Sequence[Member], counts: RowCounts, cfg: JobConfig, *, finished: bool) -> int:
    codes = [EXIT_FATAL if member.code is None else member.code for member in members]
    worst = min(codes, key=WORST_FIRST.index)
    if finished and counts.pending == 0 and not {EXIT_DONE, EXIT_ROW_ERRORS}.isdisjoint(codes):
        return end_code(counts.rejected + counts.failed, fail_on_row_errors=cfg.run.fail_on_row_errors)
    if worst in (EXIT_DONE, EXIT_ROW_ERRORS):
        return worst
    if worst == EXIT_INTERRUPTED:
        raise Interrupted("interrupted; the same command goes on")
    ranks_of = ", ".join(str(member.rank.index) for member, code in zip(members, codes, strict=True) if code == worst)
    raise CrewError(f"rank {ranks_of} ended with {worst}; its own lines above say why", worst)
