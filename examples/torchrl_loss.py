"""TorchRL's GRPOLoss and MCAdvantage on what this project's engine and collector sample.

python examples/torchrl_loss.py MODEL FOLDER [KEY=VALUE ...]        MODEL is a folder or a name on the hub
"""

import sys
import tempfile
from contextlib import closing
from pathlib import Path

import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from torchrl_grpo.cli.checked_job import compose_job
from torchrl_grpo.data.load import load
from torchrl_grpo.rewards import registry
from torchrl_grpo.rewards.registry import grader_of_run
from torchrl_grpo.training.build import Job, build_session


def to_samples(groups):
    """Turn groups, [prompts], into the samples that TorchRL's loss reads, which have no padding."""
    samples, done = [], torch.tensor([True])
    for group in groups:
        prompt = group["tokens", "prompt"][group["masks", "prompt"]]
        for i, mask in enumerate(group["masks", "response"]):
            response, sampled = (group[key, "response"][i, mask] for key in ("tokens", "log_probs"))
            full = torch.cat([prompt, response])
            is_response = torch.arange(len(full)) >= len(prompt)
            sample = TensorDict(query=str(int(group["group_id"][i])))
            sample["tokens"] = {"prompt": prompt, "response": response, "full": full}
            sample["masks"] = {"all_assistant_mask": is_response, "all_attention_mask": full >= 0}
            sample["log_probs"] = {"full": torch.cat([sampled.new_zeros(len(prompt)), sampled])}
            sample["next"] = {"reward": group["next", "reward"][i, None].float(), "done": done}
            samples.append(sample)
    return lazy_stack(samples)


cfg = compose_job([f"model.name={sys.argv[1]}", *sys.argv[3:]], "grpo_quickstart", None)
problems, folder = load(cfg), Path(tempfile.mkdtemp())
with (
    closing(registry.of_run(cfg, problems, folder)) as reward_set,
    closing(grader_of_run(cfg, problems, reward_set, folder)) as grader,
    closing(build_session(Job(cfg, folder, problems, reward_set, grader))) as session,
):
    session.begin()
    parts, G = session.parts, cfg.env.repeats
    model, size = parts.learner.model, cfg.env.num_envs * G
    options = {"tokenizer": parts.collector.env.tokenizer, "input_mode": "tokens", "generate": False}
    loss = GRPOLoss(TransformersWrapper(model, pad_output=False, **options), entropy_bonus=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optimizer.lr)
    storage, sampler = LazyStackStorage(size), SamplerWithoutReplacement()
    buffer = ReplayBuffer(storage=storage, sampler=sampler, transform=MCAdvantage(G), batch_size=size)
    for step in range(1, cfg.train.total_dialog_turns // size + 1):
        buffer.extend(to_samples(parts.collector.rollout(False).groups))
        loss(buffer.sample()).loss_objective.backward()
        optimizer.step()
        optimizer.zero_grad()
        buffer.empty(empty_write_count=False)
        parts.publisher.publish(step, wait=True)
    print(f"held-out accuracy {session.evaluate()['eval/accuracy']:.3f}")
    model.save_pretrained(sys.argv[2])
