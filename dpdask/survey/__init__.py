"""Interval privacy without a collector who sees a value: people are asked in which range it lies, and answers become a release."""

from dpdask.survey.survey import Survey
from dpdask.survey.wording import Wording

__all__ = ["Survey", "Wording"]
