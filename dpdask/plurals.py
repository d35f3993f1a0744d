"""Numbers with their nouns, in the singular or the plural."""

from __future__ import annotations


def say_count(n: int, noun: str) -> str:
    """Return a number with its noun.

    Parameters
    ----------
    n
        The number.
    noun
        The noun in the singular, with a plural in s.

    Examples
    --------
    >>> say_count(1, "shard"), say_count(1200, "shard")
    ('1 shard', '1,200 shards')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
