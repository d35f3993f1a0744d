"""What the kinds that start workers share: packages that are installed only for them, and the number of workers."""

from __future__ import annotations

import importlib
from typing import Any

from dpdask.errors import SpecError


def import_extra(module: str, kind: str) -> Any:
    """Return a module that is installed only for one kind of cluster.

    Parameters
    ----------
    module
        Its name.
    kind
        The kind, which is also the name of the extra.

    Raises
    ------
    SpecError
        If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SpecError(f"the package {module.partition('.')[0]} is not installed", f"cluster.kind {kind}", f"install dpdask[{kind}]") from None
