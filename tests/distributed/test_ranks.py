"""Several training ranks compute what one does: gradients, metrics, steps, states; and ways to start them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked_workers
import psutil
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from forked import FORKING_LAUNCH, ForkedPopen, forks, run_script
from rank_program import CASES, CASES_OF_TWO, COMPILED, MIXED, RELOADED, muon_steps
from rank_runs import (
    STEPS,
    Runs,
    check_follows,
    check_kept_and_loaded,
    check_rounds_alike,
    check_same_head,
    check_same_numbers,
    check_same_state,
    grpo_script,
    in_ranks,
    launch_forks,
    measured_alone,
    metrics,
    one_rank,  # noqa: F401
    runs,  # noqa: F401
    sums,  # noqa: F401
    words,
)
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from torchrl_grpo.batch.micro_batches import partition_balanced
from torchrl_grpo.distributed import launch
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.runtime import rank_env

pytestmark = pytest.mark.slow

KINDS = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    folder = tmp_path_factory.mktemp("ranks")
    return {count: in_ranks(count, folder / f"{count}.pt", KINDS) for count in (2, 3)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("case", "count"), [*((case, 3) for case in CASES), *((case, 2) for case in CASES_OF_TWO)]
)
def test_ranks_compute_what_one_process_does(
    by_ranks: dict[int, Any], case: str, count: int, kind: str
) -> None:
    check_same_numbers(by_ranks[count][case, kind], case)


def test_shards_with_compiled_layers_compute_what_one_process_does_without(by_ranks: dict[int, Any]) -> None:
    check_same_numbers(by_ranks[2][COMPILED, "fsdp2"], "llama")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", MIXED)
def test_ranks_round_as_one_process_does(by_ranks: dict[int, Any], case: str, kind: str) -> None:
    measured, alone = by_ranks[2][case, kind], measured_alone(case)
    check_rounds_alike(measured, alone, measured_alone(MIXED[case]))
    assert measured["stale"] == [], "what the model computes with is what the optimizer has moved"
    # Whichever way weights come to a rank: what is computed with is the same, to the last bit.
    assert torch.equal(measured["probe at start"], alone["probe at start"])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_compute_a_float32_head_from_weights_that_nobody_rounded(
    by_ranks: dict[int, Any], kind: str
) -> None:
    case = "llama in bfloat16, float32 head"
    check_same_head(by_ranks[2][case, kind], measured_alone(case))


@pytest.mark.parametrize("count", [2, 3])
def test_shards_leave_nothing_of_the_layers_they_have_gathered_in_the_graph(
    by_ranks: dict[int, Any], count: int
) -> None:
    # Autocast alone keeps a copy of each weight in 16 bits: 2 bytes.
    assert by_ranks[count]["kept of weights"] == 0


def test_gradients_of_whole_models_lie_in_what_is_exchanged(by_ranks: dict[int, Any]) -> None:
    # One bucket for a model this small, and not a second copy of each gradient.
    assert by_ranks[2]["llama", "ddp"]["storages of gradients"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizer_s_state_is_the_same_for_all_layouts(by_ranks: dict[int, Any], kind: str) -> None:
    check_same_state(by_ranks[2]["llama", kind]["state"], measured_alone("llama")["state"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", RELOADED)
def test_moments_are_kept_by_the_rank_that_saves_them_and_loaded_in_parts(
    by_ranks: dict[int, Any], case: str, kind: str
) -> None:
    check_kept_and_loaded(by_ranks[3][case, kind], 3)


@pytest.mark.parametrize("count", [2, 3])
def test_muon_updates_shards_as_it_does_whole_matrices(by_ranks: dict[int, Any], count: int) -> None:
    measured = by_ranks[count]["muon"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = muon_steps("ddp", Ranks(on_cpu=True))
    finally:
        torch.set_num_threads(threads)
    assert len(alone["matrices"]) == 14 and measured["matrices"] == alone["matrices"]
    for name in alone["matrices"]:
        assert torch.equal(measured["weights"][name], alone["weights"][name]), name
    torch.testing.assert_close(measured["weights"], alone["weights"])
    assert measured["state"]["param_groups"] == alone["state"]["param_groups"]
    torch.testing.assert_close(measured["state"]["state"], alone["state"]["state"])


@pytest.mark.parametrize(
    ("costs", "ranks", "loads"),
    [
        ([5, 4, 3, 2, 1], 2, [8, 7]),
        ([1, 1, 1], 5, [1, 1, 1, 0, 0]),
        ([9, 1, 1, 1, 1], 2, [9, 4]),
        ([], 2, [0, 0]),
        ([7, 7, 7, 7], 2, [14, 14]),
    ],
)
def test_groups_are_divided_by_cost(costs: list[int], ranks: int, loads: list[int]) -> None:
    shares = partition_balanced(costs, ranks)
    assert [sum(costs[row] for row in rows) for rows in shares] == loads
    assert sorted(row for rows in shares for row in rows) == list(range(len(costs)))
    assert shares == [sorted(rows) for rows in shares]


# ---- the commands a user would run


@pytest.mark.parametrize(
    ("name", "kind"), [("single_gpu", "NO"), ("multi_gpu", "MULTI_GPU"), ("fsdp2", "FSDP")]
)
def test_files_for_the_launcher_are_what_it_reads(repo_root: Path, name: str, kind: str) -> None:
    launcher_config = load_config_from_file(str(repo_root / f"config/accelerate/{name}.yaml"))
    assert launcher_config.distributed_type.name == kind
    assert launcher_config.mixed_precision == "no", "train_model.autocast chooses the numbers"


def test_a_run_on_two_ranks_of_a_launcher_follows_the_run_on_one_and_so_does_its_continuation_on_one(
    runs: Runs, tmp_path: Path
) -> None:
    done = runs.start_forks(tmp_path / "run", "fsdp2", "train_model.num_devices=2")
    assert "an engine in each of 2 ranks" in done.stdout
    # What two ranks wrote, one continues. Who started the two makes no difference to that.
    runs.go_on(tmp_path / "run")


def test_a_rank_on_each_of_two_machines_follows_the_run_on_one(runs: Runs, tmp_path: Path) -> None:
    def launch_machine(number: int) -> subprocess.CompletedProcess[str]:
        options = ("--num_machines", 2, "--machine_rank", number, "--main_process_ip", "127.0.0.1")
        arguments = words(runs.sums, runs.model, tmp_path / str(number))
        return launch_forks(runs.root, "multi_gpu", arguments, (*options, "--main_process_port", port))

    port = rank_env.free_port()
    with ThreadPoolExecutor(2) as machines:
        first, second = machines.map(launch_machine, range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    check_follows(tmp_path / "0", runs.one_rank)
    assert not (tmp_path / "1").exists(), "the first machine has the run folder"


def test_two_ranks_are_dismissed_where_the_run_has_ended(runs: Runs, tmp_path: Path) -> None:
    done = runs.take_over(tmp_path / "run", "train_model.num_devices=2", step=STEPS, ranks=2)
    assert done.stderr.count(f"after step {STEPS} of {STEPS}; it has already ended") == 1


def test_two_ranks_with_two_workers_follow_the_run_of_one_process(
    one_rank: Path,
    repo_root: Path,
    sums: Path,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(forked_workers.VARIABLE, "")
    more = ("train_model.num_devices=2", "inference_model.num_devices=2")
    argv = [grpo_script(repo_root), *words(sums, tiny_model_dir, tmp_path / "run", *more)]
    done = run_script(argv, ranks=2, cwd=repo_root)
    assert done.returncode == 0, done.stderr
    assert "2 workers, a process each" in done.stdout
    for ours, theirs in zip(metrics(tmp_path / "run"), metrics(one_rank), strict=True):
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def said_by_ranks_that_get(
    number: signal.Signals,
    code: int,
    runs: Runs,
    folder: Path,
    is_forked: bool = True,
    step: int = STEPS // 2,
) -> str:
    """Start an endless run in two ranks; after ``step``, a signal must end it with this exit code."""
    more = ("train_model.num_devices=2", "train.total_dialog_turns=160000")
    argv = [str(grpo_script(runs.root)), *words(runs.sums, runs.model, folder, *more)]
    process: subprocess.Popen[bytes] | ForkedPopen
    with (folder.parent / "output").open("wb") as output:
        if is_forked:
            process = ForkedPopen([sys.executable, str(FORKING_LAUNCH), *argv], stdout=output)
        else:
            left_out = ("RANK", "WORLD_SIZE", "LD_PRELOAD")
            environment = {k: v for k, v in os.environ.items() if k not in left_out}
            process = subprocess.Popen(
                [sys.executable, *argv], env=environment, stderr=subprocess.STDOUT, stdout=output
            )
    deadline = time.monotonic() + 120
    while not (folder / f"checkpoints/{step}").exists() and time.monotonic() < deadline:
        # Nothing tells another process that a checkpoint is there.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
    family = forks() if is_forked else psutil.Process(process.pid).children(recursive=True)
    family = [member for member in family if member.pid != process.pid]
    assert len(family) >= 2
    process.send_signal(number)
    process.wait(timeout=120)
    printed = (folder.parent / "output").read_text()
    assert process.returncode == code, printed
    assert "continues from its last checkpoint" in printed and "Traceback" not in printed
    assert not psutil.wait_procs(family, timeout=30)[1]
    return printed


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_all_ranks_in_good_order(
    number: signal.Signals, code: int, runs: Runs, tmp_path: Path
) -> None:
    # One of them as a user starts it.
    said_by_ranks_that_get(number, code, runs, tmp_path / "run", is_forked=number != signal.SIGINT)


def test_ranks_that_grpo_py_has_started_follow_the_run_on_one_until_they_are_stopped(
    runs: Runs, tmp_path: Path
) -> None:
    output = said_by_ranks_that_get(signal.SIGUSR1, 75, runs, tmp_path / "run", step=STEPS)
    assert "an engine in each of 2 ranks" in output
    check_follows(tmp_path / "run", runs.one_rank)


_LISTENING = """
import os, sys

