"""What every run does once for its process, done in the process that scripts are forks of.

:mod:`forked` imports this module there. Without it, a run of two steps takes half as long again: Hydra
composes four times, transformers compiles the patterns of all its families, and Matplotlib looks for fonts.
"""

from __future__ import annotations

import io

import pytest
from composed_once import compose_once
from matplotlib.figure import Figure
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from torchrl_grpo.cli.compose import composer
from torchrl_grpo.runtime.config_dir import config_dir

compose_once(pytest.MonkeyPatch())
for name in ("grpo_gsm8k", "sft_gsm8k"):
    with composer(config_dir(), name) as tree:
        (overrides,) = tree.jobs(["seed=1"], sweep=False)
        tree.compose(overrides)
get_checkpoint_conversion_mapping("llama")
figure = Figure(layout="constrained")
figure.subplots(2, 1)
figure.savefig(io.BytesIO())
