"""The memory a run will take at most, from the shape of its model. Imports no torch.

What autograd keeps was counted in a layer of the Llama kind as this project runs it, a row of real tokens
(:mod:`~torchrl_grpo.models.scoring.shared_prefix`); :func:`kept_by_layer` lists it. The longest prompts and
responses that the configuration allows are assumed, so a run whose responses are shorter takes less.

Left out: memory of Ray itself, of reward workers and of other programs on the machine. DDP's buckets are not
counted: gradients are views of them (``gradient_as_bucket_view``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import ZERO_STAGES
from torchrl_grpo.models.shape import ModelShape
from torchrl_grpo.planning.plan import Plan, aligned, show_devices
from torchrl_grpo.planning.workload import MAX_ROWS, Workload, workload_of
from torchrl_grpo.runtime.hardware import Hardware

GIB = 2**30
FLOAT = 4
# Ways of several ranks to hold the model where none has all of it.
_SHARDS = ("fsdp2", "deepspeed_zero3")
# Measured on Linux with torch 2.13: Python with torch, transformers and TorchRL; more once vLLM is imported.
_PROGRAM_GIB = 0.5
_VLLM_PROGRAM_GIB = 0.2
# Not measured here: context and kernels of CUDA in a process, and what an engine that sleeps leaves behind.
_CUDA_GIB = 0.7
_ASLEEP_GIB = 0.7
# Room between pieces that autograd keeps, which the allocator cannot use: 5 to 20 % was measured.
_FRAGMENTED = 1.1
# With checkpointing the C library leaves holes of about this share of what each layer computed and dropped;
# CUDA's allocator, which hands out the same sizes layer after layer, is taken to leave none.
_HOLES = {"cpu": 0.25, "cuda": 0.0}
# Logits of the output head at a time, and how many arrays of that size live together.
_HEAD_BLOCK = {"cpu": 2**22, "cuda": 2**26}
_HEAD_BLOCKS = 4
# Arrays of a row of logits for each response while it is sampled: logits, probabilities, noise, its stack.
_SAMPLING_ARRAYS = 6
# Adapters of the usual ranks have about this share of the weights of their model.
_ADAPTER_SHARE = 0.01

# Tokens of the largest batch of vLLM on a GPU (0.32), and from which size of GPU on it is twice as large.
_VLLM_BATCH, _VLLM_BATCH_LARGE_GPU, _LARGE_GPU_GIB = 8192, 16_384, 70
_SIXTEEN = ("bfloat16", "float16")

# From loading on: the phases of a round follow it.
PHASES = ("load", "generate", "score", "optimize")
# The share of its weights that vLLM needs at least: graphs and the allocator's rounding are not counted.
VLLM_FLOOR = 1.1


@dataclass(frozen=True)
class Row:
    """What one role takes in one phase, on each of its devices, in bytes.

    Attributes:
        role: ``train``, ``inference``, ``reference``, or ``program`` for what is no role's.
        phase: one of PHASES, or ``all``.
        devices: as in :class:`~torchrl_grpo.planning.plan.RolePlan`.
    """

    role: str
    phase: str
    devices: tuple[str, ...]
    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    cache: float = 0
    other: float = 0

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache + self.other


@dataclass(frozen=True)
class Prediction:
    """The rows of a run, and whether its phases overlap.

    Attributes:
        rows: all roles and phases.
        own_process: engines are workers, which keep what they have taken in every phase.
    """

    rows: tuple[Row, ...]
    own_process: bool

    def peak(self, device: str) -> tuple[float, str]:
        """Bytes on ``device`` at its worst, and in which phase that is."""
        found = {phase: self.need(device, phase) for phase in PHASES}
        worst = max(found, key=lambda phase: found[phase])
        return found[worst], worst

    def largest(self, device: str, phase: str) -> Row:
        """The row that takes most of ``device`` in ``phase``."""
        return max(self._rows_in(device, phase), key=lambda row: self._here(row, device))

    def need(self, device: str, phase: str) -> float:
        """Bytes on ``device`` in ``phase``."""
        return sum(self._here(row, device) for row in self._rows_in(device, phase))

    def _rows_in(self, device: str, phase: str) -> list[Row]:
        def now(row: Row) -> bool:
            if phase == "load":
                # Engines and references start once the trainer is there.
                return row.phase == phase or row.role == "program"
            return row.phase in (phase, "all") or (self.own_process and row.role == "inference")

        return [row for row in self.rows if device in row.devices and now(row)]

    @staticmethod
    def _here(row: Row, device: str) -> float:
        # On a CPU every process takes it.
        return row.total * row.devices.count(device)

    def table(self) -> str:
        """The rows as aligned lines, in GiB."""
        head = (
            "role",
            "phase",
            "device",
            "weights",
            "gradients",
            "optimizer",
            "activations",
            "cache",
            "total",
        )
        lines = [head]
        for row in self.rows:
            parts = (row.weights, row.gradients, row.optimizer, row.activations, row.cache, row.total)
            numbers = [f"{part / GIB:.2f}" if part else "-" for part in parts]
            lines.append((row.role, row.phase, show_devices(row.devices), *numbers))  # type: ignore[arg-type]
        return aligned(lines, frozenset(range(3, len(head))))


def predict(cfg: Config, plan: Plan, shape: ModelShape, there: Hardware) -> Prediction:
    """The memory that a run takes at most.

    Args:
        cfg: all that decides sizes is read.
        plan: who runs where.
        shape: of the model.
        there: memory of each GPU, of which an engine takes a share, and what each computes fast in.
    """
    engines = len(plan.inference.devices) if plan.engine_in_each_rank else 1
    load = workload_of(cfg, len(plan.train.devices), engines)
    rows = [*_train(cfg, plan, shape, load, there), *_inference(cfg, plan, shape, load, there)]
    if plan.reference.placement not in ("off", "adapter off", "cluster"):
        rows += _reference(cfg, plan, shape, load, there)
    rows.append(_program(cfg, plan))
    return Prediction(tuple(rows), plan.own_process)


def _program(cfg: Config, plan: Plan) -> Row:
    """Everything that no role has: interpreter and libraries, or what CUDA takes for itself."""
    on_gpu = plan.num_gpus > 0
    if on_gpu:
        own = (plan.train, plan.inference, plan.reference)
        devices = tuple(dict.fromkeys(d for role in own for d in role.devices if d.startswith("cuda")))
        return Row("program", "all", devices, other=_CUDA_GIB * GIB)
    workers = plan.inference.devices if plan.own_process and plan.inference.placement != "cluster" else ()
    if plan.reference.own_process and plan.reference.placement != "cluster":
        workers += plan.reference.devices
    in_process = cfg.inference_model.backend == "vllm" and not plan.own_process
    each = _PROGRAM_GIB + (_VLLM_PROGRAM_GIB if in_process else 0)
    return Row("program", "all", (*plan.train.devices, *workers), other=each * GIB)


def _train(cfg: Config, plan: Plan, shape: ModelShape, load: Workload, there: Hardware) -> list[Row]:
    role = plan.train
    device = "cuda" if role.devices[0].startswith("cuda") else "cpu"
    lora = cfg.train_model.lora.rank > 0
    half = autocasts(cfg, role.devices, there)
    # In shards each rank has its part of what is trained, and a layer at a time of the rest.
    kind, part = cfg.train_model.parallelism, 1 / len(role.devices)
    weights = (part if kind in _SHARDS else 1.0) * trained_weights(cfg, shape, half)
    if kind in ZERO_STAGES and part < 1:
        # Of which DeepSpeed updates a copy.
        weights += part * FLOAT * shape.parameters
    divided = kind in _SHARDS or kind in ZERO_STAGES
    trained = (part if divided else 1.0) * FLOAT * shape.parameters * (_ADAPTER_SHARE if lora else 1.0)
    kept, work = activations(shape, load, cfg.train_model.gradient_checkpointing, half, device)
    copies = _copies(cfg, shape, half, kind if part < 1 else "ddp")
    # The output head's gradient is whole before it is added, and the embedding's again at the end.
    head = 0.0 if lora else FLOAT * shape.vocabulary * shape.hidden
    blocks = FLOAT * _HEAD_BLOCK[device] * _HEAD_BLOCKS
    begin = (trained if load.several else 0.0) + head, kept + copies + max(work, blocks)
    end = trained + head, work
    gradients, live = max(begin, end, key=sum)
    names, forward = role.devices, FLOAT * load.tokens * _forward_width(shape) + blocks
    moments = 2 * trained
    rows = [Row("train", "generate", names, weights, optimizer=moments)]
    if kind in _SHARDS and part < 1:
        # Each rank loads the whole model on its device before it is divided.
        rows.insert(0, Row("train", "load", names, float(FLOAT * shape.parameters)))
    # Groups without a gradient are only measured, and so is a round by policy.proximal=trainer.
    rows.append(Row("train", "score", names, weights, optimizer=moments, activations=forward + copies))
    return [*rows, Row("train", "optimize", names, weights, gradients, moments, live)]


def autocasts(cfg: Config, devices: Sequence[str], there: Hardware) -> bool:
    """Whether the trainer on ``devices`` computes matrix products in 16 bits."""
    return bits16(cfg.train_model.autocast, {"bf16", "fp16"}, there.has_fast_bfloat16(devices))


def trained_weights(cfg: Config, shape: ModelShape, half: bool) -> float:
    """Bytes of the trainer's model: float32 where all of it is trained, as configured where it is frozen.

    Args:
        cfg: ``train_model`` is read.
        shape: of the model.
        half: autocast computes in 16 bits.
    """
    if cfg.train_model.lora.rank == 0:
        return float(FLOAT * shape.parameters)
    element = float(_frozen_element(cfg, half))
    if cfg.train_model.quantization == "nf4":
        # Four bits, and a scale for each 64 of them. Embedding and output head stay as they are.
        return element * shape.outer + (0.5 + FLOAT / 64) * (shape.parameters - shape.outer)
    return element * shape.parameters


def _frozen_element(cfg: Config, half: bool) -> int:
    """Bytes of a weight below adapters that is not in 4 bits."""
    frozen = cfg.train_model.lora.base_dtype
    return 2 if frozen in ("bfloat16", "float16") or (frozen == "auto" and half) else FLOAT


def _copies(cfg: Config, shape: ModelShape, half: bool, kind: str) -> float:
    """Bytes of the copies of weights that a pass computes with and then drops.

    Args:
        cfg: ``train_model`` is read.
        shape: of the model.
        half: autocast computes in 16 bits.
        kind: how several ranks hold the model.
    """
    element = 2.0 if half else float(FLOAT)
    if kind == "fsdp2":
        # Embedding, last norm and head are gathered for the whole pass, in float32, of which the fused head
        # keeps a copy; a layer while it runs, and the next.
        fused = element * shape.vocabulary * shape.hidden if half and cfg.train_model.fused_head else 0.0
        if shape.plain or not half:
            return FLOAT * shape.outer + fused + 2 * element * shape.layer
        # What travels in float32 is cast for each product, and that copy lives as long as the pass.
        return FLOAT * (shape.outer + 2 * shape.layer) + fused + element * (shape.parameters - shape.outer)
    if cfg.train_model.lora.rank == 0:
        # What autocast casts lives as long as the pass.
        return element * shape.parameters if half else 0.0
    if cfg.train_model.quantization == "nf4":
        return element * shape.layer
    if not half or _frozen_element(cfg, half) == element:
        return 0.0
    # Of a frozen weight autocast keeps no copy, but the backward pass does, unless it runs the layer again.
    return element * (shape.layer if cfg.train_model.gradient_checkpointing else shape.parameters)


def kept_by_layer(shape: ModelShape, load: Workload, half: bool, device: str) -> float:
    """Bytes that autograd keeps of one layer, for all tokens of a micro-batch.

    Per token, with H the residual stream, F the feed-forward layer, Q and K all query and key heads: each of
    two norms keeps its input, what it normalized and its output (6 H); the feed-forward layer keeps gate,
    activation, the other half and their product (4 F); attention keeps queries, its output and the output's
    rearranged copy (3 Q; on a CPU in 16 bits it may keep no output, which is room to spare), keys and values
    (2 K), and those again as each response sees them (attended), on a GPU repeated for every query head that
    shares them.
    """
    h, f, q, k = shape.hidden, shape.mlp, shape.queries, shape.keys
    mlp = 4 * f if shape.gated else 5 * f
    norms = 6 * h if shape.gated else 4 * h
    attention = load.tokens * (3 * q + 2 * k) + load.attended * 2 * (k if device == "cpu" else q)
    if not half:
        return FLOAT * (load.tokens * (norms + mlp) + attention)
    # Norms compute in float32 and hand on 16 bits; rotary positions bring queries and keys back to float32.
    return load.tokens * (20 * h + 2 * mlp) + 3 * attention


def activations(
    shape: ModelShape, load: Workload, checkpointing: bool, half: bool, device: str
) -> tuple[float, float]:
    """Bytes that the forward pass keeps for the backward pass, and what the latter needs beside them."""
    layer = kept_by_layer(shape, load, half, device)
    edges = FLOAT * load.tokens * 4 * shape.hidden  # embedding, last norm, states that the head sees
    work = FLOAT * load.tokens * (4 * shape.mlp + 4 * shape.hidden)
    if checkpointing:
        holes = _HOLES[device] * (shape.layers - 1) * layer
        return shape.layers * FLOAT * load.tokens * shape.hidden + edges + holes, layer + work
    return _FRAGMENTED * (shape.layers * layer + edges), work


def _forward_width(shape: ModelShape) -> int:
    """Elements a token that a layer has at a time where no gradient is wanted."""
    return 3 * shape.mlp + 4 * shape.hidden + 2 * shape.queries


def _inference(cfg: Config, plan: Plan, shape: ModelShape, load: Workload, there: Hardware) -> list[Row]:
    role, options = plan.inference, cfg.inference_model
    if role.placement == "cluster":
        return []
    device = "cuda" if role.devices[0].startswith("cuda") else "cpu"
    element = 2 if bits16(options.dtype, _SIXTEEN, there.has_fast_bfloat16(role.devices)) else FLOAT
    weights = float(element * shape.parameters)
    cache, work = _generation(options.backend, cfg, shape, load, element)
    if options.backend == "vllm" and device == "cuda":
        sizes = [there.gpus[int(name.removeprefix("cuda:"))] for name in role.devices]
        # Of unequal ones the smallest: a table has one row for all of a role's devices.
        known = [size for size in sizes if size is not None]
        size = min(known) if len(known) == len(sizes) else None
        # Weights, cache and graphs together; without a figure for the GPU, what is known of it.
        share = weights if size is None else max(weights, plan.gpu_memory_utilization * size * GIB)
        cache, work = share - weights, 0.0
    awake = Row("inference", "generate", role.devices, weights, activations=work, cache=cache)
    if plan.own_process:
        return [awake]
    kept = cache if options.backend == "vllm" else 0.0
    phases = [phase for phase in PHASES if phase not in ("load", "generate")]
    if plan.sleeps:
        left = _ASLEEP_GIB * GIB if options.backend == "vllm" else 0.0
        return [awake, *(Row("inference", phase, role.devices, other=left) for phase in phases)]
    return [awake, *(Row("inference", phase, role.devices, weights, cache=kept) for phase in phases)]


def least_for_vllm(shape: ModelShape, load: Workload, weights: float, gib: float) -> float:
    """Bytes of a GPU with which vLLM starts: weights, its largest batch on trial, the cache of a sequence.

    Args:
        shape: of the model.
        load: its longest sequence, and how many it decodes at a time.
        weights: bytes of them.
        gib: size of the GPU, by which vLLM chooses the largest batch.
    """
    batch = _VLLM_BATCH_LARGE_GPU if gib >= _LARGE_GPU_GIB else _VLLM_BATCH
    element = weights / shape.parameters
    work = element * batch * (3 * shape.mlp + 4 * shape.hidden)
    sampling = FLOAT * min(load.rows, MAX_ROWS) * shape.vocabulary * 2
    sequence = cache_of(shape, element, load.prompt + load.response)
    return max(VLLM_FLOOR * weights, weights + work + sampling + sequence)


def cache_of(shape: ModelShape, element: float, tokens: int) -> float:
    """Bytes of the keys and values of ``tokens`` tokens, each of ``element`` bytes."""
    return element * shape.layers * 2 * shape.keys * tokens


def _generation(
    backend: str, cfg: Config, shape: ModelShape, load: Workload, element: int
) -> tuple[float, float]:
    """Bytes of the key/value cache, and of what sampling works with."""
    # A head in 16 bits that multiplies in float32 is copied in each step; on a GPU vLLM has a kernel instead.
    cast = cfg.inference_model.head_dtype == "float32" and element < FLOAT
    head = float(cast * FLOAT * shape.vocabulary * shape.hidden)
    if backend == "vllm":
        sampling = FLOAT * load.rows * shape.vocabulary * 2
        return float(cfg.inference_model.kv_cache_gib * GIB), sampling + head
    rows = min(load.rows, MAX_ROWS)
    layer = float(rows * (load.prompt + load.response) * 2 * shape.keys * element)
    # A layer's cache is copied when a token is added, and spread over all query heads.
    grown = layer * (1 + shape.queries / shape.keys)
    sampling = FLOAT * rows * shape.vocabulary * _SAMPLING_ARRAYS
    # The layers have ended when the head begins.
    return shape.layers * layer, max(grown, head) + sampling


def _reference(cfg: Config, plan: Plan, shape: ModelShape, load: Workload, there: Hardware) -> list[Row]:
    role = plan.reference
    device = "cuda" if role.devices[0].startswith("cuda") else "cpu"
    weights = reference_weights(cfg, shape, autocasts(cfg, plan.train.devices, there))
    work = FLOAT * (load.tokens * _forward_width(shape) + _HEAD_BLOCK[device] * _HEAD_BLOCKS)
    if role.own_process:
        return [Row("reference", "all", role.devices, weights, activations=work)]
    rows = [Row("reference", phase, role.devices, weights) for phase in ("generate", "optimize")]
    return [rows[0], Row("reference", "score", role.devices, weights, activations=work), rows[1]]


def reference_weights(cfg: Config, shape: ModelShape, half: bool) -> float:
    """Bytes of the reference model.

    Args:
        cfg: ``ref_model`` is read.
        shape: of the model.
        half: the trainer's autocast computes in 16 bits.
    """
    dtype = cfg.ref_model.dtype
    if dtype == "auto" and half and cfg.ref_model.refresh_mix == 1:
        # Embedding and output head stay in float32, as the trainer has them.
        return float(FLOAT * shape.outer + 2 * (shape.parameters - shape.outer))
    return (2.0 if dtype in _SIXTEEN else float(FLOAT)) * shape.parameters


def bits16(name: str, sixteen: Collection[str], fast: bool) -> bool:
    """Whether a format is one of 16 bits; ``auto`` is, where the device computes ``fast`` in bfloat16."""
    return fast if name == "auto" else name in sixteen
