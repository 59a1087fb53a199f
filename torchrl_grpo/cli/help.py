"""The text of ``--help``, built from the first lines of the configuration files and the help of the schema.

This module imports neither Hydra nor omegaconf, so that ``--help`` responds at once.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from torchrl_grpo.config.groups import groups
from torchrl_grpo.config.schema import keys
from torchrl_grpo.config.values import TrainMethod

_MOST_USED = (
    "env.dataset",
    "env.task",
    "env.data_path",
    "env.num_envs",
    "env.repeats",
    "model.name",
    "inference_model.backend",
    "inference_model.gpu_memory_utilization",
    "inference_model.max_new_tokens",
    "train_model.num_devices",
    "train_model.devices",
    "train_model.lora.rank",
    "dry_run",
    "policy.kl_coef",
    "optimizer.lr",
    "optimizer.weight_decay",
    "train.total_dialog_turns",
    "train.num_epochs",
    "train.optim_batch_size",
    "train.gradient_accumulation_steps",
    "train.checkpoint_frequency",
    "seed",
    "resume",
    "logging.backends",
)
# Column where the help of a key starts, and width of the text.
_COLUMN, _WIDTH = 33, 110

_TEXT = """\
{title}

usage: {command} [--config-name NAME] [key=value ...]
       {command} --multirun key=value,value [key=value ...]

configurations (--config-name):
{primaries}

groups (swap a whole group of keys, group=option):
{groups}

keys most used (key=value; `--cfg job` shows all with their values):
{keys}
  hydra.run.dir                  Run folder; outputs/YYYY-MM-DD/HH-MM-SS unless it is set.
What each key means stands in {reference}.

options:
  --help, -h                     show this text
  --config-name, -cn NAME        configuration to start from (default: {default})
  --config-dir, -cd DIR          folder with configurations of your own
  --config-path, -cp DIR         folder to use instead of {tree}
  --cfg, -c job|hydra|all        show the configuration and do not run; --package, --resolve
  --multirun, -m                 run every combination of the given values, in folders under multirun/
  --info, -i [WHAT]              show how Hydra composed the configuration
  --version                      show the versions of this package and of those that compute
  --hydra-help                   show Hydra's help
  --shell-completion, -sc        eval "$({command} -sc install=bash)" turns on the tab key

examples:
{examples}
"""

_GRPO_EXAMPLES = (
    "--config-name grpo_quickstart",
    "env.dataset=ifeval",
    "optimizer.lr=2e-5 optimizer.weight_decay=0.01",
    "env=jsonl env.data_path=problems.jsonl env.fields='{question:q,answer:a}'",
    "reward.weights='{gsm8k:1.0,format:0.2}'",
    "--multirun optimizer.lr=1e-4,1e-5 policy.kl_coef=0.01,0.1",
    "resume=auto",
)
_SFT_EXAMPLES = (
    "--config-name sft_quickstart",
    "optimizer.lr=2e-5 optimizer.weight_decay=0.01",
    "env=jsonl env.data_path=problems.jsonl env.fields='{question:q,answer:a}'",
    "--multirun optimizer.lr=1e-4,1e-5",
    "resume=auto",
)
_OF_A_METHOD = {
    TrainMethod.grpo: ("Train a language model with GRPO on TorchRL.", _GRPO_EXAMPLES),
    TrainMethod.sft: ("Train a language model on solutions (supervised fine-tuning).", _SFT_EXAMPLES),
}


def primary_configs(config_dir: Path) -> dict[str, str]:
    """List the primary configurations of a tree.

    A primary configuration is a file with a defaults list.

    Args:
        config_dir: folder of the tree.

    Returns:
        Map from the name of each configuration to the first comment of its file.
    """
    summaries = {}
    for path in sorted(config_dir.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if "\ndefaults:" in f"\n{text}":
            summaries[path.stem] = _summary(text)
    return summaries


def help_text(program: str, config_dir: Path, config_name: str, method: TrainMethod) -> str:
    """Build the text of ``--help``.

    Args:
        program: script or installed command, as it was called.
        config_dir: folder of the configuration tree.
        config_name: primary configuration that is used if the command line names none.
        method: what the command learns from.

    Returns:
        The text.
    """
    primaries = [f"  {name:<30} {summary}" for name, summary in primary_configs(config_dir).items()]
    files = groups(config_dir)
    title, examples = _OF_A_METHOD[method]
    command = f"python {program}" if program.endswith(".py") else Path(program).name
    return _TEXT.format(
        title=title,
        examples="\n".join(f"  {command} {words}" for words in examples),
        command=command,
        tree=_shown(config_dir),
        reference=_shown(config_dir / "base.yaml"),
        primaries="\n".join(primaries),
        groups="\n".join(f"  {group:<30} {', '.join(options)}" for group, options in files.items()),
        keys="\n".join(_key_help(key) for key in _MOST_USED),
        default=config_name,
    )


def _shown(path: Path) -> Path:
    """Return a path relative to the working directory if it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _key_help(key: str) -> str:
    """Return a key and the first sentence of its help, in two columns."""
    sentence = re.split(r"(?<=\.) (?=[A-Za-z])", keys().help[key].replace("e.g. ", "e.g.\0"))[0].replace(
        "\0", " "
    )
    lines = textwrap.wrap(sentence, _WIDTH - _COLUMN)
    start = f"  {key}".ljust(_COLUMN)
    if len(start) > _COLUMN:
        return "\n".join([start, *(" " * _COLUMN + line for line in lines)])
    return start + ("\n" + " " * _COLUMN).join(lines)


def _summary(text: str) -> str:
    first = text.lstrip().splitlines()[0] if text.strip() else ""
    return first.lstrip("# ") if first.startswith("#") else ""
