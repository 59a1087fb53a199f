"""Progress of a run on stderr: phases before the first step, then steps.

A terminal shows a line with the seconds of the present phase, then a bar. Anything else gets one plain line
per phase and per step. Numbers for programs are in ``metrics.jsonl``.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

from torchrl_grpo.runtime import screen


def _has_room(terminal: TextIO) -> bool:
    """False for a terminal that reports 0 columns or 0 rows, in which tqdm shows nothing."""
    try:
        size = os.get_terminal_size(terminal.fileno())
    except OSError:
        return True
    return size.columns > 0 and size.lines > 0


class _PhaseLine:
    """A line on a terminal that names a phase and counts its seconds, until it is ended."""

    def __init__(self, text: str, stream: TextIO, clock: Callable[[], float]) -> None:
        self._text = text
        self._stream = stream
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._draw()
        self._thread = threading.Thread(target=self._count, name="phase", daemon=True)
        self._thread.start()

    def note(self, text: str) -> None:
        """Print a line above this one."""
        with self._lock:
            self._stream.write(f"\r\x1b[K{text}\n")
        self._draw()

    def end(self) -> None:
        """Leave the line as it stands and go to the next."""
        self._ended.set()
        self._thread.join()
        self._draw(end="\n")

    def _count(self) -> None:
        while not self._ended.wait(1.0):
            self._draw()

    def _draw(self, end: str = "") -> None:
        with self._lock:
            self._stream.write(f"\r\x1b[K{self._text} ({self._clock() - self._started:.0f} s){end}")
            self._stream.flush()


class Progress:
    """Shows the present phase, then steps done, reward, accuracy, KL, tokens per second and time left.

    Use as a context manager, so that the bar is closed however training ends.

    Args:
        total_steps: optimizer steps of the whole run.
        enabled: ``False`` shows no progress at all; notes are still printed.
        start_step: steps that a resumed run has done before; they count in the bar, not in the pace.
        stream: where to write; by default the stderr that the user sees.
        clock: seconds from any origin; for tests.
    """

    def __init__(
        self,
        total_steps: int,
        enabled: bool = True,
        *,
        start_step: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps = total_steps
        self.enabled = enabled
        self._start_step = start_step
        self._stream = screen.err() if stream is None else stream
        self._clock = clock
        self._started = clock()
        self._held_out = ""
        self._on_terminal = enabled and self._stream.isatty() and _has_room(self._stream)
        self._phase: _PhaseLine | None = None
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Progress:
        self._started = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def phase(self, text: str) -> None:
        """Show what the run does before its first step.

        Args:
            text: the phase, e.g. "loading the model"; it lasts until the next one or the first step.
        """
        self._end_phase()
        if self._on_terminal:
            self._phase = _PhaseLine(text, self._stream, self._clock)
        elif self.enabled:
            print(text, file=self._stream, flush=True)

    def start(self) -> None:
        """Begin with the steps: the pace counts from here."""
        self._show_bar()
        self._started = self._clock()

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.end()
            self._phase = None

    def _show_bar(self) -> None:
        self._end_phase()
        if self._on_terminal and self._bar is None:
            self._bar = tqdm(
                total=self.total_steps,
                initial=self._start_step,
                file=self._stream,
                unit="step",
                dynamic_ncols=True,
                bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}",
            )

    def update(
        self,
        step: int,
        *,
        reward: float | None = None,
        loss: float | None = None,
        held_out: float | None = None,
        held_out_name: str = "accuracy",
        kl: float | None = None,
        tokens_per_s: float | None = None,
    ) -> None:
        """Show that a step is done.

        Args:
            step: optimizer steps done so far.
            reward: mean reward of the step's responses.
            loss: loss of the step.
            held_out: held-out accuracy or reward; between evaluations the last one stays in view, with its
                step.
            held_out_name: what it is.
            kl: KL divergence from the reference, in nats per token; None without a reference.
            tokens_per_s: response tokens per second of the step.
        """
        if not self.enabled:
            return
        self._show_bar()
        parts = [] if reward is None else [f"reward {reward:.3f}"]
        if loss is not None:
            parts.append(f"loss {loss:.3f}")
        if held_out is not None:
            self._held_out = f"{held_out_name} {held_out:.3f}"
        if self._held_out:
            parts.append(self._held_out)
        if held_out is not None:
            # Later steps show this value with its step.
            self._held_out += f" at step {step}"
        if kl is not None:
            parts.append(f"kl {kl:.2g}")
        if tokens_per_s is not None:
            parts.append(f"{tokens_per_s:,.0f} tokens/s")
        if step > self._start_step:
            parts.append(f"{self._left(step)} left")
        if self._bar is None:
            print("  ".join([f"step {step}/{self.total_steps}", *parts]), file=self._stream, flush=True)
        else:
            self._bar.set_description_str(", ".join(parts), refresh=False)
            self._bar.n = step
            self._bar.refresh()

    def note(self, text: str) -> None:
        """Print a line of its own, above the phase or the bar on a terminal."""
        if self._phase is not None:
            self._phase.note(text)
        elif self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        """Leave the phase or the bar as it stands and end its line; closing twice is harmless."""
        self._end_phase()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _left(self, step: int) -> str:
        """Time to the end at the mean pace so far, as ``1:02:03`` or ``02:03``."""
        pace = (self._clock() - self._started) / (step - self._start_step)
        return str(tqdm.format_interval(math.ceil(pace * max(0, self.total_steps - step))))
