"""vLLM's memory while it sleeps, with the memory of a GPU pretended."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from torchrl_grpo.inference import vllm_compat
from torchrl_grpo.inference.vllm_engine import VLLMEngine

ALL = {"weights", "kv_cache"}


class Memory:
    """What is mapped. As in vLLM's allocator, an error while memory is freed stays."""

    def __init__(self) -> None:
        self.mapped = set(ALL)
        self.error = ""
        self.room = True


class FakeLLM:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def sleep(self, level: int) -> None:
        assert level == 2
        self.memory.mapped.clear()

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        if not self.memory.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        parts = set(ALL if tags is None else tags)
        if parts & self.memory.mapped:
            # vLLM before 0.28.
            raise RuntimeError("CUDA Error: invalid argument")
        self.memory.mapped |= parts

    def __del__(self) -> None:
        if self.memory.mapped != ALL:
            self.memory.error = "invalid argument"


class FakeWeights:
    """Notes what is mapped while weights are located."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.model = None
        self.seen: list[set[str]] = []
        self.fault: Exception | None = None

    def locate_weights(self, shapes: object, update: object, with_room: AbstractContextManager[None]) -> None:
        self.seen.append(set(self.memory.mapped))
        with with_room:
            self.seen.append(set(self.memory.mapped))
            if self.fault is not None:
                raise self.fault
        self.seen.append(set(self.memory.mapped))

    def release(self) -> None:
        pass


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setattr(vllm_compat, "clean_up", lambda: None)
    return Memory()


def make_engine(memory: Memory, sleeps: bool = True) -> Any:
    engine: Any = object.__new__(VLLMEngine)
    engine.llm, engine._weights = FakeLLM(memory), FakeWeights(memory)
    engine._gpu_memory_utilization, engine._can_sleep, engine._asleep = 0.5, sleeps, set()
    return engine


@pytest.mark.parametrize("asleep", [False, True])
def test_no_error_stays_when_an_engine_is_closed(memory: Memory, asleep: bool) -> None:
    engine = make_engine(memory)
    if asleep:
        engine.sleep()
    engine.close()
    assert not memory.error
    assert not hasattr(engine, "llm")


def test_an_engine_that_cannot_wake_is_freed_and_hides_no_error(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(memory)
    engine.sleep()
    memory.room = False
    engine.close()
    assert not hasattr(engine, "llm")
    assert "vLLM is closed while it sleeps: " in caplog.text


def test_an_engine_is_closed_after_an_error_while_its_cache_was_away(memory: Memory) -> None:
    engine = make_engine(memory)
    engine._weights.fault = RuntimeError("nothing was found")
    with pytest.raises(RuntimeError, match="nothing was found"):
        engine.locate_weights({})
    engine.close()
    assert not memory.error


def test_the_cache_makes_room_while_weights_are_located(memory: Memory) -> None:
    engine = make_engine(memory)
    engine.locate_weights({})
    assert engine._weights.seen == [ALL, {"weights"}, ALL]
    engine.close()
    assert not memory.error
    awake = make_engine(memory, sleeps=False)
    awake.locate_weights({})
    assert awake._weights.seen == [ALL] * 3
