"""The arguments of rewards that a model gives: a judge behind an endpoint, and a reward model.

``reward.functions`` names them ``judge`` and ``hf:MODEL``, and ``reward.args`` has their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from torchrl_grpo.config.keys import bad_value, key, typed
from torchrl_grpo.config.values import NonNegativeInt, PositiveFloat, PositiveInt
from torchrl_grpo.errors import ConfigError

if TYPE_CHECKING:
    from torchrl_grpo.config.schema import Config

#: Specification of a judge in ``reward.functions``, and the beginning of that of a reward model.
JUDGE, REWARD_MODEL = "judge", "hf:"
#: Value of ``cache`` for a folder in that of the run.
CACHE_OF_RUN = "run"
# Arguments that say where and how the model is asked, and not what, so that a resumed run may change them.
_FREE = (
    *("url", "key_variable", "concurrency", "timeout_s", "retries", "backoff_s", "cache"),
    *("device", "batch_size", "engine_args"),
)
# What the project itself writes into a request.
_OWN_FIELDS = ("messages", "model", "stream", "n")
#: Name of the judge's explanation in its answer, which no criterion can have.
REASON = "reason"


class JudgeMode(StrEnum):
    """How a judge is asked."""

    absolute = "absolute"
    ranking = "ranking"


class ScoreDtype(StrEnum):
    """Number format of a reward model."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class JudgeConfig:
    """Arguments of ``reward.functions={NAME: judge}``."""

    url: str = key("", "Address of an OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000/v1.")
    model: str = key("", "Name of the judge as the endpoint knows it, or with device on the hub or a folder.")
    device: str | None = key(
        None,
        "cpu, or cuda:N for a GPU, which no role gets then: the run starts a vLLM server with the model "
        "there, in place of url.",
    )
    engine_args: dict[str, Any] = key({}, "Options of that server, e.g. {max_model_len: 8192}.")
    rubric: str = key("", "What a good response is. Either this or criteria is needed.")
    criteria: dict[str, str] = key(
        {},
        "Several questions by name, each scored by itself, e.g. {clear: Is it easy to read?, short: Is it "
        "short?}. The reward is their mean.",
    )
    mode: JudgeMode = key(
        JudgeMode.absolute,
        "absolute scores each response in a request of its own; ranking orders the responses of a group in "
        "one request, and the reward is the share of the others that a response beats.",
    )
    scale: list[float] = key(
        [1.0, 10.0], "Worst and best score; the reward is 0 at the one and 1 at the other."
    )
    reference: str | None = key(None, "Column of the data set with a reference answer that the judge sees.")
    key_variable: str | None = key(
        None,
        "Environment variable with the endpoint's key; null sends none. The key itself is never written.",
    )
    concurrency: PositiveInt = key(
        256, "Largest number of requests at a time; fewer for an endpoint that limits its rate."
    )
    timeout_s: PositiveFloat = key(60.0, "Seconds that one request may take.")
    retries: NonNegativeInt = key(
        3,
        "Further attempts after a request that failed, unless the endpoint says that it never will succeed.",
    )
    backoff_s: PositiveFloat = key(
        1.0, "Seconds before the second attempt, doubled before each further one, at most 30, with jitter."
    )
    request: dict[str, Any] = key(
        {},
        "Further fields of a request, which take the place of temperature: 0 and max_tokens: 1024; null "
        "removes a field.",
    )
    cache: str | None = key(
        CACHE_OF_RUN,
        "Folder of the verdicts that are asked for once only; run is the folder judge of the run, null keeps "
        "none, so that each response is judged by itself.",
    )


@dataclass
class RewardModelConfig:
    """Arguments of ``reward.functions={NAME: hf:MODEL}``."""

    device: str = key("cpu", "Where the model computes: cpu, or cuda:N for a GPU, which no role gets then.")
    batch_size: PositiveInt = key(8, "Responses in one forward pass.")
    dtype: ScoreDtype = key(ScoreDtype.float32, "Number format of the model.")
    max_tokens: PositiveInt | None = key(
        None,
        "Longest conversation in tokens; a longer one is an error and not cut. null means what the model can "
        "read.",
    )
    timeout_s: PositiveFloat = key(300.0, "Seconds that the scores of one group may take.")


def is_model(spec: str) -> bool:
    """Whether a value of ``reward.functions`` is a judge or a reward model, and no code of the user."""
    return spec == JUDGE or spec.startswith(REWARD_MODEL)


def is_ranking(cfg: Config, name: str) -> bool:
    """Whether a reward compares the responses of a group, so that it says nothing about one alone."""
    return cfg.reward.functions.get(name) == JUDGE and judge_config(cfg, name).mode == JudgeMode.ranking


def is_free_argument(cfg: Config, key: str) -> bool:
    """Whether a key is an argument of a judge or a reward model that a resumed run may change."""
    section, _, argument = key.rpartition(".")
    name = section.removeprefix("reward.args.")
    return argument in _FREE and name != section and is_model(cfg.reward.functions.get(name, ""))


