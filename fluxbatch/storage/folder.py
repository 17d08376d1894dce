"""Every path of a run folder, in one place. Knows names only: it opens, makes and deletes nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SHARDS_TOGETHER = 10_000  # in one folder of data/ and failed/: what the Hub takes, and file systems list quickly
SHARD_FILE = re.compile(
    r"(data|failed)/(?:shards-(\d{5,})/)?shard-(\d{5,})(?:-r(\d{5,}))?(\.parquet|\.tar|/metadata\.jsonl)"
)
SHARD_SUFFIX = {"parquet": ".parquet", "webdataset": ".tar", "folder": ""}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths under `root`. Shard numbers have five digits, in tars six; `-r00002` marks a revision."""

    root: Path

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    def plan(self, part: int = 0) -> Path:
        """`plan.parquet`; rows added or tried again later stand in `plan-00001.parquet` and so on."""
        return self.root / ("plan.parquet" if part == 0 else f"plan-{part:05d}.parquet")

    @property
    def rejected(self) -> Path:
        return self.root / "rejected.parquet"

    @property
    def data(self) -> Path:
        return self.root / "data"

    def shard(self, index: int, output: str, revision: int = 0) -> Path:
        """The shard's file, or its folder where `output` is `folder`."""
        digits = 6 if output == "webdataset" else 5
        return _together(self.data, index) / f"shard-{index:0{digits}d}{_revised(revision)}{SHARD_SUFFIX[output]}"

    @property
    def failures(self) -> Path:
        return self.root / "failed"

    def failed_shard(self, index: int, revision: int = 0) -> Path:
        return _together(self.failures, index) / f"shard-{index:05d}{_revised(revision)}.parquet"

    @property
    def batches(self) -> Path:
        return self.root / "batches"

    def open_shard(self, shard: int) -> Path:
        """The batches of one open shard: a rank makes and lists its own folders only, whatever the others do."""
        return self.batches / f"shard-{shard:05d}"

    def batch(self, index: int, shard: int) -> Path:
        return self.open_shard(shard) / f"batch-{index:08d}.arrow"

    @property
    def ledgers(self) -> Path:
        return self.root / "ledger"

    def ledger(self, rank: int) -> Path:
        return self.ledgers / f"rank-{rank:05d}.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def metrics(self, rank: int) -> Path:
        return self.logs / f"metrics-rank-{rank:05d}.jsonl"

    def starts(self, rank: int) -> Path:
        return self.logs / f"starts-rank-{rank:05d}.jsonl"

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    def lease(self, rank: int) -> Path:
        return self.locks / f"rank-{rank:05d}.json"

    @property
    def planning(self) -> Path:
        """Who plans, while the other ranks wait."""
        return self.locks / "planning.json"

    def claim(self, shard: int) -> Path:
        """Who makes a shard now, where there are several ranks."""
        return self.locks / f"shard-{shard:05d}.json"

    @property
    def aside(self) -> Path:
        """What `verify --repair` took out of the way."""
        return self.root / "set_aside"

    def own_folders(self) -> tuple[Path, ...]:
        """Every folder that is written to."""
        return self.data, self.failures, self.batches, self.ledgers, self.logs, self.locks, self.aside

    @property
    def card(self) -> Path:
        return self.root / "README.md"

    @property
    def report_json(self) -> Path:
        return self.root / "report.json"

    @property
    def report_html(self) -> Path:
        return self.root / "report.html"

    @property
    def contact_sheet(self) -> Path:
        return self.root / "contact_sheet.png"

    def told(self) -> tuple[Path, ...]:
        """What a complete job tells of itself; all of it is made again from the other files."""
        return self.card, self.report_json, self.report_html, self.contact_sheet

    @property
    def success(self) -> Path:
        return self.root / "_SUCCESS"


def _together(place: Path, shard: int) -> Path:
    """`place` for the first shards, a sub-folder of it for each further ten thousand."""
    first = shard // SHARDS_TOGETHER * SHARDS_TOGETHER
    return place / f"shards-{first:05d}" if first else place


def shard_of(file: str) -> int | None:
    """The shard that a path relative to the run folder belongs to by its name; None for any other name."""
    match = SHARD_FILE.fullmatch(file)
    if match is None or (match[1] == "failed" and match[5] != ".parquet"):
        return None
    shard = int(match[3])
    return shard if int(match[2] or 0) == shard // SHARDS_TOGETHER * SHARDS_TOGETHER else None


def revision_of(file: str) -> int:
    """The revision that the name of a shard's file tells; 0 for the first."""
    match = SHARD_FILE.fullmatch(file)
    return int(match[4] or 0) if match else 0


def _revised(revision: int) -> str:
    """`-r00002` for what is left of a shard after plan part 2 took rows from it."""
    return f"-r{revision:05d}" if revision else ""
