"""The report in a real browser: curves, filters, groups and text that a model wrote.

``REPORT_PICTURES=FOLDER`` keeps the pictures of the documentation there, and ``REPORT_RUN`` names the run on
them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright
from run_files import HOSTILE, rollout, write_lines, write_run
from sweep_files import write_sweep
from tiny_vlm import picture

from torchrl_grpo.cli.sweep import main as grpo_sweep
from torchrl_grpo.report.differences import compare, read_runs
from torchrl_grpo.report.page_file import render
from torchrl_grpo.report.reader import RunReader
from torchrl_grpo.report.write import write

pytestmark = pytest.mark.slow

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("there is no Chromium; on Debian install the package chromium-headless-shell")
    with sync_playwright() as playwright:
        # Its own sandbox does not work for root, as whom containers and continuous integration run.
        launched = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield launched
        launched.close()


Opener = Callable[[Path], Page]


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opener]:
    """Opens the report of a run, or a page. No request may leave it, and nothing may be logged."""
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    # Nothing is awaited for longer, on however slow a machine.
    page.set_default_timeout(60_000)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))

    def open_report(path: Path) -> Page:
        address = (path if path.suffix == ".html" else write(RunReader(path))).as_uri()
        page.on("request", lambda each: problems.append(each.url) if each.url != address else None)
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_report
    page.close()
    assert problems == []


def texts(page: Page, selector: str) -> list[str]:
    shown: list[str] = page.locator(selector).all_inner_texts()
    return shown


def steps_under(page: Page, over: Locator, share: float) -> set[str]:
    """Move the mouse over a chart, to a share of its width; the steps that all charts then show."""
    box = over.bounding_box()
    assert box is not None
    # The first movement enters the chart.
    for x in (share * box["width"] / 2, share * box["width"]):
        over.hover(position={"x": x, "y": 20})
    return set(texts(page, ".u-legend .u-series:first-child .u-value"))


def graded_by_exact_match(run: Path) -> Path:
    (run / ".hydra").mkdir(exist_ok=True)
    (run / ".hydra/about.json").write_text(json.dumps({"right": {"reward": "exact_match", "threshold": 1.0}}))
    return run


def test_curves_share_cursor_and_zoom_and_open_the_rollouts_of_a_step(tmp_path: Path, opened: Opener) -> None:
    page = opened(graded_by_exact_match(write_run(tmp_path / "run")))
    page.click("#tab-curves")
    titles = texts(page, ".chart h3")
    held_out = "Held-out value by exact_match, with 95 % interval"
    assert {"Reward and its parts", held_out, "Seconds by phase"} <= set(titles)
    inked = page.locator(".chart canvas").evaluate_all(
        "all => all.map(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x > 0))"
    )
    assert len(inked) == len(titles) and all(inked)
    over, other = (page.locator(".chart .u-over").nth(number) for number in (0, 3))
    assert steps_under(page, over, 0.5) == {"10"}
    # Zoom into steps 5 to 10 of one chart, and look at the right end of another.
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20, steps=4)
    page.mouse.up()
    assert steps_under(page, other, 0.98) == {"10"}
    other.dblclick(position={"x": 20, "y": 20})
    assert steps_under(page, over, 0.98) == {"20"}
    over.click(position={"x": box["width"] / 4, "y": 20})
    page.wait_for_selector("#filter-from")
    assert page.input_value("#filter-from") == page.input_value("#filter-to") == "5"
    assert texts(page, "#count") == ["16 of 320 rollouts"]
    assert len(texts(page, "#group .card")) == 4


def test_findings_lead_to_their_rollouts(tmp_path: Path, opened: Opener) -> None:
    run = write_run(tmp_path / "run", steps=4)
    row = {"reward/mean": 0.0, "reward/constant_groups": 1.0, "response/length_mean": 3.0}
    write_lines(run / "metrics.jsonl", [{"step": step, **row} for step in range(1, 5)])
    page = opened(run)
    assert "all responses of each group had the same reward" in texts(page, ".finding")[0]
    page.click(".finding button")
    assert page.input_value("#filter-from") == "1"


def test_rollouts_are_filtered_sorted_and_compared(tmp_path: Path, opened: Opener) -> None:
    run = write_run(tmp_path / "run", steps=5)
    episode = [{"role": "assistant", "content": "call"}, {"role": "tool", "content": "result"}]
    tokens = {"text": ["<b>", " two"], "engine": [-0.5, None], "trainer": [-1.5, None]}
    with (run / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(rollout(5, 500, tokens=tokens)) + "\n")
    write_lines(run / "discarded.jsonl", [rollout(2, 77, discarded="no signal", messages=episode)])
    page = opened(run)
    page.click("#tab-rollouts")
    assert texts(page, "#count") == ["82 of 82 rollouts"]
    page.select_option("#filter-finish", "2")
    assert texts(page, "#count") == ["20 of 82 rollouts"]
    page.click("#clear")
    page.select_option("#filter-of", "part:format")
    page.fill("#filter-least", "0.1")
    right = (
        sum((step + group + sample) % 3 == 0 for step, group, sample in rows_of(5))
        + ((5 + 500) % 3 == 0)
        + ((2 + 77) % 3 == 0)
    )
    assert texts(page, "#count") == [f"{right} of 82 rollouts"]
    page.click("#clear")
    page.fill("#filter-text", "RESPONSE 2 of group 7 ")
    assert texts(page, "#count") == ["1 of 82 rollouts"]
    page.click("#clear")
    page.click(".heads span >> text=tokens")
    assert texts(page, ".row >> nth=0")[0].split("\n")[-3:-2] == ["8"]
    page.select_option("#filter-kept", "discarded")
    page.click(".row")
    assert "Discarded: no signal" in texts(page, "#group")[0]
    assert texts(page, "#group .turn b") == ["assistant", "tool"]
    # The address has tab and filters, so a reload shows the same.
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert texts(page, "#count") == ["1 of 82 rollouts"]
    page.click("#clear")
    page.fill("#filter-group", "500")
    page.click(".row")
    pieces = page.locator("#group .tokens span")
    assert pieces.all_inner_texts() == ["<b>", " two"]
    colors = []
    for tint in ("engine", "difference", "push"):
        page.select_option("#tint", tint)
        colors.append(pieces.first.evaluate("element => element.style.background"))
    assert len(set(colors)) == 3 and all(color.startswith("rgba(") for color in colors)
    assert pieces.first.get_attribute("title") == "log-probability: engine -0.5, trainer -1.5; ratio 0.3679"


def rows_of(steps: int) -> list[tuple[int, int, int]]:
    return [
        (step, (step - 1) * 4 + group, sample)
        for step in range(1, steps + 1)
        for group in range(4)
        for sample in range(4)
    ]


def test_the_history_of_problems_shows_what_was_learned_and_forgotten(tmp_path: Path, opened: Opener) -> None:
    page = opened(write_run(tmp_path / "run"))
    page.click("#tab-problems")
    held_out = page.locator(".history").first
    buttons = held_out.locator(".filters button").all_inner_texts()
    assert buttons == ["all: 4", "learned: 1", "forgotten: 1", "never solved: 1", "always solved: 1"]
    held_out.locator("button[data-state=forgotten]").click()
    held_out.locator(".row").click()
    assert held_out.locator(".response").all_inner_texts() == ["forgotten at step 0", "forgotten at step 20"]


def test_the_timeline_has_lanes_with_idle_gaps(tmp_path: Path, opened: Opener) -> None:
    page = opened(write_run(tmp_path / "run", steps=3))
    page.click("#tab-timeline")
    lanes = texts(page, ".lane b")
    assert [lane.split()[0] for lane in lanes] == ["engine", "rewards", "trainer"]
    # 2.0 + 0.5 of 5.8 seconds a step.
    assert lanes[0].split()[1] == "43"


def test_a_bar_of_workers_is_as_high_as_their_share_of_the_time(tmp_path: Path, opened: Opener) -> None:
    run = write_run(tmp_path / "run", steps=1)
    shares = {1: 0.2, 3: 1.0}
    others = {
        "busy_share_min": 0.1,
        "busy_share_max": 0.3,
        "slowest": 7,
        "tokens_per_s": 5,
        "tokens_per_s_min": 2,
    }
    rows = [{"step": 0, "eval/accuracy": 0.5}]
    for step in (1, 2, 3):
        row = {"step": step, "time/wait_s": 1.0, "time/train_s": 4.0, "time/step_s": 5.0}
        if step in shares:
            measured = {"busy_share": shares[step], **others}
            row |= {f"workers/{name}": value for name, value in measured.items()}
        rows.append(row)
    write_lines(run / "metrics.jsonl", rows)
    page = opened(run)
    page.click("#tab-timeline")
    assert "a share and not a moment" in texts(page, ".note:visible")[0]
    # Measured after 1 and 11 of 15 seconds: (0.2 * 1 + 1 * 10) / 11.
    lanes = dict(text.rsplit(" ", 2)[:2] for text in texts(page, ".lane b"))
    assert lanes["workers, mean"] == "93"
    title = page.locator("[data-lane='workers, mean'] i").first.get_attribute("title")
    assert "20 % of the time, the least busy 10 %, the busiest 30 %" in str(title)
    assert "the slowest is worker 7 with 2 tokens/s" in str(title)
    bars = page.locator("[data-lane='workers, mean'] i").evaluate_all(
        "all => all.map(({ style }) => [style.left, style.width, style.top].map(parseFloat))"
    )
    expected = [(0, 100 / 15, 80), (100 / 15, 1000 / 15, 0), (1100 / 15, 400 / 15, 0)]
    assert [pytest.approx(each, abs=0.01) for each in expected] == [tuple(bar) for bar in bars]


def test_pictures_of_a_prompt_stand_below_it(tmp_path: Path, opened: Opener) -> None:
    run = write_run(tmp_path / "run", steps=1)
    (run / "pictures").mkdir()
    here, gone = (f"{number:032x}.png" for number in range(2))
    picture(40, 30).save(run / "pictures" / here)
    write_lines(run / "rollouts.jsonl", [rollout(1, 0, pictures=[here, gone])])
    page = opened(run)
    page.click("#tab-rollouts")
    page.click(".row")
    shown = page.locator("#group img.picture")
    assert shown.evaluate("async each => { await each.decode(); return each.naturalWidth; }") == 40
    assert f"The picture {gone} is not in the report." in texts(page, "#group")[0]
    page.click("#tab-problems")
    page.locator("main .row:visible").last.click()
    page.locator("img.picture:visible").wait_for()


def test_hostile_text_is_text(tmp_path: Path, opened: Opener) -> None:
    run = write_run(tmp_path / "run", steps=1)
    rows = [
        rollout(
            1,
            0,
            response=HOSTILE,
            prompt=HOSTILE,
            rewards={HOSTILE: 1.0},
            errors={HOSTILE: HOSTILE},
            verdicts={HOSTILE: HOSTILE},
        ),
        rollout(1, 0, response=HOSTILE + "x" * 2**20),
        rollout(1, 0, messages=[{"role": HOSTILE, "content": HOSTILE}]),
    ]
    write_lines(run / "rollouts.jsonl", rows)
    write_lines(run / "metrics.jsonl", [{"step": 0}, {"step": 1, f"reward/{HOSTILE}": 1.0}])
    (run / ".hydra").mkdir()
    # It looks like data of the page.
    (run / ".hydra/about.json").write_text('{"versions": {"type": "i", "deflate": "AAAA"}}')
    page = opened(run)
    for tab in ("curves", "problems", "timeline", "rollouts"):
        page.click(f"#tab-{tab}")
    page.click(".row")
    shown = page.locator("#group .response").first.evaluate("element => element.textContent")
    assert shown == HOSTILE.replace("\ud800", "?")
    assert page.title() == "run"
    assert page.locator("main script, main img, main iframe").count() == 0


def test_without_the_drawing_library_the_rest_is_shown(
    tmp_path: Path, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrl_grpo.report.chart_library.PACKAGE", "no-such-package")
    page = opened(write_run(tmp_path / "run", steps=2))
    page.click("#tab-curves")
    assert "no-such-package is not installed" in texts(page, "#no-library")[0]
    page.click("#tab-rollouts")
    assert texts(page, "#count") == ["32 of 32 rollouts"]


def test_a_page_of_two_runs_shows_what_differs(tmp_path: Path, opened: Opener) -> None:
    runs = [write_run(tmp_path / name, steps=steps) for name, steps in (("a", 20), ("b", 10))]
    rows = [json.loads(line) for line in (runs[1] / "evaluations.jsonl").read_text().splitlines()]
    write_lines(
        runs[1] / "evaluations.jsonl",
        [{**row, "grade": 1 - row["grade"] if row["id"] == "never" else row["grade"]} for row in rows]
        + [{**rows[-1], "id": HOSTILE, "prompt": HOSTILE, "response": HOSTILE}],
    )
    with (runs[0] / "evaluations.jsonl").open("a") as file:
        file.write(json.dumps({**rows[-1], "step": 20, "id": HOSTILE, "prompt": HOSTILE, "grade": 0.0}))
        file.write("\n")
    for run, rate in zip(runs, (0.5, 0.25), strict=True):
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(
                json.dumps({"step": step, "reward/mean": 0.0, "reward/constant_groups": 1.0}) + "\n"
                for step in range(21, 25)
            )
        (run / ".hydra").mkdir()
        (run / ".hydra/config.yaml").write_text(json.dumps({"optimizer": {"lr": rate}, HOSTILE: rate}))
    contents = read_runs(runs)
    (tmp_path / "diff.html").write_text(render(contents, differences=compare(runs, contents)))
    page = opened(tmp_path / "diff.html")
    assert "optimizer.lr\t0.5\t0.25" in texts(page, "#settings")[0]
    # The last step in common, and the last of each.
    assert texts(page, "main h3")[:2] == ["Step 10, in both", "The last of each: step 20 of a, step 10 of b"]
    assert "accuracy\t0.5\t0.75\t+0.25" in texts(page, "main table")[1]
    history = page.locator(".history").last
    buttons = history.locator(".filters button").all_inner_texts()
    assert buttons == ["all: 2", "only b solves: 2"]
    for row, shown in ((0, "never at step 20"), (1, "always at step 10")):
        history.locator(".row").nth(row).click()
        assert history.locator(".response").first.inner_text() == shown
    responses = history.locator(".response").last.evaluate("element => element.textContent")
    assert responses == HOSTILE.replace("\ud800", "?")
    assert page.title() == "a and b" and page.locator("main script, main img, main iframe").count() == 0
    page.click("#tab-curves")
    assert steps_under(page, page.locator(".chart .u-over").first, 0.98) == {"24"}
    series = texts(page, ".chart >> nth=0 >> .u-series .u-label")
    assert {"a: reward/mean", "b: reward/mean"} <= {label.strip(": ") for label in series}
    # A link names the run too.
    page.select_option("#run", "1")
    page.click("#tab-rollouts")
    assert texts(page, "#count") == ["160 of 160 rollouts"]
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert texts(page, "#count") == ["160 of 160 rollouts"] and page.input_value("#run") == "1"
    # Findings have the numbers of the curves, and lead to the rollouts of their run.
    page.select_option("#run", "0")
    page.click("#tab-overview")
    assert [finding.split()[0] for finding in texts(page, ".finding b")] == ["1.", "2."]
    page.locator(".finding button").last.click()
    assert page.input_value("#run") == "1" and texts(page, "#count") == ["16 of 160 rollouts"]


def test_the_comparison_of_a_sweep_has_a_table_and_curves(tmp_path: Path, browser: Browser) -> None:
    write_sweep(tmp_path, {"optimizer.lr=1": 0.4, "optimizer.lr=2": 0.7})
    grpo_sweep([str(tmp_path)])
    page = browser.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((tmp_path / "sweep.html").as_uri())
    page.wait_for_selector("body[data-ready]")
    best = texts(page, "#settings tr")[1]
    assert "optimizer.lr=2" in best and "better" in best and len(texts(page, "#trials tr")) == 7
    assert page.locator(".chart canvas").count() == 1
    assert any("optimizer.lr=1: eval/accuracy" in text for text in texts(page, ".u-legend"))
    page.close()
    assert problems == []


def test_of_a_long_list_only_the_visible_rows_are_elements(tmp_path: Path, opened: Opener) -> None:
    page = opened(write_run(tmp_path / "run", steps=300, groups=8, samples=8))
    page.click("#tab-rollouts")
    assert texts(page, "#count") == ["19,200 of 19,200 rollouts"]
    assert 5 < page.locator(".row").count() < 100
    page.locator(".list").evaluate("element => { element.scrollTop = element.scrollHeight }")
    page.wait_for_selector(".row:last-child > span:first-child:text-is('300')")
    page.fill("#filter-text", "step 299")
    assert texts(page, "#count") == ["64 of 19,200 rollouts"]


def test_pictures_of_the_page(tmp_path: Path, opened: Opener) -> None:
    folder = Path(os.environ.get("REPORT_PICTURES", tmp_path / "pictures"))
    page = opened(Path(os.environ.get("REPORT_RUN") or write_run(tmp_path / "run")))
    for tab in ("curves", "rollouts"):
        page.click(f"#tab-{tab}")
        if tab == "rollouts":
            page.fill("#filter-from", "9")
            page.click(".row")
        page.screenshot(path=folder / f"report-{tab}.png")
        assert (folder / f"report-{tab}.png").read_bytes().startswith(b"\x89PNG")


def test_the_overview_shows_the_primary_held_out_value(tmp_path: Path, opened: Opener) -> None:
    run = graded_by_exact_match(write_run(tmp_path / "run", steps=2))
    both = {"eval/accuracy": 0.0, "eval/primary": 0.31}
    write_lines(run / "metrics.jsonl", [{"step": 0, **both}, {"step": 2, "eval/primary": 0.73}])
    grades = [("a", 0, 0.25), ("b", 0, 0.4), ("c", 0, 0.3), ("a", 2, 0.9), ("b", 2, 0.2), ("c", 2, None)]
    rows = [
        {"step": step, "id": id, "prompt": id, "response": "r", "grade": grade} for id, step, grade in grades
    ]
    write_lines(run / "evaluations.jsonl", rows)
    page = opened(run)
    fact = texts(page, ".fact")[0]
    assert "0.31 → 0.73" in fact and "held-out mean of exact_match" in fact
    page.click("#tab-problems")
    # A mean of a reward says of no problem that it is solved, and a judge that fails takes nothing back.
    buttons = page.locator(".history").first.locator(".filters button").all_inner_texts()
    assert buttons == ["all: 3", "seen once: 1", "better: 1", "worse: 1"]


def test_verdicts_of_a_reward_of_ones_own_show_what_was_learned(tmp_path: Path, opened: Opener) -> None:
    run = graded_by_exact_match(write_run(tmp_path / "run", steps=10))
    shares = {"eval/accuracy": 0.5, "eval/primary": 0.5}
    write_lines(run / "metrics.jsonl", [{"step": 0, "eval/primary": 0.0}, {"step": 10, **shares}])
    page = opened(run)
    fact = texts(page, ".fact")[0]
    assert "0 → 0.5" in fact and "held-out accuracy by exact_match" in fact
    page.click("#tab-problems")
    buttons = page.locator(".history").first.locator(".filters button").all_inner_texts()
    assert buttons == ["all: 4", "learned: 1", "forgotten: 1", "never solved: 1", "always solved: 1"]


def test_turns_of_an_episode_are_shown_with_their_tokens(tmp_path: Path, opened: Opener) -> None:
    run = write_run(tmp_path / "run", steps=1)
    tokens = {"text": ["I ", "ask"], "engine": [-0.5, None], "trainer": [-0.5, None]}
    messages = [{"role": "assistant", "content": "I ask"}, {"role": "tool", "content": "it answers"}]
    write_lines(run / "rollouts.jsonl", [rollout(1, 0, messages=messages, tokens=tokens), rollout(1, 0, 1)])
    page = opened(run)
    page.click("#tab-rollouts")
    page.click(".row")
    assert texts(page, ".turn") == ["assistant\nI ask", "tool\nit answers"]
    assert texts(page, ".tokens") == ["I ask"] and len(texts(page, ".response")) == 1


def test_held_out_losses_are_not_taken_for_solved_problems(tmp_path: Path, opened: Opener) -> None:
    run = write_run(tmp_path / "run", steps=2)
    write_lines(run / "metrics.jsonl", [{"step": 0, "eval/loss": 1.4}, {"step": 2, "eval/loss": 1.1}])
    losses = [("worse", 0, 0.4), ("better", 0, 2.4), ("worse", 2, 2.0), ("better", 2, 0.2)]
    rows = [
        {"step": step, "id": id, "prompt": id, "response": "r", "grade": loss} for id, step, loss in losses
    ]
    write_lines(run / "evaluations.jsonl", rows)
    page = opened(run)
    page.click("#tab-problems")
    held_out = page.locator(".history").first
    assert held_out.locator(".filters button").all_inner_texts() == ["all: 2", "worse: 1", "better: 1"]
    marks = held_out.locator(".marks i").evaluate_all(
        "all => all.map(i => getComputedStyle(i).backgroundColor)"
    )
    shades = [float(color.removesuffix(")").split(",")[-1]) for color in marks]
    assert shades[0] > shades[1] and shades[2] < shades[3]
    held_out.locator(".row").first.click()
    assert held_out.locator(".card h3").all_inner_texts() == [
        "Before, step 0, loss 0.4",
        "After, step 2, loss 2",
    ]


@pytest.mark.parametrize(
    ("address", "count", "text"),
    [
        ("#rollouts?text=%2541&of=part%3Agone&least=1", "0 of 16 rollouts", "%41"),
        ("#rollouts?of=part%3Agone&least=1", "5 of 16 rollouts", ""),
        ("#rollouts?text=response+3%", "0 of 16 rollouts", "response 3%"),
        ("#constructor", None, None),
    ],
)
def test_filters_in_an_address_are_taken_as_they_are(
    tmp_path: Path, opened: Opener, address: str, count: str | None, text: str | None
) -> None:
    page = opened(write_run(tmp_path / "run", steps=1))
    page.evaluate("address => { location.hash = address }", address)
    page.reload()
    page.wait_for_selector("body[data-ready]")
    if count is None:
        assert page.locator("#tab-overview.on").count() == 1
    else:
        assert texts(page, "#count") == [count] and page.input_value("#filter-text") == text
