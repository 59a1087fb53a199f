"""Predict how long the phases of a round take on GPUs, to compare plans. Imports no torch.

A simple model of operations, bytes and launches. A phase lasts as long as the GPU computes and moves data, or
as long as a CPU launches kernels, whatever is longer. Texts are as long as the configuration allows, as in
the prediction of memory, so most rounds take less. The constants are of one H100 with 16 processor cores
(benchmarks/MEASURED.md). Rewards, evaluations and checkpoints are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchrl_grpo.config.derived import optim_batch_size
from torchrl_grpo.config.values import Proximal
from torchrl_grpo.models.shape import ModelShape, Unknown
from torchrl_grpo.planning import memory, speeds
from torchrl_grpo.planning.pictures import trained_parameters
from torchrl_grpo.planning.planned import Planned
from torchrl_grpo.planning.token_budget import with_budget
from torchrl_grpo.planning.workload import MAX_ROWS, workload_of

# Passes over the logits of response tokens in float32, and over all that autograd keeps of the layers,
# forward and backward. Fitted to the measured steps of 0.5B and 135M.
_HEAD_PASSES, _KEPT_PASSES = 17.0, 14.0
# Width at which a product in 16 bits reaches half of the rate of a large one. Fitted to three widths.
_HALF_RATE_WIDTH = 480
# Share of the time of launches in which a GPU waits although it has enough to do.
_WAITS = 0.45
# Passes of an optimizer step over the trained weights in float32, with gradients, moments and the norm.
_UPDATE_PASSES = 12.0
# Share of the passes and of the operations that only a forward pass has.
_FORWARD = 1 / 3
# Kernels of a block of logits, in layers.
_BLOCK_LAYERS = 0.3
# Seconds of a step of vLLM for each layer, without CUDA graphs.
_EAGER_LAYER_S = 0.0007
# Bytes per second at which engines load new weights through the memory of the host.
_PUBLISHED_THROUGH_HOST = 1e9
_ON_GPU = ("in_process", "cuda_ipc", "nccl")


@dataclass(frozen=True)
class Cost:
    """Seconds of a round, by phase.

    Attributes:
        generate: seconds until all responses are there.
        prepare: seconds of log-probabilities of the reference and of the proximal policy.
        train: seconds of all optimizer steps.
        publish: seconds until the engines have new weights. It includes sleep, and moments that are moved.
        overlaps: whether engines generate while the trainer trains.
    """

    generate: float
    prepare: float
    train: float
    publish: float
    overlaps: bool

    @property
    def step(self) -> float:
        """Seconds of a round."""
        learn = self.prepare + self.train
        return self.publish + (max(self.generate, learn) if self.overlaps else self.generate + learn)


def cost_of(planned: Planned) -> Cost | None:
    """Predict the seconds of a round; None if the model's shape is unknown, or a role is not on this GPU."""
    plan, cfg = planned.plan, planned.cfg
    known = not isinstance(planned.shape, Unknown) and plan.train_device.startswith("cuda")
    if not known or not plan.inference.devices[0].startswith("cuda"):
        return None
    work = _Work(planned)
    apart = set(plan.train.devices).isdisjoint(plan.inference.devices)
    ahead = plan.asynchronous and cfg.collector.max_policy_age > 0
    if cfg.train.method == "sft":
        # Engines generate for evaluations only.
        return Cost(0.0, 0.0, work.train(), 0.0, overlaps=False)
    return Cost(work.generate(), work.prepare(), work.train(), work.publish(), ahead and apart)


