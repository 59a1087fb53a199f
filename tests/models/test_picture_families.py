"""Log-probabilities of prompts with pictures: in batches, and as each family computes a sequence alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from slow_cases import slow_except
from tiny_vlm import FAMILIES, build, picture
from torch import Tensor

from torchrl_grpo.config.schema import TrainModelConfig
from torchrl_grpo.data.pictures import encode
from torchrl_grpo.errors import ModelError
from torchrl_grpo.models.pictures import PictureProcessor
from torchrl_grpo.models.prepare import prepare_for_training, shares_prefix
from torchrl_grpo.models.scoring.padding import join_files, pad_left, pad_right
from torchrl_grpo.models.scoring.token_scorer import TokenScorer

# Pictures of several sizes: two, none, one and three in a prompt.
_PICTURES = [
    [picture(40, 24, 1), picture(70, 50, 2)],
    [],
    [picture(30, 30, 3)],
    [picture(64, 20, 4), picture(20, 64, 5), picture(33, 47, 6)],
]
_LENGTHS = [(3, 7), (1, 5), (9, 2), (4, 4)]
_TEMPERATURE = 0.7
# In Gemma 3, tokens of a picture see those that come after them. LFM2 has convolutions over tokens.
_RUN_APART = ("gemma3", "lfm2_vl")
_NOT_SHARED = "prompts are run once per response"


def _batch(processor: PictureProcessor) -> tuple[list[Any], list[list[int]]]:
    """Inputs of a scorer, and the tokens of each prompt."""
    tokenizer = processor.processor.tokenizer
    prompts = []
    for pictures in _PICTURES:
        shown = processor.replacements([each.size for each in pictures]) if pictures else []
        text = "".join(f"<|vision_start|>{tokens}<|vision_end|>" for tokens in shown)
        text = f"<|im_start|>user\n{text}How many circles?<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    generator = torch.Generator().manual_seed(0)
    responses = [
        torch.randint(40, 300, (length,), generator=generator).tolist() for row in _LENGTHS for length in row
    ]
    prompt, prompt_mask = pad_left(prompts, 0)
    response, mask = pad_right(responses, 0, torch.int64)
    shape = (len(prompts), 2, -1)
    files = join_files([[encode(each) for each in pictures] for pictures in _PICTURES])
    mask = mask.view(shape)
    # No candidates of a teacher.
    return [prompt, prompt_mask, response.view(shape), mask, mask, None, *files], prompts


def _alone(
    model: Any, processor: PictureProcessor, prompt: Sequence[int], response: Tensor, number: int
) -> Tensor:
    """Log-probabilities of one response, with what the family's processor makes of its prompt's pictures."""
    ids = torch.tensor([[*prompt, *response.tolist()]])
    inputs: dict[str, Any] = {}
    if _PICTURES[number]:
        # The processor's own text: what it says of tokens must not come from the code under test.
        marks = "<|vision_start|>".join([processor.mark] * len(_PICTURES[number]))
        inputs = dict(
            processor.processor(
                text=[f"<|vision_start|>{marks}"], images=_PICTURES[number], return_tensors="pt"
            )
        )
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inputs:
                (pictured,) = set(inputs["input_ids"][inputs[name] == 1].tolist())
                inputs[name] = (ids == pictured).long()
        del inputs["input_ids"], inputs["attention_mask"]
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, len(prompt) - 1 : -1] / _TEMPERATURE
    logits[:, list(processor.blocked)] = -torch.inf
    log_probs: Tensor = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
    return log_probs


def _one_by_one(model: Any, processor: PictureProcessor) -> Tensor:
    tensors, prompts = _batch(processor)
    response, mask = tensors[2], tensors[3]
    rows = []
    for number, prompt in enumerate(prompts):
        for sample in range(2):
            words = response[number, sample][mask[number, sample]]
            padding = torch.zeros(response.shape[-1] - len(words))
            rows.append(torch.cat([_alone(model, processor, prompt, words, number), padding]))
    return torch.stack(rows).view(response.shape)


def _slopes(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1))


def _gradients(model: Any, log_probs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (log_probs * _slopes(log_probs)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", ["padded", "shared", "recomputed", "micro-batches"])
@pytest.mark.parametrize("family", slow_except(["qwen2_5_vl", "llava"], FAMILIES))
def test_batch_scores_as_each_sequence_alone(family: str, way: str) -> None:
    """Values and gradients to 1e-5, those of the vision tower included. A micro-batch has one group here."""
    model, processor = build(family)
    pictures = PictureProcessor(processor)
    expected = _one_by_one(model, pictures)
    gradients = _gradients(model, expected)
    assert any("vision" in name or "visual" in name for name in gradients)

    shared = way != "padded"
    if way == "recomputed":
        prepare_for_training(model, TrainModelConfig(vision_tower=True, gradient_checkpointing=True))
    if shared and family in _RUN_APART:
        with pytest.warns(UserWarning, match=_NOT_SHARED):
            assert not shares_prefix(model, pictures=pictures)
        shared = False
    scorer = TokenScorer(model, _TEMPERATURE, shares_prefix=shared, pictures=pictures)
    assert scorer.shares_prefix == shared
    tensors, _ = _batch(pictures)
    batches = [tensors]
    if way == "micro-batches":
        batches = [[each if each is None else each[row : row + 1] for each in tensors] for row in range(4)]
    actual = torch.cat([scorer(*each).log_probs for each in batches])

    assert expected.abs().max() > 1
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    for name, gradient in _gradients(model, actual).items():
        scale = float(gradients[name].abs().max())
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-5 * scale + 1e-6, msg=name)


@pytest.mark.parametrize("family", slow_except(["qwen2_5_vl", "llava"], FAMILIES))
def test_startup_check_finds_the_exact_path(family: str) -> None:
    model, processor = build(family)
    prepare_for_training(model, TrainModelConfig())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shares = shares_prefix(model, pictures=PictureProcessor(processor))
    assert shares == (family not in _RUN_APART)
    assert any(_NOT_SHARED in str(warning.message) for warning in caught) != shares


def test_responses_that_see_their_own_later_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a family that takes the whole sequence for a prompt, which it sees both ways."""
    model, processor = build("idefics3")
    prepare_for_training(model, TrainModelConfig())
    forward = type(model).forward

    def sees_ahead(self: Any, input_ids: Tensor, **inputs: Any) -> Any:
        output = forward(self, input_ids=input_ids, **inputs)
        if "pixel_values" in inputs:
            output.logits[..., 60] += 0.1 * input_ids[:, -1:]
        return output

    monkeypatch.setattr(type(model), "forward", sees_ahead)
    with pytest.raises(ModelError, match=r"change by .* nats with the tokens after them, "):
        shares_prefix(model, pictures=PictureProcessor(processor))


def test_processor_without_a_token_for_pictures_is_refused() -> None:
    _, processor = build("idefics3")
    processor.image_token_ids = [None]
    with pytest.raises(ModelError, match="names no token that stands for a picture"):
        PictureProcessor(processor)


@pytest.mark.parametrize("trains_vision", [False, True])
def test_vision_tower_is_trained_by_its_key(trains_vision: bool) -> None:
    model, _ = build("idefics3")
    prepare_for_training(model, TrainModelConfig(vision_tower=trains_vision))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("text_model" in name for name in trained)
    assert any("vision_model" in name for name in trained) == trains_vision
    assert any("connector" in name for name in trained) == trains_vision


def test_tokens_of_pictures_have_no_probability() -> None:
    model, processor = build("idefics3")
    pictures = PictureProcessor(processor)
    tensors, _ = _batch(pictures)
    # The last token is no input of the model.
    tensors[2][0, 0, 2] = pictures.token_ids[0]
    scores = TokenScorer(model, _TEMPERATURE, pictures=pictures)(*tensors)
    assert scores.log_probs[0, 0, 2] < -1e6
    assert scores.entropy.isfinite().all()
