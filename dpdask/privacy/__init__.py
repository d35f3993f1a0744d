"""What is promised, in numbers and in words."""

from dpdask.privacy.budget import Budget, guarantee_text, split_epsilon

__all__ = ["Budget", "guarantee_text", "split_epsilon"]
