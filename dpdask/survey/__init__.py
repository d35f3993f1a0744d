"""Surveys under interval privacy: people are asked in which range a value lies, so the collector never sees the value."""

from dpdask.survey.survey import Survey
from dpdask.survey.wording import Wording

__all__ = ["Survey", "Wording"]
