"""``grpo.py`` with TRL's ``GRPOTrainer`` in place of this project's loop; its words are those of ``grpo.py``.

The same are: model, problems and their order, rewards, samples, loss (``policy=grpo`` is TRL's
``loss_type=dapo``, tests/objectives/test_peers.py), AdamW and its schedule, and who grades held-out
responses. Models are kept while TRL trains and graded afterwards, so that the seconds of a step are those of
generating and training alone. TRL generates with transformers, because its vLLM does not start on a CPU. Its
micro-batches are its own, of eight responses, and it gets no gradient checkpointing, which saves memory that
nobody needs here. Words that it cannot follow are refused.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Where this package is, which is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_TRAINER = "TRL GRPOTrainer, generation by transformers"


def run(cfg: Any, run_dir: Path) -> dict[str, Any]:
    """Train with TRL, grade the models, and write the files of a run that a record is made of.

    Args:
        cfg: checked configuration of ``grpo.py``, as :class:`torchrl_grpo.config.Config`.
        run_dir: folder of the run.

    Returns:
        The entries of ``summary.json``.
    """
    from torchrl_grpo.config.derived import rounds
    from torchrl_grpo.data.load import load
    from torchrl_grpo.errors import ConfigError
    from torchrl_grpo.observe.metrics import EvaluationWriter, MetricsWriter
    from torchrl_grpo.observe.report import SUMMARY
    from torchrl_grpo.planning import cores
    from torchrl_grpo.rewards.registry import of_run
    from torchrl_grpo.training.job import evaluate_problems

    # As in a run of this project, and before torch is imported.
    cores.wait_passively()
    default, train = type(cfg)(), cfg.train
    if (
        cfg.policy != default.policy
        or (cfg.train_model.autocast, cfg.train_model.lora.rank, cfg.optimizer.name) != ("no", 0, "adamw")
        or (cfg.env.sampling, train.epochs, train.optim_batch_size)
        != ("uniform", 1, default.train.optim_batch_size)
        or (cfg.env.environment, cfg.env.tools) != (None, [])
    ):
        raise ConfigError(
            "TRL is given float32, AdamW, policy=grpo and one turn only; write none of their other keys"
        )
    problems = load(cfg)
    _record(cfg, run_dir)
    with closing(of_run(cfg, problems, run_dir)) as reward_set:
        seconds = _train(cfg, run_dir, problems, reward_set)
    steps = rounds(cfg)
    assert len(seconds) == steps
    with closing(MetricsWriter(run_dir)) as metrics, closing(EvaluationWriter(run_dir)) as evaluations:
        for step in range(steps + 1):
            values = {} if step == 0 else {"time/step_s": seconds[step - 1]}
            if _is_graded(cfg, step, steps):
                model = replace(cfg.model, name=str(_model(run_dir, step))) if step else cfg.model
                graded, rows = evaluate_problems(replace(cfg, model=model), None)
                if 0 < step < steps:
                    # The models of a few runs would fill a disk.
                    shutil.rmtree(_model(run_dir, step).parent)
                values |= graded | {"time/eval_s": 0.0}
                evaluations.write(step, rows)
            if values:
                metrics.write(step, values)
    turns = steps * cfg.env.num_envs * cfg.env.repeats
    summary = {"steps": steps, "seconds": sum(seconds), "dialog_turns": turns}
    (run_dir / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def _record(cfg: Any, run_dir: Path) -> None:
    """Write what a report says of the run, with TRL's version."""
    from torchrl_grpo.report import about

    about.record(run_dir, cfg, _TRAINER)
    recorded = json.loads((run_dir / about.RECORD).read_text())
    recorded["versions"]["trl"] = version("trl")
    (run_dir / about.RECORD).write_text(json.dumps(recorded, indent=1) + "\n")


def _model(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / str(step) / "model"


def _is_graded(cfg: Any, step: int, steps: int) -> bool:
    if step == 0:
        return bool(cfg.eval.at_start)
    return step == steps or (cfg.eval.frequency > 0 and step % cfg.eval.frequency == 0)


def _train(cfg: Any, run_dir: Path, problems: Any, reward_set: Any) -> list[float]:
    """Train, keep the models that will be graded, and return the seconds of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.workload import TRL_IS_QUIET, use_all_cores
    from torchrl_grpo.config.derived import rounds
    from torchrl_grpo.envs.stream import PromptStream
    from torchrl_grpo.models import loading
    from torchrl_grpo.observe.metrics import RolloutWriter
    from torchrl_grpo.training.optimizer_step import learning_rate_factor

    source, steps = loading.resolve(cfg.model), rounds(cfg)
    tokenizer = AutoTokenizer.from_pretrained(source)
    stream = PromptStream(problems.train, cfg.seed, cfg.env.shuffle)
    examples = [stream.at(number) for number in range(steps * cfg.env.num_envs)]
    prompts = [[dict(message) for message in example.messages] for example in examples]
    rows = [{"prompt": prompt, "number": number} for number, prompt in enumerate(prompts)]
    seconds: list[float] = []

    def score(completions: Sequence[Any], number: Sequence[int], **_: Any) -> list[float]:
        texts, own = [completion[0]["content"] for completion in completions], [examples[n] for n in number]
        scores = reward_set.score(texts, own)
        rollouts.write(
            len(seconds) + 1,
            [
                {
                    "id": example.id,
                    "prompt": example.messages[-1]["content"],
                    "response": text,
                    "rewards": each.parts,
                    "reward": each.total,
                    "advantage": None,
                    "policy_version": len(seconds),
                }
                for example, text, each in zip(own, texts, scores, strict=True)
            ],
        )
        return [each.total for each in scores]

    class Clock(TrainerCallback):
        """Takes the time of each step, and keeps models outside of it."""

        began = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            seconds.append(time.perf_counter() - self.began)
            if _is_graded(cfg, state.global_step, steps):
                model.save_pretrained(_model(run_dir, state.global_step))
                tokenizer.save_pretrained(_model(run_dir, state.global_step))
            self.began = time.perf_counter()

    batch = cfg.env.num_envs * cfg.env.repeats
    size = math.gcd(8, batch)
    use_all_cores()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    own = cfg.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), own.lr, own.betas, own.eps, own.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, steps, own)
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=GRPOConfig(
            output_dir=str(run_dir / "trl"),
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            **TRL_IS_QUIET,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=batch // size,
            num_generations=cfg.env.repeats,
            max_completion_length=cfg.inference_model.max_new_tokens,
            temperature=cfg.inference_model.temperature,
            shuffle_dataset=False,
            max_steps=steps,
            max_grad_norm=own.max_grad_norm,
            loss_type="dapo",
            seed=cfg.seed,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
        optimizers=(optimizer, schedule),
    )
    with closing(RolloutWriter(run_dir)) as rollouts:
        trainer.train()
    return seconds


if __name__ == "__main__":
    from torchrl_grpo.cli.main import Command, main

    main(Command(run="benchmarks.evidence.with_trl:run"))
