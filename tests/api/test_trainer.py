"""``GRPOTrainer``: the run of the command, from Python, with Python's own objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from forked import run_launcher, run_script
from local_pool import LocalPool, collect_locally
from safetensors.torch import load_file
from script_objects import ROWS, Asking, Endless, Item, shorter

from torchrl_grpo import GRPOTrainer
from torchrl_grpo.api.launched import warn
from torchrl_grpo.api.rows import PassedDataset, PassedReward, Rows
from torchrl_grpo.cli import endings
from torchrl_grpo.cli.compose import composer, write_override
from torchrl_grpo.config import parse
from torchrl_grpo.config.derived import reward_weights
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.load import load
from torchrl_grpo.distributed import launch
from torchrl_grpo.errors import ConfigError, DataError, UserError
from torchrl_grpo.observe import report
from torchrl_grpo.rollout import build
from torchrl_grpo.runtime.config_dir import config_dir
from torchrl_grpo.tools.verify_resume import read, unmeasured

if TYPE_CHECKING:
    from datasets import Dataset

SMALL = {
    "env.num_envs": 2,
    "env.repeats": 4,
    "env.answer_format": "plain",
    "inference_model.backend": "transformers",
    "inference_model.dtype": "float32",
    "inference_model.max_model_len": 400,
    "inference_model.max_new_tokens": 8,
    "train_model.autocast": "no",
    "train.total_dialog_turns": 16,
    "eval.num_problems": 4,
    "eval.frequency": 0,
    "logging.progress": False,
}

Make = Callable[..., GRPOTrainer]


def hugging_face(rows: list[dict[str, Any]]) -> Dataset:
    from datasets import Dataset  # which imports pandas

    return Dataset.from_list(rows)


LAUNCHERS = ("torch.distributed.run", "accelerate.commands.launch")


@pytest.fixture
def make(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Builds a trainer of two steps on the tiny model, each in a folder of its own."""
    count = iter(range(100))
    # Drawing takes as long as training; tests/observe looks at the picture.
    monkeypatch.setattr(report, "plot", lambda run_dir, grader: None)

    def build(config: dict[str, Any] | None = None, **arguments: Any) -> GRPOTrainer:
        arguments = {"model": str(tiny_model_dir), "output_dir": tmp_path / f"run{next(count)}", **arguments}
        return GRPOTrainer(config={**SMALL, **(config or {})}, **arguments)

    return build


