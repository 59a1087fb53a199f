"""The work that every library is given: the same model, prompts, group size, lengths and optimizer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Plain words, so that a prompt can be made as long as wanted without changing what it is.
_WORDS = ["a", "merchant", "sold", "apples", "and", "pears", "at", "the", "market", "then", "walked", "home"]


@dataclass(frozen=True)
class Workload:
    """What one step does.

    Attributes:
        model: folder of the model, weights in float32 or loaded as such.
        prompts: P prompts a step.
        samples: G responses to each.
        prompt_tokens: length of a rendered prompt, about.
        response_tokens: length of every response, exactly: end tokens are gone past.
        lr: of AdamW with its usual betas, no weight decay, gradients clipped to norm 1.
        autocast: ``no`` or ``bf16``, for training; float32 weights either way.
        rollouts: file of recorded rollouts to train on instead of generating; None generates.
        settings: of one library, beside all this.
    """

    model: str
    prompts: int = 8
    samples: int = 8
    prompt_tokens: int = 100
    response_tokens: int = 64
    lr: float = 1e-6
    autocast: str = "no"
    rollouts: str | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """For a worker's command line."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Workload:
        """Back again."""
        return Workload(**json.loads(text))

    def messages(self, tokenizer: Any) -> list[list[dict[str, str]]]:
        """P chats of one user message, each rendered to ``prompt_tokens`` tokens or a few more."""
        chats = []
        for number in range(self.prompts):
            words = [f"Question {number}:"]
            while True:
                chat = [{"role": "user", "content": " ".join(words)}]
                if len(self.render(tokenizer, chat)) >= self.prompt_tokens:
                    chats.append(chat)
                    break
                words.append(_WORDS[(number + len(words)) % len(_WORDS)])
        return chats

    def write_questions(self, path: Path) -> None:
        """The same chats as a file that ``env.dataset=jsonl`` reads, with answers that nobody looks at."""
        from transformers import AutoTokenizer

        chats = self.messages(AutoTokenizer.from_pretrained(self.model))
        rows = [json.dumps({"question": chat[0]["content"], "answer": "0"}) for chat in chats]
        path.write_text("\n".join(rows) + "\n")

    @staticmethod
    def render(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat with the turn of the model opened."""
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def reward(text: str) -> float:
    """A number from 0 to 1 that differs from response to response: every group has a signal, at no cost."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") / 2**32


def settle() -> None:
    """Wait until the GPU, where there is one, has done what it was told: clocks are read after that."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def use_all_cores() -> int:
    """Let torch have every core, as every library here does; returns how many."""
    import torch

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    return cores
