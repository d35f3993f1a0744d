"""A fitted release saved in a folder with its card. The card holds the release's digest, so both are loaded together or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from dpdask.errors import InputError, OutputError
from dpdask.io.storage import Folder

CARD = "card.json"
PAGE = "release.html"
_DIGEST = "sha256"


def save_release(place: Folder, name: str, data: bytes, card: Mapping[str, Any], page: bytes) -> None:
    """Write a release and its page, then its card, which marks the release as complete; nothing is overwritten.

    Parameters
    ----------
    place
        The folder; it is created if it is not there.
    name
        The release's file in it.
    data
        The release.
    card
        Plain values that JSON has.
    page
        The card, for people.

    Raises
    ------
    OutputError
        If a release, a page or a card is there already, or no folder can be made there.
    """
    place.create()
    for file in (name, PAGE, CARD):
        if place.exists(file):
            raise OutputError(f"a file {file!r} is there already", place.url, "remove it, or choose another folder")
    place.write(name, data)
    place.write(PAGE, page)
    place.write(CARD, json.dumps({**card, _DIGEST: {name: sha256(data).hexdigest()}}, indent=1, ensure_ascii=False).encode())


def load_release(place: Folder, name: str) -> tuple[bytes, dict[str, Any]]:
    """Return a release and its card, as `save_release` wrote them.

    Parameters
    ----------
    place
        The folder of the release.
    name
        The release's file name in it.

    Raises
    ------
    InputError
        If either is missing, or the card is invalid or of another release.
    """
    data = place.read(name, replaced=True)
    try:
        card = json.loads(place.read(CARD, replaced=True))
        digest = card.pop(_DIGEST)[name]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"this is not a card of {name!r}", CARD, "save the release again") from None
    if digest != sha256(data).hexdigest():
        raise InputError(f"this card belongs to another release than {name!r}", CARD, "restore both from one release, or save it again")
    return data, card
