"""The function that SGLang hands messages of the trainer to, in the process with the weights.

It runs in SGLang's own environment, which has torch and not what this project needs besides torch.
"""

from __future__ import annotations

import functools
import json
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.inference.pieces import Assembler
from torchrl_grpo.inference.servers.model_identity import describe
from torchrl_grpo.inference.servers.sglang.messages import ANSWER_PREFIX
from torchrl_grpo.inference.servers.sglang.weights import SGLangWeights
from torchrl_grpo.inference.servers.weight_files import Bucket
from torchrl_grpo.inference.servers.weight_folder import BucketReader
from torchrl_grpo.inference.vllm_arguments import name_of
from torchrl_grpo.runtime.files.shared_files import open_regular

# Differs between machines, and between two starts of one.
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Methods:
    """The methods of :class:`~torchrl_grpo.inference.servers.vllm.extension.WeightExtension`, for SGLang.

    Args:
        model: SGLang's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = SGLangWeights(model)
        self._reader, self._assembler = BucketReader(), Assembler()

    def run(self, method: str, arguments: dict[str, Any]) -> Any:
        """Run the method of this name, and return its result as JSON has it.

        Raises:
            ValueError: there is no such method.
        """
        match method:
            case "grpo_describe":
                return self._describe(**arguments)
            case "grpo_load":
                pieces = self._reader.read(Bucket.from_json(arguments["bucket"]))
                return self._weights.load(self._assembler.take(pieces))
            case "grpo_locate_weights":
                shapes = arguments["shapes"].items()
                return self._weights.locate({name: tuple(shape) for name, shape in shapes})
            case "grpo_checksums":
                return self._weights.checksums().to_json()
            case "grpo_start_update":
                # SGLang's own loader loads weights in any case, and takes whole tensors.
                self._assembler = Assembler()
                return None
            case "grpo_finish_update":
                # SGLang's own route after this call does all that is needed.
                return None
        raise ValueError(f"there is no method {method}")

    def _describe(self, file: str, tensors: list[str] | None = None) -> dict[str, Any]:
        server_args = _server_args()
        self._reader = BucketReader()
        dtype = name_of(self._weights.dtype)
        return {
            "dtype": dtype,
            "head_dtypes": ["float32" if server_args.enable_fp32_lm_head else dtype],
            "max_model_len": server_args.context_length,
            # SGLang's own name of the variable with which it returns those of temperature 1.
            "logprobs_mode": "raw_logprobs"
            if "SGLANG_RETURN_ORIGINAL_LOGPROB" in os.environ
            else "processed_logprobs",
            "sees_file": Path(file).exists(),
            "ranks": server_args.tp_size * server_args.pp_size,
            # Weights do not reach it through GPUs.
            "gpu": "",
            "identity": f"{id(self)} of {os.getpid()} on {_BOOT.read_text().strip()}",
            "model": None
            if tensors is None
            else describe(server_args.model_path, tensors, trust_remote_code=server_args.trust_remote_code),
        }


def _server_args() -> Any:
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


@functools.cache
def _methods_of(model: nn.Module) -> Methods:
    return Methods(model)


def answer(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Run the method that a message names, and write its result into the file that it names.

    SGLang ends if this raises, so a mistake becomes an answer as well.

    Args:
        model: SGLang's model.
        named_tensors: messages in place of names. The tensors are empty.
    """
    for message, _ in named_tensors:
        request = json.loads(message)
        file = Path(request["answer"])
        if not file.name.startswith(ANSWER_PREFIX):
            continue
        try:
            opened = open_regular(file, os.O_WRONLY | os.O_NOFOLLOW)
        except OSError:
            # The client finds its own file empty.
            continue
        with os.fdopen(opened, "w") as writer:
            try:
                with torch.no_grad():
                    content = {"result": _methods_of(model).run(request["method"], request["arguments"])}
            except Exception as error:  # noqa: BLE001  it is reported
                traceback.print_exc()
                content = {"error": f"{type(error).__name__}: {error}"}
            writer.write(json.dumps(content))
