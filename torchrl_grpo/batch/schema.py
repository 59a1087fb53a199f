"""The TensorDict that goes from the collector to the loss: its schema and its construction.

The batch size is ``[P]``. An entry is a whole group: one prompt and its G responses.

A round is a lazy stack of groups, each as wide as its own longest response. L, T, B and F differ between
groups, so an entry with one of them is read from each group by itself (``[group["tokens", "response"] for
group in groups]``). :func:`collate` pads groups to one width, as in a micro-batch. A padded batch may take
the place of a lazy stack everywhere.

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
("pictures", "files")          [P, B]          uint8    encoded pictures of the prompt, F one after another;
                                                        only with model.pictures
("pictures", "sizes")          [P, F]          int64    number of bytes of each picture, 0 after the last
"group_id"                     [P, G]          int64    sequential number of the group
=============================  ==============  =======  ====================================================

``policy.proximal=auto`` is ``trainer`` with an age above 0. Components are the numbers that a reward of
several parts reports beside its score (:class:`~torchrl_grpo.rewards.types.ResponseScore`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_grpo.inference.protocol import Answered
from torchrl_grpo.models.scoring.padding import join_files, pad_right

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
) -> LazyStackedTensorDict:
    """Build the lazy stack described above from the rollouts of one round.

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
    groups = []
    for number, (prompt, siblings) in enumerate(zip(prompts, completions, strict=True)):
        group = tokens_of(prompt, [c.token_ids for c in siblings], pad_token_id)
        log_probs, mask = pad_right([c.log_probs for c in siblings], 0.0, torch.float32)
        own = versions if isinstance(versions, int) else versions[number]
        by_token, oldest, newest = _versions(own, mask)
        sampled = [[True] * len(c.token_ids) if c.sampled is None else c.sampled for c in siblings]
        group["masks", "sampled"] = _pad_repeated(sampled, mask, torch.bool)
        group["log_probs"] = {"response": log_probs}
        group["next"] = {"reward": rewards[number], "reward_parts": reward_parts[number]}
        group["truncated"] = torch.tensor([[c.finish_reason == "length"] for c in siblings])
        group["policy_version"], group["newest_policy_version"] = oldest, newest
        group["versions"] = {"response": by_token}
        group["group_id"] = group_id[number]
        if files is not None:
            group["pictures"] = pictures_entry(files[number])
        groups.append(group)
    return lazy_stack(groups)


def pictures_entry(files: Sequence[bytes]) -> dict[str, Tensor]:
    """Build the entry ``pictures`` of a group from the encoded pictures of its prompt."""
    packed, sizes = join_files([files])
    return {"files": packed[0], "sizes": sizes[0]}


def picture_inputs(batch: TensorDictBase) -> dict[str, Tensor]:
    """Return the arguments of a scorer for the pictures of a padded batch; empty for a model of text."""
    files = batch.get(_FILES, None)
    return {} if files is None else {"files": files, "file_sizes": batch[_FILE_SIZES]}


def sampled_mask(batch: TensorDictBase) -> Tensor:
    """Return ``[..., G, T]`` bool, True on tokens of a group or a padded batch that the model sampled.

    Groups of older checkpoints have no ``("masks", "sampled")``: there, all response tokens were sampled.
    """
    mask: Tensor = batch.get(("masks", "sampled"), batch["masks", "response"])
    return mask


def sampled_counts(groups: TensorDictBase) -> Tensor:
    """Count the tokens of each response that the model sampled: ``[P, G]`` int64."""
    return torch.stack([sampled_mask(group).sum(-1) for group in groups.unbind(0)])


def tokens_of(prompt: Sequence[int], responses: Sequence[Sequence[int]], pad_token_id: int) -> TensorDict:
    """Build a group with the entries that a scorer reads, ``tokens`` and ``masks``.

    Args:
        prompt: token ids of the prompt.
        responses: token ids of G responses.
        pad_token_id: value of the padding.
    """
    response, mask = pad_right(responses, pad_token_id, torch.int64)
    entries = {
        "tokens": {"prompt": torch.tensor(prompt, dtype=torch.int64), "response": response},
        "masks": {"prompt": torch.ones(len(prompt), dtype=torch.bool), "response": mask},
    }
    return TensorDict(entries, [])


