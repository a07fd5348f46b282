"""A run that is told to end finishes its window, saves, and ends on all ranks with the same exit code."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

from foundry_lightning.callbacks.launched import received, send
from foundry_lightning.callbacks.save_every import SaveEvery
from foundry_lightning.data.loader import host_group


class Interrupted(SystemExit, KeyboardInterrupt):
    """A run ended by SIGINT: caught as a KeyboardInterrupt, and the exit code of a script is 130."""


class StopOnSignal(Callback):
    """Ends a fit after SIGTERM or SIGINT to any rank: the window is finished, a checkpoint saved, the run over.

    The signal is made known to all ranks once per update, on the host. An evaluation due at that update is left out:
    whoever sends SIGTERM soon sends SIGKILL. A second SIGINT ends the process at once. After `fit`,
    `raise_if_stopped` gives the exit code. Under SLURM with Lightning's requeueing, Lightning's handlers stay.

    Args:
        saver: Writes the checkpoint; None: the Trainer's own `SaveEvery`, and without one nothing is written.

    Attributes:
        stopped_by: Number of the signal that ended the last fit, on all ranks alike; 0 where none did.
    """

    def __init__(self, saver: SaveEvery | None = None) -> None:
        self.saver = saver
        self.stopped_by = 0
        self._received = 0
        self._active = False
        self._last_step = 0
        self._before: dict[int, Any] = {}

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Puts the handlers in place."""
        self.stopped_by = self._received = 0
        environment = trainer._accelerator_connector.cluster_environment
        self._active = not (isinstance(environment, SLURMEnvironment) and environment.auto_requeue)
        if not self._active:
            return
        # Lightning registers its own right after this hook: under DDP they start a broadcast in the handler, which
        # hangs where one rank gets the signal, and a broadcast at every batch, for which the host waits
        trainer._signal_connector.__dict__["register_signal_handlers"] = lambda: None
        trainer.fit_loop.epoch_loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._take_note)
            if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
                # a started rank gets SIGINT when the process that started it ends, once for each of its threads: the
                # second would end the rank before it has saved; SIGTERM may come several times
                _prctl_pr_set_pdeathsig(signal.SIGTERM)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        self._received = max(self._received, number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the system's, which also ends a process stuck in C code
        # no print: the signal may have come in the middle of one
        os.write(2, b"\nstopping after this update" + b"; Ctrl-C again stops at once\n" * (number == signal.SIGINT))

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Starts from the updates already done."""
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an update, ends the run where any rank got a signal."""
        if not self._active or trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        received = self._received
        if trainer.world_size > 1:
            largest = torch.tensor(received)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=host_group())
            received = int(largest)
        if not received:
            return
        self.stopped_by = received
        trainer.should_stop = True  # SaveEvery, which Lightning calls after all others, saves at a run's last update
        trainer.limit_val_batches = 0  # else Lightning evaluates before it stops
        savers = [callback for callback in trainer.callbacks if isinstance(callback, SaveEvery)]  # type: ignore[attr-defined]
        if not savers and self.saver is not None:
            self.saver.save(trainer)

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Puts the former handlers back."""
        self._restore(trainer)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Puts the former handlers back, and lets them have a signal that came after the last update."""
        unheard = self._received if self._active and not self.stopped_by else 0
        self._restore(trainer)
        self._received = 0
        if unheard:
            os.kill(os.getpid(), unheard)

    def _restore(self, trainer: lightning.Trainer) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
        trainer._signal_connector.__dict__.pop("register_signal_handlers", None)
        trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
        self._active = False

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Hands the signal's number to the process that started the ranks."""
        send(trainer, stopped_by=[self.stopped_by])

    def receive(self, trainer: lightning.Trainer) -> None:
        """Takes the signal's number of rank 0, where it was a process of its own."""
        if found := received(trainer, "stopped_by"):
            self.stopped_by = int(found[0][0])

    def raise_if_stopped(self, trainer: lightning.Trainer) -> None:
        """Ends the program where a signal ended the fit.

        Raises:
            SystemExit: 143 after SIGTERM.
            Interrupted: after SIGINT; exit code 130.
        """
        if not self.stopped_by:
            return
        launcher = trainer.strategy.launcher
        if launcher is not None:
            # Lightning's watcher kills rank 0 when it sees another rank end with a code that is not 0
            getattr(launcher, "procs", []).clear()
        code = 128 + self.stopped_by
        raise Interrupted(code) if self.stopped_by == signal.SIGINT else SystemExit(code)
