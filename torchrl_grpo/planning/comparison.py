"""The lines of ``dry_run=true`` about time: the best two plans, their predicted seconds, and the reason."""

from __future__ import annotations

from torchrl_grpo.planning import speeds
from torchrl_grpo.planning.cost import Cost, cost_of
from torchrl_grpo.planning.plan import aligned
from torchrl_grpo.planning.planned import Planned
from torchrl_grpo.planning.sizes import EQUALLY_FAST

_PHASES = ("generate", "prepare", "train", "publish")
# Differences below this many seconds are not named.
_NAMED_S = 0.05


def compare(chosen: Planned, others: list[Planned]) -> str:
    """Return a table of the chosen plan and the fastest of the others, and why it was chosen; or nothing.

    Nothing is shown on a CPU, on GPUs of other machines, for a model of unknown shape, and for engines other
    than vLLM, whose time was not measured on a GPU.

    Args:
        chosen: the plan of the run.
        others: plans that were possible.
    """
    first = cost_of(chosen)
    if first is None or not chosen.cfg.inference_model.engine.has_known_needs:
        return ""
    costs = [(cost, other) for other in others if (cost := cost_of(other))]
    second = min(costs, key=lambda pair: (chosen.resembles(pair[1]), pair[0].step), default=None)
    plans = [(first, chosen), *([second] if second else [])]
    rows: list[tuple[str, ...]] = [("plan", "share", "tokens", *_PHASES, "seconds")]
    for number, (cost, planned) in enumerate(plans, 1):
        share = f"{planned.plan.gpu_memory_utilization:.2f}" if planned.vllm_on_gpus else "-"
        phases = (f"{getattr(cost, phase):.2f}" for phase in _PHASES)
        words = (f"{number}. {_words(planned)}", share, str(planned.budget.tokens), *phases)
        rows.append((*words, f"{cost.step:.2f}"))
    lines = [
        "\nPredicted seconds of a round whose texts are as long as the configuration allows, without",
        "rewards, evaluations and checkpoints. The speeds are those of",
        f"{speeds.of(chosen.hardware).source}.",
    ]
    if second:
        lines.append(f"The first plan was chosen: {_why(first, *second, chosen)}.")
    return "\n".join(lines) + "\n" + aligned(rows, frozenset(range(1, len(rows[0]))))


def _words(planned: Planned) -> str:
    plan = planned.plan
    ranks, engines = len(plan.train.devices), len(plan.inference.devices)
    shards = " in shards" if planned.cfg.train_model.parallelism not in ("auto", "ddp") else ""
    if not plan.colocated:
        return f"{ranks} train{shards}, {engines} generate"
    state = "the engine sleeps" if plan.sleeps else "awake"
    if ranks == 1:
        return f"one GPU trains and generates, {state}"
    return f"{ranks} GPUs train{shards} and generate, {state}"


def _why(first: Cost, second: Cost, other: Planned, chosen: Planned) -> str:
    if second.step < EQUALLY_FAST * first.step:
        better = ""
        if other.plan.sleeps and not chosen.plan.sleeps:
            better = ", and its engine need not sleep"
        elif len(other.plan.idle) > len(chosen.plan.idle):
            better = ", and it leaves fewer GPUs idle"
        elif other.cfg.train_model.parallelism == "fsdp2" != chosen.cfg.train_model.parallelism:
            better = ", and its ranks need not exchange weights"
        return f"both take about as long{better}"
    gains = {phase: getattr(second, phase) - getattr(first, phase) for phase in _PHASES}
    named = [
        f"{phase} {abs(gain):.1f} s {'less' if gain > 0 else 'more'}"
        for phase, gain in gains.items()
        if abs(gain) > _NAMED_S
    ]
    return f"it is {second.step / first.step:.2f} times as fast ({', '.join(named)})"
