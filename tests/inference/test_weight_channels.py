"""Weights from GPU to GPU, with memory of the host in place of a GPU's and gloo in place of NCCL."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from host_memory import HostMemory
from pretended_cuda import PretendedCuda
from torch import Tensor

from torchrl_grpo.errors import ConfigError, ModelError
from torchrl_grpo.inference import vllm_compat
from torchrl_grpo.inference.pieces import Assembler
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.carriers import StreamCarrier
from torchrl_grpo.inference.servers.channels import buffers, nccl, receivers
from torchrl_grpo.inference.servers.channels.buffers import CudaMemory
from torchrl_grpo.inference.servers.channels.cuda_ipc import SharedHalves, write_half
from torchrl_grpo.inference.servers.channels.groups import NotTogether
from torchrl_grpo.inference.servers.channels.nccl import SentHalves, own_address
from torchrl_grpo.inference.servers.channels.types import Halves, Opening, Receiver
from torchrl_grpo.inference.servers.weight_files import Bucket, divide, read_bucket
from torchrl_grpo.inference.servers.weight_stream import StreamReader, TransferPostponed, WeightStream

CPU = torch.device("cpu")
WEIGHTS = {f"w{number}": torch.randn(40, 16) + number for number in range(12)} | {
    "half": torch.randn(30, 8).bfloat16(),
    "b": torch.randn(700),
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 4096)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    made = HostMemory()
    monkeypatch.setattr(receivers, "CudaMemory", lambda device: made)
    return made


class Server:
    """What a server of one rank does with announcements, which reach it as JSON."""

    def __init__(self) -> None:
        self.receiver: Receiver | None = None
        self.assembler = Assembler()
        self.found: dict[str, Tensor] = {}
        self.openings = 0

    def take(self, one: Bucket | Opening) -> bool:
        """Return whether it came; False if the pass is interrupted."""
        told = json.loads(json.dumps(one.to_json()))
        if isinstance(one, Opening):
            self.openings += 1
            self.receiver = receivers.open_receiver(told, CPU, 0)
            return True
        bucket = Bucket.from_json(told)
        content = receivers.receive(self.receiver, bucket)
        if content is None:
            return False
        assert self.receiver is not None
        self.found |= {n: t.clone() for n, t in self.assembler.take(read_bucket(bucket, content))}
        self.receiver.wait_until_unused()
        return True


class Reads(threading.Thread):
    """A thread that does for a server what the engine's thread does."""

    def __init__(self, reader: StreamReader, take: Callable[[Bucket | Opening], bool]) -> None:
        super().__init__(daemon=True)
        self.reader, self.take = reader, take
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        buckets: Any = self.reader.buckets()
        try:
            for one in buckets:
                if not self.take(one):
                    raise TransferPostponed("interrupted")
        except Exception as error:  # noqa: BLE001  the tests look at it
            self.error = error
        finally:
            buckets.close()
            self.reader.mark_done()


def serve(stream: WeightStream, check: Callable[[], None]) -> None:
    """Send weights in this thread until ``check`` has run in another one."""
    done: Future[None] = Future()

    def end() -> None:
        try:
            check()
        except BaseException as error:  # noqa: BLE001  it is passed on
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=end, daemon=True).start()
    stream.send_until(done)
    done.result()


def has_all(server: Server, weights: dict[str, Tensor]) -> bool:
    found, server.found = server.found, {}
    return list(found) == list(weights) and all(torch.equal(found[name], weights[name]) for name in weights)


def publish(carrier: StreamCarrier, servers: dict[str, Server], weights: dict[str, Tensor]) -> None:
    stream = carrier.put(weights.items())
    reads = [Reads(stream.reader_for(name), server.take) for name, server in servers.items()]

    def check() -> None:
        for read in reads:
            read.join(30)
            assert read.error is None and not read.is_alive(), read.error

    serve(stream, check)
    assert all(has_all(server, weights) for server in servers.values())


def moved(by: float) -> dict[str, Tensor]:
    return {name: tensor + by for name, tensor in WEIGHTS.items()}


@pytest.fixture(params=["cuda_ipc", "nccl"])
def carrier(request: pytest.FixtureRequest, memory: HostMemory) -> Iterator[StreamCarrier]:
    halves: Halves = SharedHalves(memory) if request.param == "cuda_ipc" else SentHalves(CPU, 20.0)
    made = StreamCarrier(halves=halves)
    yield made
    made.close()


