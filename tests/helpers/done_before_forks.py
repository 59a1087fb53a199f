"""What every run does once for its process, done in the process that scripts are forks of.

:mod:`forked` imports this module there. Without it, a run of two steps takes half as long again: Hydra
composes four times, transformers compiles the patterns of all its families, and report.png is drawn, which
tests/observe and tests/runs/test_integration.py look at.
"""

from __future__ import annotations

import pytest
from composed_once import compose_once
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from torchrl_grpo.cli.compose import composer
from torchrl_grpo.observe import report
from torchrl_grpo.runtime.config_dir import config_dir

patch = pytest.MonkeyPatch()
patch.setattr(report, "plot", lambda run_dir, grader: None)
compose_once(patch)
for name in ("grpo_gsm8k", "sft_gsm8k"):
    with composer(config_dir(), name) as tree:
        (overrides,) = tree.jobs(["seed=1"], sweep=False)
        tree.compose(overrides)
get_checkpoint_conversion_mapping("llama")
