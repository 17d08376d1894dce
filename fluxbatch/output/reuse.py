"""Another night's run: what its rows were drawn from, and its images that are still right. Only ever reads its folder.

An image is taken over when its row has the same id and everything that draws it is unchanged; the manifest's own
columns may differ, for they come from the new manifest.
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image

from fluxbatch import config
from fluxbatch.config import JobConfig
from fluxbatch.errors import ConfigError, FluxbatchError
from fluxbatch.manifest.rows import DRAWING, drawing_digests
from fluxbatch.output import job, stored_images
from fluxbatch.output.ledger import Ledger, failed_rows
from fluxbatch.output.stored_images import Reader
from fluxbatch.output.writers import StoredRow
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.records import Batch, Bucket, Request, RowResult, ShardCommit
from fluxbatch.storage import commit
from fluxbatch.storage.folder import RunFolder

log = logging.getLogger(__name__)

NO_MATTER = {"png": {"output.quality"}, "jpeg": {"output.png_level"}, "webp": {"output.png_level"}}
OPEN_FILES = 8  # data files of the other run: rows mostly come in its order


@dataclass(frozen=True)
class EarlierRun:
    """A run folder whose settings give the bytes of ours."""

    folder: RunFolder
    plan: RunPlan
    ledger: Ledger

    @property
    def path(self) -> str:
        return str(self.folder.root)

    @cached_property
    def sizes(self) -> Mapping[Bucket, int]:
        """The batch size of each bucket."""
        return {run.bucket: run.batch_size for part in self.plan.parts for run in part.runs}

    def drawings(self) -> Iterator[pa.Table]:
        """What each row was drawn from, its shard, and whether its image is written; of a row tried again, each try."""
        complete = np.array([shard.index for shard in self.plan.shards() if self.ledger.complete(shard)], np.int64)
        failed = failed_rows(self.folder, self.ledger, self.plan)
        for rows in self.plan.live_rows(list(DRAWING)):
            shard = rows["shard"].to_numpy()
            written = np.isin(shard, complete)
            for index in set(np.unique(shard).tolist()) & set(failed):
                written &= (shard != index) | ~np.array(pc.is_in(rows["id"], pa.array(sorted(failed[index]))))
            yield pa.table(
                {"id": rows["id"], "drawing": drawing_digests(rows), "shard": shard, "written": pa.array(written)}
            )


def open_earlier(cfg: JobConfig) -> EarlierRun | None:
    """The run that `run.reuse_from` names; None where it names none. ConfigError where its images are not ours.

    A job that has its plan goes on without it: what cannot be taken over is drawn.
    """
    if not cfg.run.reuse_from:
        return None
    folder, ours = RunFolder(config.place(cfg.run.reuse_from, key="run.reuse_from")), RunFolder(config.output_dir(cfg))
    if folder.root.resolve() == ours.root.resolve():
        raise ConfigError(f"run.reuse_from must be another folder than output.dir, got {folder.root} for both")
    try:
        return _opened(folder, cfg)
    except FluxbatchError as error:
        if not ours.plan().exists():
            raise
        log.warning("%s; the rest is drawn", error)
        return None


def _opened(folder: RunFolder, cfg: JobConfig) -> EarlierRun:
    stored, plan = job.read_job(folder), RunPlan.open(folder)
    if stored is None or plan is None:
        raise ConfigError(f"run.reuse_from must be a run folder (with job.json and plan.parquet), got {folder.root}")
    changed = job.differences(plan.settings or stored["fingerprint"], cfg)
    changed = {key: change for key, change in changed.items() if key not in _no_matter(cfg)}
    if changed:
        told = ", ".join(f"{key} must be {change['was']!r}, got {change['is']!r}" for key, change in changed.items())
        raise ConfigError(f"{told}: the images of run.reuse_from={folder.root} were made so; without it all are drawn")
    return EarlierRun(folder, plan, Ledger.read(folder, plan.revisions))


def _no_matter(cfg: JobConfig) -> set[str]:
    """Settings that decide no byte of an image file of this format."""
    return {"output.kind"} | NO_MATTER[cfg.output.image_format]


class Donor:
    """Images of an earlier run for batches of ours, each checked before it is handed out."""

    def __init__(self, earlier: EarlierRun, *, image_format: str, memory_gib: float) -> None:
        self._earlier = earlier
        self._format = image_format.upper()
        self._scratch = tempfile.TemporaryDirectory(prefix="fluxbatch-")  # else it spills beside us
        config: dict[str, Any] = {"memory_limit": f"{int(memory_gib * 1024)}MiB", "threads": 2}
        self._db = duckdb.connect(config=config | {"temp_directory": self._scratch.name})
        self._db.execute("CREATE TABLE earlier (id VARCHAR, drawing VARCHAR, shard BIGINT, written BOOLEAN)")
        for rows in earlier.drawings():
            self._db.register("incoming", rows)
            self._db.execute("INSERT INTO earlier BY NAME SELECT * FROM incoming")
            self._db.unregister("incoming")
        self._is_whole = cache(self._compare)  # each file is summed once, in whatever order its rows are asked for
        self._images = lru_cache(maxsize=OPEN_FILES)(self._open)

    def locate(self, rows: pa.Table) -> dict[str, int]:
        """For rows of our plan, by id the shard over there that holds their image; unless it has changed meanwhile."""
        self._db.register("wanted", pa.table({"id": rows["id"], "drawing": drawing_digests(rows)}))
        found = self._db.execute(
            "SELECT id, arg_max(shard, shard) FROM earlier JOIN wanted USING (id, drawing) WHERE written GROUP BY id"
        ).fetchall()
        self._db.unregister("wanted")
        return dict(found)

    def results(self, batch: Batch, shards: Mapping[str, int]) -> tuple[RowResult, ...] | None:
        """The images of a batch; None where one of them is not to be had, for a batch is drawn as a whole."""
        results = []
        for request in batch.requests:
            stored = self._stored(request, shards.get(request.id))
            if stored is None:
                return None
            results.append(RowResult(request.id, stored.image, truncated=stored.truncated))
        return tuple(results)

    def _stored(self, request: Request, shard: int | None) -> StoredRow | None:
        read = self._images(shard).get(request.id) if shard is not None else None
        try:
            stored = read() if read else None
        except (FluxbatchError, OSError) as error:
            log.warning("%s; its batch is drawn", error)
            return None
        if stored is None or not stored.sound or not self._fits(stored.image or b"", request):
            log.warning("%s has no sound image of %r; its batch is drawn", self._earlier.path, request.id)
            return None
        return stored

    def _fits(self, image: bytes, request: Request) -> bool:
        try:
            with Image.open(io.BytesIO(image)) as opened:  # its header; the checksum of its file answers for the rest
                return (opened.format, opened.size) == (self._format, (request.width, request.height))
        except (OSError, Image.DecompressionBombError):
            return False

    def _open(self, shard: int) -> Mapping[str, Reader]:
        """The images of a shard; none where its file is not the one that its ledger line names."""
        path = self._earlier.folder.root / self._line(shard).file
        try:
            return stored_images.open_images(path) if self._is_whole(shard) else {}
        except FluxbatchError as error:
            log.warning("%s; what it held is drawn", error)
            return {}

    def _compare(self, shard: int) -> bool:
        line = self._line(shard)
        path = self._earlier.folder.root / line.file
        try:
            whole = commit.sha256_file(path) == line.sha256
        except OSError:
            whole = False
        if not whole:
            log.warning("%s is not the file that its ledger line names; what it held is drawn", path)
        return whole

    def _line(self, shard: int) -> ShardCommit:
        return next(line for line in self._earlier.ledger.commits[shard] if line.rows)


def open_donor(path: str, cfg: JobConfig) -> Donor | None:
    """What a plan was compared with; None, with a warning, where it is gone or its images would be others now."""
    try:
        earlier = _opened(RunFolder(config.place(path, key="run.reuse_from")), cfg)
        return Donor(earlier, image_format=cfg.output.image_format, memory_gib=cfg.manifest.memory_gib)
    except FluxbatchError as error:
        log.warning("%s; the rows that were to be taken over are drawn", error)
        return None
