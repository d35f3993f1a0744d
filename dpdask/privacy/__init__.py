"""What is promised, in numbers and in words."""

from dpdask.privacy.budget import Budget, UnitColumn, central_guarantee_text, guarantee_text, split_epsilon

__all__ = ["Budget", "UnitColumn", "central_guarantee_text", "guarantee_text", "split_epsilon"]
