"""One job on several ranks: who they are, how shards are dealt, who plans, who helps, and who finishes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Faults
from forge import Done, Forge, forge
from test_owners import until
from test_run import TESTS, data_files, do, ids_written, manifest, rows, settings, sound

from fluxbatch import config, helping
from fluxbatch.command import run_command
from fluxbatch.compose import with_config
from fluxbatch.config import PlanConfig
from fluxbatch.errors import ConfigError
from fluxbatch.plan import deal, rates
from fluxbatch.plan.cut import PlanPart, plan_part
from fluxbatch.plan.planfile import RunPlan
from fluxbatch.plan.rates import Observed
from fluxbatch.processes import ranks
from fluxbatch.records import Bucket
from fluxbatch.reports.report import status, status_words
from fluxbatch.share import Share
from fluxbatch.storage.folder import RunFolder
from fluxbatch.storage.lease import Lease, live_owners, read_owner
from fluxbatch.telemetry import throughput

BIG, SMALL = Bucket(2048, 2048, 50), Bucket(256, 256, 4)
WORLD_SIZES = (1, 2, 3, 8, 64)


def mixed(**options: Any) -> PlanPart:
    """30 shards of large images and then 70 of small ones: neighbours that cost the same."""
    return plan_part({BIG: 300, SMALL: 700}, plan=PlanConfig(batch_size=4, shard_size=10), **options)


# The deal


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_shard_has_one_rank_and_no_rank_has_a_shard_more_than_it_must(world_size: int) -> None:
    part = mixed()
    shares = [deal.shards_of([part], rank, world_size) for rank in range(world_size)]
    assert sorted(shard for share in shares for shard in share) == list(range(100))
    loads = deal.loads([part], world_size)
    assert max(loads) - min(loads) <= max(part.shard_costs()), "nobody could be spared a whole shard"


def test_ranks_of_unlike_shards_have_even_work_where_every_nth_shard_would_not_be() -> None:
    sides = {Bucket(side, side, 28): 10 for side in (1024, 896, 768, 640, 512, 384)}  # a shard each
    part = plan_part(sides, plan=PlanConfig(batch_size=5, shard_size=10))
    costs, loads = part.shard_costs(), deal.loads([part], 2)
    every_second = [int(costs[rank::2].sum()) for rank in range(2)]
    assert max(every_second) / sum(costs) > 0.58
    assert max(loads) / sum(costs) < 0.51


def test_what_images_really_took_decides_the_deal() -> None:
    counts, plan = {BIG: 30, SMALL: 30}, PlanConfig(batch_size=5, shard_size=10)
    by_size = plan_part(counts, plan=plan)
    measured = plan_part(counts, plan=plan, image_s=lambda bucket: 1.0 if bucket == BIG else 50.0)
    assert deal.owners([by_size], 2).tolist() == [0, 1, 0, 1, 1, 1]
    assert deal.owners([measured], 2).tolist() == [1, 1, 1, 0, 1, 0]


def test_a_shards_cost_is_its_launches_padding_too() -> None:
    part = plan_part({BIG: 15, SMALL: 8}, plan=PlanConfig(batch_size=4, shard_size=10), image_s=lambda bucket: 1.0)
    batches = [[batch.size for batch in part.shard(index).batches] for index in range(3)]
    assert part.shard_costs().tolist() == [sum(sizes) * 10**6 for sizes in batches] == [12e6, 16e6, 4e6]


def test_a_script_for_more_ranks_than_shards_says_so_in_a_line_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def warned(*words: str) -> list[str]:
        caplog.clear()
        assert run_command(["jobs", "slurm", *words, *settings(tmp_path)]) == 0
        assert "would have nothing" not in capsys.readouterr().out, "that is the script"
        return caplog.messages

    assert warned("--array", "4") == [], "a manifest that is not there yet"
    manifest(tmp_path / "m.parquet", rows(25))  # three shards
    assert warned("--array", "3") == warned("--tasks", "3") == []
    [line] = warned("--array", "4")
    assert line == (
        "4 ranks for 3 shards: 1 of them would have nothing to draw; "
        "ask for fewer, or plan smaller shards (plan.shard_size=10)"
    )
    assert "4 ranks for 3 shards" in warned("--tasks", "2", "run.devices=[cpu,cpu]")[0]
    do(settings(tmp_path, "plan.shard_size=5"))
    assert warned("--array", "5") == [], "the shards of the plan that stands"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rows_that_are_added_move_no_shard_that_was_dealt_before(world_size: int) -> None:
    first = mixed()
    second = plan_part(
        {BIG: 100}, plan=PlanConfig(batch_size=4, shard_size=10), index=1, first_shard=100, first_batch=500
    )
    before, after = deal.owners([first], world_size), deal.owners([first, second], world_size)
    assert after[:100].tolist() == before.tolist()
    assert len(after) == 110


def test_what_launches_took_in_earlier_runs_is_kept_in_the_plan(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(30))
    slow = Bucket(64, 96, 2)
    seen = Observed("elsewhere", "", 100, 100 * 60.0, 50.0, 70.0, 1.0, None, "png-1", None)

    def remember(cfg: config.JobConfig) -> int:
        rates.remember(cfg, device="a CPU", observed={slow: seen})
        return 0

    with_config(settings(tmp_path), remember)
    do(settings(tmp_path, "run.rank=0", "run.world_size=2"))
    plan = RunPlan.open(RunFolder(tmp_path / "run"))
    assert plan is not None
    found = {run.bucket: run.image_s for part in plan.parts for run in part.runs}
    assert found[slow] == 60.0 and 0 < found[Bucket(64, 64, 2)] < 60.0, "the other shapes are scaled from it"


# Who we are

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
PMI = {"PMI_RANK": "4", "PMI_SIZE": "5"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN | SRUN | OPEN_MPI | PMI, (3, 8, 1)),
        (SRUN | OPEN_MPI | PMI, (2, 4, 0)),
        (OPEN_MPI | PMI, (1, 6, 1)),
        (PMI, (4, 5, 0)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (0, 1, 0)),
    ],
    ids=["torchrun", "srun", "Open MPI", "PMI", "a batch script"],
)
def test_launchers_are_asked_in_order(environ: dict[str, str], expected: tuple[int, int, int]) -> None:
    rank = ranks.resolve(config.RunConfig(), environ)
    assert (rank.index, rank.world_size, rank.local) == expected


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"RANK": "1"}, "got RANK=1 without WORLD_SIZE and LOCAL_RANK; unset it, or give run.rank"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "as torchrun does, got RANK=1, WORLD_SIZE=2 without LOCAL_RANK; unset them"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, "got SLURM_NTASKS=4, SLURM_STEP_ID=0 without SLURM_PROCID"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "got OMPI_COMM_WORLD_RANK=1 without OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "2"}, "got PMI_SIZE=2 without PMI_RANK"),
        (TORCHRUN | {"RANK": "x"}, "RANK must be a whole number, got 'x'"),
        (TORCHRUN | {"RANK": "8"}, "the rank must be from 0 to the world size - 1, got 8 of 8"),
    ],
)
def test_a_half_set_environment_is_one_sentence(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ranks.resolve(config.RunConfig(), environ)
    assert sentence in str(refused.value)


# Real processes that work together


@pytest.fixture(scope="module")
def forges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Forge]]:
    with ExitStack() as stack:
        yield [stack.enter_context(forge(tmp_path_factory.mktemp("forge"))) for _ in range(3)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The data files of one process."""
    folder = tmp_path_factory.mktemp("whole")
    manifest(folder / "m.parquet", rows(60))
    do(settings(folder))
    return data_files(folder / "run")


