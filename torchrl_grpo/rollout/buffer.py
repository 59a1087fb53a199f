"""The replay buffer between collection and optimization: a stock TorchRL buffer whose entries are groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs.transforms import Transform

from torchrl_grpo.batch.schema import pack, unpack


class GroupBuffer:
    """Holds one round of groups and hands them out in optimizer batches, each group once
    in each of the ``train.epochs`` passes over the round.

    Args:
        capacity: largest number of groups held.
        groups_per_batch: number of groups in an optimizer batch.
        write_transforms: transforms of each round on its way in, in this order.
        seed: seed of the order within an epoch.
    """

    def __init__(
        self, capacity: int, groups_per_batch: int, write_transforms: Sequence[Transform], seed: int
    ) -> None:
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage(capacity),
            sampler=SamplerWithoutReplacement(drop_last=False, shuffle=True),
            collate_fn=lambda groups: groups,
            batch_size=groups_per_batch,
            generator=torch.Generator().manual_seed(seed),
        )
        # On writing, TorchRL calls the inverses of the transforms, from the last appended to the first.
        for transform in reversed(write_transforms):
            self.buffer.append_transform(transform)

    def replace_contents(self, groups: TensorDictBase) -> None:
        """Replace the contents by ``groups`` ``[P]`` (see :mod:`~torchrl_grpo.batch.schema`)."""
        self.buffer.empty()
        self.buffer.extend(groups)

    def sample(self) -> TensorDictBase:
        """The next optimizer batch. Nothing is copied, so its groups must not be changed."""
        return self.buffer.sample()

    def contents(self) -> TensorDictBase:
        """All groups held, in the order they came. Nothing is copied."""
        return self.buffer[:]

    def state_dict(self) -> dict[str, Any]:
        """Groups, the order still to be sampled, and its generator, as tensors and plain values."""
        held = pack(self.contents()) if len(self.buffer) else {}
        sampler = self.buffer._sampler.state_dict()
        return {"groups": held, "sampler": dict(sampler), "generator": self.buffer._rng.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`, or one of an older checkpoint."""
        self.buffer.empty()
        held = state["groups"]
        if held:
            # Checkpoints of earlier versions have a list of groups.
            groups = unpack(held) if isinstance(held, dict) else lazy_stack(list(map(_unflattened, held)))
            # Straight into the storage: the write transforms have already run on these.
            self.buffer._extend(groups)
        self.buffer._sampler.load_state_dict(state["sampler"])
        self.buffer._rng.set_state(state["generator"])


def _unflattened(group: dict[str, Tensor]) -> TensorDict:
    return TensorDict(group, []).unflatten_keys("/")
