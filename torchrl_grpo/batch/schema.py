"""The TensorDict that goes from the collector to the loss: its schema and its construction.

The batch size is ``[P]``. An entry is a whole group: one prompt and its G responses.

=============================  ==============  =======  ====================================================
key                            shape           dtype    meaning
=============================  ==============  =======  ====================================================
("tokens", "prompt")           [P, L]          int64    prompt, padded on the left
("masks", "prompt")            [P, L]          bool     True on real tokens
("tokens", "response")         [P, G, T]       int64    response with its end token, padded on the right
("masks", "response")          [P, G, T]       bool     True on real tokens
("masks", "sampled")           [P, G, T]       bool     True on tokens that the model sampled
("log_probs", "response")      [P, G, T]       float32  of the engine, at the sampling temperature; 0 on
                                                        tokens that were not sampled
("log_probs", "reference")     [P, G, T]       float32  of the reference model, if a KL needs it, or of the
                                                        teacher
("tokens", "candidates")       [P, G, C, T]    int64    the C = policy.distill_top_k most probable tokens of
                                                        the teacher, if that is not 0
("log_probs", "candidates")    [P, G, C, T]    float32  of the teacher for them
("log_probs", "proximal")      [P, G, T]       float32  of the trainer; only with policy.proximal=trainer and
                                                        several steps per round
("next", "reward")             [P, G, 1]       float64  weighted sum of the rewards
("next", "reward_parts")       [P, G, K]       float64  the K rewards before weighting, in the order in which
                                                        reward.weights lists them; without their components
"truncated"                    [P, G, 1]       bool     True if the length bound ended the response
"advantage"                    [P, G, 1]       float32  written when the batch enters the buffer
("masks", "loss")              [P, G, T]       bool     tokens that the loss counts; written with "advantage"
"policy_version"               [P, G]          int64    policy version of the response's oldest token: the
                                                        optimizer steps that produced these weights
"newest_policy_version"        [P, G]          int64    policy version of the response's newest token
("versions", "response")       [P, G, T]       int64    policy version of each token
("pictures", "files")          [P, B]          uint8    encoded pictures of the prompt, one after another;
                                                        only with model.pictures
("pictures", "sizes")          [P, K]          int64    number of bytes of each picture, 0 after the last
"group_id"                     [P, G]          int64    sequential number of the group
=============================  ==============  =======  ====================================================

``policy.proximal=auto`` is ``trainer`` with an age above 0. Components are the numbers that a reward of
several parts reports beside its score (:class:`~torchrl_grpo.rewards.types.ResponseScore`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_grpo.inference.protocol import Answered
from torchrl_grpo.models.scoring.padding import join_files, pad_left, pad_right

# Entries of the group, without an axis for its G responses.
PROMPT_KEYS = (("tokens", "prompt"), ("masks", "prompt"))
_FILES, _FILE_SIZES = PICTURE_KEYS = (("pictures", "files"), ("pictures", "sizes"))
_RIGHT_PADDED = (
    ("tokens", "response"),
    ("masks", "response"),
    ("masks", "sampled"),
    ("log_probs", "response"),
    ("log_probs", "reference"),
    ("tokens", "candidates"),
    ("log_probs", "candidates"),
    ("log_probs", "proximal"),
    ("masks", "loss"),
    ("versions", "response"),
)


def build_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Answered]],
    rewards: Tensor,
    reward_parts: Tensor,
    group_id: Tensor,
    versions: int | Sequence[Sequence[Sequence[int]]],
    pad_token_id: int,
    files: Sequence[Sequence[bytes]] | None = None,
) -> TensorDict:
    """Build the TensorDict described above from the rollouts of one round.

    Args:
        prompts: token ids of P prompts.
        completions: G completions for each prompt.
        rewards: ``[P, G, 1]``.
        reward_parts: ``[P, G, K]``.
        group_id: ``[P, G]``.
        versions: policy version that sampled the tokens: one number for all, or one per token.
        pad_token_id: value of the padding, which never affects a result.
        files: encoded pictures of the P prompts; None for a model of text.
    """
    P, G = len(completions), len(completions[0])
    flat = [completion for group in completions for completion in group]
    log_probs, response_mask = pad_right([c.log_probs for c in flat], 0.0, torch.float32)
    by_token, oldest, newest = _versions(versions, response_mask)
    sampled, _ = pad_right(
        [[True] * len(c.token_ids) if c.sampled is None else c.sampled for c in flat], False, torch.bool
    )
    batch = TensorDict(
        {
            **tokens_of(prompts, [[c.token_ids for c in group] for group in completions], pad_token_id),
            "log_probs": TensorDict({"response": log_probs.view(P, G, -1)}, [P]),
            "next": TensorDict({"reward": rewards, "reward_parts": reward_parts}, [P]),
            "truncated": torch.tensor([c.finish_reason == "length" for c in flat]).view(P, G, 1),
            "policy_version": oldest.view(P, G),
            "newest_policy_version": newest.view(P, G),
            "versions": TensorDict({"response": by_token.view(P, G, -1)}, [P]),
            "group_id": group_id,
        },
        batch_size=[P],
    )
    if files is not None:
        batch["pictures"] = pictures_entry(files)
    return batch.set(("masks", "sampled"), sampled.view(P, G, -1))


def pictures_entry(files: Sequence[Sequence[bytes]]) -> TensorDict:
    """Build the entry ``pictures`` of the encoded pictures of P prompts."""
    packed, sizes = join_files(files)
    return TensorDict({"files": packed, "sizes": sizes}, [len(files)])


def picture_inputs(batch: TensorDictBase) -> dict[str, Tensor]:
    """Return the arguments of a scorer for the pictures of a batch; empty for a model of text."""
    files = batch.get(_FILES, None)
    return {} if files is None else {"files": files, "file_sizes": batch[_FILE_SIZES]}


def sampled_mask(batch: TensorDictBase) -> Tensor:
    """Return ``[P, G, T]`` bool, True on tokens that the model sampled.

    Batches of older checkpoints have no ``("masks", "sampled")``: there, all response tokens were sampled.
    """
    mask: Tensor = batch.get(("masks", "sampled"), batch["masks", "response"])
    return mask


def tokens_of(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[Sequence[int]]], pad_token_id: int
) -> dict[str, TensorDict]:
    """Build the entries ``tokens`` and ``masks``, which a scorer reads, of P prompts and G responses each."""
    P, G = len(responses), len(responses[0])
    prompt, prompt_mask = pad_left(prompts, pad_token_id)
    response, response_mask = pad_right(
        [token_ids for group in responses for token_ids in group], pad_token_id, torch.int64
    )
    return {
        "tokens": TensorDict({"prompt": prompt, "response": response.view(P, G, -1)}, [P]),
        "masks": TensorDict({"prompt": prompt_mask, "response": response_mask.view(P, G, -1)}, [P]),
    }


def _versions(
    versions: int | Sequence[Sequence[Sequence[int]]], mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return versions of tokens ``[N, T]``, 0 on padding, and each row's minimum and maximum ``[N]``."""
    if isinstance(versions, int):
        same = torch.full(mask.shape[:1], versions, dtype=torch.int64)
        return same[:, None] * mask, same, same.clone()
    rows = [row for group in versions for row in group]
    by_token, _ = pad_right(rows, 0, torch.int64)
    oldest = [min(row, default=torch.iinfo(torch.int64).max) for row in rows]
    newest = [max(row, default=0) for row in rows]
    return by_token, torch.tensor(oldest), torch.tensor(newest)


