"""What accelerate was configured for is taken over, refused, or named as not used: every field."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands import launch as accelerate_launch
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Autocast, OptimizerName, Parallelism
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.planning import launcher, resolve

# Fields that the launcher itself uses, and fields of other accelerators and of its own debugging.
LAUNCHERS_OWN = {"ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"}
# Where and how a model is read from its files: the project loads it on each rank.
LOADING = {"FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_SYNC_MODULE_STATES"}
# Details of a backend that is named as not used already.
OF_DYNAMO = {
    f"ACCELERATE_DYNAMO_{name}"
    for name in ("MODE", "USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION")
}
FSDP = {"distributed_type": "FSDP"}
DEEPSPEED = {"distributed_type": "DEEPSPEED"}


def exported(fields: dict[str, Any], folder: Path) -> dict[str, str]:
    """The variables that ``accelerate launch`` exports for a file with these fields."""
    file = folder / "accelerate.yaml"
    usual = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 2, "machine_rank": 0}
    file.write_text(
        yaml.safe_dump({"distributed_type": "MULTI_GPU", "mixed_precision": "no", **usual, **fields})
    )
    parser = accelerate_launch.launch_command_parser()
    arguments = parser.parse_args(["--config_file", str(file), "script.py"])
    arguments, _, _ = accelerate_launch._validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""  # as launch_command() sets it
        _, variables = prepare_deepspeed_cmd_env(arguments)
    else:
        variables = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in variables.items() if os.environ.get(name) != value}


def tell(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], folder: Path) -> None:
    for name, value in exported(fields, folder).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", ["single_gpu", "multi_gpu", "fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_the_files_of_the_project_need_no_note(
    repo_root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = yaml.safe_load((repo_root / f"config/accelerate/{name}.yaml").read_text())
    tell(monkeypatch, fields, tmp_path)
    assert launcher.notes() == []
    assert launcher.with_settings(Config()) == Config()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (FSDP | {"fsdp_config": {"fsdp_version": 1}}, "fsdp_version=1: not used, the model is held by FSDP2"),
        (FSDP | {"fsdp_config": {"fsdp_offload_params": True}}, "fsdp_offload_params=true: .* stay on their"),
        (
            FSDP | {"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
            "fsdp_sharding_strategy=SHARD_GRAD_OP: .*train_model.parallelism=ddp",
        ),
        (
            FSDP | {"fsdp_config": {"fsdp_reshard_after_forward": False}},
            "fsdp_reshard_after_forward=false: not used",
        ),
        (
            FSDP
            | {
                "fsdp_config": {
                    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
                }
            },
            "fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP, "
            "fsdp_transformer_layer_cls_to_wrap=LlamaDecoderLayer: .* each decoder layer",
        ),
        (FSDP | {"fsdp_config": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"}}, "holds the whole model"),
        (
            DEEPSPEED | {"deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}},
            "offload_optimizer_device=cpu: not used, .*train_model.offload_optimizer",
        ),
        (
            DEEPSPEED | {"deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 4}},
            "gradient_accumulation_steps=4: not used, train.optim_batch_size is the batch",
        ),
        (
            DEEPSPEED | {"deepspeed_config": {"zero_stage": 2, "gradient_clipping": 1.0}},
            "gradient_clipping=1.0: not used, write optimizer.max_grad_norm=VALUE",
        ),
        (
            DEEPSPEED | {"deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True}},
            "zero3_init_flag=true",
        ),
        (
            {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
            "dynamo_backend=INDUCTOR: .*train_model.compile=true",
        ),
    ],
)
def test_a_field_that_is_not_used_is_named_in_one_line(
    fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (
        {**fields, "fsdp_config": {"fsdp_version": 2, **fields["fsdp_config"]}}
        if "fsdp_config" in fields
        else fields
    )
    tell(monkeypatch, whole, tmp_path)
    (line,) = launcher.notes()
    assert line.startswith("warning: accelerate launch: ") and "\n" not in line
    assert re.search(message, line), line


def test_every_field_is_used_refused_or_named(tmp_path: Path) -> None:
    known = {name for unused in launcher._UNUSED for name in unused.variables.values()}
    known |= {*launcher._REFUSED.values(), "FSDP_ACTIVATION_CHECKPOINTING", "ACCELERATE_DEEPSPEED_ZERO_STAGE"}
    sharded = FSDP | {"fsdp_config": {"fsdp_version": 1, "fsdp_auto_wrap_policy": "NO_WRAP"}}
    for fields in (sharded, DEEPSPEED | {"deepspeed_config": {"zero_stage": 3}}):
        own = {
            name
            for name in exported(fields, tmp_path)
            if name.startswith(("FSDP_", "ACCELERATE_DEEPSPEED", "ACCELERATE_DYNAMO", "ACCELERATE_GRAD"))
        }
        assert own - OF_DYNAMO
        assert not own - known - LAUNCHERS_OWN - LOADING - OF_DYNAMO


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_number_format_is_taken_over(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, {"mixed_precision": dtype}, tmp_path)
    assert resolve.resolved(Config()).train_model.autocast == dtype
    cfg = Config()
    cfg.train_model.autocast = Autocast("no")
    with pytest.raises(ConfigError, match=f"train_model.autocast=no: .*mixed_precision {dtype}; write"):
        resolve.resolved(cfg)
    # Shards cannot scale a loss, wherever the number format comes from.
    if dtype == "fp16":
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(ConfigError, match=r"write train_model\.autocast=bf16"):
            resolve.resolved(Config())


def test_activation_checkpointing_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = FSDP | {"fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}
    tell(monkeypatch, fields, tmp_path)
    assert resolve.resolved(Config()).train_model.gradient_checkpointing
    assert launcher.notes() == []


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PARALLELISM_CONFIG_TP_SIZE", "2", "parallelism_config_tp_size=2"),
        ("PARALLELISM_CONFIG_CP_SIZE", "4", "parallelism_config_cp_size=4"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "use_megatron_lm=true"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed_precision=fp8: .* write mixed_precision: bf16"),
    ],
)
def test_what_no_run_does_is_refused(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=message):
        resolve.resolved(Config())


def test_a_file_for_deepspeed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "zero.json")
    with pytest.raises(ConfigError, match=r"deepspeed_config_file zero\.json is not read"):
        resolve.resolved(Config())


@pytest.mark.parametrize(
    ("name", "kind", "fix"),
    [
        ("adamw_8bit", "fsdp2", "optimizer.name=adamw, or train_model.parallelism=ddp"),
        ("adamw_8bit", "deepspeed_zero2", "optimizer.name=adamw, or train_model.parallelism=ddp"),
        ("muon", "deepspeed_zero3", "optimizer.name=adamw, or train_model.parallelism=fsdp2"),
        ("muon", "fsdp2", None),
        ("muon", "ddp", None),
        ("adamw_8bit", "ddp", None),
    ],
)
def test_an_optimizer_that_cannot_update_shards_is_refused(name: str, kind: str, fix: str | None) -> None:
    cfg = Config()
    cfg.optimizer.name, cfg.train_model.parallelism = OptimizerName(name), Parallelism(kind)
    if fix is None:
        assert resolve.parallelism(cfg) == kind
        return
    with pytest.raises(ConfigError, match=f"optimizer.name={name}: .* held with {kind}; write {fix}"):
        resolve.parallelism(cfg)
