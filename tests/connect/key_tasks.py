"""Functions for workers that are processes of their own: they import them from here."""

import hashlib

from dpdask.engine.compute import guard
from dpdask.io import encrypted


@guard
def digest_key(folder, number):
    """Return the SHA-256 of a run's key, which the task's process must get; the number makes a task of its own."""
    assert folder.read("bounds.npz") == folder.key[::-1]  # the bounds of units come in the same way
    return hashlib.sha256(folder.key + bytes(number)).hexdigest()


def held():
    """Return the names of the runs whose keys this process holds."""
    return sorted(encrypted._held, reverse=True)
