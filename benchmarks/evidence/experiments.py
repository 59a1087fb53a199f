"""The experiments: what each claims, what would refute it, and its arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.learning import EXPERIMENTS as _LEARNING
from benchmarks.learning import Stage

_GRPO, _SFT = "sota-implementations/grpo/grpo.py", "sota-implementations/sft/sft.py"
_CONTROLS = Path(__file__).resolve().parent / "controls.py"
_HELD_OUT = 300


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        claim: what it supports.
        refuted_by: which result would refute the claim.
        arms: commands of each arm; each takes the model of the one before. The first arm is the one that the
            others are compared with.
        shape: regular expression of a whole response in the right form; empty if there is no form.
        seeds: number of seeds.
        outcome: what the results say of the claim; empty until there are some.
    """

    claim: str
    refuted_by: str
    arms: Mapping[str, Sequence[Stage]]
    shape: str = ""
    seeds: int = 3
    outcome: str = ""


def _task(name: str, arguments: str, system: str, shape: str, tokens: int, prompt_tokens: int) -> Experiment:
    """Return GRPO on a task of reasoning_gym beside its controls.

    Args:
        name: name of the task.
        arguments: its arguments, in YAML.
        system: system prompt, which shows the form of an answer.
        shape: regular expression of an answer in the right form.
        tokens: longest response.
        prompt_tokens: room for the prompt.
    """
    words = (
        "--config-name=grpo_quickstart",
        "env=reasoning_gym",
        f"env.task={name}",
        f"env.task_args={arguments}",
        f"env.system_prompt='{system}'",
        "env.answer_format=plain",
        "env.prompt_template='{question}'",
        "env.task_size=2048",
        f"eval.num_problems={_HELD_OUT}",
        f"inference_model.max_new_tokens={tokens}",
        f"inference_model.max_model_len={tokens + prompt_tokens}",
    )
    graded = ("eval.reward=reasoning_gym",)
    pattern = "{shape: {pattern: '" + shape.replace("'", "''") + "'}}"
    functions = f"reward.functions={{shape: '{_CONTROLS}:shape'}}"
    shaped = (functions, f"reward.args={pattern}", *graded)
    own = Stage(_GRPO, (*words, *shaped, "reward.weights={reasoning_gym: 1.0, shape: 0.1}"))
    of_form = Stage(_GRPO, (*words, *shaped, "reward.weights={shape: 1.0}"))
    by_chance = Stage(
        _GRPO,
        (
            *words,
            f"reward.functions={{chance: '{_CONTROLS}:chance'}}",
            *graded,
            "reward.weights={chance: 1.0}",
        ),
    )
    solutions = Stage(_SFT, (*words, "+method=sft", "train.total_dialog_turns=128"))
    return Experiment(
        f"GRPO teaches SmolLM2-135M {name.replace('_', ' ')} by right answers, not by form or chance.",
        "The rise is within its interval, or no larger than that with a random reward or a reward for form.",
        {
            "GRPO": (own,),
            "reward for form": (of_form,),
            "random reward": (by_chance,),
            "SFT": (solutions,),
            "SFT, then GRPO": (solutions, own),
        },
        shape,
    )


_NUMBER = r"-?\d+"
EXPERIMENTS: dict[str, Experiment] = {
    "openenv": Experiment(
        "GRPO teaches SmolLM2-135M a game of two turns on an OpenEnv server.",
        "The held-out share of games won rises by less than 0.30.",
        _LEARNING["openenv"],
        outcome="The claim holds: the rise is +0.833 (+0.754 to +0.913).",
    ),
    "sums": Experiment(
        "GRPO teaches SmolLM2-135M sums of two numbers up to 10, and more than supervised fine-tuning does.",
        "The rise is within its interval, or SFT on as many rounds reaches as much.",
        _LEARNING["sft"],
        outcome="The first part of the claim holds, and the second is refuted: 128 written solutions teach "
        "more than right answers do, in less time, and GRPO after them adds little. GRPO is for tasks whose "
        "answers can be checked and whose solutions nobody has written. Some of these runs shared the "
        "machine with other programs, so their seconds are not compared.",
    ),
    "distillation": Experiment(
        "A model that GRPO trained teaches its base at least 0.9 of its accuracy on the base's own text.",
        "The student reaches less than 0.9 of the teacher's accuracy.",
        _LEARNING["distill"],
        outcome="The claim holds: each student reaches 1.01 to 1.03 of its teacher's accuracy, in as many "
        "seconds as the teacher took. Solutions teach more in fewer seconds where they exist.",
    ),
    "pictures": Experiment(
        "GRPO improves how a model of a million parameters, trained from scratch by SFT, counts shapes in "
        "small pictures.",
        "The difference is within its interval.",
        _LEARNING["pictures"],
        r"\d+",
        outcome="The claim holds: the difference is +0.047 (+0.019 to +0.076), and the form stays right. "
        "GRPO itself began at 0.304 to 0.310. Values are shares of sampled answers, four a problem. GRPO "
        "moves little in so few steps: most answers are still wrong. The recipe was chosen on seed 0, with "
        "the same held-out problems. Other programs shared the machine, so seconds are not compared.",
    ),
    "gcd": _task(
        "gcd",
        "{min_numbers: 2, max_numbers: 2, min_value: 1, max_value: 20}",
        "Reply with the number alone, like this: 4",
        _NUMBER,
        8,
        120,
    ),
    "lcm": _task(
        "lcm",
        "{min_numbers: 2, max_numbers: 2, min_value: 1, max_value: 12}",
        "Reply with the number alone, like this: 12",
        _NUMBER,
        8,
        120,
    ),
}
