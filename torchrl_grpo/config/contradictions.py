"""Rules of which key gives way to which, and the value that it gets then.

A preset's key gives way to one that was written later (:mod:`torchrl_grpo.cli.precedence`). If the user wrote
both, checks refuse what really contradicts. A rule may have nothing to do in a configuration: ``settle``
passes over keys at their defaults and keys that were written later. Pairs without an obvious value for the
one that gives way are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torchrl_grpo.config.builtin import REWARDS, dataset_kind
from torchrl_grpo.config.engines import engine_kind
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.mixture import OF_A_DATASET
from torchrl_grpo.config.schema import keys
from torchrl_grpo.config.values import SURROGATE_OPTIONS, AnswerFormat

# Returns the value of a key.
Read = Callable[[str], Any]
DEFAULT = object()


class Contradiction(NamedTuple):
    """Keys whose values contradict that of another key.

    Attributes:
        key: key that wins if it was written later.
        others: keys that then give way.
        value: value that they get; DEFAULT for the default of each.
        defaults_too: whether they also give way if they have their defaults, and also to a key that was
            written with the value that it already had.
    """

    key: str
    others: tuple[str, ...]
    value: Any = DEFAULT
    defaults_too: bool = False


def contradictions(read: Read) -> Iterator[Contradiction]:
    """Yield the contradictions of a configuration. The caller settles each before it takes the next."""
    yield from _of_kl(read)
    yield from _of_objective(read)
    yield from _of_lengths(read)
    yield from _of_devices(read)
    yield from _of_adapters(read)
    yield from _of_data(read)
    yield from _of_engines(read)
    for key, setting in unread(read):
        yield Contradiction(setting.partition("=")[0], (key,))


def unread(read: Read) -> Iterator[tuple[str, str]]:
    """Yield each key that nothing would read if it were set, with the setting that it needs.

    See :func:`~torchrl_grpo.config.keys.key`.
    """
    for key, setting in keys().only_with.items():
        name, equals, needed = setting.partition("=")
        if (show(read(name)) != needed) if equals else (read(name) == keys().defaults[name]):
            yield key, setting


def _keys(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


def _of_kl(read: Read) -> Iterator[Contradiction]:
    start, coef, target = "policy.init_kl_coeff", "policy.kl_coef", "policy.kl_target"
    if read(start) is not None:
        yield Contradiction(coef, (start,))
    if read(start) is not None and read(coef) != 0:
        # Where nothing adapts the coefficient, it stays where it starts.
        yield Contradiction(start, (coef,), read(start) if read(target) is None else 0.0)
    if read(coef) == 0 and read(start) is None and read(target) is not None:
        yield Contradiction(coef, (target,))
    estimator = "policy.advantage_estimator"
    if read("policy.kl_in") == "weights" and read(estimator) != "maxent":
        yield Contradiction(estimator, ("policy.kl_in",))
    if read("policy.kl_in") != "weights" and read(estimator) == "maxent":
        yield Contradiction(estimator, ("policy.kl_in",), "weights", defaults_too=True)
    if read("policy.kl_in") == "reward" and read("policy.reward_combination") == "apart":
        yield Contradiction("policy.reward_combination", ("policy.kl_in",))
    if read("policy.kl_in") == "loss" and read("policy.kl_estimator") == "k1":
        yield Contradiction("policy.kl_in", ("policy.kl_estimator",))


def _of_objective(read: Read) -> Iterator[Contradiction]:
    surrogate = read("policy.surrogate")
    if not set(read("policy.surrogate_args")) <= set(SURROGATE_OPTIONS[surrogate]):
        yield Contradiction("policy.surrogate", ("policy.surrogate_args",), {})
    if read("policy.proximal") != "trainer":
        yield Contradiction("policy.proximal", ("policy.correction",))


def _of_lengths(read: Read) -> Iterator[Contradiction]:
    epochs, turns = "train.num_epochs", "train.total_dialog_turns"
    if read(epochs) is not None and read(turns) is not None:
        yield Contradiction(epochs, (turns,), None, defaults_too=True)
        yield Contradiction(turns, (epochs,), defaults_too=True)
    size = max(1, read("env.num_envs") * read("env.repeats"))
    batch = read("train.optim_batch_size")
    for key in ("env.num_envs", "env.repeats"):
        if read(turns) is not None and read(turns) % size:
            yield Contradiction(key, (turns,), -(-read(turns) // size) * size)
        if batch is not None and (batch % max(1, read("env.repeats")) or size % max(1, batch)):
            yield Contradiction(key, ("train.optim_batch_size", "train.gradient_accumulation_steps"))
    new, longest = "inference_model.max_new_tokens", "inference_model.max_model_len"
    if read(new) >= read(longest):
        yield Contradiction(new, (longest,), read(new) + 512)
    budget = read("train.max_tokens_per_microbatch")
    if budget is not None and budget < read(longest):
        yield Contradiction(longest, ("train.max_tokens_per_microbatch",))


def _of_devices(read: Read) -> Iterator[Contradiction]:
    for role in ("train_model", "inference_model", "ref_model", "teacher_model"):
        count, devices = f"{role}.num_devices", f"{role}.devices"
        if read(devices) is not None and read(count) not in ("auto", len(read(devices))):
            yield Contradiction(devices, (count,))
            yield Contradiction(count, (devices,))
    if read("allocation_mode") is not None:
        yield Contradiction(
            "allocation_mode",
            (
                *_keys("train_model", "num_devices devices parallelism"),
                *_keys("inference_model", "num_devices devices tensor_parallel_size pipeline_parallel_size"),
            ),
        )


def _of_adapters(read: Read) -> Iterator[Contradiction]:
    rank, kind = "train_model.lora.rank", "train_model.parallelism"
    if read(rank) > 0 and read(kind) not in ("auto", "ddp"):
        yield Contradiction(rank, (kind,))
        yield Contradiction(kind, (rank,))
    if read(rank) > 0:
        yield Contradiction(
            rank, _keys("ref_model", "refresh_frequency refresh_mix dtype devices num_devices")
        )
    if read("train_model.prefix_attention") == "varlen" and read("train_model.autocast") == "no":
        yield Contradiction("train_model.prefix_attention", ("train_model.autocast",))
        yield Contradiction("train_model.autocast", ("train_model.prefix_attention",))


def _of_data(read: Read) -> Iterator[Contradiction]:
    if read("env.mixture"):
        own = (*_keys("env", " ".join(OF_A_DATASET)), *_keys("reward", "weights functions args"))
        yield Contradiction("env.mixture", own)
        yield Contradiction("env.mixture", ("eval.reward",))
    # The columns of a data set are its own.
    yield Contradiction("env.dataset", ("env.fields",))
    if dataset_kind(read("env.dataset")) == "jsonl" and read("env.answer_format") == AnswerFormat.tags:
        # One's own data keeps its prompt as it is.
        yield Contradiction("env.dataset", ("env.answer_format",), AnswerFormat.plain, defaults_too=True)
    if read("env.dataset") != "reasoning_gym":
        yield Contradiction("env.dataset", ("env.task_args",))
    kind, functions = dataset_kind(read("env.dataset")), read("reward.functions")
    weights, grader = read("reward.weights"), read("eval.reward")
    for key, names in (("reward.weights", weights), ("eval.reward", [] if grader is None else [grader])):
        if any(n in REWARDS and n not in functions and kind not in REWARDS[n].datasets for n in names):
            yield Contradiction("env.dataset", (key,))
    # The arguments of a task are those of its own generator.
    yield Contradiction("env.task", ("env.task_args",))


def _of_engines(read: Read) -> Iterator[Contradiction]:
    backend, sizes = (
        "inference_model.backend",
        _keys("inference_model", "tensor_parallel_size pipeline_parallel_size"),
    )
    kind = engine_kind(read(backend))
    if kind.engine_args_rules is None:
        yield Contradiction(backend, ("inference_model.engine_args",), {})
    if not kind.spans_devices:
        yield Contradiction(backend, sizes)
    if read("inference_model.servers") != "auto":
        own = _keys("inference_model", "num_devices devices engine_args")
        yield Contradiction("inference_model.servers", (*own, *sizes))
