"""The environment under TorchRL's own policies, collectors and containers, in every input mode of theirs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from slow_cases import slow_except
from tensordict import NonTensorStack, TensorDict, lazy_stack
from tensordict.nn import TensorDictModuleBase
from tiny_model import build_tiny_model
from torchrl.data.llm import History
from torchrl.envs import SerialEnv
from torchrl.envs.utils import check_env_specs
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.envs.responses import is_truncated, response_texts
from torchrl_grpo.envs.stream import PromptStream

MODES = ("text", "tokens", "history")
BOUND = 6
P, G = 2, 3


class Lengths:
    """The reward is the length of the answer."""

    names = ("length",)

    def __init__(self) -> None:
        self.texts: list[str] = []

    def score(self, texts: list[str], examples: list[Example]) -> list[Any]:
        self.texts += texts
        return [SimpleNamespace(total=float(len(t)), parts={"length": 1.0}, errors={}) for t in texts]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model and its tokenizer, whose pad token is the end token."""
    folder = build_tiny_model(tmp_path_factory.mktemp("tiny"))
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(params=[True, False], ids=["pad_is_end", "pad_of_its_own"])
def tokenizer(tiny: tuple[Any, Any], request: pytest.FixtureRequest) -> Any:
    tokenizer = tiny[1]
    before = tokenizer.pad_token
    tokenizer.pad_token = tokenizer.eos_token if request.param else "<|endoftext|>"
    yield tokenizer
    tokenizer.pad_token = before


def make(tokenizer: Any, **options: Any) -> Any:
    """Prompts of several lengths, so that they are padded."""
    examples = [
        Example(f"toy/{i}", [{"role": "user", "content": "What is 3" + " + 4" * i + "?"}], {"answer": "7"})
        for i in range(5)
    ]
    rewards: Any = Lengths()
    options = {"num_envs": P, "repeats": G, "max_prompt_tokens": 200, **options}
    return GroupTextEnv(PromptStream(examples, seed=0, shuffle=False), tokenizer, rewards, **options)


def policy(model: Any, tokenizer: Any, mode: str, pad_output: bool, **generate: Any) -> Any:
    # This imports vLLM, which takes seconds.
    from torchrl.modules.llm import TransformersWrapper

    # No end token of the model's own configuration: that of the tokenizer counts.
    options = {"max_new_tokens": BOUND, "eos_token_id": tokenizer.eos_token_id, **generate}
    return TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode=mode,
        generate=True,
        pad_output=pad_output,
        generate_kwargs=options,
    )


def strip(text: str, tokenizer: Any) -> str:
    while text.endswith(tuple(tokenizer.all_special_tokens)):
        text = text[: text.rindex("<|")]
    return text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_tokens", [True, False, None])
def test_torchrl_finds_the_specs_right(tokenizer: Any, mode: str, with_tokens: bool) -> None:
    if mode == "tokens" and with_tokens is False:
        with pytest.raises(ValueError, match="with_tokens"):
            make(tokenizer, input_mode=mode, with_tokens=False)
        return
    env = make(tokenizer, input_mode=mode, with_tokens=with_tokens)
    check_env_specs(env, break_when_any_done="both")
    offered = set(env.reset().keys())
    expected = mode == "tokens" if with_tokens is None else with_tokens
    assert {"tokens", "masks"} & offered == ({"tokens", "masks"} if expected else set())
    assert ("history" in offered) == (mode == "history")


def test_another_mode_is_refused(tiny: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="'chat' is unknown; write one of text, tokens, history"):
        make(tiny[1], input_mode="chat")


