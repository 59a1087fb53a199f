"""Predict the peak memory of a run from the shape of its model. Imports no torch.

The tensors that autograd keeps were counted in a Llama layer as this project runs it, on a row of tokens
without padding (:mod:`~torchrl_grpo.models.scoring.shared_prefix`). :func:`kept_by_layer` lists them. The
prediction assumes the longest prompts and responses that the configuration allows, so a run with shorter
responses takes less.

The prediction leaves out the memory of Ray itself, of reward workers and of other programs on the machine.
It does not count DDP's buckets, because gradients are views of them (``gradient_as_bucket_view``).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace

from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import frozen_model, teacher_of
from torchrl_grpo.config.schema import TeacherName
from torchrl_grpo.config.values import MOMENT_BYTES, ZERO_STAGES, PrefixAttention
from torchrl_grpo.models.shape import ModelShape, Unknown, read_shape
from torchrl_grpo.planning.pictures import tower_bytes, trained_parameters
from torchrl_grpo.planning.plan import Plan
from torchrl_grpo.planning.prediction import GIB, PHASES, Prediction, Row
from torchrl_grpo.planning.workload import MAX_ROWS, Workload, workload_of
from torchrl_grpo.runtime.hardware import Hardware

FLOAT = 4
# Values of train_model.parallelism with which no rank holds the whole model.
SHARDS = ("fsdp2", "deepspeed_zero3")
# Memory of Python with torch, transformers and TorchRL. Measured on Linux with torch 2.13.
_PROGRAM_GIB = 0.5
# A vLLM server has two more processes than an engine in this process: the HTTP server and the scheduler.
_SERVER_PROGRAM_GIB = 1.5
# Estimates: CUDA's context and kernels in a process, and the memory that a sleeping engine keeps. An H100 had
# 0.95 GiB in use for both, with an eager engine.
_CUDA_GIB = 0.7
_ASLEEP_GIB = 0.7
# Factor for fragmentation between the tensors that autograd keeps. The allocator of the C library took 5 to
# 20 % more. On an H100, CUDA's took 1 % less to 3 % more, since not all of them exist at the peak.
_FRAGMENTED = {"cpu": 1.1, "cuda": 1.03}
# With gradient checkpointing, the C library's allocator leaves holes of about this share of the memory that
# each layer used and freed. CUDA's allocator reuses the same sizes layer after layer, so it is assumed to
# leave none.
_HOLES = {"cpu": 0.25, "cuda": 0.0}
# Number of logits that the output head computes at a time, and how many arrays of that size exist at once.
HEAD_BLOCK = {"cpu": 2**22, "cuda": 2**26}
_HEAD_BLOCKS = 4
# Arrays with a row of logits per response during sampling: logits, probabilities, noise and their stack.
_SAMPLING_ARRAYS = 6

# Tokens in the largest batch of vLLM 0.32 on a GPU, and the GPU size from which that batch is twice as large.
_VLLM_BATCH, _VLLM_BATCH_LARGE_GPU, _LARGE_GPU_GIB = 8192, 16_384, 70
_SIXTEEN = ("bfloat16", "float16")

# vLLM needs at least this multiple of its weights. CUDA graphs and the allocator's rounding are not counted.
VLLM_FLOOR = 1.1


def predict(cfg: Config, plan: Plan, shape: ModelShape, hardware: Hardware) -> Prediction:
    """Predict the most memory that a run takes.

    Args:
        cfg: configuration; every key that decides a size is read.
        plan: placement of the roles.
        shape: shape of the model.
        hardware: hardware; the memory of each GPU and its support for fast bfloat16 are read.
    """
    engines = len(plan.inference.devices) if plan.engine_in_each_rank else 1
    load = workload_of(cfg, plan.num_ranks, engines)
    rows = [*_train(cfg, plan, shape, load, hardware), *_inference(cfg, plan, shape, load, hardware)]
    if plan.reference.placement not in ("off", "adapter off", "cluster"):
        rows += _reference(cfg, plan, shape, load, hardware, rows)
    if plan.num_gpus > 0 and cfg.inference_model.engine.preallocates and not plan.inference.own_process:
        rows += _start(rows, plan, shape, engine_element(cfg, plan, hardware))
    rows.append(_program(cfg, plan))
    return Prediction(tuple(rows), plan.inference.own_process)


def _start(rows: Sequence[Row], plan: Plan, shape: ModelShape, element: int) -> list[Row]:
    """Return what there is while an engine in the trainer's process learns where it keeps which weights.

    If it can sleep, its cache is not there. Beside the rest of its share there are two copies of what vLLM
    loads at a time: the random numbers, and what its loader makes of them.

    Args:
        rows: rows of all roles.
        plan: placement of the roles.
        shape: shape of the model.
        element: bytes of a weight of the engine.
    """
    copies = 2.0 * element * shape.largest
    start = [replace(row, phase="start") for row in rows if row.phase == "generate"]
    return [
        replace(row, activations=copies, cache=0.0 if plan.sleeps else row.cache)
        if row.role == "inference"
        else row
        for row in start
    ]


def _program(cfg: Config, plan: Plan) -> Row:
    """Return the memory that belongs to no role: the interpreter and its libraries, or CUDA's own memory."""
    on_gpu = plan.num_gpus > 0
    if on_gpu:
        own = (plan.train, plan.inference, plan.reference)
        devices = tuple(dict.fromkeys(d for role in own for d in role.devices if d.startswith("cuda")))
        return Row("program", "all", devices, other=_CUDA_GIB * GIB)
    elsewhere = plan.inference.placement in ("cluster", "servers")
    workers = plan.inference.devices if plan.inference.own_process and not elsewhere else ()
    if plan.reference.own_process and plan.reference.placement != "cluster":
        workers += plan.reference.devices
    each = _PROGRAM_GIB + (0 if plan.inference.own_process else cfg.inference_model.engine.import_gib)
    return Row("program", "all", (*plan.train.devices, *workers), other=each * GIB)


