"""TorchRL's own GRPO parts in a plain loop on the CPU, put together as TorchRL's GRPO example does it.

Held equal: model, prompts, group size, response length, reward, AdamW (fused) and its rate, gradients
clipped to norm 1, float32 weights with or without bf16 autocast, no KL, no reference model, no dropout; and
the engine: this project's own ``VLLMEngine`` starts vLLM and takes the weights, so both have one set of
vLLM settings, compiled graphs among them.

Its own, TorchRL's defaults unless the workload's settings say otherwise: ``DatasetChatEnv``,
``vLLMWrapper``, ``LLMCollector``, ``MCAdvantage`` in the replay buffer, ``TransformersWrapper`` with padded
input, ``GRPOLoss``; micro-batches of 8 sequences, no gradient checkpointing. Two of these defaults are
expensive, and ``Workload.settings`` can switch them off:

* ``prompt_log_probs`` (True): ``vLLMWrapper`` asks vLLM for log-probabilities of the prompt, for which vLLM
  forgoes its prefix cache: each of the G samples computes its prompt anew. The loss does not read them.
* ``entropy_bonus`` (True): ``GRPOLoss`` adds ``-0.01 *`` the responses' entropy, computed over the whole
  vocabulary at every position, prompt and padding included. It also changes the objective: with False the
  gradient is that of plain GRPO.

``autocast`` ("no") trains in float32 whatever the workload says, as these parts do unless they are wrapped;
vLLM keeps the workload's numbers.

Phases: ``generate`` is what the collector does, environment and reward included; ``train`` is advantages,
buffer and optimizer step. Publishing weights is in neither, since TorchRL's own updaters need GPUs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

# TorchRL imports vLLM, which reads this when it is imported; in this process its weights can be replaced.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import tensordict

# Chat environments and their collector refuse to work without this, from before anything else.
tensordict.set_list_to_stack(True).set()

import torch  # noqa: E402
from tensordict import TensorDict, TensorDictBase, lazy_stack  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torchrl.collectors.llm import LLMCollector  # noqa: E402
from torchrl.data import (  # noqa: E402
    Composite,
    LazyStackStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Unbounded,
)
from torchrl.envs import StepCounter, Transform  # noqa: E402
from torchrl.envs.llm import DatasetChatEnv  # noqa: E402
from torchrl.modules.llm import TransformersWrapper, vLLMWrapper  # noqa: E402
from torchrl.objectives.llm import GRPOLoss, MCAdvantage  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from benchmarks.protocol import serve  # noqa: E402
from benchmarks.workload import Workload, reward, use_all_cores  # noqa: E402
from torchrl_grpo.inference.vllm_engine import VLLMEngine  # noqa: E402

_MICRO_BATCH = 8


class _Reward(Transform):
    """The reward that every library is given, in the shape of TorchRL's own ``GSM8KRewardParser``."""

    def __init__(self) -> None:
        super().__init__(in_keys=[("text", "response")], out_keys=["reward"])

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        values = [reward(text) for text in tensordict[self.in_keys[0]]]
        return next_tensordict.set("reward", torch.tensor(values).view(-1, 1, 1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec


def make_collector(workload: Workload, tokenizer: Any, llm: Any) -> LLMCollector:
    """TorchRL's collection path around ``llm``: a batch of the collector is one step's P * G samples.

    Args:
        workload: what a step does.
        tokenizer: the model's.
        llm: a ``vllm.LLM``.
    """
    batch = workload.prompts * workload.samples
    questions = [{"query": chat[0]["content"]} for chat in workload.messages(tokenizer)]
    # One sample an environment, so that vLLM is asked once for the whole batch.
    env = DatasetChatEnv.from_dataloader(
        DataLoader(questions, batch_size=1, collate_fn=_collate),
        repeats=workload.samples,
        batch_size=(batch,),
        tokenizer=tokenizer,
        input_mode="history",
    )
    env = env.append_transform(StepCounter(max_steps=1)).append_transform(_Reward())
    generate_kwargs = {"max_tokens": workload.response_tokens, "ignore_eos": True, "temperature": 1.0}
    if not workload.settings.get("prompt_log_probs", True):
        generate_kwargs["prompt_logprobs"] = None
    policy = vLLMWrapper(
        llm,
        tokenizer=tokenizer,
        input_mode="history",
        # TorchRL would render with a template of its own, and the prompts would differ from the others'.
        chat_template=tokenizer.chat_template,
        generate=True,
        return_log_probs=True,
        pad_output=False,
        generate_kwargs=generate_kwargs,
    )
    return LLMCollector(env, policy=policy, dialog_turns_per_batch=batch)


def _collate(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    return {"query": [row["query"] for row in rows]}


class _Trainer:
    """Advantages, micro-batches and one optimizer step for a batch of samples."""

    def __init__(self, workload: Workload, tokenizer: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32).eval()
        # Training has no use for key/value states; TorchRL's example turns them off as well.
        self.model.config.use_cache = False
        actor = TransformersWrapper(
            self.model,
            tokenizer=tokenizer,
            input_mode="tokens",
            generate=False,
            return_log_probs=True,
            pad_output=False,
            pad_model_input=True,
        )
        self._loss = GRPOLoss(actor, entropy_bonus=workload.settings.get("entropy_bonus", True))
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=workload.lr, weight_decay=0.0, fused=True
        )
        self._batch = workload.prompts * workload.samples
        self._buffer = ReplayBuffer(
            storage=LazyStackStorage(self._batch),
            sampler=SamplerWithoutReplacement(),
            transform=MCAdvantage(grpo_size=workload.samples),
            batch_size=min(_MICRO_BATCH, self._batch),
        )
        autocast = workload.settings.get("autocast", workload.autocast)
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=autocast == "bf16")

    def __call__(self, samples: TensorDictBase) -> None:
        """Train on ``samples``, a flat batch of P * G."""
        self._buffer.extend(samples)
        trained = 0
        # The buffer draws without replacement and ends when every sample was drawn once.
        for batch in self._buffer:
            with self._autocast:
                output = self._loss(batch)
                loss = output.loss_objective
                if self._loss.entropy_bonus:
                    loss = loss + output.loss_entropy
            (loss * (batch.numel() / self._batch)).sum().backward()
            trained += batch.numel()
        # The buffer may hold back groups that it thinks incomplete.
        assert trained == self._batch, f"trained on {trained} samples of {self._batch}"
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._buffer.empty(empty_write_count=False)


def build(workload: Workload) -> Callable[[], dict[str, float]]:
    """See :func:`benchmarks.protocol.serve`."""
    use_all_cores()
    # The sampler of the replay buffer draws from it.
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(workload.model)
    return _whole_step(workload, tokenizer) if workload.rollouts is None else _training(workload, tokenizer)


def _whole_step(workload: Workload, tokenizer: Any) -> Callable[[], dict[str, float]]:
    longest = workload.prompt_tokens + 64 + workload.response_tokens
    engine = VLLMEngine(
        workload.model,
        device=torch.device("cpu"),
        dtype=torch.float32 if workload.autocast == "no" else torch.bfloat16,
        max_model_len=-(-longest // 128) * 128,
        max_num_seqs=workload.prompts * workload.samples,
        seed=0,
        gpu_memory_utilization=0.0,
        kv_cache_gib=1,
        enforce_eager=False,
    )
    batches: Iterator[TensorDictBase] = iter(make_collector(workload, tokenizer, engine.llm))
    train = _Trainer(workload, tokenizer)

    def step() -> dict[str, float]:
        started = time.perf_counter()
        samples = next(batches).view(-1)
        generated = time.perf_counter()
        tokens = {key: samples.get(("tokens", key), as_list=True) for key in ("prompt", "response")}
        lengths = {key: [len(row) for row in rows] for key, rows in tokens.items()}
        assert set(lengths["response"]) == {workload.response_tokens}, lengths
        began = time.perf_counter()
        train(samples)
        trained = time.perf_counter()
        engine.load_weights((name, weight.detach()) for name, weight in train.model.named_parameters())
        engine.reset_cache()
        return {
            "prompt_tokens": statistics.fmean(lengths["prompt"]),
            "generate": generated - started,
            "train": trained - began,
        }

    return step


def _training(workload: Workload, tokenizer: Any) -> Callable[[], dict[str, float]]:
    samples = _recorded(torch.load(str(workload.rollouts), weights_only=True))
    train = _Trainer(workload, tokenizer)

    def step() -> dict[str, float]:
        fresh = samples.clone()
        started = time.perf_counter()
        train(fresh)
        return {"train": time.perf_counter() - started}

    return step


def _recorded(rollouts: dict[str, Any]) -> TensorDictBase:
    """What the collector would have given for recorded rollouts, as far as advantages and loss read it."""
    rows = []
    for number, prompt in enumerate(rollouts["prompts"]):
        group = (rollouts[key][number] for key in ("responses", "log_probs", "rewards"))
        for response, log_probs, value in zip(*group, strict=True):
            mask = torch.tensor([False] * len(prompt) + [True] * len(response))
            # The prompt's are not known; NaN is what `vLLMWrapper` writes then.
            unknown = [float("nan")] * len(prompt)
            rows.append(
                TensorDict(
                    {
                        "query": f"prompt {number}",
                        "tokens": {
                            "prompt": torch.tensor(prompt),
                            "response": torch.tensor(response),
                            "full": torch.tensor(prompt + response),
                        },
                        "masks": {"all_attention_mask": torch.ones_like(mask), "all_assistant_mask": mask},
                        "log_probs": {"full": torch.tensor(unknown + log_probs)},
                        "next": {"reward": torch.tensor([[value]]), "done": torch.tensor([True])},
                    }
                )
            )
    return lazy_stack(rows)


if __name__ == "__main__":
    serve(build)
