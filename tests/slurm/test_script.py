"""The batch script: its text, and what it does with commands of Slurm that run on this machine."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from torchrl_grpo.errors import UserError
from torchrl_grpo.slurm import command
from torchrl_grpo.slurm.command import main, script_for

SERVERS = ["--nodes=2", "inference_model.backend=vllm_server", "inference_model.num_devices=2"]
ALL_OPTIONS = [
    "--time=24:00:00", "--partition=gpu", "--account=lab", "--qos=long", "--mail-user=me@lab.org",
    "--job-name=first try", "--cpus-per-node=16", "--memory-per-node=200G", "--sbatch=--constraint=ib",
    "--sbatch=--exclusive", "--setup=module load cuda", "--setup=source .venv/bin/activate",
    "--signal-seconds=120", "--start-seconds=77", "--folder=/scratch/runs",
]  # fmt: skip
SHAPES = {
    "one node": ["--gpus-per-node=1"],
    "one node without GPUs": ["--script=grpo-async"],
    "sft": ["--script=grpo-sft", "--gpus-per-node=2", "train_model.num_devices=2"],
    "ray": ["--script=grpo-async", "--nodes=3", "--gpus-per-node=a100:4"],
    "ray in turn": ["--nodes=2"],
    "servers": [*SERVERS, "--gpus-per-node=2"],
    "servers without GPUs": ["--script=grpo-async", *SERVERS],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_bash_reads_the_script_and_slurm_its_options(shape: str) -> None:
    text = script_for([*ALL_OPTIONS, *SHAPES[shape], "reward.weights={exact_match: 1.0}"])
    checked = subprocess.run(["bash", "-n"], input=text, stderr=subprocess.PIPE, text=True)
    assert checked.returncode == 0, checked.stderr
    head = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    expected = {
        "--time=24:00:00", "--partition=gpu", "--account=lab", "--qos=long", "--mail-user=me@lab.org",
        "--mail-type=END,FAIL", "--job-name='first try'", "--cpus-per-task=16", "--mem=200G",
        "--constraint=ib", "--exclusive", "--signal=B:USR1@120", "--requeue", "--open-mode=append",
    }  # fmt: skip
    assert expected <= set(head)
    for line in ("module load cuda", "source .venv/bin/activate", 'job="/scratch/runs/$SLURM_JOB_ID"'):
        assert f"\n{line}\n" in text
    assert "'reward.weights={exact_match: 1.0}'" in text
    assert ("--timeout=77" in text) == ("--nodes=1" not in head)


def run(fake: FakeSlurm, script: str, code: int = 0, **environment: str) -> str:
    return fake.finish(fake.start(script, **environment), code)


def test_one_node_runs_one_step_with_logs_of_its_attempt(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    text = script_for(["--config-name=grpo_quickstart", "optimizer.lr=1e-5"])
    run(fake, text)
    job = tmp_path / "outputs/slurm/7"
    arguments = "--config-name=grpo_quickstart optimizer.lr=1e-5 resume=auto_or_new"
    assert fake.notes == [
        "step trainer on any",
        f"trainer unset {arguments} hydra.run.dir='{job}/run'",
    ]
    assert (job / "logs/latest").readlink() == Path("0") and (job / "logs/0/trainer.log").is_file()
    run(fake, text, SLURM_RESTART_COUNT="3")
    assert (job / "logs/latest").readlink() == Path("3") and (job / "logs/3/trainer.log").is_file()


def test_text_of_the_user_is_no_code_of_the_script(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    override = r"""logging.experiment="$(touch made) `touch made` {{ 7 }} {# {% ' \\ %s" """.strip()
    text = script_for([override, "--setup=true\ntouch set"])
    assert all(line.startswith("#") for line in text.partition("\nset -eo pipefail\n")[0].splitlines())
    run(fake, text)
    assert f" {override} resume=auto_or_new " in fake.notes[1]
    assert (tmp_path / "set").exists() and not (tmp_path / "made").exists()


def test_the_trainer_waits_for_the_servers_and_ends_them(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path, "node1,node2,node3", servers=4, gpus="4,6")
    arguments = [
        *SERVERS[1:2],
        "--nodes=3",
        "--gpus-per-node=2",
        "inference_model.engine_args.max_num_batched_tokens=64",
    ]
    run(fake, script_for(arguments))
    first = next(n for n, line in enumerate(fake.notes) if line.startswith("step gate"))
    assert fake.notes[first] == "step gate on node1"
    gate, _, trainer = fake.notes[fake.notes.index("step trainer on node1") - 1 :][:3]
    port = 20000 + 7 * 64
    addresses = [f"http://node{2 + n // 2}.cluster:{port + n}" for n in range(4)]
    assert gate == f"gate -P -m torchrl_grpo.slurm.gate --timeout=1800 {' '.join(addresses)}"
    assert f"inference_model.servers=[{','.join(addresses)}]" in trainer
    assert "engine_args" not in trainer, "a run with a list of servers refuses them"
    assert "step server on node2,node3" in fake.notes
    servers = sorted(line for line in fake.notes if re.match(r"server \d (?!ends)", line))
    keys = set()
    for number, line in enumerate(servers):
        _, _, gpu, key, *rest = shlex.split(line)
        keys.add(key)
        assert gpu == "46"[number % 2], "each server of a node has a GPU of its own"
        assert rest[-2:] == ["--host=0.0.0.0", f"--port={port + number}"]
        assert "inference_model.engine_args.max_num_batched_tokens=64" in rest
    assert len(servers) == 4 and len(keys) == 1 and re.fullmatch("[0-9a-f]{64}", keys.pop())
    assert sum(line.endswith(" ends") for line in fake.notes) == 4
    logs = tmp_path / "outputs/slurm/7/logs/latest"
    assert {path.name for path in logs.iterdir()} == {
        "trainer.log", "gate.log", *(f"server-{n}.log" for n in range(4)),
    }  # fmt: skip


def test_ray_has_a_head_workers_and_the_trainer_joins(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path, "node1,node2,node3", servers=2, head=True, gpus="0,1,2,3")
    arguments = ["--nodes=3", "--gpus-per-node=4", "train_model.num_devices=2", "env.num_envs=32"]
    run(fake, script_for(arguments))
    address = f"node1.cluster:{20000 + 7 * 64}"
    assert "step ray-head on node1" in fake.notes and "step ray-worker on node2,node3" in fake.notes
    (head,) = [line for line in fake.notes if "--head" in line]
    start = "ray 2,3 start --head --node-ip-address=10.0.0.1 --num-gpus=2 "
    assert head.startswith(start), "the trainer's GPUs are not Ray's"
    workers = [line for line in fake.notes if line.startswith("ray ") and "--address=" in line]
    assert len(workers) == 2 and all(" --num-gpus=4 " in line for line in workers)
    assert f"gate -P -m torchrl_grpo.slurm.gate --timeout=1800 --ray={address} --nodes=3" in fake.notes
    (trainer,) = [line for line in fake.notes if line.startswith("trainer ")]
    assert trainer.startswith("trainer 0,1,2,3 ")
    # Three nodes of four GPUs, less the trainer's two.
    assert "inference_model.num_devices=10 inference_model.gpu_memory_utilization=0.85 " in trainer
    assert trainer.endswith(f"ray.address='{address}'")


@pytest.mark.parametrize("shape", ["one node", "servers"])
def test_a_signal_makes_the_trainer_save_and_the_job_begin_again(shape: str, tmp_path: Path) -> None:
    servers = 2 if shape == "servers" else 0
    fake = FakeSlurm(tmp_path, "node1,node2", servers=servers, lasts=True)
    process = fake.start(script_for(SERVERS if servers else []))
    assert fake.begun.read_text() == "begun\n"
    process.send_signal(signal.SIGUSR1)
    output = fake.finish(process, 0)
    notes = [line for line in fake.notes if not line.startswith(("server", "step", "gate", "trainer unset"))]
    assert notes == ["trainer saves", "scontrol requeue 7"]
    assert sum(line.endswith(" ends") for line in fake.notes) == servers
    assert "trainer has ended with code 75" in output


def test_a_signal_before_the_trainer_begins_makes_the_job_begin_again(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path, "node1,node2", servers=3)
    # The gate waits for a third server, which never comes up.
    process = fake.start(script_for(SERVERS))
    # Opening waits until the gate has it open to read.
    with (tmp_path / "up.2").open("w"):
        process.send_signal(signal.SIGUSR1)
        fake.finish(process, 0)
    assert "scontrol requeue 7" in fake.notes
    assert not any(line.startswith("trainer") for line in fake.notes)


def test_the_job_goes_back_when_slurm_is_busy_at_first(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path, fault="busy", lasts=True)
    process = fake.start(script_for([]))
    assert fake.begun.read_text() == "begun\n"
    process.send_signal(signal.SIGUSR1)
    fake.finish(process, 0)
    assert fake.notes[-3:] == ["scontrol requeue 7", "sleep 20", "scontrol requeue 7"]


def test_steps_begin_in_any_folder_and_beside_long_functions_of_the_user(tmp_path: Path) -> None:
    folder = tmp_path / "90%j done"
    folder.mkdir()
    fake = FakeSlurm(folder)
    long = """--setup=eval "module() { : $(head -c 200000 /dev/zero | tr '\\0' x); }\""""
    run(fake, script_for([long]))
    assert (folder / "outputs/slurm/7/logs/0/trainer.log").is_file()
    assert any(line.startswith("trainer ") for line in fake.notes)


