"""Advice for long texts and tight memory: several keys together, the fewest that are enough, or none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from slow_cases import slow_except
from test_advice import SHAPES, advised, planned, read

from torchrl_grpo.config.checks import whole
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models.shape import ModelShape
from torchrl_grpo.planning import preflight, sizes
from torchrl_grpo.planning.advice import Changes, apply
from torchrl_grpo.runtime.hardware import Hardware

# As published: SmolLM2-135M.
SMALL = ModelShape(134_515_008, 49_152, 576, 30, 1536, 576, 192)
MODELS = {"135M": SMALL, "1.5B": SHAPES["1.5B"], "7B": SHAPES["7B"]}
# Number of GPUs, and the memory that a run may take of each; of the CPU where there are none.
MACHINES = {"cpu": (0, 8.0), "1x8": (1, 7.6), "1x24": (1, 23.3), "4x24": (4, 23.3), "8x80": (8, 78.8)}
WORK = {
    "many": "env.num_envs=64 env.repeats=64 train.total_dialog_turns=40960 "
    "inference_model.max_model_len=8192",
    "long": "inference_model.max_model_len=32768 inference_model.max_new_tokens=16384",
    "sampled": "inference_model.backend=transformers inference_model.max_model_len=8192",
    "reference": "inference_model.max_model_len=8192 policy.kl_coef=0.1 "
    "train.max_tokens_per_microbatch=65536",
}
CASES = list(itertools.product(("135M", "1.5B", "7B"), MACHINES, WORK))
FAST = [case for case in CASES if case[:2] in [("135M", "cpu"), ("1.5B", "4x24")]]
# Too large for eight gigabytes, and in part for one GPU of 24, whatever is shortened.
HOPELESS = {("1.5B", "cpu"), ("7B", "cpu"), ("1.5B", "1x8"), ("7B", "1x8"), ("7B", "1x24")}


@pytest.fixture(autouse=True)
def _a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "cuda_device_present", lambda: True)


def there(machine: str) -> Hardware:
    number, gib = MACHINES[machine]
    return Hardware((gib,) * number, 900.0 if number else gib, ((9, 0),) * number)


def enough(words: str, asynchronous: bool, machine: Hardware, shape: ModelShape) -> list[Changes]:
    """The alternatives with which a command fits."""
    cfg = read(words)
    plans = (
        (changes, preflight.replan(apply(cfg, changes), asynchronous, machine, shape))
        for changes in alternatives(machine)
    )
    return [changes for changes, candidate in plans if candidate is not None and sizes.fits(candidate)]


def alternatives(machine: Hardware) -> Iterator[Changes]:
    """Everything at its least, and all that has no least: shares, sleep, and ways to hold the model."""
    gpus = len(machine.gpus)
    small: Changes = (
        ("inference_model.max_new_tokens", 128),
        ("inference_model.max_model_len", 256),
        ("train.max_tokens_per_microbatch", 256),
        ("train_model.gradient_checkpointing", True),
        ("eval.num_problems", 50),
        *(() if gpus else (("inference_model.kv_cache_gib", 1),)),
    )
    rounds: list[Changes] = [(), (("env.num_envs", max(1, gpus)), ("env.repeats", 2))]
    shares: list[Changes] = [()]
    shares += [(("inference_model.gpu_memory_utilization", n / 20),) for n in range(1, 20) if gpus]
    sleeps: list[Changes] = [(), *([(("inference_model.sleep", True),)] if gpus else [])]
    for parts in itertools.product(rounds, [(), *_ways(gpus)], shares, sleeps):
        yield small + sum(parts, ())


def _ways(gpus: int) -> Iterator[Changes]:
    adapters: Changes = (("train_model.lora.rank", 16),)
    yield adapters
    yield (*adapters, ("train_model.quantization", "nf4"))
    for ranks in range(2, gpus + 1):
        yield (("train_model.num_devices", ranks), ("train_model.parallelism", "fsdp2"))


@pytest.mark.parametrize(("size", "machine", "work"), slow_except(FAST, CASES))
def test_what_is_advised_for_long_texts_fits(
    size: str, machine: str, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: MODELS[size])
    hardware, words, asynchronous = there(machine), WORK[work], work == "long"
    try:
        planned(words, asynchronous, hardware)
        return
    except ConfigError as error:
        message = str(error)
    advice = advised(message)
    if not advice:
        assert (size, machine) in HOPELESS
        return
    for proposal in advice:
        again = planned(f"{words} {proposal}", asynchronous, hardware)
        assert sizes.fits(again), proposal
        changes = [(key, value) for key, _, value in (word.partition("=") for word in proposal.split())]
        # Without any one of its keys it is not enough.
        for left_out in changes if len(changes) > 1 else ():
            rest = " ".join(f"{key}={value}" for key, value in changes if (key, value) != left_out)
            assert not _fits_as_written(f"{words} {rest}", asynchronous, hardware), (proposal, left_out)


def _fits_as_written(words: str, asynchronous: bool, hardware: Hardware) -> bool:
    try:
        return sizes.fits(preflight.make(read(words), asynchronous, hardware))
    except ConfigError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "machine", "work", "asynchronous"),
    [
        ("7B", "1x24", "", True),
        ("1.5B", "1x8", "many", False),
        ("1.5B", "cpu", "sampled", False),
        ("7B", "cpu", "many", False),
    ],
)
def test_where_nothing_is_advised_nothing_is_enough(
    size: str, machine: str, work: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: MODELS[size])
    hardware, words = there(machine), WORK.get(work, "")
    with pytest.raises(ConfigError) as caught:
        planned(words, asynchronous, hardware)
    ways = enough(words, asynchronous, hardware, MODELS[size])
    assert bool(advised(str(caught.value))) == bool(ways), ways[:1]


@pytest.mark.slow
@pytest.mark.parametrize("gib", [2.0, 3.0])
def test_advice_ends_where_everything_together_is_too_much(
    gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SMALL)
    hardware = Hardware((gib,), 900.0, ((9, 0),))
    words = WORK["many"]
    with pytest.raises(ConfigError) as caught:
        planned(words, False, hardware)
    advice = advised(str(caught.value))
    assert bool(advice) == bool(enough(words, False, hardware, SMALL))
    for proposal in advice:
        assert sizes.fits(planned(f"{words} {proposal}", False, hardware))


def test_two_keys_are_advised_where_no_single_one_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "read_shape", lambda model: SMALL)
    words = f"{WORK['many']} inference_model.backend=transformers"
    for gib, expected in (
        (15.0, "inference_model.max_model_len=1024"),
        (7.5, "inference_model.max_model_len=512 train.max_tokens_per_microbatch=2048"),
    ):
        with pytest.raises(ConfigError) as caught:
            planned(words, False, Hardware((gib,), 900.0, ((9, 0),)))
        assert advised(str(caught.value)) == [expected]
