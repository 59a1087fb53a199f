"""Experiments on IFEval and GSM8K. Those on models of half a billion parameters and more need a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.evidence.experiment import NO_RISE, Experiment
from benchmarks.evidence.tasks import control_arms, examples, rewards_form
from benchmarks.learning import Stage

_GRPO = "sota-implementations/grpo/grpo.py"

# A calculation with its result, right or wrong.
_CALCULATION = r"[^=\n]*=\s*\$?-?[\d,.]+"
_LAST_STEP = (
    "--config-name=grpo_quickstart",
    "env=jsonl",
    # The id of each problem begins with it, and must not depend on the machine, so the path is relative.
    "env.dataset=benchmarks/evidence/last_step.py:load",
    "env.task_args={path: null}",
    "env.num_envs=4",
    "env.repeats=16",
    "train.total_dialog_turns=768",
    "env.system_prompt='Finish the last calculation.'",
    examples(
        (
            "Tom has 3 bags of 4 pens and loses 2 pens. How many pens are left?\n\n"
            "He had 3*4=12 pens.\nSo he has 12-2=",
            "12-2=10",
        ),
        (
            "A cup costs $5 and a plate twice as much. What do both cost?\n\n"
            "A plate costs 2*5=$10\nBoth cost 10+5=",
            "10+5=15",
        ),
    ),
    "inference_model.max_new_tokens=16",
    "inference_model.temperature=0.7",
    "inference_model.max_model_len=384",
    "optimizer.lr=2e-5",
    "eval.num_problems=300",
    "eval.reward=gsm8k",
    "eval.frequency=0",
    "train.checkpoint_frequency=0",
)
_REWARDS = (*rewards_form(_CALCULATION), "reward.weights={gsm8k: 1.0, form: 0.1}")

# Thoughts and an answer between their tags.
_TAGGED = r"(?s)<think>.*</think>\s*<answer>.*</answer>"

# What a response that ends by itself looks like.
_ENDED = r'(?s).*[.!?]"?'
# Longer responses take a CPU too long. A third to a half of those of the model end before 64 tokens.
_INSTRUCTIONS = (
    "--config-name=grpo_ifeval",
    "model.name=smollm2-135m",
    "env.num_envs=16",
    "env.repeats=8",
    "train.total_dialog_turns=1536",
    "inference_model.max_new_tokens=64",
    "inference_model.max_model_len=768",
    "inference_model.temperature=0.8",
    "inference_model.dtype=float32",
    "train_model.autocast=no",
    # Two runs at a time fit into 24 GB.
    "train.max_tokens_per_microbatch=2048",
    "optimizer.lr=2e-5",
    "eval.num_problems=400",
    "eval.reward=ifeval",
    "eval.frequency=0",
    "train.checkpoint_frequency=0",
)


def _beginning(prompt: str) -> str:
    """Repeat what 64 tokens hold of a prompt, in lower case."""
    return prompt[:250].lower()


def _first_number(prompt: str) -> str:
    """Repeat the calculation that a prompt asks for, with its first number as the result."""
    calculation = prompt.split()[-1]
    return f"{calculation}{re.split(r'[^0-9.]+', calculation.lstrip('($'))[0]}"


def _gsm8k(claim: str, words: Sequence[str], needs: str, published: float | None = None) -> Experiment:
    """Return GRPO on all of GSM8K's test problems, which needs a GPU.

    Args:
        claim: see :class:`Experiment`.
        words: arguments of all arms.
        needs: see :class:`Experiment`.
        published: accuracy that others have published, which the claim includes; None for none.
    """
    common = ("--config-name=grpo_gsm8k", "eval.num_problems=1319", "eval.reward=gsm8k", *words)
    usual = NO_RISE.removesuffix(".")
    return Experiment(
        claim,
        NO_RISE if published is None else f"{usual}, or the interval after training lies below {published}.",
        # Random rewards alone raise some models of this family (Shao et al., 2025, arXiv:2506.10947).
        {"GRPO": (Stage(_GRPO, common),), **control_arms(common, _TAGGED)},
        _TAGGED,
        needs=needs,
        keeps_samples=False,
    )


EXPERIMENTS: dict[str, Experiment] = {
    "IFEval": Experiment(
        "GRPO on composed instructions makes SmolLM2-135M pass more of IFEval's checks, in at most 64 "
        "tokens, and more where a prompt asks for them.",
        f"{NO_RISE.removesuffix('.')}, or the interval of the rise beyond other prompts reaches 0 or below.",
        {"GRPO": (Stage(_GRPO, _INSTRUCTIONS),), **control_arms(_INSTRUCTIONS, _ENDED)},
        _ENDED,
        outcome="The claim holds, narrowly: the rise, its part beyond other prompts and both leads are "
        "above 0. What is learned is to write the markers that a type of instruction wants, such as titles, "
        "postscripts and highlights, often copied from the prompt and repeated. 55 of the 400 answers were "
        "repetitive before training, and 127, 142 and 100 are after it. Without those the rise is "
        "undecided. Some style comes unasked, such as no commas. A copy of the prompt earns more than GRPO, "
        "so an earlier claim is refuted: that GRPO follows more than policies without a model do. The "
        "controls fall below the start, so leads over them say less. Training has IFEval's 25 types and "
        "checks, in other prompts. The prompts are the 400 of 541 that our copy has. The limit of 64 tokens "
        "lowers the start: with 128 it is 0.183. The right form ends like a sentence. Learning rate and "
        "length were chosen on seed 7, with these prompts, before training was in float32, and this claim "
        "was worded after two seeds.",
        policies={
            "beginning of the prompt in lower case": _beginning,
            "one text for all prompts": lambda prompt: '"<<an answer>> this is it."',
        },
        deals=True,
        keeps_samples=False,
        measures=("prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose"),
    ),
    "GSM8K-last": Experiment(
        "GRPO raises how often SmolLM2-135M finishes the last calculation of a shown solution of GSM8K, more "
        "than rewards for form or at random do.",
        NO_RISE,
        {
            "GRPO": (Stage(_GRPO, (*_LAST_STEP, *_REWARDS)),),
            **control_arms(_LAST_STEP, _CALCULATION),
        },
        _CALCULATION,
        outcome="The claim holds for the whole. This is not GSM8K's score: the written solution is shown, "
        "and only its last result is missing, in 300 of the 399 test problems that are short enough. Two "
        "things are learned: the form, and to repeat the calculation that was asked (0.45 of the formed "
        "answers before, 0.69 after). The reward for form does not ask for the second. Whether the model "
        "calculates better is undecided. A trial on seed 7, with 100 of the problems, rose from 0.17 to "
        "0.22 in 8 steps at temperature 1, and the temperature was chosen after it. The calculation 12-2 of "
        "the prompt is among the held-out ones. The claim was worded after the runs.",
        policies={"the calculation, and its first number": _first_number},
        data_key="env.task_args.path",
        keeps_samples=False,
    ),
    "gsm8k-0.5b": _gsm8k(
        "16,000 samples raise Qwen2.5-0.5B-Instruct to 0.502 (published: 43.6 to 50.2).",
        ("model.name=Qwen/Qwen2.5-0.5B-Instruct", "train.total_dialog_turns=16000"),
        "GPU of 24 GB, 23 GB, 0.3 hours",
        0.502,
    ),
    "gsm8k-1.5b-lora": _gsm8k(
        "Adapters of rank 32 raise Qwen2.5-1.5B-Instruct.",
        ("+recipe=gpu_24gb",),
        "GPU of 24 GB, 17 GB, 0.5 hours",
    ),
    "gsm8k-1.5b": _gsm8k(
        "64,000 samples raise Qwen2.5-1.5B-Instruct to 0.796 (published elsewhere: 79.6).",
        ("+recipe=gpu_80gb",),
        "GPU of 80 GB, 56 GB, 1.5 hours",
        0.796,
    ),
    "gsm8k-3b": _gsm8k(
        "64,000 samples raise Qwen2.5-3B-Instruct to 0.861 (published elsewhere: 86.1).",
        (
            "+recipe=gpu_80gb",
            "model.name=Qwen/Qwen2.5-3B-Instruct",
            "train_model.gradient_checkpointing=true",
        ),
        "GPU of 80 GB, 75 GB, 2.5 hours",
        0.861,
    ),
}
