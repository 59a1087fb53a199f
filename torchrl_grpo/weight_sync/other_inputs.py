"""Whether an engine computes with the published parts of a model that encode pictures.

Checksums do not show it: an engine may compute with a copy, or keep what it has encoded with older weights.
Nor does it show where all weights are perturbed, because the text model moves log-probabilities more than a
vision tower. So the engine is also compared with a trainer of which only the text model is perturbed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_grpo.inference.protocol import Probe, ProbeResult
from torchrl_grpo.models.prepare import other_inputs
from torchrl_grpo.weight_sync.probe import ShardedWeights, perturbed
from torchrl_grpo.weight_sync.results import ExpectedResult, LogProbDiff


def log_probs_with_stale_encoders(
    model: nn.Module | ShardedWeights, probe: Probe, log_probs: Callable[[], Tensor]
) -> Tensor | None:
    """Return the trainer's log-probabilities with a perturbed text model and all other parts as they are.

    Args:
        model: trained model; it is put back bit for bit.
        probe: the probe.
        log_probs: function that computes the log-probabilities.

    Returns:
        ``[N, V]``; None if the probe has no pictures.
    """
    if probe.files is None:
        return None
    assert isinstance(model, PreTrainedModel), "a model for pictures is held whole"
    with perturbed(model, unchanged=other_inputs(model)):
        return log_probs()


def encoders_are_stale(probe: Probe, stale: Tensor, expected: ExpectedResult, result: ProbeResult) -> bool:
    """Return whether an engine computes with older parts for pictures than the perturbed ones.

    A sound engine is as far from the perturbed weights as it rounds. It is further from stale ones, or as far
    where pictures matter less than rounding. So this is never true of one.

    Args:
        probe: probe with pictures.
        stale: result of :func:`log_probs_with_stale_encoders`.
        expected: what is expected of an engine with the perturbed weights.
        result: probe result of the engine.
    """
    assert probe.files is not None
    shown = torch.tensor([bool(files) for files in probe.files])
    to_stale = LogProbDiff.between(stale, result, rows=shown).mean
    return 2 * to_stale < LogProbDiff.between(expected.trainer_log_probs, result, rows=shown).mean
