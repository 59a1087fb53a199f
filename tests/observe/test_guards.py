"""Guards: each rule begins when its sign has lasted, is silent on ordinary runs, and names cause and key."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.site_tables import with_tables
from torchrl_grpo.config.schema import keys
from torchrl_grpo.observe.guards import Finding, Guards
from torchrl_grpo.observe.held_out import held_out
from torchrl_grpo.observe.past import Setting, constant_share, equal_grades_note, group_size_note
from torchrl_grpo.observe.report import summary
from torchrl_grpo.observe.rules import RULES

# What the quick start measured of its first steps, with optimizer.lr=1e-5 and 1e-3.
_LEARNS = {
    "reward/mean": 0.0345,
    "reward/constant_groups": 0.625,
    "advantage/abs_mean": 0.23,
    "response/truncated": 0.875,
    "policy/entropy": 1.878,
}
_DIES = {
    "reward/mean": 0.0,
    "reward/constant_groups": 1.0,
    "advantage/abs_mean": 0.0,
    "response/truncated": 1.0,
    "policy/entropy": 0.348,
}


def row(step: int, **changes: Any) -> dict[str, Any]:
    """A line of a healthy step, with changes: two underscores stand for a slash, None removes a metric."""
    healthy = {
        **_LEARNS,
        "step": step,
        "response/length_max": 12.0,
        "policy/version": step - 1,
        "policy/ratio": 1.0,
        "kl/reference": 0.1,
        "kl/sampling_policy": 1e-10,
        "mismatch/kl_quarter_1": 1e-10,
        "mismatch/kl_quarter_4": 1e-10,
        "mismatch/ratio_outside": 0.0,
        "optimizer/lr": 1e-5,
        "optimizer/grad_norm": 1.3,
        "publish/update_kl": 1e-4,
    }
    renamed = {name.replace("__", "/"): value for name, value in changes.items()}
    return {name: value for name, value in {**healthy, **renamed}.items() if value is not None}


def evaluation(value: float) -> dict[str, Any]:
    near = {"eval__accuracy": value, "eval__accuracy_low": value - 0.05, "eval__accuracy_high": value + 0.05}
    return {**near, "eval__num_problems": 100}


def watch(rows: list[dict[str, Any]], guards: Guards | None = None) -> list[tuple[int, str]]:
    """Return the step and the rule of each warning."""
    guards = guards or Guards()
    return [(line["step"], finding.rule.name) for line in rows for finding in guards.take(line["step"], line)]


SIGNS: dict[str, dict[str, Any]] = {
    "reward_fails": {"reward__error_share": 1.0},
    "truncated": {"response__truncated": 1.0},
    "mostly_truncated": {"response__truncated": 0.95},
    "no_signal": {"reward__constant_groups": 1.0, "advantage__abs_mean": 0.0},
    "no_gradient": {"optimizer__grad_norm": 0.0},
    "entropy": {"policy__entropy": 0.004},
    "kl": {"kl__reference": 7.0},
    "mismatch": {"kl__sampling_policy": 0.02},
    "mismatch_grows": {"mismatch__kl_quarter_1": 0.004, "mismatch__kl_quarter_4": 0.02},
    "batch_sensitive": {"mismatch__ratio_outside": 0.3},
    "large_update": {"publish__update_kl": 0.1},
}
BY_EVALUATION = {"reward_hacked": 0.9, "held_out_falls": 0.01}


@pytest.mark.parametrize("name", SIGNS)
def test_a_warning_begins_when_its_sign_has_lasted_and_comes_once(name: str) -> None:
    (rule,) = (rule for rule in RULES if rule.name == name)
    bad = [row(step, **SIGNS[name]) for step in range(3, 3 + rule.window + 4)]
    guards = Guards()
    assert watch([row(1), row(2), *bad], guards) == [(2 + rule.window, name)]
    (finding,) = guards.holding()
    assert finding.since == 3 and str(finding).startswith(f"warning: {finding.seen} (since step 3): ")
    # A row of the sign that is interrupted does not count.
    broken = [row(step) if step % rule.window == 0 else row(step, **SIGNS[name]) for step in range(1, 9)]
    assert watch(broken) == []
    # It is over, and comes again without another line.
    assert watch([row(20)], guards) == [] and guards.holding() == []
    assert watch([row(step, **SIGNS[name]) for step in range(21, 29 + rule.window)], guards) == []
    assert "(since step 21, 2 times so far)" in str(guards.holding()[0])


@pytest.mark.parametrize("name", BY_EVALUATION)
def test_the_held_out_value_falls_while_rewards_rise_or_fall(name: str) -> None:
    reward = BY_EVALUATION[name]
    start = [row(0, **evaluation(0.5)), row(1), row(2), row(3, **evaluation(0.7))]
    assert watch([*start, row(4, reward__mean=reward, **evaluation(0.61))]) == [], "intervals meet"
    assert watch([*start, row(4, reward__mean=reward, **evaluation(0.59))]) == [(4, name)]


@pytest.mark.parametrize(("problems", "warns"), [(4, True), (3, False)])
def test_a_held_out_value_falls_from_all_right_to_all_wrong(problems: int, warns: bool) -> None:
    def equal(value: float) -> dict[str, Any]:
        bounds = {f"eval__primary{end}": value for end in ("", "_low", "_high")}
        return {**bounds, "eval__num_problems": problems}

    lines = [row(0, **equal(1.0)), row(1), row(2, **equal(1.0)), row(3, reward__mean=0.01, **equal(0.0))]
    assert watch(lines) == [(3, "held_out_falls")] * warns
    # The mean of as many equal grades differs by rounding.
    lines[3] |= row(3, **equal(1.0 - 2**-50))
    assert watch(lines) == []


def test_a_held_out_value_falls_without_rewards_too() -> None:
    solutions = {"reward__mean": None, "reward__constant_groups": None, "policy__ratio": None}
    lines = [row(step, **solutions, **evaluation(value)) for step, value in ((0, 0.5), (5, 0.8), (9, 0.6))]
    assert watch(lines) == [(9, "held_out_falls")]


def test_a_model_that_overfits_is_warned_of() -> None:
    solutions = {"reward__mean": None, "reward__constant_groups": None, "policy__ratio": None}

    def lines(width: float) -> list[dict[str, Any]]:
        return [
            row(
                step, **solutions, eval__num_problems=8, eval__loss=loss, eval__loss_low=loss - width,
                eval__loss_high=loss + width,
            )
            for step, loss in enumerate((2.0, 1.0, 1.5, 3.0, 6.0))
        ]  # fmt: skip

    assert watch(lines(0.5)) == [(3, "held_out_falls")]
    assert watch(lines(3.0)) == [], "it may be chance"
    assert held_out({"eval/loss": 2.0, "eval/loss_low": 1.5, "eval/loss_high": 3.0}) == (-2.0, -3.0, -1.5)
    assert held_out({"eval/loss": 2.0}) == (-2.0, -2.0, -2.0), "one problem"


def test_the_interval_of_verdicts_is_that_of_a_share() -> None:
    mean = {"eval/primary": 1.0, "eval/primary_low": 1.0, "eval/primary_high": 1.0}
    share = {"eval/accuracy": 1.0, "eval/accuracy_low": 0.8, "eval/accuracy_high": 1.0}
    assert held_out({**mean, **share}) == (1.0, 0.8, 1.0)
    assert held_out(mean) == (1.0, 1.0, 1.0)


def test_every_rule_has_a_sign_here() -> None:
    others = {"collapse", "group_size", "short_answers"}
    assert {rule.name for rule in RULES} == {*SIGNS, *BY_EVALUATION, *others}


def published(nats: float, parameters: float) -> dict[str, Any]:
    """What a publication of a model says of its number format and its size."""
    rate = {"throughput__published_parameters_per_s": parameters / 2, "time__publish_s": 2.0}
    return {**rate, "publish__logprob_diff_mean": nats}


@pytest.mark.parametrize(
    ("kl", "first", "setting", "warns"),
    [
        (0.004, published(0.06, 1e8), Setting(), False),
        (0.004, published(1e-5, 1e8), Setting(), True),
        (0.004, {}, Setting(float32=True), True),
        (0.004, {}, Setting(float32=False), False),
        (0.007, published(0.06, 1e8), Setting(), False),
        (0.007, published(0.06, 7e9), Setting(), True),
        (0.007, published(0.06, 7e9), Setting(quantized=True), False),
    ],
)
def test_rounding_depends_on_number_format_and_size(
    kl: float, first: dict[str, Any], setting: Setting, warns: bool
) -> None:
    lines = [row(step, kl__sampling_policy=kl, **first) for step in range(1, 6)]
    expected = [(3, "mismatch")] if warns else []
    assert watch(lines, Guards(setting)) == expected


@pytest.mark.parametrize(("estimator", "warns"), [("k1", True), ("k2", False), ("k3", True)])
def test_a_large_divergence_depends_on_its_estimator(estimator: str, warns: bool) -> None:
    lines = [row(step, kl__reference=3.0) for step in range(1, 6)]
    assert bool(watch(lines, Guards(Setting(kl_estimator=estimator)))) == warns


@pytest.mark.parametrize(
    "changes",
    [
        {"mismatch__kl_quarter_1": 0.012, "mismatch__kl_quarter_4": 0.03},
        {"mismatch__kl_quarter_1": 1e-5, "mismatch__kl_quarter_4": 0.009},
        {"mismatch__kl_quarter_1": 1e-5, "mismatch__kl_quarter_4": 0.09, "policy__version": 0},
        {"mismatch__ratio_outside": 0.08},
        {"mismatch__ratio_outside": 0.6, "policy__version": 0},
        # The proximal policy is newer than the weights that sampled.
        {"mismatch__kl": 0.05, "policy__version": 0},
        {"mismatch__kl": 0.05, "mismatch__kl_quarter_4": 0.09, "policy__version": 0},
        {"mismatch__kl": 0.05, "mismatch__ratio_outside": 0.6, "policy__version": 0},
    ],
)
def test_rounding_and_older_weights_are_no_mismatch(changes: dict[str, Any]) -> None:
    assert watch([row(step, **(changes if step > 1 else {})) for step in range(1, 9)]) == []


@pytest.mark.parametrize(("repeats", "share", "warns"), [(2, 0.95, True), (2, 0.8, False), (64, 0.95, False)])
def test_groups_are_too_small_if_the_first_accuracy_says_so_too(
    repeats: int, share: float, warns: bool
) -> None:
    begin = row(0, **evaluation(0.05))
    lines = [begin, *(row(step, reward__constant_groups=share) for step in range(1, 9))]
    expected = [(5, "group_size")] if warns else []
    assert watch(lines, Guards(Setting(samples=repeats))) == expected
    assert constant_share(0.18, 8) == pytest.approx(0.204, abs=1e-3)


def test_answers_that_become_short_and_no_better_while_a_part_of_the_reward_rises() -> None:
    def lines(later: float, length: float, digits: float) -> list[dict[str, Any]]:
        start = {"eval__response_length": 110.0, **evaluation(0.2)}
        end = {"eval__response_length": length, **evaluation(later)}
        # The whole reward may even fall: one part is paid for.
        no_round = {"reward__mean": None, "reward__constant_groups": None}
        begin = [row(0, **no_round, **start), row(1, reward__digits=0.2)]
        return [*begin, row(2, reward__mean=0.01, reward__digits=digits, **end)]

    assert watch(lines(0.18, 22.0, 0.9)) == [(2, "short_answers")]
    assert watch(lines(0.21, 22.0, 0.9)) == [(2, "short_answers")], "better by chance"
    assert watch(lines(0.6, 22.0, 0.9)) == [], "they are better"
    assert watch(lines(0.18, 60.0, 0.9)) == [], "they are not that short"
    assert watch(lines(0.18, 22.0, 0.21)) == [], "nothing was paid for it"
    assert watch(lines(0.01, 60.0, 0.9)) == [(2, "reward_hacked")], "a part rises while the value falls"
    assert watch(lines(0.01, 22.0, 0.9)) == [(2, "short_answers")], "which has the cause"


def test_an_update_that_kills_the_model_is_seen_in_the_next_round() -> None:
    dying = [row(1), row(2) | _DIES, row(3) | _DIES]
    # Cut off responses and the missing signal follow from it, also when the entropy has risen again.
    later = [row(step) | _DIES | {"policy/entropy": 0.9} for step in range(4, 9)]
    guards = Guards()
    assert watch([*dying, *later], guards) == [(2, "collapse")]
    assert "optimizer.lr" in str(guards.holding()[0])
    assert watch([row(9)], guards) == [] and guards.holding() == [], "a round has a signal again"


def test_what_explains_a_sign_is_named_in_its_place() -> None:
    cut = [row(step, **SIGNS["no_signal"], **SIGNS["truncated"]) for step in range(1, 7)]
    assert watch(cut) == [(3, "truncated")]
    failing = [row(step, **SIGNS["no_signal"], **SIGNS["reward_fails"]) for step in range(1, 7)]
    assert watch(failing) == [(1, "reward_fails")]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        # Equal rewards teach without a baseline; a step may count no token, or its gradient overflows.
        {"reward__constant_groups": 1.0},
        {"optimizer__grad_norm": math.nan},
        {"reward__constant_groups": 1.0, "advantage__abs_mean": 0.1, "optimizer__grad_norm": 0.0},
        {"kl__sampling_policy": 0.3, "policy__version": 0},
        {"response__truncated": 0.89, "reward__constant_groups": 0.9},
        {"reward__error_share": 0.4},
        {"kl__reference": 0.6, "mismatch__kl": 1e-3, "policy__entropy": 0.19},
        {"kl__reference": math.inf, "policy__entropy": math.nan, "reward__mean": math.nan},
    ],
)
def test_ordinary_lines_say_nothing(changes: dict[str, Any]) -> None:
    assert watch([row(step, **(changes if step > 1 else {})) for step in range(1, 30)]) == []


def test_a_run_may_begin_with_responses_that_are_nearly_all_cut_off() -> None:
    begin = [row(step, response__truncated=0.98) for step in range(1, 10)]
    assert watch([*begin, *(row(step) for step in range(10, 30))]) == []
    half = watch([row(1, reward__error_share=0.5)], guards := Guards())
    assert half == [(1, "reward_fails")] and "50% of the calls of a reward failed" in str(guards.holding()[0])


def test_a_run_that_learns_solutions_may_be_sure_of_them() -> None:
    sampled = {"policy__ratio": None, "reward__mean": None, "reward__constant_groups": None}
    line = {**sampled, "policy__entropy": 1e-4, "kl__reference": 9.0, "response__truncated": 1.0}
    assert watch([row(step, **line) for step in range(1, 9)]) == []
    still = {**sampled, "optimizer__grad_norm": 0.0}
    assert watch([row(step, **still) for step in range(1, 9)]) == [(3, "no_gradient")]


@pytest.mark.parametrize(("with_gradient", "warns"), [(0, False), (3, False), (7, False), (None, True)])
def test_the_groups_of_one_step_of_a_round_may_have_no_signal(with_gradient: int | None, warns: bool) -> None:
    def step_of_round(number: int, step: int) -> dict[str, Any]:
        of_a_round = {} if step == 0 else {"reward__mean": None, "reward__constant_groups": None}
        gradient = {"optimizer__grad_norm": 0.5 if step == with_gradient else 0.0}
        return row(8 * number + step + 1, **of_a_round, **gradient)

    begun = watch([step_of_round(number, step) for number in range(4) for step in range(8)])
    assert begun == ([(17, "no_gradient")] if warns else [])


def test_a_replay_of_the_lines_leaves_what_the_run_had() -> None:
    lines = [
        *(row(step, **SIGNS["truncated"]) for step in range(1, 5)),
        row(5, **evaluation(0.9)),
        *(row(step, reward__mean=0.9, **SIGNS["entropy"]) for step in range(6, 8)),
        row(8, reward__mean=0.9, **SIGNS["entropy"], **evaluation(0.3)),
        *(row(step, **SIGNS["truncated"]) for step in range(9, 13)),
    ]
    whole = Guards()
    begun = watch(lines, whole)
    assert {name for _, name in begun} == {"truncated", "entropy", "reward_hacked"}
    for cut in range(len(lines) + 1):
        resumed = Guards()
        resumed.replay(lines[:cut])
        later = [(step, name) for step, name in begun if cut < len(lines) and step >= lines[cut]["step"]]
        assert watch(lines[cut:], resumed) == later
        assert list(map(str, resumed.holding())) == list(map(str, whole.holding()))


def test_the_documentation_has_the_table_of_rules(repo_root: Path) -> None:
    page = with_tables((repo_root / "docs/troubleshooting.md").read_text())
    for rule in RULES:
        (row,) = re.findall(rf"^\| `{rule.name}` \| (.*) \|$", page, re.MULTILINE)
        sign, lasts, advice, source = row.split(" | ")
        bounds, _, reads = sign.partition(": ")
        thresholds = [float(number) for number in re.findall(r"(?<![\w.])\d[\d.e-]*", bounds)]
        assert {rule.threshold, *(limit.threshold for limit in rule.limits)} <= set(thresholds)
        assert reads.split(", ") == list(rule.reads) and lasts.split()[0] == str(rule.window)
        assert (advice, source) == (rule.advice, rule.source)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_names_keys_that_exist(rule: Any) -> None:
    named = re.findall(r"\b[a-z_]+\.[a-z_]+\b", rule.advice.replace("rollouts.jsonl", ""))
    assert named and all(keys().knows(name) for name in named)
    assert set(rule.explained_by) <= {other.name for other in RULES}


def test_the_closing_screen_repeats_what_holds(tmp_path: Path) -> None:
    figures: dict[str, Any] = {
        "accuracy_before": None, "accuracy_after": None, "accuracy_ci95": None,
        "steps": 9, "seconds": 1.0, "peak_memory_gib": 1.0,
    }  # fmt: skip

    def closing(any_signal: bool, *names: str) -> str:
        guards = Guards()
        changes = {key: value for name in names for key, value in SIGNS[name].items()}
        watch([row(step, **changes) for step in range(1, 9)], guards)
        findings: list[Finding] = guards.holding()
        stream = io.StringIO()
        extras = {"reward_errors": 3}
        summary(tmp_path, **figures, extras=extras, any_signal=any_signal, findings=findings, stream=stream)
        return stream.getvalue()

    assert "warning" not in closing(True)
    assert "warning: the entropy is nearly gone" in closing(True, "entropy")
    assert "failed rewards     3" in closing(True)
    # Of a run without any signal this is said once, and not if its cause is known.
    without = closing(False, "no_signal")
    assert without.count("warning") == 1 and "in every group" in without
    cut = closing(False, "no_signal", "truncated")
    assert cut.count("warning") == 1 and "inference_model.max_new_tokens" in cut and "easier" not in cut


def test_the_accuracy_before_training_foretells_groups_without_a_signal() -> None:
    note = group_size_note({"eval/accuracy": 0.18}, 4)
    assert (
        note is not None and "45% of the groups of env.repeats=4" in note and "20% with env.repeats=8" in note
    )
    assert (
        group_size_note({"eval/primary": 0.18}, 4) is None
        and group_size_note({"eval/accuracy": 0.5}, 1) is None
    )


def test_equal_grades_of_an_own_reward_are_explained() -> None:
    note = equal_grades_note({"eval/primary": 0.0}, "tidy")
    assert note is not None and note.startswith("tidy gave 0 for every") and "eval.threshold=1" in note
    assert equal_grades_note({"eval/primary": 0.0, "eval/errors": 0}, "tidy") == note
    assert equal_grades_note({"eval/primary": 0.0, "eval/errors": 8}, "tidy") is None
    for row in ({"eval/primary": 0.25}, {"eval/primary": 1.0, "eval/accuracy": 1.0}, {"eval/accuracy": 0.0}):
        assert equal_grades_note(row, "tidy") is None
