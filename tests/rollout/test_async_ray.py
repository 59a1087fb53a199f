"""grpo-async.py on a real Ray, as a user runs it: several workers, kills, interrupts, sweeps, two nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import forked_workers
import psutil
import pytest
import ray
import torch
from batches import END, PAD, make_model
from faulty_worker import FaultyActor, OneWorker
from forked import FORKING_LAUNCH, ForkedPopen, run_script, server_address
from publishers import make_publisher
from stale_parts import Fault, assert_all_are_found, assert_each_is_found, every_part, of_each_kind
from tiny_vlm import build_tiny_vlm

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rollout.workers import ray_pool
from torchrl_grpo.rollout.workers.ray_worker import WorkerSpec, pack, unpack
from torchrl_grpo.runtime import own_variables
from torchrl_grpo.runtime.interrupts import keep_termination_handler
from torchrl_grpo.tools import soak
from torchrl_grpo.tools.processes import family, has_checkpoint
from torchrl_grpo.tools.soak import victim
from torchrl_grpo.weight_sync.publisher import WeightPublisher

pytestmark = [pytest.mark.slow, pytest.mark.integration]

# Ray's helper processes look every few seconds whether their node still lives.
LINGER_S = 90
STANDARD_MODULES = ("math", "queue", "statistics", "random", "pickletools", "tokenize", "fractions", "timeit")
# For the probe.
PROMPTS = [list(range(start, start + 30)) for start in (3, 15, 29)]


@pytest.fixture(autouse=True)
def forked_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs fork their workers."""
    monkeypatch.setenv(forked_workers.VARIABLE, "")


@pytest.fixture
def words(tiny_model_dir: Path, tmp_path: Path, format_words: list[str]) -> list[str]:
    """A small run on a tiny random model; relative paths, because the run happens in ``tmp_path``."""
    rows = [{"question": f"{a} plus {b}", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Workers must not take files of the working directory for modules of Python.
    for name in STANDARD_MODULES:
        (tmp_path / f"{name}.py").write_text("raise ImportError('a file of the user')\n")
    return [
        "env.dataset=jsonl",
        "env.data_path=sums.jsonl",
        "env.answer_format=plain",
        "env.num_envs=4",
        "env.repeats=4",
        f"model.name={tiny_model_dir}",
        "inference_model.backend=transformers",
        "inference_model.max_model_len=200",
        "inference_model.max_new_tokens=16",
        "reward.weights={closeness:1.0,bare_number:0.1}",
        "train.checkpoint_frequency=1",
        "train.total_dialog_turns=160",
        "eval.num_problems=6",
        "eval.frequency=0",
        "logging.progress=false",
        *format_words,
    ]


@pytest.fixture(scope="module")
def orphans() -> Iterator[list[psutil.Process]]:
    """Processes of runs that have ended. They must have ended by the end of the module.

    Ray's helper processes live on for up to a minute, for which no test waits.
    """
    processes: list[psutil.Process] = []
    yield processes
    _, alive = psutil.wait_procs(processes, timeout=LINGER_S)
    assert not alive, [" ".join(process.cmdline())[:100] for process in alive]


@contextlib.contextmanager
def started(repo_root: Path, folder: Path, *words: str) -> Iterator[ForkedPopen]:
    """Start grpo-async.py in a fork, whose imports are done, and so are those of the ranks that it starts."""
    script = repo_root / "sota-implementations" / "grpo" / "grpo-async.py"
    with (folder / "output.txt").open("ab") as output:
        command = [sys.executable, str(FORKING_LAUNCH), str(script), *words]
        process = ForkedPopen(command, cwd=folder, stdout=output)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def wait_for(process: ForkedPopen, path: Path, lines: int) -> list[psutil.Process]:
    """Wait until a file has so many lines; the processes below the run then."""
    end = time.monotonic() + 240
    while not path.exists() or path.read_text().count("\n") < lines:
        assert process.poll() is None, "the run ended before it was to be disturbed"
        assert time.monotonic() < end, f"{path} does not grow"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)
    return family(process.pid)


def everybody_until_the_end(process: ForkedPopen) -> list[psutil.Process]:
    """Wait for the run's end; the processes that were below it at any time, replacements too."""
    seen: dict[int, psutil.Process] = {}
    end = time.monotonic() + 400
    while process.poll() is None:
        assert time.monotonic() < end, "the run does not end"
        seen |= {member.pid: member for member in family(process.pid)}
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.2)
    return list(seen.values())


