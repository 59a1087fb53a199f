"""The text of ``--help``, built from the configuration tree's own first lines.

It imports nothing but the standard library, so that it answers at once.
"""

from __future__ import annotations

from pathlib import Path

_TEXT = """\
Train a language model with GRPO on TorchRL.

usage: {command} [--config-name NAME] [key=value ...]
       {command} --multirun key=value,value [key=value ...]

configurations (--config-name):
{primaries}

groups (swap a whole group of keys, group=option):
{groups}

keys most used (key=value; `--cfg job` shows all with their values, config/base.yaml what each means):
  env.dataset                    gsm8k, math, ifeval, reasoning_gym or jsonl
  env.task                       the reasoning_gym task, e.g. gsm_symbolic
  env.data_path                  read problems from here, without network
  env.num_envs                   prompts in one collection round
  env.repeats                    responses to each prompt, the group; at least 2
  model.name                     smollm2-135m, a hub name or a folder
  inference_model.backend        vllm or transformers
  inference_model.gpu_memory_utilization
                                 share of a GPU's memory that vllm takes
  inference_model.max_new_tokens longest response
  train_model.num_devices        devices that train: auto or a number;
                                 also ref_model. and inference_model., and .devices=[0]
  train_model.lora.rank          rank of adapters on a frozen model; 0 trains it whole
  dry_run                        true shows the plan of devices and memory, and does not run
  policy.kl_coef                 weight of the KL divergence to the reference model
  optimizer.lr                   learning rate
  optimizer.weight_decay         weight decay
  train.total_dialog_turns       samples over the whole run; null with train.num_epochs=2, which
                                 goes through the training problems that often
  train.optim_batch_size         samples in one optimizer step
  train.gradient_accumulation_steps
                                 micro-batches an optimizer step is cut into
  train.checkpoint_frequency     optimizer steps between checkpoints
  seed                           of data order, sampling and engine
  resume                         auto, or the path of a run: continue it
  logging.backends               any of [csv,tensorboard,wandb]
  hydra.run.dir                  the run folder; outputs/YYYY-MM-DD/HH-MM-SS by itself

options:
  --help, -h                     this text
  --config-name, -cn NAME        the configuration to start from ({default} by itself)
  --config-dir, -cd DIR          a folder with configurations of your own
  --config-path, -cp DIR         use this folder, and not the project's config/
  --cfg, -c job|hydra|all        show the configuration and do not run; --package, --resolve
  --multirun, -m                 run every combination of the values given, below multirun/
  --info, -i [WHAT]              how Hydra put the configuration together
  --hydra-help, --version        Hydra's own help and version
  --shell-completion, -sc        eval "$({command} -sc install=bash)" turns on the tab key

examples:
  {command} --config-name grpo_quickstart
  {command} env.dataset=ifeval
  {command} optimizer.lr=2e-5 optimizer.weight_decay=0.01
  {command} env=jsonl env.data_path=problems.jsonl env.fields='{{question:q,answer:a}}'
  {command} reward.weights='{{gsm8k:1.0,format:0.2}}'
  {command} --multirun optimizer.lr=1e-4,1e-5 policy.kl_coef=0.01,0.1
  {command} resume=auto
"""


def primary_configs(config_dir: Path) -> dict[str, str]:
    """List the primary configurations of a tree.

    Args:
        config_dir: the folder of the tree.

    Returns:
        Name to the first comment of the file; a primary configuration has a defaults list.
    """
    found = {}
    for path in sorted(config_dir.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if "\ndefaults:" in f"\n{text}":
            found[path.stem] = _summary(text)
    return found


def help_text(program: str, config_dir: Path, config_name: str) -> str:
    """Build the text of ``--help``.

    Args:
        program: the script or installed command as it was called.
        config_dir: the folder of the configuration tree.
        config_name: the primary configuration taken when none is named.

    Returns:
        The text.
    """
    primaries = [f"  {name:<30} {summary}" for name, summary in primary_configs(config_dir).items()]
    groups = []
    # What `accelerate launch` reads stands beside the groups and is none.
    folders = sorted(path for path in config_dir.iterdir() if path.is_dir() and path.name != "accelerate")
    for folder in folders:
        options = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        if options:
            groups.append(f"  {folder.name:<30} {options}")
    command = f"python {program}" if program.endswith(".py") else Path(program).name
    return _TEXT.format(
        command=command, primaries="\n".join(primaries), groups="\n".join(groups), default=config_name
    )


def _summary(text: str) -> str:
    first = text.lstrip().splitlines()[0] if text.strip() else ""
    return first.lstrip("# ") if first.startswith("#") else ""
