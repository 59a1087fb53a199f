"""Generates with plain transformers, which works wherever torch does and is the numerical reference.

A batch of prompts is prefilled once, and its cache is repeated for the samples of each prompt. Each sample
has its own generator, so a response depends on its seed and not on earlier responses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from torchrl_grpo.config import Config
from torchrl_grpo.errors import ModelError
from torchrl_grpo.inference.checksums import Checksums, compute_checksums
from torchrl_grpo.inference.layout import in_format
from torchrl_grpo.inference.noise import Noise
from torchrl_grpo.inference.protocol import Completion, Probe, ProbeResult, Request, SteppingEngine
from torchrl_grpo.models.loading import load_model, load_processor
from torchrl_grpo.models.pictures import PictureInputs, PictureProcessor
from torchrl_grpo.models.precision import choose_kernels, resolve_dtype, resolve_head
from torchrl_grpo.models.scoring.padding import pad_left
from torchrl_grpo.models.scoring.token_scorer import backbone, set_head_compute_dtype
from torchrl_grpo.planning.workload import MAX_ROWS


class TransformersEngine(SteppingEngine):
    """An engine that owns ``model``; no other code may train or change it.

    Args:
        model: causal language model.
        eos_token_ids: tokens that end a response.
        pad_token_id: token that fills the left of short prompts; it is masked, so any id works.
        max_rows: largest number of responses generated at a time.
        head_dtype: data type of the output head's products; None for the model's number format.
        pictures: processor of a model for pictures and text; None for text alone.

    Raises:
        ModelError: ``head_dtype`` is given, and the model's head is not a single matrix product.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        max_rows: int = MAX_ROWS,
        head_dtype: torch.dtype | None = None,
        pictures: PictureProcessor | None = None,
    ) -> None:
        choose_kernels()
        if head_dtype is not None:
            try:
                set_head_compute_dtype(model, head_dtype)
            except ValueError as error:
                raise ModelError(
                    f"inference_model.head_dtype={str(head_dtype).removeprefix('torch.')}: "
                    f"{type(model).__name__} has no head that this fits ({error}); write "
                    "inference_model.head_dtype=auto"
                ) from error
        self.model = model
        self.eos_token_ids = torch.tensor(list(eos_token_ids))
        self.pad_token_id = pad_token_id
        self.max_rows = max_rows
        self.pictures = pictures
        self._device = next(model.parameters()).device
        self._asleep = False
        # Name under which the weights of each parameter are published, by name of the parameter.
        self._published_as: dict[str, str] = {}
        self._waiting: list[Request] = []
        self._batch: _Batch | None = None

    def submit(self, requests: Sequence[Request]) -> None:
        """See :meth:`SteppingEngine.submit`. Requests wait until the running batch has ended."""
        assert not self._asleep, "submit() to a sleeping engine: wake it and load weights first"
        self._waiting.extend(requests)

    def step(self) -> list[tuple[Hashable, Completion]]:
        if self._batch is None:
            chosen, self._waiting = _whole_groups(self._waiting, self.max_rows)
            self._batch = self._begin(chosen)
        ended = self._batch.step()
        if not self._batch.running:
            self._batch = None
        return ended

    def abort_all(self) -> dict[Hashable, Completion]:
        taken = {} if self._batch is None else self._batch.unfinished()
        taken |= {request.key: Completion([], [], "aborted") for request in self._waiting}
        self._batch, self._waiting = None, []
        return taken

    def _begin(self, requests: Sequence[Request]) -> _Batch:
        return _Batch(
            self._step,
            requests,
            self.eos_token_ids,
            self.pad_token_id,
            self._device,
            self.model.config,
            self._picture_inputs,
            () if self.pictures is None else self.pictures.blocked,
        )

    def _picture_inputs(self, requests: Sequence[Request]) -> PictureInputs | None:
        if self.pictures is None:
            return None
        files = [request.pictures.files if request.pictures else () for request in requests]
        return PictureInputs(backbone(self.model), self.pictures, files)

    @torch.no_grad()
    def _step(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache, **inputs: Tensor
    ) -> Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **inputs,
        )
        logits: Tensor = output.logits
        return logits[:, -1]

    @torch.no_grad()
    def next_tokens(self, probe: Probe) -> ProbeResult:
        logits = self._begin(probe.requests()).logits
        top = torch.log_softmax(logits.float(), -1).topk(min(probe.top_k, logits.shape[-1]), dim=-1)
        return ProbeResult(top.indices.cpu(), top.values.cpu(), cached_tokens=0)

    def start_update(self) -> None:
        self.wake()

    @torch.no_grad()
    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor)

    def finish_update(self) -> None:
        """See :meth:`Engine.finish_update`."""

    def locate_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """See :meth:`Engine.locate_weights`. Published names are this model's, one for tied tensors."""
        first: dict[int, str] = {}
        for name, tensor in self.model.named_parameters(remove_duplicate=False):
            self._published_as[name] = first.setdefault(tensor.data_ptr(), name)

    def checksums(self) -> tuple[Checksums, ...]:
        return (compute_checksums(self._held(), self.model.dtype),)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor in use with its published name, each storage once."""
        known = set()
        for name, tensor in self.model.named_parameters(remove_duplicate=False):
            if tensor.data_ptr() not in known:
                known.add(tensor.data_ptr())
                yield self._published_as[name], in_format(tensor, self.model.dtype)

    def reset_cache(self) -> None:
        """Do nothing: each call builds its own cache."""

    def sleep(self) -> None:
        if self._asleep:
            return
        buffers = dict(self.model.named_buffers())
        self._buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        self.model.to("meta")
        self._asleep = True

    def wake(self) -> None:
        if not self._asleep:
            return
        self.model.to_empty(device=self._device)
        # The move to the meta device and back untied tensors that had several names.
        self.model.tie_weights()
        own = dict(self.model.named_buffers())
        for name, buffer in self._buffers.items():
            own[name].copy_(buffer)
        self._asleep = False

    def close(self) -> None:
        del self.model


class _Batch:
    """Decodes responses side by side, and prefills equal neighboring prompts once.

    Args:
        forward: function that maps ids, mask, positions and cache to the logits of the last position.
        requests: requests to answer.
        eos_token_ids: ids of the tokens that end a response.
        pad_token_id: token that fills the left of short prompts.
        device: device of the model.
        config: configuration of the model, which the cache needs.
        picture_inputs: function that returns the pictures of requests, or None for a model of text.
        blocked: tokens that are never sampled.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        requests: Sequence[Request],
        eos_token_ids: Tensor,
        pad_token_id: int,
        device: torch.device,
        config: PreTrainedConfig,
        picture_inputs: Callable[[Sequence[Request]], PictureInputs | None],
        blocked: Sequence[int],
    ) -> None:
        self._forward = forward
        self._blocked = list(blocked)
        self._requests = requests
        self._eos_token_ids = set(eos_token_ids.tolist())
        self._device = device
        self._token_ids: list[list[int]] = [[] for _ in requests]
        self._log_probs: list[list[float]] = [[] for _ in requests]
        self.running = set(range(len(requests)))
        runs = [list(run) for _, run in itertools.groupby(requests, key=lambda request: request.prompt)]
        ids, mask = (t.to(device) for t in pad_left([run[0].tokens for run in runs], pad_token_id))
        repeats = torch.tensor([len(run) for run in runs], device=device)
        self._cache = DynamicCache(config=config)
        positions, inputs = (mask.long().cumsum(-1) - 1).clamp(min=0), {}
        pictures = picture_inputs([run[0] for run in runs])
        if pictures is not None:
            inputs = pictures.model_inputs(ids, mask)
            positions = inputs.pop("position_ids")
        next_position = positions.reshape(-1, *mask.shape).amax((0, 2)) + 1
        self.logits = forward(ids, mask, positions, self._cache, **inputs).repeat_interleave(repeats, 0)
        # Unlike batch_select_indices, this also knows the states of convolutions and of linear attention.
        self._cache.reorder_cache(torch.arange(len(runs), device=device).repeat_interleave(repeats))
        self._mask = mask.repeat_interleave(repeats, 0)
        self._position = next_position.repeat_interleave(repeats, 0)
        self._moves = torch.ones_like(self._position)
        self._noise = Noise([request.seed for request in requests], device)
        self._samples = any(request.temperature != 0 for request in requests)
        self._temperature = torch.tensor(
            [[request.temperature or 1.0] for request in requests], device=device
        )
        self._greedy = torch.tensor([request.temperature == 0 for request in requests], device=device)

    @torch.no_grad()
    def step(self) -> list[tuple[Hashable, Completion]]:
        """Sample a token for every row, and return the responses that end with it."""
        if self._token_ids[0]:
            self._advance()
        logits = self.logits.float() / self._temperature
        if self._blocked:
            logits[:, self._blocked] = -torch.inf
        log_p = torch.log_softmax(logits, dim=-1)
        token = log_p.argmax(-1)
        if self._samples:
            token = torch.where(self._greedy, token, _sample(log_p, self._noise))
        self._token = token
        chosen = log_p.gather(-1, token[:, None]).squeeze(-1)
        # Both are exact in float64, and one copy waits for a GPU once.
        tokens, log_probs = torch.stack([token.double(), chosen.double()]).tolist()
        return self._record([int(token_id) for token_id in tokens], log_probs)

    def _advance(self) -> None:
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        self.logits = self._forward(self._token[:, None], self._mask, self._position[:, None], self._cache)
        self._position = self._position + self._moves

    def _record(self, tokens: list[int], log_probs: list[float]) -> list[tuple[Hashable, Completion]]:
        ended = []
        for row, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
            # Keep decoding ended rows without recording them, because the batch keeps its shape.
            self._token_ids[row].append(token)
            if row not in self.running:
                continue
            self._log_probs[row].append(log_prob)
            request = self._requests[row]
            ends = token in self._eos_token_ids or token in request.stop_token_ids
            stopped = ends and not request.ignore_eos
            if stopped or len(self._log_probs[row]) == request.max_new_tokens:
                self.running.remove(row)
                # An ended row keeps decoding, so freeze its position within the model's limit.
                self._moves[row] = 0
                ended.append((request.key, self._completion(row, "stop" if stopped else "length")))
        return ended

    def _completion(self, row: int, reason: str) -> Completion:
        log_probs = self._log_probs[row]
        return Completion(self._token_ids[row][: len(log_probs)], log_probs, reason)

    def unfinished(self) -> dict[Hashable, Completion]:
        """Return the tokens generated so far for the responses that have not ended."""
        return {self._requests[row].key: self._completion(row, "aborted") for row in sorted(self.running)}


def _whole_groups(requests: list[Request], max_rows: int) -> tuple[list[Request], list[Request]]:
    """Split requests into at most ``max_rows`` and the rest, and keep equal prompts together if possible."""
    if len(requests) <= max_rows:
        return requests, []
    cut = max_rows
    while cut > 0 and requests[cut - 1].prompt == requests[cut].prompt:
        cut -= 1
    cut = cut or max_rows
    return requests[:cut], requests[cut:]


def _sample(log_p: Tensor, noise: Noise) -> Tensor:
    """Draw one token per row with the exponential race: argmax of p / E with E ~ Exp(1)."""
    return (log_p - noise.draw(log_p.shape[-1]).log()).argmax(-1)


def build(
    cfg: Config,
    source: str,
    device: torch.device,
    *,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    **_: object,
) -> TransformersEngine:
    """Build the engine; see :func:`~torchrl_grpo.inference.build.build_engine`."""
    options = cfg.inference_model
    model = load_model(source, cfg.model, device, resolve_dtype(options.dtype, device))
    return TransformersEngine(
        model,
        eos_token_ids,
        pad_token_id,
        head_dtype=resolve_head(options.head_dtype),
        pictures=load_processor(source, cfg.model),
    )
