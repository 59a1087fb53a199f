"""A stage for speed: how fast a model trains, how near that is to a plain product, and its memory by phase.

``P`` prompts of ``L`` tokens have ``G`` responses of ``T`` tokens each. All are as long as the configuration
allows, which is what memory is predicted for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.profiler import profile

from torchrl_grpo.config import Config
from torchrl_grpo.config.engines import reference_engine
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.flops import FlopCounter, gemm_rate
from torchrl_grpo.models.shape import Unknown
from torchrl_grpo.planning import preflight
from torchrl_grpo.planning.planned import Planned
from torchrl_grpo.planning.prediction import GIB
from torchrl_grpo.planning.token_budget import with_budget
from torchrl_grpo.runtime import hardware
from torchrl_grpo.tools.gpu_check.kernels import device_of_check, seconds
from torchrl_grpo.tools.gpu_check.runs import Figures, compare_memory
from torchrl_grpo.tools.gpu_check.step import groups_of
from torchrl_grpo.training.learner import Learner, LearnerSpec

# P, G, L and T by type of device.
_SIZES = {"cuda": (8, 8, 200, 512), "cpu": (2, 4, 24, 16)}
# Weights from which adapters are trained: with all of its weights, a model of this size needs several GPUs.
_WITH_ADAPTERS = 4e9
_RANK = 32
# On an H100, the allocator took 1 % less to 3 % more than predicted for the same texts. This error is the
# trainer's alone: nothing else is in the process.
_MEMORY_SHARE, _MEMORY_GIB = 0.1, 0.1


def speed(model: Path) -> Figures:
    """Train a model for a few steps, and return seconds by phase, FLOP/s, kernels and memory.

    Args:
        model: folder of the model.

    Returns:
        Of a model that does not fit, the reason as ``not_run``. Otherwise ``prepare_s`` (log-probabilities
        without gradients), ``passes_s`` (forward and backward) and ``update_s`` of a step, which together
        take ``optimize_s``, ``tflops`` in useful FLOPs, ``product_share`` of the rate of a plain product,
        ``kernels`` of a step (on a CPU its operators), and on a GPU the peaks of memory by phase.

    Raises:
        TrainingStopped: a phase takes more memory than predicted.
    """
    device = device_of_check()
    groups, samples, prompt, response = _SIZES[device.type]
    try:
        planned = _plan(model, device)
    except ConfigError as error:
        return {"not_run": str(error)}
    cfg = with_budget(planned.cfg, planned.budget.tokens)
    learner = Learner(
        LearnerSpec(cfg, str(model), None, (1.0,)),
        device,
        ranks=Ranks(on_cpu=device.type == "cpu"),
        notify=lambda text: None,
    )
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, learner.model.config.vocab_size, (groups, prompt), generator=generator)
    responses = torch.randint(
        3, learner.model.config.vocab_size, (groups, samples, response), generator=generator
    )
    batch = groups_of(prompts, torch.ones_like(prompts).bool(), responses, torch.ones_like(responses).bool())
    # The first step compiles kernels and makes the moments.
    learner.step(batch.clone())
    figures: Figures = {"attention": "varlen" if learner.scorer.varlen else "dense"}
    peaks: dict[str, float] = {}
    for phase, work in (
        ("prepare", lambda: learner.log_probs(batch)),
        ("optimize", lambda: learner.step(batch.clone())),
    ):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        figures[f"{phase}_s"] = seconds(work)
        if device.type == "cuda":
            peaks[phase] = torch.cuda.max_memory_allocated(device) / GIB
    step_s = float(figures["optimize_s"])
    (share,), totals = learner.optimizer_step.divide(batch)
    figures["passes_s"] = passes_s = seconds(lambda: learner.optimizer_step.accumulate(share, totals))
    learner.optimizer_step.backend.zero_grad()
    figures["update_s"] = max(0.0, step_s - passes_s)
    lengths = [[response] * samples] * groups
    rate = FlopCounter(learner.model)([prompt] * groups, lengths, backward=True) / step_s
    plain = gemm_rate(device, learner.autocast_dtype or torch.float32, learner.model.config.hidden_size)
    figures |= {"tflops": rate / 1e12, "product_share": rate / plain}
    figures["kernels"] = _kernels(lambda: learner.step(batch.clone()))
    return figures | compare_memory(peaks, _predicted_gib(planned), _MEMORY_SHARE, _MEMORY_GIB)


def _plan(model: Path, device: torch.device) -> Planned:
    """Plan the training of a model.

    Raises:
        ConfigError: the machine has too little memory for it.
    """
    groups, samples, prompt, response = _SIZES[device.type]
    cfg = Config()
    cfg.model.name = str(model)
    cfg.env.num_envs, cfg.env.repeats = groups, samples
    # No engine runs here, and this one takes no share of the memory.
    cfg.inference_model.backend = reference_engine()
    cfg.inference_model.max_new_tokens, cfg.inference_model.max_model_len = response, prompt + response
    cfg.train.total_dialog_turns = 10 * groups * samples
    shape = preflight.shape_of(cfg)
    if not isinstance(shape, Unknown) and shape.parameters > _WITH_ADAPTERS:
        cfg.train_model.lora.rank = _RANK
    planned = preflight.make(cfg, False, hardware.present())
    preflight.check_memory(planned)
    return planned


def _predicted_gib(planned: Planned) -> dict[str, float]:
    """Return the predicted memory of the trainer alone, in GiB by phase."""
    assert planned.prediction is not None
    return {row.phase: row.total / GIB for row in planned.prediction.rows if row.role == "train"}


def _kernels(work: Callable[[], object]) -> int:
    """Count the kernels and copies that ``work`` starts on a GPU, or on a CPU its operators."""
    with profile() as recorded:
        work()
    events = recorded.events()
    # The span of an annotation, such as the optimizer's, is on the GPU too.
    on_gpu = sum(
        1 for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    return on_gpu or sum(1 for event in events if event.name.startswith("aten::"))
