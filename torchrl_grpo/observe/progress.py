"""Progress of a run on stderr: a bar on a terminal, one plain line a step anywhere else.

Left out: anything not for a person looking on; numbers for machines are in ``metrics.jsonl``.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm


def _has_columns(terminal: TextIO) -> bool:
    """False for a terminal that says it is 0 columns wide, in which a bar would show nothing."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns > 0
    except OSError:
        return True


class Progress:
    """Shows steps done, reward, accuracy, KL, tokens per second and time left.

    Use as a context manager, so that the bar is closed however training ends.

    Args:
        total_steps: optimizer steps of the whole run.
        enabled: ``False`` shows no progress at all; notes are still printed.
        start_step: steps that a resumed run has behind it; they count in the bar, not in the pace.
        stream: where to write; stderr unless told.
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
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._started = clock()
        self._accuracy = ""
        self._bar: tqdm[Any] | None = None
        if enabled and self._stream.isatty() and _has_columns(self._stream):
            self._bar = tqdm(
                total=total_steps,
                initial=start_step,
                file=self._stream,
                unit="step",
                dynamic_ncols=True,
                bar_format="{n_fmt}/{total_fmt} |{bar}| {desc}",
            )

    def __enter__(self) -> Progress:
        self._started = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(
        self,
        step: int,
        *,
        reward: float | None = None,
        accuracy: float | None = None,
        kl: float | None = None,
        tokens_per_s: float | None = None,
    ) -> None:
        """Shows that a step is done.

        Args:
            step: optimizer steps done so far.
            reward: mean reward of the step's responses.
            accuracy: held-out accuracy; between evaluations the last one stays in view, with its step.
            kl: divergence from the reference, or from the policy that generated.
            tokens_per_s: response tokens per second of the step.
        """
        if not self.enabled:
            return
        parts = [] if reward is None else [f"reward {reward:.3f}"]
        if accuracy is not None:
            self._accuracy = f"accuracy {accuracy:.3f}"
        if self._accuracy:
            parts.append(self._accuracy)
        if accuracy is not None:
            # From the next step on it is said how old it is.
            self._accuracy += f" at step {step}"
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
        """Prints a line of its own, above the bar where there is one."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        """Leaves the bar as it stands and ends its line; closing twice is harmless."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _left(self, step: int) -> str:
        """Time to the end at the mean pace so far, as ``1:02:03`` or ``02:03``."""
        pace = (self._clock() - self._started) / (step - self._start_step)
        seconds = math.ceil(pace * max(0, self.total_steps - step))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"