import psutil
from torchrl_grpo.distributed import launch
from torchrl_grpo.distributed.ranks import Ranks


def listen():
    if "RANK" not in os.environ:
        return launch.launch([], 2)
    ranks = Ranks(on_cpu=True)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    for one in psutil.Process().net_connections("inet"):
        if one.status == "LISTEN":
            # In one piece, because both ranks write.
            is_meeting_point = one.laddr.port == int(os.environ["MASTER_PORT"])
            sys.stdout.write(f"{one.laddr.ip} {is_meeting_point}\\n")
            sys.stdout.flush()
    return ranks.release() if ranks.is_main else ranks.follow(None)


if __name__ == "__main__":
    sys.exit(listen())
"""


def test_ranks_on_one_machine_listen_where_no_other_machine_reaches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "listening.py"
    script.write_text(_LISTENING)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    done = run_script([FORKING_LAUNCH, script])
    assert done.returncode == 0, done.stderr
    addresses = [tuple(line.split()) for line in done.stdout.splitlines()]
    assert {host for host, _ in addresses} == {"127.0.0.1"}
    # One of them is the meeting point.
    assert [is_meeting_point for _, is_meeting_point in addresses].count("True") == 1


_APART = """
import sys
from datetime import timedelta

sys.path.insert(0, {root!r})
from torchrl_grpo.distributed import loopback
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.errors import RanksApart
from torchrl_grpo.runtime import rank_env