class Together:
    """Ranks of one job in processes of their own, each with its environment."""

    def __init__(self, forges: list[Forge], tmp_path: Path, *overrides: str) -> None:
        manifest(tmp_path / "m.parquet", rows(60))
        self.folder = RunFolder(tmp_path / "run")
        self.done: dict[int, Done] = {}
        self._forges, self._settings = forges, settings(tmp_path, "run.world_size=3", *overrides)
        self._threads: list[threading.Thread] = []
        self._cache = f"{tmp_path}/cache"  # what other tests measured must not decide the deal

    def start(self, rank: int, **environ: str) -> None:
        self._threads.append(threading.Thread(target=self._run, args=(rank, environ)))
        self._threads[-1].start()

    def _run(self, rank: int, environ: dict[str, str]) -> None:
        self.done[rank] = self._forges[rank](
            [*self._settings, f"run.rank={rank}"], **{"FLUXBATCH_CACHE": self._cache, **environ}
        )

    def words_so_far(self, rank: int) -> Path:
        """The file that holds what a rank says, from its start on."""
        path = self._forges[rank].stderr
        path.write_text("")
        return path

    def end(self) -> list[int]:
        for thread in self._threads:
            thread.join(120)
        return [self.done[rank].returncode for rank in sorted(self.done)]

    def words(self, rank: int) -> str:
        return self.done[rank].stderr

    def must_be_whole(self, whole: dict[str, str], faults: Faults) -> None:
        assert data_files(self.folder.root) == whole
        assert self.folder.success.exists()
        faults.rows(asked=[row["id"] for row in rows(60)], found=ids_written(self.folder.root))
        sound(self.folder.root)
        assert not live_owners(self.folder) and not list(self.folder.locks.glob("shard-*"))


