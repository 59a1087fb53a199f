"""Weights from GPU to GPU: on pretended GPUs with torch's and vLLM's own functions, and on CPUs with gloo."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pretended_links
import pytest
import torch
from pretended_cuda import PretendedCuda
from torch import Tensor

from torchrl_grpo.errors import ConfigError, ModelError
from torchrl_grpo.inference import vllm_compat
from torchrl_grpo.inference.pieces import Assembler, Piece
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.carriers import StreamCarrier
from torchrl_grpo.inference.servers.channels import cuda_ipc, nccl, trial
from torchrl_grpo.inference.servers.channels.cuda_ipc import SharedHalves
from torchrl_grpo.inference.servers.channels.group import NotTogether, ProcessGroupEnded, WeightGroup
from torchrl_grpo.inference.servers.channels.nccl import (
    Broadcaster,
    own_address,
    receive_weights,
    send_weights,
)
from torchrl_grpo.inference.servers.http import ServerLost
from torchrl_grpo.inference.servers.transfer_types import INTERRUPTED, Opening
from torchrl_grpo.inference.servers.vllm.extension import WeightExtension
from torchrl_grpo.inference.servers.weight_files import Bucket, divide
from torchrl_grpo.inference.servers.weight_stream import StreamReader, TransferPostponed, WeightStream

CPU = torch.device("cpu")
# Rows and vectors of odd lengths, and a row that is longer than a message.
WEIGHTS = {f"w{number}": torch.randn(40, 15) + number for number in range(12)} | {
    "wide": torch.randn(2, 600),
    "b": torch.randn(701),
    "none": torch.randn(0, 3),
}
ROOM = 2048
SHORT = {name: tensor for name, tensor in WEIGHTS.items() if name != "wide"}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 2 * ROOM)


class Held:
    """What a rank does with weights, in place of vLLM's model."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.dtype = next(iter(weights.values())).dtype
        self.layout = SimpleNamespace(shapes={name: tuple(tensor.shape) for name, tensor in weights.items()})
        self.assembler = Assembler()
        self.weights: dict[str, Tensor] = {}
        self.messages = 0

    def start_pieces(self, by_loader: bool) -> None:
        self.assembler, self.weights = Assembler(), {}

    def load_pieces(self, pieces: Iterable[Piece]) -> None:
        self.messages += 1
        self.weights |= {name: tensor.clone() for name, tensor in self.assembler.take(pieces)}

    def finish_pieces(self) -> None:
        pass


class Server(WeightExtension):
    """A server of one rank, with the methods that vLLM's worker gets. Requests reach it as JSON."""

    def __init__(self, device: torch.device = CPU, weights: dict[str, Tensor] = WEIGHTS) -> None:
        self.device, self.rank = device, 0
        self.held = Held(weights)
        self._weights = self.held  # type: ignore[assignment]
        self.openings: list[dict[str, Any]] = []

    def take(self, item: Bucket | Opening) -> bool:
        """Return whether it came; False if the pass is interrupted."""
        request = json.loads(json.dumps(item.to_json()))
        if isinstance(item, Bucket):
            self.grpo_load(request)
            return True
        self.openings.append(request)
        return self.grpo_open(request) != INTERRUPTED

    def joined(self) -> int:
        """Return how often it opened a channel."""
        contents = [opening["content"] for opening in self.openings]
        return sum("of_rank" in content or "first" in content for content in contents)


class Reads(threading.Thread):
    """A thread that does for a server what the engine's thread does."""

    def __init__(
        self, reader: StreamReader, server: Server, take: Callable[[Any], bool] | None = None
    ) -> None:
        super().__init__(daemon=True)
        self.reader, self.server = reader, server
        self.take = server.take if take is None else take
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        items: Any = self.reader.buckets()
        try:
            self.server.grpo_start_update()
            for item in items:
                if not self.take(item):
                    raise TransferPostponed("interrupted")
        except Exception as error:  # noqa: BLE001  the tests look at it
            self.error = error
        finally:
            items.close()
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
    held = server.held.weights
    return list(held) == list(weights) and all(
        held[name].device == server.device and torch.equal(held[name].cpu(), weights[name].cpu())
        for name in weights
    )


