"""What an analyst does with a release, from its card and without private data."""

from dpdask.inference.debias import MAX_CONDITION, Estimate, ReleasedColumn

__all__ = ["MAX_CONDITION", "Estimate", "ReleasedColumn"]