@pytest.mark.parametrize("with_tokens", [True, None])
@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("mode", slow_except(["history"], MODES))
def test_a_stock_policy_answers_every_prompt_as_the_model_does(
    tiny: tuple[Any, Any], tokenizer: Any, mode: str, pad_output: bool, with_tokens: bool | None
) -> None:
    model, _ = tiny
    env = make(tokenizer, input_mode=mode, with_tokens=with_tokens)
    data = env.rollout(
        3,
        policy(model, tokenizer, mode, pad_output, do_sample=False),
        break_when_any_done=False,
        return_contiguous=False,
    )
    assert data.batch_size == (P, G, 3)
    expected = []
    for number in range(3 * P):
        ids = torch.tensor([env.prompt(number).token_ids])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=BOUND,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        expected += [strip(tokenizer.decode(out[0, ids.shape[1] :]), tokenizer)] * G
    assert env.reward_set.texts == expected and len(set(expected)) > 1
    rewards = torch.stack([data[..., step]["next", "reward"].flatten() for step in range(3)]).flatten()
    assert rewards.tolist() == [len(text) for text in expected]


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("mode", slow_except(["history"], MODES))
@pytest.mark.parametrize("bound", [BOUND, None])
def test_truncated_is_what_the_length_bound_ended(
    tiny: tuple[Any, Any], tokenizer: Any, mode: str, pad_output: bool, bound: int | None, monkeypatch: Any
) -> None:
    model, _ = tiny
    made: list[torch.Tensor] = []
    generate = type(model).generate

    def recorded(self: Any, *arguments: Any, **options: Any) -> Any:
        # About one token in ten ends a response. The wrapper itself drops this option.
        output = generate(self, *arguments, sequence_bias=[[[end], 3.7]], **options)
        made.append(output["sequences"][:, -BOUND:])
        return output

    monkeypatch.setattr(type(model), "generate", recorded)
    end = tokenizer.eos_token_id
    torch.manual_seed(0)
    env = make(tokenizer, input_mode=mode, max_new_tokens=bound, num_envs=4, repeats=4)
    stock = policy(model, tokenizer, mode, pad_output, do_sample=True)
    data = env.rollout(1, stock, return_contiguous=False)[..., 0]["next"]
    ended = (made[0] == end).any(-1)
    assert 0 < int(ended.sum()) < len(ended), "nothing was told apart"
    assert data["done"].all() and torch.equal(data["terminated"], ~data["truncated"])
    if bound is None and not pad_output and tokenizer.pad_token_id == end:
        # The policy has cut the end tokens off: only the bound could tell.
        assert not data["truncated"].any()
    else:
        assert data["truncated"].flatten().tolist() == (~ended).tolist()


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_stock_collector_collects(tiny: tuple[Any, Any], mode: str, pad_output: bool) -> None:
    model, tokenizer = tiny
    env = make(tokenizer, input_mode=mode)
    # Here, because it imports vLLM, and each process of the tests imports each file.
    from torchrl.collectors.llm import LLMCollector

    collector = LLMCollector(
        env,
        policy=policy(model, tokenizer, mode, pad_output, do_sample=True),
        dialog_turns_per_batch=P * G,
        total_dialog_turns=3 * P * G,
    )
    batches = list(collector)
    collector.shutdown()
    assert [batch.batch_size for batch in batches] == [(P, G, 1)] * 3
    first, *others = [int(batch["group_id"][0, 0, 0]) for batch in batches]
    assert others == [first + P, first + 2 * P]
    rewards = [value for batch in batches for value in batch["next", "reward"].flatten().tolist()]
    assert rewards == [len(text) for text in env.reward_set.texts]


@pytest.mark.parametrize("mode", MODES)
def test_environments_are_stepped_in_series(tiny: tuple[Any, Any], mode: str) -> None:
    model, tokenizer = tiny
    env = SerialEnv(2, lambda: make(tokenizer, input_mode=mode))
    data = env.rollout(1, policy(model, tokenizer, mode, True, do_sample=True))
    assert data.batch_size == (2, P, G, 1) and (data["next", "reward"] > 0).any()
    env.close()


class Written(TensorDictModuleBase):
    """Writes what it is given."""

    in_keys: ClassVar[list[Any]] = [("text", "prompt")]
    out_keys: ClassVar[list[Any]] = []

    def __init__(self, write: Callable[[TensorDict], Any]) -> None:
        super().__init__()
        self.write = write

    def forward(self, data: TensorDict) -> TensorDict:
        self.write(data)
        return data


def history(contents: list[list[str]]) -> History:
    return History.from_chats([[[{"role": "assistant", "content": c}] for c in group] for group in contents])


def test_a_policy_may_write_one_form_of_its_answers_only(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    texts = [["3 + 4", "7", "What"], ["", "is", "31"]]
    width = max(len(tokenizer(text)["input_ids"]) for group in texts for text in group) + 1

    def ids(text: str) -> list[int]:
        token_ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        return token_ids + [tokenizer.pad_token_id] * (width - len(token_ids))

    forms = {
        "text": lambda td: td.set(("text", "response"), NonTensorStack.from_list(texts)),
        "tokens": lambda td: td.set(
            ("tokens", "response"), torch.tensor([[ids(text) for text in group] for group in texts])
        ),
        "history": lambda td: td.set(("history", "response"), history(texts)),
    }
    for mode in MODES:
        for write in forms.values():
            env = make(tokenizer, input_mode=mode)
            env.rollout(1, Written(write))
            assert env.reward_set.texts == [text for group in texts for text in group]
    with pytest.raises(RuntimeError, match=r"none of .*input_mode='tokens'"):
        make(tokenizer, input_mode="tokens").rollout(1, Written(lambda td: None))


def test_a_policy_that_knows_says_what_hit_the_bound(tiny: tuple[Any, Any]) -> None:
    at_bound = torch.tensor([[True, False, False], [False, False, True]])

    def write(data: TensorDict) -> None:
        data.set(("text", "response"), NonTensorStack.from_list([["a"] * G] * P))
        data.set("hit_length_bound", at_bound)

    data = make(tiny[1]).rollout(1, Written(write))[..., 0]["next"]
    assert torch.equal(data["truncated"][..., 0], at_bound) and torch.equal(
        data["terminated"][..., 0], ~at_bound
    )


def test_text_alone_says_nothing_of_the_bound(tiny: tuple[Any, Any]) -> None:
    data = TensorDict({}, [2]).set(("text", "response"), NonTensorStack("a", "b"))
    assert is_truncated(data, tiny[1], BOUND) == [False, False]
    assert response_texts(data, tiny[1], "tokens") == ["a", "b"]


def test_another_end_token_at_the_bound_is_an_end(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    rows = [[5, 6, other], [5, 6, 7], [5], [tokenizer.pad_token_id] * 3]
    data = lazy_stack([TensorDict({"tokens": {"response": torch.tensor(row)}}) for row in rows])
    assert is_truncated(data, tokenizer, 3) == [False, True, False, False]
