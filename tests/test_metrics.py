"""The batch log, the GPU sampler, the Prometheus file and the terminal's view."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import struct
import sys
import termios
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxbatch.config import TelemetryConfig
from fluxbatch.records import (
    Batch,
    BatchPlan,
    Bucket,
    CompressedBatch,
    Request,
    RowFailure,
    RowResult,
    StageTimes,
)
from fluxbatch.storage.folder import RunFolder
from fluxbatch.telemetry import metrics
from fluxbatch.telemetry.metrics import GpuSampler, MetricsLog, PeakMemory, write_prometheus
from fluxbatch.telemetry.progress import Progress, duration, one_line
from fluxbatch.telemetry.throughput import recent_lines

UUID = "8b6f0000-1111-2222-3333-444455556666"


def make_batch(
    *, ok: int = 4, failed: int = 0, size: int = 4, index: int = 0, times: StageTimes | None = None
) -> CompressedBatch:
    ids = [f"b{index}-{i}" for i in range(ok + failed)]
    bucket = Bucket(64, 96, 4)
    plan = BatchPlan(index=index, shard=0, bucket=bucket, first_row=0, num_rows=len(ids), size=size)
    requests = tuple(Request(i, "a red circle", None, 64, 96, 4, 3.5, 7) for i in ids)
    lost = RowFailure("denoise", "non_finite", "NaN in the latents")
    results = [RowResult(i, b"png") for i in ids[:ok]] + [RowResult(i, None, failure=lost) for i in ids[ok:]]
    return CompressedBatch(Batch(plan, requests), tuple(results), times or StageTimes())


def no_gpu() -> GpuSampler:
    return GpuSampler(False, None)


def lines_of(folder: RunFolder, rank: int = 0) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not strict JSON")

    return [json.loads(line, parse_constant=refuse) for line in folder.metrics(rank).read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


# ---- the batch log


def test_the_end_says_the_most_that_each_bucket_needed_and_nothing_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    peaks = PeakMemory()
    for allocated_gib, reserved_gib in ((20.5, 24.0), (25.25, 23.0)):
        peaks.add(make_batch(times=StageTimes(peak_allocated_gib=allocated_gib, peak_reserved_gib=reserved_gib)))
    with caplog.at_level(logging.INFO):
        peaks.say()
        on_cpu = PeakMemory()
        on_cpu.add(make_batch())
        on_cpu.say()
    assert [r.getMessage() for r in caplog.records] == ["peak GPU memory, 64x96-4: 25.25 GiB allocated, 24.00 reserved"]


def test_every_line_has_the_same_keys_whatever_the_batch(folder: RunFolder) -> None:
    log = MetricsLog(folder, 0, no_gpu())
    log.record(make_batch(times=StageTimes(encode_ms=1.5, wait_ms={"prefetch->launch": 2.25})), wall_s=0.2)
    log.record(make_batch(ok=0, failed=3, index=1), wall_s=0.0)
    first, second = lines_of(folder)
    assert list(first) == list(second)
    assert {"time", "rank", "rows_ok", "rows_failed", "rows_padded", "wait_compress_commit_ms", "gpu_joules"} <= set(
        first
    )
    assert (first["encode_ms"], first["wait_prefetch_launch_ms"], first["wait_launch_transfer_ms"]) == (1.5, 2.25, None)
    assert (first["bucket"], first["height"], first["width"], first["num_inference_steps"]) == ("64x96-4", 64, 96, 4)


def test_time_is_utc_in_milliseconds(folder: RunFolder) -> None:
    line = MetricsLog(folder, 3, no_gpu()).record(make_batch(), wall_s=1)
    date, _, fraction = line["time"].partition(".")
    assert len(date) == 19 and fraction.endswith("+00:00") and len(fraction) == 9
    assert line["rank"] == 3


def test_numbers_that_are_not_finite_become_null(folder: RunFolder) -> None:
    times = StageTimes(encode_ms=float("nan"), wait_ms={"prefetch->launch": float("inf")})
    MetricsLog(folder, 0, no_gpu()).record(make_batch(times=times), wall_s=float("inf"))
    line = lines_of(folder)[0]
    assert (line["encode_ms"], line["wait_prefetch_launch_ms"], line["wall_s"]) == (None, None, None)


def test_a_line_torn_by_a_kill_is_closed_off(folder: RunFolder) -> None:
    MetricsLog(folder, 0, no_gpu()).record(make_batch(), wall_s=1)
    with open(folder.metrics(0), "a") as file:
        file.write('{"time": "2026-')
    MetricsLog(folder, 0, no_gpu()).record(make_batch(index=1), wall_s=1)
    assert [line["batch"] for line in recent_lines(folder)[0]] == [0, 1]
    assert folder.metrics(0).read_text().splitlines()[1] == '{"time": "2026-'


def test_recent_lines_are_the_last_of_each_rank(folder: RunFolder) -> None:
    for rank in (0, 2):
        log = MetricsLog(folder, rank, no_gpu())
        for index in range(100):
            log.record(make_batch(index=index), wall_s=1)
    found = recent_lines(folder, count=20)
    assert {rank: [line["batch"] for line in lines] for rank, lines in found.items()} == {
        rank: list(range(80, 100)) for rank in (0, 2)
    }


def test_br49_padding_and_failed_rows_never_count_as_images(folder: RunFolder) -> None:
    log = MetricsLog(folder, 0, no_gpu())
    half = log.record(make_batch(ok=2, failed=2), wall_s=0.2)
    tail = log.record(make_batch(ok=1, size=4, index=1), wall_s=0.2)
    assert (half["rows_ok"], half["rows_failed"], half["rows_padded"], half["images_per_s"]) == (2, 2, 0, 10.0)
    assert (tail["rows_ok"], tail["rows_padded"], tail["images_per_s"]) == (1, 3, 5.0)


def test_br49_no_time_gives_no_rate(folder: RunFolder) -> None:
    assert MetricsLog(folder, 0, no_gpu()).record(make_batch(), wall_s=0.0)["images_per_s"] is None


def test_br49_the_calendar_clock_only_stamps_lines(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    class SetBack(metrics.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(1999, 1, 1, tzinfo=tz)

    log = MetricsLog(folder, 0, no_gpu())
    before = log.record(make_batch(), wall_s=0.2)
    monkeypatch.setattr(metrics, "datetime", SetBack)
    after = log.record(make_batch(index=1), wall_s=0.2)
    assert after["time"] == "1999-01-01T00:00:00.000+00:00"
    assert (after["wall_s"], after["images_per_s"]) == (before["wall_s"], before["images_per_s"]) == (0.2, 20.0)


def test_br49_the_first_batch_of_a_shape_is_marked(folder: RunFolder) -> None:
    line = MetricsLog(folder, 0, no_gpu()).record(make_batch(times=StageTimes(first_of_shape=True)), wall_s=30.2)
    assert line["first_of_shape"] is True


# ---- the GPU


class FakeCard:
    def __init__(self, uuid: str | bytes, *, watts: int, mig: bool = False) -> None:
        self.uuid, self.watts, self.mig, self.energy_mj = uuid, watts, mig, 5_000_000


def fake_nvml(*cards: FakeCard, **changes: Any) -> types.ModuleType:
    """A module of pynvml's name and shape. `changes` replaces its functions; None takes one away."""
    functions: dict[str, Any] = {
        "NVML_CLOCK_SM": 1,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda index: cards[index],
        "nvmlDeviceGetUUID": lambda card: card.uuid,
        "nvmlDeviceGetMigMode": lambda card: (int(card.mig), int(card.mig)),
        "nvmlDeviceGetUtilizationRates": lambda card: types.SimpleNamespace(gpu=97, memory=40),
        "nvmlDeviceGetMemoryInfo": lambda card: types.SimpleNamespace(used=3 * 2**30, total=4 * 2**30),
        "nvmlDeviceGetPowerUsage": lambda card: card.watts * 1000,
        "nvmlDeviceGetClockInfo": lambda card, kind: 1980,
        "nvmlDeviceGetTemperature": lambda card, kind: 61,
        "nvmlDeviceGetTotalEnergyConsumption": lambda card: card.energy_mj,
        **changes,
    }
    module = types.ModuleType("pynvml")
    vars(module).update({name: value for name, value in functions.items() if value is not None})
    return module


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[types.ModuleType | None], None]:
    return lambda module: monkeypatch.setitem(sys.modules, "pynvml", module)


