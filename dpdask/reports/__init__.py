"""What a release says of itself."""

from dpdask.reports.card import release_card

__all__ = ["release_card"]
