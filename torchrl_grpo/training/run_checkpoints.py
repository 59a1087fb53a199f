"""The checkpoints of a run, each written while the run goes on.

On a CPU nothing is copied but the buffer: the files are written from the weights and the optimizer's state,
and the next update waits until they have been read. From a GPU they are copied to host memory first, and the
update waits for that copy only, unless it is of adapters, or moments wait in host memory, which are not
copied. Shards of FSDP2 then come to rank 0 in threads. Where the host has too little memory for copies, the
run waits for the write.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.checkpoints.background import BackgroundWriter
from torchrl_grpo.checkpoints.run_dir import public_command
from torchrl_grpo.config import Config
from torchrl_grpo.config.values import MOMENT_BYTES
from torchrl_grpo.distributed import shard_transfer
from torchrl_grpo.distributed.host_copies import COPY_SHARE, HostCopies
from torchrl_grpo.distributed.parallelism import sharded
from torchrl_grpo.errors import CheckpointError
from torchrl_grpo.models import lora, model_card, saving
from torchrl_grpo.observe.metrics import METRICS, read_jsonl
from torchrl_grpo.runtime import rank_env
from torchrl_grpo.runtime.files.direct_file import Written
from torchrl_grpo.runtime.hardware import available_gib
from torchrl_grpo.training import held_state
from torchrl_grpo.training.state import SessionState

# Entry of the state with tensors that only a refresh of the reference changes.
_REFERENCE = "reference"


@dataclass(frozen=True)
class _Snapshot:
    """What a checkpoint is written from.

    Attributes:
        step: number of the step after which it was taken.
        held: what an update changes, as this rank holds it.
        state: the rest of the run's state.
        updated: event of the GPU after which both are those of the step; None on a CPU.
        has_copies: whether tensors of a GPU are copied before the next update changes them.
        best_step: step of the best checkpoint so far; None if it is not kept.
        write_card: writes the model card of the step into a folder.
    """

    step: int
    held: dict[str, Any]
    state: dict[str, Any]
    updated: torch.cuda.Event | None
    has_copies: bool
    best_step: int | None
    write_card: Callable[[Path], None]


class RunCheckpoints:
    """Writes the checkpoints of a run.

    Args:
        cfg: configuration, saved in full.
        state: components of the run and its counters.
        run_dir: folder of the run.
        grader: name of what grades held-out responses.

    Attributes:
        writer: thread that writes.
    """

    def __init__(self, cfg: Config, state: SessionState, run_dir: Path, grader: str) -> None:
        self._cfg = cfg
        self._state = state
        self._run_dir = run_dir
        self._grader = grader
        self.writer = BackgroundWriter()
        self._host_copies = HostCopies()
        state.parts.learner.optimizer_step.before_update = self.writer.wait_until_read

    def save(self) -> None:
        """Begin to write a checkpoint of the current step, once the one before is written.

        Raises:
            CheckpointError: the disk was full for the one before, or is for one that is not written in the
                background.
            RunFolderLost: the folder was deleted meanwhile.
        """
        step, learner = self._state.counters.step, self._state.parts.learner
        if learner.ranks.are_apart:
            raise CheckpointError(
                f"{self._run_dir / 'checkpoints' / str(step)}: the checkpoint cannot be written, because an "
                "error has left the training ranks out of step; resume from the checkpoint before"
            )
        # Before anything is gathered, so that there is one copy at a time.
        self.writer.finish()
        room, whole_bytes = self._room(), self._whole_bytes()
        is_divided = isinstance(learner.network, FSDPModule)
        # The whole tensors, and copies of all shards, of which pinned ones take up to twice their size.
        copies = 3 * whole_bytes <= room
        on_gpu, memo = learner.device.type == "cuda", dict[int, Any]()
        state = {
            name: value if name == _REFERENCE else copy.deepcopy(value, memo)
            for name, value in self._state.state_dict().items()
        }
        write_card = partial(model_card.write, cfg=self._cfg, base=self._base, training=self._training())
        # Until rank 0 has their shards, the other ranks wait for it.
        with learner.ranks.mark_broken_on_error() if is_divided else nullcontext():
            snapshot = _Snapshot(
                step,
                held=learner.ranks.call_all(held_state.read, learner, step, copies),
                state=state,
                # The update may still run on the GPU, in this thread's stream, which vLLM may have replaced.
                updated=torch.cuda.current_stream(learner.device).record_event() if on_gpu else None,
                has_copies=copies or not is_divided,
                best_step=self._state.counters.best_step if self._cfg.train.keep_best else None,
                write_card=write_card,
            )
            self.writer.start(step, partial(self._write, snapshot))
        is_sharded = sharded(learner.network)
        copied = [
            value.nbytes
            for value in tree_leaves((snapshot.held, state), is_leaf=shard_transfer.is_shard)
            if isinstance(value, Tensor) and (value.is_cuda or is_sharded)
        ]
        # Merged, gathered or copied weights take memory that the next step may need.
        is_large = (whole_bytes if is_divided else sum(copied)) > room
        if self._cfg.checkpoint.export_merged or is_large or (learner.ranks.size > 1 and not on_gpu):
            self.writer.finish()
        elif is_divided and not copies:
            # The threads copy from the GPUs, which would wait for the next step.
            self.writer.wait_until_read()

    def _write(self, snapshot: _Snapshot, on_state_read: Callable[[], None]) -> None:
        """Write a checkpoint, in the thread of the writer."""
        cfg, model, tokenizer = self._cfg, self._state.parts.learner.model, self._state.parts.tokenizer
        content = self._gather(snapshot, on_state_read)

        def write_model(folder: Path) -> dict[Path, Written]:
            written = saving.save(model, tokenizer, folder, weights=content["held"]["weights"])
            snapshot.write_card(folder)
            return written

        def write_merged(folder: Path) -> dict[Path, Written]:
            saving.save_merged(model, tokenizer, folder)
            snapshot.write_card(folder)
            return {}

        checkpoint.save(
            self._run_dir,
            snapshot.step,
            cfg=cfg,
            write_model=write_model,
            state={**content["state"], "optimise": content["held"]["optimise"]},
            keep=cfg.checkpoint.keep,
            best_step=snapshot.best_step,
            write_merged=write_merged if cfg.checkpoint.export_merged else None,
            on_state_read=on_state_read,
        )

    def _gather(self, snapshot: _Snapshot, on_state_read: Callable[[], None]) -> dict[str, Any]:
        """Return ``"held"`` and ``"state"`` of a snapshot in host memory, whole."""
        learner = self._state.parts.learner
        is_divided = isinstance(learner.network, FSDPModule)
        content: dict[str, Any] = {"held": snapshot.held, "state": snapshot.state}
        # What is in host memory stays the optimizer's own.
        is_copied = snapshot.has_copies and not self._state.parts.plan.offload_optimizer
        is_copied &= not lora.adapted_layers(learner.model)
        with learner.ranks.mark_broken_on_error() if is_divided else nullcontext():
            if snapshot.updated is not None:
                snapshot.updated.synchronize()
                # Shards are copied already, or will be one at a time.
                changing = {"state": snapshot.state} if is_divided else content
                content |= self._host_copies(changing, learner.device)
                if is_copied:
                    on_state_read()
            content = shard_transfer.gather(content, learner.ranks)
        if snapshot.updated is not None and sharded(learner.network):
            on_state_read()
        return content

    def _room(self) -> float:
        """Return the bytes of host memory that copies of a checkpoint may take during the next step."""
        free_gib = available_gib()
        shards = self._state.parts.learner.host_copies.nbytes * rank_env.local_world_size()
        kept = self._host_copies.nbytes + shards
        return math.inf if free_gib is None else COPY_SHARE * (free_gib * 2**30 + kept)

    def _whole_bytes(self) -> float:
        """Return the size of weights and moments."""
        weights = self._state.parts.learner.model.parameters()
        count: int = sum(weight.numel() for weight in weights)
        return (4 + MOMENT_BYTES[self._cfg.optimizer.name]) * count

    def _training(self) -> model_card.Training:
        try:
            lines = read_jsonl(self._run_dir / METRICS)
        except (OSError, ValueError):
            # Somebody may have deleted or changed the file, and the model is saved all the same.
            lines = []
        rows = [row for row in lines if "eval/num_problems" in row]
        first, last = (rows[0], rows[-1]) if rows else ({"step": 0}, {"step": 0})
        return model_card.Training(
            command=public_command(self._run_dir / ".hydra"),
            step=self._state.counters.step,
            metrics={name: value for name, value in last.items() if name.startswith("eval/")},
            evaluated_at=last["step"],
            before=first if first["step"] == 0 < last["step"] else {},
            grader=self._grader,
        )

    @cached_property
    def _base(self) -> model_card.Base:
        return model_card.read_base(self._cfg)


def try_out_checkpoint(
    cfg: Config, run_dir: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, due: int
) -> None:
    """Try whether a run can write its checkpoints, before anything else is started.

    Args:
        cfg: configuration of the run.
        run_dir: folder of the run.
        model: model that the run trains.
        tokenizer: its tokenizer.
        due: number of checkpoints that the run will write.

    Raises:
        ModelError: files of the model cannot be saved.
        CheckpointError: the disk has no room for the checkpoints.
    """
    merged, has_adapters = cfg.checkpoint.export_merged, bool(lora.adapted_layers(model))
    named = dict(model.named_parameters())
    try_part = partial(saving.try_out, model, tokenizer, trust_remote_code=cfg.model.trust_remote_code)
    writers = {"model": try_part, **({"merged": partial(try_part, merged=True)} if merged else {})}
    least = sum(p.nbytes for name, p in named.items() if not has_adapters or lora.is_adapter(name))
    # The optimizer's averages. Small tensors, and those that Muon leaves to AdamW, have larger ones.
    least += int(MOMENT_BYTES[cfg.optimizer.name] * sum(p.numel() for p in named.values() if p.requires_grad))
    if merged:
        least += 4 * sum(p.numel() for name, p in named.items() if not lora.is_adapter(name))
    keep, best = cfg.checkpoint.keep, cfg.train.keep_best
    checkpoint.try_out(run_dir, writers, least, due=due, keep=keep, keep_best=best)