def _train(cfg: Config, plan: Plan, shape: ModelShape, load: Workload, hardware: Hardware) -> list[Row]:
    role = plan.train
    device = "cuda" if role.devices[0].startswith("cuda") else "cpu"
    lora = cfg.train_model.lora.rank > 0
    half = autocasts(cfg, role.devices, hardware)
    # With shards, each rank holds its part of the trained weights, and gathers the rest one layer at a time.
    kind, part = cfg.train_model.parallelism, 1 / plan.num_ranks
    weights = (part if kind in SHARDS else 1.0) * trained_weights(cfg, shape, half)
    if kind in ZERO_STAGES and part < 1:
        # DeepSpeed updates a copy of each rank's part of the weights.
        weights += part * FLOAT * shape.parameters
    divided = kind in SHARDS or kind in ZERO_STAGES
    trained = (part if divided else 1.0) * FLOAT * trained_parameters(cfg, shape)
    varlen = uses_varlen(cfg, role.devices, hardware)
    layer = kept_by_layer(shape, load, half, device, varlen, cfg.train_model.compile)
    kept, work = _activations(shape, load, cfg.train_model.gradient_checkpointing, device, layer)
    masks = 0.0 if varlen else mask_bytes(load, half, device)
    copies = _copies(cfg, shape, half, kind if part < 1 else "ddp")
    # The gradient of the output head exists as a whole before it is accumulated. At the end of the backward
    # pass, the same holds for the gradient of the embedding.
    head = 0.0 if lora else FLOAT * shape.vocabulary * shape.hidden
    blocks = FLOAT * HEAD_BLOCK[device] * _HEAD_BLOCKS
    # Pictures are encoded before the layers of the text model run.
    pictures = tower_bytes(cfg, shape, load)
    kept += pictures
    # Gradients and activations at the start and at the end of a backward pass. The gradients of earlier
    # micro-batches are already there at its start.
    earlier = trained if load.several_micro_batches else 0.0
    backward_start = earlier + head, kept + copies + masks + max(work, blocks)
    # On one rank, copies of the weights are kept for all micro-batches; on a GPU if there are several.
    keeps_copies = plan.num_ranks == 1 and not lora and (device == "cpu" or load.several_micro_batches)
    cast = copies if keeps_copies else 0.0
    backward_end = trained + head, cast + work
    gradients, live = max(backward_start, backward_end, key=sum)
    names = role.devices
    forward = FLOAT * load.tokens * _forward_width(shape) + blocks + masks + pictures
    moments = trained / FLOAT * MOMENT_BYTES[cfg.optimizer.name]
    if cfg.optimizer.name == "muon" and not lora:
        # AdamW, with two averages, updates what is not a matrix of a layer.
        trained_ones = trained_parameters(cfg, shape)
        moments += (part if divided else 1.0) * FLOAT * (trained_ones - shape.matrices)
    # Only the update needs the moments, if they wait in host memory.
    waiting = 0.0 if plan.offload_optimizer else moments
    rows = [Row("train", "generate", names, weights, optimizer=waiting)]
    if kind in SHARDS and part < 1:
        # Each rank loads the whole model on its device before the model is sharded.
        rows.insert(0, Row("train", "load", names, float(FLOAT * shape.parameters)))
    # Groups without a gradient only run a forward pass, for metrics. With policy.proximal=trainer, each round
    # runs one too.
    forward += _copies(cfg, shape, half, kind if part < 1 else "ddp", has_gradients=False)
    rows.append(Row("train", "prepare", names, weights, optimizer=waiting, activations=forward))
    return [*rows, Row("train", "optimize", names, weights, gradients, moments, live)]


