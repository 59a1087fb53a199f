"""A Slurm of the test's own: two nodes on this machine, with their own configuration, key and ports."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = ("node1", "node2")
_CONF = """\
ClusterName=private
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
KillWait=20
# Ports of jobs follow from their numbers, and other tests may have a Slurm as well.
FirstJobId={first}
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory={memory}
NodeName=node2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory={memory}
PartitionName=all Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """What this machine lacks for a Slurm, as a reason to skip a test; empty if it lacks nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return (
        f"not installed: {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)" if absent else ""
    )


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])


class LocalSlurm:
    """A running Slurm.

    Args:
        folder: folder with everything of it; the path is short, because there is a socket in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: str, cwd: Path | None = None) -> str:
        """Run a command of Slurm, and return what it prints."""
        done = subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{words}: {done.stderr}{done.stdout}\n{self.logs()}"
        return done.stdout

    def submit(self, script: str, folder: Path) -> str:
        """Submit a batch script from a folder, and return the number of the job."""
        path = folder / "job.sh"
        path.write_text(script)
        return self.call("sbatch", "--parsable", str(path), cwd=folder).strip()

    def state(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        words = self.call("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, what: str, done: Callable[[], bool], seconds: float) -> None:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"{what}: not within {seconds} s\n{self.logs()}"
            # Slurm tells nobody that a job has changed its state.
            time.sleep(0.2)

    def start_again(self, job: str) -> None:
        """Start a job that was put back into the queue, which Slurm would do two minutes later."""
        self.wait(f"job {job} in the queue", lambda: self.state(job)["JobState"] == "PENDING", 120)
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    def logs(self) -> str:
        """The last lines of its logs."""
        return "\n".join(
            f"{path.name}: {line}"
            for path in sorted(self.folder.glob("*.log"))
            for line in path.read_text(errors="replace").splitlines()[-5:]
        )

    def end_jobs(self) -> None:
        """End all jobs, and wait until their processes are gone."""
        self.call("scancel", "--quiet", "--user", getpass.getuser())
        self.wait("the queue is empty", lambda: not self.call("squeue", "--noheader").strip(), 90)


@contextmanager
def local_slurm(cpus: int = 2, memory_mb: int = 16000) -> Iterator[LocalSlurm]:
    """Start a Slurm with two nodes, and end it with all of its jobs.

    Args:
        cpus: cores that each node claims to have.
        memory_mb: memory in MB that each node claims to have.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    (folder / "state").mkdir()
    conf = _CONF.format(
        folder=folder,
        user=getpass.getuser(),
        ports=_free_ports(3),
        cpus=cpus,
        memory=memory_mb,
        first=secrets.randbelow(100_000) + 1,
    )
    (folder / "slurm.conf").write_text(conf)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    slurm = LocalSlurm(folder)
    munge = ["munged", "--foreground", "--force", *_munge_files(folder)]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(_daemon(slurm, munge))
        slurm.wait("munge is up", (folder / "munge.socket").exists, 30)
        stack.enter_context(_daemon(slurm, ["slurmctld", "-D"]))
        for node in NODES:
            stack.enter_context(_daemon(slurm, ["slurmd", "-D", "-N", node]))
        slurm.wait("the nodes are up", lambda: _idle_nodes(slurm) == len(NODES), 60)
        stack.callback(slurm.end_jobs)
        yield slurm


def _idle_nodes(slurm: LocalSlurm) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%t"],
        env=slurm.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.stdout.split().count("idle")


def _munge_files(folder: Path) -> list[str]:
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [f"--{option}={folder}/munge.{name}" for option, name in names.items()]


@contextmanager
def _daemon(slurm: LocalSlurm, words: Sequence[str]) -> Iterator[None]:
    with (slurm.folder / f"{words[0]}-output.log").open("ab") as output:
        process = subprocess.Popen(words, env=slurm.environment, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
