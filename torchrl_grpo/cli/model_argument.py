"""The models that ``grpo-eval`` and ``grpo-chat`` take: runs, checkpoints, folders, adapters, hub names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.checkpoints.run_dir import MANIFEST, complete_checkpoints, holds_run
from torchrl_grpo.cli.arguments import Parser
from torchrl_grpo.config import Config, parse
from torchrl_grpo.config.foreign_code import keys_with_code
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.resume import EARLIER_NAMES
from torchrl_grpo.errors import CheckpointError, ConfigError, ModelError, first_line
from torchrl_grpo.models import on_hub
from torchrl_grpo.runtime import hub
from torchrl_grpo.runtime.files.run_records import DAMAGED, is_step, read_yaml
from torchrl_grpo.runtime.paths import expanded

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import ModelConfig

_ADAPTERS = "adapter_config.json"


@dataclass(frozen=True)
class ModelArgument:
    """A model that the user named.

    Attributes:
        text: what the user wrote.
        checkpoint: the checkpoint that it is of; None for any other folder, and for a hub name.
    """

    text: str
    checkpoint: Path | None

    @property
    def folder(self) -> str:
        """Folder or hub name with the whole model, or with adapters."""
        if self.checkpoint is None:
            return self.text
        merged = self.checkpoint / "merged"
        return str(merged if merged.is_dir() else self.checkpoint / "model")


def parser(prog: str, description: str, epilog: str | None = None) -> Parser:
    """Return the parser of a command that takes a model; its own options are added to it."""
    parser = Parser(prog, description, epilog)
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="run, folder or hub name")
    return parser


def read(text: str) -> ModelArgument:
    """Find the checkpoint that an argument names, if it names one.

    Raises:
        CheckpointError: it is a run without a complete checkpoint.
    """
    path = expanded(text)
    for folder in (path, path.parent):
        if is_step(folder.resolve().name) and (folder / MANIFEST).is_file():
            return ModelArgument(text, folder)
    run = path.parent if path.name == "checkpoints" else path
    if complete := complete_checkpoints(run):
        return ModelArgument(text, complete[-1])
    if path.is_dir() and holds_run(run):
        raise CheckpointError(
            f"{text}: this run has no complete checkpoint; write the name of a model instead"
        )
    return ModelArgument(text, None)


def config_of(checkpoint: Path) -> Config:
    """Return the configuration that a checkpoint was written with.

    Raises:
        CheckpointError: it cannot be read.
    """
    from omegaconf import DictConfig, OmegaConf

    path = checkpoint / "config.yaml"
    try:
        values = read_yaml(path)
        # A run writes resolved values. What is still to be resolved, such as ${oc.env:NAME}, could copy
        # secrets of this process into the results.
        if not isinstance(values, dict) or "${" in json.dumps(values):
            raise ValueError("it is no resolved configuration")
    except (OSError, TypeError, *DAMAGED) as error:
        raise CheckpointError(
            f"{path} cannot be read ({first_line(error)}); write the folder of another checkpoint or the "
            "name of a model instead"
        ) from error
    node = OmegaConf.create(values)
    for earlier, name in EARLIER_NAMES.items():
        section, _, key = earlier.rpartition(".")
        if isinstance(node.get(section), DictConfig) and key in node[section]:
            OmegaConf.update(node, name, node[section].pop(key))
    # What allocation_mode stood for is in the other keys.
    node.update({"resume": None, "dry_run": False, "allocation_mode": None})
    return parse(node)


def check_trusted(model: ModelArgument, cfg: Config, written: Mapping[str, Any]) -> None:
    """Check that the configuration of a run names no code, but where the user has written other values.

    Args:
        model: the run.
        cfg: its configuration.
        written: values of the command line, by key.

    Raises:
        ConfigError: it names code. A run folder may be of another user.
    """
    codes = {}
    for key, value in keys_with_code(cfg).items():
        if isinstance(value, dict):
            # Writing one entry of a mapping keeps its other entries.
            names = {f"{key}.{name}" for name in written.get(key) or {}} | written.keys()
            value = {name: entry for name, entry in value.items() if f"{key}.{name}" not in names}
            if value:
                codes[key] = value
        elif key not in written:
            codes[key] = value
    if codes:
        settings = ", ".join(f"{key}={show(value)}" for key, value in codes.items())
        raise ConfigError(
            f"{model.text}: the configuration of this run names code that would run here: {settings}; look "
            "at it, and write --trust-run too if you trust it"
        )


def with_model(cfg: Config, model: ModelArgument, merged: Path, trusted: bool) -> Config:
    """Return a configuration for the model that the user named.

    For a checkpoint, its ``model.name`` is the model that the run began with: the caller loads the weights of
    ``model.checkpoint``.

    Args:
        cfg: configuration of the task.
        model: the model.
        merged: new folder for a model that adapters are merged into.
        trusted: whether code that comes with a run's model may run because the run's configuration says so.

    Raises:
        ConfigError: code that comes with the model would run, and is not trusted.
        ModelError: the adapters cannot be loaded.
    """
    if model.checkpoint is not None:
        own = config_of(model.checkpoint)
        if own.model.trust_remote_code and not (trusted or cfg.model.trust_remote_code):
            raise bad_value(
                "model.trust_remote_code",
                True,
                f"the configuration of the run {model.text} says so, and code that comes with its model "
                "would run here",
                "model.trust_remote_code=true on the command line if you trust it",
            )
        of_model = replace(own.model, cache_dir=cfg.model.cache_dir or own.model.cache_dir)
        lora, quantization = own.train_model.lora, own.train_model.quantization
        train_model = replace(cfg.train_model, lora=lora, quantization=quantization)
        return replace(cfg, model=of_model, train_model=train_model)
    name = model.text
    if has_adapters(name, cfg.model):
        merge(name, merged, cfg.model.trust_remote_code)
        name = str(merged)
    usual = Config().train_model
    train_model = replace(cfg.train_model, lora=usual.lora, quantization=usual.quantization)
    return replace(cfg, model=replace(cfg.model, name=name), train_model=train_model)


def has_adapters(name: str, cfg: ModelConfig) -> bool:
    """Whether a folder or a hub name holds adapters, and no whole model.

    Raises:
        ModelError: it is no name on the hub, or the hub does not have it for this user.
    """
    from huggingface_hub import try_to_load_from_cache

    path = expanded(name)
    if path.is_dir():
        return (path / _ADAPTERS).is_file()
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        return False
    on_hub.check_name(name)
    if isinstance(try_to_load_from_cache(name, _ADAPTERS, cache_dir=cfg.cache_dir), str):
        return True
    return hub.why_unreachable() is None and on_hub.has_file(name, _ADAPTERS)


def merge(name: str, folder: Path, trust_remote_code: bool) -> None:
    """Write the model that adapters and their base model are together, in float32.

    Raises:
        ModelError: they cannot be loaded.
    """
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    try:
        adapted = AutoPeftModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"{name}: these adapters cannot be loaded ({first_line(error)}); write the name of a whole model"
        ) from error
    adapted.merge_and_unload().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
