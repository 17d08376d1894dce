"""A long job of tiny batches through the real run, watched from inside: python soak.py FOLDER BATCHES [key=value ...]

Prints one JSON object a tenth of the job: batches a second, CPU milliseconds a batch (which neighbours on the machine
disturb less), resident memory, open files, threads; then one for the whole, with the size of the batch log.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pyarrow as pa
import pyarrow.parquet as pq
from fake_model import FakeModel

from fluxbatch import config, config_rules, drawing, run
from fluxbatch.compose import with_config
from fluxbatch.telemetry import metrics

TENTHS = 10


class ForgetfulModel(FakeModel):
    """The fake without the books that it keeps for tests."""

    def _called(self, stage: str) -> None:
        super()._called(stage)
        for book in (self.encoded, self.rows, self.decoded_rows):
            book.clear()
        for old in list(self._texts)[1:-1000]:  # the first is the padding
            del self._texts[old]


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


class Watcher(metrics.MetricsLog):
    """The batch log, which also looks at the process at the end of each tenth."""

    batches = 0
    done = 0
    since_s = 0.0
    cpu_s = 0.0

    def record(self, done, *, wall_s):  # type: ignore[no-untyped-def]
        line = super().record(done, wall_s=wall_s)
        if Watcher.done == 0:
            Watcher.since_s, Watcher.cpu_s = time.monotonic(), time.process_time()
        Watcher.done += 1
        each = Watcher.batches // TENTHS
        if Watcher.done % each == 0:
            now_s, cpu_s = time.monotonic(), time.process_time()
            look = {
                "done": Watcher.done,
                "batches_per_s": round(each / (now_s - Watcher.since_s), 1),
                "cpu_ms_a_batch": round(1000 * (cpu_s - Watcher.cpu_s) / each, 3),
                "resident_mib": round(resident_mib(), 1),
                "open_files": len(list(Path("/proc/self/fd").iterdir())),
                "threads": threading.active_count(),
            }
            print(json.dumps(look), flush=True)
            Watcher.since_s, Watcher.cpu_s = now_s, cpu_s
        return line


def main(folder: Path, batches: int, overrides: list[str]) -> None:
    ids = [f"{number:06}" for number in range(batches)]
    rows = {"id": ids, "prompt": [f"a picture of {name}" for name in ids]}
    pq.write_table(pa.table(rows), folder / "m.parquet")
    Watcher.batches = batches
    drawing.MetricsLog = Watcher  # type: ignore[misc]
    settings = [f"manifest.path={folder}/m.parquet", f"output.dir={folder}/run", "plan.batch_size=1",
                "sampler.height=16", "sampler.width=16", "sampler.num_inference_steps=1", "telemetry.progress=off",
                *overrides]  # fmt: skip

    def job(cfg: config.JobConfig) -> int:
        config_rules.check(cfg)
        return run.run_job(cfg, load=lambda cfg, rank: ForgetfulModel())[1]

    began_s = time.monotonic()
    code = with_config(settings, job)
    log = (folder / "run" / "logs" / "metrics-rank-00000.jsonl").stat().st_size
    whole = {"exit_code": code, "wall_s": round(time.monotonic() - began_s, 1), "log_bytes_per_batch": log / batches}
    print(json.dumps(whole))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
