"""``python -m benchmarks.publishing``: time and memory of a publication to a vLLM server.

Publications to a server and to an engine in this process alternate, so that their ratio holds on a shared
machine. Memory is measured in publications of their own, because reading it takes time: the anonymous memory
of trainer and server beside what they had before, and the files in shared memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch

from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.inference.checksums import checksum_tensor
from torchrl_grpo.inference.servers.carriers import (
    SHARED_MEMORY,
    Carrier,
    CopyCarrier,
    FolderCarrier,
    StreamCarrier,
)
from torchrl_grpo.inference.servers.engine import ServerEngine, ServerRequirements
from torchrl_grpo.inference.servers.http import ServerConnection
from torchrl_grpo.inference.servers.kinds import VLLM
from torchrl_grpo.inference.servers.process import ServerProcess
from torchrl_grpo.inference.servers.vllm.api import VLLMApi
from torchrl_grpo.inference.servers.vllm.command import vllm_launch
from torchrl_grpo.inference.servers.weight_stream import WeightStream
from torchrl_grpo.inference.vllm_arguments import vllm_arguments
from torchrl_grpo.inference.vllm_engine import VLLMEngine
from torchrl_grpo.models.loading import load_model
from torchrl_grpo.models.smollm2 import prepare
from torchrl_grpo.planning.cores import PASSIVE_WAIT_ENV, allowed_cores, worker_env

_MIB = 2**20
_SIZES: dict[str, Any] = {
    "seed": 0,
    "gpu_memory_utilization": 0.4,
    "kv_cache_gib": 1,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "dtype": torch.float32,
}


class _Weights:
    """A model's weights as the publisher sends them, with their checksums."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def __iter__(self) -> Any:
        for name, parameter in self._model.named_parameters():
            checksum_tensor(parameter)
            yield name, parameter.detach()


class _TimedApi(VLLMApi):
    """The routes of a vLLM server, with the time between a pause and its end."""

    paused_s = 0.0
    _began = 0.0

    def pause(self, server: ServerConnection) -> None:
        self._began = time.perf_counter()
        super().pause(server)

    def resume(self, server: ServerConnection) -> None:
        super().resume(server)
        self.paused_s = time.perf_counter() - self._began


