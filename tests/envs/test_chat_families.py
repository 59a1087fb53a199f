"""Tools under the chat templates of many families: calls are read, results are seen, and tokens are exact."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES
from chat_parts import Family
from tiny_tokenizers import build_tokenizer
from transformers import PreTrainedTokenizerFast

from torchrl_grpo.config import Config
from torchrl_grpo.data.example import Example
from torchrl_grpo.data.problems import Problems
from torchrl_grpo.envs.chat import render
from torchrl_grpo.envs.episodes import build
from torchrl_grpo.envs.episodes.build import with_episodes, with_prompts
from torchrl_grpo.envs.episodes.tools.call_formats import ToolCall
from torchrl_grpo.envs.episodes.tools.learn_calls import learn_calls
from torchrl_grpo.envs.episodes.tools.learn_formats import shared_start
from torchrl_grpo.envs.episodes.tools.tool import Tool
from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference.protocol import Completion, Request, Sampling

ARGUMENTS = {
    "name": "two apples, red",
    "count": 42,
    "share": 2.5,
    "fresh": True,
    "parts": ["a", 1],
    "more": {"a": {"b": 2}},
}
NO_ARGUMENTS = {"name": "", "count": 0, "share": 0.0, "fresh": False, "parts": [], "more": {}}
TYPES = dict(zip(ARGUMENTS, ("string", "integer", "number", "boolean", "array", "object"), strict=True))
WORKING = [name for name, family in FAMILIES.items() if family.refused is None]
REFUSED = [name for name, family in FAMILIES.items() if family.refused is not None]


def result(call: ToolCall) -> str:
    if call.name == "wait":
        return "waited"
    values = {**NO_ARGUMENTS, **call.arguments}
    return "placed " + json.dumps([values[key] for key in ARGUMENTS], sort_keys=True)


def tool(name: str, types: dict[str, str]) -> Tool:
    """A tool whose result shows its arguments and their types."""
    properties = {key: {"type": kind, "description": f"Its {key}."} for key, kind in types.items()}
    function = {
        "name": name,
        "description": f"Does {name}.",
        "parameters": {"type": "object", "properties": properties},
    }
    return Tool(
        name,
        name,
        {"type": "function", "function": function},
        lambda arguments, limit: result(ToolCall(name, dict(arguments))),
        is_quick=True,
    )


TOOLS = [tool("place", TYPES), tool("wait", {})]


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "load_tools", lambda specs: TOOLS)


class Script:
    """An engine whose model writes given messages, and ends each where a real one would."""

    policy_version = 0

    def __init__(self, replies: list[list[int]]) -> None:
        self.replies = replies
        self.requests: list[Request] = []
        self._waiting: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    def step(self) -> list[tuple[Hashable, Completion]]:
        ended: list[tuple[Hashable, Completion]] = []
        for request in self._waiting:
            tokens = self.replies[len(self.requests)]
            self.requests.append(request)
            ended.append((request.key, Completion(tokens, [-1.0] * len(tokens), "stop")))
        self._waiting = []
        return ended


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer("bytes", [*family.special, family.end])
    tokenizer.chat_template = family.template
    return tokenizer


class Talk:
    """A conversation with tools under a chat template, and the ids of its parts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.save_pretrained(folder / "model")
        (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
        self.cfg = Config()
        self.cfg.model.name = str(folder / "model")
        self.cfg.env.tools = [tool.spec for tool in TOOLS]
        self.cfg.env.max_turns = 3
        problems = Problems([Example("x", [{"role": "user", "content": "Two apples."}])], [])
        self.example = with_prompts(self.cfg, problems, self.tokenizer).train[0]
        self.prompt = render(self.tokenizer, self.example)
        self.use = learn_calls(self.tokenizer, [tool.schema for tool in TOOLS])

    def text(self, messages: list[Any], is_open: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                [*self.example.messages, *messages],
                tools=self.example.tools or None,
                tokenize=False,
                add_generation_prompt=is_open,
            )
        )

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def write_calls(self, calls: list[ToolCall]) -> tuple[str, str]:
        """Return what the model writes for calls, to its end token, and the text with their results."""
        turn = self.use.turn
        if turn is None:
            written = "".join(
                f"<tool_call>{json.dumps({'name': call.name, 'arguments': call.arguments})}</tool_call>"
                for call in calls
            )
            message: dict[str, Any] = {"role": "assistant", "content": written}
            results = [{"role": "tool", "name": call.name, "content": result(call)} for call in calls]
            rest = self.text([message, *results], True).partition(written)[2]
            return written + self.tokenizer.tokenize(rest)[0], self.text([message, *results], True)
        message = turn.message.with_calls(calls)
        results = [
            {
                "role": "tool",
                "tool_call_id": turn.message.id_of(call, number),
                "name": call.name,
                "content": result(call),
            }
            for number, call in enumerate(calls)
        ]
        whole = self.text([message, *results], True)
        assert turn.end is not None
        return whole[len(shared_start(self.prompt[0], whole)) :].partition(turn.end)[0] + turn.end, whole


