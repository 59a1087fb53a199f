"""The sections of the schema for the three copies of the model: trained, reference and engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torchrl_grpo.config.engines import (
    DEFAULT_ENGINE,
    ENGINES,
    EngineKind,
    described,
    engine_kind,
    engines_with,
)
from torchrl_grpo.config.keys import key
from torchrl_grpo.config.values import (
    Attention,
    Autocast,
    Dtype,
    HeadDtype,
    NonNegativeInt,
    Parallelism,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    PrefixAttention,
    Quantization,
    Range,
    WeightTransfer,
)

# The setting of an only_with has one value.
(_WITH_OWN_PYTHON,) = engines_with(lambda kind: kind.has_own_python)
_SERVED = " or ".join(engines_with(lambda kind: kind.has_servers))


@dataclass
class LoraConfig:
    """Low-rank adapters on the trained copy."""

    rank: NonNegativeInt = key(0, "Rank of the adapters; 0 trains the whole model.")
    alpha: PositiveFloat = key(
        32.0, "Adapters are scaled by alpha / rank.", only_with="train_model.lora.rank"
    )
    target_modules: list[str] = key(
        ["all-linear"],
        "Linear layers that get an adapter, by the ends of their names, e.g. [q_proj,v_proj]; [all-linear] "
        "is every layer but the output head.",
        only_with="train_model.lora.rank",
    )
    base_dtype: Dtype = key(
        Dtype.auto,
        "Number format of the frozen model: auto, float32, bfloat16 or float16. auto means the format of "
        "autocast, or float32 without autocast. Adapters are float32.",
        only_with="train_model.lora.rank",
    )


@dataclass
class TrainModelConfig:
    """The trained copy of the model."""

    num_devices: int | str = key(
        "auto",
        "Devices that train, one process (rank) on each. Without a GPU, the processes share the cores. A "
        "number, or auto: one without a GPU, and with several GPUs as many as serve best (docs/devices.md).",
    )
    devices: list[int] | None = key(
        None,
        "Numbers of the GPUs, e.g. [0]; null lets the planner choose. Without a GPU everything runs on the "
        "CPU.",
    )
    parallelism: Parallelism = key(
        Parallelism.auto,
        "How several ranks hold the model: ddp (whole on each), fsdp2 (in shards: less memory, more "
        "communication), deepspeed_zero2 or deepspeed_zero3 (sharded by DeepSpeed: gradients and optimizer "
        "state, or all; needs a package of its own, docs/ranks.md), auto (as accelerate launch was "
        "configured, else ddp if the model fits on a GPU, else fsdp2).",
    )
    autocast: Autocast = key(
        Autocast.auto,
        "Mixed precision of the trainer: auto, no, bf16 or fp16 (fp16 scales its loss).",
    )
    head_dtype: HeadDtype = key(
        HeadDtype.auto,
        "Number format of the output head, of the reference too: auto computes it like all other products, "
        "float32 computes its logits and their gradients in float32 under mixed precision too. "
        "Log-probabilities then agree better with an engine whose head does the same "
        "(inference_model.head_dtype, docs/step.md).",
    )
    gradient_checkpointing: bool = key(
        False,
        "Recompute activations in the backward pass: slower, less memory.",
    )
    offload_optimizer: bool | None = key(
        None,
        "On a GPU, keep the optimizer's moments in host memory while the engine generates: less GPU memory, "
        "and the moments are moved to the host and back once per round. null does so if an engine that "
        "sleeps would not fit otherwise.",
    )
    shared_prefix: bool = key(
        True,
        "Run the prompt of a group once for all its responses: same numbers, and on a CPU less time.",
    )
    prefix_attention: PrefixAttention = key(
        PrefixAttention.auto,
        "Attention with shared_prefix=true, of the reference too: varlen (flash-attention's kernel for "
        "variable lengths, without masks; it needs a GPU of compute capability 8.0 and 16 bits), dense "
        "(padded, with masks), or auto (varlen where it works, else dense; docs/speed.md).",
    )
    attn_implementation: Attention = key(
        Attention.auto,
        "Attention of the trainer with shared_prefix=false: auto, sdpa, eager or flash_attention_2. If it "
        "is not available, a warning says so and the model's usual one is used.",
        only_with="train_model.shared_prefix=false",
    )
    compile: bool = key(
        False,
        "Compile the trainer's layers with torch.compile: about a minute at the start, then shorter steps. "
        "If that is not possible, a warning says so and the layers run uncompiled.",
    )
    fused_head: bool = key(
        False,
        "Compute the output head with Liger's fused kernel if it is installed and supports the GPU and the "
        "number format (docs/speed.md); false always computes it in blocks. Its speed is not measured yet.",
    )
    vision_tower: bool = key(
        False,
        "Train the parts of the model that encode pictures too; false freezes them.",
        only_with="model.pictures",
    )
    quantization: Quantization = key(
        Quantization.none,
        "Quantization of the frozen model below adapters: none, or nf4 (QLoRA, 4 bits, needs bitsandbytes).",
        only_with="train_model.lora.rank",
    )
    lora: LoraConfig = field(
        default_factory=LoraConfig,
        metadata={
            "help": "Low-rank adapters (LoRA): train a small adapter on each matrix of a frozen model."
        },
    )


@dataclass
class RefModelConfig:
    """The frozen copy for the KL divergence."""

    num_devices: int | str = key(
        "auto",
        "Devices of the reference model, a number or auto. It is loaded only if a KL divergence needs it. "
        "Each device has a copy that scores part of the groups; with grpo-async.py each copy is a process "
        "of its own. With auto, each training rank has a copy if no GPU is left for it, or there is none; 1 "
        "gives one to rank 0. Without a GPU, another number is that of processes of grpo-async.py.",
    )
    devices: list[int] | None = key(None, "Numbers of the GPUs, e.g. [2]; null lets the planner choose.")
    dtype: Dtype = key(
        Dtype.auto,
        "Number format of the reference model: auto, float32, bfloat16 or float16. auto computes as the "
        "policy does, so that equal weights have zero divergence; its matrices are held in the format of "
        "train_model.autocast.",
    )
    refresh_frequency: NonNegativeInt = key(
        0,
        "Optimizer steps between updates of the reference from the policy; 0 never updates it.",
    )
    refresh_mix: PositiveShare = key(
        1.0,
        "Weight of the policy in an updated reference; 1 copies the policy.",
        only_with="ref_model.refresh_frequency",
    )


@dataclass
class TeacherModelConfig:
    """The frozen model that teaches the policy by distillation."""

    name: str | None = key(
        None,
        "Model whose distribution the policy learns: smollm2-135m, a hub name, or a folder, e.g. "
        "RUN/checkpoints/STEP/model. Its tokenizer must have the policy's tokens. Code that comes with it is "
        "not run.",
        only_with="policy.distill_coef",
    )
    hint: str | None = key(
        None,
        "Text at the end of the teacher's prompt that the policy does not see, e.g. 'A right solution is: "
        "{solution}'. {solution} is replaced by the solution of the problem. With the policy's own model as "
        "the teacher, this is self-distillation. null gives the teacher the policy's prompt.",
        only_with="policy.distill_coef",
    )
    num_devices: int | str = key(
        "auto",
        "Devices of the teacher, which takes the place of the reference model: see ref_model.num_devices.",
        only_with="policy.distill_coef",
    )
    devices: list[int] | None = key(
        None,
        "Numbers of the GPUs, e.g. [2]; null lets the planner choose.",
        only_with="policy.distill_coef",
    )
    dtype: Dtype = key(
        Dtype.auto,
        "Number format of the teacher: auto, float32, bfloat16 or float16. auto computes as the policy does.",
        only_with="policy.distill_coef",
    )


@dataclass
class InferenceModelConfig:
    """The engine that generates."""

    backend: str = key(DEFAULT_ENGINE, f"Engine that generates responses: {described()}.", choices=ENGINES)
    servers: Any = key(
        "auto",
        f"Servers of inference_model.backend={_SERVED}: auto starts one on each device, "
        "or on each group of devices that share an engine, and a list of addresses, e.g. "
        "[http://127.0.0.1:8000], names servers that grpo-serve has started (docs/servers.md).",
    )
    server_python: str | None = key(
        None,
        "Python of the environment that has SGLang, which starts its servers; it needs one of its own, e.g. "
        ".venv-sglang/bin/python, which scripts/setup_sglang.sh makes.",
        only_with=f"inference_model.backend={_WITH_OWN_PYTHON}",
    )
    weight_transfer: WeightTransfer = key(
        WeightTransfer.auto,
        "How new weights reach the engines: in_process, shared_memory (servers on this machine), folder "
        "(servers on any machine, through inference_model.weight_folder), cuda_ipc (servers or workers on "
        "Ray, on the trainer's GPU or on one that reads its memory), nccl (the same on other GPUs of any "
        "machine), ray_objects (workers on Ray), or auto (docs/servers.md).",
    )
    weight_folder: str | None = key(
        None,
        "Folder for inference_model.weight_transfer=folder, which the trainer and all servers see under the "
        "same path.",
        only_with="inference_model.weight_transfer=folder",
    )
    num_devices: int | str = key(
        "auto",
        "Devices that generate, a number or auto, with one engine on each, or on each group of "
        "tensor_parallel_size x pipeline_parallel_size. Without a GPU, engines share the cores. "
        "docs/devices.md says which process each engine runs in.",
    )
    tensor_parallel_size: PositiveInt = key(
        1,
        "Devices that share each layer of one engine, for models that do not fit one GPU. Only servers of "
        "vLLM take more than 1. inference_model.num_devices is a multiple of it.",
    )
    pipeline_parallel_size: PositiveInt = key(
        1,
        "Groups of devices that divide the layers of one engine among them. Only servers of vLLM take more "
        "than 1.",
    )
    devices: list[int] | None = key(None, "Numbers of the GPUs, e.g. [1]; null lets the planner choose.")
    dtype: Dtype = key(
        Dtype.auto,
        "Number format of the engine's weights: auto, float32, bfloat16 or float16.",
    )
    head_dtype: HeadDtype = key(
        HeadDtype.auto,
        "Number format of the engine's output head: auto computes it like all other products, float32 "
        "computes logits in float32 from the weights it holds. The counterpart of train_model.head_dtype: "
        "set both (docs/step.md).",
    )
    gpu_memory_utilization: PositiveShare | None = key(
        None,
        "Share of a GPU's memory that vLLM or SGLang takes. null means 0.85 of a GPU of its own. Beside the "
        "trainer it means the share with the shortest predicted round (docs/devices.md), or 0.4 if that is "
        "unknown or ray.address names a cluster.",
    )
    kv_cache_gib: PositiveInt = key(
        1,
        "Memory for the key/value cache of vLLM or SGLang on a CPU, in GiB. At least one sequence of "
        "max_model_len tokens must fit.",
    )
    block_size: PositiveInt | None = key(
        None,
        "Tokens in one block of the cache of vLLM or SGLang; null means the usual one of the machine.",
    )
    enforce_eager: bool | None = key(
        None,
        "Run without compiled graphs: starts minutes earlier, generates slower; null decides by device.",
    )
    sleep: bool | None = key(
        None,
        "Free the engine's GPU memory during training. null frees it if vLLM runs in the process of "
        "grpo.py's trainer and on its GPU (docs/devices.md).",
    )
    max_model_len: Annotated[int, Range(ge=2)] = key(1024, "Longest prompt and response together, in tokens.")
    max_new_tokens: PositiveInt = key(256, "Longest response, in tokens.")
    temperature: PositiveFloat = key(
        1.0,
        "Sampling temperature; the trainer scores at the same one. vLLM takes 0.01 or more.",
    )
    max_logprob_diff: PositiveFloat | None = key(
        None,
        "Mean difference of log-probabilities between engine and trainer, in nats, above which a warning is "
        "given. null derives it from the number format and the first difference. Weights are always "
        "compared bit for bit.",
    )
    engine_args: dict[str, Any] = key(
        {},
        "Further arguments of vLLM or SGLang, by its own names, e.g. {max_num_batched_tokens: 8192}. "
        "Arguments that other keys set are refused. A resumed run may change them, but quantization and "
        "kv_cache_dtype change the distribution that is sampled from.",
    )
    num_threads: PositiveInt | None = key(
        None,
        "CPU threads of each engine, and of each process of the reference model. null divides the cores "
        "among them, and with the trainer if they work at the same time (grpo-async.py).",
    )

    @property
    def engine(self) -> EngineKind:
        """What the engine of ``backend`` can do."""
        return engine_kind(self.backend)