def summary(folder: Path) -> dict[str, Any]:
    contents: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    books = contents["groups"]
    assert (
        books["issued"] == books["trained"] + books["dropped_age"] + books["dropped_filter"] + books["left"]
    )
    return contents


def output(folder: Path) -> str:
    return (folder / "output.txt").read_text(errors="replace")


@pytest.mark.slow
def test_workers_have_the_priority_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    with ray_pool.local_cluster(1, []):
        assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)


def test_what_a_node_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    freed, prestart = "RAY_free_objects_period_milliseconds", "RAY_prestart_worker_first_driver"
    niceness = "RAY_worker_niceness"
    for variable in (freed, prestart, niceness):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    ours = {freed: "10", prestart: "0", niceness: "0"}
    assert ray_pool.cluster_env([]) == ours
    assert ray_pool.cluster_env([1]) == {**ours, "CUDA_VISIBLE_DEVICES": "7"}
    with own_variables.temporary(ray_pool.cluster_env([1, 0])):
        assert os.environ[freed] == "10" and os.environ["CUDA_VISIBLE_DEVICES"] == "7,4"
    assert freed not in os.environ and os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv(freed, "1000")
    monkeypatch.setenv(niceness, "7")
    assert ray_pool.cluster_env([2]) == {**ours, freed: "1000", niceness: "7", "CUDA_VISIBLE_DEVICES": "2"}