def _versions(versions: int | Sequence[Sequence[int]], mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return versions of tokens ``[G, T]``, 0 on padding, and each row's minimum and maximum ``[G]``."""
    if isinstance(versions, int):
        same = torch.full(mask.shape[:1], versions, dtype=torch.int64)
        return same[:, None] * mask, same, same.clone()
    by_token = _pad_repeated(versions, mask, torch.int64)
    most = torch.iinfo(torch.int64).max
    oldest = by_token.numpy().min(-1, initial=most, where=mask.numpy())
    newest = by_token.numpy().max(-1, initial=0)
    return by_token, torch.from_numpy(oldest), torch.from_numpy(newest)


def _pad_repeated(rows: Sequence[Sequence[int]], mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of which most repeat one value as ``dtype`` ``[G, T]``, 0 where the mask is False.

    Counting a value in a list takes a twentieth of the time of converting the list.
    """
    if any(row and row.count(row[0]) < len(row) for row in rows):
        return pad_right(rows, 0, dtype)[0]
    return torch.tensor([row[0] if row else 0 for row in rows], dtype=dtype)[:, None] * mask


def token_counts(groups: TensorDictBase) -> tuple[list[int], list[list[int]]]:
    """Count the real tokens of P prompts, and of the G responses to each."""
    masks = [group["masks"] for group in groups.unbind(0)]
    return [int(mask["prompt"].sum()) for mask in masks], [
        mask["response"].sum(-1).tolist() for mask in masks
    ]


def set_rows(groups: TensorDictBase, key: NestedKey, rows: Iterable[Tensor]) -> TensorDictBase:
    """Set an entry of each of P groups, whose widths may differ, and return the groups."""
    if not isinstance(groups, LazyStackedTensorDict):
        return groups.set(key, torch.stack(list(rows)))
    for group, row in zip(groups.tensordicts, rows, strict=True):
        group.set(key, row)
    return groups


def collate(groups: Sequence[TensorDictBase]) -> TensorDict:
    """Stack groups of any width into a batch ``[P]`` as wide as its longest prompt and response."""
    prompt_width = max(int(group["masks", "prompt"].sum()) for group in groups)
    response_width = max(int(group["masks", "response"].sum(-1).max()) for group in groups)

    def fit(key: NestedKey, values: Tensor) -> Tensor:
        if key in PROMPT_KEYS:
            return _fit(values.flip(-1), prompt_width).flip(-1)
        if key in PICTURE_KEYS:
            return _fit(values, max(group[key].shape[-1] for group in groups))
        return _fit(values, response_width) if key in _RIGHT_PADDED else values

    return torch.stack([group.named_apply(fit, nested_keys=True) for group in groups]).contiguous()


def _fit(tensor: Tensor, width: int) -> Tensor:
    """Cut or zero-pad the last axis to ``width``. Only padding is cut."""
    return F.pad(tensor[..., :width], (0, max(0, width - tensor.shape[-1])))


def pack(groups: TensorDictBase) -> dict[str, tuple[Tensor, Tensor]]:
    """Return for each key the shapes of all groups, and their values one after the other.

    A file or a message takes longer for many small tensors than for a few large ones.
    """
    rows = [dict(group.flatten_keys("/").items()) for group in groups.unbind(0)]
    return {
        key: (torch.tensor([row[key].shape for row in rows]), torch.cat([row[key].flatten() for row in rows]))
        for key in rows[0]
    }


def unpack(packed: Mapping[str, tuple[Tensor, Tensor]]) -> LazyStackedTensorDict:
    """Undo :func:`pack`. The groups share the memory of ``packed``."""
    columns = []
    for shapes, values in packed.values():
        parts = values.split(shapes.prod(-1).tolist())
        columns.append([part.view(shape) for part, shape in zip(parts, shapes.tolist(), strict=True)])
    rows = (dict(zip(packed, row, strict=True)) for row in zip(*columns, strict=True))
    return lazy_stack([TensorDict(row, []).unflatten_keys("/") for row in rows])