def autocasts(cfg: Config, devices: Sequence[str], hardware: Hardware) -> bool:
    """Return whether the trainer on ``devices`` computes matrix products in 16 bits."""
    return bits16(cfg.train_model.autocast, {"bf16", "fp16"}, hardware.has_fast_bfloat16(devices))


def uses_varlen(cfg: Config, devices: Sequence[str], hardware: Hardware) -> bool:
    """Return whether attention over shared prompts is expected to use the kernel for variable lengths.

    The kernel does not support every size of a head. That is checked only when the run starts.
    """
    shared = cfg.train_model.shared_prefix and cfg.train_model.prefix_attention != PrefixAttention.dense
    # GPUs that compute fast in bfloat16 are those that the kernel runs on.
    on_gpu = devices[0].startswith("cuda") and hardware.has_fast_bfloat16(devices)
    return shared and on_gpu and autocasts(cfg, devices, hardware)


def mask_bytes(load: Workload, half: bool, device: str) -> float:
    """Return the bytes of the masks of dense attention over shared prompts.

    On a GPU all layers share them. On a CPU they are not counted. Models whose layers have windows of several
    sizes hold a mask for each size.
    """
    return load.pairs * (2 if half else FLOAT) if device == "cuda" else 0.0


def trained_weights(cfg: Config, shape: ModelShape, half: bool) -> float:
    """Return the bytes of the trainer's weights: float32 if trained, or the configured format if frozen.

    Adapters count too.

    Args:
        cfg: configuration; ``train_model`` is read.
        shape: shape of the model.
        half: whether autocast computes in 16 bits.
    """
    if cfg.train_model.lora.rank == 0:
        return float(FLOAT * shape.parameters)
    adapters = FLOAT * trained_parameters(cfg, shape)
    element = float(_frozen_element(cfg, half))
    if cfg.train_model.quantization == "nf4":
        # A weight takes four bits, and every 64 weights share a float32 scale. Embedding and output head are
        # not quantized.
        return adapters + element * shape.outer + (0.5 + FLOAT / 64) * (shape.parameters - shape.outer)
    return adapters + element * shape.parameters


def _frozen_element(cfg: Config, half: bool) -> int:
    """Return the bytes of a frozen weight that is not quantized to 4 bits."""
    frozen = cfg.train_model.lora.base_dtype
    return 2 if frozen in ("bfloat16", "float16") or (frozen == "auto" and half) else FLOAT


