"""Parts of a round: what each token costs from the worker to the loss, and the tensors of a round."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Sequence
from functools import cache

from tensordict import TensorDictBase
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from benchmarks.scale.parts import Part, fastest, microseconds, total
from torchrl_grpo.envs.responses import written_texts
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.rollout.groups import Group, Response, ScoredGroup
from torchrl_grpo.rollout.round import Round, build_round

SAMPLES = 16
_MEAN, _LONG = 400, 32_000
_VOCABULARY = 150_000
_MOST_TOKENS = 2_560_000


def _response(tokens: int, draw: random.Random) -> Response:
    # A token is as frequent as in text: its frequency falls with its rank.
    ids = [int(_VOCABULARY ** draw.random()) - 1 for _ in range(tokens)]
    return Response(ids, [-draw.random() for _ in ids], [3] * tokens, "stop")


def _groups(responses: int, tokens: int) -> list[Group]:
    draw = random.Random(0)
    return [
        Group(number, [1] * 100, number, [_response(tokens, draw) for _ in range(SAMPLES)])
        for number in range(responses // SAMPLES)
    ]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with as many tokens as those of models have."""
    raw = Tokenizer(models.BPE({f"Ġ{number:x}": number for number in range(_VOCABULARY)}, []))
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="Ġ0", pad_token="Ġ0")


def scored(group: Group, texts: Sequence[str] = ("",) * SAMPLES) -> ScoredGroup:
    """Return a group with texts and rewards."""
    scores = [ResponseScore(float(number % 2), {"r": 1.0}) for number in range(SAMPLES)]
    return ScoredGroup(group, list(texts), scores)


def build(groups: Sequence[ScoredGroup]) -> Round:
    """Return the round of scored groups."""
    return build_round(groups, [""] * len(groups), reward_names=["r"], pad_token_id=0, seconds={})


@cache
def _messages(tokens: int) -> list[bytes]:
    """Return what workers on Ray send for so many tokens, a group each."""
    return [pickle.dumps(group, pickle.HIGHEST_PROTOCOL) for group in _groups(tokens // 1_000, 1_000)]


def _tokens_on_ray(tokens: int) -> float:
    """Return the processor time of a round of so many tokens, from messages to the trainer's tensors.

    Rounds of every size take the same messages, each once: a small round that is repeated would find its own
    in the processor's caches.
    """
    sent, decoder = _messages(max(tokens, _MOST_TOKENS)), tokenizer()
    size = tokens // 1_000 // SAMPLES

    def receive() -> None:
        for start in range(0, len(sent), size):
            ended: list[ScoredGroup] = []
            for message in sent[start : start + size]:
                group = pickle.loads(message)
                ended.append(scored(group, written_texts(decoder, group.responses)))
                assert group.oldest_version == 3
            build(ended)

    return fastest(receive) * size / len(sent)


def _with_long(responses: int) -> list[Group]:
    groups = _groups(responses, _MEAN)
    groups[0].responses[0] = _response(_LONG, random.Random(1))
    return groups


def _bytes(groups: TensorDictBase) -> int:
    return sum(value.numel() * value.element_size() for group in groups for value in group.values(True, True))


def _memory(responses: int) -> float:
    """Return the memory of a round with one long response, beside that of its tokens without padding."""
    groups = _with_long(responses)
    alone = _bytes(build([scored(groups[1])]).groups) / (SAMPLES * _MEAN)
    real = sum(len(response.token_ids) for group in groups for response in group.responses)
    return _bytes(build([scored(group) for group in groups]).groups) / (alone * real)


def _time(responses: int) -> float:
    """Return the time to build a round with one long response, beside that of equal tokens without it."""
    even, uneven = _groups(responses + _LONG // _MEAN // SAMPLES * SAMPLES, _MEAN), _with_long(responses)
    times = []
    for groups in (even, uneven):
        ended = [scored(group) for group in groups]
        start = time.process_time()
        build(ended)
        times.append(time.process_time() - start)
    return times[1] / times[0]


PARTS = {
    "ray": Part(
        "tokens of workers on Ray: message, text, round", "tokens", (160_000, 640_000, _MOST_TOKENS),
        _tokens_on_ray, microseconds, "µs a token", target=0.5, repeats=3,
    ),
    "memory": Part(
        "round with a response of 32,000 tokens: memory", "responses", (256, 1_024, 4_096), _memory,
        total, "times its tokens", target=1.3, target_from=4_096,
    ),
    "build": Part(
        "round with a response of 32,000 tokens: time", "responses", (256, 1_024, 4_096), _time,
        total, "times that of equal tokens", target=1.5, target_from=4_096,
    ),
}  # fmt: skip
