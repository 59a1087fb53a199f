"""The environment: order of the data, prompts, rewards, and TorchRL's own policies and checks on it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchrl.envs.utils import check_env_specs
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import check_contents, check_lengths, render
from torchrl_grpo.envs.group_text import GroupTextEnv
from torchrl_grpo.envs.stream import PromptStream
from torchrl_grpo.errors import CheckpointError, DataError, ModelError

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE,
    )


def example(number: int, text: str | None = None) -> Example:
    question = "1" * (number + 1) if text is None else text
    return Example(f"toy/{number}", [{"role": "user", "content": question}], {"answer": str(number)})


@dataclass
class FakeScored:
    total: float
    parts: dict[str, float]
    errors: dict[str, str] = field(default_factory=dict)


class Lengths:
    """Total: length of the answer. Part 'mine': the example's number. Fails on 'boom'."""

    names = ("mine",)

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], list[str]]] = []

    def score(self, completions: Any, examples: Any) -> list[Any]:
        self.calls.append((list(completions), [e.id for e in examples]))
        return [
            FakeScored(
                float(len(text)),
                {"mine": float(e.truth["answer"])} | ({"rare": 1.0} if text == "yes" else {}),
                {"mine": "it went boom"} if text == "boom" else {},
            )
            for text, e in zip(completions, examples, strict=True)
        ]


def make(
    tokenizer: PreTrainedTokenizerFast, rows: int = 5, prompts: int = 2, repeats: int = 3, **options: Any
) -> Any:
    keys: dict[str, Any] = {
        "max_prompt_tokens": 200,
        "part_names": ("mine", "rare"),
        "with_tokens": True,
    } | options
    stream = PromptStream([example(i) for i in range(rows)], seed=0, shuffle=False)
    rewards: Any = Lengths()
    return GroupTextEnv(stream, tokenizer, rewards, num_envs=prompts, repeats=repeats, **keys)


# --- the order of the data -------------------------------------------------------------------------


def test_every_epoch_holds_every_row_once_though_batches_straddle_its_end() -> None:
    stream = PromptStream([example(i) for i in range(7)], seed=3)
    drawn = [e.id for _ in range(7) for e in stream.draw(4)]
    for epoch in range(4):
        assert sorted(drawn[7 * epoch : 7 * epoch + 7]) == [f"toy/{i}" for i in range(7)]
    assert drawn[:7] != drawn[7:14]
    assert stream.drawn == 28


def test_a_draw_larger_than_the_data_wraps() -> None:
    stream = PromptStream([example(i) for i in range(2)], seed=0, shuffle=False)
    assert [e.id for e in stream.draw(5)] == ["toy/0", "toy/1", "toy/0", "toy/1", "toy/0"]


def test_order_depends_on_seed_and_epoch_only() -> None:
    rows = [example(i) for i in range(50)]
    first, second = PromptStream(rows, seed=1), PromptStream(rows, seed=1)
    first.draw(70)
    assert first.epoch_order(5) == second.epoch_order(5)
    assert first.epoch_order(5) != first.epoch_order(6)
    assert first.epoch_order(5) != PromptStream(rows, seed=2).epoch_order(5)
    # literal: an order that changes between versions would make old checkpoints lie
    assert PromptStream(rows[:6], seed=0).epoch_order(0) == [0, 5, 1, 4, 3, 2]


@pytest.mark.parametrize("before", [0, 3, 5, 10, 13])
def test_resumed_stream_is_the_uninterrupted_one(before: int) -> None:
    rows = [example(i) for i in range(5)]
    whole, broken = PromptStream(rows, seed=9), PromptStream(rows, seed=9)
    whole.draw(before)
    broken.draw(before)
    state = broken.state_dict()
    resumed = PromptStream(rows, seed=9)
    resumed.load_state_dict(state)
    assert set(state) == {"epoch", "position"}
    assert [e.id for e in resumed.draw(12)] == [e.id for e in whole.draw(12)]


def test_stream_refuses_no_data_and_a_position_outside_it() -> None:
    with pytest.raises(DataError, match="0 training examples"):
        PromptStream([], seed=0)
    with pytest.raises(CheckpointError, match=r"example 9 of epoch 1.*2 examples.*env.data_path"):
        PromptStream([example(0), example(1)], seed=0).load_state_dict({"epoch": 1, "position": 9})


# --- prompts ---------------------------------------------------------------------------------------


def test_render_is_the_template_and_nothing_else(tokenizer: PreTrainedTokenizerFast) -> None:
    text, ids = render(tokenizer, Example("x", [{"role": "user", "content": "Hi"}]))
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids) == text
    reference = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert ids == reference["input_ids"]