loopback._SILENT_S, loopback._LIMIT = 0.2, timedelta(seconds=1)
try:
    Ranks(on_cpu=True)
except RanksApart as error:
    print(error)
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_another_job_has_left_behind_says_what_it_waits_for(
    rank: str, repo_root: Path, tmp_path: Path
) -> None:
    script = tmp_path / "apart.py"
    script.write_text(_APART.format(root=str(repo_root)))
    port = str(rank_env.free_port())
    left = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = run_script([script], variables=left, timeout=120)
    apart, fix = f"RANK={rank} of WORLD_SIZE=2 in the environment: ", "run `unset RANK WORLD_SIZE"
    assert f"{apart}waiting for the other ranks at 127.0.0.1:{port}; start all" in done.stderr
    assert (
        f"{apart}the other ranks were not found at 127.0.0.1:{port} (" in done.stdout and fix in done.stdout
    )


_TERMINATED = """
import os, signal, sys
from datetime import timedelta

sys.path.insert(0, {root!r})
from torchrl_grpo.distributed import loopback
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.runtime.interrupts import raise_terminations

# The first sign of a rank that waits is a line on the screen.
loopback._SILENT_S, loopback._LIMIT = 0.2, timedelta(seconds=20)
loopback.screen.say = lambda line: os.kill(os.getpid(), signal.SIGTERM)
with raise_terminations():
    Ranks(on_cpu=True)
"""


def test_a_rank_that_waits_for_the_others_can_be_terminated(repo_root: Path, tmp_path: Path) -> None:
    script = tmp_path / "terminated.py"
    script.write_text(_TERMINATED.format(root=str(repo_root)))
    port = str(rank_env.free_port())
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    assert run_script([script], variables=alone, timeout=120).codes == [-signal.SIGTERM]