def _copies(cfg: Config, shape: ModelShape, half: bool, kind: str, has_gradients: bool = True) -> float:
    """Return the bytes of temporary copies of weights that a pass computes with.

    Args:
        cfg: configuration; ``train_model`` is read.
        shape: shape of the model.
        half: whether autocast computes in 16 bits.
        kind: parallelism with which several ranks hold the model.
        has_gradients: whether the pass has gradients. Without them, a copy lives as long as its product.
    """
    element = 2.0 if half else float(FLOAT)
    layers = shape.parameters - shape.outer if has_gradients else shape.layer
    if kind == "fsdp2":
        # Embedding, last norm and output head are gathered in float32 for the whole pass. The fused head
        # keeps a 16-bit copy of its weights. A layer is gathered while it runs, together with the next layer.
        fused = element * shape.vocabulary * shape.hidden if half and cfg.train_model.fused_head else 0.0
        # Layers of linear layers and norms only (``plain``) are gathered in 16 bits.
        if shape.plain or not half:
            return FLOAT * shape.outer + fused + 2 * element * shape.layer
        # Weights that are gathered in float32 are cast for each product. The copy lives until the pass ends.
        return FLOAT * (shape.outer + 2 * shape.layer) + fused + element * layers
    if cfg.train_model.lora.rank == 0:
        # Autocast keeps its copies of the weights until the pass ends.
        return element * (shape.parameters if has_gradients else shape.layer) if half else 0.0
    if cfg.train_model.quantization == "nf4":
        return element * shape.layer
    if not half or _frozen_element(cfg, half) == element:
        return 0.0
    # Autocast caches no copy of a frozen weight. But autograd keeps the copy of each weight for the backward
    # pass. With gradient checkpointing it keeps the copies of one layer at a time.
    keeps_all = has_gradients and not cfg.train_model.gradient_checkpointing
    return element * (shape.parameters if keeps_all else shape.layer)


def kept_by_layer(
    shape: ModelShape, load: Workload, half: bool, device: str, varlen: bool = False, compiled: bool = False
) -> float:
    """Return the bytes that autograd keeps of one layer for all tokens of a micro-batch.

    H is the width of the residual stream, F that of the feed-forward layer, Q that of all query heads, and K
    that of all key heads. Per token, autograd keeps these elements:

    - Each of two norms keeps its input, the normalized input and its output (6 H).
    - The feed-forward layer keeps the gate projection, its activation, the up projection and their product
      (4 F).
    - Attention keeps the queries, its output and a rearranged copy of the output (3 Q). On a CPU in 16 bits
      it may keep no output, so the prediction may be too high.
    - Attention keeps the keys and values (2 K).
    - Attention also keeps the keys and values that each response attends to (``attended``). On a GPU they are
      repeated for every query head that shares them.

    With attention for variable lengths, it keeps queries, keys, values and output in 16 bits. It also keeps
    one float32 number per token and head; heads are assumed to have size 64. No key is kept for more than one
    response. Compiled layers compute some of this again: of the feed-forward layer they keep the two
    projections, and of the norms less. What is left was fitted to one model on an H100.
    """
    h, f, q, k = shape.hidden, shape.mlp, shape.queries, shape.keys
    mlp = 4 * f if shape.gated else 5 * f
    norms = 6 * h if shape.gated else 4 * h
    attention = load.tokens * (3 * q + 2 * k) + load.attended * 2 * (k if device == "cpu" else q)
    if not half:
        return FLOAT * (load.tokens * (norms + mlp) + attention)
    if varlen:
        # Autocast casts the input of each matrix product, and makes a copy for each product that shares it.
        elementwise = 20 * h + mlp if compiled else 26 * h + 2 * mlp
        return load.tokens * (elementwise + 4 * (q + k) + q / 16)
    # Norms compute in float32 and return 16 bits. Rotary embeddings convert queries and keys to float32.
    return load.tokens * (20 * h + 2 * mlp) + 3 * attention


def _activations(
    shape: ModelShape, load: Workload, checkpointing: bool, device: str, layer: float
) -> tuple[float, float]:
    """Return the bytes that are kept for the backward pass, and the bytes that it needs in addition."""
    edges = FLOAT * load.tokens * 4 * shape.hidden  # embedding, last norm, inputs of the output head
    work = FLOAT * load.tokens * (4 * shape.mlp + 4 * shape.hidden)
    if checkpointing:
        holes = _HOLES[device] * (shape.layers - 1) * layer
        return shape.layers * FLOAT * load.tokens * shape.hidden + edges + holes, layer + work
    return _FRAGMENTED[device] * (shape.layers * layer + edges), work


