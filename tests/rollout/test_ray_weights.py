"""Weights that reach workers on Ray from device to device, with threads in place of Ray's processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pretended_links
import pytest
import torch
from pretended_cuda import PretendedCuda
from slow_cases import slow_except
from torch import Tensor

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Dtype, WeightTransfer
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference.checksums import Checksums
from torchrl_grpo.inference.protocol import Completion, Probe, ProbeResult, Request, SteppingEngine
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.channels import cuda_ipc, nccl
from torchrl_grpo.inference.servers.channels.group import WeightGroup
from torchrl_grpo.inference.servers.channels.receiver import Receiver
from torchrl_grpo.inference.servers.weight_stream import TransferPostponed, WeightStream
from torchrl_grpo.rollout.groups import Group, Response
from torchrl_grpo.rollout.workers import ray_pool, ray_worker
from torchrl_grpo.rollout.workers.dispatcher import Dispatcher
from torchrl_grpo.rollout.workers.ray_pool import RayPool
from torchrl_grpo.rollout.workers.ray_worker import RolloutActor, WorkerSpec
from torchrl_grpo.rollout.workers.scheduler import Scheduler
from torchrl_grpo.rollout.workers.staleness import StalenessTracker
from torchrl_grpo.rollout.workers.types import LoadWeightsCommand
from torchrl_grpo.rollout.workers.worker_group import WorkerGroup

CPU = torch.device("cpu")
WEIGHTS = {f"w{number}": torch.randn(40, 15) + number for number in range(12)} | {"b": torch.randn(701)}
PROBE = Probe([[1, 2]], 1, {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()})


class Holds(SteppingEngine):
    """An engine that keeps the weights it is given.

    Attributes:
        updates: numbers of updates that began and ended.
        ended: set when an update has ended.
        on_weight: called for each weight.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.updates = [0, 0]
        self.ended = threading.Event()
        self.on_weight: Callable[[], object] = lambda: None

    def start_update(self) -> None:
        self.updates[0] += 1

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.on_weight()
            self.weights[name] = tensor.clone()

    def finish_update(self) -> None:
        self.updates[1] += 1
        self.ended.set()

    def next_tokens(self, probe: Probe) -> ProbeResult:
        return ProbeResult(torch.zeros(1, 1), torch.zeros(1, 1), 0)

    def checksums(self) -> tuple[Checksums, ...]:
        return ()

    def abort_all(self) -> dict[Hashable, Completion]:
        return {}

    def submit(self, requests: Sequence[Request]) -> None:
        pass

    def step(self) -> list[tuple[Hashable, Completion]]:
        return []

    def locate_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        pass

    def reset_cache(self) -> None:
        pass

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class Actor(RolloutActor):
    """A worker with that engine."""

    def make_engine(self, spec: WorkerSpec) -> SteppingEngine:
        return Holds()


class Handle:
    """What Ray returns for an actor, whose calls run one by one in a thread."""

    def __init__(self, actor: RolloutActor) -> None:
        self.actor = actor
        self.thread = ThreadPoolExecutor(1)
        self.calls: list[Future[Any]] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            call: Future[Any] = Future()
            self.calls.append(call)

            def run() -> None:
                try:
                    result = getattr(self.actor, name)(*arguments)
                except Exception as error:  # noqa: BLE001  Ray hands it on
                    result = error
                if not call.done():
                    call.set_exception(result) if isinstance(result, Exception) else call.set_result(result)

            self.thread.submit(run)
            return SimpleNamespace(future=lambda: call)

        return SimpleNamespace(remote=remote)

    @property
    def engine(self) -> Holds:
        engine = self.actor.worker.engine
        assert isinstance(engine, Holds)
        return engine

    def die(self) -> None:
        """End as a process that is killed: open calls fail, and nobody is told."""
        for call in self.calls:
            if not call.done():
                call.set_exception(RuntimeError("the actor has died"))