def admit(carrier: StreamCarrier, name: str) -> Server:
    is_ipc = isinstance(carrier._halves, SharedHalves)
    carrier.admit(name, "unix:/somewhere", ["GPU-1" if is_ipc else ""])
    return Server()


def test_servers_get_all_weights_and_open_the_channel_once(carrier: StreamCarrier) -> None:
    servers = {name: admit(carrier, name) for name in ("a", "b")}
    for number in range(3):
        publish(carrier, servers, moved(number))
    assert [server.openings for server in servers.values()] == [1, 1]
    assert all(len(half) == 2048 for half in carrier._halves._halves)  # type: ignore[attr-defined]


def test_a_server_that_was_started_again_gets_the_weights_alone_and_then_with_the_others(
    carrier: StreamCarrier,
) -> None:
    servers = {name: admit(carrier, name) for name in ("a", "b")}
    stream = carrier.put(WEIGHTS.items())
    reads = [Reads(stream.reader_for(name), server.take) for name, server in servers.items()]

    def check() -> None:
        for read in reads:
            read.join(30)
        carrier.dismiss("b")
        servers["b again"] = admit(carrier, "b again")
        del servers["b"]
        again = Reads(stream.reader_for("b again"), servers["b again"].take)
        again.join(30)
        assert again.error is None and has_all(servers["b again"], WEIGHTS)

    serve(stream, check)
    assert has_all(servers["a"], WEIGHTS)
    publish(carrier, servers, moved(1.0))


def _child(port: Connection) -> None:
    """A server in a process of its own, which ends in the middle of the weights."""
    server = Server()
    for _ in range(3):
        port.send(server.take(port.recv()))
    port.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_server_that_is_killed_in_the_middle_interrupts_the_others_who_ask_again() -> None:
    carrier = StreamCarrier(halves=SentHalves(CPU, 20.0))
    stays = admit(carrier, "stays")
    carrier.admit("killed", "unix:/somewhere", [""])
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(there,), daemon=True)
    process.start()
    there.close()

    def ask(one: Bucket | Opening) -> bool:
        here.send(one)
        answer: bool = here.recv()
        return answer

    stream = carrier.put(WEIGHTS.items())
    reads = [Reads(stream.reader_for(name), take) for name, take in (("stays", stays.take), ("killed", ask))]

    def check() -> None:
        for read in reads:
            read.join(30)
        assert isinstance(reads[1].error, EOFError) and isinstance(reads[0].error, TransferPostponed)
        stays.found = {}
        stays.assembler = Assembler()
        # It is not served before the dispatcher has ended the other one, which will come back.
        again = Reads(stream.reader_for("stays"), stays.take)
        again.join(0.2)
        assert again.is_alive()
        carrier.dismiss("killed")
        again.join(30)
        assert again.error is None and has_all(stays, WEIGHTS)

    serve(stream, check)
    process.join(10)
    carrier.close()


def test_a_server_that_never_joins_is_waited_for_within_a_limit() -> None:
    with pytest.raises(NotTogether, match=r"rank 1 of 2 at 127\.0\.0\.1"):
        place = {"host": "127.0.0.1", "port": nccl._free_port("127.0.0.1"), "first": 1, "size": 2}
        receivers.open_receiver({"kind": "nccl", "timeout_s": 1.0, **place}, CPU, 0)


def test_the_end_of_the_trainer_ends_what_a_server_waits_for() -> None:
    carrier = StreamCarrier(halves=SentHalves(CPU, 20.0))
    server = admit(carrier, "a")
    publish(carrier, {"a": server}, WEIGHTS)
    assert server.receiver is not None
    waits: Future[Tensor | None] = Future()
    receive = server.receiver.receive
    threading.Thread(target=lambda: waits.set_result(receive(0, 64)), daemon=True).start()
    carrier.close()
    assert waits.result(20) is None


@pytest.mark.parametrize("what", ["content", "size", "not opened"])
def test_a_half_that_is_not_what_was_announced_is_refused(what: str, memory: HostMemory) -> None:
    halves = SharedHalves(memory)
    halves.admit("a", "unix:/somewhere", ["GPU-1"])
    openings, _ = halves.open(["a"])
    bucket = halves.write(0, next(divide(WEIGHTS.items(), halves.room)))
    assert memory.waits == 1, "the device is waited for before anybody is told"
    receiver = None if what == "not opened" else receivers.open_receiver(openings["a"].to_json(), CPU, 0)
    if what == "content":
        halves._halves[0][5] += 1
    told = bucket.to_json() | ({"size": bucket.size - 64} if what == "size" else {})
    expected = "before its transfer channel" if what == "not opened" else "another checksum than announced"
    with pytest.raises(RuntimeError, match=expected):
        receivers.receive(receiver, Bucket.from_json(told))


