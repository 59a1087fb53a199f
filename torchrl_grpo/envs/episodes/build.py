"""Give an engine the episodes of a configuration."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrl_grpo.config import Config
from torchrl_grpo.config.builtin import ENVIRONMENTS, load_built_in
from torchrl_grpo.config.derived import has_episodes
from torchrl_grpo.config.remote import is_remote
from torchrl_grpo.data.problems import Problems, separate_prompts
from torchrl_grpo.envs.control_tokens import control_tokens
from torchrl_grpo.envs.episodes.chat_tokens import TurnTokens
from torchrl_grpo.envs.episodes.engine import EpisodeEngine
from torchrl_grpo.envs.episodes.offers import Offer, check_available, offer_of, open_host
from torchrl_grpo.envs.episodes.openenv.arguments import OpenEnvArguments
from torchrl_grpo.envs.episodes.processes import CallError, EpisodeHost, EpisodeProcess
from torchrl_grpo.envs.episodes.runner import EpisodeRunner, RunnerOptions
from torchrl_grpo.envs.episodes.shell_task import ShellTask, check_row
from torchrl_grpo.envs.episodes.tools import python_tool, shell_tool
from torchrl_grpo.envs.episodes.tools.call_formats import ToolCall
from torchrl_grpo.envs.episodes.tools.learn_calls import ToolUse, learn_calls
from torchrl_grpo.envs.episodes.tools.offered import check_text
from torchrl_grpo.envs.episodes.tools.registry import load_tools
from torchrl_grpo.envs.episodes.tools.tool import Tool
from torchrl_grpo.envs.episodes.tools.tool_calls import CallReader, describe, described
from torchrl_grpo.envs.episodes.types import Environment
from torchrl_grpo.errors import ConfigError
from torchrl_grpo.inference.protocol import SteppingEngine
from torchrl_grpo.models import loading
from torchrl_grpo.runtime import user_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from torchrl_grpo.data.example import Example

# More sessions are not tried at the start. Each takes a file of this process.
_MOST_SESSIONS = 256
# Sessions in which the problems are reset at the start.
_MOST_RESETS = 8
_NO_TOOLS = ToolUse(False, CallReader(), None)


def check_environment(cfg: Config) -> None:
    """Check the environment and the tools of a configuration, before anything heavy starts.

    Raises:
        ConfigError: one cannot be loaded, or this machine cannot run it.
    """
    _load_tools(cfg)
    check_available(cfg)
    name = cfg.env.environment
    if name is None:
        return
    if is_remote(name):
        user_code.check_arguments(OpenEnvArguments, cfg.env.environment_args, "env.environment_args")
        OpenEnvArguments(**cfg.env.environment_args)
        return
    environment = _find_environment(name)
    user_code.check_arguments(environment, cfg.env.environment_args, "env.environment_args")
    missing = [method for method in ("reset", "step") if not callable(getattr(environment, method, None))]
    if isinstance(environment, type) and missing:
        raise ConfigError(
            f"env.environment={name!r}: the class has no method {missing[0]}; write reset(self, example) and "
            "step(self, message)"
        )
    if name == shell_tool.NAME:
        ShellTask(**cfg.env.environment_args)


def _find_environment(name: str) -> Callable[..., Environment]:
    if name in ENVIRONMENTS:
        built_in: Callable[..., Environment] = load_built_in(ENVIRONMENTS[name])
        return built_in
    environment: Callable[..., Environment] = user_code.load(name, "env.environment")
    return environment


def _load_tools(cfg: Config) -> list[Tool]:
    """Load the tools that this process can describe: all but those of servers."""
    tools = load_tools([spec for spec in cfg.env.tools if not is_remote(spec)])
    for name, sandbox in (("python", python_tool), (shell_tool.NAME, shell_tool)):
        why = sandbox.why_unavailable() if any(tool.spec == name for tool in tools) else None
        if why is not None:
            raise ConfigError(
                f"env.tools has {name}, which cannot run safely on this machine: {why}; remove it, or name a "
                "tool of your own that runs the code elsewhere"
            )
    return tools


def with_prompts(cfg: Config, problems: Problems, tokenizer: PreTrainedTokenizerBase) -> Problems:
    """Give the problems the prompts of their environment, and the description of the tools.

    Tools are described by the chat template. For a template that does not, the description becomes a system
    message.

    Args:
        cfg: configuration of the run.
        problems: problems as the data set has them.
        tokenizer: tokenizer with the chat template.

    Raises:
        ConfigError: the environment fails on a problem.
        ModelError: a call or its result would not survive the chat template.
    """
    if not has_episodes(cfg):
        return problems
    if cfg.env.environment == shell_tool.NAME:
        for example in (*problems.train, *problems.held_out):
            check_row(example)
    # The functions of tools are not called here.
    host = open_host(cfg, [])
    try:
        evaluated = len(problems.held_out) * (cfg.eval.samples or 1)
        count = min(max(cfg.env.num_envs * cfg.env.repeats, evaluated), _MOST_SESSIONS)
        offer = _checked_offer(cfg, _load_tools(cfg), host, tokenizer, count)
        schemas = [tool.schema for tool in offer.tools]
        use = learn_calls(tokenizer, schemas) if schemas else _NO_TOOLS
        reset = prompts_of(cfg, offer, host, min(count, _MOST_RESETS))

        def started(examples: Sequence[Example]) -> list[Example]:
            # An environment is always reset with the messages of the data set.
            return [
                replace(made, source_messages=example.messages)
                for made, example in zip(reset(examples), examples, strict=True)
            ]

        problems = replace(problems, train=started(problems.train), held_out=started(problems.held_out))
    finally:
        if host is not None:
            host.close()

    def with_tools(example: Example) -> Example:
        if use.is_native:
            return replace(example, tools=schemas)
        if not schemas:
            return example
        messages = [dict(message) for message in example.messages]
        if messages and messages[0]["role"] == "system":
            messages[0]["content"] += "\n\n" + text
        else:
            messages.insert(0, {"role": "system", "content": text})
        trusted = None if example.trusted is None else [*example.trusted, text]
        return replace(example, messages=messages, trusted=trusted)

    text = describe(schemas, use.reader.form.example)
    problems = separate_prompts(problems, f"env.environment={cfg.env.environment}")
    train, held_out = map(with_tools, problems.train), map(with_tools, problems.held_out)
    return replace(problems, train=list(train), held_out=list(held_out))


def _checked_offer(
    cfg: Config,
    own_tools: Sequence[Tool],
    host: EpisodeHost | None,
    tokenizer: PreTrainedTokenizerBase,
    count: int = 1,
) -> Offer:
    """Return what the model may call, without the text of a control token in what a server says of it."""
    offer = offer_of(cfg, own_tools, host, count)
    for tool in offer.tools:
        if tool.is_remote:
            check_text(tool, control_tokens(tokenizer).in_text(json.dumps(tool.schema, ensure_ascii=False)))
    return offer


def _calls_of(schemas: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the name and the parameters of each tool, as JSON."""
    functions = [schema["function"] for schema in schemas]
    return [json.dumps([each["name"], each["parameters"]], sort_keys=True) for each in functions]