class _Work:
    """The work of a plan, and the speeds of its GPUs."""

    def __init__(self, planned: Planned) -> None:
        assert isinstance(planned.shape, ModelShape)
        self.planned, self.cfg, self.plan, self.shape = planned, planned.cfg, planned.plan, planned.shape
        self.speeds = speeds.of(planned.hardware)
        self.load = workload_of(self.cfg)
        self.samples = self.cfg.env.repeats
        self.half = memory.autocasts(self.cfg, self.plan.train.devices, planned.hardware)
        self.engine_half = memory.engine_element(self.cfg, self.plan, planned.hardware) == 2

    def _products(self, operations: float, half: bool) -> float:
        if not half:
            return operations / (self.speeds.tflops_float32 * 1e12)
        width = self.shape.hidden**2
        return operations * (1 + _HALF_RATE_WIDTH**2 / width) / (self.speeds.tflops * 1e12)

    def _moved(self, num_bytes: float) -> float:
        return num_bytes / (self.speeds.tb_per_s * 1e12)

    def generate(self) -> float:
        """Return the seconds in which an engine generates its share of a round."""
        cfg, shape, load, size = self.cfg, self.shape, self.load, self.plan.engine_size
        groups = -(-cfg.env.num_envs // self.plan.num_engines)
        responses = groups * self.samples
        at_once = responses
        if self.planned.vllm_on_gpus:
            at_once = min(at_once, self.planned.responses_in(self.plan.gpu_memory_utilization))
        elif not cfg.inference_model.engine.preallocates:
            at_once = min(at_once, MAX_ROWS)
        element = 2 if self.engine_half else memory.FLOAT
        cache = memory.cache_of(shape, element, load.prompt + load.response // 2)
        step = self._moved((element * shape.parameters + at_once * cache) / size)
        step = max(step, self._products(2 * shape.parameters * at_once / size, self.engine_half))
        graphs = cfg.inference_model.engine.preallocates and not cfg.inference_model.enforce_eager
        launches = self.speeds.engine_ms / 1e3 if graphs else _EAGER_LAYER_S * shape.layers
        launches += self.speeds.response_us / 1e6 * at_once
        prompts = self._products(2 * shape.parameters * groups * load.prompt / size, self.engine_half)
        return prompts + load.response * responses / at_once * max(step, launches)

    def prepare(self) -> float:
        """Return the seconds of passes without gradients, for the reference and the proximal policy."""
        cfg, plan = self.cfg, self.plan
        proximal = cfg.policy.proximal
        of_trainer = proximal == Proximal.trainer or (
            proximal == Proximal.auto and plan.asynchronous and cfg.collector.max_policy_age > 0
        )
        seconds = self._passes(plan.num_ranks, backward=False) if of_trainer else 0.0
        if plan.reference.placement in ("off", "cluster"):
            return seconds
        frozen = _Work(replace(self.planned, shape=memory.frozen_shape(cfg, self.shape)))
        return seconds + frozen._passes(max(1, len(plan.reference.devices)), backward=False)

    def train(self) -> float:
        """Return the seconds of all optimizer steps of a round."""
        plan, shape, rate = self.plan, self.shape, self.speeds.link_gb_per_s * 1e9
        trained = trained_parameters(self.cfg, shape)
        divided = self.cfg.train_model.parallelism in memory.SHARDS
        share = 1 / plan.num_ranks if divided else 1.0
        update = self._moved(_UPDATE_PASSES * memory.FLOAT * trained * share)
        if not divided and plan.num_ranks > 1:
            # Ranks exchange the gradients once: each sends and receives them twice, in parts.
            update += 2 * memory.FLOAT * trained * (1 - 1 / plan.num_ranks) / rate
        return self._steps * update + self._passes(plan.num_ranks, backward=True)

    @property
    def _steps(self) -> float:
        round_size = self.cfg.env.num_envs * self.samples
        return self.cfg.train.epochs * max(1.0, round_size / optim_batch_size(self.cfg))

    def _passes(self, ranks: int, backward: bool) -> float:
        """Return the seconds of passes over a round's texts, which ``ranks`` divide."""
        cfg, shape, load = self.cfg, self.shape, self.load
        groups = -(-max(1, optim_batch_size(cfg) // self.samples) // ranks)
        responses = groups * self.samples
        prompts = groups if cfg.train_model.shared_prefix else responses
        tokens, answers = prompts * load.prompt + responses * load.response, responses * load.response
        passes = self._steps if backward else max(1.0, self._steps / cfg.train.epochs)
        batches = max(1, -(-tokens // self.planned.budget.tokens))
        if backward:
            batches = max(batches, cfg.train.gradient_accumulation_steps)
        again = 1 + _FORWARD if backward and cfg.train_model.gradient_checkpointing else 1.0
        # Products with frozen weights have no gradient of weights.
        part = (2 / 3 if cfg.train_model.lora.rank else 1.0) if backward else _FORWARD
        attended = answers * (load.prompt + load.response / 2) + prompts * load.prompt**2 / 2
        layers = 6 * shape.matrices * tokens + 12 * shape.layers * shape.queries * attended
        head = shape.vocabulary * shape.hidden * answers
        varlen = memory.uses_varlen(cfg, self.plan.train.devices, self.planned.hardware)
        batch = workload_of(with_budget(cfg, self.planned.budget.tokens), self.plan.num_ranks)
        compiled = cfg.train_model.compile
        kept = memory.kept_by_layer(shape, batch, self.half, "cuda", varlen, compiled) / batch.tokens
        # Elementwise work of the layers, and of the head.
        layers_bytes = _KEPT_PASSES * kept * shape.layers * tokens
        head_bytes = _HEAD_PASSES * memory.FLOAT * shape.vocabulary * answers
        scale = 1.0 if backward else _FORWARD
        computed = self._products(part * (again * layers + 6 * head), self.half)
        computed += self._moved(scale * (again * layers_bytes + head_bytes))
        if self.half:
            # 16-bit copies of the weights.
            computed += batches * self._moved(6 * shape.parameters)
        blocks = batches + answers * shape.vocabulary / memory.HEAD_BLOCK["cuda"]
        launched = scale * self.speeds.layer_ms / 1000
        launched *= again * batches * shape.layers + _BLOCK_LAYERS * blocks
        exchanged = batches * self._gathered(ranks, backward)
        return passes * max(computed + _WAITS * launched, launched, exchanged)

    def _gathered(self, ranks: int, backward: bool) -> float:
        """Return the seconds in which ranks with shards exchange weights and gradients of a micro-batch."""
        if self.cfg.train_model.parallelism not in memory.SHARDS or ranks == 1:
            return 0.0
        element = 2 if self.half else memory.FLOAT
        num_bytes = (2 * element + memory.FLOAT) if backward else element
        return num_bytes * self.shape.parameters * (1 - 1 / ranks) / (self.speeds.link_gb_per_s * 1e9)

    def publish(self) -> float:
        """Return the seconds in which engines get new weights, and memory changes hands."""
        plan = self.plan
        element = 2 if self.engine_half else memory.FLOAT
        on_gpu = plan.weight_transfer in _ON_GPU
        rate = self.speeds.publish_gb_per_s * 1e9 if on_gpu else _PUBLISHED_THROUGH_HOST
        seconds = element * self.shape.parameters / rate + (self.speeds.sleep_s if plan.sleeps else 0.0)
        if plan.offload_optimizer and self.planned.prediction is not None:
            moments = max(row.optimizer for row in self.planned.prediction.rows)
            seconds += 2 * moments / (self.speeds.host_gb_per_s * 1e9)
        return seconds
