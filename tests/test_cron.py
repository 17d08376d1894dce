"""jobs/cron.sh as cron starts it: no HOME, no PATH, no terminal, and a mail for whatever is printed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from test_owners import until
from test_run import TESTS, manifest, rows, sound

JOBS = TESTS.parent / "jobs"
SHIM = """#!/bin/sh
FAKE_SLOW_S=$(cat {folder}/slow 2>/dev/null || echo 0)
export FAKE_SLOW_S
shift 2  # -m fluxbatch
exec {python} {script} run "$@"
"""


JOB = """# @package _global_
manifest: {path: m.parquet}
run: {name: nightly}
sampler: {num_inference_steps: 2}
plan: {batch_size: 4, shard_size: 10}
"""


def line_of_the_example(folder: Path) -> str:
    """The command of crontab.example, for a job in `folder`."""
    text = (JOBS / "crontab.example").read_text()
    [line] = re.findall(r"^30 1 \* \* \* (.*)$", text, flags=re.MULTILINE)
    line = line.replace("/srv/fluxbatch/jobs", shlex.quote(str(JOBS))).replace("/srv/catalogue", str(folder))
    shim = folder / "python"
    shim.write_text(SHIM.format(folder=folder, python=sys.executable, script=TESTS / "run_fake.py"))
    shim.chmod(0o755)
    return f"PYTHON={shim} {line}"


def cron(line: str) -> subprocess.Popen[str]:
    """As Vixie cron does: /bin/sh -c, with next to nothing in the environment."""
    return subprocess.Popen(
        ["/usr/bin/env", "-i", "SHELL=/bin/sh", "LOGNAME=nobody", "/bin/sh", "-c", line],
        cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_night_a_start_too_many_and_a_mail_when_a_person_must_look(tmp_path: Path) -> None:
    manifest(tmp_path / "m.parquet", rows(25))
    (tmp_path / "conf" / "job").mkdir(parents=True)
    (tmp_path / "conf" / "job" / "nightly.yaml").write_text(JOB)
    line, log = line_of_the_example(tmp_path), tmp_path / "nightly.log"
    run = tmp_path / "outputs" / "nightly"

    (tmp_path / "slow").write_text("0.5")
    first = cron(line)
    until((run / "locks" / "rank-00000.json").exists)
    second = cron(line)
    assert (second.communicate(timeout=120)[0], second.returncode) == ("", 6), "nobody is woken up for that"
    assert "belongs to a live run" in log.read_text()
    (tmp_path / "slow").unlink()
    assert (first.communicate(timeout=240)[0], first.returncode) == ("", 0)
    assert "exit 0" in log.read_text() and "written: 25" in log.read_text()
    sound(run)

    log.write_text("x" * 1_000_001)
    broken = cron(f"{line} plan.batch_size=0")
    mail = broken.communicate(timeout=120)[0]
    assert broken.returncode == 2 and "plan.batch_size must be" in mail
    assert (tmp_path / "nightly.log.1").stat().st_size == 1_000_001 and "xxx" not in mail
