"""``hub.push``: what is uploaded, and what a run says if it cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serve
from tiny_runs import Runner, config, train  # noqa: F401  fixtures

from torchrl_grpo.config import Config
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models import hub_upload
from torchrl_grpo.runtime import hub as reachable


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(reachable, "why_unreachable", lambda: None)
    with serve(monkeypatch) as server:
        yield server


@pytest.mark.slow
def test_a_run_uploads_its_model_and_card_when_it_has_ended(
    hub: FakeHub, train: Runner, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.hub.push, config.train.total_dialog_turns = "org/name", 32
    train("run")
    folder = tmp_path / "run/checkpoints/2/model"
    assert hub.files.keys() >= {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert all((folder / name).read_bytes() == content for name, content in hub.files.items())
    (created,) = hub.created
    assert created["name"] == "name" and created["organization"] == "org"
    assert created.get("private") is True or created.get("visibility") == "private"
    assert f"to {hub.endpoint}/org/name" in capsys.readouterr().out


def test_a_model_that_cannot_be_uploaded_is_kept_and_the_command_is_said(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg, checkpoint = Config(), tmp_path / "checkpoints/2"
    cfg.hub.push, hub.fails = "org/name", True
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint / "model/config.json").write_text("{}")
    hub_upload.upload(cfg, tmp_path / "checkpoints", 2)
    assert f"hf upload org/name {checkpoint}/model . --private\n" in capsys.readouterr().err
    # A merged model is whole.
    (checkpoint / "merged").mkdir()
    (checkpoint / "merged/config.json").write_text("{}")
    hub.fails = False
    hub_upload.upload(cfg, tmp_path / "checkpoints", 2)
    assert hub.files == {"config.json": b"{}"} and "merged" in capsys.readouterr().out


def test_the_best_model_is_uploaded_if_it_is_kept(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg, checkpoints = Config(), tmp_path / "checkpoints"
    cfg.hub.push = "org/name"
    for step in (2, 4):
        (checkpoints / str(step) / "model").mkdir(parents=True)
        (checkpoints / str(step) / "model/config.json").write_text(str(step))
    last, best = (4, "the last step"), (2, "the best held-out value")
    # Before training, there was no checkpoint.
    for keeps, best_step, (step, which) in (
        (False, 2, last),
        (True, 2, best),
        (True, 0, last),
        (True, None, last),
    ):
        cfg.train.keep_best = keeps
        hub_upload.upload(cfg, checkpoints, 4, best_step)
        assert hub.files["config.json"] == str(step).encode()
        line = f"Uploaded {checkpoints}/{step}/model, the model of {which}, to {hub.endpoint}/org/name\n"
        assert line in capsys.readouterr().out


def test_no_repository_is_made_for_a_model_that_is_not_there(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = Config()
    cfg.hub.push = "org/name"
    hub_upload.upload(cfg, tmp_path / "checkpoints", 2)
    assert not hub.created and "warning: hub.push=org/name: the model could not" in capsys.readouterr().err


def test_weights_of_an_earlier_model_do_not_stay_beside_those_of_this_one(
    hub: FakeHub, tmp_path: Path
) -> None:
    cfg, checkpoint = Config(), tmp_path / "checkpoints/2"
    cfg.hub.push = "org/name"
    stale = {"model.safetensors": b"old", "adapter_config.json": b"{}", "logo.png": b"mine"}
    hub.files |= stale
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint / "model/model-00001-of-00001.safetensors").write_bytes(b"new")
    hub_upload.upload(cfg, tmp_path / "checkpoints", 2)
    assert hub.files == {"model-00001-of-00001.safetensors": b"new", "logo.png": b"mine"}


def test_a_user_whom_the_hub_does_not_know_is_told_before_the_run(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cfg = Config()
    hub_upload.check(cfg)
    cfg.hub.push = "org/name"
    hub_upload.check(cfg)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(ConfigError, match=r"hub.push=org/name: the hub refuses the token .* write HF_TOKEN"):
        hub_upload.check(cfg)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"hub.push=org/name: nobody is logged in"):
        hub_upload.check(cfg)
    monkeypatch.setattr(reachable, "why_unreachable", lambda: "no route")
    with pytest.raises(ConfigError, match=r"hub.push=org/name: .* cannot be reached \(no route\)"):
        hub_upload.check(cfg)
