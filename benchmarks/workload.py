"""The workload of every library: the same model, prompts, group size, lengths and optimizer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Options with which TRL's trainers write and print nothing.
TRL_IS_QUIET: dict[str, Any] = {
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
}
# Plain words that extend a prompt to any length.
_WORDS = ["a", "merchant", "sold", "apples", "and", "pears", "at", "the", "market", "then", "walked", "home"]


@dataclass(frozen=True)
class Workload:
    """The work of one step.

    Attributes:
        model: folder of the model. Its weights are loaded in float32.
        prompts: P, number of prompts per step.
        samples: G, number of responses per prompt.
        prompt_tokens: approximate length of a rendered prompt.
        response_tokens: exact length of every response; end tokens are ignored.
        lr: learning rate of AdamW with default betas, no weight decay, and gradients clipped to norm 1.
        autocast: ``no`` or ``bf16``, for training. Weights are float32 in both cases.
        rollouts: file of recorded rollouts to train on; None generates.
        settings: additional settings of one library.
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
        """Serialize for a worker's command line."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Workload:
        """Parse the result of :meth:`to_json`."""
        return Workload(**json.loads(text))

    def messages(self, tokenizer: Any) -> list[list[dict[str, str]]]:
        """Create P chats of one user message, each rendered to ``prompt_tokens`` tokens or a few more."""
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
        """Write the same chats to a file for ``env.dataset=jsonl``, with dummy answers."""
        from transformers import AutoTokenizer

        chats = self.messages(AutoTokenizer.from_pretrained(self.model))
        rows = [json.dumps({"question": chat[0]["content"], "answer": "0"}) for chat in chats]
        path.write_text("\n".join(rows) + "\n")

    @staticmethod
    def render(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
        """Render a chat to token ids, up to the start of the model's turn."""
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def reward(text: str) -> float:
    """Return a number in [0, 1) from a hash of the response, so that every group has a signal at no cost."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") / 2**32


def settle() -> None:
    """Wait until the GPU, if there is one, has finished its work, so that clocks can be read."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def use_all_cores() -> int:
    """Let torch use every core, as for every library here, and return the number of cores."""
    import torch

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    return cores
