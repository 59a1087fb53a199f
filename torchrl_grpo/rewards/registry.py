"""Rewards by name, the weights of a run, and the choice of the grader."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import DATASETS, MODEL_REWARDS, REWARDS, dataset_kind, load_built_in
from torchrl_grpo.config.checks.data import check_rewards
from torchrl_grpo.config.derived import held_out_problems, reward_weights
from torchrl_grpo.config.judges import JUDGE, REWARD_MODEL, is_model, is_ranking, judge_config
from torchrl_grpo.config.keys import bad_value, show
from torchrl_grpo.config.mixture import mixture_parts
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.rewards.graders import (
    AccuracyGrader,
    CountingGrader,
    MixtureGrader,
    NoGrader,
    OwnRewardGrader,
)
from torchrl_grpo.rewards.judge.question import check_reference
from torchrl_grpo.rewards.reward_set import MixtureRewardSet, RewardSet, close_all
from torchrl_grpo.rewards.sandbox import user_reward
from torchrl_grpo.rewards.types import Grader, Reward

# Rewards that look for the answer, or for the format itself, as env.answer_format says.
_READ_FORMAT = frozenset({"gsm8k", "format", "reasoning_gym", "bare_number", "closeness", "exact_match"})


def unasked_tags(cfg: Config, example: Example) -> str | None:
    """Return a warning if rewards look for ``<answer>`` tags that no message of a problem asks for.

    Messages of the data set are the prompt as they are, and a template or a system prompt of the user's has
    to ask for a format itself.

    Args:
        cfg: configuration.
        example: any problem, with the messages of its prompt.
    """
    if cfg.env.answer_format != "tags":
        return None
    names = (
        {name for name, weight in _weights(cfg).items() if weight} if cfg.train.method == "grpo" else set()
    )
    if held_out_problems(cfg) > 0:
        names.add(eval_reward_name(cfg))
    readers = sorted(names & _READ_FORMAT - cfg.reward.functions.keys())
    if not readers or any("<answer>" in message["content"] for message in example.messages):
        return None
    return (
        f"warning: the prompt of {example.id} does not ask for <answer> tags, and env.answer_format=tags "
        f"lets {', '.join(readers)} look for the answer inside them; write env.answer_format=plain, or ask "
        "for the tags in the messages or in env.system_prompt"
    )


def joined_rewards(cfg: Config) -> str | None:
    """Return a note with all weights if functions of the user are added to weights, a preset's perhaps."""
    weights, own = reward_weights(cfg), cfg.reward.functions.keys()
    if cfg.train.method != "grpo" or not own & weights.keys() or weights.keys() <= own:
        return None
    return (
        f"rewards: those of reward.functions count beside others, as reward.weights={show(weights)} says; a "
        "weight of 0 takes one out of the sum"
    )


def check_weights(cfg: Config) -> dict[str, float]:
    """Check and return the weights of a run. No worker process starts.

    Args:
        cfg: configuration; ``reward.weights`` and ``env.dataset`` are read.

    Returns:
        Reward name -> weight. A reward of ``reward.functions`` without a weight has weight 1. Without weights
        and functions, it is the data set's defaults.

    Raises:
        ConfigError: a name is unknown, a weight is not finite, a reward does not support the data set, all
            weights are 0, or a function of the user cannot be loaded.
    """
    weights = _weights(cfg)
    for name, spec in cfg.reward.functions.items():
        if not is_model(spec):
            _user_reward_spec(cfg, name).load()
    check_rewards(cfg, weights)
    return dict(weights)


def _weights(cfg: Config) -> dict[str, float]:
    return reward_weights(cfg) or _default_weights(cfg)


def _default_weights(cfg: Config) -> dict[str, float]:
    if cfg.env.environment is not None:
        return {"environment": 1.0}
    return dict(DATASETS[dataset_kind(cfg.env.dataset)].weights)


def _user_reward_spec(cfg: Config, name: str) -> user_reward.UserRewardSpec:
    return user_reward.UserRewardSpec(name, cfg.reward.functions[name], dict(cfg.reward.args.get(name, {})))


def _check_answer(cfg: Config, name: str, example: Example | None) -> None:
    """Refuse a built-in reward that compares with an answer if a problem has none.

    Raises:
        ConfigError: it has none.
    """
    key = f"reward.weights.{name}" if cfg.eval.reward is None else f"eval.reward={name}"
    needs_answer = dataset_kind(cfg.env.dataset) == "jsonl" and REWARDS[name].needs_answer
    if needs_answer and example is not None and "answer" not in example.truth:
        raise ConfigError(
            f"{key}: {example.id} has no answer (text or a number) to compare with; name its column with "
            "env.fields={question:COLUMN,answer:COLUMN}, or write a reward of your own with "
            "reward.functions; eval.num_problems=0 evaluates nothing"
        )


