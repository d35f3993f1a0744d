"""Surveys under interval privacy: people are asked in which range a value lies, so the collector never sees the value."""

from dpdask.survey.questions import Wording
from dpdask.survey.survey import Survey

__all__ = ["Survey", "Wording"]
