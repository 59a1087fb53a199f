"""The kinds of servers, one for each backend that has servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import load_built_in
from torchrl_grpo.config.engines import ENGINES, EngineKind
from torchrl_grpo.inference.servers.api import ServerApi
from torchrl_grpo.inference.servers.launch import Launch
from torchrl_grpo.inference.servers.sglang.api import SGLangApi
from torchrl_grpo.inference.servers.sglang.command import sglang_launch
from torchrl_grpo.inference.servers.vllm.api import VLLMApi
from torchrl_grpo.inference.servers.vllm.command import vllm_launch
from torchrl_grpo.inference.vllm_arguments import engine_options, vllm_arguments


class BuildLaunch(Protocol):
    """Returns how a server of a run is started."""

    def __call__(
        self,
        cfg: Config,
        source: str,
        device: torch.device,
        *,
        max_num_seqs: int,
        gpu_memory_utilization: float,
    ) -> Launch:
        """Return it.

        Args:
            cfg: configuration of the run.
            source: folder or hub name of the model.
            device: device of the server.
            max_num_seqs: largest number of responses that are decoded at a time.
            gpu_memory_utilization: share of a GPU's memory.
        """


@dataclass(frozen=True)
class ServerKind:
    """One kind of server.

    Attributes:
        engine: its record in the table of engines.
        api: its routes.
        launch: function that returns how a server is started.
    """

    engine: EngineKind
    api: ServerApi
    launch: BuildLaunch


def _vllm(
    cfg: Config, source: str, device: torch.device, *, max_num_seqs: int, gpu_memory_utilization: float
) -> Launch:
    # The same options as those of an engine in the trainer's process.
    options = engine_options(cfg, device, max_num_seqs, gpu_memory_utilization)
    arguments = vllm_arguments(on_cpu=device.type == "cpu", **options)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := vars(cfg.inference_model)[name]) > 1:
            arguments[name] = size
    return vllm_launch(source, arguments, on_cpu=device.type == "cpu")


VLLM = ServerKind(ENGINES["vllm_server"], VLLMApi(), _vllm)
SGLANG = ServerKind(ENGINES["sglang_server"], SGLangApi(), sglang_launch)


def server_kind(engine: EngineKind) -> ServerKind:
    """Return the kind of the servers of an engine that has some."""
    assert engine.servers is not None
    kind: ServerKind = load_built_in(engine.servers)
    return kind
