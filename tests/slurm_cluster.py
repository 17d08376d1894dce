"""A real Slurm on this machine for the length of a `with`: slurmctld and slurmd of two nodes with two fake GPUs each.

Needs no systemd and no /etc/slurm: everything lies in one folder, all daemons listen on 127.0.0.1. Ports are taken
free, so several may run beside each other. What Slurm is started with was measured with Debian's 22.05.
"""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "munge", "sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
NODES = ("n1", "n2")
GPUS_PER_NODE = 2

CONF = """\
ClusterName=fluxci
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket,cred_expire=5
CredType=cred/munge
MailProg=/bin/true
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={base}/ctld
SlurmdSpoolDir={base}/spool-%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
JobContainerType=job_container/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait={kill_wait}
MinJobAge=300
InactiveLimit=0
Waittime=0
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
{nodes}
PartitionName=gpu Nodes={names} Default=YES MaxTime=60 DefaultTime=30 State=UP PriorityTier=1
PartitionName=urgent Nodes={names} MaxTime=60 DefaultTime=5 State=UP PriorityTier=10
"""


def missing() -> str | None:
    """Why no Slurm can be started here; None where it can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if absent:
        return f"Slurm is not installed here ({', '.join(absent)}): apt-get install slurm-wlm slurm-client munge"
    if os.geteuid() != 0:
        return "the test Slurm starts as root: its fake GPUs are device nodes"
    return None


class Cluster:
    """A running Slurm; `environ` is what its commands need."""

    def __init__(self, base: Path, *, kill_wait: int) -> None:
        self.base = base
        self.environ = {**os.environ, "SLURM_CONF": f"{base}/slurm.conf", "PATH": PATH}
        self._write_conf(kill_wait)

    def start(self) -> None:
        self._do("munged", "--force", f"--key-file={self.base}/munge.key", f"--socket={self.base}/munge.socket",
                 f"--pid-file={self.base}/munged.pid", f"--log-file={self.base}/munged.log",
                 f"--seed-file={self.base}/munge.seed", "--num-threads=2")  # fmt: skip
        self._do("slurmctld", "-c", "-f", f"{self.base}/slurm.conf")
        for node in NODES:
            self.start_node(node)
        until(lambda: set(self._do("sinfo", "-h", "-o", "%T").split()) == {"idle"}, "idle nodes", 60)

    def stop(self) -> None:
        """End the jobs first: a slurmd that is killed leaves them alive."""
        with contextlib.suppress(subprocess.SubprocessError, TimeoutError):
            self._do("scancel", "--quiet", "--full", "--signal=KILL", "-u", "root")
            self._do("scancel", "--quiet", "-u", "root")
            until(lambda: not self._do("squeue", "-h"), "an empty queue", 20)
        for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld", "munged"):
            self._end(name, signal.SIGTERM)

    def start_node(self, node: str) -> None:
        self._do("slurmd", "-N", node, "-f", f"{self.base}/slurm.conf")

    def lose_node(self, node: str) -> None:
        """Its slurmd dies and slurmctld gives it up; what ran there runs on, and nobody can reach it."""
        self._end(f"slurmd-{node}", signal.SIGKILL)
        self._do("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def submit(self, *arguments: str | Path, **environ: str) -> str:
        """sbatch; returns the job id."""
        return self._do("sbatch", "--parsable", *map(str, arguments), **environ).strip()

    def command(self, *arguments: str) -> str:
        return self._do(*arguments)

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, FAILED, CANCELLED, ... of a job or one array element (`7_1`)."""
        fields = dict(word.partition("=")[::2] for word in self._do("scontrol", "-o", "show", "job", job).split())
        return fields["JobState"]

    def restarts(self, job: str) -> int:
        fields = dict(word.partition("=")[::2] for word in self._do("scontrol", "-o", "show", "job", job).split())
        return int(fields["Restarts"])

    def wait_for(self, job: str, *states: str, timeout_s: float = 240) -> str:
        until(lambda: self.state(job) in states, f"job {job} to be {' or '.join(states)}", timeout_s)
        return self.state(job)

    def _do(self, program: str, *arguments: str, **environ: str) -> str:
        done = subprocess.run(
            [program, *arguments], env={**self.environ, **environ}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{program} {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def _end(self, name: str, number: int) -> None:
        pid_file = self.base / f"{name}.pid"
        if not pid_file.exists():
            return
        pid = int(pid_file.read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            with contextlib.suppress(TimeoutError):
                until(lambda: not _lives(pid), f"the end of {name}", 10)
            os.kill(pid, signal.SIGKILL)
        pid_file.unlink(missing_ok=True)

    def _write_conf(self, kill_wait: int) -> None:
        (self.base / "ctld").mkdir()
        (self.base / "munge.key").write_bytes(os.urandom(1024))
        (self.base / "munge.key").chmod(0o600)
        for gpu in range(GPUS_PER_NODE):  # a regular file is refused: these are copies of /dev/null
            os.mknod(self.base / f"gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        host = socket.gethostname().partition(".")[0]
        port, *ports = free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_port} CPUs=8 RealMemory=4000 "
            f"Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
            for node, node_port in zip(NODES, ports, strict=True)
        ]
        for node in NODES:
            (self.base / f"spool-{node}").mkdir()
        conf = CONF.format(
            host=host, port=port, base=self.base, nodes="\n".join(nodes), names=",".join(NODES), kill_wait=kill_wait
        )
        (self.base / "slurm.conf").write_text(conf)
        (self.base / "gres.conf").write_text(f"Name=gpu File={self.base}/gpu[0-{GPUS_PER_NODE - 1}]\n")
        (self.base / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _lives(pid: int) -> bool:
    """A zombie counts as gone: the first process of a container may never reap."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(holds: Callable[[], object], what: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.1)


@contextlib.contextmanager
def cluster(base: Path, *, kill_wait: int = 30) -> Iterator[Cluster]:
    """`base` is a folder whose path is short: munge's socket lies in it. `kill_wait`: s between TERM and KILL."""
    made = Cluster(base, kill_wait=kill_wait)
    try:
        made.start()
        yield made
    finally:
        made.stop()