_LEAVING = """
import os, signal, time
from pathlib import Path

fifo, up = Path({fifo!r}), Path({up!r})
if os.environ["RANK"] == "1":
    fifo.read_text()
    raise SystemExit(3)


def leave(number, frame):
    fifo.write_text("interrupted")
    # Long enough for a launcher that ends all of them when one fails.
    time.sleep(2)
    print("all is saved", flush=True)
    raise SystemExit({code})


signal.signal(signal.SIGINT, leave)
up.read_text()
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
"""


@pytest.mark.parametrize(("code", "ended"), [(130, None), (7, 7)])
def test_a_rank_that_fails_while_it_leaves_does_not_cut_an_interrupted_one_short(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    code: int,
    ended: int | None,
) -> None:
    script = tmp_path / "leaving.py"
    # Reading waits until another process writes.
    fifo, up = tmp_path / "fifo", tmp_path / "up"
    os.mkfifo(fifo)
    os.mkfifo(up)
    script.write_text(_LEAVING.format(fifo=str(fifo), up=str(up), code=code))
    monkeypatch.setattr(sys, "argv", [str(script)])
    honest = SubprocessContext.wait

    def wait(ranks: SubprocessContext) -> Any:
        # Before, an interrupt would end ranks that have not begun.
        up.write_text("up")
        return honest(ranks)

    monkeypatch.setattr(SubprocessContext, "wait", wait)
    result = None
    # Which the command line turns into 130.
    with contextlib.suppress(KeyboardInterrupt):
        result = launch.launch([], 2)
    assert capfd.readouterr().out == "all is saved\n"
    assert result == ended


def test_an_interrupt_while_ranks_are_started_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "waiting.py"
    script.write_text("import signal; signal.pause()")
    monkeypatch.setattr(sys, "argv", [str(script)])
    honest = get_subprocess_handler
    started = []

    def interrupted(*args: Any, **named: Any) -> Any:
        started.append(honest(*args, **named))
        if len(started) == 1:
            signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(api, "get_subprocess_handler", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        launch.launch([], 2)
    assert len(started) == 2
    assert all(child.proc.poll() is not None for child in started)
    assert signal.getsignal(signal.SIGINT) is before


_ENDED = """
import os, signal

if os.environ["RANK"] == "1":
    {end}
# Until the launcher ends this one.
signal.pause()
"""


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (
            "os.kill(os.getpid(), 9)",
            1,
            "error: training rank 1 was ended by SIGKILL, as the system does if memory runs out; lower "
            "train.max_tokens_per_microbatch and resume\n",
        ),
        ("os.write(2, b'error: my own\\n'); os._exit(2)", 2, "error: my own\n"),
    ],
)
def test_the_launcher_says_what_ended_a_rank_only_if_the_rank_cannot(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    end: str,
    code: int,
    message: str,
) -> None:
    script = tmp_path / "ended.py"
    script.write_text(_ENDED.format(end=end))
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert launch.launch([], 2) == code
    assert capfd.readouterr().err == message


@pytest.fixture
def signal_words(tmp_path: Path) -> list[str]:
    """Words of four steps with a reward that differs between the responses of a group."""
    (tmp_path / "short.py").write_text(
        "def short(completion, example):\n    return 1 / (1 + len(completion))\n"
    )
    reward = [f"reward.functions={{short: {tmp_path}/short.py:short}}", "reward.weights={short: 1.0}"]
    return [*reward, "policy.kl_coef=0.1", "train.total_dialog_turns=64", "optimizer.lr=1e-2"]


def check_diverges(lines: Sequence[dict[str, Any]]) -> None:
    """The policy of a run has moved away from its reference."""
    assert max(line["kl/reference"] for line in lines if "kl/reference" in line) > 1e-6


