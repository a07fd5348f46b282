"""Starts a function in several processes as an external launcher would; nothing may hang."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Started:
    """Forked processes that each run `function(rank)`; imports are done, so that a start takes no time."""

    def __init__(self, function: Callable[[int], Any], num_ranks: int, folder: Path) -> None:
        self.folder = folder
        port = free_port()
        self.pids: list[int] = []
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                self._child(function, rank, num_ranks, port)
            self.pids.append(pid)

    def _child(self, function: Callable[[int], Any], rank: int, num_ranks: int, port: int) -> None:
        code = 1
        try:
            log = os.open(self.folder / f"log{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)  # pytest has put files of its own there
            sys.stderr = os.fdopen(2, "w", closefd=False)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_num_threads(1)
            if num_ranks > 1:
                os.environ.update(
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                    WORLD_SIZE=str(num_ranks),
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    NODE_RANK="0",
                )
            result = function(rank)
            torch.save(result, self.folder / f"result{rank}.pt")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self, seconds: float) -> list[int]:
        """Exit codes of the ranks (minus the signal where one killed it); fails where one still runs at the end."""
        codes: dict[int, int] = {}
        end = time.monotonic() + seconds
        while len(codes) < len(self.pids) and time.monotonic() < end:
            for pid in set(self.pids) - set(codes):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        hanging = [n for n, pid in enumerate(self.pids) if pid not in codes]
        self.kill(codes)
        assert not hanging, f"ranks {hanging} still ran after {seconds} s\n{self.logs()}"
        return [codes[pid] for pid in self.pids]

    def kill(self, ended: Any = ()) -> None:
        """Kills those that have not ended."""
        for pid in set(self.pids) - set(ended):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def logs(self) -> str:
        """What the ranks wrote."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("log*")))


def in_ranks(function: Callable[[int], Any], num_ranks: int, folder: Path, *, seconds: float = 60) -> list[Any]:
    """What `function(rank)` returns in each of the processes."""
    folder.mkdir(parents=True, exist_ok=True)
    started = Started(function, num_ranks, folder)
    codes = started.wait(seconds)
    assert codes == [0] * num_ranks, f"exit codes {codes}\n{started.logs()}"
    return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def wait_for(condition: Callable[[], bool], started: Started, *, seconds: float = 30) -> None:
    """Waits until a condition holds; fails with the ranks' output where it never does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            started.kill()
            raise AssertionError(f"waited {seconds} s in vain\n{started.logs()}")
        time.sleep(0.02)
