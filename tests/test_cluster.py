"""The parts of run.engine=ray that need no cluster: dealing, one worker, how it is started."""

import importlib.util
import json
import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_model import FakeModel
from test_run import data_files, do, manifest, rows, settings

from fluxbatch import config_rules, errors
from fluxbatch.cluster import require_ray
from fluxbatch.cluster.dealer import Dealer
from fluxbatch.cluster.worker import Order, Worker, portable, versions
from fluxbatch.compose import with_config
from fluxbatch.config import JobConfig
from fluxbatch.errors import ConfigError, FluxbatchError, ProcessLost, TooManyFailures
from fluxbatch.output import job
from fluxbatch.processes.ranks import Rank

JOBS = Path(__file__).parent.parent / "jobs"

# Dealing


def test_shards_are_dealt_in_order_and_each_once() -> None:
    dealer = Dealer([3, 1, 2], max_attempts=3)
    assert [dealer.next() for _ in range(4)] == [3, 1, 2, None]
    assert not dealer.is_over, "three are out, and may come back"
    for shard in (1, 2, 3):
        dealer.finish(shard)
    assert dealer.is_over and dealer.done == {1, 2, 3}


def test_a_shard_that_brings_nothing_goes_last_and_one_that_was_begun_goes_first() -> None:
    dealer = Dealer([1, 2, 3], max_attempts=3)
    first, second = dealer.next(), dealer.next()
    assert dealer.put_back(first, "its node died", brought=False)
    assert dealer.put_back(second, "its node died", brought=True)
    assert [dealer.next() for _ in range(3)] == [2, 3, 1]


def test_a_shard_is_given_up_after_so_many_attempts_in_a_row_that_bring_nothing() -> None:
    dealer = Dealer([1], max_attempts=2)
    for brought in (False, True, True, False):
        assert dealer.next() == 1
        assert dealer.put_back(1, "poisoned", brought=brought)
    assert dealer.next() == 1
    assert not dealer.put_back(1, "poisoned", brought=False)
    assert dealer.is_over and dealer.next() is None
    assert dealer.sentence().startswith("shard 1 could not be made in run.max_shard_attempts=2 attempts (poisoned)")


def test_a_shard_whose_worker_was_stopped_is_not_nearer_to_being_given_up() -> None:
    dealer = Dealer([1, 2], max_attempts=1)
    dealer.take_back(dealer.next())
    assert [dealer.next(), dealer.next()] == [1, 2] and not dealer.given_up


# One worker


