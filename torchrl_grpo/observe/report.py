"""Reports the results of a run: ``summary.json``, the closing message, and ``report.png``.

The picture is drawn from ``metrics.jsonl``, so it can be drawn again at any time. This module does not
compare runs. :mod:`torchrl_grpo.report` writes ``report.html``.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torchrl_grpo.observe import rules
from torchrl_grpo.observe.guards import Finding
from torchrl_grpo.observe.held_out import held_out_metric
from torchrl_grpo.observe.metrics import DISCARDED, EVALUATIONS, METRICS, ROLLOUTS, jsonable, read_jsonl
from torchrl_grpo.runtime.files.shared_files import replace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUMMARY = "summary.json"
PICTURE = "report.png"
PAGE = "report.html"

_PLACES = (
    (METRICS, "metrics, a line per optimizer step"),
    (ROLLOUTS, "responses with their rewards"),
    (DISCARDED, "responses of groups that were thrown away, with the reason"),
    (EVALUATIONS, "responses to held-out problems with their rewards"),
    (SUMMARY, "these figures"),
    (PAGE, "curves, rollouts, problems and findings, for a browser"),
    (PICTURE, "reward and held-out result over steps"),
    ("checkpoints", "checkpoints; <step>/model loads with transformers"),
    ("csv", "CSV scalars"),
    ("tensorboard", "TensorBoard events"),
    ("wandb", "Weights & Biases run"),
    (".hydra", "the configuration"),
)
NO_SIGNAL = (
    "warning: in every group all responses had the same reward, so rewards taught the model nothing. Take "
    "easier problems (env.task_args, or another env.dataset), more samples per problem "
    "(env.repeats), a reward that also grades partial success (reward.weights), or a higher "
    "inference_model.temperature."
)
_BLUE, _ORANGE, _INK, _PALE = "#2563a8", "#c2571a", "#2b2f36", "#8a919c"


def summary(
    run_dir: str | os.PathLike[str],
    *,
    accuracy_before: float | None,
    accuracy_after: float | None,
    accuracy_ci95: tuple[float, float] | None,
    steps: int,
    seconds: float,
    peak_memory_gib: float,
    extras: Mapping[str, Any] | None = None,
    any_signal: bool = True,
    kept_best: bool = False,
    findings: Sequence[Finding] = (),
    sample: Sequence[str] = (),
    write_page: Callable[[], object] = lambda: None,
    stream: TextIO | None = None,
) -> Path:
    """Write ``summary.json`` atomically and print the closing message.

    Call this function after :func:`plot`, because the message lists the files that exist.

    Args:
        run_dir: folder of the run.
        accuracy_before: held-out accuracy before training; None if it was not measured.
        accuracy_after: held-out accuracy at the end; None if it was not measured.
        accuracy_ci95: 95 % interval of ``accuracy_after``; None if it was not measured.
        steps: number of optimizer steps of the whole run.
        seconds: duration of the whole run in seconds.
        peak_memory_gib: largest resident memory in GiB.
        extras: additional entries of the file.
        any_signal: whether any group had responses with different rewards. If false, the message advises what
            to change, unless a finding has the cause.
        kept_best: whether the message names the checkpoint of the best held-out value.
        findings: what the guards found and what still holds; the message repeats it.
        sample: lines that show a held-out response before and after training.
        write_page: function that writes ``report.html``, which reads ``summary.json``.
        stream: stream to print to; None is stdout.

    Returns:
        Path of ``summary.json``.

    Raises:
        ValueError: a key of ``extras`` is one of the standard entries.
    """
    entries: dict[str, Any] = {
        "accuracy_before": accuracy_before,
        "accuracy_after": accuracy_after,
        "accuracy_ci95": accuracy_ci95,
        "steps": steps,
        "seconds": round(seconds, 3),
        "peak_memory_gib": round(peak_memory_gib, 3),
    }
    hidden = sorted(entries.keys() & (extras or {}).keys())
    if hidden:
        raise ValueError(f"extras must not hide {', '.join(hidden)}.")
    entries.update(extras or {})
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SUMMARY
    replace(path, json.dumps(jsonable(entries), indent=2, allow_nan=False) + "\n")
    write_page()
    warnings = _warnings(findings, any_signal or steps == 0)
    text = "\n".join([closing_words(folder, entries, kept_best, sample), *warnings])
    print(text, file=sys.stdout if stream is None else stream, flush=True)
    return path


def _warnings(findings: Sequence[Finding], any_signal: bool) -> list[str]:
    if any_signal:
        return [str(finding) for finding in findings]
    # Without any signal at all, this is said of the whole run.
    others = [finding for finding in findings if finding.rule is not rules.NO_SIGNAL]
    explained = any(finding.rule.name in rules.NO_SIGNAL.explained_by for finding in others)
    return [*map(str, others), *([] if explained else [NO_SIGNAL])]


def of_ended_run(run_dir: Path, step: int) -> dict[str, Any] | None:
    """Return the entries of ``summary.json`` if the run ended with optimizer step ``step``, else None."""
    path = run_dir / SUMMARY
    try:
        entries = json.loads(path.read_text()) if path.is_file() else None
    except (ValueError, RecursionError):
        # The file is incomplete or damaged. The run continues from its checkpoint and writes the file again.
        return None
    return entries if isinstance(entries, dict) and entries.get("steps") == step else None


def closing_words(
    run_dir: str | os.PathLike[str],
    entries: Mapping[str, Any],
    kept_best: bool = False,
    sample: Sequence[str] = (),
) -> str:
    """Return the message at the end of a run: its results and its files.

    Args:
        run_dir: folder of the run. The message names only files that exist in it.
        entries: entries of ``summary.json``.
        kept_best: whether to name the checkpoint of the best held-out value.
        sample: lines that show a held-out response before and after training.

    Returns:
        Several lines without a final newline.
    """
    folder = Path(run_dir).resolve()
    kinds = {"accuracy": "accuracy", "primary": "reward", "loss": "loss"}
    kind = next((name for name in kinds if entries.get(f"{name}_after") is not None), "accuracy")
    before, after, interval = (entries.get(f"{kind}_{name}") for name in ("before", "after", "ci95"))
    lines = ["", "Done."]
    if after is not None:
        text = f"{after:.3f}" if before is None else f"{before:.3f} -> {after:.3f}"
        if interval is not None and None not in interval:
            text += f"   (95 % interval {interval[0]:.3f} to {interval[1]:.3f})"
        if kind == "loss":
            perplexities = [
                f"{math.exp(min(loss, 700.0)):.3f}" for loss in (before, after) if loss is not None
            ]
            text += f"   (perplexity {' -> '.join(perplexities)})"
        lines.append(f"  held-out {kinds[kind]:<8}  {text}")
    if entries.get("change") is not None:
        lines.append(f"  change             {_change(entries['change'], entries['change_ci95'])}")
    if after is not None and "grader" in entries:
        lines.append(f"  graded by          {entries['grader']}")
    if kept_best and entries["best_value"] is not None:
        step = entries["best_step"]
        where = f"at step {step}" if step else "before training"
        if (folder / f"checkpoints/{step}").is_dir():
            where += f", kept in checkpoints/{step}"
        elif step:
            where += ", whose checkpoint is not there"
        best = -entries["best_value"] if kind == "loss" else entries["best_value"]
        lines.append(f"  best held-out      {best:.3f}   {where}")
    minutes, seconds = divmod(round(entries["seconds"]), 60)
    early = f"; {entries['ended_by']} ended the run" if entries.get("ended_by") else ""
    lines.append(f"  optimizer steps    {entries['steps']}   in {minutes} min {seconds:02d} s{early}")
    lines.append(f"  peak memory        {entries['peak_memory_gib']:.2f} GiB")
    if entries.get("reward_errors"):
        lines.append(f"  failed rewards     {entries['reward_errors']}   calls; the log has each")
    lines += [*sample, f"Written to {folder}"]
    there = [(name, what) for name, what in _PLACES if (folder / name).exists()]
    width = max((len(name) for name, _ in there), default=0)
    lines += [f"  {name:<{width}}  {what}" for name, what in there]
    return "\n".join(lines)


def _change(value: float, bounds: tuple[float, float]) -> str:
    """Describe the difference of two evaluations on the same problems."""
    low, high = bounds
    if low == high == 0:
        return f"{value:+.3f}, the same on each held-out problem"
    # A single problem has no interval.
    interval = f"   (95 % interval {low:+.3f} to {high:+.3f})" if math.isfinite(low) else ""
    if low > 0 or high < 0:
        return f"{value:+.3f}{interval}, more than chance"
    return f"{value:+.3f}{interval}, may be chance; eval.num_problems or eval.samples narrow the interval"


def plot(run_dir: str | os.PathLike[str], grader: str = "") -> Path:
    """Draw ``report.png`` from ``metrics.jsonl``: reward and held-out accuracy over optimizer steps.

    The panels show ``reward/mean``, and the held-out value with ``_low`` and ``_high``. A panel without data
    shows a note.

    Args:
        run_dir: folder of the run.
        grader: what graded the evaluation, for the title.

    Returns:
        Path of the picture.

    Raises:
        OSError: there is no ``metrics.jsonl``.
    """
    # Import here, because the import takes a second and only the end of a run draws. Avoid pyplot, which
    # looks for a display and keeps figures after this call.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    folder = Path(run_dir)
    rows = read_jsonl(folder / METRICS)
    path = folder / PICTURE
    aside = folder / f".{os.getpid()}.{PICTURE}"
    # Names of folders and rewards are no formulas, whatever dollar signs they have.
    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(8, 7), dpi=150, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        upper, lower = figure.subplots(2, 1, sharex=True)
        figure.suptitle(folder.resolve().name, x=0.02, ha="left", fontsize=10, color=_PALE)
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["left", "bottom"]].set_color(_PALE)
            axes.tick_params(colors=_INK, labelsize=9)
            axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
            axes.set_axisbelow(True)
        _draw_reward(upper, rows)
        _draw_held_out(lower, rows, grader)
        lower.set_xlabel("optimizer step", color=_INK)
        lower.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.savefig(aside, format="png")
    os.replace(aside, path)
    return path


def _column(rows: list[dict[str, Any]], *names: str) -> tuple[list[int], list[list[float]]]:
    """Return the steps at which every name has a number, and one list of numbers per name."""
    kept = [row for row in rows if all(row.get(name) is not None for name in names)]
    return [row["step"] for row in kept], [[row[name] for row in kept] for name in names]


def _smooth(values: list[float], window: int) -> list[float]:
    """Return a centered moving mean, which uses fewer neighbors at both ends."""
    reach = window // 2
    near = [values[max(0, here - reach) : here + reach + 1] for here in range(len(values))]
    return [sum(some) / len(some) for some in near]


def _heading(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, color=_INK, fontweight="bold")


def _empty(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=_PALE)


def _draw_reward(axes: Axes, rows: list[dict[str, Any]]) -> None:
    _heading(axes, "Mean reward of the training responses")
    steps, (rewards,) = _column(rows, "reward/mean")
    losses = _column(rows, "loss/total")
    if not steps and losses[0]:
        # Supervised fine-tuning has no rewards.
        _heading(axes, "Loss: negative log-likelihood of the solutions, nats per token")
        steps, (rewards,) = losses
    if not steps:
        _empty(axes, "no optimizer step was taken")
        return
    window = len(steps) // 12
    smooth = window > 1
    # Set a minimum range, so that rounding errors of a few steps or of a constant reward do not fill the
    # panel.
    middle = (min(rewards) + max(rewards)) / 2
    half = max(0.05, 0.55 * (max(rewards) - min(rewards)))
    axes.set_ylim(middle - half, middle + half)
    axes.plot(
        steps,
        rewards,
        color=_BLUE,
        alpha=0.35 if smooth else 1.0,
        linewidth=1.0 if smooth else 2.0,
        marker=None if len(steps) > 30 else "o",
        markersize=3,
        label="each step",
    )
    if smooth:
        axes.plot(steps, _smooth(rewards, window), color=_BLUE, linewidth=2.2, label="moving mean")
        axes.legend(frameon=False, fontsize=9, loc="best", labelcolor=_INK)


def _draw_held_out(axes: Axes, rows: list[dict[str, Any]], grader: str) -> None:
    # The mean of a reward becomes an accuracy once 0 and 1 have occurred, and is none if anything else has.
    name = next(filter(None, map(held_out_metric, reversed(rows))), "eval/accuracy")
    if name == "eval/accuracy":
        # Evaluations before that have the mean only.
        rows = [{metric.replace("eval/primary", name): row[metric] for metric in row} | row for row in rows]
    what = "reward" if name == "eval/primary" else "accuracy"
    title = f"Held-out {what}{grader and f' by {grader}'}, with 95 % interval"
    if name == "eval/loss":
        title = "Loss of held-out solutions, nats per token, with 95 % interval"
    _heading(axes, title)
    steps, (values,) = _column(rows, name)
    if not steps:
        _empty(axes, "nothing was evaluated")
        return
    # A single problem has no interval.
    low, high = (
        [row.get(name + end, row[name]) for row in rows if row.get(name) is not None]
        for end in ("_low", "_high")
    )
    below = [max(0.0, a - b) for a, b in zip(values, low, strict=True)]
    above = [max(0.0, b - a) for a, b in zip(values, high, strict=True)]
    axes.errorbar(
        steps,
        values,
        yerr=[below, above],
        color=_ORANGE,
        ecolor=_ORANGE,
        elinewidth=1.3,
        capsize=4,
        linewidth=2.0,
        marker="o",
        markersize=5,
    )
    axes.fill_between(steps, low, high, color=_ORANGE, alpha=0.12, linewidth=0)
    top = max(high) + 0.15 * abs(max(high)) + 0.02
    axes.set_ylim(min(0.0, *low), min(1.05, top) if name == "eval/accuracy" else top)
    for at in sorted({0, len(steps) - 1}):
        axes.annotate(
            f"{values[at]:.3f}",
            (steps[at], high[at]),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=_INK,
        )
