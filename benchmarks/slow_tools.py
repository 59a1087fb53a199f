"""``python -m benchmarks.slow_tools``: what slow tools cost the generation of episodes, measured in pairs.

64 episodes of SmolLM2-135M run side by side in vLLM. After each turn of the model an environment of the user
answers: at once, or after 0 to 2 seconds at random. If one slow answer held up the other episodes, generation
would stand still most of the time. Both sides sample with the same seeds. The result is the ratio of sampled
tokens per second, slow to instant.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from torchrl_grpo.config import Config
from torchrl_grpo.config.values import Dtype
from torchrl_grpo.data.example import Example
from torchrl_grpo.envs.chat import render
from torchrl_grpo.envs.episodes.build import with_episodes
from torchrl_grpo.inference.build import build_engine
from torchrl_grpo.inference.protocol import Sampling, SteppingEngine
from torchrl_grpo.models import loading

_ENVIRONMENT = """
import random
import time


class Tool:
    def __init__(self, slowest):
        self.slowest = slowest

    def reset(self, example):
        self.random = random.Random()

    def step(self, message):
        time.sleep(self.random.uniform(0.0, self.slowest))
        return "Go on.", 0.0, False
"""


def measure(engine: SteppingEngine, episodes: int, seed: int) -> float:
    """Generate all episodes and return the sampled tokens per second."""
    examples = [
        Example(
            f"{seed}/{n}", [{"role": "user", "content": f"Say one sentence about the number {seed + n}."}]
        )
        for n in range(episodes)
    ]
    tokenizer = loading.load_tokenizer(loading.resolve(Config().model), Config().model)
    prompts = [render(tokenizer, example)[1] for example in examples]
    seeds = [seed + n for n in range(episodes)]
    start = time.perf_counter()
    groups = engine.generate(prompts, Sampling(1, 300, 1.0, seeds, problems=examples))
    seconds = time.perf_counter() - start
    return sum(sum(episode.sampled or []) for group in groups for episode in group) / seconds


def main() -> None:
    """Measure the pairs and print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--slowest", type=float, default=2.0, help="seconds")
    args = parser.parse_args()
    cfg = Config()
    cfg.inference_model.dtype = Dtype("float32")
    cfg.inference_model.max_model_len = 2_048
    cfg.inference_model.enforce_eager = True
    cfg.env.max_turns = args.turns
    source = loading.resolve(cfg.model)
    tokenizer = loading.load_tokenizer(source, cfg.model)
    ends = [tokenizer.eos_token_id]
    inner = build_engine(cfg, source, torch.device("cpu"), ends, tokenizer.pad_token_id, args.episodes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tool.py"
        path.write_text(_ENVIRONMENT, encoding="utf-8")
        cfg.env.environment = f"{path}:Tool"
        sides = {}
        for name, slowest in (("instant", 0.0), ("slow", args.slowest)):
            cfg.env.environment_args = {"slowest": slowest}
            sides[name] = with_episodes(cfg, inner, args.episodes)
        ratios = []
        for pair in range(args.pairs + 1):
            inner.reset_cache()
            rate = {name: measure(engine, args.episodes, 1_000 * pair) for name, engine in sides.items()}
            print(f"instant {rate['instant']:.0f} tokens/s, slow {rate['slow']:.0f} tokens/s")
            # The first pair warms up.
            if pair > 0:
                ratios.append(rate["slow"] / rate["instant"])
    print(
        f"slow / instant: median {statistics.median(ratios):.3f} of {len(ratios)} pairs, "
        f"from {min(ratios):.3f} to {max(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