def test_a_signal_before_all_else_makes_the_job_begin_again(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    fake.finish(fake.start(script_for(["--setup=kill -USR1 $$"])), 0)
    assert fake.notes[-1] == "scontrol requeue 7"


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--sbatch=--comment=two words", "--comment='two words'"),
        ("--sbatch=--comment two words", "--comment 'two words'"),
        ("--sbatch=--comment='two words'", "--comment='two words'"),
        ("--sbatch=--comment=take #1", "--comment='take #1'"),
        ('--sbatch=--export=ALL,MODEL="my model"', '--export=ALL,MODEL="my model"'),
        (r"--job-name=it's a\b", r"--job-name='it\'s a\\b'"),
        ("--sbatch=--exclusive", "--exclusive"),
        ("--sbatch=--exclude=node[1-3],node7", "--exclude=node[1-3],node7"),
        ("--job-name=mine", "--job-name=mine"),
    ],
)
def test_values_with_spaces_are_quoted_for_sbatch(option: str, line: str) -> None:
    assert f"#SBATCH {line}\n" in script_for([option])


@pytest.mark.parametrize(("fault", "code"), [("server", 1), ("gate", 2), ("trainer", 2)])
def test_a_step_that_fails_ends_the_job(fault: str, code: int, tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path, "node1,node2", servers=2, fault=fault)
    output = run(fake, script_for(SERVERS), code)
    assert not any(line.startswith("scontrol") for line in fake.notes)
    assert any(line.startswith("trainer") for line in fake.notes) == (fault == "trainer")
    if fault == "server":
        assert "server has ended, and the job needs it; see its log in" in output