def test_one_rank_plans_while_the_others_wait(
    tmp_path: Path, forges: list[Forge], whole: dict[str, str], faults: Faults
) -> None:
    job = Together(forges, tmp_path)
    told = job.words_so_far(0), job.words_so_far(2)
    patience = f"while [ $(cat {told[0]} {told[1]} | grep -c 'waiting for the plan') -lt 2 ]; do sleep 0.1; done"
    job.start(1, DO_AT="temporary:4", DO=f"touch {tmp_path}/planning; {patience}")  # lease, turn, job.json, plan
    until((tmp_path / "planning").exists)
    job.start(0)
    job.start(2)
    assert job.end() == [0, 0, 0]
    assert "60 rows were added to the plan" in job.words(1)
    for waiting in (0, 2):
        assert "waiting for the plan, which another rank makes: host" in job.words(waiting)
        assert "were added to the plan" not in job.words(waiting)
    job.must_be_whole(whole, faults)


def test_a_rank_that_is_killed_while_it_plans_is_followed_by_the_next(
    tmp_path: Path, forges: list[Forge], whole: dict[str, str], faults: Faults
) -> None:
    job = Together(forges, tmp_path)
    job.start(0, DO_AT="temporary:4", DO=f"touch {tmp_path}/planning; sleep 1; kill -9 $PPID")
    until((tmp_path / "planning").exists)
    job.start(1)
    job.start(2)
    assert job.end() == [-signal.SIGKILL, 0, 0]
    faults.kill()
    assert sorted("were added to the plan" in job.words(rank) for rank in (1, 2)) == [False, True]
    job.must_be_whole(whole, faults)  # the dead rank's shards too


def test_ranks_that_are_done_help_the_slow_one_and_no_row_is_drawn_twice(
    tmp_path: Path, forges: list[Forge], whole: dict[str, str], faults: Faults
) -> None:
    job = Together(forges, tmp_path, "pipeline=serial", "pipeline.encode_window=1")  # looks one batch ahead
    patience = f"while ! grep -q 'helps rank 1' {job.words_so_far(0)}; do sleep 0.1; done"
    # Lease, turn, job.json, plan, the claim of a shard; then its first batch.
    job.start(1, DO_AT="temporary:6", DO=f"touch {tmp_path}/drawing; {patience}")
    until((tmp_path / "drawing").exists)
    job.start(0)
    assert job.end() == [0, 0]
    assert "this rank's share is done; it helps rank 1 with shard" in job.words(0)
    assert throughput.made_again(throughput.read_log(job.folder)) == 0
    assert status(job.folder)["pending"], "a rank that was never here keeps its share"
    job.start(2)
    job.end()
    job.must_be_whole(whole, faults)


