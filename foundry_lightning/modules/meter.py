"""How far a run is and how fast it goes, counted on the host."""

from __future__ import annotations

import time


class Meter:
    """Counts tokens and seconds of a run, over its resumes.

    Args:
        tokens: Attended tokens trained on before, over all ranks.
        seconds: Wall time of training before, evaluations and checkpoints included.

    Attributes:
        tokens: Attended tokens trained on so far, over all ranks.
        learning_rate: Rate of the last update.
        grad_norm: Global norm of the last update's gradient, before clipping.
    """

    def __init__(self, *, tokens: int = 0, seconds: float = 0.0) -> None:
        self.tokens = self._tokens_before = tokens
        self.learning_rate = self.grad_norm = 0.0
        self._seconds_before = seconds
        self._began: float | None = None
        self._since, self._tokens_then = 0.0, tokens
        self._paused: float | None = None

    def start(self) -> None:
        """Training begins."""
        self._began = self._since = time.monotonic()

    def stop(self) -> None:
        """Training ends."""
        self._seconds_before, self._began = self.seconds, None

    @property
    def tokens_of_session(self) -> int:
        """Attended tokens trained on since the run was started or resumed."""
        return self.tokens - self._tokens_before

    @property
    def seconds(self) -> float:
        """Wall time of training so far."""
        return self._seconds_before + (0.0 if self._began is None else time.monotonic() - self._began)

    def count(self, tokens: int, *, learning_rate: float, grad_norm: float) -> None:
        """Adds an update."""
        self.tokens += tokens
        self.learning_rate, self.grad_norm = learning_rate, grad_norm

    def pause(self) -> None:
        """An evaluation begins, whose time is none of the rate."""
        if self._paused is None:
            self._paused = time.monotonic()

    def go_on(self) -> None:
        """An evaluation ends."""
        if self._paused is not None:
            self._since += time.monotonic() - self._paused
            self._paused = None

    def rates(self) -> dict[str, float]:
        """Learning rate and gradient norm of the last update, and tokens a second since the last call."""
        now = time.monotonic()
        speed = (self.tokens - self._tokens_then) / max(now - self._since, 1e-9)
        self._since, self._tokens_then = now, self.tokens
        return {"learning_rate": self.learning_rate, "grad_norm": self.grad_norm, "tokens_per_second": speed}

    def progress(self) -> dict[str, float]:
        """Tokens and seconds so far."""
        return {"tokens": self.tokens, "seconds": self.seconds}
