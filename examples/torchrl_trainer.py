"""This project's tasks, rewards and loss in TorchRL's own collector and trainer.

python examples/torchrl_trainer.py MODEL FOLDER [KEY=VALUE ...]        MODEL is a folder or a name on the hub
"""

import sys
from contextlib import closing

import tensordict

tensordict.set_list_to_stack(True).set()  # Before TorchRL's collector is imported, which asks for it.

import torch  # noqa: E402
from torchrl.collectors.llm import LLMCollector  # noqa: E402
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement  # noqa: E402
from torchrl.modules.llm import TransformersWrapper  # noqa: E402
from torchrl.trainers.algorithms.grpo import GRPOTrainer  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from torchrl_grpo.cli.checked_job import compose_job  # noqa: E402
from torchrl_grpo.data.load import load  # noqa: E402
from torchrl_grpo.envs.group_text import GroupTextEnv  # noqa: E402
from torchrl_grpo.envs.stream import PromptStream  # noqa: E402
from torchrl_grpo.models.scoring.token_scorer import TokenScorer  # noqa: E402
from torchrl_grpo.objectives.build import build_objective  # noqa: E402
from torchrl_grpo.rewards.registry import build_reward_set  # noqa: E402


def to_groups(batch):
    """Turn TorchRL's samples, [prompts, samples, turns], into the groups that the loss reads, [prompts]."""
    prompt, response = batch["tokens", "prompt"][:, 0, 0], batch["tokens", "response"][:, :, 0]
    # TorchRL's own mask leaves out pad tokens within a prompt, but the end of a message is often one.
    prompt_mask = (prompt != tokenizer.pad_token_id).cumsum(-1) > 0
    ends = response == tokenizer.eos_token_id
    mask = ends.cumsum(-1) - ends.long() == 0
    with torch.no_grad():  # TorchRL's policy gives no log-probability of the first token.
        log_probs = loss.actor_network(prompt, prompt_mask, response, mask).log_probs
    groups = {
        "tokens": {"prompt": prompt, "response": response},
        "masks": {"prompt": prompt_mask, "response": mask, "sampled": mask},
        "log_probs": {"response": log_probs.masked_fill(~mask, 0.0)},
        "next": {"reward": batch["next", "reward"][:, :, 0]},
        "truncated": batch["next", "truncated"][:, :, 0],
    }
    return tensordict.TensorDict(groups, batch_size=[P])


model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
cfg = compose_job(sys.argv[3:], "grpo_quickstart", None)
P, G, T = cfg.env.num_envs, cfg.env.repeats, cfg.inference_model.max_new_tokens
problems = load(cfg).train
with closing(build_reward_set(cfg, {"": problems[0]})) as rewards:
    sizes = {"num_envs": P, "repeats": G, "max_prompt_tokens": 100, "max_new_tokens": T}
    env = GroupTextEnv(PromptStream(problems, seed=0), tokenizer, rewards, input_mode="tokens", **sizes)
    sampling = {"do_sample": True, "max_new_tokens": T, "eos_token_id": tokenizer.eos_token_id}
    wrapped = {"tokenizer": tokenizer, "input_mode": "tokens", "generate_kwargs": sampling}
    policy = TransformersWrapper(model, pad_output=True, **wrapped)
    loss, advantage = build_objective(cfg.policy, TokenScorer(model), rewards.weights, T)
    storage, sampler = LazyStackStorage(P), SamplerWithoutReplacement()
    trainer = GRPOTrainer(
        collector=LLMCollector(env, policy=policy, dialog_turns_per_batch=P * G, total_dialog_turns=-1),
        total_frames=cfg.train.total_dialog_turns // G,
        loss_module=loss,
        optimizer=torch.optim.AdamW(loss.parameters(), lr=cfg.optimizer.lr),
        replay_buffer=ReplayBuffer(storage=storage, sampler=sampler, transform=advantage, batch_size=P),
        empty_replay_buffer_on_weight_update=True,
    )
    trainer.register_op("batch_process", to_groups)
    trainer.train()
model.save_pretrained(sys.argv[2])
