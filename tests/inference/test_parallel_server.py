"""A real vLLM server whose layers are divided between two processes: weights, their proof, and tokens."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_server import start_server
from publishers import make_publisher
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm_arguments import ON_A_CPU

from torchrl_grpo.errors import TrainingStopped
from torchrl_grpo.inference.checksums import Checksums, compute_checksums
from torchrl_grpo.inference.protocol import Sampling
from torchrl_grpo.inference.servers import weight_files
from torchrl_grpo.inference.servers.carriers import StreamCarrier
from torchrl_grpo.inference.servers.channels import nccl
from torchrl_grpo.inference.servers.channels.group import ProcessGroupEnded, WeightGroup
from torchrl_grpo.inference.servers.channels.nccl import Broadcaster
from torchrl_grpo.inference.servers.engine import ServerEngine, ServerRequirements
from torchrl_grpo.inference.servers.http import ServerConnection
from torchrl_grpo.inference.servers.kinds import VLLM
from torchrl_grpo.inference.servers.process import ServerProcess
from torchrl_grpo.inference.servers.vllm.command import vllm_launch
from torchrl_grpo.inference.servers.weight_files import Bucket
from torchrl_grpo.inference.transformers_engine import TransformersEngine
from torchrl_grpo.inference.vllm_arguments import vllm_arguments
from torchrl_grpo.runtime import shared_memory

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.float32, pytest.mark.timeout(600)]

PROMPTS = [list(range(5, 45)), list(range(50, 90)), list(range(100, 140))]


@pytest.fixture(scope="module")
def process(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = {name: value for name, value in ON_A_CPU.items() if name != "device"}
    # A step ends within a prompt.
    step = {"max_num_batched_tokens": 64}
    sizes: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 16, "dtype": torch.float32}
    launch = vllm_launch(
        str(tiny_model_dir),
        vllm_arguments(on_cpu=True, engine_args=step, **arguments, **sizes)
        # vLLM fills its cache with zeros, and a GiB takes each rank a second.
        | {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 2**26},
        on_cpu=True,
    )
    made = start_server(launch, tmp_path_factory.mktemp("server") / "server.log")
    made.wait_until_ready(500)
    yield made
    made.kill()


def test_the_ranks_of_a_server_get_their_parts_and_prove_them(
    process: ServerProcess, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rows of a tensor come in several buckets.
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 2**15)
    connection = ServerConnection(process.address, process.key, 60)
    connection.wait_until_up(10)
    requirements = ServerRequirements(torch.float32, None, 200)
    engine = ServerEngine(connection, VLLM.api, requirements=requirements, folder=tmp_path, timeout_s=60)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    trained = copy.deepcopy(model)
    publisher = make_publisher(trained, engine, PROMPTS)
    publisher.verify_at_start(0)
    assert publisher.unreadable == [] and not engine._by_loader
    ranks = [Checksums.from_json(answer) for answer in engine._call("grpo_checksums")]
    assert len(ranks) == 2
    halves = ranks[0].parts["model.layers.0.self_attn.o_proj.weight"]
    assert [part.columns for part, _ in halves] == [(0, 64)], "columns of the product are divided"
    assert "model.norm.weight" in ranks[0].values and "model.norm.weight" in ranks[1].values
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.01)
    assert publisher.publish(1)["publish/logprob_diff_mean"] < 1e-4
    sampling = Sampling(2, 12, 0.7, seeds=[11, 22, 33])
    groups = engine.generate(PROMPTS, sampling)
    reference = TransformersEngine(trained, [], 0)
    for prompt, responses in zip(PROMPTS, groups, strict=True):
        for response in responses:
            tokens = torch.tensor([prompt + response.token_ids])
            scores = (reference.model(tokens).logits[0].float() / 0.7).log_softmax(-1)
            at = torch.arange(len(prompt) - 1, tokens.shape[1] - 1)
            expected = scores[at, tokens[0, len(prompt) :]]
            torch.testing.assert_close(torch.tensor(response.log_probs), expected, atol=1e-4, rtol=0)
    # One rank loads a row less than the other.
    honest = ServerEngine._call

    def call(self: ServerEngine, method: str, **arguments: Any) -> list[Any]:
        if method == "grpo_load":
            bucket = Bucket.from_json(arguments["bucket"])
            entries = tuple(
                entry for entry in bucket.entries if entry[0] != "model.layers.1.mlp.down_proj.weight"
            )
            arguments["bucket"] = Bucket(bucket.path, entries).to_json()
        return honest(self, method, **arguments)

    monkeypatch.setattr(ServerEngine, "_call", call)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.01)
    with pytest.raises(TrainingStopped, match=r"1 of 20 tensors .* the first is model.layers.1.mlp.down_pr"):
        publisher.publish(2)
    engine.close()


def test_the_ranks_of_a_server_join_the_trainers_group(
    process: ServerProcess, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NCCL, with gloo in its place: weights, their proof, and a pass that is interrupted."""
    monkeypatch.setattr(weight_files, "BUCKET_BYTES", 2**15)
    connection = ServerConnection(process.address, process.key, 60)
    requirements = ServerRequirements(torch.float32, None, 200)
    engine = ServerEngine(connection, VLLM.api, requirements=requirements, folder=tmp_path, timeout_s=60)
    assert engine.gpus == ("", "")
    channel = Broadcaster(torch.device("cpu"), 30.0)
    carrier = StreamCarrier(tmp_path, channel)
    carrier.admit("server", process.address, engine.gpus)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    weights = {name: parameter.detach() * 1.03 for name, parameter in model.named_parameters()}
    engine.locate_weights({name: tuple(tensor.shape) for name, tensor in weights.items()})

    def publish() -> Future[None]:
        stream = carrier.put(weights.items())
        reader, done = stream.reader_for("server"), Future[None]()

        def load() -> None:
            try:
                engine.load_weights(reader)
            except Exception as error:  # noqa: BLE001  the test looks at it
                done.set_exception(error)
            else:
                done.set_result(None)
            finally:
                reader.mark_done()

        threading.Thread(target=load, daemon=True).start()
        stream.send_until(done)
        return done

    expected = compute_checksums(weights.items(), torch.float32)
    publish().result()
    (held,) = engine.checksums()
    # The layers that both ranks hold have a checksum for each.
    assert all(set(held.values[name]) == set(expected.values[name]) for name in weights)
    weights = {name: tensor * 1.01 for name, tensor in weights.items()}
    broadcast = WeightGroup.broadcast
    count = iter(range(1000))

    def interrupted(group: WeightGroup, content: Tensor) -> None:
        if next(count) == 3:
            # As if another server had left.
            channel._end_group()
        broadcast(group, content)

    monkeypatch.setattr(nccl, "_EXIT_NOTICE_S", 0.1)
    monkeypatch.setattr(WeightGroup, "broadcast", interrupted)
    with pytest.raises(ProcessGroupEnded):
        publish()
    monkeypatch.setattr(WeightGroup, "broadcast", broadcast)
    publish().result()
    expected = compute_checksums(weights.items(), torch.float32)
    (held,) = engine.checksums()
    assert all(set(held.values[name]) == set(expected.values[name]) for name in weights)
    carrier.close()
    engine.close()


def test_a_killed_server_leaves_no_shared_memory_behind(process: ServerProcess) -> None:
    segments = shared_memory.segments_of(process._process.pid)
    assert segments, "the ranks of vLLM talk through segments"
    os.killpg(process._process.pid, signal.SIGKILL)
    process.kill()
    assert not segments & {path.name for path in shared_memory.ROOT.iterdir()}
