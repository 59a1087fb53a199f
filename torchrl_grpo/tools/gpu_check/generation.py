"""A stage for engines: the seconds of a token, of new weights, of sleep, and the speeds of links.

The planner predicts generation and publication from them (:mod:`~torchrl_grpo.planning.cost`).
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from torchrl_grpo.config import Config
from torchrl_grpo.config.engines import reference_engine
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.inference.build import build_engine
from torchrl_grpo.inference.protocol import Engine, Sampling
from torchrl_grpo.tools.gpu_check.kernels import Figures, device_of_check, keep_speeds, seconds

# Responses at a time, few and many, and two lengths, whose difference leaves the prompts out.
_RESPONSES = {"cuda": (8, 256), "cpu": (2, 8)}
_LENGTHS = {"cuda": (32, 160), "cpu": (2, 6)}
_PROMPT = 16
_SHARE = 0.4
# Bytes that are copied over a link.
_COPIED = 2**28
# The least that is kept: what is measured may be as small as its noise.
_LEAST = 1e-3


def generation(model: Path) -> Figures:
    """Generate with an engine as recipes run it, give it new weights, and let it sleep.

    Args:
        model: folder of the model.

    Returns:
        ``engine_ms`` of a token, and ``response_us`` that each response at a time adds; ``publish_gb_per_s``,
        at which the engine loads and verifies weights that lie on its device. On a GPU also ``sleep_s``, in
        which it sleeps and wakes, ``host_gb_per_s`` to pinned memory and back, and with several GPUs
        ``link_gb_per_s`` from one to another.
    """
    device = device_of_check()
    on_gpu = device.type == "cuda"
    small, large = _RESPONSES[device.type]
    cfg = Config()
    cfg.model.name = str(model)
    options = cfg.inference_model
    options.max_new_tokens = max(_LENGTHS[device.type])
    options.max_model_len = _PROMPT + options.max_new_tokens
    if on_gpu:
        options.dtype, options.enforce_eager = Dtype.bfloat16, False
    else:
        options.backend, options.dtype = reference_engine(), Dtype.float32
    dtype = torch.bfloat16 if on_gpu else torch.float32
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
    weights = {name: parameter.detach() for name, parameter in trained.named_parameters()}
    engine = build_engine(
        cfg,
        str(model),
        device,
        eos_token_ids=[0],
        pad_token_id=0,
        max_num_seqs=large,
        sleeps=on_gpu,
        gpu_memory_utilization=_SHARE,
    )
    with closing(engine):
        token_s = {
            count: _seconds_of_a_token(engine, count, _LENGTHS[device.type]) for count in (small, large)
        }
        response_s = max(0.0, (token_s[large] - token_s[small]) / (large - small))
        engine.locate_weights({name: tuple(weight.shape) for name, weight in weights.items()})

        def publish() -> None:
            engine.load_weights(weights.items())
            engine.checksums()
            engine.reset_cache()

        # The first two are compared with the weights from disk, which takes longer.
        publish()
        size = sum(weight.nbytes for weight in weights.values())
        figures = {
            "engine_ms": max(_LEAST, 1e3 * (token_s[small] - small * response_s)),
            "response_us": max(_LEAST, 1e6 * response_s),
            "publish_gb_per_s": size / seconds(publish) / 1e9,
        }
        if on_gpu:
            figures["sleep_s"] = seconds(lambda: (engine.sleep(), engine.wake()))
            figures |= _links(device)
            keep_speeds(**figures)
    return dict(figures)


def _seconds_of_a_token(engine: Engine, count: int, lengths: tuple[int, int]) -> float:
    """Return the seconds of a token of ``count`` responses at a time."""
    prompts = [[3 + number % 200] * _PROMPT for number in range(count)]

    def generate(length: int) -> None:
        sampling = Sampling(1, length, 1.0, seeds=range(count), ignore_eos=True)
        engine.generate(prompts, sampling)

    short, long = lengths
    taken = {length: seconds(lambda length=length: generate(length)) for length in lengths}  # type: ignore[misc]
    return (taken[long] - taken[short]) / (long - short)


def _links(device: torch.device) -> dict[str, float]:
    """Return the GB/s between host and GPU, there and back, and from one GPU to another."""
    there = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    both = seconds(lambda: (host.copy_(there, non_blocking=True), there.copy_(host, non_blocking=True)))
    speeds = {"host_gb_per_s": 2 * _COPIED / both / 1e9}
    if torch.cuda.device_count() > 1:
        other = torch.empty_like(there, device=torch.device("cuda", 1))
        speeds["link_gb_per_s"] = _COPIED / seconds(lambda: other.copy_(there)) / 1e9
    return speeds