def _forward_width(shape: ModelShape) -> int:
    """Return the elements per token that a layer holds at a time in a pass without gradients."""
    return 3 * shape.mlp + 4 * shape.hidden + 2 * shape.queries


def _inference(cfg: Config, plan: Plan, shape: ModelShape, load: Workload, hardware: Hardware) -> list[Row]:
    role, options = plan.inference, cfg.inference_model
    if role.placement in ("cluster", "servers"):
        return []
    device = "cuda" if role.devices[0].startswith("cuda") else "cpu"
    element = engine_element(cfg, plan, hardware)
    # The devices of an engine divide its weights.
    weights = element * shape.parameters / plan.engine_size
    cache, work = _generation(cfg, shape, load, element)
    if options.engine.preallocates and device == "cuda":
        sizes = [hardware.gpu_gib(name) for name in role.devices]
        # Use the smallest GPU, because the table has one row for all devices of a role.
        known = [size for size in sizes if size is not None]
        size = min(known) if len(known) == len(sizes) else None
        # The share holds weights, cache and graphs. If the size of a GPU is unknown, count only the weights.
        share = weights if size is None else max(weights, plan.gpu_memory_utilization * size * GIB)
        cache, work = share - weights, 0.0
    awake = Row("inference", "generate", role.devices, weights, activations=work, cache=cache)
    if options.engine.has_servers and device == "cpu":
        server = Row("inference", "all", role.devices, other=_SERVER_PROGRAM_GIB * GIB)
        ahead = plan.asynchronous and cfg.collector.max_policy_age > 0
        if plan.weight_transfer != "shared_memory" or not ahead:
            # Weights pass through a bucket.
            return [awake, server]
        # One copy of the weights lies in shared memory, whatever the number of servers.
        return [awake, server, Row("inference", "all", ("cpu",), other=float(element * shape.parameters))]
    if plan.inference.own_process:
        return [awake]
    kept = cache if options.engine.preallocates else 0.0
    phases = [phase for phase in PHASES if phase not in ("load", "start", "generate")]
    if plan.sleeps:
        left = _ASLEEP_GIB * GIB if options.engine.preallocates else 0.0
        return [awake, *(Row("inference", phase, role.devices, other=left) for phase in phases)]
    return [awake, *(Row("inference", phase, role.devices, weights, cache=kept) for phase in phases)]


def engine_element(cfg: Config, plan: Plan, hardware: Hardware) -> int:
    """Return the bytes of a weight of an engine."""
    fast = hardware.has_fast_bfloat16(plan.inference.devices)
    return 2 if bits16(cfg.inference_model.dtype, _SIXTEEN, fast) else FLOAT


def least_for_vllm(shape: ModelShape, load: Workload, weights: float, gib: float) -> float:
    """Return the fewest bytes of a GPU with which vLLM starts.

    vLLM needs its weights, the memory of a trial run of its largest batch, and the cache of one sequence.

    Args:
        shape: shape of the model.
        load: workload; the longest sequence and the number of responses at a time are read.
        weights: bytes of the weights.
        gib: size of the GPU in GiB, from which vLLM chooses its largest batch.
    """
    batch = _VLLM_BATCH_LARGE_GPU if gib >= _LARGE_GPU_GIB else _VLLM_BATCH
    element = weights / shape.parameters
    work = element * batch * (3 * shape.mlp + 4 * shape.hidden)
    sampling = FLOAT * min(load.rows, MAX_ROWS) * shape.vocabulary * 2
    sequence = cache_of(shape, element, load.prompt + load.response)
    return max(VLLM_FLOOR * weights, weights + work + sampling + sequence)


def cache_of(shape: ModelShape, element: float, tokens: int) -> float:
    """Return the bytes of the keys and values of ``tokens`` tokens, with ``element`` bytes per element."""
    return element * shape.layers * 2 * shape.keys * tokens


