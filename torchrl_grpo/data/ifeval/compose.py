"""Compose a prompt and its truth from a request and one to three compatible instructions.

Prompt number ``i`` of a seed is always the same text, whatever the number of prompts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import Any

from torchrl_grpo.data.ifeval import topics
from torchrl_grpo.data.ifeval.conflicts import CONFLICTS, CONSTRAINED, clash
from torchrl_grpo.data.ifeval.wordings import WORDINGS

_HOW_MANY = (1, 2, 3)
_HOW_MANY_WEIGHTS = (0.4, 0.35, 0.25)
_QUESTION_SHARE = 0.1  # share of yes-or-no questions among the prompts that do not need one
_LIST_OPENINGS = ("Follow these rules:", "Requirements:", "Please note:")


@dataclass(frozen=True)
class Composed:
    """A prompt and the ground truth for responses to it.

    Attributes:
        prompt: text of the request and its instructions.
        truth: ``{"instruction_id_list": [...], "kwargs": [...]}``, in the order of the text.
    """

    prompt: str
    truth: dict[str, Any]


def compose(count: int, seed: int, avoid: Collection[str] = ()) -> list[Composed]:
    """Compose the first ``count`` different prompts of a seed.

    Args:
        count: number of prompts.
        seed: seed of the prompts. A longer list of the same seed starts with the shorter one.
        avoid: prompts that must not appear; spacing is ignored in the comparison.

    Returns:
        The prompts, all different.
    """
    seen = {_key(prompt) for prompt in avoid}
    prompts: list[Composed] = []
    number = 0
    while len(prompts) < count:  # terminates, because there are many millions of different prompts
        composed = _one(Random(f"ifeval-prompts/{seed}/{number}"))
        number += 1
        key = _key(composed.prompt)
        if key not in seen:
            seen.add(key)
            prompts.append(composed)
    return prompts


def _key(prompt: str) -> str:
    return " ".join(prompt.split())


def _one(rng: Random) -> Composed:
    while True:  # terminates, because most draws have no conflict
        ids = _pick_types(rng, rng.choices(_HOW_MANY, _HOW_MANY_WEIGHTS)[0])
        request = _request(rng, yes_or_no=CONSTRAINED in ids)
        instructions = [(instruction, WORDINGS[instruction].draw(rng, request)) for instruction in ids]
        if not clash(request, instructions):
            break
    sentences = [WORDINGS[instruction].format(rng, kwargs) for instruction, kwargs in instructions]
    truth = {"instruction_id_list": ids, "kwargs": [kwargs for _, kwargs in instructions]}
    return Composed(_lay_out(rng, request, sentences), truth)


def _pick_types(rng: Random, how_many: int) -> list[str]:
    """Draw the first type uniformly, and each next one uniformly from those compatible with all before it."""
    picked = [rng.choice(list(WORDINGS))]
    while len(picked) < how_many:
        left = [
            instruction
            for instruction in WORDINGS
            if instruction not in picked and _is_compatible(instruction, picked)
        ]
        if not left:
            break
        picked.append(rng.choice(left))
    rng.shuffle(picked)
    return picked


def _is_compatible(instruction: str, picked: list[str]) -> bool:
    return not any(frozenset((instruction, other)) in CONFLICTS for other in picked)


def _request(rng: Random, yes_or_no: bool) -> str:
    if yes_or_no or rng.random() < _QUESTION_SHARE:
        return rng.choice(topics.QUESTIONS)
    return rng.choice(topics.REQUESTS).format(topic=rng.choice(topics.TOPICS))


def _lay_out(rng: Random, request: str, sentences: list[str]) -> str:
    if any("\n" in sentence for sentence in sentences):  # a wording with an example on a separate line
        return "\n\n".join([request, *sentences])
    layout = rng.randrange(4)
    if layout == 0:
        return "\n".join([request, *sentences])
    if layout == 1:
        rules = [f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)]
        return "\n".join([request, "", rng.choice(_LIST_OPENINGS), *rules])
    return " ".join([request, *sentences])