@pytest.fixture(autouse=True)
def threads_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 4096)

    def remote(actor: type[RolloutActor]) -> Any:
        made = SimpleNamespace(remote=lambda: Handle(actor()))
        return SimpleNamespace(options=lambda **options: made)

    stand_in = SimpleNamespace(
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 8.0, "GPU": 8.0},
        remote=remote,
        get=lambda ref, timeout=None: None if ref is None else ref.future().result(timeout),
        put=lambda packed: packed,
        kill=Handle.die,
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
    )
    monkeypatch.setattr(ray_pool, "ray", stand_in)
    monkeypatch.setattr(ray_worker, "ray", stand_in)
    group = SimpleNamespace(ready=lambda: None)
    monkeypatch.setattr(ray_pool, "placement_group", lambda bundles, strategy: group)
    monkeypatch.setattr(ray_pool, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(ray_pool, "PlacementGroupSchedulingStrategy", lambda group, index: None)


def make_pool(train_device: torch.device, count: int, way: str = "nccl", automatic: bool = False) -> RayPool:
    cfg = Config()
    cfg.inference_model.dtype = Dtype.float32
    cfg.inference_model.weight_transfer = WeightTransfer.auto if automatic else WeightTransfer(way)
    cfg.collector.timeout_s = 20.0
    threads = torch.get_num_threads()
    on_gpu = train_device.type == "cuda"
    more = {"weight_transfer": way, "train_device": train_device}
    spec = WorkerSpec(cfg, "model", [0], 0, 4, threads, on_gpu, **more)  # type: ignore[arg-type]
    return RayPool(cfg, spec, count=count, actor=Actor)


def start(pool: RayPool, index: int) -> Any:
    """Start a worker, and return what it reports."""
    started: Future[Any] = Future()
    pool.start(index, started.set_result)
    return started.result(30)


def publish(pool: RayPool, weights: dict[str, Tensor], indices: Sequence[int]) -> list[Any]:
    """Publish weights as the trainer does, and return what workers report."""
    content = pool.put_weights(weights.items())
    return load(pool, content, indices)


def load(pool: RayPool, content: Any, indices: Sequence[int]) -> list[Any]:
    results: list[Future[Any]] = [Future() for _ in indices]
    all_loaded: Future[None] = Future()
    for index, result in zip(indices, results, strict=True):
        command = LoadWeightsCommand(content, 1, PROBE, return_interrupted=False)

        def done(value: Any, result: Future[Any] = result) -> None:
            result.set_result(value)
            if all(other.done() for other in results):
                all_loaded.set_result(None)

        pool.call(index, command, done)
    if isinstance(content, WeightStream):
        content.send_until(all_loaded)
    return [result.result(30) for result in results]


@pytest.fixture(params=["cuda_ipc", "nccl", "gloo"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayPool]:
    """Two workers, on GPUs of their own or on a CPU."""
    if request.param == "gloo":
        pool = make_pool(CPU, 2)
        yield pool
        pool.close()
        return
    shares = request.param == "cuda_ipc"
    # One worker may be on the trainer's GPU if it reads memory there.
    devices = iter(range(0 if shares else 1, 10))

    def setup(actor: RolloutActor, spec: WorkerSpec) -> tuple[str, str]:
        made = RolloutActor.setup(actor, spec)
        # Its own first GPU, which this process sees under another number.
        actor.device = torch.device("cuda", next(devices))
        actor.receiver = Receiver(actor.device)
        return made[0], f"GPU-{actor.device.index}"

    monkeypatch.setattr(Actor, "setup", setup)
    with PretendedCuda(4), pretended_links.shared_memory() if shares else pretended_links.nccl():
        pool = make_pool(torch.device("cuda:0"), 2, request.param if shares else "nccl")
        yield pool
        pool.close()


def holds(pool: RayPool, index: int, weights: dict[str, Tensor]) -> bool:
    handle: Handle = pool._actors[index]
    held = handle.engine.weights
    return list(held) == list(weights) and all(
        held[name].device == handle.actor.device and torch.equal(held[name].cpu(), weights[name].cpu())
        for name in weights
    )


def moved(pool: RayPool, by: float) -> dict[str, Tensor]:
    device = pool._spec.train_device
    return {name: tensor.to(device) + by for name, tensor in WEIGHTS.items()}


def test_workers_get_all_weights_and_open_the_channel_once(pool: RayPool) -> None:
    assert [start(pool, index) for index in range(2)] == [None, None]
    opened: list[Any] = []
    for number in range(3):
        weights = moved(pool, number)
        for result in publish(pool, weights, [0, 1]):
            assert isinstance(result, tuple) and isinstance(result[0], ProbeResult)
        assert all(holds(pool, index, weights) for index in range(2))
        receivers = [pool._actors[index].actor.receiver for index in range(2)]
        now = [receiver._group or receiver._halves for receiver in receivers]
        assert None not in now and (number == 0 or now == opened)
        opened = now


@pytest.mark.parametrize("pool", ["cuda_ipc"], indirect=True)
def test_a_worker_that_is_killed_holds_up_nobody(pool: RayPool) -> None:
    for index in range(2):
        start(pool, index)
    first, second = pool._actors
    second.engine.on_weight = lambda: threading.Thread(target=pool.kill, args=(1,)).start()
    weights = moved(pool, 0.0)
    content = pool.put_weights(weights.items())
    results = load(pool, content, [0, 1])
    assert isinstance(results[0], tuple) and isinstance(results[1], RuntimeError)
    assert first.engine.updates == [1, 1]
    assert start(pool, 1) is None
    assert isinstance(load(pool, content, [1])[0], tuple)
    assert all(holds(pool, index, weights) for index in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["nccl"], indirect=True)
@pytest.mark.parametrize("when", ["in the middle", "at the end"])
def test_a_worker_that_is_killed_is_replaced_and_all_get_the_weights(
    when: str, pool: RayPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(2):
        start(pool, index)
    pool.put_weights([])
    weights, first, second = moved(pool, 0.0), pool._actors[0], pool._actors[1]
    has_begun, has_ended = threading.Event(), threading.Event()

    def hang() -> None:
        has_begun.set()
        has_ended.wait(30)

    second.engine.on_weight = hang
    count = iter(range(1000))
    broadcast, synchronize = WeightGroup.broadcast, WeightGroup.synchronize

    def kill(group: WeightGroup) -> None:
        if not group._watches and not has_ended.is_set():
            assert has_begun.wait(30)
            # As the dispatcher does it in its own thread when it hears of it.
            pool.kill(1)
            has_ended.set()

    def broadcasts(group: WeightGroup, content: Tensor) -> None:
        if when == "in the middle" and not group._watches and next(count) == 5:
            kill(group)
        broadcast(group, content)

    def synchronizes(group: WeightGroup) -> None:
        if not group._watches and not has_ended.is_set():
            assert first.engine.ended.wait(30)
            kill(group)
        synchronize(group)

    monkeypatch.setattr(WeightGroup, "broadcast", broadcasts)
    monkeypatch.setattr(WeightGroup, "synchronize", synchronizes)
    content = pool.put_weights(weights.items())
    results = load(pool, content, [0, 1])
    assert isinstance(results[1], RuntimeError)
    # The engine can take weights again.
    assert first.engine.updates == [1, 1]
    missing = [0, 1] if when == "in the middle" else [1]
    assert isinstance(results[0], TransferPostponed if when == "in the middle" else tuple)
    assert start(pool, 1) is None
    results = load(pool, content, missing)
    assert all(isinstance(result, tuple) for result in results), results
    assert all(holds(pool, index, weights) for index in range(2))
    weights = moved(pool, 1.0)
    publish(pool, weights, [0, 1])
    assert all(holds(pool, index, weights) for index in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["cuda_ipc", "nccl"], indirect=True)
def test_publications_wait_for_no_worker_that_starts_again_and_it_gets_the_newest_weights(
    pool: RayPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(
        StalenessTracker(2, 2, 9),
        2,
        lambda number: Group(number, [1], number, [Response()]),
        wait_for_running=False,
        return_interrupted=False,
    )
    dispatcher = Dispatcher(scheduler, pool, score_rewards=lambda groups: [], timeout_s=60.0, max_restarts=1)
    group = WorkerGroup(dispatcher)
    group.send(moved(pool, 0.0).items(), 0, PROBE)
    setup, may_start = Actor.setup, threading.Event()

    def starts_late(actor: Actor, spec: WorkerSpec) -> tuple[str, str] | None:
        may_start.wait(60)
        return setup(actor, spec)

    def dies() -> None:
        raise ConnectionError("killed")

    monkeypatch.setattr(Actor, "setup", starts_late)
    pool._actors[1].engine.on_weight = dies
    for version in (1, 2):
        weights = moved(pool, version)
        delivery = group.send(weights.items(), version, PROBE)
        assert holds(pool, 0, weights) and not scheduler.workers[1].ready
    may_start.set()
    with ThreadPoolExecutor(1) as thread:
        # The trainer waits for something.
        results = thread.submit(lambda: [delivery.results_queue.get(timeout=60) for _ in range(2)])
        dispatcher.serve_until(results)
    assert holds(pool, 1, weights)
    dispatcher.close()


@pytest.mark.parametrize(("way", "gpu"), [("cuda_ipc", 0), ("cuda_ipc", 1), ("nccl", 1)])
def test_weights_of_workers_on_gpus_stay_out_of_the_memory_of_the_host(
    way: str, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = pretended_links.shared_memory() if way == "cuda_ipc" else pretended_links.nccl()
    with PretendedCuda(2) as machine, links:
        monkeypatch.setattr(WorkerSpec, "device", torch.device("cuda", gpu))
        pool = make_pool(torch.device("cuda:0"), 1, way)
        start(pool, 0)
        publish(pool, moved(pool, 0.0), [0])
        weights = moved(pool, 1.0)
        machine.reset()
        publish(pool, weights, [0])
        # The checksums' own multipliers are copied once.
        uploads = [line for line in machine.uploads if "checksums.py" not in line]
        downloads = [line for line in machine.syncs if "copy to the CPU" in line]
        assert uploads == [] and downloads == [] and holds(pool, 0, weights)
        pool.close()


def test_a_worker_on_the_gpu_of_the_trainer_is_refused() -> None:
    with PretendedCuda(1), pretended_links.nccl():
        pool = make_pool(torch.device("cuda:0"), 1)
        refused = start(pool, 0)
        assert isinstance(refused, ConfigError)
        assert "the worker at http://127.0.0.1 is on the trainer's GPU" in str(refused)
        assert "write inference_model.weight_transfer=cuda_ipc" in str(refused)
        pool.close()


def test_a_worker_on_a_gpu_that_cannot_read_the_trainers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with PretendedCuda(2), pretended_links.shared_memory(peers=False):
        monkeypatch.setattr(WorkerSpec, "device", torch.device("cuda:1"))
        pool = make_pool(torch.device("cuda:0"), 1, "cuda_ipc")
        refused = start(pool, 0)
        assert isinstance(refused, ConfigError)
        assert "the worker at http://127.0.0.1 has GPU GPU-1, which does not read the memory" in str(refused)
        assert "write inference_model.weight_transfer=ray_objects" in str(refused)
        pool.close()


FAULTS = ["cuda_ipc: peers", "cuda_ipc: opens", "cuda_ipc: content", "nccl: joins", "nccl: content", "hangs"]


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("fault", slow_except(FAULTS[:3], FAULTS))
def test_a_trial_that_fails_loses_nothing(
    fault: str, automatic: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the user chose the way, the run ends with what to write; otherwise weights go through the host."""
    way, what = fault.split(": ") if ": " in fault else ("cuda_ipc", fault)
    peers = what != "peers"
    links = pretended_links.shared_memory(peers) if way == "cuda_ipc" else pretended_links.nccl()
    released = threading.Event()

    def refuses(*arguments: Any) -> None:
        raise RuntimeError("the driver refuses")

    def hangs(*arguments: Any) -> None:
        released.wait(30)

    receive = Receiver.receive

    def other(receiver: Receiver, *arguments: Any) -> Any:
        for pieces in receive(receiver, *arguments):
            yield pieces
            raise RuntimeError("another checksum")

    with PretendedCuda(2), links:
        monkeypatch.setattr(WorkerSpec, "device", torch.device("cuda:1"))
        monkeypatch.setattr(nccl, "_EXIT_NOTICE_S", 1.0)
        pool = make_pool(torch.device("cuda:0"), 2, way, automatic)
        pool._trial_s = 1.0 if what == "hangs" else 20.0
        if what == "opens":
            monkeypatch.setattr(cuda_ipc, "_open", refuses)
        elif what == "joins":
            monkeypatch.setattr("torchrl_grpo.inference.vllm_compat.join_nccl", refuses)
        elif what == "content":
            monkeypatch.setattr(Receiver, "receive", other)
        elif what == "hangs":
            monkeypatch.setattr(Receiver, "receive", hangs)
        refused = [answer for answer in (start(pool, 0), start(pool, 1)) if answer is not None]
        weights = moved(pool, 0.0)
        if automatic and what != "hangs":
            assert refused == []
            for result in publish(pool, weights, [0, 1]):
                assert isinstance(result, tuple)
            for number in range(2):
                held = pool._actors[number].engine.weights
                assert all(torch.equal(held[name].cpu(), weights[name].cpu()) for name in weights)
            # A worker that is started again gets them in the same way.
            pool.kill(1)
            assert start(pool, 1) is None
            (result,) = publish(pool, weights, [1])
            assert isinstance(result, tuple)
            message = capsys.readouterr().err
            assert message.count("warning: weights go by ray objects, through the host's memory.") == 1
        else:
            with pytest.raises(ConfigError) as raised:
                raise refused[0] if refused else _trial_of(pool, weights)
            message = str(raised.value)
        released.set()
        pool.close()
    assert f"inference_model.weight_transfer={way}: " in message
    assert "write inference_model.weight_transfer=ray_objects" in message


def _trial_of(pool: RayPool, weights: dict[str, Tensor]) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        pool.put_weights(weights.items())
    return raised.value


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["cuda_ipc", "nccl"], indirect=True)
def test_an_error_of_the_engine_reaches_the_caller(pool: RayPool) -> None:
    for index in range(2):
        start(pool, index)

    def fail() -> None:
        threading.Thread(target=pool.kill, args=(1,)).start()
        raise ValueError("the engine refuses it")

    pool._actors[1].engine.on_weight = fail
    _, second = publish(pool, moved(pool, 0.0), [0, 1])
    assert isinstance(second, ValueError | RuntimeError)