def test_a_run_that_stops_with_an_error_leaves_a_checkpoint_and_nothing_else(
    repo_root: Path,
    tmp_path: Path,
    words: list[str],
    orphans: list[psutil.Process],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import random

    # Here Ray starts the worker itself.
    monkeypatch.delenv(forked_workers.VARIABLE)
    run = tmp_path / "run"
    more = ["collector.max_restarts=0", "train.checkpoint_frequency=0", "hydra.run.dir=run"]
    with started(repo_root, tmp_path, *words, *more, "train.total_dialog_turns=160000") as process:
        processes = wait_for(process, run / "metrics.jsonl", 3)
        nodes = [node for node in processes if node.name() == "raylet"]
        # Old weights leave the object store at once, not when a second has passed.
        assert [node.environ()["RAY_free_objects_period_milliseconds"] for node in nodes] == ["10"]
        target = victim(process.pid, "worker", random.Random(0))
        assert target is not None
        target.kill()
        processes += everybody_until_the_end(process)
        assert process.returncode == 2, output(tmp_path)
    assert "collector.max_restarts=0" in output(tmp_path) and "Traceback" not in output(tmp_path)
    assert has_checkpoint(run)
    orphans += processes


def test_a_sweep_goes_on_to_its_second_run_and_an_interrupt_ends_that_in_good_order(
    repo_root: Path, tmp_path: Path, words: list[str], orphans: list[psutil.Process]
) -> None:
    # The second is long enough not to have ended by itself on any machine.
    sweep = ["--multirun", "hydra.sweep.dir=sweep", "train.total_dialog_turns=32,160000"]
    first, second = (tmp_path / "sweep" / job for job in "01")
    with started(repo_root, tmp_path, *words, *sweep) as process:
        orphans += wait_for(process, first / "metrics.jsonl", 2)
        orphans += wait_for(process, second / "metrics.jsonl", 3)
        assert summary(first)["groups"]["trained"] == 8
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130
    assert "resume=" in output(tmp_path)
    assert has_checkpoint(second)


def test_an_address_where_nothing_answers_is_one_clear_message() -> None:
    cfg = Config()
    cfg.ray.address = "127.0.0.1:1"
    with pytest.raises(
        ConfigError, match=r"ray.address=127.0.0.1:1: no Ray cluster answers there .*write ray"
    ):
        ray_pool._connect(cfg, 1, [])


def test_a_path_that_is_too_long_for_sockets_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for usual in ("/tmp", "/" + "x" * 34):
        monkeypatch.setenv("TMPDIR", usual)
        assert ray_pool._short_folder() is None
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.setenv(name, f"{tmp_path}/{'x' * 60}")
        folder = ray_pool._short_folder()
        assert folder is not None and len(str(folder.path)) < 36
        assert folder.path.stat().st_mode & 0o777 == 0o700
        folder.close()
        assert not folder.path.exists()
        monkeypatch.delenv(name)


TERMINATED = """
import signal
from torchrl_grpo.config import Config
from torchrl_grpo.rollout.workers import ray_pool
from torchrl_grpo.runtime.interrupts import Terminated, raise_terminations

with raise_terminations():
    ray_pool._connect(Config(), 1, [])
    for leave in (lambda: None, ray_pool._disconnect):
        leave()
        try:
            signal.raise_signal(signal.SIGTERM)
        except Terminated:
            print("terminated", flush=True)
signal.raise_signal(signal.SIGTERM)
"""


def test_ray_leaves_terminations_to_the_run(tmp_path: Path) -> None:
    """Ray sets handlers when it starts, and takes away any handler when it ends, also one of the run."""
    (tmp_path / "terminated.py").write_text(TERMINATED)
    done = run_script([tmp_path / "terminated.py"])
    assert done.stdout.count("terminated\n") == 2, done.stderr
    assert done.returncode == -signal.SIGTERM


def in_cluster(name: str) -> list[psutil.Process]:
    """Processes of this name below this process, which has started the cluster's nodes."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if name in " ".join(process.cmdline()):
                processes.append(process)
    return processes


def node_of(worker: psutil.Process) -> int:
    """Id of the node's process that has started a worker. The name of a worker's log has the worker's id."""
    log = Path(f"/proc/{worker.pid}/fd/1").readlink().name
    (starter,) = in_cluster(f"--worker-id={log.split('-')[1]}")
    return int(starter.ppid())


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """A cluster of somebody else's with two cores on each of two nodes."""
    from ray.cluster_utils import Cluster

    # A node that is started in this process replaces what SIGTERM does here.
    with keep_termination_handler():
        node = {"num_cpus": 2, "include_dashboard": False, **forked_workers.NODE}
        with own_variables.temporary({forked_workers.VARIABLE: server_address()}):
            cluster = Cluster(initialize_head=True, head_node_args=node)
            cluster.add_node(**node)
        try:
            cluster.wait_for_nodes()
            yield cluster
        finally:
            cluster.shutdown()


@pytest.mark.float32
def test_a_killed_worker_and_a_killed_reference_are_replaced_on_a_running_cluster_of_two_nodes(
    repo_root: Path, tmp_path: Path, words: list[str], two_nodes: Any
) -> None:
    more = [
        f"ray.address={two_nodes.address}",
        "ray.placement=spread",
        "policy.kl_coef=0.1",
        "inference_model.num_devices=2",
        "ref_model.num_devices=1",
        "collector.max_policy_age=1",
        "hydra.run.dir=run",
    ]
    run = tmp_path / "run"
    with started(repo_root, tmp_path, *words, *more) as process:
        wait_for(process, run / "metrics.jsonl", 2)
        workers, references = in_cluster("ray::RolloutActor"), in_cluster("ray::ReferenceScorer")
        assert len({node_of(worker) for worker in workers}) == 2
        assert len(references) == 1
        references[0].kill()
        workers[0].kill()
        assert process.wait(timeout=400) == 0, output(tmp_path)
    assert "reference  ray      cluster    1 actor, where ray.address puts them" in output(tmp_path)
    result = summary(run)
    assert result["worker_restarts"] == 1 and result["groups"]["trained"] == 40
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("policy/age_max", 0) for line in metrics) <= 1
    # In a round whose groups were there already, no worker is measured.
    measured = [line for line in metrics if "workers/slowest" in line]
    assert {line["workers/slowest"] for line in measured} <= {0, 1} and len(measured) > 1
    assert all(line["workers/tokens_per_s_min"] > 0 for line in measured)
    divergences = [line["kl/reference"] for line in metrics if line["step"] > 0]
    # Nothing but rounding while the policy is still the reference; after the kill it has moved away from it.
    # The estimate is half the square of a difference, and 1e-4 nats may be rounding.
    assert len(divergences) == 10 and 0 <= divergences[0] < 1e-8 < min(divergences[6:])
    # The cluster is somebody else's: it must still be there.
    assert len(two_nodes.list_all_nodes()) == 2
    assert all(node.live_processes() for node in two_nodes.list_all_nodes())