def judge_config(cfg: Config, name: str) -> JudgeConfig:
    """Return the arguments of a judge.

    Args:
        cfg: configuration.
        name: name of the reward.

    Raises:
        ConfigError: one is missing, unknown or wrong.
    """
    prefix = f"reward.args.{name}"
    values = cfg.reward.args.get(name, {})
    _check_no_secret(values, JudgeConfig, prefix)
    args = typed(JudgeConfig, values, prefix)
    if not args.model.strip():
        raise bad_value(f"{prefix}.model", "''", "a judge needs it", f"{prefix}.model=NAME")
    _check_place(args, prefix)
    _check_question(args, prefix)
    scale = args.scale
    # Not so of infinite bounds or NaN either.
    if len(scale) != 2 or not 0 < scale[1] - scale[0] < math.inf:
        wrong = "it must be two finite numbers, the worst score and a larger best one"
        raise bad_value(f"{prefix}.scale", scale, wrong, f"{prefix}.scale=[1,10]")
    for field in args.request:
        if field in _OWN_FIELDS:
            wrong = f"the judge itself sets {', '.join(_OWN_FIELDS)}"
            raise bad_value(
                f"{prefix}.request.{field}", args.request[field], wrong, f"{prefix}.request without it"
            )
    if args.key_variable is not None and not args.key_variable.isidentifier():
        # It may be the key itself, so it is not shown.
        raise ConfigError(
            f"{prefix}.key_variable: its value is no name of an environment variable; write "
            f"{prefix}.key_variable=OPENAI_API_KEY, for example, and set that variable to the key"
        )
    if args.cache is not None and not args.cache.strip():
        raise bad_value(f"{prefix}.cache", "''", "it names no folder", f"{prefix}.cache={CACHE_OF_RUN}")
    return args


def reward_model_config(cfg: Config, name: str) -> tuple[str, RewardModelConfig]:
    """Return the name or folder of a reward model, and its arguments.

    Raises:
        ConfigError: one is missing, unknown or wrong.
    """
    spec, prefix = cfg.reward.functions[name], f"reward.args.{name}"
    source = spec.removeprefix(REWARD_MODEL)
    if not source.strip():
        fix = f"reward.functions={{{name}:hf:ORGANIZATION/MODEL}}, or hf: and a folder"
        raise bad_value(f"reward.functions.{name}", spec, "it names no model", fix)
    args = typed(RewardModelConfig, cfg.reward.args.get(name, {}), prefix)
    _check_device(args.device, prefix)
    return source, args


def reward_gpu(cfg: Config, name: str) -> int | None:
    """Return the number of the GPU that a reward computes on; None if it needs none."""
    spec, device = cfg.reward.functions[name], None
    if spec == JUDGE:
        device = judge_config(cfg, name).device
    elif is_model(spec):
        device = reward_model_config(cfg, name)[1].device
    return None if device is None or device == "cpu" else int(device.removeprefix("cuda:"))


def check_model_reward(cfg: Config, name: str) -> None:
    """Check the arguments of a judge or a reward model.

    Raises:
        ConfigError: one is missing, unknown or wrong.
    """
    if cfg.reward.functions[name] == JUDGE:
        judge_config(cfg, name)
    else:
        reward_model_config(cfg, name)


def _check_place(args: JudgeConfig, prefix: str) -> None:
    """Check that a judge has either an address, or a device for a server of its own."""
    if args.device is not None:
        _check_device(args.device, prefix)
        for field in ("url", "key_variable"):
            if vars(args)[field]:
                # An address may have a secret, so it is not shown.
                raise ConfigError(
                    f"{prefix}.{field}: with device the run starts the judge's server itself; write "
                    f"{prefix}.device=null for an endpoint, or leave {field} out"
                )
        return
    if args.engine_args:
        wrong = "only a server that the run starts has options"
        raise bad_value(f"{prefix}.engine_args", args.engine_args, wrong, f"{prefix}.device=cuda:0 beside it")
    if not args.url.strip():
        fix = f"{prefix}.url=http://127.0.0.1:8000/v1, or {prefix}.device=cuda:0"
        raise bad_value(f"{prefix}.url", "''", "a judge needs an address or a device", fix)
    _check_url(args.url, f"{prefix}.url")


def _check_device(device: str, prefix: str) -> None:
    if device != "cpu" and not device.removeprefix("cuda:").isdecimal():
        wrong = "it must be cpu or cuda: and the number of a GPU"
        raise bad_value(f"{prefix}.device", device, wrong, f"{prefix}.device=cuda:0")


def _check_url(url: str, where: str) -> None:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise bad_value(where, url, "it is no address of an endpoint", f"{where}=http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        # They may be secrets, so they are not shown.
        raise ConfigError(
            f"{where}: an address has no user, query or fragment; write "
            f"{where}={parts.scheme}://HOST:PORT/v1, and the key into a variable that key_variable names"
        )


def _check_question(args: JudgeConfig, prefix: str) -> None:
    if bool(args.rubric.strip()) == bool(args.criteria):
        wrong = "a judge needs either a rubric or criteria"
        fix = f"{prefix}.rubric='What a good response is' or {prefix}.criteria={{NAME:QUESTION}}"
        raise bad_value(f"{prefix}.rubric", args.rubric or "''", wrong, fix)
    for name, question in args.criteria.items():
        # The score of a reward is that of all its parts.
        if not name.isidentifier() or name in (REASON, "score") or not question.strip():
            others = f"other than {REASON} and score"
            wrong = f"a criterion has a name of letters, digits and _, {others}, and a question"
            fix = f"{prefix}.criteria={{clear:'Is it easy to read?'}}"
            raise bad_value(f"{prefix}.criteria", args.criteria, wrong, fix)


def _check_no_secret(values: Mapping[str, Any], known: type, prefix: str) -> None:
    """Check that no value is a secret: its name is not one of the arguments, and sounds like an API key."""
    for name in values.keys() - vars(known()).keys():
        if "key" in name.lower() or "token" in name.lower():
            # The value may be the secret, which is not repeated.
            raise ConfigError(
                f"{prefix}.{name}: an API key is not written into a configuration; set an environment "
                f"variable to it, and write {prefix}.key_variable=NAME_OF_THE_VARIABLE"
            )
