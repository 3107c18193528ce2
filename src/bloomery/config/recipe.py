"""The recipe: the whole description of a run, one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

from bloomery.config.backup import BackupSection
from bloomery.config.data import DataSection
from bloomery.config.elastic import ElasticSection
from bloomery.config.keeping import CheckpointSection, EvaluateSection, GuardSection, LogSection
from bloomery.config.model import ModelSection
from bloomery.config.optim import LossSection, OptimSection, ScheduleSection
from bloomery.config.parallel import ParallelSection
from bloomery.config.run import RunSection
from bloomery.config.train import TrainSection


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every section of a recipe. A function takes the section it uses, never the whole."""

    run: RunSection
    model: ModelSection
    data: DataSection
    train: TrainSection
    optim: OptimSection
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    loss: LossSection = field(default_factory=LossSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    backup: BackupSection = field(default_factory=BackupSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    log: LogSection = field(default_factory=LogSection)
    guard: GuardSection = field(default_factory=GuardSection)
    elastic: ElasticSection = field(default_factory=ElasticSection)