def test_too_many_workers_for_a_cluster_are_refused(
    repo_root: Path, tmp_path: Path, words: list[str], two_nodes: Any
) -> None:
    more = [f"ray.address={two_nodes.address}", "inference_model.num_devices=5", "env.num_envs=5"]
    with started(repo_root, tmp_path, *words, *more) as process:
        assert process.wait(timeout=300) == 2, output(tmp_path)
    assert "inference_model.num_devices=5" in output(tmp_path) and "4 CPU and 0 GPU" in output(tmp_path)


@contextlib.contextmanager
def worker_of(
    cluster: Any, folder: Path, way: str = "ray_objects"
) -> Iterator[tuple[OneWorker, WeightPublisher]]:
    """A worker that can be told to take weights with a fault, and what publishes to it."""
    model = make_model("llama_tied", num_hidden_layers=1)
    model.save_pretrained(folder / "model")
    cfg = Config()
    cfg.model.name = str(folder / "model")
    cfg.inference_model.backend = "transformers"
    cfg.inference_model.dtype = Dtype.bfloat16
    cfg.ray.address = cluster.address
    spec = WorkerSpec(cfg, cfg.model.name, [END], PAD, 4, 1, False, weight_transfer=way)
    pool = ray_pool.RayPool(cfg, spec, count=1, actor=FaultyActor)
    try:
        worker = OneWorker(pool)
        yield worker, make_publisher(model, worker, PROMPTS, torch.bfloat16)
    finally:
        pool.close()


