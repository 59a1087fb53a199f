"""Checkpoints: written aside, damaged ones skipped, no code in them, the same run or a clear refusal."""

from __future__ import annotations

import ast
import errno
import json
import os
import pickle
import random
import re
import resource
import shutil
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_utils

from torchrl_grpo.checkpoints import checkpoint, manifest
from torchrl_grpo.checkpoints import run_dir as run_folder
from torchrl_grpo.config import Config
from torchrl_grpo.config.keys import show
from torchrl_grpo.config.resume import is_changeable_on_resume
from torchrl_grpo.config.schema import keys
from torchrl_grpo.config.values import AnswerFormat, Autocast, Dtype, OverlongPrompts
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import check_length
from torchrl_grpo.errors import CheckpointError, DataError, RunFolderLost
from torchrl_grpo.models import saving
from torchrl_grpo.runtime.files.direct_file import Written
from torchrl_grpo.training.state import Counters, random_state, seed_everything, set_random_state


def write_model(folder: Path) -> dict[Path, Written]:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 20)
    return {}


def save(run_dir: Path, step: int, keep: int = 5, **state: Any) -> Path:
    return checkpoint.save(
        run_dir, step, cfg=Config(), write_model=write_model, state={"step": step, **state}, keep=keep
    )


def steps(run_dir: Path) -> list[str]:
    """Every name in the folder, hidden ones as well."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_what_is_saved_is_loaded(run_dir: Path) -> None:
    tensors: dict[str, Any] = {
        "a": torch.randn(3),
        "nested": [torch.arange(4), {"b": torch.ones(2, dtype=torch.bool)}],
    }
    folder = save(run_dir, 7, tensors=tensors, plain=[1, 2.5, None, "text", (3, 4)])
    assert folder == run_dir / "checkpoints" / "7"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "config.yaml",
        "manifest.json",
        "model/config.json",
        "model/model.safetensors",
        "trainer.pt",
    }
    assert manifest.find_damage(folder) is None
    loaded = checkpoint.load_state(folder)
    assert loaded["plain"] == [1, 2.5, None, "text", (3, 4)]
    assert torch.equal(loaded["tensors"]["a"], tensors["a"])
    assert torch.equal(loaded["tensors"]["nested"][1]["b"], torch.ones(2, dtype=torch.bool))
    assert checkpoint.find(run_dir, "auto") == folder


def test_only_the_newest_are_kept_and_nothing_lies_around(run_dir: Path) -> None:
    for step in (5, 10, 15, 100):
        save(run_dir, step, keep=2)
    assert steps(run_dir) == ["100", "15"], "by number, not by name"


def test_a_step_that_is_written_again_is_replaced(run_dir: Path) -> None:
    save(run_dir, 5, value=1)
    save(run_dir, 5, value=2)
    assert steps(run_dir) == ["5"]
    assert checkpoint.load_state(checkpoint.find(run_dir, "auto"))["value"] == 2


@pytest.mark.parametrize("keep", [1, 2])
def test_after_resuming_an_earlier_one_the_later_ones_are_set_aside(run_dir: Path, keep: int) -> None:
    for step in (5, 10):
        save(run_dir, step, branch="old")
    for _ in range(2):
        with pytest.warns(UserWarning, match="10 is later than the step resumed and is kept as 10.set-aside"):
            checkpoint.rename_checkpoints_after(run_dir, 5)
        save(run_dir, 10, keep=9, branch="again")
    with pytest.warns(UserWarning, match="set-aside"):
        checkpoint.rename_checkpoints_after(run_dir, 5)
    newest = save(run_dir, 6, keep=keep, branch="new")
    # What was set aside before is kept too.
    aside = ["10.set-aside", "10.set-aside-1", "10.set-aside-2"]
    assert steps(run_dir) == [*aside, *(["5", "6"][-keep:])]
    assert checkpoint.find(run_dir, "auto") == newest
    assert checkpoint.load_state(newest)["branch"] == "new"


def test_a_later_one_never_pushes_out_the_one_just_written(run_dir: Path) -> None:
    for step in (5, 10, 6):
        save(run_dir, step, keep=1)
    assert steps(run_dir) == ["10", "6"]


def test_a_write_that_fails_harms_no_older_checkpoint(run_dir: Path) -> None:
    def fail(folder: Path) -> dict[Path, Written]:
        write_model(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    save(run_dir, 5, value=1)
    for step in (5, 10):
        with pytest.raises(CheckpointError, match=r"No space left on device; 0\.00 GiB") as raised:
            checkpoint.save(run_dir, step, cfg=Config(), write_model=fail, state={}, keep=1)
        assert f"checkpoints/{step}: " in str(raised.value) and f"resume={run_dir}" in str(raised.value)
        newest = checkpoint.find(run_dir, "auto")
        assert newest.name == "5" and checkpoint.load_state(newest)["value"] == 1
        assert steps(run_dir) == ["5"], "what it had written takes no room"


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ("removed", RunFolderLost, "was deleted or moved while the run wrote to it"),
        ("cut", OSError, "bytes were written to it, and it has another size: .*trainer.pt"),
    ],
)
def test_a_file_that_somebody_changes_while_it_is_written_gets_into_no_checkpoint(
    run_dir: Path, change: str, error: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run_dir, 5)
    save_whole = torch.save

    def save_and_change(state: Any, file: Any) -> None:
        save_whole(state, file)
        monkeypatch.setattr(os, "close", close_and_change)

    def close_and_change(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        close(descriptor)
        if path.name == "trainer.pt":
            path.unlink() if change == "removed" else os.truncate(path, 100)

    close = os.close
    monkeypatch.setattr(torch, "save", save_and_change)
    with pytest.raises(error, match=reason):
        save(run_dir, 10, keep=1)
    assert [name for name in steps(run_dir) if not name.startswith(".")] == ["5"]


def test_an_error_of_another_kind_is_no_full_disk(run_dir: Path) -> None:
    def fail(folder: Path) -> dict[Path, Written]:
        write_model(folder)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        checkpoint.save(run_dir, 5, cfg=Config(), write_model=fail, state={}, keep=1)
    assert steps(run_dir) == []


def test_what_a_killed_write_left_gets_into_no_checkpoint(run_dir: Path) -> None:
    leftover = run_dir / "checkpoints" / ".writing-10" / "model" / "leftover"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("x")
    folder = save(run_dir, 10, keep=1)
    assert not (folder / "model" / "leftover").exists()
    assert manifest.find_damage(folder) is None


@pytest.mark.parametrize(
    ("large", "reason"),
    [
        ("model", r"\(\[Errno 27\] File too large"),
        ("merged", r"I/O error: File too large \(os error 27\)"),
        ("tokenizer", r"\(File too large \(os error 27\)"),
        ("state", r"\(\[Errno 27\] File too large"),
    ],
)
def test_a_file_that_the_system_cuts_off_is_one_clear_message(
    run_dir: Path, tiny_model_dir: Path, large: str, reason: str
) -> None:
    save(run_dir, 5)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    writers: dict[str, Callable[[Path], Any]] = {
        "model": partial(saving.save, model, tokenizer),
        "merged": partial(saving.save_merged, model, tokenizer),
        "tokenizer": tokenizer.save_pretrained,
    }
    write = writers.get(large, write_model)
    state: dict[str, Any] = {"tensor": torch.zeros(2**16)} if large == "state" else {}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, limits[1]))
    try:
        # Each library puts what the system says in words of its own.
        with pytest.raises(CheckpointError, match=f"/10: the checkpoint could not be written .*{reason}"):
            checkpoint.save(run_dir, 10, cfg=Config(), write_model=write, state=state, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert modeling_utils.safe_save_file is safetensors.torch.save_file
    assert steps(run_dir) == ["5"] and manifest.find_damage(run_dir / "checkpoints" / "5") is None


def test_leftovers_of_a_killed_process_are_ignored_and_cleaned(run_dir: Path) -> None:
    save(run_dir, 5)
    root = run_dir / "checkpoints"
    for name in (".writing-10", ".removing-3"):
        shutil.copytree(root / "5", root / name)
    (root / "10-notes").mkdir()
    (root / ".writing-10" / "manifest.json").unlink()
    assert checkpoint.find(run_dir, "auto").name == "5"
    checkpoint.clean(run_dir)
    assert steps(run_dir) == ["10-notes", "5"]
    checkpoint.clean(run_dir)
    checkpoint.clean(run_dir / "never made")


@pytest.mark.parametrize("name", [".writing-10", ".removing-5", "10", "10.set-aside"])
@pytest.mark.parametrize("kind", ["file", "link", "broken link"])
def test_a_file_or_link_in_the_place_of_a_folder_is_no_obstacle(run_dir: Path, name: str, kind: str) -> None:
    save(run_dir, 5)
    kept = shutil.copytree(run_dir / "checkpoints" / "5", run_dir / "elsewhere")
    place = run_dir / "checkpoints" / name
    if kind == "file":
        place.touch()
    else:
        place.symlink_to(kept if kind == "link" else run_dir / "nowhere")
    checkpoint.clean(run_dir)
    save(run_dir, 10, keep=1)
    assert checkpoint.find(run_dir, "auto").name == "10"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.rename_checkpoints_after(run_dir, 5)
    aside = ["10.set-aside", "10.set-aside-1"] if name == "10.set-aside" else ["10.set-aside"]
    assert steps(run_dir) == aside and (kept / "trainer.pt").exists()


def test_a_link_to_a_complete_checkpoint_is_no_leftover(run_dir: Path) -> None:
    folder = save(run_dir, 5)
    (run_dir / "checkpoints" / ".writing-7").symlink_to(folder)
    shutil.copytree(folder, run_dir / "checkpoints" / ".writing-notes")
    checkpoint.clean(run_dir)
    assert steps(run_dir) == ["5"]


@pytest.mark.parametrize("name", ["²", "٣", "1_0", "+7"])
def test_only_plain_numbers_are_steps(run_dir: Path, name: str) -> None:
    folder = save(run_dir, 5)
    shutil.copytree(folder, folder.with_name(name))
    assert checkpoint.find(run_dir, "auto").name == "5"
    assert run_folder.complete_checkpoints(run_dir) == [folder]
    with pytest.raises(CheckpointError, match="no complete checkpoint to resume from"):
        run_folder.folder_to_resume(str(folder.with_name(name)), None)
    save(run_dir, 10, keep=1)
    assert steps(run_dir) == sorted(["10", name])


@pytest.mark.parametrize("deleted", ["checkpoints", "checkpoints/.writing-10/model"])
def test_a_folder_that_is_deleted_while_it_is_written_is_told(run_dir: Path, deleted: str) -> None:
    def write(folder: Path) -> dict[Path, Written]:
        written = write_model(folder)
        shutil.rmtree(run_dir / deleted)
        return written

    with pytest.raises(RunFolderLost, match=r"checkpoints/.writing-10 was deleted or moved while the run"):
        checkpoint.save(run_dir, 10, cfg=Config(), write_model=write, state={}, keep=1)
    assert save(run_dir, 10).is_dir()


def test_a_folder_that_is_deleted_once_it_is_written_is_told(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = checkpoint._fill

    def fill_and_delete(*content: Any) -> None:
        fill(*content)
        shutil.rmtree(run_dir)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_fill", fill_and_delete)
        with pytest.raises(RunFolderLost, match=rf"{run_dir}/checkpoints was deleted or moved while the run"):
            save(run_dir, 10)
    assert save(run_dir, 10).is_dir()


def test_a_kill_while_an_old_one_is_removed_leaves_no_half_checkpoint(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run_dir, 5)
    with monkeypatch.context() as patch:

        def die(path: Path, **options: Any) -> None:
            if path.name.startswith(".removing") and path.exists():
                (path / "trainer.pt").unlink()
                raise KeyboardInterrupt

        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            save(run_dir, 10, keep=1)
    assert steps(run_dir) == [".removing-5", "10"]
    assert checkpoint.find(run_dir, "auto").name == "10"
    save(run_dir, 15, keep=1)
    checkpoint.clean(run_dir)
    assert steps(run_dir) == ["15"]


def test_a_kill_while_one_is_replaced_loses_neither(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run_dir, 5, value="first")
    honest = Path.rename
    with monkeypatch.context() as patch:

        def die(path: Path, target: Path) -> Path:
            if target.name == "5":
                raise KeyboardInterrupt
            return honest(path, target)

        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            save(run_dir, 5, value="second")
    assert steps(run_dir) == [".removing-5", ".writing-5"]
    checkpoint.clean(run_dir)
    assert steps(run_dir) == ["5"]
    assert checkpoint.load_state(checkpoint.find(run_dir, "auto"))["value"] == "second"


def truncate(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    path = folder / "trainer.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_manifest(text: str) -> Any:
    return lambda folder: (folder / "manifest.json").write_text(text)


def remove(path: Path) -> Path:
    path.unlink()
    return path


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest["files"])
    (folder / "manifest.json").write_text(json.dumps(manifest))


def forget_the_model(folder: Path) -> None:
    rewrite_manifest(folder, lambda files: [files.pop(name) for name in [*files] if "model/" in name])


def list_a_long_name(folder: Path) -> None:
    rewrite_manifest(folder, lambda files: files.update({"x" * 300: {"bytes": 1, "crc32": 0}}))


DAMAGES = {
    "truncated": (truncate, r"model/model.safetensors has 5119 bytes instead of 5120"),
    "flipped byte": (flip, "trainer.pt has another checksum"),
    "missing file": (lambda folder: (folder / "config.yaml").unlink(), "config.yaml is missing"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
    "half a manifest": (replace_manifest('{"step": 10, "fi'), "manifest.json cannot be read"),
    "another manifest": (replace_manifest("[]"), "manifest.json cannot be read"),
    "manifest without files": (replace_manifest('{"step": 10}'), "manifest.json cannot be read"),
    "manifest without sums": (
        replace_manifest('{"files": {"trainer.pt": {}}}'),
        "manifest.json cannot be read",
    ),
    "deep manifest": (replace_manifest("[" * 100_000), "manifest.json cannot be read"),
    "no files in the manifest": (replace_manifest('{"files": {}}'), "does not list config.yaml"),
    "part of the files in the manifest": (forget_the_model, "does not list model"),
    "missing model": (lambda folder: shutil.rmtree(folder / "model"), "model is missing"),
    "manifest that blocks": (
        lambda folder: os.mkfifo(remove(folder / "manifest.json")),
        "manifest.json cannot be read .*not a regular file",
    ),
    "file that blocks": (lambda folder: os.mkfifo(remove(folder / "trainer.pt")), "trainer.pt is missing"),
    "name that is too long": (list_a_long_name, "cannot be read .File name too long"),
    "manifest of bytes": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe{}"), "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_one_is_skipped_with_a_warning(run_dir: Path, kind: str) -> None:
    harm, reason = DAMAGES[kind]
    save(run_dir, 5)
    newest = save(run_dir, 10)
    harm(newest)
    with pytest.warns(UserWarning, match=f"checkpoints/10 is skipped: .*{reason}") as caught:
        assert checkpoint.find(run_dir, "auto").name == "5"
    assert len(caught) == 1
    # Named, it is an error: nobody should resume another one than the one named.
    with pytest.raises(CheckpointError, match=f"resume={newest}.*{reason}.*name another checkpoint"):
        checkpoint.find(run_dir, str(newest))


def test_one_with_the_former_checksums_is_checked_too(run_dir: Path) -> None:
    folder = save(run_dir, 5)

    def former(files: dict[str, Any]) -> None:
        for name in files:
            content = (folder / name).read_bytes()
            files[name] = {"bytes": len(content), "crc32": zlib.crc32(content)}

    rewrite_manifest(folder, former)
    assert manifest.find_damage(folder) is None
    flip(folder)
    assert manifest.find_damage(folder) == "trainer.pt has another checksum than when it was written"


def test_find_takes_the_one_named_and_the_newest_otherwise(run_dir: Path) -> None:
    for step in (5, 10):
        save(run_dir, step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.find(run_dir, str(run_dir / "checkpoints" / "5")).name == "5"
        assert checkpoint.find(run_dir, f"{run_dir}/checkpoints/5/").name == "5"
        for resume in ("auto", str(run_dir), str(run_dir / "checkpoints")):
            assert checkpoint.find(run_dir, resume).name == "10"


def test_find_says_when_there_is_nothing(run_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no undamaged checkpoint; write resume=null"):
        checkpoint.find(run_dir, "auto")
    truncate(save(run_dir, 5))
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(CheckpointError, match="no undamaged"):
        checkpoint.find(run_dir, "auto")
    with pytest.raises(CheckpointError, match=r"checkpoints/99: its manifest.json cannot be read"):
        checkpoint.find(run_dir, str(run_dir / "checkpoints" / "99"))


def test_the_same_configuration_is_the_same_run(run_dir: Path) -> None:
    folder = save(run_dir, 5)
    checkpoint.check_same_run(folder, Config())
    free = Config(resume="auto")
    free.logging.backends = ["csv"]
    free.checkpoint.keep = 9
    free.train.checkpoint_frequency = 1
    free.train.max_skipped_steps = 50
    # What a run that ran out of memory is told to change, and what only rounds otherwise.
    free.train.max_tokens_per_microbatch = 512
    free.inference_model.gpu_memory_utilization = 0.2
    free.train_model.fused_head = False
    # What a run is told to change whose engine and trainer round too differently.
    free.inference_model.max_logprob_diff = 2.0
    free.train_model.autocast = Autocast("no")
    free.inference_model.dtype = free.ref_model.dtype = Dtype("float32")
    free.inference_model.backend = "transformers"
    checkpoint.check_same_run(folder, free)


def test_a_run_from_before_a_key_existed_is_the_same_run(run_dir: Path) -> None:
    folder = save(run_dir, 5)
    saved = folder / "config.yaml"
    lines = saved.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.split(":")[0].strip() not in {"answer_format", "engine_args"}]
    assert len(kept) == len(lines) - 2
    saved.write_text("".join(kept))
    checkpoint.check_same_run(folder, Config())
    changed = Config()
    changed.env.answer_format = AnswerFormat("plain")
    with pytest.raises(CheckpointError, match=r"env.answer_format=plain.*started with .*=tags"):
        checkpoint.check_same_run(folder, changed)


def test_the_card_of_a_model_may_be_edited(run_dir: Path) -> None:
    def write(path: Path) -> dict[Path, Written]:
        (path / "README.md").write_text("a")
        return write_model(path)

    folder = checkpoint.save(run_dir, 5, cfg=Config(), write_model=write, state={"step": 5}, keep=5)
    (folder / "model/README.md").write_text("edited")
    assert manifest.find_damage(folder) is None
    (folder / "model/README.md").unlink()
    assert manifest.find_damage(folder) is None


def test_a_run_with_the_earlier_number_of_held_out_problems_is_the_same_run(run_dir: Path) -> None:
    saved = save(run_dir, 5) / "config.yaml"
    before = saved.read_text()
    saved.write_text(before.replace("num_problems: null", "num_problems: 200"))
    assert saved.read_text() != before
    checkpoint.check_same_run(saved.parent, Config())
    own_rows = Config()
    own_rows.env.dataset = "jsonl"
    saved.write_text(saved.read_text().replace("dataset: gsm8k", "dataset: jsonl"))
    with pytest.raises(CheckpointError, match=r"was started with eval\.num_problems=200"):
        checkpoint.check_same_run(saved.parent, own_rows)


def test_a_run_from_before_a_key_was_renamed_is_the_same_run(run_dir: Path) -> None:
    saved = save(run_dir, 5) / "config.yaml"
    before = saved.read_text()
    saved.write_text(before.replace("max_logprob_diff: null", "max_logprob_gap: 0.5"))
    assert saved.read_text() != before
    checkpoint.check_same_run(saved.parent, Config())


def test_a_run_that_a_long_prompt_has_ended_goes_on_with_such_prompts_cut(run_dir: Path) -> None:
    folder, cut = save(run_dir, 5), Config()
    for cut.env.overlong_prompts in (OverlongPrompts.truncate_left, OverlongPrompts.drop):
        checkpoint.check_same_run(folder, cut)
    # What was cut once is cut for good.
    before = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(before.replace("overlong_prompts: error", "overlong_prompts: drop"))
    for cut.env.overlong_prompts in (OverlongPrompts.error, OverlongPrompts.truncate_left):
        with pytest.raises(CheckpointError, match=r"env\.overlong_prompts=.* started with .*=drop"):
            checkpoint.check_same_run(folder, cut)
    with pytest.raises(DataError) as caught:
        check_length(Example("train/7", []), 90, 80)
    resumed, _, new = str(caught.value).partition("or raise")
    assert "works when resuming" in resumed and new.endswith("in a new run")
    keys = [re.findall(r"[a-z_]+\.[a-z_]+", part) for part in (resumed, new)]
    assert keys == [
        ["env.overlong_prompts"] * 2,
        ["inference_model.max_model_len", "inference_model.max_new_tokens"],
    ]
    assert all(is_changeable_on_resume(key, "error") for key in keys[0])


def messages_that_end_runs() -> list[tuple[str, str]]:
    """Where each stands, and its text; what is filled in is left out."""
    messages = []
    for path in sorted(Path(checkpoint.__file__).parents[1].rglob("*.py")):
        tree = ast.parse(path.read_text())
        named = {
            ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            # Those that are raised, and what a model that does not fit is said with.
            ends = ast.unparse(call.func) in ("TrainingStopped", "WorkersLost", "stop_on_oom")
            arguments = [*call.args[:1]] if ends else [k.value for k in call.keywords if k.arg == "instead"]
            for text in (named.get(ast.unparse(argument), argument) for argument in arguments):
                parts = [n.value for n in ast.walk(text) if isinstance(n, ast.Constant)]
                messages.append((f"{path.name}:{call.lineno}", "".join(filter(_is_text, parts))))
    return messages


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


# They decide what is trained, so no run goes on with another one.
OF_A_NEW_RUN = {
    "optimizer.lr",
    "model.name",
    "train_model.lora.rank",
    "train_model.quantization",
    "inference_model.max_new_tokens",
    "reward.functions",
}


@pytest.mark.slow
def test_what_a_stopped_run_is_told_to_change_may_change_or_is_said_to_take_a_new_run() -> None:
    advised: dict[str, str] = {}
    for place, text in messages_that_end_runs():
        for key in filter(keys().leaves.__contains__, re.findall(r"[a-z_]+(?:\.[a-z_]+)+", text)):
            if text.startswith(f"{key}=") and text.count(key) == 1:
                continue  # what the message is about
            advised[key] = place
            assert is_changeable_on_resume(key) or (key in OF_A_NEW_RUN and "new run" in text), (place, key)
    assert {*OF_A_NEW_RUN, "inference_model.max_logprob_diff", "train_model.parallelism"} <= {*advised}
    assert not any(map(is_changeable_on_resume, OF_A_NEW_RUN))


@pytest.mark.parametrize(
    "section,key,value",
    [
        ("optimizer", "lr", 3e-6),
        ("policy", "kl_coef", 0.1),
        ("env", "repeats", 16),
        ("env", "task_args", {"max_terms": 3}),
        ("train", "total_dialog_turns", 128),
        ("optimizer", "betas", [0.9, 0.95]),
        ("env", "system_prompt", "Be brief."),
    ],
)
def test_another_configuration_is_refused_with_key_and_both_values(
    run_dir: Path, section: str, key: str, value: Any
) -> None:
    folder, changed = save(run_dir, 5), Config()
    before = getattr(getattr(changed, section), key)
    setattr(getattr(changed, section), key, value)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_same_run(folder, changed)
    message = str(caught.value)
    name, now = (f"{section}.{key}", value) if value != {"max_terms": 3} else ("env.task_args.max_terms", 3)
    assert f"{name}={show(now)}" in message
    assert f"{name}={show(before if value != {'max_terms': 3} else None)}" in message
    assert f"model.name={folder / 'model'}" in message
    # A folder of adapters is no model that a run could start from.
    (folder / "model/adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"merge the adapters in .*docs/lora.md") as caught:
        checkpoint.check_same_run(folder, changed)
    assert f"model.name={folder / 'model'}" not in str(caught.value)


class Payload:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("code ran",)


def test_no_code_can_hide_in_a_checkpoint(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(run_dir, 5, payload=Payload())
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.load_state(folder)
    assert "code ran" not in capsys.readouterr().out


def test_the_manifest_names_every_file_with_its_size(run_dir: Path) -> None:
    folder = save(run_dir, 5)
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"manifest.json"}
    assert manifest["step"] == 5 and manifest["files"].keys() == files
    assert manifest["files"]["model/model.safetensors"]["bytes"] == 5120


def draws() -> list[Any]:
    return [
        [random.random(), random.gauss(0, 1), random.randrange(10**9)],
        numpy.random.rand(3).tolist() + numpy.random.randn(1).tolist(),
        torch.rand(3).tolist() + torch.randn(3).tolist(),
    ]


@pytest.mark.parametrize("before", [0, 1, 3])
def test_random_states_go_through_a_file(tmp_path: Path, before: int) -> None:
    seed_everything(11)
    for _ in range(before):
        draws()
    random.gauss(0, 1)  # both generators hold back the second of a pair of normal draws
    numpy.random.randn(1)
    torch.save(random_state(), tmp_path / "state.pt")
    expected = [draws() for _ in range(3)]
    seed_everything(12)
    assert draws() != expected[0]
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [draws() for _ in range(3)] == expected


@pytest.mark.parametrize("here", [1, 2, 3])
def test_a_run_goes_on_where_there_are_other_gpus(here: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {**random_state(), "cuda": [torch.tensor([index]) for index in range(2)]}
    set_to: list[int] = []

    def set_all(states: list[torch.Tensor]) -> None:
        # CUDA knows no generator of a device that is not there.
        assert len(states) <= here
        set_to.extend(int(state) for state in states)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", set_all)
    set_random_state(state)
    assert set_to == [0, 1][:here]


def test_one_seed_sets_every_generator() -> None:
    seed_everything(5)
    first = draws()
    seed_everything(5)
    assert draws() == first
    seed_everything(6)
    assert all(a != b for a, b in zip(draws(), first, strict=True))
    seed_everything(2**40)  # numpy's own seed ends at 2**32


def test_counters_go_through_a_file(tmp_path: Path) -> None:
    counters = Counters(3, 1, 1234, 2, 5.5, 0.25)
    torch.save(counters.state_dict(), tmp_path / "counters.pt")
    resumed = Counters()
    resumed.load_state_dict(torch.load(tmp_path / "counters.pt", weights_only=True))
    assert resumed == counters


@pytest.mark.parametrize(
    ("evaluations", "accuracies"),
    [
        ([[0, 0], [0, 1], [1, 1]], [None, 0.5, 1.0]),
        ([[0, 0], [1, 1]], [None, 1.0]),
        ([[0, 1], [0, 0]], [0.5, 0.0]),
        ([[0, 0], [0, 0.5], [0, 1]], [None] * 3),
        ([[0, 1], [0.5, 0.5], [0, 1]], [0.5, None, None]),
    ],
)
def test_a_reward_of_the_user_is_a_verdict_once_0_and_1_and_nothing_else_have_occurred(
    evaluations: list[list[float]], accuracies: list[float | None]
) -> None:
    counters, kept_values = Counters(), []
    for values in evaluations:
        mean = sum(values) / 2
        metrics = {"eval/primary": mean, "eval/reward": mean}
        if {*values} <= {0, 1}:
            metrics |= {"eval/accuracy": mean, "eval/accuracy_low": 0.0, "eval/accuracy_high": 1.0}
        kept = counters.take_grades(metrics)
        assert kept.keys() - metrics.keys() == set() and kept["eval/primary"] == mean
        assert len({name for name in kept if name.startswith("eval/accuracy")}) in (0, 3)
        kept_values.append(kept.get("eval/accuracy"))
        counters.primary_before = sum(evaluations[0]) / 2
        before = None if kept_values[-1] is None else counters.primary_before
        assert counters.share_before == before, "first and last are shown by one name"
    assert kept_values == accuracies


def test_a_built_in_grader_has_an_accuracy_from_the_first_evaluation() -> None:
    counters = Counters(accuracy_before=0.0)
    assert counters.take_grades({"eval/accuracy": 0.0}) == {"eval/accuracy": 0.0}
    assert counters.share_before == 0.0