def publish(carrier: StreamCarrier, servers: dict[str, Server], weights: dict[str, Tensor]) -> None:
    stream = carrier.put(weights.items())
    reads = [Reads(stream.reader_for(name), server) for name, server in servers.items()]

    def check() -> None:
        for read in reads:
            read.join(30)
            assert read.error is None and not read.is_alive(), read.error

    serve(stream, check)
    assert all(has_all(server, weights) for server in servers.values())


class Link:
    """A way of weights to servers.

    Args:
        carrier: the trainer's end.
        devices: where the trainer and servers compute.
        gpus: names of the servers' GPUs.
        weights: weights that it carries.
    """

    def __init__(
        self, carrier: StreamCarrier, devices: list[torch.device], gpus: list[str], weights: dict[str, Tensor]
    ) -> None:
        self.carrier, self.devices, self.gpus = carrier, devices, gpus
        self.weights = weights

    def moved(self, by: float) -> dict[str, Tensor]:
        """Return weights on the trainer's device."""
        return {name: tensor.to(self.devices[0]) + by for name, tensor in self.weights.items()}

    def admit(self, name: str) -> Server:
        """Take on a server."""
        number = "ab".index(name[0])
        self.carrier.admit(name, "unix:/somewhere", [self.gpus[number]])
        return Server(self.devices[1 + number], self.weights)


@pytest.fixture(params=["cuda_ipc", "nccl", "nccl in half precision", "gloo"])
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    """One server on the trainer's GPU and one that reads it, one on each other GPU, or all on a CPU."""
    if request.param == "gloo":
        made = Link(StreamCarrier(channel=Broadcaster(CPU, 20.0)), [CPU] * 3, ["", ""], WEIGHTS)
        yield made
        made.carrier.close()
        return
    shares = request.param == "cuda_ipc"
    with PretendedCuda(3), pretended_links.shared_memory() if shares else pretended_links.nccl():
        gpus = [torch.device("cuda", index) for index in range(3)]
        if shares:
            carrier = StreamCarrier(channel=SharedHalves(gpus[0]))
            made = Link(carrier, [gpus[0], gpus[0], gpus[2]], ["GPU-0", "GPU-2"], SHORT)
        else:
            # Odd numbers of two bytes leave messages that only padding makes readable as long words.
            dtype = torch.bfloat16 if request.param != "nccl" else torch.float32
            weights = {name: tensor.to(dtype) for name, tensor in WEIGHTS.items()}
            made = Link(StreamCarrier(channel=Broadcaster(gpus[0], 20.0)), gpus, ["GPU-1", "GPU-2"], weights)
        yield made
        made.carrier.close()


def test_servers_get_all_weights_and_open_the_channel_once(link: Link) -> None:
    servers = {name: link.admit(name) for name in ("a", "b")}
    for number in range(3):
        publish(link.carrier, servers, link.moved(number))
    assert [server.joined() for server in servers.values()] == [1, 1]
    assert all(server.held.messages > 3 * 5 for server in servers.values()), "weights come in messages"