class Site:
    """A planned folder as a driver leaves it, and orders for workers."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        manifest(folder / "m.parquet", rows(30))

        def interrupted() -> FakeModel:
            return FakeModel(fail_at={"tokenize": 1})

        with pytest.raises(RuntimeError):
            do(settings(folder), interrupted)
        self.root = folder / "run"
        (self.root / "locks" / "probe.json").touch()
        self.cfg = composed(*settings(folder), *overrides)

    def order(self, **changes: Any) -> Order:
        order = Order(self.cfg, str(self.root), 1, "probe.json", versions(), str(self.root))
        return replace(order, **changes)

    def worker(self, model: FakeModel | None = None, **changes: Any) -> Worker:
        return Worker(self.order(**changes), lambda cfg, rank: model or FakeModel())


def composed(*overrides: str) -> JobConfig:
    seen: list[JobConfig] = []
    with_config(list(overrides), lambda cfg: seen.append(cfg) or 0)
    return seen[0]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_worker_makes_the_shards_that_it_is_given_with_the_bytes_of_a_whole_run(tmp_path: Path, site: Site) -> None:
    worker = site.worker()
    assert [worker.join().state, worker.prepare().state] == ["ready", "ready"]
    assert (site.root / "locks" / "rank-00001.json").exists()
    assert [worker.make(shard).state for shard in (2, 0, 1)] == ["done"] * 3
    assert worker.make(1).state == "done", "made already: nothing to do"
    assert worker.close().state == "done"
    assert not (site.root / "locks" / "rank-00001.json").exists()
    do(settings(tmp_path, out="whole"))
    assert data_files(site.root) == data_files(tmp_path / "whole")
    assert (site.root / "logs" / "metrics-rank-00001.jsonl").read_text().count("\n") == 9


def test_a_worker_answers_with_what_went_wrong_and_makes_the_next_shard(site: Site) -> None:
    worker = site.worker(FakeModel(fail_at={"decode": 1}))
    worker.join(), worker.prepare()
    answer = worker.make(0)
    assert (answer.state, answer.ends_job) == ("failed", False)
    assert str(answer.error) == "RuntimeError: fake failure of decode"
    assert "shard 0" in answer.error.__notes__[0]
    assert any("Traceback" in words for _, words in answer.said)
    assert worker.make(1).state == "done"
    worker.close()


def test_a_worker_that_is_told_to_stop_finishes_its_batches_and_says_so(site: Site) -> None:
    model = FakeModel()
    worker = site.worker(model)
    model.hook = lambda stage, call: worker.stop("SIGTERM") if stage == "decode" else None
    worker.join(), worker.prepare()
    assert worker.make(0).state == "stopped"
    drawn = len(list((site.root / "batches").glob("*/batch-*")))
    assert 1 <= drawn < 3
    assert worker.make(1).state == "stopped", "nothing is begun any more"
    assert len(list((site.root / "batches").glob("*/batch-*"))) == drawn
    worker.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"probe": "other.json"}, "it does not see output.dir"),
        ({"versions": {**versions(), "torch": "1.0", "fluxbatch": "9"}}, "fluxbatch 0.1.0 for 9, torch "),
    ],
)
def test_a_node_with_another_folder_or_other_versions_is_refused_by_name(
    site: Site, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxbatch.cluster.worker.PROBE_S", 0.1)
    answer = site.worker(**changes).join()
    assert answer.state == "refused" and words in str(answer.error)
    assert not (site.root / "locks" / "rank-00001.json").exists()


def test_the_build_of_a_version_may_differ(site: Site) -> None:
    other = {name: f"{number}+cu128" if number else None for name, number in job.versions().items()}
    worker = site.worker(versions={**versions(), **other})
    assert worker.join().state == "ready"
    worker.close()


def test_a_place_that_another_copy_holds_is_busy(site: Site) -> None:
    first, second = site.worker(), site.worker()
    assert first.join().state == "ready"
    owner = site.root / "locks" / "rank-00001.json"
    owner.write_text(json.dumps(json.loads(owner.read_text()) | {"host": "elsewhere"}))
    assert second.join().state == "busy"
    owner.unlink()
    first.close()


def test_errors_reach_a_driver_that_lacks_their_library() -> None:
    root = Path("/data/run")
    full = portable(OSError(28, "No space left on device", "/data/run/data/x"), root)
    assert isinstance(full, OSError) and full.filename == "/data/run/data/x"
    assert type(portable(OSError(28, "No space left on device", "/tmp/x"), root)) is FluxbatchError
    lost = ProcessLost("the GPU is lost")
    lost.add_note("stage decode, shard 3")
    assert type(portable(lost, root)) is ProcessLost and portable(lost, root).__notes__ == ["stage decode, shard 3"]

    class Own(FluxbatchError):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    assert type(portable(Own(1, 2), root)) is FluxbatchError and str(portable(Own(1, 2), root)) == "1 and 2"
    assert type(portable(TooManyFailures("50 of 50"), root)) is TooManyFailures


# How it is started


def test_ray_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"run\.engine=ray needs fluxbatch\[ray\]"):
        require_ray(composed("run.engine=ray"), Rank())
    require_ray(composed(), Rank())


def test_a_rank_or_a_client_cannot_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="must be started once, for all GPUs, got rank 1 of 2"):
        require_ray(composed("run.engine=ray"), Rank(1, 2))
    with pytest.raises(ConfigError, match="on a file system that all nodes share, got s3://bucket/run"):
        require_ray(composed("run.engine=ray", "output.dir=s3://bucket/run"), Rank())
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match=r"got RAY_ADDRESS=ray://head:10001"):
        require_ray(composed("run.engine=ray"), Rank())


@pytest.mark.parametrize("value", ["''", "GPU:0", "GPU:many", "GPU", ":1", "GPU:1,"])
def test_resources_must_be_amounts(value: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.ray_resources must be null or amounts > 0 by name"):
        config_rules.check(composed(f"run.ray_resources={value}"))


def test_every_public_error_can_be_made_of_its_sentence() -> None:
    """`portable` does so."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FluxbatchError)]
    assert len(kinds) > 5 and all(str(kind("a sentence")) == "a sentence" for kind in kinds)


def test_the_manifest_for_kuberay_is_a_whole_ray_job() -> None:
    found = yaml.safe_load((JOBS / "ray_job.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayJob")
    spec = found["spec"]
    assert spec["shutdownAfterJobFinishes"] is True and spec["backoffLimit"] >= 1
    command = shlex.split(spec["entrypoint"])
    assert command[:3] == ["python", "-m", "fluxbatch"] and "run.engine=ray" in command
    cfg = composed(*(word for word in command[3:] if "=" in word))
    config_rules.check(cfg)
    cluster = spec["rayClusterSpec"]
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert workers["replicas"] >= workers["minReplicas"] >= 1
    mounted = [pod["template"]["spec"] for pod in (head, workers)]
    places = [pod["containers"][0]["volumeMounts"] for pod in mounted]
    assert places[0] == places[1], "head and workers see the run folder under one path"
    assert all(Path(str(cfg.output.dir)).is_relative_to(mount["mountPath"]) for mount in places[0][:1])
    assert mounted[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] >= 1
    assert "nvidia.com/gpu" not in mounted[0]["containers"][0]["resources"]["limits"]
    wait = {e["name"]: e["value"] for e in mounted[0]["containers"][0]["env"]}["RAY_JOB_STOP_WAIT_TIME_S"]
    assert int(wait) > cfg.run.grace_s, "a job that is stopped has its grace"
    assert all(pod["terminationGracePeriodSeconds"] > cfg.run.grace_s for pod in mounted)


def test_words_of_a_worker_are_kept_for_the_driver(site: Site) -> None:
    worker = site.worker()
    worker.join()
    logging.getLogger("fluxbatch.x").warning("not while it works")
    model = FakeModel(hook=lambda stage, call: logging.getLogger("fluxbatch.x").warning("%s", stage))
    worker._load = lambda cfg, rank: model
    worker.prepare()
    said = worker.make(0).said
    assert (logging.WARNING, "decode") in said and (logging.WARNING, "not while it works") not in said
    worker.close()