def test_environment_takes_a_template_and_rendering_needs_one(tokenizer: PreTrainedTokenizerFast) -> None:
    own = tokenizer.chat_template
    env = make(tokenizer, prompts=1, chat_template="Q: {{ messages[0]['content'] }}")
    assert env.draw()[0].text == f"Q: {example(0).messages[0]['content']}"
    assert tokenizer.chat_template == own
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    with pytest.raises(ModelError, match=r"model\.chat_template"):
        render(bare, Example("x", [{"role": "user", "content": "Hi"}]))


@pytest.mark.parametrize(
    ("template", "role"),
    [
        # Of models that read pictures: contents are lists.
        (
            "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
            "system",
        ),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "system"),
        (
            "{{ messages[0].content }}{% for m in messages if m.role == 'tool' %}{{ m.content }}{% endfor %}",
            "user",
        ),
        (TEMPLATE, None),
        ("{% for m in messages if m.role != 'assistant' %}{{ m.content | trim }}{% endfor %}", None),
    ],
)
def test_template_that_leaves_out_what_is_said_is_refused(
    template: str, role: str | None, tokenizer: PreTrainedTokenizerFast
) -> None:
    dialog = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "3 + 4?")]
    problem = Example("x", [{"role": who, "content": text} for who, text in dialog])
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    if role is None:
        check_contents(other, problem)
        return
    with pytest.raises(
        ModelError, match=rf"leaves out the text of messages of the role {role}.*model.chat_template"
    ):
        check_contents(other, problem)


def test_template_that_refuses_a_role_is_a_clear_error(tokenizer: PreTrainedTokenizerFast) -> None:
    other = copy.copy(tokenizer)
    other.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role: no') }}{% endif %}"
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with pytest.raises(ModelError, match=r"roles system, user: System role.*env.system_prompt=null"):
        render(other, Example("x", messages))


