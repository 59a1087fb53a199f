"""Commands whose output nobody reads, or cannot be written: no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
GRPO = str(ROOT / "sota-implementations/grpo/grpo.py")
# Python writes at once where this is set, and argparse then notices no error.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
COMMANDS = {
    "help": [GRPO, "--help"],
    "configuration": [GRPO, "--cfg", "job"],
    "mistake": [GRPO, "train.sed=1"],
    "grpo-async": [str(ROOT / "sota-implementations/grpo/grpo-async.py"), "--help"],
    "sft": [str(ROOT / "sota-implementations/sft/sft.py"), "--help"],
    "serve": ["-c", "from torchrl_grpo.cli.serve import main; main(['--help'])"],
    "slurm": ["-m", "torchrl_grpo.slurm", "--help"],
    "gate": ["-m", "torchrl_grpo.slurm.gate", "--help"],
    "rewards": ["-m", "torchrl_grpo.rewards", "--help"],
    "verify_resume": ["-m", "torchrl_grpo.tools.verify_resume", "--help"],
    "soak": ["-m", "torchrl_grpo.tools.soak", "--help"],
    "gpu_check": ["-m", "torchrl_grpo.tools.gpu_check", "--help"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_whose_reader_has_ended_ends_without_a_word(command: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, *COMMANDS[command]]
    # A mistake goes to stderr.
    stderr = write if command == "mistake" else subprocess.PIPE
    done = subprocess.run(
        words, stdout=write, stderr=stderr, cwd=tmp_path, env=BUFFERED, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr or "") == (141, "")


@pytest.mark.parametrize("more", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def test_an_output_that_is_full_is_one_line(more: dict[str, str], tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, GRPO, "--help"]
        env = {**BUFFERED, **more}
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, env=env, text=True, check=False
        )
    message = "error: stdout cannot be written: No space left on device; write it to another place\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_descriptor_that_was_closed_gets_no_other_file(closed: str, tmp_path: Path) -> None:
    code = (
        "from torchrl_grpo.runtime.files.closed_output import quiet_end\n"
        "import sys, os\n"
        "with quiet_end():\n"
        "    file = open('file', 'w'); os.write(1, b'1'); os.write(2, b'2'); print(); sys.stderr.write('2')\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    shell = f"exec {sys.executable} {script} {closed}"
    done = subprocess.run(shell, shell=True, capture_output=True, cwd=tmp_path, check=False)
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    assert (tmp_path / "file").read_bytes() == b""
