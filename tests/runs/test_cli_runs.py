"""What the command line does with a right configuration: folders, sweeps, resumption, failing runs."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_calls import BEHAVE, ROOT, SEEN, accept, call, mistake, set_up, snapshot, write_run

from torchrl_grpo.checkpoints import checkpoint, manifest
from torchrl_grpo.checkpoints import run_dir as run_folder
from torchrl_grpo.config import Config
from torchrl_grpo.errors import CheckpointError, ConfigError, DataError
from torchrl_grpo.planning.preflight import resolve_proximal

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return set_up(tmp_path, monkeypatch)


# Runs and their folders


def test_run_gets_its_configuration_and_a_folder_of_the_day(workplace: Path) -> None:
    assert call("optimizer.lr=2e-5", "--config-name", "grpo_ifeval", "reward.weights.format=0.5") == 0
    ((cfg, run_dir),) = SEEN
    assert cfg.optimizer.lr == 2e-5 and cfg.env.dataset == "ifeval"
    assert cfg.reward.weights == {"format": 0.5}
    relative = run_dir.relative_to(workplace)
    assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", str(relative))
    assert {path.name for path in (run_dir / ".hydra").iterdir()} == {
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    }
    assert Path.cwd() == workplace


def test_runs_of_the_same_second_do_not_share_a_folder(workplace: Path) -> None:
    folder = workplace / "outputs" / "day" / "12-00-00"
    folders = [run_folder.new_folder(folder) for _ in range(3)]
    assert [folder.name for folder in folders] == ["12-00-00", "12-00-00-1", "12-00-00-2"]


def test_chosen_folder_is_used_once(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BEHAVE["do"] = lambda cfg, run_dir: write_run(run_dir, 1)
    assert call("hydra.run.dir=here") == 0
    assert SEEN.pop()[1] == workplace / "here"
    before = snapshot(workplace)
    assert "holds an earlier run" in mistake(capsys, "hydra.run.dir=here")
    assert snapshot(workplace) == before


def test_file_is_no_run_folder(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workplace / "file").write_text("")
    assert "is a file" in mistake(capsys, "hydra.run.dir=file")


def test_users_mistake_inside_a_run(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(cfg: Config, run_dir: Path) -> None:
        raise DataError("gsm8k: row 17 has no '####'; write '#### N' at its end instead")

    BEHAVE["do"] = fail
    assert call() == 2
    error = capsys.readouterr().err
    assert error == "error: gsm8k: row 17 has no '####'; write '#### N' at its end instead\n"
    assert not SEEN[0][1].exists(), "a folder in which nothing happened is taken away"


def test_results_stay_when_a_run_stops_on_a_mistake(workplace: Path) -> None:
    def fail(cfg: Config, run_dir: Path) -> None:
        (run_dir / "metrics.jsonl").write_text("1")
        raise DataError("late")

    BEHAVE["do"] = fail
    assert call() == 2
    assert (SEEN[0][1] / "metrics.jsonl").read_text() == "1"


def test_defect_keeps_its_exception(workplace: Path) -> None:
    def fail(cfg: Config, run_dir: Path) -> None:
        raise RuntimeError("a defect")

    BEHAVE["do"] = fail
    with pytest.raises(RuntimeError, match="a defect"):
        call()
    assert SEEN[0][1].exists()
    assert "HYDRA_FULL_ERROR" not in os.environ and sys.argv == ["grpo.py"]


def test_a_run_whose_reader_has_ended_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()

    def shows(cfg: Config, run_dir: Path) -> None:
        os.close(reader)
        print("Done.", flush=True)

    BEHAVE["do"] = shows
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert call() == 141
    assert capsys.readouterr().err == ""


def test_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    def stop(cfg: Config, run_dir: Path) -> None:
        raise KeyboardInterrupt

    BEHAVE["do"] = stop
    assert call() == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_terminated_run_ends_like_an_interrupted_one(capsys: pytest.CaptureFixture[str]) -> None:
    def terminate(cfg: Config, run_dir: Path) -> None:
        # The signal would end this process and its tests.
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)

    BEHAVE["do"] = terminate
    # A library of an earlier test may have set a handler, or taken one away without Python's notice.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert call() == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "terminated\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["hydra.run.dir=/proc/nothing/run"], "run folder /proc/nothing/run .* No such file or directory"),
        (["hydra.run.dir=/proc/version/run"], "run folder /proc/version/run .* Not a directory"),
        (["hydra.run.dir=logged"], "run folder logged .*/logged/grpo.log: Is a directory"),
        ([], "run folder outputs/.* (Not a directory|File exists)"),
        (["resume=earlier"], r"run folder earlier .*/earlier/.hydra.*: (Not a directory|File exists)"),
        (["resume=earlier", "dry_run=true"], r"run folder earlier .*checkpoints: Permission denied"),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(
    words: list[str],
    reason: str,
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (workplace / "outputs").touch()
    (workplace / "logged" / "grpo.log").mkdir(parents=True)
    write_run(workplace / "earlier", 5)
    (workplace / "earlier" / ".hydra").touch()
    if "dry_run=true" in words:

        def refuse(folder: Path, pattern: str) -> Iterator[Path]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder / "checkpoints"))

        monkeypatch.setattr(Path, "glob", refuse)
    assert call(*words) == 2
    message = capsys.readouterr().err
    assert re.fullmatch(f"error: the {reason}; repair that, or write .* instead\n", message), message
    assert SEEN == []


@pytest.mark.parametrize("name", ["grpo.log", ".hydra/config.yaml", "summary.json"])
@pytest.mark.parametrize("words", [("hydra.run.dir=run",), ("resume=run",)])
def test_a_run_folder_with_something_that_blocks_is_refused(
    name: str, words: tuple[str, ...], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "run" / ".hydra").mkdir(parents=True)
    if "resume=run" in words:
        write_run(workplace / "run", 5)
    os.mkfifo(workplace / "run" / name)
    assert call(*words) == 2
    assert f"run folder run cannot be used: run/{name} is neither a file nor" in capsys.readouterr().err


def test_a_folder_that_a_run_cannot_write_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(cfg: Config, run_dir: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(run_dir / "metrics.jsonl"))

    BEHAVE["do"] = refused
    assert call() == 2
    assert re.search(r"error: the run folder .*/metrics.jsonl: Permission denied; ", capsys.readouterr().err)


def test_sweep_runs_every_combination(workplace: Path) -> None:
    assert call("--multirun", "optimizer.lr=1e-4,1e-5", "policy.kl_coef=0.01,0.1") == 0
    assert [(cfg.optimizer.lr, cfg.policy.kl_coef) for cfg, _ in SEEN] == [
        (1e-4, 0.01),
        (1e-4, 0.1),
        (1e-5, 0.01),
        (1e-5, 0.1),
    ]
    assert [run_dir.name for _, run_dir in SEEN] == ["0", "1", "2", "3"]
    assert re.fullmatch(
        r"multirun/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", str(SEEN[0][1].parent.relative_to(workplace))
    )


def test_sweep_over_a_free_form_key_and_a_group(workplace: Path) -> None:
    assert call("-m", "reward.weights.format=0.1,0.2", "env=gsm8k,math") == 0
    assert [(cfg.reward.weights["format"], cfg.env.dataset) for cfg, _ in SEEN] == [
        (0.1, "gsm8k"),
        (0.1, "math"),
        (0.2, "gsm8k"),
        (0.2, "math"),
    ]


def test_sweep_goes_on_after_a_job_that_fails(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(cfg: Config, run_dir: Path) -> None:
        if cfg.optimizer.lr == 1e-4:
            raise DataError("bad rows")

    BEHAVE["do"] = fail
    assert call("--multirun", "optimizer.lr=1e-4,1e-5") == 2
    assert len(SEEN) == 2
    assert capsys.readouterr().err.count("error: job 0 (optimizer.lr=0.0001): bad rows\n") == 1


# Resuming


@pytest.mark.parametrize(
    "words",
    [
        ["resume=auto"],
        ["resume=auto", "hydra.run.dir=outputs/day/10-00-00"],
        ["resume=outputs/day/10-00-00"],
        ["resume=outputs/day/10-00-00/"],
        ["resume=outputs/day/10-00-00/checkpoints"],
        ["resume=outputs/day/10-00-00/checkpoints/4"],
        ["resume=outputs/day/10-00-00", "hydra.run.dir=outputs/day/10-00-00"],
    ],
)
def test_resumed_run_goes_on_in_its_folder(workplace: Path, words: list[str]) -> None:
    folder = write_run(workplace / "outputs" / "day" / "10-00-00", 4, 12)
    write_run(workplace / "outputs" / "day" / "11-00-00")  # newer, but without a checkpoint
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text("as it was")
    for number in (1, 2):
        assert call(*words) == 0
        assert (folder / ".hydra" / f"resume-{number}" / "overrides.yaml").is_file()
    assert [run_dir for _, run_dir in SEEN] == [folder, folder]
    assert SEEN[0][0].resume == words[0].split("=")[1]
    assert (folder / ".hydra" / "config.yaml").read_text() == "as it was"


def test_resume_auto_takes_the_checkpoint_written_last(workplace: Path) -> None:
    old = write_run(workplace / "outputs" / "day" / "10-00-00", 4)
    write_run(workplace / "outputs" / "day" / "11-00-00", 1)
    later = 2_000_000_000
    os.utime(old / "checkpoints" / "4" / "manifest.json", (later, later))
    assert run_folder.folder_to_resume("auto", None, workplace / "outputs") == old


def test_resume_ignores_what_is_no_complete_checkpoint(workplace: Path) -> None:
    folder = workplace / "run"
    (folder / "checkpoints" / "7").mkdir(parents=True)
    partial = folder / "checkpoints" / "9.partial"
    partial.mkdir()
    (partial / "manifest.json").write_text("{}")
    for path in ("run", "run/checkpoints", "run/checkpoints/7", "run/checkpoints/9.partial"):
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            run_folder.folder_to_resume(path, None)
    write_run(folder, 3)
    assert run_folder.folder_to_resume("run", None) == Path("run")
    with pytest.raises(CheckpointError, match="checkpoints/7"):
        run_folder.folder_to_resume("run/checkpoints/7", None)


def test_resume_and_another_folder_disagree(workplace: Path) -> None:
    write_run(workplace / "run", 3)
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir=other"):
        run_folder.folder_to_resume("run", Path("other"))


def test_folder_with_a_difficult_name(workplace: Path) -> None:
    name = "it's a run, really=[1] (2)"
    write_run(workplace / name, 3)
    quoted = name.replace("'", "\\'")
    assert call(f"resume='{quoted}'") == 0
    assert SEEN[0][1] == workplace / name


def test_resumed_run_that_cannot_start_is_left_as_it_was(workplace: Path) -> None:
    def fail(cfg: Config, run_dir: Path) -> None:
        with run_folder.claimed(run_dir):
            raise CheckpointError("env.num_envs was 8; write env.num_envs=8 instead")

    BEHAVE["do"] = fail
    folder = write_run(workplace / "run", 3)
    (folder / ".hydra").mkdir()
    (folder / "grpo.log").write_text("so far\n")
    before = snapshot(workplace)
    assert call("resume=run", "env.num_envs=4") == 2
    # A folder that was copied without it has none at first.
    assert SEEN and snapshot(workplace) == {**before, "run/.lock": ""}


def test_record_of_a_resumption_stays_once_it_has_done_something(workplace: Path) -> None:
    def fail(cfg: Config, run_dir: Path) -> None:
        (run_dir / "metrics.jsonl").write_text("more than before")
        raise DataError("late")

    BEHAVE["do"] = fail
    folder = write_run(workplace / "run", 3)
    assert call("resume=run") == 2
    assert (folder / ".hydra" / "resume-1" / "config.yaml").is_file()


def started(folder: Path, *words: str, asynchronous: bool = False) -> Config:
    """Start a run in ``folder`` that writes one checkpoint, after 4 steps."""

    def save(cfg: Config, run_dir: Path) -> None:
        # As the run would: in its checkpoints what was automatic has been decided.
        checkpoint.save(
            run_dir,
            4,
            cfg=resolve_proximal(cfg, asynchronous),
            write_model=lambda where: {},
            state={},
            keep=1,
        )

    BEHAVE["do"] = save
    assert call(f"hydra.run.dir={folder.name}", *words, asynchronous=asynchronous) == 0
    ((cfg, _),) = SEEN
    SEEN.clear()
    return cfg


def test_a_run_that_was_started_otherwise_is_named_with_its_words(workplace: Path) -> None:
    folder = workplace / "run"
    cfg = started(
        folder, "--config-name", "grpo_ifeval", "env.system_prompt='Be brief.'", "optimizer.lr=2e-5"
    )
    words = """grpo.py --config-name=grpo_ifeval 'env.system_prompt='"'"'Be brief.'"'"'' optimizer.lr=2e-5"""
    assert run_folder.launch_command(folder) == words
    assert checkpoint.how_to_continue(folder) == (
        f"this command continues from its last checkpoint: {words} resume={folder}"
    )
    renamed = folder.rename(workplace / "my run, 2")
    *_, resume = shlex.split(checkpoint.how_to_continue(renamed))
    assert accept("env.system_prompt='Be brief.'", resume).resume == str(renamed)
    renamed.rename(folder)
    cfg.optimizer.lr = 1e-5
    with pytest.raises(
        CheckpointError, match=r"was started with optimizer\.lr=2e-05 \(its command was"
    ) as raised:
        checkpoint.check_same_run(folder / "checkpoints" / "4", cfg)
    assert f"(its command was {words})" in str(raised.value)


def test_the_command_that_continues_a_run_has_the_words_of_its_last_resumption(workplace: Path) -> None:
    folder = workplace / "run"
    cfg = started(folder, "optimizer.lr=2e-5")
    first = "grpo.py --config-name=grpo_gsm8k optimizer.lr=2e-5"
    for number in (1, 10, 11):
        assert call("optimizer.lr=2e-5", f"checkpoint.keep={number}", f"resume={folder}") == 0
        for earlier in range(2, 10):
            # As further resumptions would leave them.
            record = folder / ".hydra" / f"resume-{earlier}"
            shutil.copytree(folder / ".hydra/resume-1", record, dirs_exist_ok=True)
    assert (folder / ".hydra/resume-11").is_dir()
    assert checkpoint.how_to_continue(folder).endswith(f" {first} checkpoint.keep=11 resume={folder}")
    # What must not change is what the run was started with.
    assert run_folder.launch_command(folder) == first
    cfg.policy.kl_target = 0.5
    with pytest.raises(CheckpointError) as raised:
        checkpoint.check_same_run(folder / "checkpoints" / "4", cfg)
    assert str(raised.value).startswith(
        f"policy.kl_target=0.5: the run in {folder} was started with policy.kl_target=null "
        f"(its command was {first}); "
    )


def test_the_folder_of_further_configurations_belongs_to_the_words(workplace: Path) -> None:
    (workplace / "mine").mkdir()
    (workplace / "mine" / "my_run.yaml").write_text("defaults: [grpo_gsm8k, _self_]\noptimizer: {lr: 3e-5}\n")
    assert started(workplace / "run", "--config-dir=mine", "--config-name=my_run").optimizer.lr == 3e-5
    words = f"grpo.py --config-name=my_run --config-dir={workplace / 'mine'}"
    assert run_folder.launch_command(workplace / "run") == words


def test_another_tree_of_configurations_and_words_for_hydra_belong_to_the_words(workplace: Path) -> None:
    shutil.copytree(ROOT / "config", workplace / "mine")
    more = ("--config-path=mine", "hydra.verbose=true", "optimizer.lr=3e-5")
    assert started(workplace / "run", *more).optimizer.lr == 3e-5
    words = f"grpo.py --config-name=grpo_gsm8k --config-path={workplace / 'mine'} hydra.verbose=true"
    assert run_folder.launch_command(workplace / "run") == f"{words} optimizer.lr=3e-5"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("overrides.yaml", b""),
        ("overrides.yaml", b"[a=1"),
        ("overrides.yaml", "- env.system_prompt=à".encode()[:-1]),
        ("hydra.yaml", b"hydra: {job: {}}"),
        ("hydra.yaml", b"x"),
        # An alias may stand for a text that is larger than the memory.
        ("overrides.yaml", b"[&a optimizer.lr=1, *a]"),
    ],
)
def test_a_run_whose_words_were_lost_is_resumed_all_the_same(workplace: Path, name: str, text: bytes) -> None:
    folder = workplace / "run"
    started(folder)
    assert run_folder.launch_command(folder) == "grpo.py --config-name=grpo_gsm8k"
    (folder / ".hydra" / name).write_bytes(text)
    assert run_folder.launch_command(folder) == run_folder.launch_command(workplace / "nowhere") == ""
    assert run_folder.public_command(folder / ".hydra") == ""
    assert "; repeat the arguments of the original command" in checkpoint.how_to_continue(folder)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_dry_run_says_what_would_be_resumed(
    workplace: Path, capsys: pytest.CaptureFixture[str], asynchronous: bool
) -> None:
    def dry_run(*words: str, asynchronous: bool = asynchronous) -> int:
        return call(*words, "dry_run=true", asynchronous=asynchronous)

    started(workplace / "run", "optimizer.lr=2e-5", asynchronous=asynchronous)
    before = sorted(workplace.rglob("*"))
    assert dry_run("resume=run", "optimizer.lr=2e-5") == 0
    assert capsys.readouterr().out.startswith("resumes run after step 4\n")
    assert dry_run("resume=run") == 2
    assert "optimizer.lr=1e-05: the run in run" in capsys.readouterr().err
    assert dry_run("resume=run", "optimizer.lr=2e-5", asynchronous=not asynchronous) == 2
    assert "policy.proximal=" in capsys.readouterr().err
    assert dry_run("resume=elsewhere") == 2
    assert f"resume=elsewhere: there is no such folder in {workplace}; write" in capsys.readouterr().err
    assert dry_run("resume=run/checkpoints/5") == 2
    assert "; complete checkpoints there: 4; write" in capsys.readouterr().err
    assert SEEN == [] and sorted(workplace.rglob("*")) == before
    (workplace / "run" / "summary.json").write_text('{"steps": 4}')
    assert dry_run("resume=run", "optimizer.lr=2e-5") == 0
    assert capsys.readouterr().out.startswith("resumes run after step 4, where it has ended: nothing is")


def test_a_glob_sweeps_over_the_files_of_a_group(workplace: Path) -> None:
    # A run of policy=distill needs a teacher.
    assert call("--multirun", "policy=glob(*,exclude=distill)", "optimizer.lr=1e-4") == 0
    assert len(SEEN) == len(list((ROOT / "config" / "policy").glob("*.yaml"))) - 1
    assert len({(cfg.policy.surrogate, cfg.policy.advantage_estimator) for cfg, _ in SEEN}) > 3
    SEEN.clear()
    assert call("--multirun", "policy=glob([maxent,r*,sapo],exclude=[maxent,s*])") == 0
    assert len(SEEN) == 1 and SEEN[0][0].policy.advantage_estimator != "maxent"


def test_dry_run_says_how_long_a_run_is(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f'{{"question": "What is {n} + {n}?", "answer": {2 * n}}}' for n in range(30)]
    (workplace / "sums.jsonl").write_text("\n".join(rows))
    words = ["env=jsonl", "env.data_path=sums.jsonl", "eval.num_problems=5", "train.optim_batch_size=8"]
    words += ["train.total_dialog_turns=null", "train.num_epochs=2", "dry_run=true"]
    assert call(*words, "env.num_envs=4") == 0
    expected = (
        "training: 25 problems, exact_match with weight 1\nheld out: 5 problems, graded by exact_match\n"
    )
    expected += "length: 13 rounds of 4 problems x 8 samples, 52 optimizer steps, 2.08 times 25 problems\n"
    assert capsys.readouterr().out.endswith(expected)
    # Nobody chose a length.
    assert call(*words[:3], "dry_run=true") == 0
    shown = capsys.readouterr()
    expected = "length: 1000 rounds of 8 problems x 8 samples, 1000 optimizer steps, 320 times 25 problems\n"
    assert (
        shown.out.endswith(expected) and "warning: train.total_dialog_turns=64000: this default" in shown.err
    )
    assert call("dry_run=true") == 0
    shown = capsys.readouterr()
    assert shown.out.endswith("length: 1000 rounds of 8 problems x 8 samples, 1000 optimizer steps\n")
    assert "total_dialog_turns" not in shown.err


def test_dry_run_tries_the_rewards(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (workplace / "sums.jsonl").write_text('{"question": "What is 1 + 1?"}\n' * 3)
    (workplace / "mine.py").write_text(
        "def boom(completion, example):\n    raise ValueError('boom at 7')\n\n\n"
        "def few(prompts, completions):\n    return [0.5] * (len(completions) - 1)\n\n\n"
        "def good(prompts, completions):\n    return [float(len(completions))] * len(completions)\n"
    )
    functions = ",".join(f"{name}:mine.py:{name}" for name in ("boom", "few", "good"))
    words = ["env=jsonl", "env.data_path=sums.jsonl", "eval.num_problems=0", "dry_run=true"]
    assert call(*words, f"reward.functions={{{functions}}}") == 0
    shown = capsys.readouterr().err
    warnings = [line for line in shown.splitlines() if line.startswith("warning: reward.functions.")]
    assert len(warnings) == 2 and "reward.functions.boom failed when" in warnings[0], shown
    assert "ValueError: boom at 7" in warnings[0] and "reward.functions.few failed when" in warnings[1]


def test_dry_run_refuses_a_model_and_a_tool_that_cannot_be_loaded(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("model.name=/nowhere/model", "dry_run=true") == 2
    assert "model.name=/nowhere/model: there is no such folder; write" in capsys.readouterr().err
    (workplace / "tools.py").write_text("def look(x):\n    return x\n")
    assert call("env.tools=[tools.py:look]", "dry_run=true") == 2
    assert "whose description cannot be made: " in capsys.readouterr().err


def test_dry_run_reads_sizes_alone_of_a_checkpoint(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started(workplace / "run")
    (file,) = (workplace / "run" / "checkpoints" / "4").glob("trainer*")
    size = file.stat().st_size
    file.write_bytes(bytes(size))
    assert call("resume=run", "dry_run=true") == 0
    assert manifest.find_damage(file.parent, verify_checksums=False) is None
    assert "checksum" in str(manifest.find_damage(file.parent))
    file.write_bytes(bytes(size - 1))
    assert call("resume=run", "dry_run=true") == 2
    assert "no undamaged checkpoint" in capsys.readouterr().err
