"""``grpo-chat``: talk with a model in the terminal, beside its base model if that is wanted.

It loads models with transformers, in this process. What a model writes is shown without control characters.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_grpo.cli import model_argument
from torchrl_grpo.cli.endings import run_tool
from torchrl_grpo.cli.model_argument import ModelArgument
from torchrl_grpo.config import Config
from torchrl_grpo.config.keys import bad_value
from torchrl_grpo.config.schema import ModelConfig
from torchrl_grpo.data.example import Example
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.models import kind, shape
from torchrl_grpo.planning import cores
from torchrl_grpo.runtime.interrupts import Terminated
from torchrl_grpo.runtime.printable import printable

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_HELP = "/reset begins a new conversation, /quit ends (or Ctrl-D); Ctrl-C stops a response"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: see :func:`~torchrl_grpo.cli.endings.run_tool`."""
    run_tool(_parser(), _run, argv)


def _run(args: argparse.Namespace) -> None:
    _check(args)
    cores.wait_passively()
    _quiet()
    models = {"model": model_argument.read(args.model)}
    if args.base is not None:
        models["base"] = model_argument.read(args.base or _base_of(models["model"]))
    run = _run_of(models["model"])
    with tempfile.TemporaryDirectory() as temporary:
        # A mistake in the second name is reported before the first model is loaded.
        checked = {
            name: _checked(args, each, _run_of(each) or run, Path(temporary) / name)
            for name, each in models.items()
        }
        _talk([_speaker(name, *settings) for name, settings in checked.items()], args)


def _run_of(model: ModelArgument) -> Config | None:
    """Return the configuration of the run that a model is of."""
    return None if model.checkpoint is None else model_argument.config_of(model.checkpoint)


def _parser() -> argparse.ArgumentParser:
    parser = model_argument.parser("grpo-chat", "Talk with a model in the terminal.", _HELP)
    parser.add_argument(
        "--base",
        nargs="?",
        const="",
        metavar="MODEL",
        help="also show the answers of this model, by default of the one that the run began with",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system message (by default that of the run, also for --base)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="longest response (default: 512)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampled responses")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    return parser


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.temperature < math.inf:
        wrong = "it must be 0 or a positive number"
        raise bad_value(
            "--temperature", args.temperature, wrong, "--temperature=0.8, or 0 for greedy answers"
        )
    if args.max_new_tokens < 1:
        raise bad_value(
            "--max-new-tokens", args.max_new_tokens, "it must be at least 1", "--max-new-tokens=512"
        )
    if not -(2**63) <= args.seed < 2**64:
        raise bad_value("--seed", args.seed, "it has more than 64 bits", "--seed=0")


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _base_of(model: ModelArgument) -> str:
    run = _run_of(model)
    if run is None:
        raise ConfigError(f"--base: {model.text} is no run, so write the base model: --base MODEL")
    return run.model.name


@dataclass
class Speaker:
    """A model in a conversation of its own.

    Attributes:
        name: name on the screen.
        model: the model.
        tokenizer: its tokenizer.
        system: system message; None for none.
        messages: the conversation so far, without the system message.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self, text: str, options: dict[str, Any], show: Callable[[str], None]) -> None:
        """Answer a message, and remember both.

        Args:
            text: message of the user.
            options: options of ``generate``.
            show: function that is called with each piece of the answer.

        Raises:
            KeyboardInterrupt: the user has stopped the answer, of which the shown part is remembered.
        """
        import torch

        from torchrl_grpo.envs.chat import render

        self.messages.append({"role": "user", "content": text})
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        _, tokens = render(self.tokenizer, Example("chat", [*start, *self.messages]))
        pieces: list[str] = []

        def keep(piece: str) -> None:
            pieces.append(piece)
            show(piece)

        try:
            with torch.inference_mode():
                prompt = torch.tensor([tokens], device=self.model.device)
                self.model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    streamer=_streamer(self.tokenizer, keep),
                    **options,
                )
        finally:
            self.messages.append({"role": "assistant", "content": "".join(pieces)})


def _streamer(tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            show(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _checked(
    args: argparse.Namespace, named: ModelArgument, run: Config | None, merged: Path
) -> tuple[ModelConfig, str | None, str | None]:
    """Check that a model can be loaded.

    Args:
        args: arguments of the command.
        named: the model.
        run: configuration of its run. Another model gets that of the run that it is compared with, so that
            both read the same. None if there is no run.
        merged: new folder for a model that adapters are merged into.

    Returns:
        Its configuration, the system message, and ``inference_model.dtype`` of the run.
    """
    cfg = ModelConfig(name=named.folder, trust_remote_code=args.trust_remote_code)
    system = args.system
    if run is not None:
        system = run.env.system_prompt if system is None else system
        if named.checkpoint is not None or not args.base:
            # The run's template may be one that the tokenizer does not have.
            cfg = replace(cfg, chat_template=run.model.chat_template)
    if model_argument.has_adapters(cfg.name, cfg):
        model_argument.merge(cfg.name, merged, cfg.trust_remote_code)
        cfg = replace(cfg, name=str(merged))
    shape.check_available(cfg)
    kind.check_kind(cfg)
    return cfg, system, None if run is None else run.inference_model.dtype


def _speaker(name: str, cfg: ModelConfig, system: str | None, dtype: str | None) -> Speaker:
    import torch
    from transformers import GenerationConfig

    from torchrl_grpo.models import loading
    from torchrl_grpo.models.precision import resolve_dtype

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = loading.resolve(cfg)
    tokenizer = loading.load_tokenizer(source, cfg)
    # A model of a run computes in the dtype of its engine. Others compute in float32 on a CPU: small updates
    # are lost in 16 bits, and the model would answer as its base.
    if dtype is None:
        dtype = "auto" if device.type == "cuda" else "float32"
    model = loading.load_model(
        source, cfg, device, resolve_dtype(dtype, device), instead="choose a smaller one"
    )
    # Of the settings in its folder, which may penalize repetition or set a temperature, only the ends count,
    # as in a run.
    model.generation_config = GenerationConfig(
        eos_token_id=loading.end_token_ids(model, tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    return Speaker(name, model, tokenizer, system)


def _talk(speakers: Sequence[Speaker], args: argparse.Namespace) -> None:
    import torch

    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens}
    if args.temperature > 0:
        options |= {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(args.seed)
    if sys.stdin.isatty():
        sys.stdout.write(f"{_HELP}\n")
    for line in _lines():
        text = line.strip()
        if text == "/quit":
            return
        if text == "/reset":
            for speaker in speakers:
                speaker.messages.clear()
        elif text:
            for speaker in speakers:
                sys.stdout.write(f"{speaker.name}> ")
                try:
                    speaker.answer(text, options, _show)
                except Terminated:
                    raise
                except KeyboardInterrupt:
                    pass  # The user has read enough of this response.
                sys.stdout.write("\n")


def _lines() -> Iterator[str]:
    """Yield what the user writes, until the end of the input."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        # Arrow keys, and earlier lines.
        import readline  # noqa: F401
    while True:
        try:
            yield input("you> ")
        except EOFError:
            sys.stdout.write("\n")
            return


def _show(piece: str) -> None:
    sys.stdout.write(printable(piece))
    sys.stdout.flush()