@pytest.fixture
def planted(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import what is planted in them."""
    monkeypatch.setenv("PYTHONPATH", str(repo_root / "tests/helpers"), prepend=os.pathsep)


@pytest.mark.usefixtures("planted")
def test_a_part_of_any_tensor_that_is_stale_in_a_worker_is_found(tmp_path: Path, two_nodes: Any) -> None:
    """In one format: Ray carries bytes, and test_publish.py has the engine of the worker in each."""
    with worker_of(two_nodes, tmp_path) as (worker, publisher):

        def on_the_way(fault: Fault | None) -> None:
            worker.on_the_way = fault

        assert_all_are_found(publisher, publisher.verify_at_start, worker.plant)
        assert_all_are_found(publisher, publisher.publish, worker.plant)
        assert_all_are_found(publisher, publisher.publish, on_the_way)
        cases = of_each_kind(every_part(publisher))
        assert_each_is_found(publisher, publisher.publish, worker.plant, cases)
        assert publisher.unreadable == []


@pytest.mark.usefixtures("planted")
def test_a_worker_proves_the_weights_that_a_group_of_processes_sends(tmp_path: Path, two_nodes: Any) -> None:
    """The channel that takes NCCL on GPUs, with gloo in its place."""
    with worker_of(two_nodes, tmp_path, "nccl") as (worker, publisher):
        publisher.verify_at_start(0)
        assert_all_are_found(publisher, publisher.publish, worker.plant)
        assert publisher.unreadable == []
        # A worker that is started again joins a new group.
        worker.pool.kill(0)
        started: Future[Any] = Future()
        worker.pool.start(0, started.set_result)
        assert started.result(240) is None
        publisher.publish(2)


def test_kills_at_random_moments(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command of the documentation, with fewer kills."""
    monkeypatch.setattr("torchrl_grpo.tools.processes.Popen", ForkedPopen)
    monkeypatch.chdir(tmp_path)
    # With this seed the trainer dies, then the worker, and the node process last.
    argv = ["--kills", "3", "--seed", "780", "--longest", "4", "--folder", "soak", "env=jsonl", *words]
    code = soak.main([*argv, "inference_model.num_devices=1"])
    output = capfd.readouterr().out
    print(output)
    assert code == 0
    assert "3 kills" in output and all(f"'{kind}': 1" in output for kind in soak.KINDS)
    assert "FAILS" not in output


@pytest.mark.float32
def test_pictures_reach_a_worker_and_the_reference(
    repo_root: Path, tmp_path: Path, words: list[str], two_nodes: Any
) -> None:
    model = build_tiny_vlm(tmp_path / "vlm")
    pictured = ["env.dataset=pictures", "env.data_path=null", "env.task_args={kinds:[dice],size:48}"]
    pictured += [f"model.name={model}", "model.pictures=true", "policy.kl_coef=0.1", "hydra.run.dir=run"]
    pictured += ["train.total_dialog_turns=32", "train.checkpoint_frequency=0", "eval.num_problems=2"]
    pictured.append(f"ray.address={two_nodes.address}")
    kept = [word for word in words if word.partition("=")[0] not in {w.partition("=")[0] for w in pictured}]
    with started(repo_root, tmp_path, *kept, *pictured) as process:
        assert process.wait(timeout=580) == 0, output(tmp_path)
    assert summary(tmp_path / "run")["groups"]["trained"] == 8
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[1])
    # Without the pictures, worker, trainer and reference would score other prompts.
    assert first["policy/logprob_diff"] < 1e-5 and abs(first["kl/reference"]) < 1e-5
    rows = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    assert all(len(row["pictures"]) == 1 for row in rows)
    stored = {path.name for path in (tmp_path / "run/pictures").iterdir()}
    assert {name for row in rows for name in row["pictures"]} <= stored


def test_vllm_takes_weights_in_flight_from_two_training_ranks(
    repo_root: Path, tmp_path: Path, words: list[str]
) -> None:
    run = tmp_path / "run"
    small = ["inference_model.backend=vllm", "inference_model.kv_cache_gib=1", "train_model.num_devices=2"]
    small += ["inference_model.dtype=bfloat16", "train_model.autocast=bf16", "train.total_dialog_turns=64"]
    more = ["collector.max_policy_age=2", "hydra.run.dir=run"]
    more += ["train.checkpoint_frequency=0"]
    with started(repo_root, tmp_path, *words, *small, *more) as process:
        assert process.wait(timeout=580) == 0, output(tmp_path)
    assert "one worker, a process of its own" in output(tmp_path)
    result = summary(run)
    assert result["groups"]["trained"] == 16 and result["worker_restarts"] == 0
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert 1 <= max(line.get("policy/age_max", 0) for line in metrics) <= 2
    means = [line["publish/logprob_diff_mean"] for line in metrics if "publish/logprob_diff_mean" in line]
    assert means and max(means) < 0.5, "every worker was verified to hold the trainer's weights"
    assert all(line["policy/logprob_diff"] < 0.5 for line in metrics if line["step"] > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_arrive_bit_for_bit_in_every_format(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    sent = {name: parameter.detach() for name, parameter in model.named_parameters()}
    arrived = dict(unpack(pack(sent.items())))
    assert arrived.keys() == sent.keys()
    assert all(torch.equal(arrived[name], sent[name]) and arrived[name].dtype == dtype for name in sent)