@pytest.mark.slow
def test_a_run_with_workers_is_evaluated(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    # What Ray's workers do is tested in tests/rollout/test_async_ray.py.
    pools: list[LocalPool] = []
    monkeypatch.setattr(build, "collector_with_ray_workers", collect_locally(pools))
    trainer = make({"collector.max_policy_age": 1}, train_dataset=ROWS, rewards=shorter, asynchronous=True)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval/primary"] == trainer.metrics()[-1]["eval/primary"]
    assert pools and all(pool.closed for pool in pools)
    assert {path.name for path in trainer.output_dir.iterdir()} >= {
        "objects.pkl",
        "python.log",
        "summary.json",
    }


@pytest.mark.slow
def test_a_run_from_python_is_the_run_of_the_command(
    make: Make, repo_root: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = {"reward.weights": {"reasoning_gym": 1.0, "bare_number": 0.1}, "optimizer.lr": 1e-3}
    # The command has one thread here. With more, products may be added in another order.
    config["train.num_threads"] = 1
    words = {**SMALL, **config, "model.name": tiny_model_dir, "hydra.run.dir": tmp_path / "command"}
    script = repo_root / "sota-implementations/grpo/grpo.py"
    flags = [write_override(key, value) for key, value in words.items()]
    done = run_script([script, *flags, "--config-name=grpo_quickstart"])
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [unmeasured(line) for line in read(tmp_path / "command/metrics.jsonl")]
    # torch is imported already, and the second run is in the process of the first.
    for _ in range(2):
        trainer = make(config, config_name="grpo_quickstart")
        summary = trainer.train()
        lines = [unmeasured(line) for line in trainer.metrics()]
        for ours, theirs in zip(lines, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
        assert summary["steps"] == 2 and summary == json.loads(
            (trainer.output_dir / "summary.json").read_text()
        )
    texts = [read(path / "rollouts.jsonl") for path in (tmp_path / "command", trainer.output_dir)]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_rows_rewards_tools_and_an_environment_of_the_script(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    bonus = 0.25

    def with_bonus(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [bonus + len(text) % 3 + 0 * len(true) for text, true in zip(completions, answer, strict=True)]

    def shout(text: str) -> str:
        """Say it loud.

        Args:
            text: What.
        """
        return text.upper()

    class Talk:
        def reset(self, example: Any) -> None:
            self.turns = 0

        def step(self, message: str) -> tuple[str, float, bool]:
            self.turns += 1
            return "Go on.", 1.0, self.turns == 2

    trainer = make(
        train_dataset=ROWS, rewards=[shorter, with_bonus, "bare_number"], config={"reward.workers": 1}
    )
    trainer.train()
    weights = "reward.weights={shorter:1.0,with_bonus:1.0,bare_number:1.0}"
    assert (
        f"rewards: those of reward.functions count beside others, as {weights} says"
        in capsys.readouterr().err
    )
    rows = read(trainer.output_dir / "rollouts.jsonl")
    assert rows[0]["rewards"].keys() == {"shorter", "with_bonus", "bare_number"}
    assert all(row["rewards"]["with_bonus"] == bonus + len(row["response"]) % 3 for row in rows)
    assert not any("errors" in row for row in rows)

    trainer = make(
        train_dataset=ROWS,
        environment=Talk,
        tools=[shout, "calculator"],
        config={"env.max_turns": 3, "inference_model.max_model_len": 900},
    )
    trainer.train()
    rows = read(trainer.output_dir / "rollouts.jsonl")
    assert "shout" in rows[0]["prompt"] and "calculator" in rows[0]["prompt"]
    assert {row["reward"] for row in rows} <= {0.0, 1.0, 2.0} and not any("errors" in row for row in rows)


@pytest.mark.slow
def test_a_dataset_with_rewards_of_its_own(make: Make) -> None:
    trainer = make(
        {"env.shuffle": False, "eval.num_problems": 8, "eval.threshold": 1},
        train_dataset=Asking(10),
        eval_dataset=Asking(0),
    )
    trainer.train()
    rows = read(trainer.output_dir / "rollouts.jsonl")
    assert [row["reward"] for row in rows[:8]] == [10.0] * 4 + [11.0] * 4
    assert "What is 10?" in rows[0]["prompt"]
    # Of the eight that are held out, all but the first have a reward of 1 or more.
    assert trainer.metrics()[0]["eval/accuracy"] == 7 / 8


@pytest.mark.slow
def test_rows_with_rewards_of_their_own(make: Make) -> None:
    config = {"env.shuffle": False, "reward.timeout_s": 20}
    rows: list[Any] = [Item(number) for number in range(8)]
    trainer = make(config, train_dataset=rows, eval_dataset=[Item(9)], rewards=shorter)
    trainer.train()
    rollouts = read(trainer.output_dir / "rollouts.jsonl")
    assert "What is 0?" in rollouts[0]["prompt"] and not any("errors" in row for row in rollouts)
    assert [row["rewards"]["get_reward"] for row in rollouts[:8]] == [0.0] * 4 + [1.0] * 4
    # Other rewards are added to that of the rows.
    assert all("shorter" in row["rewards"] for row in rollouts)
    assert all(row["reward"] == pytest.approx(sum(row["rewards"].values())) for row in rollouts)
    assert trainer.metrics()[0]["eval/primary"] == trainer.metrics()[0]["eval/reward/get_reward"] == 9.0


def test_mappings_with_rewards_of_their_own() -> None:
    rows = [{"question": "Say a.", "get_reward": lambda text: len(text)}, {"question": "Say b."}]
    dataset = PassedDataset(rows[:1], None)
    (row,) = dataset("train") or []
    assert row == {"question": "Say a.", "_split": "train", "_index": 0}
    assert PassedReward(dataset)("four", Example("1", [], columns=row)) == 4.0
    with pytest.raises(DataError, match=r"train_dataset\[1\] has no get_reward"):
        PassedDataset(rows, None)("train")


@pytest.mark.parametrize(
    ("arguments", "weights", "grader"),
    [
        ({"train_dataset": Asking(0)}, {"get_reward": 1.0}, "get_reward"),
        ({"train_dataset": Asking(0), "rewards": shorter}, {"get_reward": 1.0, "shorter": 1.0}, "get_reward"),
        ({"train_dataset": ROWS, "eval_dataset": Asking(0)}, {"exact_match": 1.0}, "get_reward"),
        (
            {"train_dataset": ROWS, "eval_dataset": Asking(0), "rewards": shorter},
            {"shorter": 1.0},
            "get_reward",
        ),
        ({"train_dataset": Asking(0), "eval_dataset": ROWS}, {"get_reward": 1.0}, "exact_match"),
        (
            {"train_dataset": Asking(0), "eval_dataset": ROWS, "rewards": shorter},
            {"get_reward": 1.0, "shorter": 1.0},
            "shorter",
        ),
    ],
)
def test_rewards_of_data_sets_are_read_beside_others(
    make: Make, arguments: dict[str, Any], weights: dict[str, float], grader: str | None
) -> None:
    cfg = make(**arguments).cfg
    assert cfg.reward.weights == weights and cfg.eval.reward == grader
    assert "get_reward" in cfg.reward.functions
    changed = make({"eval.reward": "exact_match", "reward.weights": {"exact_match": 1.0}}, **arguments).cfg
    assert changed.reward.weights == {"exact_match": 1.0} and changed.eval.reward == "exact_match"
    # Rows without a reward of their own are not trained on one.
    assert ("get_reward" in reward_weights(changed)) == ("get_reward" in weights)


def test_a_function_counts_beside_the_weights_of_a_configuration_as_with_the_command(make: Make) -> None:
    cfg = make(config_name="grpo_quickstart", rewards=shorter).cfg
    with composer(config_dir(), "grpo_quickstart") as tree:
        (words,) = tree.jobs(["++reward.functions={shorter: my.py:shorter}"], sweep=False)
        command = parse(tree.compose(words).node)
    assert reward_weights(cfg) == reward_weights(command)
    assert reward_weights(cfg) == {"reasoning_gym": 1.0, "closeness": 0.3, "bare_number": 0.1, "shorter": 1.0}


@pytest.mark.slow
def test_a_hugging_face_dataset_and_a_chat_column(make: Make) -> None:
    chat = [
        {"messages": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in ROWS
    ]
    trainer = make(train_dataset=hugging_face(chat), rewards=shorter)
    assert trainer.train()["steps"] == 2


@pytest.mark.slow
def test_prompts_and_a_function_are_enough(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [{"prompt": f"Greet the guests of room {number}."} for number in range(40)]
    trainer = make({"eval.num_problems": None}, train_dataset=prompts, rewards=shorter)
    summary = trainer.train()
    assert (summary["grader"], summary["eval_problems"], summary["accuracy_after"]) == ("shorter", 8, None)
    assert 0 < summary["primary_before"] <= 1 and 0 < summary["primary_after"] <= 1
    output = capsys.readouterr()
    assert "8 of 40 questions are held out" in output.err and "graded by          shorter\n" in output.out


@pytest.mark.parametrize("is_endless", [False, True])
def test_data_sets_that_stream_are_read_as_far_as_needed(make: Make, is_endless: bool) -> None:
    # The type of the argument accepts both.
    stream: Rows = Endless() if is_endless else hugging_face(ROWS).to_iterable_dataset()
    config = {"eval.num_problems": None, "env.shuffle_buffer": 13, "reward.weights": {"format": 1}}
    cfg = make(config, train_dataset=stream, rewards=["format"]).cfg
    problems = load(cfg)
    if is_endless:
        # Four problems of two rounds, 200 held-out ones at most, and 13 further ones.
        assert (len(problems.train), len(problems.held_out)) == (217 - 21, 21)
        assert "is a stream, of which the first 217 rows are read" in problems.notes[0]
    else:
        # Four sums are those of held-out ones, in another order.
        assert (len(problems.train), len(problems.held_out)) == (len(ROWS) - 8 - 4, 8)


@pytest.mark.slow
def test_evaluation_resumption_and_saving(make: Make, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = {"optimizer.lr": 1e-2, "train.checkpoint_frequency": 1, "train.total_dialog_turns": 24}
    trainer = make(config, train_dataset=ROWS, rewards=shorter)
    before = trainer.evaluate()
    assert 0 < before["eval/primary"] <= 1 and not trainer.metrics()
    with pytest.raises(ConfigError, match="no checkpoint to save"):
        trainer.save(tmp_path / "saved")
    trainer.train()
    whole = trainer.metrics()
    assert [line["step"] for line in whole] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="holds an earlier run"):
        trainer.train()
    metrics = trainer.evaluate()
    assert metrics == {name: value for name, value in whole[-1].items() if name in metrics}
    saved = AutoModelForCausalLM.from_pretrained(trainer.save(tmp_path / "saved"))
    written = AutoModelForCausalLM.from_pretrained(trainer.output_dir / "checkpoints/3/model")
    assert all(map(torch.equal, saved.parameters(), written.parameters()))
    with pytest.raises(ConfigError, match="exists already"):
        trainer.save(tmp_path / "saved")
    # As if the run had ended after two steps.
    (trainer.output_dir / "summary.json").unlink()
    (trainer.output_dir / "checkpoints/3").rename(tmp_path / "3")
    again = make(config, train_dataset=ROWS, rewards=shorter, output_dir=trainer.output_dir)
    again.train(resume=True)
    for line, expected in zip(again.metrics(), whole, strict=True):
        assert unmeasured(line) == pytest.approx(unmeasured(expected), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"config": {"optimizer.lrr": 1}}, r"optimizer\.lrr.*optimizer\.lr"),
        ({"config": {"optimizer.lr": "fast"}}, r"optimizer\.lr"),
        ({"config": {"env.num_envs": 0}}, r"env\.num_envs=0: it must be at least 1"),
        ({"config_name": "grpo_gsm9k"}, "grpo_gsm9k"),
        ({"train_dataset": []}, "train_dataset has no rows"),
        ({"eval_dataset": ROWS}, "without train_dataset"),
        ({"rewards": [3]}, "rewards has 3, which cannot be called"),
        ({"rewards": 3}, "rewards is int 3; give functions"),
        ({"tools": 3}, "tools is int 3; give functions"),
        ({"rewards": [shorter, shorter]}, "rewards has two functions 'shorter'"),
        ({"rewards": "no_such_reward"}, r"reward\.weights\.no_such_reward"),
        ({"model": 3}, "model is int"),
        ({"tools": ["hammer"]}, r"env\.tools"),
        ({"config": {"resume": "auto"}}, r"config has 'resume'; write train\(resume=True\) instead"),
        ({"config": {"hydra.run.dir": "x"}}, r"'hydra\.run\.dir'; write output_dir instead"),
        ({"config": {"train_model.num_devices": 2}}, r"num_devices=2: .* torchrun --nproc-per-node 2 SCRIPT"),
        # Arguments of other trainers, and misspelled ones.
        ({"use_vllm": True}, r"no such argument: use_vllm: write inference_model\.backend=vllm instead"),
        ({"eval_steps": 10}, r"eval_steps: write eval\.frequency=10 instead"),
        ({"args": object()}, r"args: write config instead. Keys and values of this project"),
        ({"max_prompt_length": 9}, r"max_prompt_length: write inference_model\.max_model_len instead"),
        (
            {"reward_funcs": [shorter], "beta": 0.1},
            r"reward_funcs: write rewards .*; beta: write policy\.kl_c",
        ),
        ({"reward": shorter}, "reward: write rewards instead"),
        ({"train_datasets": ROWS}, r"train_datasets: write train_dataset=\.\.\. instead"),
        ({"policy": "dapo"}, r"policy: it goes into config, as config=\{'policy': NAME\}"),
        ({"learning_rate": 1e-5}, r"optimizer\.lr=1e-05 instead \(in config, as config=\{'optimizer\.lr'"),
        ({"nothing_like_it": 1}, "nothing_like_it: write one of the keys"),
        # What is no list of rows.
        ({"train_dataset": iter(ROWS)}, r"train_dataset is list_iterator, which has no length .*islice"),
        ({"train_dataset": set("ab")}, r"train_dataset is set, which has no length or rows by number"),
        ({"train_dataset": ROWS, "eval_dataset": iter(ROWS)}, "eval_dataset is list_iterator"),
        ({"train_dataset": {"train": ROWS, "test": ROWS}}, "is dict with the parts 'train', 'test'"),
        (
            {"train_dataset": "rows.jsonl"},
            r"'rows\.jsonl' is no data set; .*\"env\.data_path\": \"rows\.jsonl\"",
        ),
        ({"train_dataset": ["two plus two"]}, r"train_dataset\[0\] is str 'two plus two', not a mapping"),
    ],
)
def test_mistakes_name_the_argument(make: Make, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make(**arguments)


def test_a_data_frame_is_to_be_given_as_rows(make: Make) -> None:
    with pytest.raises(UserError, match=r"is DataFrame.*to_dict"):
        make(train_dataset=hugging_face(ROWS).to_pandas())


def test_a_configuration_of_another_trainer_is_said() -> None:
    with pytest.raises(ConfigError, match=r"config is object, not a mapping of keys to values"):
        GRPOTrainer(config=object())  # type: ignore[arg-type]


def test_a_mistake_leaves_no_folder(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"env\.num_envs=0"):
        make({"env.num_envs": 0}, output_dir=None)
    assert not list(tmp_path.glob("outputs/*/*"))
    first, second = make(output_dir=None), make(output_dir=None)
    assert first.output_dir != second.output_dir and first.output_dir.is_dir()


@pytest.mark.parametrize(("rank", "says"), [("0", "error: "), ("1", "error: rank 1: ")])
def test_a_mistake_under_a_launcher_is_one_line(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str, says: str
) -> None:
    # No launcher ends rank 1 here, as none does if rank 0 has no mistake.
    monkeypatch.setattr(endings, "_PATIENCE_S", 0.01)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    mistakes: list[dict[str, Any]] = [
        {"config": {"env.num_envs": 0}},
        {"use_vllm": True},
        {"train_dataset": []},
    ]
    for mistake in mistakes:
        with pytest.raises(SystemExit) as ended:
            make(**mistake)
        assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith(says) for line in lines)


# A launcher ends all ranks when one has failed, so the second must not fail before the first has reported.
MISTAKEN = """
import json, os, sys
from torchrl_grpo import GRPOTrainer
from torchrl_grpo.cli import endings

if sys.argv[1] == "1":
    # Rank 0 has no mistake to report.
    endings._PATIENCE_S = 0.1
envs = 0 if os.environ["RANK"] in sys.argv[1] else 2
config = {**json.loads(sys.argv[4]), "env.num_envs": envs}
rows = [{"question": f"{a} plus {b}", "answer": str(a + b)} for a in range(5) for b in range(5)]
GRPOTrainer(sys.argv[2], rows, rewards="exact_match", config=config, output_dir=sys.argv[3]).train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistaken", "says"), [("01", "error: env.num_envs=0"), ("1", "error: rank 1: env.num_envs=0")]
)
def test_a_mistake_of_one_rank_ends_all_of_them(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, mistaken: str, says: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(MISTAKEN)
    words = ["--nproc-per-node", "2"]
    words += [str(script), mistaken, str(tiny_model_dir), str(tmp_path / "run"), json.dumps(SMALL)]
    done = run_launcher("torch.distributed.run", *words, cwd=tmp_path)
    assert done.returncode != 0
    assert [line[: len(says)] for line in done.stderr.splitlines() if line.startswith("error: ")] == [says]


def test_processes_that_accelerate_has_not_started_are_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setattr(
        launch, "parent_argv", lambda: ["accelerate", "launch", "--num_processes", "2", "x.py"]
    )
    warn()
    assert "accelerate launch was asked for 2 processes and has started one" in capsys.readouterr().err


SCRIPT = """
import json, os, sys
from torchrl_grpo import GRPOTrainer

def bare(completion, example):
    return float(completion.strip().isdigit()) + 0.1 * len(completion)

folder, config = sys.argv[1], json.loads(sys.argv[2])
rows = [{"question": f"{a} plus {b}", "answer": str(a + b)} for a in range(5) for b in range(5)]
trainer = GRPOTrainer(sys.argv[3], rows, rewards=["exact_match", bare], config=config, output_dir=folder)
summary = trainer.train()
trainer.save(f"{folder}-model")
steps = [line["step"] for line in trainer.metrics()]
found = {"summary": summary, "evaluation": trainer.evaluate(), "steps": steps}
with open(f"{folder}/rank{os.environ.get('RANK', 'alone')}.json", "w") as file:
    json.dump(found, file)
"""


# The first steps of Adam follow a gradient's sign, also where it is rounding; not with this eps.
OF_SCRIPT = {**SMALL, "train.num_threads": 1, "optimizer.lr": 1e-3, "optimizer.eps": 1e-2}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def alone(script: Path, tiny_model_dir: Path) -> Path:
    """Run folder of the script in one process."""
    folder = script.with_name("alone")
    done = run_script([script, folder, json.dumps(OF_SCRIPT), tiny_model_dir])
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.float32
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_that_a_launcher_starts_twice_trains_as_one_process(
    repo_root: Path, tmp_path: Path, tiny_model_dir: Path, script: Path, alone: Path, launcher: str
) -> None:
    folder = tmp_path / "two"
    how = {
        "torch.distributed.run": ["--nproc-per-node", "2"],
        "accelerate.commands.launch": ["--config_file", str(repo_root / "config/accelerate/multi_gpu.yaml")],
    }[launcher]
    words = [*how, str(script), str(folder), json.dumps(OF_SCRIPT), str(tiny_model_dir)]
    # Ranks are forks. tests/distributed/test_ranks.py has real ones, and tests/docs/test_notebooks.py a real
    # process that trains from Python.
    done = run_launcher(launcher, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    alone_lines, two = (
        [unmeasured(line) for line in read(place / "metrics.jsonl")] for place in (alone, folder)
    )
    assert len(alone_lines) == 3
    for ours, expected in zip(two, alone_lines, strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-5)
    weights = [load_file(Path(f"{place}-model") / "model.safetensors") for place in (alone, folder)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-5)
    # Methods return the same on every rank.
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and first["summary"]["steps"] == 2 and first["steps"] == [0, 1, 2]
    assert first["evaluation"]["eval/accuracy"] == alone_lines[-1]["eval/accuracy"]


def test_what_cannot_leave_the_process_is_said(make: Make) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"held_by_a_lock: .* cannot be sent to another process"):

        def held_by_a_lock(completion: str, example: Any) -> float:
            with lock:
                return 1.0

        make(train_dataset=ROWS, rewards=held_by_a_lock)


def test_a_row_that_is_no_mapping_is_said(make: Make) -> None:
    trainer = make(train_dataset=[*ROWS, "two plus two"], rewards=shorter)
    with pytest.raises(DataError, match=r"train_dataset\[25\] is str 'two plus two', not a mapping"):
        trainer.train()