def test_gpus_that_weights_do_not_reach_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedHalves(HostMemory(readers=("GPU-2",)))
    shared.admit("a", "unix:/somewhere", ["GPU-1", "GPU-2"])
    with pytest.raises(ConfigError, match=r"has GPU GPU-3, .* trainer's, GPU-1; write .*=shared_memory"):
        shared.admit("a", "unix:/somewhere", ["GPU-1", "GPU-3"])
    with pytest.raises(ConfigError, match=r"at unix:/somewhere computes on a CPU"):
        shared.admit("a", "unix:/somewhere", [""])
    sent = SentHalves(CPU, 1.0)
    with pytest.raises(ConfigError, match=r"one computes on a CPU and the other on a GPU"):
        sent.admit("a", "unix:/somewhere", ["GPU-1"])
    monkeypatch.setattr(nccl, "gpu_name", lambda device: "GPU-1")
    with pytest.raises(ConfigError, match=r"is on the trainer's GPU.* write .*=cuda_ipc"):
        sent.admit("a", "unix:/somewhere", ["GPU-1"])
    with pytest.raises(ConfigError, match=r"one computes on a CPU"):
        sent.admit("a", "unix:/somewhere", [""])
    sent.admit("a", "unix:/somewhere", ["GPU-2"])


def test_a_row_that_does_not_fit_is_refused() -> None:
    pieces = next(divide([("wide", torch.zeros(2, 2000))], 2048))
    with pytest.raises(ModelError, match=r"a row of wide has 8000 bytes.*write .*=shared_memory"):
        write_half(torch.empty(2048, dtype=torch.uint8), 0, pieces, "nccl")


def test_addresses_of_this_machine() -> None:
    assert own_address("unix:/tmp/socket") == own_address("http://127.0.0.1:8000") == "127.0.0.1"


def test_buffers_lie_outside_of_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle of such a segment is opened with a system call that containers forbid."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with PretendedCuda():
        half = CudaMemory(torch.device("cuda:0")).allocate(64)
        assert half.device.type == "cuda"
    assert told == ["expandable_segments:True,expandable_segments:False", "expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    with buffers._without_expandable_segments():
        pass
    assert len(told) == 2


def test_weights_on_a_gpu_are_packed_and_put_together_there() -> None:
    with PretendedCuda() as machine:
        device = torch.device("cuda:0")
        weights = {name: tensor.to(device) for name, tensor in WEIGHTS.items()}
        half = torch.empty(2048, dtype=torch.uint8, device=device)
        assembler = Assembler()
        found: dict[str, Tensor] = {}
        for pieces in divide(weights.items(), 2048):
            bucket = write_half(half, 0, pieces, "cuda_ipc")
            found |= dict(assembler.take(read_bucket(bucket, half)))
        assert all(found[name].device == device for name in WEIGHTS)
        # The checksums' own multipliers are copied once.
        copied = [line for line in machine.uploads if "checksums.py" not in line and "test_" not in line]
        assert machine.problems == [] and copied == []
        assert all(torch.equal(found[name].cpu(), WEIGHTS[name]) for name in WEIGHTS)


def test_vllm_without_nccl_says_so() -> None:
    """The real group and communicator of vLLM, as far as they go without a GPU."""
    port = nccl._free_port("127.0.0.1")
    other: Future[Any] = Future()

    def join() -> None:
        other.set_result(vllm_compat.join_group("127.0.0.1", port, 1, 2, 20.0))

    threading.Thread(target=join, daemon=True).start()
    group = vllm_compat.join_group("127.0.0.1", port, 0, 2, 20.0)
    assert (group.rank, other.result(20).rank) == (0, 1)
    # A torch for CUDA brings NCCL, which finds no GPU.
    says = "vLLM cannot load NCCL" if torch.version.cuda is None else "NCCL error"
    with pytest.raises(RuntimeError, match=says):
        vllm_compat.join_nccl(group, torch.device("cpu"))
