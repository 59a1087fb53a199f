"""When an interrupt is raised: at once, before the next step, or after what the ranks do together."""

from __future__ import annotations

import ctypes
import signal
import threading

import pytest

from torchrl_grpo.runtime.interrupts import (
    Terminated,
    delay_interrupts,
    ignore_terminations,
    keep_termination_handler,
    raise_terminations,
    remember_interrupts,
)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_is_raised_at_once_and_again_where_it_got_lost() -> None:
    with remember_interrupts() as check:
        check()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        # The library that swallowed it.
        with pytest.raises(KeyboardInterrupt):
            check()


def test_a_held_interrupt_comes_after_what_is_held(capfd: pytest.CaptureFixture[str]) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), delay_interrupts():
        interrupt()
        done.append("the rest")
    assert done == ["the rest"]
    assert "interrupt again to end now" in capfd.readouterr().err


def test_a_second_interrupt_is_not_held() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), delay_interrupts():
        interrupt()
        interrupt()
        done.append("the rest")
    assert done == []


def test_an_error_inside_is_what_is_raised() -> None:
    with pytest.raises(RuntimeError, match="its own"), delay_interrupts():
        interrupt()
        raise RuntimeError("its own")


@pytest.mark.parametrize("ending", ["none", "interrupt", "error"])
def test_handlers_are_put_back(ending: str) -> None:
    before = signal.getsignal(signal.SIGINT)
    with remember_interrupts() as check:
        try:
            with delay_interrupts():
                if ending == "interrupt":
                    interrupt()
                if ending == "error":
                    raise RuntimeError
        except (KeyboardInterrupt, RuntimeError):
            assert ending != "none"
        if ending == "interrupt":
            # What was held counts as an interrupt that came.
            with pytest.raises(KeyboardInterrupt):
                check()
        else:
            check()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with remember_interrupts() as check, delay_interrupts():
            interrupt()
        check()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_no_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    handlers = []

    def work() -> None:
        with remember_interrupts(), delay_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before]


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_a_termination_is_raised_like_an_interrupt_and_delayed_like_one() -> None:
    done = []
    with raise_terminations(), remember_interrupts() as check:
        with pytest.raises(Terminated):
            terminate()
        with pytest.raises(Terminated):
            check()
        with pytest.raises(Terminated), delay_interrupts():
            terminate()
            done.append("the rest")
        with pytest.raises(KeyboardInterrupt), delay_interrupts():
            terminate()
            interrupt()
            done.append("never")
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_library_does_not_take_the_termination_away() -> None:
    with raise_terminations():
        with keep_termination_handler():
            signal.signal(signal.SIGTERM, lambda number, frame: None)
        with pytest.raises(Terminated):
            terminate()
        ignore_terminations()
        terminate()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_is_taken_away_outside_python_is_restored() -> None:
    # As Ray does when it shuts down.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    with raise_terminations():
        with pytest.raises(RuntimeError), keep_termination_handler():
            libc.signal(signal.SIGTERM, None)
            raise RuntimeError
        with open("/proc/self/status") as status:
            (caught,) = (int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))
        # Otherwise, the signal would end this process.
        assert caught >> (signal.SIGTERM - 1) & 1
        with pytest.raises(Terminated):
            terminate()


def test_a_library_leaves_no_handler_where_there_was_none() -> None:
    with keep_termination_handler():
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_keeps_its_own_handler_of_terminations() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with raise_terminations():
            terminate()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]
