"""Pretrain your own encoder from raw text, or distil one from a teacher, with PyTorch Lightning."""

from foundry_lightning.cli import from_yaml
from foundry_lightning.config import DistilMLMConfig, EncoderDistillConfig, MLMConfig
from foundry_lightning.data.datamodule import MLMDataModule
from foundry_lightning.data.pipeline import DataPipeline
from foundry_lightning.masking import MaskedBatch, mask_tokens
from foundry_lightning.mlm_head import WithMLMHead
from foundry_lightning.modules.distil_mlm import DistilMLMLitModule
from foundry_lightning.modules.encoder_distil import EncoderDistillLitModule
from foundry_lightning.modules.mlm import MLMLitModule
from foundry_lightning.students import FromBuilder, FromConfig, FromPretrained, WarmStart, warm_start_student
from foundry_lightning.trainers import DistilMLMTrainer, EncoderDistillTrainer, MLMTrainer

__version__ = "0.1.0"

__all__ = [
    "DataPipeline",
    "DistilMLMConfig",
    "DistilMLMLitModule",
    "DistilMLMTrainer",
    "EncoderDistillConfig",
    "EncoderDistillLitModule",
    "EncoderDistillTrainer",
    "FromBuilder",
    "FromConfig",
    "FromPretrained",
    "MLMConfig",
    "MLMDataModule",
    "MLMLitModule",
    "MLMTrainer",
    "MaskedBatch",
    "WarmStart",
    "WithMLMHead",
    "from_yaml",
    "mask_tokens",
    "warm_start_student",
]