def test_adapters_train_on_two_ranks_as_on_one(
    repo_root: Path, sums: Path, tiny_model_dir: Path, tmp_path: Path, signal_words: list[str]
) -> None:
    lines = []
    for ranks in (1, 2):
        more = [*signal_words, "train_model.lora.rank=4", f"train_model.num_devices={ranks}"]
        argv = [grpo_script(repo_root), *words(sums, tiny_model_dir, tmp_path / str(ranks), *more)]
        done = run_script(argv, ranks=ranks, cwd=repo_root)
        assert done.returncode == 0, done.stderr
        lines.append(metrics(tmp_path / str(ranks)))
    check_diverges(lines[0])
    for ours, theirs in zip(*lines, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_each_rank_scores_with_a_reference_of_its_own(
    repo_root: Path, sums: Path, tiny_model_dir: Path, tmp_path: Path, signal_words: list[str]
) -> None:
    changes = [*signal_words, "ref_model.refresh_frequency=1", "ref_model.refresh_mix=0.5"]
    changes.append("train.checkpoint_frequency=2")

    def run(name: str, ranks: int, *more: str) -> str:
        own = words(
            sums, tiny_model_dir, tmp_path / name, *changes, f"train_model.num_devices={ranks}", *more
        )
        done = run_script([grpo_script(repo_root), *own], ranks=ranks, cwd=repo_root)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("one", 1)
    expected = metrics(tmp_path / "one")
    check_diverges(expected)
    for kind in ("ddp", "fsdp2"):
        assert "a copy in each rank" in run(kind, 2, f"train_model.parallelism={kind}")
        if kind == "fsdp2":
            # Each rank takes its copy from the checkpoint.
            shutil.rmtree(tmp_path / kind / "checkpoints" / "4")
            run(kind, 2, f"train_model.parallelism={kind}", "resume=auto")
        for ours, theirs in zip(metrics(tmp_path / kind), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("kind", "engines"), [("fsdp2", "auto"), pytest.param("ddp", "1", id="one engine")])
def test_a_run_on_one_rank_continues_on_two(kind: str, engines: str, runs: Runs, tmp_path: Path) -> None:
    more = ("train_model.num_devices=2", f"train_model.parallelism={kind}")
    runs.take_over(tmp_path / "run", *more, f"inference_model.num_devices={engines}", ranks=2)


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        (
            None,
            ("train_model.num_devices=5",),
            "train_model.num_devices=5: an optimizer batch has only 4 groups",
        ),
        # Found by all ranks, before they have met.
        (
            "multi_gpu",
            ("train_model.num_devices=2", "model.name=/nowhere"),
            "model.name=/nowhere: there is no such folder",
        ),
        # Found by rank 0 alone, which then lets the other go.
        (
            "ranks",
            ("train_model.num_devices=2", "model.chat_template=nowhere.jinja"),
            "model.chat_template=nowhere.jinja: there is no such file",
        ),
        # Found by all ranks, when they read the model.
        (
            "ranks",
            (
                "train_model.num_devices=2",
                "train_model.lora.rank=4",
                "train_model.lora.target_modules=[nope]",
            ),
            "error: train_model.lora.target_modules",
        ),
        # The other file for ranks with whole models starts processes here.
        ("multi_gpu", ("train_model.num_devices=3",), "the launcher has started 2 processes"),
        ("fsdp2", ("train_model.parallelism=ddp",), "the launcher was configured for FSDP"),
    ],
)
def test_mistakes_are_told_once_and_leave_nothing_running(
    config: str | None,
    more: tuple[str, ...],
    message: str,
    repo_root: Path,
    sums: Path,
    tiny_model_dir: Path,
    tmp_path: Path,
) -> None:
    arguments = words(sums, tiny_model_dir, tmp_path / "run", *more)
    if config in (None, "ranks"):
        done = run_script(
            [grpo_script(repo_root), *arguments], ranks=1 if config is None else 2, cwd=repo_root
        )
        # Rank 1 has ended by itself, or waited for the launcher to end it.
        assert done.codes in ([2], [2, 0], [2, 2], [2, -9])
    else:
        done = launch_forks(repo_root, config, arguments)
        # accelerate's launcher has one code for every failure.
        assert done.returncode == 1
    assert done.stderr.count(message) == 1, done.stderr
    assert not (tmp_path / "run/metrics.jsonl").exists()


PROGRAM = """
from torchrl_grpo.api.launched import on_all_ranks, told_once
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.errors import ConfigError

def program():
    ranks = Ranks(on_cpu=True)
    RELEASE
    raise ConfigError("wrong")

with told_once():
    on_all_ranks(program)
"""


@pytest.mark.parametrize("release", ["ranks.release()", "pass"])
def test_a_program_that_fails_on_rank_0_ends_the_others_and_is_told_once(
    tmp_path: Path, release: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("RELEASE", release))
    done = run_script([tmp_path / "program.py"], ranks=2)
    assert done.codes == [2, 0]
    assert done.stderr.count("error: ") == 1 and "error: wrong\n" in done.stderr
