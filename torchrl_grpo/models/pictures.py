"""What the processor of a model makes of pictures: tokens for a prompt, and tensors for the forward pass.

Prompts and pictures go through the processor separately. A prompt is rendered and tokenized as text, where
each picture is the text that the processor puts in its place. So control tokens in a question stay broken.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchrl_grpo.data.pictures import decode
from torchrl_grpo.errors import ModelError

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

# What a processor returns beside the inputs for pictures.
_OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "text_replacement_offsets")
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
_ATTRIBUTE = "_picture_processor"


class PictureProcessor:
    """The processor of a model for pictures and text.

    Attributes:
        mark: text that a chat template writes for a picture.
        token_ids: tokens that stand for pictures in a prompt.
        blocked: tokens that no response may have: those, and the tokens of videos.

    Args:
        processor: a processor of transformers.

    Raises:
        ModelError: it names no token that stands for a picture.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.mark = str(processor.image_token)
        self.token_ids = _known(processor, "image_token_ids")
        if not self.token_ids:
            raise ModelError(
                f"{type(processor).__name__} names no token that stands for a picture, so responses could "
                "have it; choose another model.name"
            )
        self.blocked = tuple(sorted({*self.token_ids, *_known(processor, "video_token_ids")}))
        self._replacements: dict[tuple[tuple[int, int], ...], list[str]] = {}

    def replacements(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """Return the text that takes the place of each picture's mark. It depends on their sizes only.

        Args:
            sizes: width and height of each picture of a prompt.

        Raises:
            ValueError: a picture does not suit the model.
        """
        from PIL import Image

        known = tuple(sizes)
        if known not in self._replacements:
            blank = [Image.new("RGB", size) for size in known]
            output = self._process(blank, return_text_replacement_offsets=True)
            (places,) = output["text_replacement_offsets"]
            self._replacements[known] = [str(place["replacement"]) for place in places]
        return self._replacements[known]

    def features(self, pictures: Sequence[Image]) -> dict[str, Tensor]:
        """Return the inputs of the model for pictures, which are in the order of their tokens."""
        output = self._process(pictures, return_tensors="pt")
        return {name: value for name, value in output.items() if name not in _OF_TEXT}

    def _process(self, pictures: Sequence[Image], **options: Any) -> Mapping[str, Any]:
        # Tokens of the text are not read. It only has a mark for each picture.
        output: Mapping[str, Any] = self.processor(
            text=[self.mark * len(pictures)], images=list(pictures), **options
        )
        return output


def _known(processor: Any, name: str) -> tuple[int, ...]:
    return tuple(token for token in getattr(processor, name, None) or () if token is not None)


def attach(tokenizer: PreTrainedTokenizerBase, processor: PictureProcessor) -> None:
    """Let a tokenizer render prompts with pictures."""
    setattr(tokenizer, _ATTRIBUTE, processor)


def processor_of(tokenizer: PreTrainedTokenizerBase) -> PictureProcessor | None:
    """Return what was attached to a tokenizer; None if it renders text alone."""
    processor: PictureProcessor | None = vars(tokenizer).get(_ATTRIBUTE)
    return processor


class PictureInputs:
    """Inputs of a model for the pictures of some rows of tokens.

    Args:
        backbone: the model without its head.
        processor: processor of the model.
        files: encoded pictures of each row, in the order of their tokens.
    """

    def __init__(
        self, backbone: nn.Module, processor: PictureProcessor, files: Sequence[Sequence[bytes]]
    ) -> None:
        # Attributes of transformers' models, which have no common class.
        self._backbone: Any = backbone
        self._token_ids = torch.tensor(processor.token_ids)
        pictures = [decode(data) for row in files for data in row]
        self.features = processor.features(pictures) if pictures else {}

    def token_types(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the model's argument that tells tokens of pictures from text; empty if it has none."""
        parameters = inspect.signature(self._backbone.forward).parameters
        name = next((name for name in _TOKEN_TYPES if name in parameters), None)
        if name is None or not self.features:
            return {}
        return {name: torch.isin(ids, self._token_ids.to(ids.device)).long()}

    def positions(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the positions of tokens, as the model's own forward pass computes them.

        Args:
            ids: ``[N, T]`` int64 on the CPU.
            mask: ``[N, T]`` bool, True on real tokens.

        Returns:
            ``[N, T]``, or ``[A, N, T]`` for a model whose positions have A axes.
        """
        places = (mask.long().cumsum(-1) - 1).clamp(min=0)
        if not self.features or not hasattr(self._backbone, "get_rope_index"):
            return places
        known = {
            "input_ids": ids,
            "attention_mask": mask.long(),
            **self.token_types(ids),
            **self.features,
        }
        parameters = inspect.signature(self._backbone.get_rope_index).parameters
        positions: Tensor = self._backbone.get_rope_index(
            **{name: value for name, value in known.items() if name in parameters}
        )[0]
        return positions.masked_fill(~mask, 0)

    def model_inputs(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return all inputs of the model for rows of tokens, beside the tokens and their mask.

        Args:
            ids: ``[N, T]`` int64, on the device of the model.
            mask: ``[N, T]`` bool, True on real tokens.
        """
        positions = self.positions(ids.cpu(), mask.cpu()).to(ids.device)
        return self.on(ids.device) | self.token_types(ids) | {"position_ids": positions}

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """Return the features on a device, in the number format of the model."""
        dtype = self._backbone.dtype
        return {
            name: value.to(device, dtype if value.is_floating_point() else value.dtype)
            for name, value in self.features.items()
        }
