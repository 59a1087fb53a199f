"""Experiments on what a task teaches, with controls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.evidence.experiment import NO_RISE, Experiment
from benchmarks.evidence.policies import Policy, question_of
from benchmarks.learning import EXPERIMENTS as _LEARNING
from benchmarks.learning import Stage

_GRPO, _SFT = "sota-implementations/grpo/grpo.py", "sota-implementations/sft/sft.py"
_CONTROLS = Path(__file__).resolve().parent / "controls.py"
_BEST_OF = 8
# All arms begin with the same model, which the first one alone evaluates.
_LATER = "eval.at_start=false"
# Of a round: responses of GRPO, and solutions of SFT.
_RESPONSES, _SOLUTIONS = 64, 8


def _task(
    task: str,
    skill: str,
    shape: str,
    rounds: int,
    words: Sequence[str],
    outcome: str,
    held_out: int = 300,
    seeds: int = 3,
    fresh: Sequence[int] = (),
    trivial: str = "",
    samples: int = 16,
    policies: Mapping[str, Policy] | None = None,
) -> Experiment:
    """Return GRPO on a task of reasoning_gym beside its controls.

    All arms begin with the same model, so the first one alone evaluates it. Its run with seed 0 alone
    measures pass@8, which takes longer than the rest of a run: vLLM shares whole blocks of 32 tokens, so
    every sample computes the end of its prompt again.

    Args:
        task: name of the task.
        skill: what it asks for, in words.
        shape: regular expression of an answer in the right form.
        rounds: optimizer steps of each command.
        words: arguments of the task, prompt, lengths and learning rate, for every arm.
        outcome: see :class:`Experiment`.
        held_out: number of held-out problems.
        seeds: see :class:`Experiment`.
        fresh: see :class:`Experiment`.
        trivial: further criterion, what a policy that ignores the question comes to; empty for none.
        samples: responses to each prompt. Many to few prompts where these take most of the time of a step.
        policies: see :class:`Experiment`; None for none.
    """
    common = (
        "--config-name=grpo_quickstart",
        "env=reasoning_gym",
        f"env.task={task}",
        *words,
        f"eval.num_problems={held_out}",
        "eval.reward=reasoning_gym",
        "eval.frequency=0",
        "train.checkpoint_frequency=0",
    )
    grpo = (*common, f"train.total_dialog_turns={rounds * _RESPONSES}")
    grpo += (f"env.num_envs={_RESPONSES // samples}", f"env.repeats={samples}")
    formed = rewards_form(shape)
    own = (*grpo, *formed, "reward.weights={reasoning_gym: 1.0, form: 0.1}")
    solutions = (*common, "+method=sft", f"env.num_envs={_SOLUTIONS}")
    sft = Stage(_SFT, (*solutions, f"train.total_dialog_turns={rounds * _SOLUTIONS}", _LATER))
    return Experiment(
        f"GRPO teaches SmolLM2-135M {skill} by right answers, not by form or chance.",
        f"{NO_RISE.removesuffix('.')}{trivial}.",
        {
            "GRPO": (Stage(_GRPO, own),),
            **control_arms(grpo, shape),
            "SFT": (sft,),
            "SFT, then GRPO": (sft, Stage(_GRPO, (*own, _LATER))),
        },
        shape,
        seeds,
        outcome=outcome,
        fresh=fresh,
        once=(f"eval.pass_at_k={_BEST_OF}", "eval.temperature=1.0"),
        contrasts=(("SFT, then GRPO", "SFT"),),
        policies={} if policies is None else policies,
    )


def _first_name(prompt: str) -> str:
    return question_of(prompt).split()[0]


def control_arms(
    words: Sequence[str], shape: str, configured: Sequence[str] = ()
) -> dict[str, tuple[Stage, ...]]:
    """Return the arms that are rewarded for the form of an answer alone, and at random.

    Args:
        words: arguments of GRPO's own arm, without its rewards.
        shape: regular expression of an answer in the right form.
        configured: rewards of the configuration, which get weight 0.
    """
    none = "".join(f", {name}: 0.0" for name in configured)
    drawn = (f"reward.functions={{chance: '{_CONTROLS}:chance'}}", f"reward.weights={{chance: 1.0{none}}}")
    formed = (*rewards_form(shape), f"reward.weights={{form: 1.0{none}}}")
    return {
        "reward for form": (Stage(_GRPO, (*words, *formed, _LATER)),),
        "random reward": (Stage(_GRPO, (*words, *drawn, _LATER)),),
    }


def rewards_form(shape: str) -> tuple[str, str]:
    """Return the words that add a reward for the form of an answer."""
    pattern = shape.replace("'", r"\'")
    return (
        f"reward.functions={{form: '{_CONTROLS}:form'}}",
        f"reward.args={{form: {{pattern: '{pattern}'}}}}",
    )


def examples(*turns: tuple[str, str]) -> str:
    """Return the word that shows questions with their answers, as turns of the chat, before each question."""
    shown = "".join(
        f"{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n<|im_start|>user\n"
        for question, answer in turns
    )
    return f'env.prompt_template="{shown}{{question}}"'


REVERSAL = _task(
    "word_sequence_reversal",
    "to write two words in the other order (word_sequence_reversal of reasoning_gym)",
    r"[^\s,]+, [^\s,]+",
    12,
    (
        "env.task_args={min_words: 2, max_words: 2}",
        "env.system_prompt='Reply with two words.'",
        examples(
            ("Reverse this list of words: tea, cup", "cup, tea"),
            ("Reverse this list of words: Max, runs", "runs, Max"),
        ),
        "inference_model.max_new_tokens=8",
        "inference_model.max_model_len=128",
        "optimizer.lr=2e-5",
    ),
    "The claim holds. Three seeds had left the reward for form undecided, and two were added; five fresh "
    "ones decide it alone. That reward comes to 0.010 to 0.797; where it fails, words mostly stay "
    "in their order. SFT on 96 written solutions ends above GRPO. Learning rate and length are those of the "
    "needle.",
    seeds=5,
    fresh=range(5, 10),
)


EXPERIMENTS: dict[str, Experiment] = {
    "sums": Experiment(
        "GRPO teaches SmolLM2-135M sums of two numbers up to 10 by rewards that know the answer, not by form "
        "or chance, and more than supervised fine-tuning does.",
        f"{NO_RISE.removesuffix('.')}, or SFT on as many rounds reaches as much.",
        _LEARNING["sft"]
        | control_arms(
            (*_LEARNING["sft"]["GRPO"][0].words, "eval.reward=reasoning_gym"),
            r"\d+ \+ \d+ = \d+",
            ("reasoning_gym", "closeness", "bare_number"),
        ),
        outcome="The first part holds, but most of the rise is form: rewards for right and nearly right "
        "answers add 0.103 to what the reward for form teaches. The second part is refuted: 128 written "
        "solutions teach more, and GRPO after them adds little.",
        contrasts=(("SFT, then GRPO", "SFT"),),
    ),
    "needle": _task(
        "needle_haystack",
        "to name who does something in a text of three statements (needle_haystack of reasoning_gym)",
        r"[A-Z][^\s.]*",
        12,
        (
            "env.task_args={min_num_statements: 3, max_num_statements: 3}",
            "env.system_prompt='Reply with a name.'",
            examples(
                ("Ada likes tea. Tom mends socks. \nWho mends socks? Reply only with a name.", "Tom"),
                ("Zoe paints boats. Max fears rain. \nWho paints boats? Reply only with a name.", "Zoe"),
            ),
            "inference_model.max_new_tokens=6",
            "inference_model.max_model_len=166",
            "optimizer.lr=2e-5",
        ),
        "Undecided. With all eight seeds the claim holds. But seeds 8 to 11 were run to confirm it: alone "
        "they decide the random reward, not the reward for form. Reading is not shown: one of the three "
        "names at random is right on a third, and the first name on as much as GRPO. Seeds 8 and 10 answer "
        "mostly the first and the last name; the others come to 0.437 to 0.530. SFT on 96 written solutions "
        "is above GRPO, by the fourth seed only. Learning rate, length and prompt were chosen on seed 7, "
        "with 100 of these problems.",
        seeds=4,
        # Not the one on which learning rate and length were chosen.
        fresh=range(8, 12),
        policies={"the first name": _first_name},
    ),
    "reversal": REVERSAL,
    "filter": _task(
        "number_filtering",
        "to take numbers that are too large or too small out of a list of two (number_filtering of "
        "reasoning_gym)",
        r"\[('-?\d+'(, '-?\d+')?)?\]",
        12,
        (
            "env.task_args={min_numbers: 2, max_numbers: 2, min_decimals: 0, max_decimals: 0, "
            "min_value: -20, max_value: 20}",
            "env.system_prompt='Reply with a list.'",
            examples(
                ("Remove all numbers larger than 5 in this list: ['3', '8']", "['3']"),
                ("Remove all numbers smaller than 0 in this list: ['9', '7']", "['9', '7']"),
            ),
            "inference_model.max_new_tokens=10",
            "inference_model.max_model_len=128",
            "optimizer.lr=2e-5",
        ),
        "Refuted by the first run (seed 1): after eight steps GRPO kept the first number, which is right on "
        "0.413 of these problems; keeping the second is right on 0.477.",
        trivial=", or GRPO is not above 0.45, about what keeping the same one of the numbers gives",
    ),
    "multiplication": _task(
        "basic_arithmetic",
        "products of two numbers up to 10 (basic_arithmetic of reasoning_gym)",
        r"\d+ \* \d+ = \d+\.?",
        6,
        (
            "env.task_args={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1, operators: ['*'], "
            "allow_parentheses: false, format_style: natural}",
            "env.answer_format=equation",
            "env.system_prompt='Reply like this: 2 * 4 = 8'",
            "inference_model.max_new_tokens=12",
            "inference_model.max_model_len=64",
            "optimizer.lr=3e-5",
        ),
        "Refuted: GRPO came to 0.775, 0.055 and 0.150; with the last two seeds few answers had the form. The "
        "form allows a final dot, which the grader does not: with it the reward for form came to 0.605, "
        "0.645 and 0.780 (these responses were not kept), so the model knew the table and lacked the form. "
        "48 written solutions teach that. "
        "The prompt shows one of the products. Learning rate, length and prompt were chosen on seed 7.",
        held_out=200,
    ),
    "differences": _task(
        "basic_arithmetic",
        "differences of two numbers up to 10 (basic_arithmetic of reasoning_gym)",
        r"\d+ - \d+ = -?\d+",
        16,
        (
            "env.task_args={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1, operators: ['-'], "
            "allow_parentheses: false, format_style: natural}",
            "env.answer_format=equation",
            "env.system_prompt='Reply like this: 9 - 4 = 5'",
            examples(("What is 9 - 4?", "9 - 4 = 5"), ("Calculate 3 - 8.", "3 - 8 = -5")),
            "inference_model.max_new_tokens=12",
            "inference_model.max_model_len=112",
            "optimizer.lr=2e-5",
        ),
        "The claim holds with the five planned seeds. Learning rate, length and prompt were "
        "chosen on seed 7, with another example and 100 of these problems. The lead of SFT on 128 written "
        "solutions is undecided. GRPO after it takes some of it back.",
        seeds=5,
        samples=8,
    ),
    "two-digit-sums": _task(
        "basic_arithmetic",
        "sums of two numbers of two digits (basic_arithmetic of reasoning_gym)",
        r"\d+ \+ \d+ = \d+",
        16,
        (
            "env.task_args={min_terms: 2, max_terms: 2, min_digits: 2, max_digits: 2, operators: ['+'], "
            "allow_parentheses: false, format_style: natural}",
            "env.answer_format=equation",
            "env.system_prompt='Reply like this: 41 + 25 = 66'",
            examples(("What is 41 + 25?", "41 + 25 = 66"), ("Calculate 32 + 17.", "32 + 17 = 49")),
            "inference_model.max_new_tokens=16",
            "inference_model.max_model_len=144",
            "optimizer.lr=2e-5",
        ),
        "The claim holds. The intervals of SFT's lead, on 128 written solutions, and of what GRPO changes "
        "after it include 0. Learning rate, length and prompt were chosen on seed 7, with 100 of these "
        "problems.",
        samples=8,
    ),
}
