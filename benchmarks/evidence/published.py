"""Experiments on IFEval and GSM8K. Those on models of half a billion parameters and more need a GPU."""

from __future__ import annotations

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
    # Names of problems begin with it, so it is relative to the root of the project.
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

# What a response that ends by itself looks like.
_ENDED = r'(?s).*[.!?]"?'
# Longer responses take a CPU too long. Almost half of those of the model end before 64 tokens.
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
    "train_model.autocast=bf16",
    "optimizer.lr=2e-5",
    "eval.num_problems=400",
    "eval.reward=ifeval",
    "eval.frequency=0",
    "train.checkpoint_frequency=0",
)


def _gsm8k(claim: str, refuted_by: str, words: Sequence[str], needs: str) -> Experiment:
    """Return GRPO on all of GSM8K's test problems, which needs a GPU."""
    common = ("--config-name=grpo_gsm8k", "eval.num_problems=1319")
    return Experiment(claim, refuted_by, {"GRPO": (Stage(_GRPO, (*common, *words)),)}, needs=needs)


EXPERIMENTS: dict[str, Experiment] = {
    "IFEval": Experiment(
        "GRPO on composed instructions teaches SmolLM2-135M to follow more of IFEval's in at most 64 tokens, "
        "by instructions that it follows, not by form or chance.",
        NO_RISE,
        {"GRPO": (Stage(_GRPO, _INSTRUCTIONS),), **control_arms(_INSTRUCTIONS, _ENDED)},
        _ENDED,
        outcome="The claim holds, with the three seeds that were planned; over seeds alone, instruction "
        "loose is undecided. IFEval does not grade what a response says: before training 17 % of the right "
        "ones had fewer than 12 words, and after it 52 %, some of them only the phrase that they had to end "
        "with. With 128 tokens the model before training follows 0.183. A trainer in bfloat16 beside an "
        "engine in float32 halves the time of a step, and their probabilities differ. The recipe was chosen "
        "on seed 7, with these prompts. SFT was not run: nobody has written solutions.",
        keeps_samples=False,
        measures=("prompt_strict", "prompt_loose", "instruction_strict", "instruction_loose"),
    ),
    "GSM8K-last": Experiment(
        "GRPO teaches SmolLM2-135M the last calculation of a solution of GSM8K by right answers, not by form "
        "or chance.",
        NO_RISE,
        {
            "GRPO": (Stage(_GRPO, (*_LAST_STEP, *_REWARDS)),),
            **control_arms(_LAST_STEP, _CALCULATION),
        },
        _CALCULATION,
        outcome="The claim holds, with the three seeds that were planned. Three things are learned: the "
        "form; to finish the calculation that was asked, which 0.45 of the answers in the right form do "
        "before training and 0.69 after it; and results, which are right in 0.32 and 0.40 of those. The "
        "last number of a response is graded. Problems are short ones whose last marked calculation gives "
        "the answer. A trial on seed 7, with 100 of the problems, rose from 0.17 to 0.22 in 8 steps at "
        "temperature 1; the temperature was chosen after it.",
        data_key="env.task_args.path",
        keeps_samples=False,
    ),
    "gsm8k-0.5b": _gsm8k(
        "16,000 samples raise Qwen2.5-0.5B-Instruct (published: 43.6 to 50.2).",
        "The interval of the rise includes 0.",
        ("model.name=Qwen/Qwen2.5-0.5B-Instruct", "train.total_dialog_turns=16000"),
        "GPU of 24 GB, 23 GB, 0.3 hours",
    ),
    "gsm8k-1.5b-lora": _gsm8k(
        "Adapters of rank 32 raise Qwen2.5-1.5B-Instruct.",
        "The interval of the rise includes 0.",
        ("+recipe=gpu_24gb",),
        "GPU of 24 GB, 17 GB, 0.5 hours",
    ),
    "gsm8k-1.5b": _gsm8k(
        "64,000 samples raise Qwen2.5-1.5B-Instruct (published elsewhere: 79.6).",
        "The interval of the rise includes 0.",
        ("+recipe=gpu_80gb",),
        "GPU of 80 GB, 56 GB, 1.5 hours",
    ),
    "gsm8k-3b": _gsm8k(
        "64,000 samples raise Qwen2.5-3B-Instruct (published elsewhere: 86.1).",
        "The interval of the rise includes 0.",
        (
            "+recipe=gpu_80gb",
            "model.name=Qwen/Qwen2.5-3B-Instruct",
            "train_model.gradient_checkpointing=true",
        ),
        "GPU of 80 GB, 75 GB, 2.5 hours",
    ),
}