class _Peak:
    """The most memory of processes, sampled in a thread."""

    def __init__(self, processes: dict[str, list[psutil.Process]]) -> None:
        self._processes = processes
        self._stop = threading.Event()
        self.start = self._now()
        self.most = dict(self.start)
        self._thread = threading.Thread(target=self._watch)

    def _now(self) -> dict[str, float]:
        bytes_used = {
            name: sum(_anonymous(process.pid) for process in listed)
            for name, listed in self._processes.items()
        }
        files = [path for path in SHARED_MEMORY.glob("torchrl-grpo-*/*") if path.is_file()]
        return {**bytes_used, "shared": float(sum(path.stat().st_blocks * 512 for path in files))}

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            for name, size in self._now().items():
                self.most[name] = max(self.most[name], size)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _anonymous(pid: int) -> float:
    """Return the bytes of a process that are no file."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return float(line.split()[1]) * 1024
    return 0.0


def _publish(engine: ServerEngine, carrier: Carrier, model: torch.nn.Module) -> float:
    """Publish, and return the seconds that it took."""
    started = time.perf_counter()
    content: Any = carrier.put(_Weights(model))
    done: Future[None] = Future()

    def load() -> None:
        try:
            engine.load_weights(content.reader_for(0) if isinstance(content, WeightStream) else content)
        except BaseException as error:  # noqa: BLE001  it is passed on
            done.set_exception(error)
        else:
            done.set_result(None)

    thread = threading.Thread(target=load)
    thread.start()
    if isinstance(content, WeightStream):
        content.send_until(done)
    thread.join()
    done.result()
    return time.perf_counter() - started


def _in_process(engine: VLLMEngine, model: torch.nn.Module) -> float:
    started = time.perf_counter()
    engine.load_weights(_Weights(model))
    return time.perf_counter() - started


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publishing")
    parser.add_argument("--rounds", type=int, default=10, help="publications of each way")
    parser.add_argument(
        "--threads",
        type=int,
        default=allowed_cores(),
        help="CPU threads of trainer and server; all cores if they work in turn, as in a synchronous run",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = str(prepare())
    model = load_model(source, ModelConfig(name=source), torch.device("cpu"), torch.float32)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    size = sum(parameter.nbytes for parameter in model.parameters()) / _MIB
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = ServerProcess(
            VLLM,
            vllm_launch(source, vllm_arguments(on_cpu=True, **_SIZES), on_cpu=True),
            environment=worker_env(args.threads),
            log=folder / "server.log",
        )
        stack.callback(server.kill)
        server.wait_until_ready(600)
        connection = ServerConnection(server.address, server.key, 300)
        connection.wait_until_up(30)
        requirements = ServerRequirements(torch.float32, None, 512)
        api = _TimedApi()
        engine = ServerEngine(connection, api, requirements=requirements, folder=SHARED_MEMORY, timeout_s=300)
        stack.callback(engine.close)
        engine.locate_weights(shapes)
        first = psutil.Process(server.pid)
        processes = {
            "trainer": [psutil.Process()],
            "server": [first, *first.children(recursive=True)],
        }
        ways: dict[str, Callable[[], Carrier]] = {
            "shared memory, trainer waits": StreamCarrier,
            "shared memory, trainer goes on": CopyCarrier,
            "folder": lambda: FolderCarrier(folder / "weights"),
        }
        memory: dict[str, dict[str, float]] = {}
        for name, make in ways.items():
            carrier = make()
            for _ in range(3):
                _publish(engine, carrier, model)
            with _Peak(processes) as peak:
                for _ in range(2):
                    _publish(engine, carrier, model)
            memory[name] = {key: (peak.most[key] - peak.start[key]) / _MIB for key in ("trainer", "server")}
            memory[name]["shared"] = peak.most["shared"] / _MIB
            carrier.close()
        inside = VLLMEngine(source, device=torch.device("cpu"), **_SIZES)
        stack.callback(inside.close)
        inside.locate_weights(shapes)
        for _ in range(3):
            _in_process(inside, model)
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
        carriers = {name: make() for name, make in ways.items()}
        for carrier in carriers.values():
            for _ in range(3):
                _publish(engine, carrier, model)
        for _ in range(args.rounds):
            for name, carrier in carriers.items():
                alone = _in_process(inside, model)
                whole = _publish(engine, carrier, model)
                times[name].append((api.paused_s, whole, alone))
        for carrier in carriers.values():
            carrier.close()
        print(f"SmolLM2-135M in float32, {size:.0f} MiB")
        for name, rows in times.items():
            paused, wholes, inside_s = zip(*rows, strict=True)
            ratios = [pause / other for pause, other in zip(paused, inside_s, strict=True)]
            print(
                f"{name}: pause to resume {_spread(paused)} s, whole {_spread(wholes)} s, in the process "
                f"{_spread(inside_s)} s, ratio {_spread(ratios)}; beside the model: trainer "
                f"{memory[name]['trainer']:.0f} MiB, server {memory[name]['server']:.0f} MiB, shared memory "
                f"{memory[name]['shared']:.0f} MiB"
            )


def _spread(numbers: Sequence[float]) -> str:
    return f"{statistics.median(numbers):.3f} ({min(numbers):.3f} to {max(numbers):.3f})"


if __name__ == "__main__":
    if not PASSIVE_WAIT_ENV.items() <= os.environ.items():
        # OpenMP reads these when it is loaded. Every run has them.
        command = [sys.executable, "-m", "benchmarks.publishing", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | PASSIVE_WAIT_ENV)
    main()