def _check_example(cfg: Config, name: str, example: Example | None) -> None:
    """Refuse a reward that needs what a problem does not have.

    Raises:
        ConfigError: it is a column, or the answer.
    """
    if name not in cfg.reward.functions:
        _check_answer(cfg, name, example)
    elif is_model(cfg.reward.functions[name]):
        if example is not None and cfg.reward.functions[name] == JUDGE:
            check_reference(judge_config(cfg, name), example, name)
    elif example is not None:
        spec = _user_reward_spec(cfg, name)
        spec.load()[1].check_columns(example, spec)


def _build(cfg: Config, name: str, example: Example | None, folder: Path | None) -> Reward:
    _check_example(cfg, name, example)
    if name in cfg.reward.functions:
        if is_model(spec := cfg.reward.functions[name]):
            of_model: Reward = load_built_in(MODEL_REWARDS[JUDGE if spec == JUDGE else REWARD_MODEL])(
                cfg, name, folder
            )
            return of_model
        return user_reward.build(_user_reward_spec(cfg, name), cfg.reward.timeout_s, cfg.reward.workers)
    reward: Reward = load_built_in(REWARDS[name].build)(cfg)
    return reward


def build_reward_set(
    cfg: Config,
    examples: Mapping[str, Example] | None = None,
    group_size: int | None = None,
    folder: Path | None = None,
) -> RewardSet | MixtureRewardSet:
    """Build the rewards of a run. Some start worker processes, so the caller must close the result.

    Args:
        cfg: configuration; ``reward``, ``env.dataset`` and ``env.answer_format`` are read.
        examples: any problem of each part of a mixture by its name, or one under an empty name without a
            mixture. The columns that the user's reward functions need must be in its data-set row
            (``Example.columns``). None skips this check.
        group_size: see :class:`RewardSet`.
        folder: folder of the run, in which judges keep their verdicts; None without a run.

    Returns:
        The rewards, combined.

    Raises:
        ConfigError: see :func:`check_weights`.
    """
    examples = examples or {}
    if parts := mixture_parts(cfg):
        with ExitStack() as stack:
            sets = {}
            for part in parts:
                sets[part.name] = _build_one_set(part.cfg, examples.get(part.name), group_size, folder)
                stack.callback(sets[part.name].close)
            stack.pop_all()
        return MixtureRewardSet(sets)
    return _build_one_set(cfg, examples.get(""), group_size, folder)


def _build_one_set(
    cfg: Config, example: Example | None, group_size: int | None, folder: Path | None
) -> RewardSet:
    pairs: list[tuple[Reward, float]] = []
    with ExitStack() as stack:
        for name, weight in check_weights(cfg).items():
            reward = _build(cfg, name, example, folder)
            stack.callback(close_all, [reward])
            pairs.append((reward, weight))
        stack.pop_all()
    return RewardSet(pairs, cfg.reward.on_error, cfg.reward.workers, group_size)


def of_run(cfg: Config, problems: Problems, folder: Path | None = None) -> RewardSet | MixtureRewardSet:
    """Build the rewards of a run, and check that its problems have what they need."""
    examples = problems.first_examples() if cfg.train.method == "grpo" else None
    return build_reward_set(cfg, examples, cfg.env.repeats, folder)


def grader_of_run(
    cfg: Config, problems: Problems, shared: RewardSet | MixtureRewardSet, folder: Path | None = None
) -> CountingGrader:
    """Build the grader of a run, and check that its held-out problems have what it needs."""
    examples = problems.first_examples(held_out=True) if held_out_problems(cfg) > 0 else None
    return build_grader(cfg, shared, examples, folder)


def eval_reward_name(cfg: Config) -> str:
    """Return the name of the reward that grades the evaluation.

    It is ``eval.reward`` if that is set. Otherwise it is the reward with the largest positive weight, among
    those of correctness (:class:`~torchrl_grpo.config.builtin.BuiltInReward`) and those of the user, but for
    judges that rank. In a tie, the data set's default is chosen if it is among the tied rewards, and the
    first of them otherwise. If none has a positive weight, it is the heaviest of the user, or else the data
    set's default.

    Args:
        cfg: configuration; ``eval.reward``, ``reward`` and ``env.dataset`` are read.
    """
    if cfg.eval.reward is not None:
        return cfg.eval.reward
    weights = _weights(cfg)
    default = DATASETS[dataset_kind(cfg.env.dataset)].eval_reward
    if cfg.env.environment is not None:
        default = "environment"
    own = {
        name: weight
        for name, weight in weights.items()
        if name in cfg.reward.functions and weight and not is_ranking(cfg, name)
    }
    judges = {name for name, reward in REWARDS.items() if reward.is_correctness} | own.keys()
    rewarded = {name: weight for name, weight in weights.items() if name in judges and weight > 0} or own
    heaviest = [name for name, weight in rewarded.items() if weight == max(rewarded.values())]
    return default if default in heaviest or not heaviest else heaviest[0]


def grader_name(cfg: Config) -> str:
    """Return what grades the evaluation, for the user: a reward and its metric, or those of each part."""
    if parts := mixture_parts(cfg):
        return ", ".join(f"{grader_name(part.cfg)} ({part.name})" for part in parts)
    name = eval_reward_name(cfg)
    if name in cfg.reward.functions or (own := REWARDS[name].grader) is None:
        return name
    return f"{name}/{load_built_in(own).primary}"


