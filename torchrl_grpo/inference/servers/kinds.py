"""The kinds of servers, one for each backend that has servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import KEY_VARIABLE, SGLANG_KEY_VARIABLE, Backend
from torchrl_grpo.inference.build import server_arguments
from torchrl_grpo.inference.servers.api import ServerApi
from torchrl_grpo.inference.servers.launch import Launch
from torchrl_grpo.inference.servers.sglang.api import SGLangApi
from torchrl_grpo.inference.servers.sglang.command import sglang_launch
from torchrl_grpo.inference.servers.vllm.api import VLLMApi
from torchrl_grpo.inference.servers.vllm.command import vllm_launch


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
        """Return it for the model ``source`` on ``device``."""


@dataclass(frozen=True)
class ServerKind:
    """One kind of server.

    Attributes:
        backend: value of ``inference_model.backend``.
        title: name of the program.
        key_variable: environment variable with the key.
        api: its routes.
        launch: function that returns how a server is started.
    """

    backend: Backend
    title: str
    key_variable: str
    api: ServerApi
    launch: BuildLaunch


def _vllm(
    cfg: Config, source: str, device: torch.device, *, max_num_seqs: int, gpu_memory_utilization: float
) -> Launch:
    arguments = server_arguments(
        cfg, device, max_num_seqs=max_num_seqs, gpu_memory_utilization=gpu_memory_utilization
    )
    return vllm_launch(source, arguments, on_cpu=device.type == "cpu")


VLLM = ServerKind(Backend.vllm_server, "vLLM", KEY_VARIABLE, VLLMApi(), _vllm)
SGLANG = ServerKind(Backend.sglang_server, "SGLang", SGLANG_KEY_VARIABLE, SGLangApi(), sglang_launch)


def server_kind(backend: Backend) -> ServerKind:
    """Return the kind of the servers of ``inference_model.backend``."""
    return {kind.backend: kind for kind in (VLLM, SGLANG)}[backend]