@pytest.mark.slow
def test_a_server_that_was_started_again_gets_the_weights_alone_and_then_with_the_others(link: Link) -> None:
    servers = {name: link.admit(name) for name in ("a", "b")}
    weights = link.moved(0.0)
    stream = link.carrier.put(weights.items())
    reads = [Reads(stream.reader_for(name), server) for name, server in servers.items()]

    def check() -> None:
        for read in reads:
            read.join(30)
        link.carrier.dismiss("b")
        servers["b again"] = link.admit("b again")
        del servers["b"]
        again = Reads(stream.reader_for("b again"), servers["b again"])
        again.join(30)
        assert again.error is None and has_all(servers["b again"], weights)

    serve(stream, check)
    assert has_all(servers["a"], weights)
    publish(link.carrier, servers, link.moved(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_a_trial_finds_out_before_the_first_weights_whether_they_would_arrive(
    wrong: bool, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = {name: link.admit(name) for name in ("a", "b")}

    def take(server: Server, item: Bucket | Opening) -> None:
        request = json.loads(json.dumps(item.to_json()))
        if wrong and server is servers["b"] and isinstance(item, Bucket):
            request["checksum"] += 1
        error = server.grpo_try(**{"opening" if isinstance(item, Opening) else "bucket": request})
        if error is not None:
            raise RuntimeError(error)

    def refuses(*arguments: Any) -> None:
        raise RuntimeError("no such memory")

    takes: dict[Any, Any] = {name: partial(take, server) for name, server in servers.items()}
    if wrong and not isinstance(link.carrier._channel, SharedHalves):
        takes["b"] = refuses
        # The trainer waits for it.
        monkeypatch.setattr(link.carrier._channel, "_timeout_s", 1.0)
    error = trial.trial_error(link.carrier, takes, link.devices[0])
    if wrong:
        assert isinstance(error, RuntimeError) and not isinstance(error, TransferPostponed)
        return
    assert error is None
    # Nothing of it has reached the weights, and the channel stays open.
    assert all(server.held.messages == 0 for server in servers.values())
    publish(link.carrier, servers, link.moved(0.0))
    assert [server.joined() for server in servers.values()] == [0, 0]


def test_messages_are_no_longer_than_half_a_bucket_or_a_row(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    broadcast = WeightGroup.broadcast

    def noted(group: WeightGroup, content: Tensor) -> None:
        sizes.append(content.nbytes)
        broadcast(group, content)

    monkeypatch.setattr(WeightGroup, "broadcast", noted)
    publish(link.carrier, {"a": link.admit("a")}, link.moved(0.0))
    if isinstance(link.carrier._channel, SharedHalves):
        assert len(link.carrier._channel._buffer) == 2 * ROOM
    else:
        assert max(sizes) <= max(ROOM, 2432)


def _child(port: Connection) -> None:
    """A server in a process of its own, which ends in the middle of the weights."""
    server = Server()
    load = server.held.load_pieces

    def load_pieces(pieces: Iterable[Piece]) -> None:
        load(pieces)
        if server.held.messages == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    server.held.load_pieces = load_pieces  # type: ignore[method-assign]
    server.grpo_start_update()
    port.send(server.take(port.recv()))


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle_interrupts_the_others_who_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Gloo goes on waiting for a process that has gone.
    made: Any = torch.distributed.ProcessGroupGloo
    short = timedelta(seconds=5)
    monkeypatch.setattr(torch.distributed, "ProcessGroupGloo", lambda *place: made(*place[:3], short))
    carrier = StreamCarrier(channel=Broadcaster(CPU, 20.0))
    stays = Server()
    for name in ("stays", "killed"):
        carrier.admit(name, "unix:/somewhere", [""])
    # Both processes need it, and it takes seconds.
    importlib.import_module("vllm.distributed.utils")
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(there,), daemon=True)
    process.start()
    there.close()

    def ask(item: Bucket | Opening) -> bool:
        here.send(item)
        answer: bool = here.recv()
        return answer

    stream = carrier.put(WEIGHTS.items())
    reads = [Reads(stream.reader_for("stays"), stays), Reads(stream.reader_for("killed"), Server(), ask)]

    def check() -> None:
        for read in reads:
            read.join(30)
        assert isinstance(reads[1].error, EOFError) and isinstance(reads[0].error, TransferPostponed)
        assert stays._receiver is not None and stays._receiver._group is None and not stays._is_updating
        # It is not served before the dispatcher has ended the other one, which will come back.
        again = Reads(stream.reader_for("stays"), stays)
        again.join(0.2)
        assert again.is_alive()
        carrier.dismiss("killed")
        again.join(30)
        assert again.error is None and has_all(stays, WEIGHTS)

    serve(stream, check)
    process.join(10)
    carrier.close()


@pytest.mark.slow
def test_the_end_of_a_server_ends_what_is_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL does not notice it: a broadcast to a process that has gone waits for ever."""
    with PretendedCuda(3), pretended_links.nccl():
        gpus = [torch.device("cuda", index) for index in range(3)]
        carrier = StreamCarrier(channel=Broadcaster(gpus[0], 20.0))
        servers = {name: Server(gpus[1 + number]) for number, name in enumerate(("stays", "hangs"))}
        for number, name in enumerate(servers):
            carrier.admit(name, "unix:/somewhere", [f"GPU-{1 + number}"])
        hangs, released = threading.Event(), threading.Event()
        load = servers["hangs"].held.load_pieces

        def load_pieces(pieces: Iterable[Piece]) -> None:
            hangs.set()
            assert released.wait(30)
            load(pieces)

        def waits_for_both(device: torch.device) -> None:
            assert released.wait(30)

        servers["hangs"].held.load_pieces = load_pieces  # type: ignore[method-assign]
        monkeypatch.setattr(torch.cuda, "synchronize", waits_for_both)
        weights = {name: tensor.to(gpus[0]) for name, tensor in WEIGHTS.items()}
        stream = carrier.put(weights.items())
        reads = [Reads(stream.reader_for(name), server) for name, server in servers.items()]

        def check() -> None:
            assert hangs.wait(30)
            carrier.dismiss("hangs")
            # The communicator is aborted, so the device goes on.
            released.set()
            reads[0].join(30)
            assert isinstance(reads[0].error, TransferPostponed)
            again = Reads(stream.reader_for("stays"), servers["stays"])
            again.join(30)
            assert again.error is None and has_all(servers["stays"], weights)

        serve(stream, check)
        carrier.close()


@pytest.mark.slow
@pytest.mark.parametrize("joins", [True, False])
def test_a_server_that_never_joins_is_waited_for_within_a_limit(
    joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_EXIT_NOTICE_S", 0.1)
    carrier = StreamCarrier(channel=Broadcaster(CPU, 1.0))
    carrier.admit("a", "unix:/somewhere", [""])
    stream, server = carrier.put(WEIGHTS.items()), Server()

    def take(item: Any) -> bool:
        # Either nobody comes, or the trainer has another place in mind.
        item.content["port"] = free_port()
        if not joins:
            threading.Event().wait(1.5)
        return joins and server.take(item)

    reads = Reads(stream.reader_for("a"), server, take)
    with pytest.raises(ConfigError, match=r"cannot be connected with each server .*write .*transfer=folder"):
        serve(stream, lambda: reads.join(30))
    reads.join(30)
    assert isinstance(reads.error, TransferPostponed)
    with pytest.raises(NotTogether, match=r"rank 1 of 2 at 127\.0\.0\.1"):
        meeting = {"host": "127.0.0.1", "port": 1, "size": 2, "timeout_s": 1.0}
        WeightGroup(meeting, 1, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], ["refuses"]])
def test_a_server_that_hangs_in_a_trial_is_not_missed_if_something_else_fails_first(
    others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not load the weights that go another way."""
    monkeypatch.setattr(nccl, "_EXIT_NOTICE_S", 0.1)
    carrier, has_begun = StreamCarrier(channel=Broadcaster(CPU, 1.0)), threading.Event()

    def refuses(item: Any) -> None:
        # After a refusal nobody begins to take anything.
        assert has_begun.wait(60)
        raise RuntimeError("no such memory")

    def hangs(item: Any) -> None:
        has_begun.set()
        # The trainer has given up the group by then.
        threading.Event().wait(1.5)
        raise ServerLost("no answer within 1.5 s") from TimeoutError()

    takes: dict[Any, Any] = {**dict.fromkeys(others, refuses), "hangs": hangs}
    for name in takes:
        carrier.admit(name, "unix:/somewhere", [""])
    error = trial.trial_error(carrier, takes, CPU)
    assert isinstance(error, ServerLost)
    with pytest.raises(
        ConfigError, match=r"nccl: .*\(ServerLost: no answer within 1\.5 s\); write .*=folder"
    ):
        trial.fall_back(error, "nccl", "folder", automatic=True)


@pytest.mark.slow
def test_the_end_of_the_trainer_ends_what_a_server_waits_for() -> None:
    carrier = StreamCarrier(channel=Broadcaster(CPU, 20.0))
    carrier.admit("a", "unix:/somewhere", [""])
    server = Server()
    publish(carrier, {"a": server}, WEIGHTS)
    waits: Future[str | None] = Future()
    again = Opening("nccl", {"room": ROOM}).to_json()
    threading.Thread(target=lambda: waits.set_result(server.grpo_open(again)), daemon=True).start()
    carrier.close()
    assert waits.result(20) == INTERRUPTED


@pytest.mark.parametrize("what", ["content", "size", "not opened"])
def test_a_half_that_is_not_what_was_announced_is_refused(what: str) -> None:
    with PretendedCuda() as machine, pretended_links.shared_memory():
        gpu = torch.device("cuda:0")
        halves = SharedHalves(gpu)
        halves.admit("a", "unix:/somewhere", ["GPU-0"])
        opening = halves.open(["a"])["a"]
        machine.reset()
        bucket = halves.write(0, next(divide(((n, t.to(gpu)) for n, t in SHORT.items()), halves.room)))
        waits = [line for line in machine.syncs if line.startswith("torch.cuda.synchronize")]
        assert waits, "the device is waited for before anybody is told"
        server = Server(gpu)
        if what != "not opened":
            server.take(opening)
        if what == "content":
            halves._buffer[5] += 1
        request = bucket.to_json() | ({"size": bucket.size - 64} if what == "size" else {})
        expected = (
            "before its transfer channel" if what == "not opened" else "another checksum than announced"
        )
        with pytest.raises(RuntimeError, match=expected):
            server.grpo_load(request)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port


def pair() -> tuple[WeightGroup, WeightGroup]:
    """Return both ends of a group."""
    meeting = {"host": "127.0.0.1", "port": free_port(), "size": 2, "timeout_s": 20.0}
    other: Future[WeightGroup] = Future()
    threading.Thread(target=lambda: other.set_result(WeightGroup(meeting, 1, CPU)), daemon=True).start()
    return WeightGroup(meeting, 0, CPU), other.result(20)


@pytest.mark.parametrize("what", ["content", "name", "order"])
def test_weights_that_are_not_what_was_sent_are_refused(what: str) -> None:
    trainer, rank = pair()
    shapes = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}
    if what == "name":
        shapes = {name.replace("w3", "w30"): shape for name, shape in shapes.items()}
    if what == "order":
        shapes = {"w1": shapes["w1"], **shapes}
    sending = threading.Thread(target=send_weights, args=(WEIGHTS.items(), trainer, CPU, ROOM), daemon=True)
    broadcast, count = rank.broadcast, iter(range(1000))

    def changed(content: Tensor) -> None:
        broadcast(content)
        if what == "content" and next(count) == 3:
            content[0] += 1

    rank.broadcast = changed  # type: ignore[method-assign]
    sending.start()
    with pytest.raises(RuntimeError, match="other names or another checksum than those sent"):
        list(receive_weights(rank, shapes, torch.float32, CPU, ROOM))
    sending.join(20)
    trainer.end()
    with pytest.raises(ProcessGroupEnded, match="has left the group"):
        trainer.broadcast(torch.zeros(8, dtype=torch.uint8))


def test_gpus_that_weights_do_not_reach_are_refused() -> None:
    sent = Broadcaster(CPU, 1.0)
    with pytest.raises(ConfigError, match=r"one computes on a CPU and the other on a GPU"):
        sent.admit("a", "unix:/somewhere", ["GPU-1"])
    with PretendedCuda(2), pretended_links.shared_memory(peers=False):
        shared = SharedHalves(torch.device("cuda:1"))
        shared.admit("a", "unix:/somewhere", ["GPU-1", "GPU-1"])
        with pytest.raises(ConfigError, match=r"has GPU GPU-0, .* trainer's, GPU-1; write .*=shared_memory"):
            shared.admit("a", "unix:/somewhere", ["GPU-1", "GPU-0"])
        with pytest.raises(ConfigError, match=r"has GPU GPU-7, .* trainer's, GPU-1; write .*=shared_memory"):
            shared.admit("a", "unix:/somewhere", ["GPU-7"])
        with pytest.raises(ConfigError, match=r"at unix:/somewhere computes on a CPU"):
            shared.admit("a", "unix:/somewhere", [""])
        sent = Broadcaster(torch.device("cuda:1"), 1.0)
        with pytest.raises(ConfigError, match=r"the server .* on the trainer's GPU.* write .*=cuda_ipc"):
            sent.admit("a", "unix:/somewhere", ["GPU-1"])
        with pytest.raises(ConfigError, match=r"one computes on a CPU"):
            sent.admit("a", "unix:/somewhere", [""])
        sent.admit("a", "unix:/somewhere", ["GPU-2"])


def test_a_row_that_does_not_fit_is_refused() -> None:
    with PretendedCuda(), pretended_links.shared_memory():
        halves = SharedHalves(torch.device("cuda:0"))
        halves.open([])
        pieces = next(divide([("wide", torch.zeros(2, 2000))], halves.room))
        with pytest.raises(ModelError, match=r"a row of wide has 8000 bytes.*write .*=shared_memory"):
            halves.write(0, pieces)


def test_addresses_of_this_machine() -> None:
    assert own_address("unix:/tmp/socket") == own_address("http://127.0.0.1:8000") == "127.0.0.1"


def test_buffers_lie_outside_of_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle of such a segment is opened with a system call that containers forbid."""
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with PretendedCuda():
        halves = SharedHalves(torch.device("cuda:0"))
        halves.open([])
        assert halves._buffer.device.type == "cuda"
    assert settings == ["expandable_segments:True,expandable_segments:False", "expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    with cuda_ipc._without_expandable_segments():
        pass
    assert len(settings) == 2


@pytest.mark.parametrize("way", ["cuda_ipc", "nccl"])
def test_weights_on_a_gpu_stay_there(way: str) -> None:
    links = pretended_links.shared_memory() if way == "cuda_ipc" else pretended_links.nccl()
    with PretendedCuda(2) as machine, links:
        gpus = [torch.device("cuda", index) for index in range(2)]
        channel = SharedHalves(gpus[0]) if way == "cuda_ipc" else Broadcaster(gpus[0], 20.0)
        carrier = StreamCarrier(channel=channel)
        place = 0 if way == "cuda_ipc" else 1
        link = Link(carrier, [gpus[0], gpus[place]], [f"GPU-{place}"], SHORT)
        servers, weights = {"a": link.admit("a")}, link.moved(0.0)
        publish(carrier, servers, weights)
        machine.reset()
        stream = carrier.put(weights.items())
        reads = Reads(stream.reader_for("a"), servers["a"])
        serve(stream, lambda: reads.join(30))
        assert reads.error is None
        # The checksums' own multipliers are copied once.
        copied = [line for line in machine.uploads if "checksums.py" not in line and "test_" not in line]
        waits = [line for line in machine.syncs if "copy to the CPU" in line]
        assert machine.problems == [] and copied == [] and waits == []
        carrier.close()


@pytest.mark.slow
def test_a_thread_that_joins_goes_on_computing_where_it_did() -> None:
    """vLLM moves the thread that connects GPUs to a stream of its own, which nothing else waits for."""
    with PretendedCuda(2), pretended_links.nccl() as current:
        carrier = StreamCarrier(channel=Broadcaster(torch.device("cuda:0"), 20.0))
        carrier.admit("a", "unix:/somewhere", ["GPU-1"])
        server = Server(torch.device("cuda:1"))
        publish(carrier, {"a": server}, {name: tensor.to("cuda:0") for name, tensor in WEIGHTS.items()})
        assert current == [torch.cuda.current_stream()] * 2
        carrier.close()


def test_vllm_without_nccl_says_so() -> None:
    """The real group and communicator of vLLM, as far as they go without a GPU."""
    port = free_port()
    other: Future[Any] = Future()

    def join() -> None:
        other.set_result(vllm_compat.join_group("127.0.0.1", port, 1, 2, 20.0))

    threading.Thread(target=join, daemon=True).start()
    group = vllm_compat.join_group("127.0.0.1", port, 0, 2, 20.0)
    assert (group.rank, other.result(20).rank) == (0, 1)
    # A torch for CUDA brings NCCL, which finds no GPU.
    reason = "vLLM cannot load NCCL" if torch.version.cuda is None else "NCCL error"
    with pytest.raises(RuntimeError, match=reason):
        vllm_compat.join_nccl(group, torch.device("cpu"))
