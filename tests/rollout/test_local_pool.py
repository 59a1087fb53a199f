"""The trainer's thread runs what its pool of one worker is asked for."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from torchrl_grpo.rollout.workers.local_pool import TrainerThread


def interrupt(_: object = None) -> None:
    """Do what an interrupt's handler does, at a moment that the test chooses."""
    raise KeyboardInterrupt


def test_an_interrupt_in_a_call_leaves_the_thread_as_an_interrupt() -> None:
    thread = TrainerThread()
    future = thread.submit(interrupt)

    with pytest.raises(KeyboardInterrupt):
        thread.run_until(future)
    assert isinstance(future.exception(), KeyboardInterrupt)


def test_an_interrupt_while_a_result_is_handed_on_leaves_the_thread_as_an_interrupt() -> None:
    # It came here in a run of two ranks, which ended with "InvalidStateError" and exit code 1.
    thread = TrainerThread()
    future = thread.submit(lambda: 3)
    future.add_done_callback(interrupt)
    never: Future[Any] = Future()

    with pytest.raises(KeyboardInterrupt):
        thread.run_until(never)
    assert future.result() == 3


def test_an_error_in_a_call_is_its_result_and_the_thread_goes_on() -> None:
    thread = TrainerThread()
    failed = thread.submit(lambda: 1 // 0)
    after = thread.submit(lambda: 5)

    thread.run_until(after)
    assert isinstance(failed.exception(), ZeroDivisionError)
    assert after.result() == 5
