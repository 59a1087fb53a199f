"""Problems of several data sets, each with its own prompts, rewards and held-out problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchrl_grpo.config import Config
from torchrl_grpo.config.mixture import MixturePart
from torchrl_grpo.data.example import Example, LazyExamples
from torchrl_grpo.data.problems import Problems


class Joined(LazyExamples):
    """Several sequences of examples as one, without a copy, and with the name of its part on each example.

    Args:
        parts: names and examples.
    """

    def __init__(self, parts: Sequence[tuple[str, Sequence[Example]]]) -> None:
        self._parts = list(parts)

    def __len__(self) -> int:
        return sum(len(examples) for _, examples in self._parts)

    def example_at(self, index: int) -> Example:
        for name, examples in self._parts:
            if index < len(examples):
                return replace(examples[index], part=name)
            index -= len(examples)
        raise AssertionError("the index is below the length")


@dataclass
class Mixture(Problems):
    """The problems of a mixture.

    ``train`` and ``held_out`` have those of all parts, one part after the other.

    Attributes:
        parts: name, weight and configuration of each part.
        problems: problems of each part, in the same order.
    """

    parts: Sequence[MixturePart]
    problems: Sequence[Problems]

    def first_examples(self, *, held_out: bool = False) -> dict[str, Example]:
        """Return the first problem of each part."""
        return {
            part.name: part_problems.first_examples(held_out=held_out)[""]
            for part, part_problems in zip(self.parts, self.problems, strict=True)
        }

    @property
    def training_sets(self) -> list[tuple[float, Sequence[Example]]]:
        """Weight and training problems of each part."""
        return [
            (part.weight, Joined([(part.name, part_problems.train)]))
            for part, part_problems in zip(self.parts, self.problems, strict=True)
        ]


def mix(parts: Sequence[MixturePart], problems: Sequence[Problems]) -> Mixture:
    """Put the problems of the parts together."""
    named = list(zip([part.name for part in parts], problems, strict=True))
    train = Joined([(name, part_problems.train) for name, part_problems in named])
    held_out = [
        replace(example, part=name) for name, part_problems in named for example in part_problems.held_out
    ]
    # A list says that all problems are known before they are drawn.
    known = all(isinstance(part_problems.train, list) for part_problems in problems)
    return Mixture(list(train) if known else train, held_out, parts, problems)


def map_parts(cfg: Config, problems: Problems, function: Callable[[Config, Problems], Problems]) -> Problems:
    """Apply a function to the problems of a run, or to those of each part of a mixture.

    Args:
        cfg: configuration of the run.
        problems: problems of the run.
        function: function of the configuration of a part, and of its problems.
    """
    if not isinstance(problems, Mixture):
        return function(cfg, problems)
    changed = [
        function(part.cfg, part_problems)
        for part, part_problems in zip(problems.parts, problems.problems, strict=True)
    ]
    return mix(problems.parts, changed)