def sample(uuid: str | None = UUID, *, enabled: bool = True) -> dict[str, Any]:
    with GpuSampler(enabled, uuid) as gpu:
        return gpu.sample()


def test_the_card_of_torch_is_measured(install: Callable[..., None]) -> None:
    install(fake_nvml(FakeCard("GPU-other", watts=100), FakeCard(f"GPU-{UUID}", watts=650)))
    assert sample() == {
        "gpu_uuid": f"GPU-{UUID}",
        "gpu_utilization_percent": 97.0,
        "gpu_memory_used_gib": 3.0,
        "gpu_power_w": 650.0,
        "gpu_sm_clock_mhz": 1980.0,
        "gpu_temperature_c": 61.0,
        "gpu_joules": 0.0,
    }


def test_joules_come_from_the_energy_counter(install: Callable[..., None]) -> None:
    card = FakeCard(UUID, watts=650)
    install(fake_nvml(card))
    with GpuSampler(True, UUID) as gpu:
        card.energy_mj += 123_000
        assert gpu.sample()["gpu_joules"] == 123.0
        card.energy_mj += 2_000
        assert gpu.sample()["gpu_joules"] == 2.0


@pytest.mark.parametrize("counter", [None, "reset"])
def test_joules_without_a_counter_are_power_times_time(install: Callable[..., None], counter: str | None) -> None:
    card, clock = FakeCard(UUID, watts=500), Clock()
    install(fake_nvml(card, **({} if counter else {"nvmlDeviceGetTotalEnergyConsumption": None})))
    with GpuSampler(True, UUID, clock=clock) as gpu:
        card.energy_mj = 0
        clock.now_s += 2
        assert gpu.sample()["gpu_joules"] == 1000.0


