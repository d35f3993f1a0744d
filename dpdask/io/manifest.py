"""The manifest: the list of a release's shards. The release is committed when the manifest appears."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dpdask.errors import OutputError
from dpdask.io.shards import Shard
from dpdask.io.storage import Folder

MANIFEST_FORMAT = 1
META = "_dpdask"
MANIFEST_NAME = f"{META}/manifest.json"
CARD_NAME = f"{META}/release.json"
PAGE_NAME = f"{META}/release.html"  # the card, for people
CROISSANT_NAME = f"{META}/croissant.json"  # the card, for catalogues of data sets
DOCUMENTS = (PAGE_NAME, CROISSANT_NAME, CARD_NAME)  # beside the shards, in the order in which they are written
SUCCESS_NAME = "_SUCCESS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The list of a release's files; safe to publish.

    Attributes
    ----------
    job
        A digest of the job, by which a finished run knows its own output.
    shards
        The shards, sorted by name.
    card_sha256
        SHA-256 of the release card.
    """

    job: str
    shards: tuple[Shard, ...]
    card_sha256: str

    @property
    def n_rows(self) -> int:
        """The released rows."""
        return sum(shard.n_rows for shard in self.shards)

    def to_bytes(self) -> bytes:
        """Return the manifest as canonical JSON; the same release gives the same bytes."""
        content: dict[str, Any] = {"format": MANIFEST_FORMAT, "rows": self.n_rows, **asdict(self)}
        return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def read(cls, folder: Folder, name: str = MANIFEST_NAME) -> Manifest | None:
        """Return the manifest of an output folder, or None if there is none.

        Parameters
        ----------
        folder
            The output folder.
        name
            The name of the manifest in it.

        Raises
        ------
        OutputError
            If there is one that cannot be read, or names a shard that is not a file of the folder itself.
        """
        if not folder.exists(name):
            return None
        try:
            content = json.loads(folder.read(name, replaced=name != MANIFEST_NAME))  # that of a folder is created once
            if content["format"] != MANIFEST_FORMAT:
                raise KeyError
            shards = tuple(Shard(**shard) for shard in content["shards"])
            if not all(_is_file_name(shard.name) for shard in shards):
                raise ValueError
            return cls(job=content["job"], shards=shards, card_sha256=content["card_sha256"])
        except (ValueError, KeyError, TypeError):
            raise OutputError("the manifest cannot be read", name, "choose another output, or remove this one") from None


def _is_file_name(name: object) -> bool:
    """Return whether a name leads to no other folder; every output has its shards beside each other."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\"} & set(name)


def list_manifests(folder: Folder, but: str = "") -> list[Manifest]:
    """Return the manifests of all releases in an output folder.

    Parameters
    ----------
    folder
        The output folder.
    but
        The name of a manifest that is not committed yet.

    Raises
    ------
    OutputError
        If one of them cannot be read.
    """
    names = (f"{META}/{name}" for name in folder.child(META).names() if name.startswith("manifest"))
    return [found for found in (Manifest.read(folder, name) for name in names if name != but) if found is not None]


def count_missing(folder: Folder, manifests: Sequence[Manifest]) -> int:
    """Return how many shards of manifests an output folder lacks; those that a listing lacks are looked for, since it may be an earlier one.

    Parameters
    ----------
    folder
        The output folder.
    manifests
        Of its releases.
    """
    names = set(folder.names())
    return sum(shard.name not in names and not folder.exists(shard.name) for manifest in manifests for shard in manifest.shards)