def play(talk: Talk, replies: list[str]) -> tuple[Script, Completion]:
    engine = Script([talk.ids(text) for text in replies])
    episodes = with_episodes(talk.cfg, engine, 1)  # type: ignore[arg-type]
    sampling = Sampling(1, 8_000, 1.0, seeds=[1], problems=[talk.example])
    return engine, episodes.generate([talk.prompt[1]], sampling)[0][0]


def check(talk: Talk, calls: list[ToolCall]) -> None:
    """Check that calls are read, that their results are seen, and that all tokens are the template's."""
    reply, whole = talk.write_calls(calls)
    engine, episode = play(talk, [reply, f"Done.{talk.tokenizer.eos_token}"])
    assert episode.record is not None and episode.record.tool_errors == 0
    *results, last = [message["content"] for message in episode.record.messages[1:]]
    # The prompt may have opened thoughts.
    assert results == [*map(result, calls)] and last.endswith("Done.")
    assert all(result(call).split(" ")[0] in whole for call in calls)
    if whole.startswith(talk.prompt[0]):
        assert engine.requests[1].tokens == talk.ids(whole)
    else:
        # The template writes thoughts in other ways once they are in the past.
        assert whole.endswith(talk.tokenizer.decode(engine.requests[1].tokens)[-60:])
    # The engine stops where the template ends a message with calls.
    assert talk.use.turn is None or talk.ids(reply)[-1] in engine.requests[0].stop_token_ids


@pytest.mark.parametrize("name", WORKING)
def test_calls_are_read_and_results_seen_in_exact_tokens(name: str, tmp_path: Path) -> None:
    talk = Talk(tokenizer_of(FAMILIES[name]), tmp_path)
    check(talk, [ToolCall("place", ARGUMENTS)])
    calls = [ToolCall("wait", {}), ToolCall("place", {"name": "bread"})]
    takes_one = talk.use.turn is not None and talk.use.turn.takes_one
    check(talk, calls[:1] if takes_one else calls)


@pytest.mark.parametrize("name", ["qwen2.5", "gpt-oss", "gemma-4", "kimi-k2", "mistral-0.3", "muse-glimmer"])
def test_a_call_of_an_unknown_tool_is_answered_too(name: str, tmp_path: Path) -> None:
    talk = Talk(tokenizer_of(FAMILIES[name]), tmp_path)
    reply, _ = talk.write_calls([ToolCall("nothing", {"a": "b"})])
    engine, episode = play(talk, [reply, f"Done.{talk.tokenizer.eos_token}"])
    assert episode.record is not None and (episode.record.tool_errors, episode.record.turns) == (1, 2)
    assert "there is no tool 'nothing'" in talk.tokenizer.decode(engine.requests[1].tokens)


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_loses_something_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(FAMILIES[name].refused)) as caught:
        Talk(tokenizer_of(FAMILIES[name]), tmp_path)
    assert "env.tools" in str(caught.value) and "model.chat_template" in str(caught.value)


def test_a_tokenizer_that_misses_the_end_of_a_call_is_refused_at_the_start(tmp_path: Path) -> None:
    family = FAMILIES["qwen2.5"]
    # Such tokens are found only as words of their own.
    tokenizer = build_tokenizer("bytes", [*family.special, family.end], single_word=True)
    tokenizer.chat_template = family.template
    talk = Talk(tokenizer, tmp_path)
    with pytest.raises(ModelError, match=r"does not find the end of the model's message"):
        with_episodes(talk.cfg, Script([]), 1)  # type: ignore[arg-type]


def published() -> list[Path]:
    """Templates in the package of TRL, which the tests' requirements have."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    return sorted(Path(spec.origin).parent.glob("chat_templates/*.jinja"))


# Gemma 1 to 3, Phi 3, Cohere, and models whose templates take no text as content.
LOSE = r"(cohere|gemma3?|gemma3|idefics|llava|phi3|smolvlm)"


@pytest.mark.slow
@pytest.mark.parametrize("path", published(), ids=lambda path: path.stem)
def test_published_templates_work_or_are_refused(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    tokens = set(re.findall(r"<[|｜][^<>\s'\"]{1,40}[|｜]>|<\|\w+>|<\w+\|>|<\|\"\|>", text))
    tokenizer = build_tokenizer("bytes", [*sorted(tokens - {"<|im_end|>"}), "<|im_end|>"])
    tokenizer.bos_token = "<|im_end|>"
    tokenizer.chat_template = text
    if re.match(LOSE + r"(?![a-z]*4)", path.stem):
        with pytest.raises(ModelError, match=r"env.tools.*cannot be used.*: it "):
            Talk(tokenizer, tmp_path)
        return
    check(Talk(tokenizer, tmp_path), [ToolCall("place", ARGUMENTS)])