def _generation(cfg: Config, shape: ModelShape, load: Workload, element: int) -> tuple[float, float]:
    """Return the bytes of the key/value cache, and the temporary bytes of sampling."""
    # A 16-bit output head that multiplies in float32 is copied in each step. On a GPU, vLLM has a kernel that
    # avoids the copy.
    cast = cfg.inference_model.head_dtype == "float32" and element < FLOAT
    head = float(cast * FLOAT * shape.vocabulary * shape.hidden)
    if cfg.inference_model.engine.preallocates:
        sampling = FLOAT * load.rows * shape.vocabulary * 2
        return float(cfg.inference_model.kv_cache_gib * GIB), sampling + head
    rows = min(load.rows, MAX_ROWS)
    layer = float(rows * (load.prompt + load.response) * 2 * shape.keys * element)
    # The cache of a layer is copied when a token is added, and repeated for all query heads.
    grown = layer * (1 + shape.queries / shape.keys)
    sampling = FLOAT * rows * shape.vocabulary * _SAMPLING_ARRAYS
    # The layers and the output head do not run at the same time.
    return shape.layers * layer, max(grown, head) + sampling


def _reference(
    cfg: Config, plan: Plan, shape: ModelShape, load: Workload, hardware: Hardware, others: Sequence[Row]
) -> list[Row]:
    role, name = plan.reference, "teacher" if plan.teaches else "reference"
    device = "cuda" if role.devices[0].startswith("cuda") else "cpu"
    shape = frozen_shape(cfg, shape)
    weights = reference_weights(cfg, shape, autocasts(cfg, plan.train.devices, hardware))
    work = FLOAT * (load.tokens * _forward_width(shape) + HEAD_BLOCK[device] * _HEAD_BLOCKS)
    rows = []
    if frozen_model(cfg).dtype == "auto" and device == "cuda":
        # It is loaded in float32, and its matrices are cast when all of them are there.
        whole = float(FLOAT * shape.parameters)
        if set(role.devices) & set(plan.train.devices):
            # The trainer has loaded then. It may have needed more while it did.
            own = [row for row in others if row.role == "train"]
            held = next(row.weights for row in own if row.phase == "generate")
            whole = max(0.0, held + whole - sum(row.total for row in own if row.phase == "load"))
        rows.append(Row(name, "load", role.devices, whole))
    if role.own_process:
        return [*rows, Row(name, "all", role.devices, weights, activations=work)]
    generate, optimize = (Row(name, phase, role.devices, weights) for phase in ("generate", "optimize"))
    return [*rows, generate, Row(name, "prepare", role.devices, weights, activations=work), optimize]


def frozen_shape(cfg: Config, shape: ModelShape) -> ModelShape:
    """Return the shape of the reference model, which is ``shape``, or of the teacher in its place."""
    teacher = teacher_of(cfg)
    if teacher is None:
        return shape
    known = read_teacher_shape(teacher.name, teacher.cache_dir)
    assert isinstance(known, ModelShape), "without it nothing is predicted"
    return known


@functools.cache
def read_teacher_shape(name: str, cache_dir: str | None) -> ModelShape | Unknown:
    """Read the shape of a teacher once. Its memory is predicted many times."""
    return read_shape(TeacherName(name=name, cache_dir=cache_dir))


def reference_weights(cfg: Config, shape: ModelShape, half: bool) -> float:
    """Return the bytes of the weights of the reference model, or of the teacher in its place.

    Args:
        cfg: configuration; ``ref_model`` or ``teacher_model`` is read.
        shape: shape of the model.
        half: whether the trainer's autocast computes in 16 bits.
    """
    dtype = frozen_model(cfg).dtype
    if dtype == "auto" and half and cfg.ref_model.refresh_mix == 1:
        # Embedding and output head stay in float32, as in the trainer.
        return float(FLOAT * shape.outer + 2 * (shape.parameters - shape.outer))
    return (2.0 if dtype in _SIXTEEN else float(FLOAT)) * shape.parameters


def bits16(name: str, sixteen: Collection[str], fast: bool) -> bool:
    """Return whether a format has 16 bits.

    Args:
        name: format; ``auto`` has 16 bits if the device computes fast in bfloat16.
        sixteen: formats with 16 bits.
        fast: whether the device computes fast in bfloat16.
    """
    return fast if name == "auto" else name in sixteen
