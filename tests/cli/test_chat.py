"""``grpo-chat``: conversations of two models, and what of their answers reaches the terminal."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import serve
from omegaconf import OmegaConf

from torchrl_grpo.checkpoints.run_dir import MANIFEST
from torchrl_grpo.cli import chat
from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.runtime import hub
from torchrl_grpo.runtime.printable import printable


@pytest.fixture(autouse=True)
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what transformers says for the tests that follow in this process."""
    monkeypatch.setattr(chat, "_quiet", lambda: None)


def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *words: str) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    chat.main([*words, "--max-new-tokens", "4"])
    return capsys.readouterr().out


def test_each_model_answers_in_its_own_conversation(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[tuple[str, list[str]]] = []
    honest = chat.Speaker.answer

    def answer(self: chat.Speaker, text: str, *rest: object) -> None:
        heard.append((self.name, [message["content"] for message in self.messages]))
        honest(self, text, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(chat.Speaker, "answer", answer)
    model = str(tiny_model_dir)
    out = talk(monkeypatch, capsys, "one\n\ntwo\n/reset\nthree\n/quit\nfour\n", model, "--base", model)
    lines = [line for line in out.split("\n") if line.startswith(("model> ", "base> "))]
    assert [line.partition(">")[0] for line in lines] == ["model", "base"] * 3
    assert [name for name, _ in heard] == ["model", "base"] * 3
    before = [messages for name, messages in heard if name == "model"]
    assert before[0] == before[2] == [] and before[1][0] == "one" and len(before[1]) == 2
    # Greedy, so that the same question has the same answer.
    again = talk(monkeypatch, capsys, "one\n", model)
    assert out.startswith(again.rstrip("\n"))


@pytest.mark.slow
def test_what_a_terminal_would_obey_does_not_reach_it(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(self: chat.Speaker, text: str, options: object, show: object) -> None:
        assert callable(show)
        show("a\x1b]52;c;ZXZpbA==\x07b\x1b[2J")
        show("\rc\x9b1m\u202ed\n\tä👩\u200d🔬")

    monkeypatch.setattr(chat.Speaker, "answer", answer)
    out = talk(monkeypatch, capsys, "hi\n", str(tiny_model_dir))
    assert out == "model> a]52;c;ZXZpbA==b[2Jc1md\n\tä👩\u200d🔬\n"
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert not any(
        ord(char) < 32 or 127 <= ord(char) < 160 for char in printable(every) if char not in "\n\t"
    )


def test_an_answer_that_is_stopped_is_remembered_as_far_as_it_was_shown(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def stop(piece: str) -> None:
        shown.append(piece)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_show", stop)
    remembered: list[str] = []
    honest = chat.Speaker.answer

    def answer(self: chat.Speaker, *rest: object) -> None:
        try:
            honest(self, *rest)  # type: ignore[arg-type]
        finally:
            remembered.append(self.messages[-1]["content"])

    monkeypatch.setattr(chat.Speaker, "answer", answer)
    assert talk(monkeypatch, capsys, "hi\nho\n", str(tiny_model_dir)).count("model> \n") == 2
    assert remembered == shown and len(shown) == 2


def test_a_termination_during_an_answer_ends_the_command(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(piece: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the handler raises before this")

    monkeypatch.setattr(chat, "_show", stop)
    with pytest.raises(SystemExit) as stopped:
        talk(monkeypatch, capsys, "hi\nho\n", str(tiny_model_dir))
    assert stopped.value.code == 143


def test_of_the_settings_in_a_models_folder_only_the_ends_count(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = talk(monkeypatch, capsys, "hi\n", str(tiny_model_dir))
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    settings = folder / "generation_config.json"
    tokens = list(range(json.loads((folder / "config.json").read_text())["vocab_size"]))
    settings.write_text(json.dumps({"suppress_tokens": tokens[:-9], "repetition_penalty": 9.0}))
    assert talk(monkeypatch, capsys, "hi\n", str(folder)) == plain
    settings.write_text(json.dumps({"eos_token_id": tokens}))
    # Every token ends the answer.
    assert len(talk(monkeypatch, capsys, "hi\n", str(folder))) < len(plain)


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ([], {"model": "Be brief."}),
        (["--base"], {"model": "Be brief.", "base": "Be brief."}),
        (["--base", "MODEL"], {"model": "Be brief.", "base": "Be brief."}),
        (["--base", "--system", "Be kind."], {"model": "Be kind.", "base": "Be kind."}),
    ],
)
def test_the_base_model_reads_the_system_message_of_the_run(
    words: list[str],
    messages: dict[str, str],
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cfg = Config()
    cfg.model.name, cfg.env.system_prompt = str(tiny_model_dir), "Be brief."
    cfg.inference_model.dtype = Dtype.float16
    checkpoint = tmp_path / "checkpoints/4"
    shutil.copytree(tiny_model_dir, checkpoint / "model")
    (checkpoint / MANIFEST).write_text("{}")
    (checkpoint / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(cfg)))
    read: dict[str, str | None] = {}

    def answer(self: chat.Speaker, *_: object) -> None:
        read[self.name] = self.system
        # As the run had it: a model that it trained in float32 could answer as its base does in 16 bits.
        assert self.model.dtype == torch.float16

    monkeypatch.setattr(chat.Speaker, "answer", answer)
    replaced = [word.replace("MODEL", str(tiny_model_dir)) for word in words]
    talk(monkeypatch, capsys, "hi\n", str(checkpoint), *replaced)
    assert read == messages


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MODEL", "--base"], "error: --base: MODEL is no run, so write the base model: --base MODEL\n"),
        (["nowhere/at/all"], "error: model.name=nowhere/at/all: there is no such folder"),
        (["~nobody/at"], "error: model.name=~nobody/at: there is no such folder"),
        (["two words"], "error: model.name=two words: there is no such folder, and a name on the"),
        (["MODEL", "--base", "a--b"], "error: model.name=a--b: there is no such folder, and a name on the"),
        (
            ["MODEL", "--temperature=-1"],
            "error: --temperature=-1.0: it must be 0 or a positive number",
        ),
        (["MODEL", "--temperature=nan"], "error: --temperature=nan: it must be 0 or a positive number"),
        (["MODEL", "--max-new-tokens=0"], "error: --max-new-tokens=0: it must be at least 1; write"),
        (
            ["MODEL", "--max-new-tokens=x"],
            "error: command line: argument --max-new-tokens: invalid int value",
        ),
        (["MODEL", f"--seed={2**64}"], f"error: --seed={2**64}: it has more than 64 bits; write"),
        (["MODEL", "--bas"], "error: command line: unrecognized arguments: --bas; write --base instead"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], message: str, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model_dir)
    with pytest.raises(SystemExit) as stopped:
        chat.main([word.replace("MODEL", model) for word in words])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    assert error.startswith(message.replace("MODEL is", f"{model} is"))


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (403, "GatedRepo", "its owner on the Hugging Face hub gives it only to users who have asked; ask on"),
        (404, "RepoNotFound", "the Hugging Face hub has no such model, or a private one; correct the name"),
        (401, "RepoNotFound", "the Hugging Face hub has no such model, or a private one; correct the name"),
        (404, "EntryNotFound", "this repository of the Hugging Face hub has no config.json; write the name"),
        (500, "", "the Hugging Face hub gave no answer that can be used (Server error '500"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    code: int, error: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "why_unreachable", lambda: None)
    with serve(monkeypatch) as server, pytest.raises(SystemExit) as stopped:
        server.refused["me/mine"] = code, error
        chat.main(["me/mine"])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith(f"error: model.name=me/mine: {message}")


def test_a_folder_of_adapters_is_told_from_a_model(tmp_path: Path, tiny_model_dir: Path) -> None:
    from torchrl_grpo.cli.model_argument import has_adapters
    from torchrl_grpo.config.schema import ModelConfig

    (tmp_path / "adapter_config.json").write_text(json.dumps({}))
    assert has_adapters(str(tmp_path), ModelConfig())
    assert not has_adapters(str(tiny_model_dir), ModelConfig())
    assert not has_adapters("smollm2-135m", ModelConfig()) and not has_adapters("me/mine", ModelConfig())
