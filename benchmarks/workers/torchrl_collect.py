"""What TorchRL's own collection costs beside generation: its path around an engine that answers at once.

Environment, policy wrapper and collector are those of :mod:`benchmarks.workers.torchrl_stock`, with the same
``Workload.settings``. Only the engine is not there: in place of its ``generate`` stands a look-up of answers
that were prepared beforehand, of the types, length and number of log-probabilities that vLLM gives.

``collect`` is one batch of the collector: prompts drawn and rendered, P * G samples "generated", decoded,
rewarded, stacked, and the environments reset for the next batch. No replay buffer, no advantages.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# First, for what it sets before TorchRL is imported.
from benchmarks.workers.torchrl_stock import make_collector  # isort: skip

from transformers import AutoTokenizer
from vllm import LLM, CompletionOutput, RequestOutput, SamplingParams
from vllm.logprobs import Logprob

from benchmarks.protocol import serve
from benchmarks.workload import Workload, use_all_cores


class _Answers:
    """Answers to the workload's prompts, prepared; each call hands out the next one of its prompt.

    Args:
        workload: what a step does.
        tokenizer: the model's.
    """

    def __init__(self, workload: Workload, tokenizer: Any) -> None:
        self._random = random.Random(0)
        special = set(tokenizer.all_special_ids)
        self._ids = [token for token in range(len(tokenizer)) if token not in special]
        with_prompt = bool(workload.settings.get("prompt_log_probs", True))
        self._by_prompt: dict[tuple[int, ...], Iterator[RequestOutput]] = {}
        for number, chat in enumerate(workload.messages(tokenizer)):
            prompt = workload.render(tokenizer, chat)
            answers = [
                self._answer(f"{number}-{sample}", prompt, workload.response_tokens, tokenizer, with_prompt)
                for sample in range(workload.samples)
            ]
            self._by_prompt[tuple(prompt)] = itertools.cycle(answers)

    def generate(
        self, prompts: Sequence[dict[str, Any]], *, sampling_params: SamplingParams
    ) -> list[RequestOutput]:
        """In place of ``LLM.generate``."""
        return [next(self._by_prompt[tuple(prompt["prompt_token_ids"])]) for prompt in prompts]

    def _answer(
        self, name: str, prompt: list[int], length: int, tokenizer: Any, with_prompt: bool
    ) -> RequestOutput:
        tokens = self._random.choices(self._ids, k=length)
        log_probs = [self._entry(token) for token in tokens]
        return RequestOutput(
            request_id=name,
            prompt=None,
            prompt_token_ids=prompt,
            # vLLM has none for the first token.
            prompt_logprobs=[None, *map(self._entry, prompt[1:])] if with_prompt else None,
            outputs=[
                CompletionOutput(
                    index=0,
                    text=tokenizer.decode(tokens),
                    token_ids=tokens,
                    cumulative_logprob=sum(
                        entry[token].logprob for token, entry in zip(tokens, log_probs, strict=True)
                    ),
                    logprobs=log_probs,
                    finish_reason="length",
                )
            ],
            finished=True,
            num_cached_tokens=0,
        )

    def _entry(self, token: int) -> dict[int, Logprob]:
        """A token's log-probability and, as ``logprobs=1`` asks for, that of the likeliest token."""
        likeliest = self._random.choice(self._ids)
        return {likeliest: Logprob(-0.5, 1, None), token: Logprob(-2.5, 4, None)}


def build(workload: Workload) -> Callable[[], dict[str, float]]:
    """See :func:`benchmarks.protocol.serve`."""
    use_all_cores()
    tokenizer = AutoTokenizer.from_pretrained(workload.model)
    # `vLLMWrapper` takes nothing but an object of this class; this one was never started.
    llm = LLM.__new__(LLM)
    llm.generate = _Answers(workload, tokenizer).generate  # type: ignore[method-assign]
    batches = iter(make_collector(workload, tokenizer, llm))

    def step() -> dict[str, float]:
        started = time.perf_counter()
        samples = next(batches).view(-1)
        seconds = time.perf_counter() - started
        assert samples.numel() == workload.prompts * workload.samples, samples.shape
        return {"collect": seconds}

    return step


if __name__ == "__main__":
    serve(build)
