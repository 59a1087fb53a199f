"""The card of a saved model: base model, data, command, versions, steps, result and license.

It is the ``README.md`` of the folder, with the fields at its top that the Hugging Face hub reads. What is not
known is left out.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config import Config
from torchrl_grpo.config.schema import EnvConfig
from torchrl_grpo.models import smollm2
from torchrl_grpo.models.shape import local_folder
from torchrl_grpo.runtime import hub
from torchrl_grpo.runtime.package_versions import versions
from torchrl_grpo.runtime.paths import expanded

if TYPE_CHECKING:
    from huggingface_hub import CardData

CARD = "README.md"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
# Fields that a base model's card has of its license.
_LICENSE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Training:
    """What a card says of a run.

    Attributes:
        command: command line that started the run, without what may be secret; empty if it is unknown.
        step: optimizer steps taken.
        metrics: metrics of the last evaluation, ``eval/*``, None for what is not finite; empty without one.
        evaluated_at: optimizer steps before that evaluation.
        before: metrics of the evaluation before training; empty without one.
        grader: name of what grades held-out responses.
    """

    command: str
    step: int
    metrics: Mapping[str, float | None]
    evaluated_at: int
    before: Mapping[str, float | None]
    grader: str


@dataclass(frozen=True)
class Base:
    """The model that was trained.

    Attributes:
        name: value of ``model.name``.
        hub_name: name on the hub; None if it has none that is known.
        license: fields of the license, from the model's own card; empty if they are unknown.
    """

    name: str
    hub_name: str | None
    license: Mapping[str, Any]


def read_base(cfg: Config) -> Base:
    """Read name and license of the base model from its own card: in its folder, the cache or the hub."""
    name = cfg.model.name
    if name == smollm2.NAME:
        return Base(name, smollm2.HUB_NAME, {"license": smollm2.LICENSE})
    folder = local_folder(cfg.model)
    is_path = expanded(name).is_dir()
    data = _own_card(name, folder, is_path)
    hub_name = name if not is_path and _HUB_NAME.fullmatch(name) else None
    if data is None:
        return Base(name, hub_name, {})
    if is_path:
        # A folder that was trained before says what it was trained from.
        base = data.get("base_model")
        hub_name = base if isinstance(base, str) and _HUB_NAME.fullmatch(base) else None
    license = {key: value for key in _LICENSE if _is_text(value := data.get(key))}
    if "://" not in license.get("license_link", "://"):
        # A file of the base model's repository, which is not copied.
        link = license.pop("license_link")
        if hub_name is not None:
            license["license_link"] = f"https://huggingface.co/{hub_name}/blob/main/{link}"
    return Base(name, hub_name, license)


def _is_text(value: object) -> bool:
    """Whether a field of a card has what it should have: a text, or several."""
    return bool(value) and all(
        isinstance(each, str) for each in (value if isinstance(value, list) else [value])
    )


def _own_card(name: str, folder: Path | None, is_path: bool) -> CardData | None:
    from huggingface_hub import ModelCard

    source: str | Path = name
    if folder is not None and (folder / CARD).is_file():
        source = folder / CARD
    elif is_path or hub.why_unreachable() is not None:
        return None
    try:
        data: CardData = ModelCard.load(source).data
    # The types depend on the library's HTTP client and its YAML. A model may have no card, or a damaged one.
    except Exception:  # noqa: BLE001
        return None
    return data


def write(folder: Path, cfg: Config, base: Base, training: Training) -> None:
    """Write the card of a model or of adapters into their folder."""
    from huggingface_hub import ModelCard, ModelCardData

    has_adapters = (folder / "adapter_config.json").is_file()
    data = ModelCardData(
        **base.license,
        base_model=base.hub_name,
        library_name="peft" if has_adapters else "transformers",
        pipeline_tag="text-generation",
        tags=["torchrl-grpo", cfg.train.method.value, *(["lora"] if has_adapters else [])],
        datasets=None if (hub_name := _hub_name(cfg.env)) is None else [hub_name],
    )
    text = f"---\n{data}\n---\n\n{_body(cfg, base, training, has_adapters)}"
    ModelCard(text).save(folder / CARD)


def _body(cfg: Config, base: Base, training: Training, has_adapters: bool) -> str:
    how = "supervised fine-tuning" if cfg.train.method == "sft" else "GRPO"
    what = "LoRA adapters for" if has_adapters else "A descendant of"
    parts = [
        f"# {_short(base).rpartition('/')[2]}, trained on {_data(cfg)}",
        f"{what} {_code(_short(base))}, trained with {how} by torchrl-grpo for "
        f"{training.step} optimizer steps.",
        _result(training),
        "## Training",
        _training(cfg, base, training),
        "## Use",
        _use(cfg, has_adapters, base),
        "## License",
        _license(base),
    ]
    return "\n\n".join(parts) + "\n"


def _short(base: Base) -> str:
    """Return the name on the hub, or else the last part of a path, which tells nothing of the machine."""
    return base.hub_name or Path(base.name).name


def _hub_name(env: EnvConfig) -> str | None:
    """Return the name of the data on the hub; None without one. A path would tell of this machine."""
    name = env.hub_name
    if name is None or env.data_path is not None or expanded(name).is_dir():
        return None
    return name if _HUB_NAME.fullmatch(name) else None


def _data(cfg: Config) -> str:
    env = cfg.env
    if env.mixture:
        return "a mixture of data sets"
    source = _hub_name(env) or Path(env.data_path or env.hub_name or "").name
    name = f"{env.dataset} ({env.task})" if env.dataset == "reasoning_gym" else Path(env.dataset).name
    return f"{name} ({source})" if source else name


def _result(training: Training) -> str:
    metrics = training.metrics
    if not metrics:
        return "## Result\n\nNo held-out problems were evaluated."
    lines = [f"## Result\n\nOn held-out problems, after {training.evaluated_at} optimizer steps:\n"]
    lines += ["| metric | before | after | 95 % interval |", "| --- | --- | --- | --- |"]
    graded = {"accuracy": f"accuracy by {training.grader}", "primary": f"mean of {training.grader}"}
    for name, value in metrics.items():
        # A number that is not finite, such as the perplexity of a large loss, is null in the run's metrics.
        if value is None or name.endswith(("_low", "_high")):
            continue
        low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
        interval = "" if low is None or high is None else f"{low:.3f} to {high:.3f}"
        before, short = training.before.get(name), name.removeprefix("eval/")
        shown = "" if before is None else _number(before)
        lines.append(f"| {graded.get(short, short)} | {shown} | {_number(value)} | {interval} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _training(cfg: Config, base: Base, training: Training) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        f"- base model: {_code(_short(base))}",
        f"- data: {_code(_data(cfg))}",
        f"- optimizer steps: {training.step}",
        f"- seed: {cfg.seed}",
        f"- versions: {packages}",
    ]
    if training.command:
        lines += ["\nCommand:\n", textwrap.indent(training.command, "    ")]
    return "\n".join(lines)


def _use(cfg: Config, has_adapters: bool, base: Base) -> str:
    # Without it, vLLM rounds float32 weights to 16 bits, and with them what a short run has changed.
    engine_dtype = str(cfg.inference_model.dtype)
    dtype = "" if engine_dtype == "auto" else f" --dtype {engine_dtype}"
    if has_adapters:
        loading = "from peft import AutoPeftModelForCausalLM as Model"
        serving = f"vllm serve {_short(base)} --enable-lora --lora-modules trained=FOLDER{dtype}"
    else:
        loading = "from transformers import AutoModelForCausalLM as Model"
        serving = f"vllm serve FOLDER{dtype}"
    lines = [
        "from transformers import AutoTokenizer",
        loading,
        "",
        'model, tokenizer = Model.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")',
    ]
    blocks = "\n".join(["```python", *lines, "```", "", "```", serving, "```"])
    return f"FOLDER is this folder, or its name on the hub.\n\n{blocks}"


def _license(base: Base) -> str:
    if not base.license:
        return f"The license of the base model {_code(_short(base))} applies; its card was not at hand."
    name = next(base.license[field] for field in ("license_name", *_LICENSE) if field in base.license)
    names = name if isinstance(name, str) else ", ".join(name)
    return f"That of the base model, by its own card: {names}."


def _code(text: str) -> str:
    return f"`{text.replace('`', '')}`"
