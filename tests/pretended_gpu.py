"""A device that is not the CPU, on a machine without one: `pretended_gpu.cpp`, which is compiled at the first use."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils import cpp_extension


def build(folder: Path) -> Path:
    """Compiles the device into a library."""
    library = folder / "pretended_gpu.so"
    source = Path(__file__).with_suffix(".cpp")
    command = [cpp_extension.get_cxx_compiler(), "-shared", "-fPIC", "-std=c++20", "-w", source, "-o", library]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    command += ["-lc10", "-ltorch_cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return library


class _Backend(ModuleType):
    """`torch.gpu`: what torch asks of a device's module."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    is_available = is_initialized

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """The operators draw from the CPU's generator."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def plug_in(library: Path) -> None:
    """Makes the device known to this process, for good; once, so in a process of its own."""
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("gpu")
    torch._register_device_module("gpu", _Backend("gpu"))
    # else `.to` makes new parameters where an old one may not turn into one of another kind of device, as CUDA's may
    torch.__future__.set_swap_module_params_on_conversion(True)


class PretendedAccelerator(Accelerator):
    """Lightning's view of the device."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to do."""

    def teardown(self) -> None:
        """Nothing to do."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("gpu", 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "gpu"


class Waits(Callback):
    """What made the host wait in each batch: on the way to the loss, to the gradients, and in the update."""

    def __init__(self) -> None:
        self.seen: list[dict[str, list[str]]] = []

    def _take(self, part: str) -> None:
        self.seen[-1][part] = torch.ops.pretended_gpu.waits()
        torch.ops.pretended_gpu.forget()

    def on_train_batch_start(self, *args: Any) -> None:
        torch.ops.pretended_gpu.forget()
        self.seen.append({})

    def on_before_backward(self, *args: Any) -> None:
        self._take("loss")

    def on_after_backward(self, *args: Any) -> None:
        self._take("gradients")

    def on_train_batch_end(self, *args: Any) -> None:
        self._take("update")


def trainer_settings(*callbacks: Callback, **others: Any) -> dict[str, Any]:
    """Arguments of a Trainer that put it on the device."""
    strategy = SingleDeviceStrategy(device=torch.device("gpu", 0))
    return {"accelerator": PretendedAccelerator(), "strategy": strategy, "callbacks": [*callbacks], **others}