def token_counts(batch: TensorDictBase) -> tuple[list[int], list[list[int]]]:
    """Count the real tokens of P prompts, and of the G responses to each."""
    return batch["masks", "prompt"].sum(-1).tolist(), batch["masks", "response"].sum(-1).tolist()


def trim(batch: TensorDictBase) -> TensorDictBase:
    """Trim the padding of a batch to its longest prompt and response."""
    prompts, responses = token_counts(batch)
    return _fit_all(batch, max(prompts), max(max(row) for row in responses), {})


def collate(groups: Sequence[TensorDictBase]) -> TensorDict:
    """Stack groups of any width into a batch ``[P]``, trimmed to its longest prompt and response."""
    prompt_width = max(int(group["masks", "prompt"].sum()) for group in groups)
    response_width = max(int(group["masks", "response"].sum(-1).max()) for group in groups)
    widths = {
        key: max(group[key].shape[-1] for group in groups)
        for key in PICTURE_KEYS
        if key in groups[0].keys(include_nested=True)
    }
    fitted = [_fit_all(group, prompt_width, response_width, widths) for group in groups]
    return torch.stack(fitted).contiguous()


def _fit_all(
    groups: TensorDictBase, prompt_width: int, response_width: int, picture_widths: Mapping[NestedKey, int]
) -> TensorDictBase:
    fitted = groups.clone(recurse=False)
    for key, width in picture_widths.items():
        fitted.set(key, _fit(groups[key], width))
    for key in PROMPT_KEYS:
        fitted.set(key, _fit(groups[key].flip(-1), prompt_width).flip(-1))
    for key in _RIGHT_PADDED:
        if key in groups.keys(include_nested=True):
            fitted.set(key, _fit(groups[key], response_width))
    return fitted


def _fit(tensor: Tensor, width: int) -> Tensor:
    """Cut or zero-pad the last axis to ``width``. Only padding is cut."""
    return F.pad(tensor[..., :width], (0, max(0, width - tensor.shape[-1])))
