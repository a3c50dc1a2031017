"""Training: data in shards, a step that counts tokens, optimizers, checkpoints that resume bit for bit, ranks.

Place: on ``model`` and ``ops``; ``microllm train`` and ``lab`` call it. Does not serve, and does not print.
"""

from microllm.training.config import LoraConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from microllm.training.pack import PackConfig, pack_data
from microllm.training.trainer import Trainer, train

__all__ = [
    "LoraConfig", "OptimizerConfig", "PackConfig", "ScheduleConfig", "TrainConfig", "Trainer", "pack_data", "train",
]  # fmt: skip
