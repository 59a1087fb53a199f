"""Commands of Slurm and of a run, as small programs that do on this machine what Slurm does on nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# What a job's script calls. Each notes in $NOTES that it was called.
_PROGRAMS = {
    "srun": f'exec {sys.executable} {__file__} "$@"',
    "scontrol": """
case "$1 $2" in
  "show hostnames") printf '%s\\n' ${NODES//,/ } ;;
  "show node") echo "NodeName=$4 Arch=x86_64 NodeAddr=$4.cluster NodeHostName=$4 Port=6818" ;;
  "show job") echo "JobId=$4 JobName=grpo TimeLimit=$LIMIT TimeMin=N/A" ;;
  *) echo "scontrol $*" >> "$NOTES"
     [ "$FAULT" != busy ] || [ "$(grep -c ^scontrol "$NOTES")" = 2 ] ;;
esac""",
    # The pauses of a script take no time.
    "sleep": 'case "$1" in 0) ;; 60) exec /bin/sleep 60 ;; *) echo "sleep $1" >> "$NOTES" ;; esac',
    "getent": 'printf \'%s STREAM %s\\n\' 127.0.1.1 "$2" 10.0.0.1 "$2"',
    # A server is up after a moment, and lasts.
    "grpo-serve": """
echo "server $SLURM_PROCID ${CUDA_VISIBLE_DEVICES:-none} $VLLM_API_KEY $*" >> "$NOTES"
[ "$FAULT" != server ] || exit 7
trap 'echo "server $SLURM_PROCID ends" >> "$NOTES"; exit' TERM
echo up > "$UP.$SLURM_PROCID"
sleep 60 & wait""",
    # The gate reads what each server, or node of Ray, writes, and so waits for it.
    "python": """
case "$*" in *--nodes=*|*http*) ;; *) echo "wait for head" >> "$NOTES"; exit ;; esac
[ "$FAULT" != server ] || sleep 60
for number in $SERVERS; do cat "$UP.$number" > /dev/null; done
[ "$FAULT" != gate ] || exit 2
echo "gate $*" >> "$NOTES\"""",
    "ray": """
echo "ray ${CUDA_VISIBLE_DEVICES-unset} $*" >> "$NOTES"
case "$*" in *--head*) name=head ;; *) name=$SLURM_PROCID ;; esac
echo up > "$UP.$name"
sleep 60 & wait""",
    "grpo": """
echo "trainer ${CUDA_VISIBLE_DEVICES-unset} $*" >> "$NOTES"
[ "$FAULT" != trainer ] || exit 2
[ -n "$LASTS" ] || exit 0
trap 'echo "trainer saves" >> "$NOTES"; exit 75' USR1
echo begun > "$LASTS"
sleep 60 & wait""",
}


class FakeSlurm:
    """A folder with the commands, and a job in it.

    Args:
        folder: empty folder.
        nodes: names of the job's nodes.
        servers: number of servers, or of workers of Ray.
        head: whether Ray has a head.
        fault: ``server``, ``gate`` or ``trainer``: what fails; ``busy``: Slurm, when it is first asked to
            take the job back.
        lasts: whether the trainer goes on until it is signaled.
        gpus: GPUs that a step gets.
    """

    def __init__(
        self,
        folder: Path,
        nodes: str = "node1",
        servers: int = 0,
        head: bool = False,
        fault: str = "",
        lasts: bool = False,
        gpus: str | None = None,
    ) -> None:
        self.folder = folder
        self._notes = folder / "notes"
        self._notes.touch()
        for name, body in _PROGRAMS.items():
            program = folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!/bin/bash\n{body}\n")
            program.chmod(0o755)
        engines = [*map(str, range(servers)), *(["head"] if head else [])]
        for engine in engines:
            os.mkfifo(folder / f"up.{engine}")
        self.begun = folder / "begun"
        os.mkfifo(self.begun)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "NOTES": str(self._notes),
            "NODES": nodes,
            "LIMIT": "1-00:00:00",
            "SERVERS": " ".join(engines),
            "UP": str(folder / "up"),
            "FAULT": fault,
            "LASTS": str(self.begun) if lasts else "",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": nodes,
        }
        if gpus is not None:
            self.environment["CUDA_VISIBLE_DEVICES"] = gpus

    def start(self, script: str, **environment: str) -> subprocess.Popen[str]:
        """Start a batch script as Slurm does."""
        (self.folder / "job.sh").write_text(script)
        return subprocess.Popen(
            ["bash", "job.sh"], cwd=self.folder, env={**self.environment, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def finish(self, process: subprocess.Popen[str], code: int) -> str:
        """Wait for a batch script, end its steps as Slurm does, and return what it has printed."""
        process.wait(60)
        # Steps are in the group of the script, also one that has only just begun.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == code, output
        return output

    @property
    def notes(self) -> list[str]:
        """What the commands have noted so far."""
        return self._notes.read_text().splitlines()


def _srun(words: list[str]) -> int:
    """Run each task of a step on this machine, pass signals on, and return the code that srun returns."""
    options: dict[str, str] = {}
    while words[0].startswith("--"):
        name, _, value = words.pop(0).removeprefix("--").partition("=")
        options[name] = value
    with Path(os.environ["NOTES"]).open("a") as notes:
        notes.write(f"step {options['job-name']} on {options.get('nodelist', 'any')}\n")
    tasks: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, frame: Any) -> None:
        if len(tasks) < int(options["ntasks"]):
            early.append(number)
            return
        for task in tasks:
            with suppress(ProcessLookupError):
                os.killpg(task.pid, number)

    for passed in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(passed, forward)
    per_node = int(options["ntasks-per-node"])
    for task_id in range(int(options["ntasks"])):
        here = {"SLURM_PROCID": str(task_id), "SLURM_LOCALID": str(task_id % per_node)}
        # Slurm knows more of these, which are mistakes here.
        letters = {"%%": "%", "%t": str(task_id)}
        name = "".join(
            letters[part] if part[:1] == "%" else part for part in re.split("(%.)", options["output"])
        )
        with Path(name).open("ab") as output:
            tasks.append(
                subprocess.Popen(
                    words, env={**os.environ, **here}, stdout=output, stderr=output, start_new_session=True
                )
            )
    # A task may be known to the test before it is to this program.
    for number in early:
        forward(number, None)
    codes = [task.wait() for task in tasks]
    # What bash has started in the background ends with the step.
    forward(signal.SIGKILL, None)
    return max(128 - code if code < 0 else code for code in codes)


if __name__ == "__main__":
    raise SystemExit(_srun(sys.argv[1:]))
