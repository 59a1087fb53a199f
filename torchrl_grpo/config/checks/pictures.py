"""Checks of a run with pictures: its data, and the features that do not take pictures yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrl_grpo.config.builtin import OF_PICTURES
from torchrl_grpo.config.derived import has_episodes
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.mixture import mixture_parts

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import Config

#: What env.dataset=pictures draws.
PICTURE_KINDS = ("count", "clock", "bars", "dice", "number_line", "fraction")
_SIZES = (32, 2048)


def check_pictures(cfg: Config) -> None:
    """Check the keys of a run with pictures.

    Raises:
        ConfigError: a value is wrong, or a feature does not take pictures.
    """
    if cfg.env.dataset in OF_PICTURES and not cfg.model.pictures:
        wrong = "its questions are about pictures, and model.pictures is false"
        fix = "model.pictures=true beside it, with a model for pictures and text"
        raise bad_value("env.dataset", cfg.env.dataset, wrong, fix)
    if cfg.env.dataset == "pictures":
        _check_tasks(cfg)
    if any(part.cfg.env.dataset in OF_PICTURES for part in mixture_parts(cfg)):
        wrong = "pictures are not mixed with other data sets yet"
        raise bad_value("env.mixture", cfg.env.mixture, wrong, "env.dataset=pictures without a mixture")
    if not cfg.model.pictures:
        if "images" in cfg.env.fields:
            wrong = "it names a column of pictures, and model.pictures is false"
            raise bad_value("env.fields", cfg.env.fields, wrong, "model.pictures=true beside it")
        return
    env, fix = cfg.env, "model.pictures=false, or"
    distill, wrong = cfg.policy.distill_coef, "it does not take pictures yet (model.pictures=true)"
    refused: list[tuple[bool, str, object, str]] = [
        (distill != 0, "policy.distill_coef", distill, "policy.distill_coef=0"),
        (bool(env.mixture), "env.mixture", env.mixture, "env.mixture=[]"),
        (env.environment is not None, "env.environment", env.environment, "env.environment=null"),
        (has_episodes(cfg), "env.tools", env.tools, "env.tools=[]"),
        (
            env.overlong_prompts not in ("error", "drop"),
            "env.overlong_prompts",
            env.overlong_prompts,
            "env.overlong_prompts=drop",
        ),
        (
            cfg.train_model.quantization != "none",
            "train_model.quantization",
            cfg.train_model.quantization,
            "train_model.quantization=none",
        ),
        (cfg.train_model.compile, "train_model.compile", True, "train_model.compile=false"),
        (
            not cfg.inference_model.engine.takes_pictures,
            "inference_model.backend",
            cfg.inference_model.backend,
            "inference_model.backend=vllm",
        ),
    ]
    for is_set, key, value, other in refused:
        if is_set:
            raise bad_value(key, value, wrong, f"{fix} {other}")


def check_ranks(cfg: Config, parallelism: str) -> None:
    """Check how several training ranks hold a model for pictures.

    Args:
        cfg: configuration.
        parallelism: how they hold it: ``ddp``, or a kind of shards.

    Raises:
        ConfigError: some problems may have no pictures, and a rank with such problems alone would not take
            part in what the ranks do together.
    """
    wrong = "with several training ranks, a model for pictures is held whole, and its vision tower frozen"
    if parallelism != "ddp":
        raise bad_value("train_model.parallelism", parallelism, wrong, "train_model.parallelism=ddp")
    if cfg.train_model.vision_tower:
        fix = "train_model.vision_tower=false, or train_model.num_devices=1"
        raise bad_value("train_model.vision_tower", True, wrong, fix)


def _check_tasks(cfg: Config) -> None:
    arguments = cfg.env.task_args
    if other := [name for name in arguments if name not in ("kinds", "size")]:
        wrong = f"{other[0]} is none of kinds, size"
        raise bad_value("env.task_args", arguments, wrong, "env.task_args={kinds:[count,clock],size:96}")
    kinds = arguments.get("kinds", list(PICTURE_KINDS))
    if not isinstance(kinds, list) or not kinds or not set(kinds) <= set(PICTURE_KINDS):
        wrong = f"it must be a list of {', '.join(PICTURE_KINDS)}"
        raise bad_value("env.task_args.kinds", kinds, wrong, "env.task_args={kinds:[count,clock]}")
    size = arguments.get("size", 96)
    if not isinstance(size, int) or not _SIZES[0] <= size <= _SIZES[1]:
        wrong = f"it must be a number of pixels from {_SIZES[0]} to {_SIZES[1]}"
        raise bad_value("env.task_args.size", show(size), wrong, "env.task_args={size:96}")
