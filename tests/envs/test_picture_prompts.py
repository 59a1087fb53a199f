"""Prompts with pictures have the tokens of the family's own processor, and mistakes are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from picture_prompts import SHOWN, example_of, prompts_of, tokenizer_of
from tiny_vlm import FAMILIES, build, picture

from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import check_contents, check_lengths, lengths_above, prompt_pictures, render
from torchrl_grpo.errors import DataError, ModelError


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_processor(family: str) -> None:
    _, processor = build(family)
    prompts, shown = prompts_of(processor)
    for tokens, prompt, pictures in zip(prompts, shown, SHOWN, strict=True):
        parts = [{"type": "text", "text": "Look: "}]
        for _ in pictures:
            parts += [{"type": "image"}, {"type": "text", "text": " and "}]
        parts.append({"type": "text", "text": "How many circles?"})
        text = processor.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        expected = processor(text=[text], images=pictures or None, add_special_tokens=False)["input_ids"][0]
        assert tokens == list(expected)
        assert prompt.tokens == len(tokens)
        assert list(prompt.written) == processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(prompt.files) == len(pictures)


def test_marks_in_a_question_stay_text() -> None:
    """A question that writes the token of a picture has no more pictures than its data set says."""
    _, processor = build("qwen2_5_vl")
    tokenizer = tokenizer_of(processor)
    question = "What does <|image_pad|><|vision_start|> mean?"
    text, tokens = render(tokenizer, example_of(SHOWN[2], question))
    _, plain = render(tokenizer, example_of(SHOWN[2], "?"))
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert question in text
    assert tokens.count(image) == plain.count(image) > 0


def test_template_without_pictures_is_refused() -> None:
    _, processor = build("idefics3")
    tokenizer = tokenizer_of(processor)
    tokenizer.chat_template = tokenizer.chat_template.replace("<image>", "")
    with pytest.raises(ModelError, match="writes 0 times <image> for the 1 pictures"):
        render(tokenizer, example_of(SHOWN[2]))


def test_template_that_takes_no_parts_is_refused() -> None:
    _, processor = build("idefics3")
    tokenizer = tokenizer_of(processor)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '' }}{% endfor %}"
    with pytest.raises(ModelError, match="chat template"):
        render(tokenizer, example_of(SHOWN[2]))


def test_contents_are_checked_without_pictures() -> None:
    _, processor = build("idefics3")
    check_contents(tokenizer_of(processor), example_of(SHOWN[0]))


def test_picture_that_does_not_suit_the_model_is_refused() -> None:
    _, processor = build("qwen2_5_vl")
    with pytest.raises(DataError, match=r"pictures/1: its pictures of 900 x 2 pixels do not suit the model"):
        render(tokenizer_of(processor), example_of([picture(900, 2)]))


def test_tokens_of_pictures_count_for_the_length() -> None:
    _, processor = build("idefics3")
    tokenizer = tokenizer_of(processor)
    example = example_of(SHOWN[0])
    _, tokens = render(tokenizer, example)
    assert lengths_above(tokenizer, [example], len(tokens) - 1) == {0: len(tokens)}
    assert lengths_above(tokenizer, [example], len(tokens)) == {}
    with pytest.raises(DataError, match=f"{len(tokens)} tokens with those of its 2 pictures"):
        check_lengths(tokenizer, [example], 20)


def test_tokenizer_of_text_renders_as_before() -> None:
    _, processor = build("idefics3")
    tokenizer = processor.tokenizer
    example = Example("a/1", [{"role": "user", "content": "Hi"}])
    text, tokens = render(tokenizer, example)
    assert prompt_pictures(tokenizer, example, tokens) is None
    attached = tokenizer_of(processor)
    assert render(attached, example) == (text, tokens)
    assert render(attached, replace(example, messages=[*example.messages])) == (text, tokens)