def test_too_long_a_prompt_is_refused_at_once(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [example(0), example(1, "x" * 50)]
    length = len(render(tokenizer, rows[1])[1])
    check_lengths(tokenizer, rows, length)
    with pytest.raises(DataError) as caught:
        GroupTextEnv(
            PromptStream(rows, seed=0),
            tokenizer,
            Lengths(),  # type: ignore[arg-type]
            num_envs=1,
            repeats=2,
            max_prompt_tokens=length - 1,
        )
    for word in ("toy/1", f"{length} tokens", f"most {length - 1}", "max_model_len", "max_new_tokens"):
        assert word in str(caught.value)


# --- the environment -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (3, 1), (1, 4)])
def test_torchrl_finds_the_specs_right(tokenizer: PreTrainedTokenizerFast, shape: Any) -> None:
    check_env_specs(make(tokenizer, prompts=shape[0], repeats=shape[1]), break_when_any_done="both")


def test_torchrl_finds_the_specs_right_without_parts(tokenizer: PreTrainedTokenizerFast) -> None:
    check_env_specs(make(tokenizer, part_names=()), seed=0)


def test_the_rewards_name_the_parts_unless_told(tokenizer: PreTrainedTokenizerFast) -> None:
    data = make(tokenizer, part_names=None).reset()
    assert list(data["reward_parts"].keys()) == ["mine"]
    assert not data["reward_parts", "mine"].any()


def test_reset_repeats_each_prompt_and_pads_on_the_left(tokenizer: PreTrainedTokenizerFast) -> None:
    env = make(tokenizer)
    data = env.reset()
    assert data.batch_size == (2, 3)
    assert [prompt.example.id for prompt in env.prompts] == ["toy/0", "toy/1"]
    assert data.get(("text", "prompt")).tolist() == [[prompt.text] * 3 for prompt in env.prompts]
    assert data.get("example_id").tolist() == [["toy/0"] * 3, ["toy/1"] * 3]
    assert data["group_id"].tolist() == [[0] * 3, [1] * 3]
    for p in range(2):
        for g in range(3):
            mask = data["masks", "all_attention_mask"][p, g]
            assert data["tokens", "prompt"][p, g][mask].tolist() == env.prompts[p].token_ids
            assert mask.tolist() == sorted(mask.tolist())
    assert (data["tokens", "prompt"][~data["masks", "all_attention_mask"]] == tokenizer.pad_token_id).all()
    assert len(env.prompts[0].token_ids) < len(env.prompts[1].token_ids)
    assert not data["done"].any()


def test_the_next_reset_draws_the_next_problems(tokenizer: PreTrainedTokenizerFast) -> None:
    env = make(tokenizer)
    groups = [
        (env.reset()["group_id"][:, 0].tolist(), [prompt.example.id for prompt in env.prompts])
        for _ in range(3)
    ]
    assert groups == [
        ([0, 1], ["toy/0", "toy/1"]),
        ([2, 3], ["toy/2", "toy/3"]),
        ([4, 5], ["toy/4", "toy/0"]),
    ]


def answer(data: TensorDict, texts: list[list[str]]) -> TensorDict:
    responses = lazy_stack([lazy_stack([NonTensorData(text) for text in group]) for group in texts])
    return data.set(("text", "response"), responses)


def test_step_scores_the_batch_in_one_call(tokenizer: PreTrainedTokenizerFast) -> None:
    env = make(tokenizer)
    data = env.step(
        answer(env.reset(), [["a", "yes<|im_end|>", ""], ["boom", "abc<|im_end|><|pad|><|pad|>", "no"]])
    )
    assert env.reward_set.calls == [
        (["a", "yes", "", "boom", "abc", "no"], ["toy/0"] * 3 + ["toy/1"] * 3),
    ]
    reward = data["next", "reward"]
    assert reward.dtype == torch.float32 and reward.shape == (2, 3, 1)
    assert reward[..., 0].tolist() == [[1, 3, 0], [4, 3, 2]]
    assert data["next", "reward_parts", "mine"][..., 0].tolist() == [[0] * 3, [1] * 3]
    rare = data["next", "reward_parts", "rare"].flatten()
    assert rare[1] == 1 and rare.isnan().sum() == 5
    assert data["next", "done"].all() and data["next", "terminated"].all()
    assert not data["next", "truncated"].any()


def test_scores_come_with_their_errors(tokenizer: Any) -> None:
    env = make(tokenizer)
    examples = [prompt.example for prompt in env.draw() for _ in range(3)]
    scored = env.score(["a", "yes<|im_end|>", "", "boom", "abc", "no"], examples)
    assert [score.errors for score in scored] == [{}, {}, {}, {"mine": "it went boom"}, {}, {}]
    assert [score.total for score in scored] == [1, 3, 0, 4, 3, 2]


def test_answers_to_an_earlier_batch_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    env = make(tokenizer)
    old = answer(env.reset(), [["a"] * 3] * 2)
    env.reset()
    with pytest.raises(RuntimeError, match=r"group 0.*group 2"):
        env.step(old)


def test_part_of_a_batch_cannot_be_reset(tokenizer: PreTrainedTokenizerFast) -> None:
    env = make(tokenizer)
    data = env.step(answer(env.reset(), [["a"] * 3] * 2))["next"]
    mask = torch.tensor([True, False])[:, None, None].expand(2, 3, 1)
    with pytest.raises(RuntimeError, match="whole batches"):
        env.reset(data.set("_reset", mask))


def test_state_dict_is_the_place_in_the_data(tokenizer: PreTrainedTokenizerFast) -> None:
    env, other = make(tokenizer), make(tokenizer)
    env.reset()
    other.load_state_dict(env.state_dict())
    assert other.reset()["group_id"].tolist() == env.reset()["group_id"].tolist() == [[2] * 3, [3] * 3]
    assert other.prompts == env.prompts


def test_seed_starts_the_data_over(tokenizer: PreTrainedTokenizerFast) -> None:
    stream = PromptStream([example(i) for i in range(20)], seed=0)
    rewards: Any = Lengths()
    env = GroupTextEnv(stream, tokenizer, rewards, num_envs=4, repeats=1, max_prompt_tokens=200)
    env.reset()
    env.set_seed(5)
    env.reset()
    assert [prompt.example for prompt in env.prompts] == PromptStream(stream.examples, seed=5).draw(4)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("pad_output", "with_tokens"), [(True, True), (False, False)])
@pytest.mark.parametrize("max_steps", [1, 3])
def test_stock_policy_rolls_out(
    tokenizer: PreTrainedTokenizerFast,
    model: LlamaForCausalLM,
    pad_output: bool,
    with_tokens: bool,
    max_steps: int,
) -> None:
    from torchrl.modules.llm import TransformersWrapper

    policy = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="text",
        generate=True,
        pad_output=pad_output,
        generate_kwargs={"max_new_tokens": 5, "do_sample": True},
    )
    env = make(tokenizer, with_tokens=with_tokens)
    torch.manual_seed(1)
    options = {"break_when_any_done": False, "return_contiguous": False} if max_steps > 1 else {}
    data = env.rollout(max_steps, policy, **options)
    assert data.batch_size == (2, 3, max_steps)
    assert len(env.reward_set.calls) == max_steps
    for step, (completions, ids) in enumerate(env.reward_set.calls):
        now = data[..., step]
        assert ids == [row for group in now.get("example_id").tolist() for row in group]
        assert now["next", "reward"].flatten().tolist() == [len(text) for text in completions]
        raw = [text for group in now.get(("text", "response")).tolist() for text in group]
        assert len(set(raw)) > 1
        assert completions == [strip(text) for text in raw]


def strip(text: str) -> str:
    for end in ("<|pad|>", "<|im_end|>", "<|im_start|>") * 5:
        text = text.removesuffix(end)
    return text