@pytest.mark.parametrize("limit", ["00:05:00", "00:11:00", "0-00:11:00"])
def test_a_job_whose_limit_leaves_no_time_to_train_ends(limit: str, tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    text = script_for([])
    output = fake.finish(fake.start(text, LIMIT=limit), 2)
    assert fake.notes == [] and f"the time limit of {limit} leaves no time to train" in output
    run(fake, text, LIMIT={"00:05:00": "00:12:00", "00:11:00": "UNLIMITED"}.get(limit, "1-00:00:00"))
    assert any(line.startswith("trainer") for line in fake.notes)


@pytest.mark.slow
def test_a_job_that_saves_nothing_does_not_go_on_for_ever(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path, lasts=True)
    checkpoints = tmp_path / "outputs/slurm/7/run/checkpoints"

    def attempt(code: int) -> str:
        process = fake.start(script_for([]))
        assert fake.begun.read_text() == "begun\n"
        process.send_signal(signal.SIGUSR1)
        return fake.finish(process, code)

    for _ in range(2):
        attempt(0)
    # A checkpoint is progress, and the count begins again.
    (checkpoints / "3").mkdir(parents=True)
    process = fake.start(script_for([]))
    assert fake.begun.read_text() == "begun\n"
    (checkpoints / "12").mkdir()
    process.send_signal(signal.SIGUSR1)
    fake.finish(process, 0)
    for _ in range(2):
        attempt(0)
    assert fake.notes.count("scontrol requeue 7") == 5
    assert "3 attempts in a row have saved nothing" in attempt(1)
    assert fake.notes.count("scontrol requeue 7") == 5


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("5", 100), ("00:05:00", 100), ("0-0:5", 100), ("10", 200), ("10:30", 210), ("3", 60), ("30", 600),
        ("1:00:00", 600), ("0-1", 600), ("2-12", 600), ("0", 600), ("UNLIMITED", 600), ("infinite", 600),
    ],
)  # fmt: skip
def test_a_short_job_saves_itself_later(time: str, seconds: int) -> None:
    options = command._slurm_options(command._parser().parse_args([f"--time={time}"]))
    options.check()
    assert f"#SBATCH --signal=B:USR1@{seconds}" in options.header()


def test_a_setup_line_that_fails_ends_the_job(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path)
    run(fake, script_for(["--setup=false"]), 1)
    assert fake.notes == []


