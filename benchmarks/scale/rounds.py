"""Parts of a round: what each token costs from the worker to the loss, and the tensors of a round."""

from __future__ import annotations

import pickle
import random
import time

from tensordict import TensorDictBase

from benchmarks.scale.parts import Part, microseconds
from torchrl_grpo.inference.protocol import Completion
from torchrl_grpo.rewards.types import ResponseScore
from torchrl_grpo.rollout.groups import Group, Response, ScoredGroup
from torchrl_grpo.rollout.round import Round, build_round

_SAMPLES = 16
_MEAN, _LONG = 400, 32_000


def _response(tokens: int, draw: random.Random) -> Response:
    ids = [draw.randrange(150_000) for _ in range(tokens)]
    return Response(ids, [-draw.random() for _ in ids], [3] * tokens, "stop")


def _groups(responses: int, tokens: int) -> list[Group]:
    draw = random.Random(0)
    return [
        Group(number, [1] * 100, number, [_response(tokens, draw) for _ in range(_SAMPLES)])
        for number in range(responses // _SAMPLES)
    ]


def _build(groups: list[Group]) -> Round:
    scores = [ResponseScore(float(number % 2), {"r": 1.0}) for number in range(_SAMPLES)]
    scored = [ScoredGroup(group, [""] * _SAMPLES, scores) for group in groups]
    return build_round(scored, [""] * len(groups), reward_names=["r"], pad_token_id=0, seconds={})


def _tokens_on_ray(tokens: int) -> float:
    """Return the processor time of so many tokens from a worker's message to the trainer's tensors."""
    groups = _groups(tokens // 1_000, 1_000)
    sent = [pickle.dumps(group, pickle.HIGHEST_PROTOCOL) for group in groups]
    start = time.process_time()
    received = [pickle.loads(message) for message in sent]
    for group in received:
        assert group.oldest_version == 3
    _build(received)
    return time.process_time() - start


def _tokens_on_servers(tokens: int) -> float:
    """Return the processor time of so many tokens from a server's answer, without its transport."""
    groups = _groups(tokens // 1_000, 1_000)
    start = time.process_time()
    for group in groups:
        for number, response in enumerate(group.responses):
            whole = Response()
            whole.extend(Completion(response.token_ids, response.log_probs, "stop"), 3)
            group.responses[number] = whole
        assert group.oldest_version == 3
    _build(groups)
    return time.process_time() - start


def _with_long(responses: int) -> list[Group]:
    groups = _groups(responses, _MEAN)
    groups[0].responses[0] = _response(_LONG, random.Random(1))
    return groups


def _bytes(groups: TensorDictBase) -> int:
    return sum(value.numel() * value.element_size() for group in groups for value in group.values(True, True))


def _memory(responses: int) -> float:
    """Return the memory of a round with one long response, beside that of its tokens without padding."""
    groups = _with_long(responses)
    alone = _bytes(_build(groups[1:2]).groups) / (_SAMPLES * _MEAN)
    real = sum(len(response.token_ids) for group in groups for response in group.responses)
    return _bytes(_build(groups).groups) / (alone * real)


def _time(responses: int) -> float:
    """Return the time to build a round with one long response, beside that of equal tokens without it."""
    even, uneven = _groups(responses + _LONG // _MEAN // _SAMPLES * _SAMPLES, _MEAN), _with_long(responses)
    times = []
    for groups in (even, uneven):
        start = time.process_time()
        _build(groups)
        times.append(time.process_time() - start)
    return times[1] / times[0]


PARTS = {
    "ray": Part(
        "tokens of workers on Ray", "tokens", (160_000, 640_000), _tokens_on_ray, microseconds("token")
    ),
    "tokens": Part(
        "tokens of servers, after their answers", "tokens", (160_000, 640_000), _tokens_on_servers,
        microseconds("token"),
    ),
    "memory": Part(
        "round with a response of 32,000 tokens: memory", "responses", (256, 1_024, 4_096), _memory,
        lambda _, ratio: f"{ratio:.2f} times its tokens",
    ),
    "build": Part(
        "round with a response of 32,000 tokens: time", "responses", (256, 1_024, 4_096), _time,
        lambda _, ratio: f"{ratio:.2f} times that of equal tokens",
    ),
}  # fmt: skip
