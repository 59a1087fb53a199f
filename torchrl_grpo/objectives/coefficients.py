"""Coefficients that are constant, or follow a measurement; their state is part of a checkpoint."""

from __future__ import annotations


class KLCoefficient:
    """The weight of the KL divergence to the reference.

    With a target it follows Ziegler et al. (arXiv 1909.08593, sec. 2.2): ``c <- c (1 + e n / horizon)`` with
    ``e = clip(KL / target - 1, -0.2, 0.2)``.

    Args:
        value: where it starts.
        target: divergence aimed at, nats per token; None keeps the coefficient constant.
        horizon: responses over which the coefficient may change by about a fifth.
    """

    def __init__(self, value: float, target: float | None = None, horizon: int = 10_000) -> None:
        self.value = value
        self.target = target
        self.horizon = horizon

    @property
    def in_use(self) -> bool:
        """Whether there is, or may come to be, a divergence to measure."""
        return self.value != 0 or self.target is not None

    def update(self, kl: float, responses: int) -> None:
        """Take note of an optimizer step's mean divergence (nats per token) and number of responses."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * responses / self.horizon

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue where :meth:`state_dict` was taken; without a target the configuration's value stays."""
        if self.target is not None:
            self.value = state["value"]


class EntropyCoefficient:
    """The weight of the entropy bonus.

    With a target it follows Skywork-OR1 (arXiv 2505.22312, sec. 3.2.3): the bonus counts only while the last
    measured entropy is at most the target, and its weight rises by ``delta`` after each such step and falls
    by it after every other, within 0 and ``largest``.

    Args:
        value: where it starts.
        target: entropy aimed at, nats per token; None keeps the coefficient constant.
        delta: change per optimizer step.
        largest: upper bound.
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
        """Whether the loss must be able to take a gradient of the entropy."""
        return self._coefficient != 0 or self.target is not None

    @property
    def value(self) -> float:
        """What the next step weighs the entropy with."""
        return self._coefficient if self._counts else 0.0

    def update(self, entropy: float) -> None:
        """Take note of an optimizer step's mean entropy, nats per token."""
        if self.target is None:
            return
        self._counts = entropy <= self.target
        change = self.delta if self._counts else -self.delta
        self._coefficient = min(max(self._coefficient + change, 0.0), self.largest)

    def state_dict(self) -> dict[str, float | bool]:
        """Coefficient, and whether it counts."""
        return {"coefficient": self._coefficient, "counts": self._counts}

    def load_state_dict(self, state: dict[str, float | bool]) -> None:
        """Continue where :meth:`state_dict` was taken; without a target the configuration's value stays."""
        if self.target is not None:
            self._coefficient, self._counts = float(state["coefficient"]), bool(state["counts"])
