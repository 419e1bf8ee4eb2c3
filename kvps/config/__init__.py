"""The settings of a job. Command lines and docs/settings.md are generated from their table."""

from kvps.config.job_config import JobConfig, takes_settings
from kvps.config.job_settings import JobSettings
from kvps.config.metadata import Metadata
from kvps.config.samples import division_of
from kvps.config.settings import AUTO, SPECS, UncheckedConfig
from kvps.config.specs import Spec

__all__ = [
    "AUTO",
    "SPECS",
    "JobConfig",
    "JobSettings",
    "Metadata",
    "Spec",
    "UncheckedConfig",
    "division_of",
    "takes_settings",
]
