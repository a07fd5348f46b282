"""Is the base any good? Encoders compared on labelled data, beside controls that learn nothing from raw text."""

from foundry_lightning.probe.compare import Comparison, probe
from foundry_lightning.probe.encoders import FineTuning

__all__ = ["Comparison", "FineTuning", "probe"]
