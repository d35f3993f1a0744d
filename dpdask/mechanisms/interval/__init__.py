"""Interval privacy: each value becomes a random range that contains it."""