SERVERS_ON = "inference_model.backend=vllm_server inference_model.num_devices"
MISTAKES = {
    "--nods=2": "unrecognized arguments: --nods",
    "--nodes=0": "--nodes=0: it must be at least 1",
    "--gpus-per-node=many": "--gpus-per-node=many: it is not a number of GPUs",
    "--sbatch=exclusive": "--sbatch=exclusive: it is not a long option of sbatch",
    "--sbatch=--nodes=3": "--sbatch=--nodes=3: .* write --nodes=VALUE",
    r"--sbatch=--constraint=ib\ --exclusive": "it is more than one option; write --sbatch once for each",
    "--sbatch=--no-requeue": "--sbatch=--no-requeue: the script needs a value of its own",
    "--folder=a'b": "--folder=a'b: it must be a plain path",
    "--signal-seconds=70000": "--signal-seconds=70000: Slurm takes at most 65535",
    "--time=1": "--time=1: the run saves itself .* write --time=3",
    "--time=2:00": "--time=2:00: the run saves itself",
    "--time=11 --signal-seconds=600": "no time is left to train; write --time=12",
    "--time=0-0:10:00 --signal-seconds=600": "--time=0-0:10:00: .* --signal-seconds=600",
    "--time=5m": "--time=5m: it is no time limit of Slurm; write 90",
    "--template=none.jinja": "--template=none.jinja: .*No such file.*; write a file that is a .* copy of /",
    "--script=ppo": "invalid choice: 'ppo'",
    "resume=auto": "resume=auto: the batch script sets resume",
    "hydra.run.dir=x": "hydra.run.dir=x: the batch script sets hydra.run.dir",
    "optimizer.rl=1": "optimizer.rl=1",
    "optimizer.lr=1,2": "several values make a sweep",
    "ray.address=auto": "ray.address=auto: the job starts Ray",
    "inference_model.backend=vllm_server inference_model.servers=[http://a:1]": "the job starts the servers",
    "--gpus-per-node=2 train_model.num_devices=3": "--gpus-per-node=2: train_model.num_devices=3",
    "--nodes=2 inference_model.backend=sglang_server": "a job of --nodes=2 starts vLLM servers only",
    f"--nodes=2 {SERVERS_ON}=2 inference_model.weight_transfer=cuda_ipc": "works on one machine, .*=nccl",
    "--nodes=2 --script=grpo-sft": "--nodes=2: grpo-sft has no engines",
    f"--nodes=3 {SERVERS_ON}=3": "write inference_model.num_devices=2",
    f"--nodes=2 --gpus-per-node=2 {SERVERS_ON}=4": "has 2 GPUs together",
    "--nodes=2 --gpus-per-node=2 inference_model.num_devices=4": "=4: the other roles leave 3 GPUs on 2",
    "--nodes=2 --gpus-per-node=2 train_model.num_devices=3": "--gpus-per-node=2: train_model.num_devices=3",
    "--nodes=2 train.weight_update_frequency=5": "train.weight_update_frequency=5",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(arguments.replace("'", "\\'"))) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: ") and output.err.count("\n") == 1
    assert re.search(MISTAKES[arguments], output.err), output.err
    assert re.search("write |remove it", output.err)


def test_a_changed_copy_of_a_template_makes_the_script(repo_root: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.sh.jinja"
    own.write_text((repo_root / "torchrl_grpo/slurm/ray.sh.jinja").read_text().replace("ray_head", "my_head"))
    usual = script_for(SHAPES["ray"]).replace("ray_head", "my_head").splitlines()
    changed = script_for([*SHAPES["ray"], f"--template={own}"]).splitlines()
    (command,) = set(changed) - set(usual)
    assert command.startswith("# Made by ") and len(changed) == len(usual)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("\n{% extend %}", "line 2: .*unknown tag 'extend'"),
        ("{{ node }}", "'node' is undefined"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{% extends 'none' %}", "none"),
        ("\udcff", "can't decode byte 0xff"),
    ],
)
def test_a_template_that_is_wrong_is_one_clear_line(text: str, wrong: str, tmp_path: Path) -> None:
    own = tmp_path / "own.sh.jinja"
    own.write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=f"--template={own}: .*{wrong}.*; write a file that is a") as raised:
        script_for([f"--template={own}"])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("example", ["one_node.sh", "servers.sh", "ray.sh"])
def test_the_examples_are_what_the_command_prints(example: str, repo_root: Path) -> None:
    text = (repo_root / "launch/slurm" / example).read_text()
    (command,) = re.findall(r"^# Made by python -m torchrl_grpo.slurm (.*)$", text, re.MULTILINE)
    assert script_for(shlex.split(command)) == text


def test_a_mistake_is_a_user_error() -> None:
    with pytest.raises(UserError):
        script_for(["--nodes=2", "--script=grpo-sft"])
