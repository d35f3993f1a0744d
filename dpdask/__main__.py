"""`python -m dpdask` is the command line."""

from __future__ import annotations

from dpdask.cli import main

main()