@pytest.mark.parametrize("helps", [True, False])
def test_the_shards_of_a_killed_rank_are_taken_over_only_if_ranks_help(
    tmp_path: Path, forges: list[Forge], whole: dict[str, str], faults: Faults, helps: bool
) -> None:
    job = Together(forges, tmp_path, f"run.help_ranks={helps}")
    job.start(2, KILL_AT="temporary:7")
    job.end()
    job.start(0)
    job.start(1)
    assert job.end() == [0, 0, -signal.SIGKILL]
    faults.kill()
    assert (status(job.folder)["pending"] == 0) is helps
    job.start(2)  # in any case it may come back, late
    assert job.end()[-1] == 0
    job.must_be_whole(whole, faults)


def test_of_ranks_that_all_finish_at_once_each_may_write_the_report(
    tmp_path: Path, forges: list[Forge], whole: dict[str, str], faults: Faults
) -> None:
    """Each holds its last ledger line until all have theirs: every one of them finds the job complete."""
    job = Together(forges, tmp_path, "run.help_ranks=false")
    waits = f"[ $(ls {tmp_path} | grep -c at-) -lt 3 ] && sleep 0.1"
    barrier = f"touch {tmp_path}/at-$$; for i in $(seq 300); do {waits}; done"
    for rank in range(3):
        job.start(rank, DO_AT="ledger:2", DO=barrier)  # of the two shards of each rank
    assert job.end() == [0, 0, 0]
    faults.race(3)
    assert all("pending: 0" in job.done[rank].stdout for rank in range(3))
    assert json.loads(job.folder.report_json.read_bytes())["written"] == 60
    assert all(path.exists() for path in job.folder.told())
    job.must_be_whole(whole, faults)


def test_a_revised_shard_of_our_own_that_a_dead_helper_left_is_made_and_that_of_a_live_rank_is_not(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    with Lease(folder, rank=0, world_size=2) as ours:
        ledger = SimpleNamespace(complete=lambda shard: False)
        plan = SimpleNamespace(shard=lambda index: index, revisions={7: 1})
        share = SimpleNamespace(folder=folder, ledger=ledger, plan=plan, lease=ours, begun={1})
        owner = read_owner(folder.lease(0))
        assert helping._free(share, [1, 4, 7], owner) == [4, 7]
        assert helping._free(share, [1, 4, 7], owner | {"pid": os.getppid(), "process_started": None}) == [4]


def test_who_waits_for_a_shards_file_waits_for_the_one_that_another_thread_waits_for_too() -> None:
    """The thread that prefetches hands a shard over while the main thread is about to read the ledger."""
    share, made = Share(*[None] * 6), threading.Event()  # type: ignore[arg-type]
    share.settle = lambda shard: None  # type: ignore[method-assign]
    share._settling = share._settler.submit(made.wait)
    threads = [threading.Thread(target=share._settle_behind, args=(None,))]
    threads[0].start()
    until(lambda: share._settling is None)
    threads.append(threading.Thread(target=share._wait_for_settling))
    threads[1].start()
    threads[1].join(0.2)
    waits = threads[1].is_alive()
    made.set()
    for thread in threads:
        thread.join()
    share.__exit__(None)
    assert waits


def test_status_tells_of_one_job_and_of_ranks_that_are_not_there(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    do(settings(tmp_path, "run.rank=0", "run.world_size=3"))
    folder = RunFolder(tmp_path / "run")
    with Lease(folder, rank=1, world_size=3):
        found = status(folder)
    assert (found["rows"], found["written"], found["pending"]) == (60, 20, 40)
    assert found["ranks_absent"] == [0, 2]
    words = status_words(found, now_s=time.time())
    assert "1 of 3 ranks running" in words and "not running: rank 0, 2" in words


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("torchrun", path=Path(sys.executable).parent) is None, reason="torchrun is not there")
def test_a_real_torchrun_makes_the_bytes_of_one_process(tmp_path: Path, whole: dict[str, str], faults: Faults) -> None:
    manifest(tmp_path / "m.parquet", rows(60))
    command = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node=3", str(TESTS / "run_fake.py"), "run"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "PMI"))}
    done = subprocess.run([*command, *settings(tmp_path)], env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} of 3" in done.stderr for rank in range(3))
    assert data_files(tmp_path / "run") == whole
    faults.rows(asked=[row["id"] for row in rows(60)], found=ids_written(tmp_path / "run"))