def _token(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    token_id: int = tokenizer.convert_tokens_to_ids(text)
    return token_id


def prompts_of(
    cfg: Config, offer: Offer, host: EpisodeHost | None, count: int
) -> Callable[[Sequence[Example]], Sequence[Example]]:
    """Return a function that gives examples the messages of their environment.

    Args:
        cfg: configuration of the run.
        offer: what the model may call.
        host: process that starts those of the environments.
        count: number of sessions at a time with an environment's server.
    """
    if host is None or cfg.env.environment is None or cfg.env.environment in ENVIRONMENTS:
        # The built-in ones keep the messages of the example.
        return lambda examples: examples
    # A distant server takes its time for each. What else runs here would gain nothing.
    count = count if is_remote(cfg.env.environment) else 1
    processes = [host.start_episode() for _ in range(count)]

    def reset(process: EpisodeProcess, example: Example) -> Example:
        payload = {"do": "reset", "example": example.plain(), "form": offer.form}
        try:
            messages = process.call(payload, cfg.env.tool_timeout_s)
        except CallError as error:
            raise ConfigError(
                f"env.environment={cfg.env.environment!r}: reset failed on {example.id}: {error}; correct it"
            ) from error
        return replace(example, messages=messages) if messages else example

    def reset_all(examples: Sequence[Example]) -> list[Example]:
        ended = threading.Event()

        def reset_share(process: EpisodeProcess, share: Sequence[Example]) -> list[Example]:
            # After a failure, or an interrupt, the others end too.
            return [reset(process, example) for example in share if not ended.is_set()]

        with ThreadPoolExecutor(count) as threads:
            shares = [
                threads.submit(reset_share, process, examples[start::count])
                for start, process in enumerate(processes)
            ]
            try:
                for future in wait(shares, return_when=FIRST_EXCEPTION).done:
                    future.result()
            finally:
                ended.set()
        done = [future.result() for future in shares]
        return [done[number % count][number // count] for number in range(len(examples))]

    return reset_all


def with_episodes(cfg: Config, engine: SteppingEngine, max_episodes: int) -> SteppingEngine:
    """Return an engine whose responses are the episodes of a configuration.

    Args:
        cfg: configuration of the run.
        engine: engine that generates; it is returned itself if a response is one turn.
        max_episodes: number of episodes at a time.

    Raises:
        ConfigError: the user's code cannot be loaded in its own process.
        ModelError: the chat template cannot render messages after the model's.
    """
    if not has_episodes(cfg):
        return engine
    tokenizer = loading.load_tokenizer(loading.resolve(cfg.model), cfg.model)
    own_tools = _load_tools(cfg)
    host = open_host(cfg, own_tools)
    try:
        offer = _checked_offer(cfg, own_tools, host, tokenizer)
        return _with_host(cfg, engine, tokenizer, max_episodes, host, offer)
    except BaseException:
        if host is not None:
            host.close()
        raise


def _with_host(
    cfg: Config,
    engine: SteppingEngine,
    tokenizer: PreTrainedTokenizerBase,
    max_episodes: int,
    host: EpisodeHost | None,
    offer: Offer,
) -> SteppingEngine:
    tools = offer.tools
    schemas = [tool.schema for tool in tools]
    use = learn_calls(tokenizer, schemas) if schemas else _NO_TOOLS
    # The prompt has these tools too, and some tokenizers use another chat template if there are tools.
    turn_tokens = TurnTokens(tokenizer, tools=schemas if use.is_native else (), calls=use.turn)
    ends_call = () if use.turn is None or use.turn.end is None else (_token(tokenizer, use.turn.end),)
    # A template or tokenizer that refuses them must not do so after hours.
    if cfg.env.environment:
        turn_tokens.between(tokenizer.eos_token_id, [{"role": "user", "content": "-"}])
    if tools:
        result = {"role": "tool", "name": tools[0].name, "content": "-"}
        if use.turn is not None:
            result["tool_call_id"] = use.turn.message.id_of(ToolCall(tools[0].name, {}), 0)
        turn_tokens.between((*ends_call, tokenizer.eos_token_id)[0], [result])
    in_own_process = cfg.env.environment not in (None, *ENVIRONMENTS)
    make = None
    if cfg.env.environment in ENVIRONMENTS:
        make = partial(_find_environment(cfg.env.environment), **cfg.env.environment_args)
    options = RunnerOptions(
        tools={tool.name: tool for tool in tools},
        make_environment=make,
        in_own_process=in_own_process,
        host=host,
        timeout_s=cfg.env.tool_timeout_s,
        max_characters=cfg.env.max_tool_characters,
        reader=use.reader,
        call_turn=use.turn,
        form=offer.form,
        max_turns=cfg.env.max_turns,
    )

    def make_runner(example: Example) -> EpisodeRunner:
        # Servers were asked again, and a description may have the time. The prompts keep that of the start.
        is_in_message = bool(schemas) and not use.is_native
        in_prompt = described(example.messages[0]["content"]) if is_in_message else example.tools
        if _calls_of(in_prompt) != _calls_of(schemas):
            servers = ", ".join(filter(is_remote, (*cfg.env.tools, cfg.env.environment or "")))
            raise ConfigError(
                f"env.environment, env.tools: {servers} no longer offers the tools that are in the "
                "prompts; let the server offer the same to each connection, or start the run again"
            )
        return EpisodeRunner(options, example)

    return EpisodeEngine(
        engine,
        tokenizer,
        turn_tokens,
        make_runner,
        is_quick=options.is_quick,
        max_turns=cfg.env.max_turns,
        max_turn_tokens=cfg.env.max_turn_tokens,
        stop_token_ids=ends_call,
        max_episodes=max_episodes,
        close=(lambda: None) if host is None else host.close,
    )
