"""Generation with vLLM in this process, on CPU or GPU.

Weights are loaded in place through the model runner of the engine. Every request carries its own seed, so
responses do not depend on earlier ones. An engine uses one device.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_grpo.config import Config
from torchrl_grpo.config.checks.engine import with_keys
from torchrl_grpo.data.pictures import decode
from torchrl_grpo.errors import ConfigError, ModelError
from torchrl_grpo.inference import vllm_classes, vllm_compat
from torchrl_grpo.inference.checksums import Checksums
from torchrl_grpo.inference.protocol import Completion, Probe, ProbeResult, Request, SteppingEngine
from torchrl_grpo.inference.vllm_arguments import (
    check_prompt_tokens,
    engine_options,
    name_of,
    request_options,
    vllm_arguments,
)
from torchrl_grpo.inference.vllm_weights import VLLMWeights
from torchrl_grpo.runtime import screen
from torchrl_grpo.runtime.oom import stop_on_oom
from torchrl_grpo.runtime.own_variables import set_own

# Parts of an engine that sleep and wake, as vLLM calls them.
_PARTS = {"weights", "kv_cache"}


class VLLMEngine(SteppingEngine):
    """A vLLM engine on ``source``.

    Args:
        source: folder or hub name of the model.
        device: device of the engine.
        dtype: data type of weights and activations.
        head_dtype: data type of the output head's products and the logits; None for ``dtype``.
        max_model_len: largest number of tokens of prompt and response together.
        gpu_memory_utilization: share of the GPU's memory that vLLM may take.
        engine_args: further arguments of vLLM's ``LLM``.
        options: the other arguments of :func:`~torchrl_grpo.inference.vllm_arguments.vllm_arguments`.

    Raises:
        ConfigError: vLLM is not installed.
        ModelError: vLLM cannot serve the model, or not with ``head_dtype``.
    """

    def __init__(
        self,
        source: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        gpu_memory_utilization: float,
        head_dtype: torch.dtype | None = None,
        engine_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        # vLLM reads these when it is imported or started. Weights can be loaded in place only in-process.
        set_own("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # vLLM's log messages go to the run's log file. Without one, only errors are shown.
        if "VLLM_CONFIGURE_LOGGING" not in os.environ:
            set_own("VLLM_CONFIGURE_LOGGING", "0")
        logging.getLogger("vllm").setLevel(logging.WARNING if screen.logs_to_file() else logging.ERROR)
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.update(vllm_compat.sampler_variables())
        if dtype is torch.float32:
            # Without this, Triton's attention on a GPU uses TF32 (10 mantissa bits), while the trainer uses
            # full float32 (23).
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
        arguments = vllm_arguments(
            on_cpu=device.type == "cpu",
            dtype=dtype,
            head_dtype=head_dtype,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            engine_args=engine_args,
            **options,
        )
        self._eager: bool = arguments["enforce_eager"]
        threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
        # Otherwise vLLM halves torch's threads, which training in this process needs.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        try:
            # vLLM decorates some of transformers' classes in place, which would break the trainer's model.
            # Inside this block these changes are recorded, and at its end they are undone.
            with vllm_classes.isolate_decorated_classes() as changed:
                self.llm = vllm_compat.make_llm(source, arguments)
        except ImportError as error:
            raise ConfigError(
                f"inference_model.backend=vllm: vLLM cannot be imported ({error}); "
                "install the requirements, or write inference_model.backend=transformers"
            ) from error
        except TypeError as error:
            if not engine_args:
                raise
            raise ConfigError(
                f"inference_model.engine_args={dict(engine_args)}: vLLM does not accept these arguments "
                f"({error}); write arguments of its LLM class, or remove them"
            ) from error
        except (ValueError, RuntimeError) as error:
            on_cpu = f"kv_cache_gib={options['kv_cache_gib']}"
            memory = on_cpu if device.type == "cpu" else f"gpu_memory_utilization={gpu_memory_utilization}"
            raise ModelError(
                f"inference_model.backend=vllm: vLLM cannot serve {source} ({with_keys(str(error))}); change "
                f"inference_model.max_model_len={max_model_len}, inference_model.dtype="
                f"{name_of(dtype)} or the memory that it may take, inference_model.{memory}, "
                "or write inference_model.backend=transformers"
            ) from error
        finally:
            # On a CPU vLLM replaces this function for the whole process.
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(threads)
        self.dtype = dtype
        worker = vllm_compat.worker_of(self.llm)
        vllm_compat.let_prompts_be_cut(worker)
        self._weights = VLLMWeights(worker, dtype)
        # vLLM's own model needs those changes: its modules get subclasses that have them.
        vllm_classes.assign_decorated_classes(self._weights.model, changed)
        _check_head(self._weights.model, dtype, head_dtype)
        self._names = itertools.count()
        self._running: dict[str, Request] = {}
        self._gpu_memory_utilization = gpu_memory_utilization
        self._can_sleep: bool = arguments.get("enable_sleep_mode", False)
        # Parts of the engine whose memory sleep has unmapped.
        self._asleep: set[str] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            name = str(next(self._names))
            # One list of numbers. By default vLLM makes a dictionary and an object for every token, in the
            # thread that starts the next step.
            parameters = vllm_compat.sampling_params(**request_options(request), flat_logprobs=True)
            vllm_compat.add_request(self.llm, name, _prompt(request), parameters)
            self._running[name] = request

    def step(self) -> list[tuple[Hashable, Completion]]:
        with self._stance():
            ended = vllm_compat.step(self.llm)
        completions = []
        for name, output, length in ended:
            request = self._running.pop(name)
            check_prompt_tokens(request, length)
            completions.append(
                (request.key, _completion(output.token_ids, output.logprobs, output.finish_reason))
            )
        return completions

    def abort_all(self) -> dict[Hashable, Completion]:
        # vLLM returns only complete outputs, so unfinished ones are read from its own state.
        taken = {
            request.key: _completion(*vllm_compat.unfinished_output(self.llm, name), "aborted")
            for name, request in self._running.items()
        }
        self.llm.llm_engine.abort_request(list(self._running))
        self._running.clear()
        return taken

    def next_tokens(self, probe: Probe) -> ProbeResult:
        parameters = vllm_compat.sampling_params(
            max_tokens=1, temperature=1.0, seed=0, logprobs=probe.top_k, detokenize=False
        )
        with self._stance():
            outputs = vllm_compat.generate(self.llm, [*map(_prompt, probe.requests())], parameters)
        steps = [output.outputs[0].logprobs[0] for output in outputs]
        # The sampled token is listed too if it is not among the top ones; ranks tell them apart.
        likeliest = [sorted(step.items(), key=lambda item: item[1].rank)[: probe.top_k] for step in steps]
        return ProbeResult(
            torch.tensor([[token for token, _ in row] for row in likeliest]),
            torch.tensor([[entry.logprob for _, entry in row] for row in likeliest]),
            cached_tokens=int(outputs[0].num_cached_tokens or 0),
        )

    def _stance(self) -> AbstractContextManager[None]:
        # Without compiled graphs, compiling vLLM's small helpers gains nothing, and building their C++ takes
        # 20 s of the first call on a CPU.
        stance: AbstractContextManager[None] = torch.compiler.set_stance(
            "force_eager" if self._eager else "default"
        )
        return stance

    def start_update(self) -> None:
        self._weights.start_pieces()

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights.load_tensors(weights)

    def finish_update(self) -> None:
        self._weights.finish_pieces()

    def locate_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        with stop_on_oom(
            "memory ran out while finding out where vLLM keeps which weights: lower "
            f"inference_model.gpu_memory_utilization={self._gpu_memory_utilization}, which leaves more "
            "memory to the rest of the process"
        ):
            self._weights.locate_weights(shapes, self.load_weights, self._without_cache())

    @contextmanager
    def _without_cache(self) -> Iterator[None]:
        """Leave the memory of keys and values to the rest of the process, if the engine can sleep.

        The weights are undefined inside until they are loaded.
        """
        if not self._can_sleep:
            yield
            return
        self.sleep()
        self.llm.wake_up(tags=["weights"])
        self._asleep = {"kv_cache"}
        yield
        self.wake()

    def checksums(self) -> tuple[Checksums, ...]:
        return (self._weights.checksums(),)

    def reset_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        vllm_compat.reset_encoder_cache(self.llm)

    def sleep(self) -> None:
        self.llm.sleep(level=2)
        self._asleep = set(_PARTS)

    def wake(self) -> None:
        if torch.cuda.is_available():
            # Memory that this process's allocator has cached is the engine's now.
            torch.cuda.empty_cache()
        with stop_on_oom(
            "memory ran out when vLLM took its share of the GPU back: lower "
            f"inference_model.gpu_memory_utilization={self._gpu_memory_utilization} and resume, or start a "
            "new run with a smaller model.name or train_model.lora.rank=16"
        ):
            # vLLM before 0.28 maps a part again that is mapped, and fails.
            self.llm.wake_up(None if self._asleep == _PARTS else sorted(self._asleep))
        self._asleep = set()

    def close(self) -> None:
        if self._asleep:
            # vLLM's allocator fails if it frees memory that sleep has unmapped. The error would stay in it,
            # and the next engine of a sweep could not start.
            try:
                self.wake()
            except Exception as error:  # noqa: BLE001  how the run ended is not changed by this
                logging.getLogger(__name__).warning("vLLM is closed while it sleeps: %s", error)
        # Keep the model until LLMEngine is deleted: vLLM needs it to free compiler state. If the model goes
        # first, hooks of the compiler keep the weights, and the next engine of a sweep lacks memory.
        model = self._weights.model
        self._weights.release()
        del self.llm
        gc.collect()
        del model, self._weights
        # It collects garbage, too. Each time takes up to half a second of a process with vLLM.
        vllm_compat.clean_up()


def _check_head(model: nn.Module, dtype: torch.dtype, head_dtype: torch.dtype | None) -> None:
    """Check that logits are computed in the dtype ``head_dtype``; vLLM only warns if a platform cannot.

    Raises:
        ModelError: logits are computed in another dtype.
    """
    if head_dtype is not None and vllm_compat.head_dtypes(model, dtype) != {head_dtype}:
        newer = "" if vllm_compat.has_head_dtype() else ", or install vLLM 0.26 or newer"
        raise ModelError(
            f"inference_model.head_dtype={name_of(head_dtype)}: on this machine, vLLM computes the output "
            f"head of {type(model).__name__} in another dtype; write inference_model.head_dtype=auto{newer}"
        )


def _prompt(request: Request) -> Any:
    return vllm_compat.prompt_of(
        request.written, [] if request.pictures is None else [decode(data) for data in request.pictures.files]
    )


def _completion(token_ids: Sequence[int], table: Any, finish_reason: str) -> Completion:
    """Copy tokens and their log-probabilities out of vLLM's table, which it goes on changing."""
    tokens = list(token_ids)
    if tokens != table.token_ids:
        raise RuntimeError("vLLM's log-probabilities are not those of the tokens of its response")
    return Completion(tokens, list(table.logprobs), finish_reason)


def build(
    cfg: Config,
    source: str,
    device: torch.device,
    *,
    max_num_seqs: int,
    sleeps: bool,
    gpu_memory_utilization: float,
    **_: object,
) -> VLLMEngine:
    """Build the engine; see :func:`~torchrl_grpo.inference.build.build_engine`."""
    options = engine_options(cfg, device, max_num_seqs, gpu_memory_utilization, sleeps)
    return VLLMEngine(source, device=device, **options)
