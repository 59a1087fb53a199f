"""The card of a saved model, as the hub reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.models import model_card
from torchrl_grpo.runtime import hub

METRICS = {
    "eval/accuracy": 0.5,
    "eval/accuracy_low": 0.4,
    "eval/accuracy_high": 0.6,
    "eval/num_problems": 100,
}
TRAINING = model_card.Training("grpo.py optimizer.lr=2e-5", 30, METRICS, 30, {"eval/accuracy": 0.25}, "gsm8k")


def base_folder(folder: Path, card: str | None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    if card is not None:
        (folder / "README.md").write_text(card)
    return folder


def write(folder: Path, cfg: Config, training: model_card.Training = TRAINING) -> tuple[dict[str, Any], str]:
    """Write a card; return its fields and its text."""
    folder.mkdir(exist_ok=True)
    model_card.write(folder, cfg, model_card.read_base(cfg), training)
    card = ModelCard.load(folder / "README.md")
    return card.data.to_dict(), card.text


def test_a_card_names_data_of_the_hub_and_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret/data").mkdir(parents=True)
    cfg = Config()
    for name, named in (
        ("org/sums", ["org/sums"]),
        (str(tmp_path / "secret/data"), None),
        ("secret/data", None),
    ):
        cfg.env.hub_name = name
        data, text = write(tmp_path / "model", cfg)
        assert data.get("datasets") == named
        assert (
            ("secret" not in text and "gsm8k (data)" in text) if named is None else "gsm8k (org/sums)" in text
        )


def test_a_card_says_where_the_model_is_from_and_what_it_can_do(tmp_path: Path) -> None:
    cfg = Config()
    cfg.model.name = "smollm2-135m"
    data, text = write(tmp_path / "model", cfg)
    assert data["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (data["license"], data["library_name"]) == ("apache-2.0", "transformers")
    assert {"torchrl-grpo", "grpo"} <= set(data["tags"])
    assert "| accuracy by gsm8k | 0.250 | 0.500 | 0.400 to 0.600 |" in text
    assert "    grpo.py optimizer.lr=2e-5\n" in text and "optimizer steps: 30" in text
    assert "torchrl-grpo 0.1.0" in text and "transformers 5" in text and "gsm8k" in text
    assert "\nvllm serve FOLDER\n" in text
    # In 16 bits, a model that was trained and measured in float32 could answer as its base does.
    cfg.inference_model.dtype = Dtype.float32
    assert "\nvllm serve FOLDER --dtype float32\n" in write(tmp_path / "float32", cfg)[1]
    # Adapters are loaded otherwise, and a run need not evaluate.
    (tmp_path / "model/adapter_config.json").write_text(json.dumps({}))
    data, text = write(tmp_path / "model", cfg, model_card.Training("", 3, {}, 0, {}, "gsm8k"))
    assert data["library_name"] == "peft" and "AutoPeftModelForCausalLM" in text
    assert "No held-out problems were evaluated." in text and "Command" not in text


def test_a_mean_of_an_own_reward_has_its_name_and_what_it_was_before(tmp_path: Path) -> None:
    metrics = {"eval/primary": 0.875, "eval/primary_low": 0.8, "eval/primary_high": 0.95}
    training = model_card.Training("", 8, metrics, 8, {"eval/primary": 0.249}, "brevity")
    _, text = write(tmp_path / "model", Config(), training)
    assert "| mean of brevity | 0.249 | 0.875 | 0.800 to 0.950 |" in text


@pytest.mark.parametrize(
    ("card", "license", "base"),
    [
        (None, None, None),
        ("no fields", None, None),
        ("---\nlicense: [\n---\n", None, None),
        ("---\nlicense: mit\n---\n", "mit", None),
        # What was trained before keeps the license and the name of what it was trained from.
        ("---\nlicense: other\nlicense_name: own\nbase_model: me/mine\n---\n", "other", "me/mine"),
    ],
)
def test_the_license_is_that_of_the_base_models_own_card(
    card: str | None, license: str | None, base: str | None, tmp_path: Path
) -> None:
    cfg = Config()
    cfg.model.name = str(base_folder(tmp_path / "base", card))
    data, text = write(tmp_path / "model", cfg)
    assert (data.get("license"), data.get("base_model")) == (license, base)
    phrase = "its card was not at hand" if license is None else "by its own card"
    assert phrase in text and ("own." in text) == (license == "other")


@pytest.mark.parametrize(
    ("fields", "license", "shown"),
    [
        ("license_link: https://example.org/terms", {"license_link": "https://example.org/terms"}, "terms."),
        ("license: null\nlicense_name: own", {"license_name": "own"}, "own."),
        ("license: other\nlicense_link: TERMS", {"license": "other"}, "other."),
        (
            "license: other\nlicense_link: TERMS\nbase_model: me/mine",
            {"license": "other", "license_link": "https://huggingface.co/me/mine/blob/main/TERMS"},
            "other.",
        ),
        ("license: [mit, apache-2.0]", {"license": ["mit", "apache-2.0"]}, "card: mit, apache-2.0."),
        ("license: ''", {}, "at hand."),
        ("license: {a: b}\nlicense_link: 3", {}, "at hand."),
        ("license: [mit, 3]\nbase_model: [me/mine, me/other]", {}, "at hand."),
    ],
)
def test_fields_that_a_card_lacks_or_has_in_another_form_are_left_out(
    fields: str, license: dict[str, Any], shown: str, tmp_path: Path
) -> None:
    cfg = Config()
    cfg.model.name = str(base_folder(tmp_path / "base", f"---\n{fields}\n---\n"))
    metrics = {"eval/loss": 800.0, "eval/perplexity": None, "eval/num_problems": 3}
    data, text = write(tmp_path / "model", cfg, model_card.Training("", 3, metrics, 3, {}, "loss"))
    assert {key: value for key, value in data.items() if key.startswith("license")} == license
    assert text.rstrip().endswith(shown) and "None" not in text and "| loss |  | 800.000 |" in text


def test_the_card_of_a_model_on_the_hub_is_asked_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = Config()
    cfg.model.name = "me/mine"
    assert model_card.read_base(cfg) == model_card.Base("me/mine", "me/mine", {})
    monkeypatch.setattr(hub, "why_unreachable", lambda: None)
    own = ModelCard("---\nlicense: mit\n---\n")
    monkeypatch.setattr(huggingface_hub.ModelCard, "load", lambda source: own)
    assert model_card.read_base(cfg).license == {"license": "mit"}
