"""What Lightning and transformers say of themselves at each start is left out; warnings and errors stay."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

_NO_NEWS = (
    ".*LeafSpec.*deprecated",
    ".*in eval mode at the start of training",  # a teacher always is
    ".*have overridden `on_before_batch_transfer`",  # meant so: EncoderModule looks at every batch, a user's own too
    "LightningCLI's args parameter",  # `export` calls it with its own
    ".*is smaller than the logging interval",  # updates are counted over epochs, and the last is logged
    "Experiment logs directory .* exists",  # the metrics there are kept
)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Inside, Lightning tells no devices, tips and reasons to stop; a level that the user has set for it stays."""
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    loggers = [logger for logger in loggers if logger.level == logging.INFO]  # Lightning's own choice
    with warnings.catch_warnings(), no_progress_bar():
        for message in _NO_NEWS:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger in loggers:
                logger.setLevel(logging.INFO)


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Models of this size are read and written at once; transformers would draw a bar on stderr."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


@contextmanager
def quiet_onnx() -> Iterator[None]:
    """Leaves out what torch says of its own exporter and of packages it does not find."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Leaves out what transformers says of a head that is not in the folder, or not wanted."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with no_progress_bar():
            yield
    finally:
        transformers_logging.set_verbosity(level)
