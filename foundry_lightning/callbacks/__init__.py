"""Observers of a run, one concern each; none of them changes the mathematics."""

from foundry_lightning.callbacks.evaluate_every import NEVER, EvaluateEvery
from foundry_lightning.callbacks.history import History
from foundry_lightning.callbacks.log_settings import LogSettings
from foundry_lightning.callbacks.save_every import SaveEvery
from foundry_lightning.callbacks.stop_on_signal import StopOnSignal

__all__ = ["NEVER", "EvaluateEvery", "History", "LogSettings", "SaveEvery", "StopOnSignal"]
