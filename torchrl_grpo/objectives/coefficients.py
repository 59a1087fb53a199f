"""Coefficients of loss terms, constant or adaptive. Checkpoints include their state."""

from __future__ import annotations


class KLCoefficient:
    """Coefficient of the KL divergence to the reference.

    With a target it follows Ziegler et al. (arXiv 1909.08593, sec. 2.2): ``c <- c (1 + e n / horizon)`` with
    ``e = clip(KL / target - 1, -0.2, 0.2)`` after n responses.

    Args:
        value: initial value.
        target: target divergence in nats per token; None keeps the coefficient constant.
        horizon: number of responses over which the coefficient may change by about a fifth.
    """

    def __init__(self, value: float, target: float | None = None, horizon: int = 10_000) -> None:
        self.value = value
        self.target = target
        self.horizon = horizon

    @property
    def in_use(self) -> bool:
        """Whether the divergence must be measured, now or later."""
        return self.value != 0 or self.target is not None

    def update(self, kl: float, responses: int) -> None:
        """Update with an optimizer step's mean divergence (nats per token) and number of responses."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * responses / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the coefficient. Without a target, the configured value stays."""
        if self.target is not None:
            self.value = state["value"]


class EntropyCoefficient:
    """Coefficient of the entropy bonus.

    With a target it follows Skywork-OR1 (arXiv 2505.22312, sec. 3.2.3). The bonus counts only while the last
    measured entropy is at most the target. The coefficient rises by ``delta`` after each such step, falls by
    ``delta`` after each other step, and stays in [0, ``largest``].

    Args:
        value: initial value.
        target: target entropy in nats per token; None keeps the coefficient constant.
        delta: change per optimizer step.
        largest: upper bound of the coefficient.
    """

    def __init__(
        self, value: float, target: float | None = None, delta: float = 0.005, largest: float = 1.0
    ) -> None:
        self.target = target
        self.delta = delta
        self.largest = largest
        self._coefficient = value
        self._counts = True

    @property
    def in_use(self) -> bool:
        """Whether the loss needs the gradient of the entropy."""
        return self._coefficient != 0 or self.target is not None

    @property
    def value(self) -> float:
        """The coefficient of the next step."""
        return self._coefficient if self._counts else 0.0

    def update(self, entropy: float) -> None:
        """Update with the mean entropy (nats per token) of an optimizer step."""
        if self.target is None:
            return
        self._counts = entropy <= self.target
        change = self.delta if self._counts else -self.delta
        self._coefficient = min(max(self._coefficient + change, 0.0), self.largest)

    def state_dict(self) -> dict[str, float | bool]:
        """Return the coefficient, and whether the bonus counts."""
        return {"coefficient": self._coefficient, "counts": self._counts}

    def load_state_dict(self, state: dict[str, float | bool]) -> None:
        """Restore the coefficient. Without a target, the configured value stays."""
        if self.target is not None:
            self._coefficient, self._counts = float(state["coefficient"]), bool(state["counts"])
