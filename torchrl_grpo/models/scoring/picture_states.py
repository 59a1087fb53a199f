"""Hidden states of responses to prompts with pictures, as the model's own forward pass computes them.

Axes: ``P`` prompts, ``G`` responses per prompt, ``L`` prompt tokens, ``T`` response tokens, ``M`` real
response tokens, ``H`` hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_grpo.models.pictures import PictureInputs, PictureProcessor
from torchrl_grpo.models.scoring import shared_prefix
from torchrl_grpo.models.scoring.padding import whole_rows


def compute(
    model: PreTrainedModel,
    body: nn.Module,
    processor: PictureProcessor,
    shares_prefix: bool,
    prompt: Tensor,
    prompt_mask: Tensor,
    response: Tensor,
    mask: Tensor,
    files: Sequence[Sequence[bytes]],
) -> Tensor:
    """Compute the hidden states ``[M, H]`` that predict the response tokens, in the order of the mask.

    With a shared prompt, its pictures are encoded once for all of its responses.

    Args:
        model: model for pictures and text.
        body: the model without its head.
        processor: processor of the model.
        shares_prefix: whether each prompt is run once per group.
        prompt: ``[P, L]`` int64, padded on the left. All tensors are on the CPU.
        prompt_mask: ``[P, L]`` bool.
        response: ``[P, G, T]`` int64, padded on the right.
        mask: ``[P, G, T]`` bool.
        files: encoded pictures of each prompt.
    """
    device = next(model.parameters()).device
    if shares_prefix:
        order = shared_prefix.row_order(prompt_mask)
        pictures = PictureInputs(body, processor, [files[row] for row in order.tolist()])
        positions = pictures.positions(prompt[order], prompt_mask[order])[..., order.argsort(), :]
        layout = shared_prefix.PrefixLayout(prompt, prompt_mask, response, mask, device, positions)
        inputs = pictures.on(device) | pictures.token_types(layout.ids)
        return shared_prefix.hidden_states(body, layout, **inputs)
    ids, attention, before = whole_rows(prompt, prompt_mask, response, mask)
    ids, attention = ids.to(device), attention.to(device)
    pictures = PictureInputs(body, processor, [row for row in files for _ in range(response.shape[1])])
    output = body(
        input_ids=ids,
        attention_mask=attention.long(),
        use_cache=False,
        **pictures.model_inputs(ids, attention),
    )
    hidden: Tensor = output.last_hidden_state
    return hidden.flatten(0, 1).index_select(0, before.to(device))
