"""What ``accelerate launch`` was configured for, as it exports it: what is taken over, refused and not used.

Number of processes, machines, addresses, GPUs and threads are the launcher's own. Of the rest, this module
takes over the parallelism, ``mixed_precision`` and ``fsdp_activation_checkpointing``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from torchrl_grpo.config import Config
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.config.values import ZERO_STAGES, Autocast, Parallelism
from torchrl_grpo.errors import ConfigError

# What accelerate exports for a field that is not set.
_UNSET = ("", "none", "no", "false", "1")
_FSDP, _DEEPSPEED = "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"


@dataclass(frozen=True)
class _Unused:
    """Fields of accelerate's file that are not read.

    Attributes:
        variables: name of each field -> its environment variable.
        usual: values that need no note, in small letters.
        instead: why not, or what to write instead.
        only_with: variable that must be true, or no field is meant; empty for none.
    """

    variables: dict[str, str]
    usual: tuple[str, ...]
    instead: str
    only_with: str = ""


def _fsdp(*fields: str) -> dict[str, str]:
    names = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
    return {field: names.get(field, field.upper()) for field in fields}


def _deepspeed(*fields: str) -> dict[str, str]:
    names = {"zero3_init_flag": "ZERO3_INIT", "deepspeed_moe_layer_cls_names": "MOE_LAYER_CLS_NAMES"}
    names["deepspeed_config_file"] = "CONFIG_FILE"
    return {field: f"ACCELERATE_DEEPSPEED_{names.get(field, field.upper())}" for field in fields}


_NO_OFFLOAD = "weights stay on their devices; train_model.offload_optimizer moves the optimizer's moments"
_UNUSED = (
    _Unused(_fsdp("fsdp_version"), ("2",), "the model is held by FSDP2", _FSDP),
    _Unused(_fsdp("fsdp_offload_params"), _UNSET, _NO_OFFLOAD, _FSDP),
    _Unused(_deepspeed("offload_optimizer_device", "offload_param_device"), _UNSET, _NO_OFFLOAD, _DEEPSPEED),
    _Unused(
        _fsdp("fsdp_sharding_strategy", "fsdp_reshard_after_forward"),
        ("full_shard", "1", "true"),
        "everything is sharded over all ranks, and a layer is gathered while it is used; "
        "train_model.parallelism=ddp shards nothing",
        _FSDP,
    ),
    _Unused(
        _fsdp(
            "fsdp_auto_wrap_policy",
            "fsdp_transformer_layer_cls_to_wrap",
            "fsdp_min_num_params",
            "fsdp_backward_prefetch",
            "fsdp_forward_prefetch",
            "fsdp_ignored_modules",
            "fsdp_activation_checkpointing_offload",
        ),
        (*_UNSET, "no_wrap", "100000000"),
        "each decoder layer is a unit, and the next one is prefetched",
        _FSDP,
    ),
    _Unused(_fsdp("fsdp_use_orig_params"), ("true",), "FSDP2 always keeps the parameters", _FSDP),
    _Unused(_fsdp("fsdp_state_dict_type"), (), "a checkpoint holds the whole model", _FSDP),
    _Unused(
        _deepspeed(
            "zero3_init_flag",
            "zero3_save_16bit_model",
            "deepspeed_moe_layer_cls_names",
            "deepspeed_config_file",
        ),
        _UNSET,
        "the project loads and saves the model, and makes DeepSpeed's settings from its own keys",
        _DEEPSPEED,
    ),
    _Unused(
        {"gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"},
        (*_UNSET, "auto"),
        "train.optim_batch_size is the batch, and train.gradient_accumulation_steps divides it",
    ),
    _Unused(
        {"gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING"},
        ("", "none", "auto"),
        "write optimizer.max_grad_norm=VALUE",
    ),
    _Unused(
        {"use_cpu": "ACCELERATE_USE_CPU"},
        _UNSET,
        "GPUs train if the machine has any; the environment variable CUDA_VISIBLE_DEVICES= hides them",
    ),
    _Unused(
        {"dynamo_backend": "ACCELERATE_DYNAMO_BACKEND"}, _UNSET, "write train_model.compile=true to compile"
    ),
    _Unused(
        {
            f"parallelism_config_dp_{kind}_size": f"PARALLELISM_CONFIG_DP_{kind.upper()}_SIZE"
            for kind in ("replicate", "shard")
        },
        _UNSET,
        "train_model.parallelism says how all ranks together hold the model",
        "ACCELERATE_USE_PARALLELISM_CONFIG",
    ),
)
# Field of accelerate's file whose value changes what the ranks are for -> its variable. Each is refused.
_REFUSED = {
    "parallelism_config_tp_size": "PARALLELISM_CONFIG_TP_SIZE",
    "parallelism_config_cp_size": "PARALLELISM_CONFIG_CP_SIZE",
    "parallelism_config_sp_size": "PARALLELISM_CONFIG_SP_SIZE",
    "use_megatron_lm": "ACCELERATE_USE_MEGATRON_LM",
}


def notes() -> list[str]:
    """Return one line for each thing that the launcher was configured for and that is not used."""
    lines = []
    for unused in _UNUSED:
        if unused.only_with and not _is_set(unused.only_with):
            continue
        values = {field: os.environ.get(variable, "") for field, variable in unused.variables.items()}
        settings = [
            f"{field}={value}"
            for field, value in values.items()
            if value and value.lower() not in unused.usual
        ]
        if settings:
            lines.append(f"warning: accelerate launch: {', '.join(settings)}: not used, {unused.instead}")
    return lines


def with_settings(cfg: Config) -> Config:
    """Return the configuration with the launcher's number format and activation checkpointing.

    Raises:
        ConfigError: the launcher was configured for something that no run does, or contradicts a key.
    """
    for field, variable in _REFUSED.items():
        if (value := os.environ.get(variable, "")).lower() not in _UNSET:
            raise ConfigError(
                f"accelerate launch: {field}={value}: training ranks divide the groups, and not a layer or a "
                "response; remove it from the launcher's file, and write train_model.parallelism=fsdp2 for "
                "a model that does not fit one GPU"
            )
    train = cfg.train_model
    launcher_precision, autocast = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower(), train.autocast
    if launcher_precision == "fp8":
        raise ConfigError(
            "accelerate launch: mixed_precision=fp8: no run trains in 8 bits; write mixed_precision: bf16 "
            "for the launcher"
        )
    # The launcher's default is "no", which says nothing.
    if launcher_precision in ("bf16", "fp16"):
        if autocast not in ("auto", launcher_precision):
            raise bad_value(
                "train_model.autocast",
                autocast,
                f"the launcher was configured for mixed_precision {launcher_precision}",
                "train_model.autocast=auto, or mixed_precision: 'no' for the launcher",
            )
        train = replace(train, autocast=Autocast(launcher_precision))
    if _is_set(_FSDP) and _is_set("FSDP_ACTIVATION_CHECKPOINTING"):
        train = replace(train, gradient_checkpointing=True)
    return cfg if train == cfg.train_model else replace(cfg, train_model=train)


def parallelism(configured: Parallelism) -> Parallelism:
    """Return the configuration of ``accelerate launch`` as a value of ``train_model.parallelism``.

    Raises:
        ConfigError: the launcher was configured for an unsupported stage of ZeRO.
    """
    if _is_set(_DEEPSPEED):
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "none")
        for kind, number in ZERO_STAGES.items():
            if stage == str(number):
                return Parallelism(kind)
        file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        wrong = f"the launcher was configured for DeepSpeed with zero_stage {stage}, and only 2 and 3 are run"
        if file is not None:
            wrong = f"the launcher's deepspeed_config_file {file} is not read"
        raise bad_value(
            "train_model.parallelism",
            configured,
            wrong,
            "--config_file config/accelerate/deepspeed_zero2.yaml for the launcher",
        )
    return Parallelism.fsdp2 if _is_set(_FSDP) else Parallelism.ddp


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"
