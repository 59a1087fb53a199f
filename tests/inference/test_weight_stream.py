"""Weights that pass through two small files: every server gets all, whenever it asks and whoever ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrl_grpo.inference.pieces import Assembler
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.weight_files import Bucket, divide, read_bucket, whole_tensors
from torchrl_grpo.inference.servers.weight_folder import FolderWeights, read_file
from torchrl_grpo.inference.servers.weight_stream import Segments, StreamReader, TransferEnded, WeightStream

WEIGHTS = {f"w{number}": torch.randn(40, 16) + number for number in range(12)} | {"b": torch.randn(700)}


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightStream:
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 4096)
    return WeightStream(WEIGHTS.items(), Segments(tmp_path), lambda error: error)


class Reads(threading.Thread):
    """A server that loads weights in a thread."""

    def __init__(self, reader: StreamReader, ends_after: int | None = None) -> None:
        super().__init__(daemon=True)
        self.reader, self.ends_after = reader, ends_after
        self.received: dict[str, torch.Tensor] = {}
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            buckets = self.reader.buckets()
            if self.ends_after is not None:
                for _ in range(self.ends_after):
                    next(buckets)
                assert isinstance(buckets, Generator)
                buckets.close()
                self.reader.mark_done()
                return
            self.received = dict(whole_tensors(bucket for bucket in buckets if isinstance(bucket, Bucket)))
        except TransferEnded as error:
            self.error = error


def has_all(read: Reads) -> bool:
    read.join(20)
    assert list(read.received) == list(WEIGHTS)
    return all(torch.equal(read.received[name], tensor) for name, tensor in WEIGHTS.items())


def test_servers_get_all_weights_in_one_pass_and_later_ones_get_them_again(
    stream: WeightStream, tmp_path: Path
) -> None:
    readers = [stream.reader_for(number) for number in range(2)]
    servers = [Reads(reader) for reader in readers]
    done: Future[None] = Future()

    def end() -> None:
        assert all(has_all(server) for server in servers)
        late = Reads(stream.reader_for("late"))
        assert has_all(late)
        done.set_result(None)

    thread = threading.Thread(target=end)
    thread.start()
    stream.send_until(done)
    thread.join()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    assert len(files) == 2 and sum(path.stat().st_size for path in files) <= 4096 + 1024


def test_a_half_wakes_each_server_once(stream: WeightStream, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    has_news = WeightStream._has_news_for

    def counted(self: WeightStream, server_pass: Any) -> bool:
        looks.append(None)
        return has_news(self, server_pass)

    monkeypatch.setattr(WeightStream, "_has_news_for", counted)
    servers = [Reads(stream.reader_for(number)) for number in range(16)]
    ended: Future[None] = Future()

    def end() -> None:
        assert all(has_all(server) for server in servers)
        ended.set_result(None)

    thread = threading.Thread(target=end)
    thread.start()
    stream.send_until(ended)
    thread.join()
    halves = len(list(divide(WEIGHTS.items(), 2048)))
    # It looks before it waits and when it is woken: for each half, and for the beginning and the end.
    assert len(looks) <= 16 * 2 * (halves + 4)


def test_many_weights_travel_in_larger_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [(f"w{number}", torch.zeros(64, 16)) for number in range(200)]
    sizes = [
        sum(piece.content.nbytes for piece in pieces) for pieces in divide(weights, 2**12, most_room=2**14)
    ]
    assert sum(sizes) == 200 * 2**12 and set(sizes[:32]) == {2**12} and sizes[32] == 2**13
    assert all(size <= max(2**12, sum(sizes[:at]) / 16) for at, size in enumerate(sizes))
    assert max(sizes) == 2**14
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 2**13)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**15))
    halves = Segments(tmp_path)
    for slot, pieces in enumerate(divide(weights, halves.room, halves.most_room)):
        halves.write(slot % 2, pieces)
    files = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    assert files == [2**13] * 2, "half of what is free, at most"
    halves.close()


@pytest.mark.parametrize(("servers", "most"), [(1, 2**14), (16, 2**14), (32, 2**15), (500, 2**16)])
def test_files_in_a_folder_soon_grow_and_are_larger_for_many_servers(
    servers: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 2**12)
    monkeypatch.setattr(weight_files, "MOST_BYTES", 2**14)
    weights = [(f"w{number}", torch.full((64, 16), float(number))) for number in range(200)]
    version = FolderWeights(tmp_path, servers).write(weights)
    sizes = [bucket.size for bucket in version.buckets()]
    assert sum(sizes) == 200 * 2**12 and max(sizes) == most
    assert sizes[:7] == [2**12] * 4 + [2**13] * 2 + [2**14], "a small model has small files"
    pieces = [piece for bucket in version.buckets() for piece in read_bucket(bucket, read_file(bucket))]
    for piece, (_, tensor) in zip(pieces, weights, strict=True):
        assert torch.equal(piece.content, tensor.flatten())


def test_a_file_stays_while_the_next_one_is_taken(stream: WeightStream) -> None:
    buckets = stream.reader_for(0).buckets()
    loaded: list[tuple[str, torch.Tensor]] = []
    assembler = Assembler()

    def load(taken: list[Bucket]) -> None:
        # Copies are made at once: what was overwritten too early has the content of later tensors.
        loaded.extend(assembler.take(read_bucket(taken.pop(0))))

    def read() -> None:
        taken: list[Bucket] = []
        for bucket in buckets:
            if bucket is None:
                assert len(taken) == 1
                load(taken)
            else:
                assert isinstance(bucket, Bucket)
                taken.append(bucket)
                if len(taken) == 2:
                    load(taken)
        assert not taken
        done.set_result(None)

    done: Future[None] = Future()
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    stream.send_until(done)
    thread.join(20)
    assert [name for name, _ in loaded] == list(WEIGHTS)
    assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in loaded)


def test_trainer_and_server_share_the_cores_while_weights_pass(
    stream: WeightStream,
) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for item in WEIGHTS.items():
            seen.append(torch.get_num_threads())
            yield item

    torch.set_num_threads(4)
    try:
        stream._weights = weights()
        server, done = Reads(stream.reader_for(0)), Future[None]()

        def end() -> None:
            server.join()
            done.set_result(None)

        threading.Thread(target=end, daemon=True).start()
        stream.send_until(done)
        assert has_all(server) and set(seen) == {2} and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_a_server_that_ends_in_the_middle_holds_up_nobody(stream: WeightStream) -> None:
    readers = [stream.reader_for(number) for number in range(3)]
    lost, whole = Reads(readers[0], ends_after=3), Reads(readers[1])
    # The third was told to load, and ended before it began.
    readers[2].mark_done()
    done: Future[None] = Future()

    def end() -> None:
        whole.join()
        done.set_result(None)

    thread = threading.Thread(target=end)
    thread.start()
    stream.send_until(done)
    thread.join()
    assert has_all(whole) and not lost.is_alive()


def test_servers_are_released_if_the_trainer_cannot_send(stream: WeightStream) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "one", torch.ones(3)
        raise ValueError("no weights")

    stream._weights = broken()
    server = Reads(stream.reader_for(0))
    with pytest.raises(ValueError, match="no weights"):
        stream.send_until(Future())
    server.join(20)
    assert isinstance(server.error, TransferEnded)


@pytest.mark.slow
def test_files_in_a_folder_are_read_again_until_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 4096)
    version = FolderWeights(tmp_path).write(WEIGHTS.items())
    buckets = [Bucket.from_json(bucket.to_json()) for bucket in version.buckets()]
    assert len(buckets) > 5 and not list(tmp_path.rglob("*.part"))
    path = Path(buckets[1].path)
    whole = path.read_bytes()
    # Another machine still sees a part of the file, or other content of the same length.
    for seen in (whole[:100], whole[:-4] + b"late", None):
        path.unlink() if seen is None else path.write_bytes(seen)
        timer = threading.Timer(0.1, path.write_bytes, [whole])
        timer.start()
        assert bytes(read_file(buckets[1]).numpy()) == whole
        timer.join()
    monkeypatch.setattr("torchrl_grpo.inference.servers.weight_folder._LAG_S", 0.1)
    path.write_bytes(whole[:100])
    with pytest.raises(TimeoutError, match=r"1 should have \d+ bytes of weights, and has 100 bytes after 0"):
        read_file(buckets[1])
    del version
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free_mib", "room_mib"), [(10_000, 32), (128, 32), (64, 16), (1, 0.25)])
def test_the_files_leave_half_of_small_shared_memory(
    free_mib: int, room_mib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = free_mib * 2**20
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=total))
    reserved: list[int] = []

    def reserve(file: int, start: int, size: int) -> None:
        reserved.append(size)
        assert sum(reserved) <= total / 2
        os.truncate(file, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    halves = Segments(tmp_path)
    pieces = next(divide([("w", torch.ones(100, 50))], halves.room))
    assert [halves.write(slot, pieces).entries[0][0] for slot in range(2)] == ["w", "w"]
    assert reserved == [room_mib * 2**20] * 2
    # Not what is left now counts: the files are there.
    total = 0
    halves.write(0, pieces)
    assert len(reserved) == 2
    halves.close()