def all_null(fields: dict[str, Any]) -> bool:
    return set(fields) == set(metrics.GPU_FIELDS) and set(fields.values()) == {None}


def raising(message: str) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise RuntimeError(message)

    return function


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(None, id="no library"),
        pytest.param(types.ModuleType("pynvml"), id="another library of the same name"),
        pytest.param(fake_nvml(nvmlInit=raising("Driver Not Loaded")), id="nvmlInit raises"),
        pytest.param(fake_nvml(nvmlDeviceGetCount=raising("lost")), id="raises after init"),
        pytest.param(fake_nvml(nvmlDeviceGetHandleByIndex=None, nvmlDeviceGetCount=lambda: 1), id="lacks a function"),
    ],
)
def test_br46_broken_nvml_is_one_warning_and_nulls(
    install: Callable[..., None], module: types.ModuleType | None, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    install(module)
    with GpuSampler(True, UUID) as gpu:
        log = MetricsLog(folder, 0, gpu)
        lines = [log.record(make_batch(index=index), wall_s=1) for index in range(3)]
    assert all(all_null({name: line[name] for name in metrics.GPU_FIELDS}) for line in lines)
    assert len(lines_of(folder)) == 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_br46_names_as_bytes_are_understood(install: Callable[..., None]) -> None:
    install(fake_nvml(FakeCard(f"GPU-{UUID}".encode(), watts=300)))
    assert (sample()["gpu_uuid"], sample()["gpu_power_w"]) == (f"GPU-{UUID}", 300.0)


def test_br46_one_reading_that_fails_leaves_the_others(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    install(
        fake_nvml(
            FakeCard(UUID, watts=300),
            nvmlDeviceGetTemperature=None,
            nvmlDeviceGetClockInfo=lambda card, kind: b"fast",
            nvmlDeviceGetUtilizationRates=raising("Not Supported"),
        )
    )
    fields = sample()
    assert {name for name, value in fields.items() if value is None} == {
        "gpu_temperature_c",
        "gpu_sm_clock_mhz",
        "gpu_utilization_percent",
    }
    assert len(caplog.records) == 1


def test_br46_nan_of_a_broken_library_is_null_in_the_log(install: Callable[..., None], folder: RunFolder) -> None:
    install(fake_nvml(FakeCard(UUID, watts=300), nvmlDeviceGetPowerUsage=lambda card: float("nan")))
    with GpuSampler(True, UUID) as gpu:
        MetricsLog(folder, 0, gpu).record(make_batch(), wall_s=1)
    assert lines_of(folder)[0]["gpu_power_w"] is None


@pytest.mark.parametrize("enabled, uuid", [(False, UUID), (True, None)])
def test_nvml_is_not_touched_without_need(
    install: Callable[..., None], enabled: bool, uuid: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    install(fake_nvml(nvmlInit=raising("touched")))
    assert all_null(sample(uuid, enabled=enabled)) and not caplog.records


@pytest.mark.parametrize(
    "uuid, cards",
    [
        pytest.param("GPU-0000", [FakeCard(f"GPU-{UUID}", watts=1)], id="hidden from NVML"),
        pytest.param(f"MIG-{UUID}", [FakeCard(f"GPU-{UUID}", watts=1)], id="a slice's own UUID"),
        pytest.param(UUID, [FakeCard(f"GPU-{UUID}", watts=1, mig=True)], id="a divided card"),
        pytest.param(UUID, [], id="no card"),
    ],
)
def test_br47_a_card_that_cannot_be_matched_is_null_never_another_card(
    install: Callable[..., None], uuid: str, cards: list[FakeCard], caplog: pytest.LogCaptureFixture
) -> None:
    install(fake_nvml(*cards))
    assert all_null(sample(uuid))
    assert len(caplog.records) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_br47_the_order_of_nvml_does_not_matter(install: Callable[..., None], order: tuple[int, ...]) -> None:
    cards = [FakeCard("GPU-aaaa", watts=1), FakeCard(f"GPU-{UUID.upper()}", watts=2), FakeCard("GPU-cccc", watts=3)]
    install(fake_nvml(*(cards[i] for i in order)))
    assert sample()["gpu_power_w"] == 2.0


# ---- Prometheus

STATUS = {
    "run": 'a "night"\nrun\\1', "rows": 12, "written": 7, "failed": 1, "rejected": 2, "pending": 2, "images_per_s": 3.5,
    "eta_s": None, "complete": False, "last_commit": "2026-01-31T06:00:00.250+00:00", "last_success": None,
    "running": ["node pid 7 rank 0"], "gpu_busy_share": 0.98, "gpu_power_w": None,
}  # fmt: skip


def test_prometheus_file_declares_and_escapes_every_metric(tmp_path: Path) -> None:
    path = tmp_path / "fluxbatch.prom"
    path.write_text("old")
    write_prometheus(path, STATUS)
    text = path.read_text()
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    names = {line.partition("{")[0] for line in samples}
    assert 'fluxbatch_rows{run="a \\"night\\"\\nrun\\\\1",state="pending"} 2' in samples
    assert all(f"# HELP {name} " in text and f"# TYPE {name} gauge" in text for name in names)
    assert any(text.endswith(" 1769839200.25") for text in samples)
    assert "fluxbatch_complete" in names and "fluxbatch_eta_seconds" not in names  # unknown is absent, not zero
    assert list(tmp_path.iterdir()) == [path] and text.endswith("\n")


def test_prometheus_reads_it_and_finds_what_alerts_need(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    write_prometheus(tmp_path / "x.prom", STATUS | {"last_success": 1769830000.5})
    families = list(parser.text_string_to_metric_families((tmp_path / "x.prom").read_text()))
    samples = {(s.name, s.labels.get("state")): s for family in families for s in family.samples}
    assert {sample.labels["run"] for sample in samples.values()} == {STATUS["run"]}
    assert samples["fluxbatch_rows", "failed"].value == 1
    assert samples["fluxbatch_last_success_timestamp_seconds", None].value == 1769830000.5
    assert samples["fluxbatch_gpu_busy_ratio", None].value == 0.98
    assert samples["fluxbatch_running_processes", None].value == 1
    assert samples["fluxbatch_seconds_since_last_commit", None].value > 0
    assert ("fluxbatch_gpu_power_watts", None) not in samples


def test_the_last_success_outlives_a_run_that_has_not_succeeded_yet(tmp_path: Path) -> None:
    path = tmp_path / "x.prom"
    write_prometheus(path, STATUS | {"last_success": 1769830000.5, "run": "yesterday"})
    write_prometheus(path, STATUS)
    write_prometheus(path, STATUS)
    assert "fluxbatch_last_success_timestamp_seconds" in path.read_text() and " 1769830000.5\n" in path.read_text()
    assert "yesterday" not in path.read_text()


# ---- the terminal's view


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def line(**changes: Any) -> dict[str, Any]:
    return {"rows_ok": 4, "rows_failed": 0, "wall_s": 2.0, "bucket": "64x96-4", **changes}


def telemetry(**changes: Any) -> TelemetryConfig:
    return TelemetryConfig(interval_s=10.0, **changes)


def test_br44_without_a_terminal_plain_lines_at_most_one_an_interval() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(telemetry(), total=400, done=0, stream=out, clock=clock) as progress:
        for _ in range(100):
            progress.update(line())
            clock.now_s += 1.0
    lines = out.getvalue().splitlines()
    assert len(lines) == 11 and lines[-1].startswith("400/400 rows (100.0 %)")
    assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()


@pytest.mark.parametrize(("columns", "drawn"), [(0, False), (100, True)])
def test_a_terminal_without_columns_gets_lines_instead_of_an_empty_bar(columns: int, drawn: bool) -> None:
    shown, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(end, "w") as stream, Progress(telemetry(), total=4, done=0, stream=stream) as progress:
        progress.update(line())
        said = os.read(shown, 65536).decode()
    os.close(shown)
    assert ("4/4 rows (100.0 %)" in said) is not drawn and bool(said.strip())


def test_br44_lines_are_flushed_as_they_are_said() -> None:
    class Buffered(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    out = Buffered()
    with Progress(telemetry(), total=8, done=0, stream=out) as progress:
        progress.update(line())
        assert out.flushed == "4/8 rows (50.0 %), about 2 s left, 2.00 images/s, 64x96-4\n"


def test_failures_and_rows_done_before_are_counted() -> None:
    out = io.StringIO()
    with Progress(telemetry(), total=1000, done=600, stream=out) as progress:
        progress.update(line(rows_ok=2, rows_failed=2))
    assert out.getvalue() == "604/1000 rows (60.4 %), about 3:20 left, 1.00 images/s, 2 failed, 64x96-4\n"


def test_the_time_left_goes_by_work_and_a_first_launch_does_not_unsettle_it() -> None:
    out = io.StringIO()
    work = {"1024x1024-28": 16.0, "256x256-28": 1.0}
    with Progress(telemetry(), total=108, done=0, work=work, work_left=8 * 16 + 100, stream=out) as progress:
        progress.update(line(bucket="1024x1024-28", wall_s=900.0, first_of_shape=True))
        progress.update(line(bucket="1024x1024-28", wall_s=64.0, first_of_shape=False))
    assert "about 1:40 left" in out.getvalue().splitlines()[-1]  # 100 small images, each a second


def test_gpu_use_and_power_are_told_where_they_are_known() -> None:
    out = io.StringIO()
    with Progress(telemetry(), total=400, done=0, stream=out) as progress:
        progress.update(line(gpu_utilization_percent=98.0, gpu_power_w=651.7))
    assert out.getvalue() == "4/400 rows (1.0 %), about 3:20 left, 2.00 images/s, 64x96-4, GPU 98 % at 652 W\n"


def test_nothing_done_says_nothing() -> None:
    out = io.StringIO()
    with Progress(telemetry(), total=0, done=0, stream=out):
        pass
    assert out.getvalue() == ""


def test_off_says_nothing_but_notes() -> None:
    out = io.StringIO()
    with Progress(telemetry(progress="off"), total=8, done=0, stream=out) as progress:
        progress.update(line())
        progress.note("compiling 64x96-4")
    assert out.getvalue() == "compiling 64x96-4\n"


def test_a_terminal_gets_a_bar_that_notes_and_logs_do_not_tear() -> None:
    out = Terminal()
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        with Progress(telemetry(), total=8, done=2, stream=out) as progress:
            progress.update(line())
            progress.note("half")
        assert handler in logging.getLogger().handlers
    finally:
        logging.getLogger().removeHandler(handler)
    assert "6/8 rows" in out.getvalue() and "2.00 images/s" in out.getvalue()
    assert "\rhalf\n" in out.getvalue().replace(" ", "")


@pytest.mark.parametrize("mode", ["bar", "lines"])
def test_br05_a_prompt_in_a_note_never_breaks_the_line(mode: str) -> None:
    out = io.StringIO()
    hostile = "a\nb\rc\td\x00e\x1b[31mf\u2028g\x85h\u202ei 李明 👩\u200d🚀"
    with Progress(telemetry(progress=mode), total=1, done=0, stream=out) as progress:
        progress.note(hostile)
    said = [text for text in out.getvalue().replace("\r", "\n").split("\n") if "李明" in text]
    assert said == ["a\\nb\\rc\\td\\x00e\\x1b[31mf\\u2028g\\x85h\\u202ei 李明 👩\u200d🚀"] == [one_line(hostile)]


@pytest.mark.parametrize(
    "seconds, words", [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (3599, "59:59"), (11045, "3:04:05")]
)
def test_durations_read_like_a_clock(seconds: float, words: str) -> None:
    assert duration(seconds) == words