def build_grader(
    cfg: Config,
    shared: RewardSet | MixtureRewardSet | None = None,
    examples: Mapping[str, Example] | None = None,
    folder: Path | None = None,
) -> CountingGrader:
    """Build the grader that :func:`eval_reward_name` names. The caller must close it: it may start processes.

    With rewards of the user, all rewards of the run score held-out responses too.

    Args:
        cfg: configuration; ``env.dataset``, ``env.answer_format``, ``eval`` and ``reward`` are read.
        shared: rewards of the run. If they include a built-in reward that the grader needs, the grader uses
            it and its worker processes instead of starting its own. So are judges and reward models. Close
            the grader before the rewards. A reward of the user is not shared, because it may have a state.
        examples: see :func:`build_reward_set`.
        folder: see :func:`build_reward_set`.

    Returns:
        A grader that counts its errors.
    """
    examples = examples or {}
    parts = mixture_parts(cfg)
    if any(
        _lacks_grader(run, examples.get(name))
        for name, run in ({"": cfg} | {p.name: p.cfg for p in parts}).items()
    ):
        return CountingGrader(NoGrader(), name="the loss of their solutions")
    scores = held_out_problems(cfg) > 0 and any(
        run.reward.functions for run in (cfg, *(p.cfg for p in parts))
    )
    notes: list[str] = []
    with ExitStack() as stack:
        sets: dict[str, RewardSet] = {}
        graders: dict[str, Grader] = {}
        for name, of_part in {part.name: part.cfg for part in parts}.items() or {"": cfg}.items():
            common = shared.sets[name] if isinstance(shared, MixtureRewardSet) else shared
            if scores:
                sets[name] = _held_out_set(of_part, common, examples.get(name), notes, folder)
                stack.callback(sets[name].close)
            prefix = f"{name}/" if parts else ""
            graders[name] = _build_one_grader(of_part, common, examples.get(name), prefix)
            stack.callback(graders[name].close)
        stack.pop_all()
    if parts:
        rewards: RewardSet | MixtureRewardSet | None = MixtureRewardSet(sets) if scores else None
        grader: Grader = MixtureGrader(graders)
    else:
        rewards, grader = sets.get(""), graders[""]
    return CountingGrader(grader, rewards, grader_name(cfg), notes, cfg.reward.workers)


def _lacks_grader(cfg: Config, example: Example | None) -> bool:
    """Whether solutions are learned whose problems have no answer for the reward that would grade."""
    if cfg.train.method != "sft" or cfg.eval.reward is not None:
        return False
    try:
        _check_example(cfg, eval_reward_name(cfg), example)
    except ConfigError:
        return True
    return False


def _held_out_set(
    cfg: Config, shared: RewardSet | None, example: Example | None, notes: list[str], folder: Path | None
) -> RewardSet:
    """Build the rewards that score held-out responses: those of the run, and the one that grades.

    A reward that needs what held-out problems do not have is left out, with a note, unless it grades. So is a
    judge that ranks, without one.
    """
    weights, borrowed = check_weights(cfg), set()
    if (grades := eval_reward_name(cfg)) in cfg.reward.functions:
        weights.setdefault(grades, 0.0)
    pairs: list[tuple[Reward, float]] = []
    with ExitStack() as stack:
        for name, weight in weights.items():
            if is_ranking(cfg, name):
                continue
            try:
                _check_example(cfg, name, example)
            except ConfigError as error:
                if name == grades:
                    raise
                notes.append(f"warning: held-out responses are not scored by {name}. {error}")
                continue
            own = name in cfg.reward.functions and not is_model(cfg.reward.functions[name])
            reward = None if own or shared is None else shared.get(name)
            if reward is not None:
                borrowed.add(name)
            else:
                reward = _build(cfg, name, example, folder)
                stack.callback(close_all, [reward])
            pairs.append((reward, weight))
        stack.pop_all()
    return RewardSet(pairs, cfg.reward.on_error, cfg.reward.workers, cfg.eval.samples or 1, borrowed)


def _build_one_grader(cfg: Config, shared: RewardSet | None, example: Example | None, prefix: str) -> Grader:
    name, threshold = eval_reward_name(cfg), cfg.eval.threshold
    if name in cfg.reward.functions:
        return OwnRewardGrader(prefix + name, threshold, is_model(cfg.reward.functions[name]))
    _check_answer(cfg, name, example)
    if (own := REWARDS[name].grader) is not None:
        if threshold is not None and not prefix:
            wrong = f"the reward {name} grades, which says itself what is right"
            raise bad_value("eval.threshold", threshold, wrong, "eval.threshold=null")
        grader: Grader = load_built_in(own)()
        return grader
    reward = None if shared is None else shared.get(name)
    return AccuracyGrader(
        reward or _build(cfg, name, example, None), reward is None, 1.0 if threshold is None else threshold
    )
