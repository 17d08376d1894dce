"""One worker of a cluster: joins a run folder on its node, loads the model once, and makes the shards that it is given.

An ordinary rank but for its orders: its shards come one at a time, and its stop comes by a call instead of a signal.
Knows no Ray and no other worker. Whatever happens is an `Answer`; nothing is raised to the driver.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from fluxbatch import __version__, drawing, errors
from fluxbatch.config import JobConfig
from fluxbatch.drawing import Drawing, LoadModel
from fluxbatch.errors import FluxbatchError, FolderBusyError, Interrupted
from fluxbatch.output import job
from fluxbatch.output.ledger import Ledger
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.processes.ranks import Rank
from fluxbatch.share import Share
from fluxbatch.stop import Stop
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lease import Lease

log = logging.getLogger(__name__)

PROBE_S = 5.0  # a network file system may show a new file that late


@dataclass(frozen=True)
class Order:
    """What a worker is told once."""

    cfg: JobConfig  # resolved: no worker composes settings
    root: str
    rank: int
    probe: str  # a file that the driver has just made in the folder
    versions: dict[str, str | None]
    directory: str  # that of the driver: relative paths stand on it


@dataclass(frozen=True)
class Answer:
    """`state`: ready; refused (this node), busy (this rank is taken); done, stopped, failed."""

    state: str
    error: FluxbatchError | OSError | None = None
    gpu: str | None = None
    said: tuple[tuple[int, str], ...] = ()  # log level and words

    @property
    def ends_job(self) -> bool:
        """Whether this would happen with any other shard too."""
        return isinstance(self.error, errors.ConfigError | errors.ManifestError | errors.TooManyFailures | OSError)


class Worker:
    """One GPU's process. `load` replaces the model (tests)."""

    def __init__(self, order: Order, load: LoadModel | None = None) -> None:
        self._order, self._load = order, load
        self._notes = _Notes(logging.INFO if order.rank == 1 else logging.WARNING)  # the others say the same
        self._rank = Rank(index=order.rank)
        self._open = ExitStack()
        self._stop: Stop | None = None
        self._gpu: str | None = None

    def join(self) -> Answer:
        """See whether this node can work here, and take our place in the folder."""
        return self._answer(self._join)

    def prepare(self) -> Answer:
        """Load the model."""
        return self._answer(self._prepare)

    def make(self, shard: int) -> Answer:
        """Draw what a shard misses, and commit it."""
        return self._answer(lambda: self._make(shard))

    def stop(self, reason: str) -> None:
        """Finish what is in flight; called while `make` runs. After run.grace_s this process ends."""
        if self._stop is not None:
            self._stop.request(reason)

    def close(self) -> Answer:
        """Leave the folder."""
        return self._answer(self._close)

    def _join(self) -> str:
        folder = RunFolder(Path(self._order.root))
        refusal = _other_versions(self._order.versions) or _other_folder(folder, self._order.probe)
        if refusal:
            raise _Refused(refusal)
        with contextlib.suppress(OSError):
            os.chdir(self._order.directory)
        telemetry = replace(self._order.cfg.telemetry, progress="off", prometheus_textfile=None)  # the driver tells
        cfg = replace(self._order.cfg, telemetry=telemetry)
        stop = self._stop = self._open.enter_context(Stop(grace_s=cfg.run.grace_s))
        lease = Lease(folder, rank=self._rank.index, world_size=1, superseded=stop.request)
        try:
            self._open.enter_context(lease)
        except OSError as error:
            raise _Refused(f"it cannot write to output.dir: {error.filename}: {error.strerror}") from error
        stop.leave = lease.release
        plan = RunPlan.open(folder)
        if plan is None:
            raise _Refused(f"{folder.plan()} is not there")
        committed = Ledger.read(folder, plan.revisions)
        self._share = self._open.enter_context(Share(folder, plan, committed, cfg, self._rank, lease))
        return "ready"

    def _prepare(self) -> str:
        assert self._stop is not None, "it has joined"
        cfg = self._share.cfg
        if self._load is None:
            drawing.check_model(cfg)
        drawing.settle_packages(cfg, self._rank, drawing.launches_of(self._share.plan))
        model = (self._load or drawing.load_model)(cfg, self._rank)
        self._gpu = drawing.device_name(model)
        self._drawing = self._open.enter_context(Drawing(self._share, lambda: model, self._stop))
        return "ready"

    def _make(self, shard: int) -> str:
        try:
            self._share.refresh()  # another worker may have been at it
            work = self._share.open([shard])
            if work:
                self._drawing.draw(work)
            self._share.refresh()  # its file is made behind the drawing
            return "stopped" if shard in self._share.pending else "done"
        finally:
            self._share.forget(shard)

    def _close(self) -> str:
        self._open.close()
        return "done"

    def _answer(self, work: Callable[[], str]) -> Answer:
        error: FluxbatchError | OSError | None = None
        with self._notes:
            try:
                state = work()
            except _Refused as refused:
                state, error = "refused", FluxbatchError(str(refused))
            except FolderBusyError as busy:
                state, error = "busy", busy
            except Interrupted:
                state = "stopped"
            except Exception as raised:  # any of them is this shard's or this node's, and the driver decides
                state, error = "failed", portable(raised, Path(self._order.root))
        return Answer(state, error, self._gpu, self._notes.taken())


class _Refused(Exception):
    """This node cannot work for this job."""


def _other_versions(wanted: dict[str, str | None]) -> str | None:
    """A node with other software draws other bits. The build behind a + may differ: a driver has no need of CUDA."""
    here = versions()
    others = [name for name in wanted if _public(wanted[name]) != _public(here.get(name))]
    if not others:
        return None
    told = ", ".join(f"{name} {here.get(name) or 'missing'} for {wanted[name] or 'none'}" for name in others)
    return f"it has other versions than the driver ({told}), which draw other bits; install the same"


def versions() -> dict[str, str | None]:
    """What must be equal on all nodes."""
    return {"fluxbatch": __version__, **job.versions()}


def _public(version: str | None) -> str:
    return (version or "").partition("+")[0]


def _other_folder(folder: RunFolder, probe: str) -> str | None:
    until_s = time.monotonic() + PROBE_S
    while not (folder.locks / probe).exists():
        if time.monotonic() >= until_s:
            return (
                f"it does not see output.dir {folder.root} as the driver does ({probe} is not in its locks/): the run "
                "folder must be on a file system that all nodes share, under one path"
            )
        time.sleep(0.2)
    return None


def portable(error: Exception, root: Path) -> FluxbatchError | OSError:
    """An error as the driver can take it: it may lack the library that it comes from. OSError: of the run folder."""
    if isinstance(error, OSError) and Path(str(error.filename or "")).is_relative_to(root):
        return OSError(error.errno, error.strerror, error.filename)
    if isinstance(error, FluxbatchError):
        kind = type(error) if hasattr(errors, type(error).__name__) else FluxbatchError
        told = kind(str(error))
    else:
        told = FluxbatchError(f"{type(error).__name__}: {error}")
        log.warning("%s", "".join(traceback.format_exception(error)).strip())
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


class _Notes(logging.Handler):
    """What is logged while the context is open, to be told by the driver; Ray keeps it in its own files too."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._records: list[tuple[int, str]] = []
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("fluxbatch").setLevel(logging.INFO)

    def __enter__(self) -> None:
        logging.getLogger("fluxbatch").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fluxbatch").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.levelno, record.getMessage()))

    def taken(self) -> tuple[tuple[int, str], ...]:
        records, self._records = self._records, []
        return tuple(records)
