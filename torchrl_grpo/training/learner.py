"""The trained model on one training rank, and the collective calls on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from torchrl_grpo.batch.micro_batches import DUMMY_MICRO_BATCH, MicroBatch, Share, TokenBudget
from torchrl_grpo.checkpoints import checkpoint
from torchrl_grpo.checkpoints.background import BackgroundWriter
from torchrl_grpo.config import Config
from torchrl_grpo.config.derived import optim_batch_size, rounds, steps_per_round, token_budget
from torchrl_grpo.distributed.host_copies import HostCopies
from torchrl_grpo.distributed.parallelism import distribute, full_tensor, reshard_after, sharded, writable
from torchrl_grpo.distributed.rank_engine import RankEngine
from torchrl_grpo.distributed.ranks import Ranks
from torchrl_grpo.envs.episodes.build import with_episodes
from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference.build import EngineOptions, build_engine
from torchrl_grpo.inference.checksums import checksum
from torchrl_grpo.models.build import build_model
from torchrl_grpo.models.loading import load_processor
from torchrl_grpo.models.lora import disable_adapters
from torchrl_grpo.models.precision import choose_kernels, resolve_autocast, resolve_head
from torchrl_grpo.models.prepare import (
    compile_layers,
    discard_compiled_layers,
    prepare_for_training,
    shares_prefix,
)
from torchrl_grpo.models.reference import load_reference
from torchrl_grpo.models.scoring.fused_norm import fuse_norms
from torchrl_grpo.models.scoring.token_scorer import TokenScorer
from torchrl_grpo.models.scoring.varlen_choice import choose_attention
from torchrl_grpo.objectives.aggregation import BatchTotals
from torchrl_grpo.objectives.build import build_objective
from torchrl_grpo.planning.resolve import parallelism
from torchrl_grpo.rollout.log_prob_transform import score_piece, write_rows
from torchrl_grpo.runtime import rank_env
from torchrl_grpo.runtime.malloc import keep_freed_memory
from torchrl_grpo.runtime.oom import stop_on_oom
from torchrl_grpo.training.optimizer_step import OptimizerStep

# Models whose log-probabilities ranks compute.
Scored = Literal["policy", "base", "reference"]
_NO_ROOM = (
    "memory ran out while the model was made ready for training: divide it among more devices with "
    "train_model.num_devices and train_model.parallelism=fsdp2, or start a new run with "
    "train_model.lora.rank=16 or a smaller model.name"
)


@dataclass(frozen=True)
class LearnerSpec:
    """Arguments of a learner. Rank 0 sends them to the other ranks.

    Attributes:
        cfg: configuration of the run, in which train.total_dialog_turns is set.
        weights: folder or hub name of the weights to begin with.
        resume_from: checkpoint from which adapters are loaded; None for a new run.
        reward_weights: weights of the K rewards, in the order in which reward.weights lists them.
    """

    cfg: Config
    weights: str
    resume_from: Path | None
    reward_weights: Sequence[float]


class Learner:
    """Holds the trained model, objective and optimizer of one training rank.

    All ranks construct it with the same ``spec``. Most methods are collective: rank 0 calls them
    through :meth:`Ranks.call_all`, and every rank runs them.

    Args:
        spec: model, objective and optimizer.
        device: device of this rank.
        ranks: this process's place among the training ranks.
        notify: function that receives a message for the user: which attention is used, or that a token budget
            is halved.

    Attributes:
        host_copies: memory for the shards that a checkpoint copies from this rank's GPU.
        sender: thread that sends this rank's shards of a checkpoint to rank 0.

    Raises:
        ModelError: the model cannot be loaded, or the ranks loaded different weights.
        TrainingStopped: memory ran out.
    """

    @stop_on_oom(_NO_ROOM)
    def __init__(
        self,
        spec: LearnerSpec,
        device: torch.device,
        *,
        ranks: Ranks,
        notify: Callable[[str], None],
    ) -> None:
        self.cfg = cfg = spec.cfg
        self.device = device
        self.ranks = ranks
        self._notify = notify
        self.engine: RankEngine | None = None
        self.host_copies, self.sender = HostCopies(rank_env.local_world_size()), BackgroundWriter()
        # One bar per loaded file would bury the progress bar of the run.
        disable_progress_bar()
        choose_kernels()
        if device.type == "cpu":
            keep_freed_memory()
        self.model: PreTrainedModel = build_model(cfg, spec.weights, device, spec.resume_from)
        if not ranks.all_equal(_checksum(self.model)):
            raise _others_read(cfg)
        pictures = load_processor(spec.weights, cfg.model)
        prepare_for_training(self.model, cfg.train_model)
        fuse_norms(self.model)
        self.shares_prefix = shares_prefix(
            self.model,
            cfg.train_model.shared_prefix,
            cfg.inference_model.max_model_len,
            pictures=pictures,
        )
        self.autocast_dtype = resolve_autocast(cfg.train_model.autocast, device)
        # GPUs of a machine may differ, and all ranks must compute their gradients in the same number format.
        if None in ranks.gather(self.autocast_dtype):
            self.autocast_dtype = None
        self.steps_per_round = steps_per_round(cfg)
        self.total_steps = rounds(cfg) * self.steps_per_round
        self.groups_per_batch = optim_batch_size(cfg) // cfg.env.repeats
        self.scorer = TokenScorer(
            self.model,
            cfg.inference_model.temperature,
            self.autocast_dtype,
            self.shares_prefix,
            head_dtype=resolve_head(cfg.train_model.head_dtype),
            pictures=pictures,
        )
        choose_attention(self.scorer, cfg.train_model.prefix_attention, cfg.inference_model.max_model_len)
        # Either all ranks use the kernel or none.
        self.scorer.varlen &= ranks.all_equal(self.scorer.varlen)
        if device.type == "cuda" and self.shares_prefix:
            used = "varlen (flash-attention's kernel)" if self.scorer.varlen else "dense (with masks)"
            notify(f"attention over shared prompts: {used}")
        # Either all ranks compile the layers or none.
        if cfg.train_model.compile and not ranks.all_equal(compile_layers(self.model, self.scorer)):
            discard_compiled_layers(self.model)
        loss, self.advantage = build_objective(
            cfg.policy,
            self.scorer,
            spec.reward_weights,
            cfg.inference_model.max_new_tokens,
            # With one step per round the proximal policy is the current policy, so its log-probabilities are
            # not stored. The loss uses this flag only with policy.proximal=trainer.
            has_proximal_log_probs=self.steps_per_round > 1,
        )
        if cfg.train_model.fused_head and cfg.train_model.lora.rank == 0:
            self.scorer.fuse_head()
            # Either all ranks fuse the head or none.
            self.scorer.fused_head &= ranks.all_equal(self.scorer.fused_head)
        if device.type == "cuda" or cfg.train_model.fused_head:
            notify(f"output head: {'fused (Liger)' if self.scorer.fused_head else 'in blocks'}")
        self.network = distribute(self.scorer, parallelism(cfg), ranks.size, device)
        if device.type == "cuda":
            # Engines in other processes take their share of the GPU from what the driver has. With shards the
            # memory of the whole model would stay in this process's allocator.
            torch.cuda.empty_cache()
        loss.set_network(self.network)
        self.budget = self.make_budget()
        self.reference: TokenScorer | None = None
        self._budgets: dict[Scored, TokenBudget] = {"policy": self.budget, "base": self.budget}
        self.optimizer_step = OptimizerStep(
            self.model,
            loss,
            cfg.optimizer,
            total_steps=self.total_steps,
            groups_per_batch=self.groups_per_batch,
            num_pieces=cfg.train.gradient_accumulation_steps,
            budget=self.budget,
            use_scaler=torch.float16 in (self.autocast_dtype, self.model.dtype),
            max_skipped_steps=cfg.train.max_skipped_steps,
            ranks=ranks,
            network=self.network,
            loads_parked=bool(cfg.train_model.offload_optimizer),
        )

    def build_rank_engine(self, source: str, options: EngineOptions) -> None:
        """Build this rank's engine.

        It is a part of a :class:`~torchrl_grpo.training.data_parallel_engine.DataParallelEngine`.

        Args:
            source: folder or hub name of the weights.
            options: the other arguments of :func:`~torchrl_grpo.inference.build.build_engine`.

        Raises:
            ModelError: the model cannot be loaded.
        """
        own = build_engine(self.cfg, source, self.device, **options)
        own = with_episodes(self.cfg, own, options["max_num_seqs"])
        self.engine = RankEngine(own, self.ranks, self.device)

    def make_budget(self, shares_prefix: bool | None = None) -> TokenBudget:
        """Return a new token budget. Each model has its own, because models differ in memory use.

        Args:
            shares_prefix: whether the model runs a prompt once per group; None if as the trained one.
        """
        shares = self.shares_prefix if shares_prefix is None else shares_prefix
        return TokenBudget(token_budget(self.cfg), shares, self._notify)

    def step(self, batch: TensorDictBase) -> dict[str, float]:
        """On rank 0: take one optimizer step with all ranks, see :class:`OptimizerStep`."""
        shares, totals = self.optimizer_step.divide(batch)
        responses = batch["advantage"].shape[:2].numel()
        return self.ranks.call_each(Learner.update, self, shares, totals, responses)

    def update(self, share: Share, totals: BatchTotals, responses: int) -> dict[str, float]:
        """Take this rank's part in an optimizer step, see :meth:`OptimizerStep.update`."""
        return self.optimizer_step.update(share, totals, responses)

    def load_reference(self, source: str) -> None:
        """Load this rank's copy of the reference model.

        Args:
            source: folder or hub name of the model.

        Raises:
            ModelError: it cannot be loaded.
            TrainingStopped: memory ran out.
        """
        self.reference = load_reference(
            self.cfg, source, self.device, self.autocast_dtype, self.shares_prefix
        )
        if not self.ranks.all_equal(_checksum(self.reference.model)):
            raise _others_read(self.cfg)
        self._agree_on_kernels(self.reference)
        self._budgets["reference"] = self.make_budget()

    def _agree_on_kernels(self, scorer: TokenScorer) -> None:
        """Use a kernel on all ranks or on none."""
        scorer.varlen &= self.ranks.all_equal(scorer.varlen)
        scorer.fused_head &= self.ranks.all_equal(scorer.fused_head)

    @torch.no_grad()
    def move_reference(self, share: float) -> None:
        """Move this rank's copy of the reference as :meth:`LogProbScorer.interpolate_toward` does."""
        assert self.reference is not None
        own = dict(self.reference.model.named_parameters())
        for name, parameter in self.model.named_parameters():
            own[name].lerp_(full_tensor(parameter).to(own[name]), share)

    def log_probs(self, groups: TensorDictBase, of: Scored = "policy") -> list[Tensor]:
        """On rank 0: return the log-probabilities ``[G, T]`` of the responses of each group.

        Each rank computes those of a share of the groups.

        Args:
            groups: the groups.
            of: under which model: the policy, its base model (without the adapters), or the reference.
        """
        shares = self._budgets[of].divide(groups, self.ranks.size)
        scored = self.ranks.call_each(Learner.score, self, shares, of)
        by_row = {
            row: values
            for share, own in zip(shares, scored, strict=True)
            for row, values in zip(share.rows, own, strict=True)
        }
        return [by_row[row] for row in range(len(groups))]

    @torch.no_grad()
    def score(self, share: Share, of: Scored = "policy") -> list[list[Tensor]]:
        """On rank 0: return the log-probabilities of the groups of each rank's share; else an empty list."""
        network, budget = self.network, self._budgets[of]
        if of == "reference":
            assert self.reference is not None
            network = self.reference
        groups = share.groups
        own = [torch.zeros(group["masks", "response"].shape) for group in groups.unbind(0)][: len(share.rows)]
        pieces = budget.split(groups, [MicroBatch(tuple(range(len(own))), slice(None))])
        adapters = disable_adapters(self.model) if of == "base" else nullcontext()
        with reshard_after(network), budget.explain_oom(), adapters:
            passes = self.ranks.all_reduce_max(len(pieces))
            scores = [
                score_piece(network, micro.select(groups))
                for micro in [*pieces, *[DUMMY_MICRO_BATCH] * (passes - len(pieces))]
            ]
        for micro, scored in zip(pieces, scores, strict=False):
            write_rows(own, micro, scored)
        return self.ranks.gather_to_main(own)

    @torch.no_grad()
    def next_token_log_probs(
        self, prompt: Tensor, prompt_mask: Tensor, files: Sequence[Sequence[bytes]] | None
    ) -> Tensor:
        with reshard_after(self.network):
            return self.scorer.next_token_log_probs(prompt, prompt_mask, files)

    def full_parameter(self, name: str) -> Tensor:
        """Return a parameter of the model, gathered from all ranks."""
        return full_tensor(self.model.get_parameter(name))

    @torch.no_grad()
    def scale_columns(self, factor: float) -> None:
        """Multiply every eighth column of every parameter, to verify weight updates."""
        for parameter in self.model.parameters():
            with writable(parameter) as values:
                values[..., ::8] *= factor

    def resume(self, folder: Path) -> dict[str, Any]:
        """Restore optimizer, schedule and coefficients from a checkpoint.

        All ranks read the same file. A rank that holds a shard of the model copies its shard of the moments.

        Returns:
            The rest of the checkpoint's state.
        """
        state = checkpoint.load_state(folder)
        self.optimizer_step.load_state_dict(state.pop("optimise"))
        if self.reference is not None and state["reference"]:
            self.reference.model.load_state_dict(state["reference"], strict=False)
        return state

    def park_optimizer(self) -> None:
        """Free the memory of the optimizer's moments on the device until the next update."""
        self.optimizer_step.backend.park()

    def full_model(self) -> PreTrainedModel | GatheredModel:
        """Return a model that rank 0 can read and perturb on its own.

        This is the model, or a :class:`GatheredModel` if it is sharded.
        """
        return GatheredModel(self) if sharded(self.network) else self.model

    def probe_scorer(self) -> TokenScorer | GatheredModel:
        """Return a scorer of the probe that rank 0 can call on its own.

        This is the scorer, or a :class:`GatheredModel` if the model is sharded.
        """
        return GatheredModel(self) if sharded(self.network) else self.scorer


def _checksum(model: nn.Module) -> int:
    return sum(checksum(parameter.detach()) for parameter in model.parameters())


def _others_read(cfg: Config) -> ModelError:
    return ModelError(
        f"model.name={cfg.model.name}: the training ranks have read different weights; name a folder that "
        "all of them see"
    )


class GatheredModel:
    """Gives rank 0 access to the full parameters of a sharded model. Each is gathered on access.

    Args:
        learner: rank 0's learner.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full parameters, one at a time."""
        for name, _ in self._learner.model.named_parameters():
            yield name, self._learner.ranks.call_all(Learner.full_parameter, self._learner, name)

    def scale_columns(self, factor: float) -> None:
        self._learner.ranks.call_all(Learner.scale_columns, self._learner, factor)

    def next_token_log_probs(
        self, prompt: Tensor, prompt_mask: Tensor, files: Sequence[Sequence[bytes]] | None = None
    ) -> Tensor:
        call_all = self._learner.ranks.call_all
        return call_all(Learner.next_token_log_probs, self._learner, prompt, prompt_mask, files)
