"""The audit of a job: what its mechanism claims beside what is found; no row is read."""

from __future__ import annotations

import hashlib
from typing import Any

from dpdask.errors import InputError, OutputError
from dpdask.io.storage import Folder
from dpdask.jobs.growing_folder import name_release
from dpdask.jobs.growing_table import open_growing
from dpdask.jobs.keys import raises_in_keys
from dpdask.jobs.publication import Publication
from dpdask.jobs.spec import Job
from dpdask.jobs.stores import opens_stores
from dpdask.jobs.tables import open_table
from dpdask.mechanisms.auditing import audit_mechanism
from dpdask.mechanisms.card import Card


@raises_in_keys
@opens_stores
def audit_job(job: Job, *, n_runs: int = 20_000) -> dict[str, Any]:
    """Return, for each column and each central measurement of a job, what is claimed and what is found.

    Parameters
    ----------
    job
        The job; its input's footers give the columns' types.
    n_runs
        How often each central measurement is drawn, on each of two neighbouring inputs.

    Returns
    -------
    `name`, and the entries of `audit_mechanism`.

    Raises
    ------
    InputError, DataError
        If the input cannot be found, or does not fit the schema.
    """
    opened = open_table(job, Folder(job.output_url))
    card = _card(job, opened.table.fingerprint)
    return {"name": job.file.name, **audit_mechanism(opened.mechanism, opened.work.columns, card, n_runs=n_runs)}


def _card(job: Job, fingerprint: str) -> dict[str, Any] | None:
    """Return the card of a finished job's own release of the input, or None if there is none or it was changed."""
    output, target = Folder(job.output_url), job.file.output.target
    publication: Publication = target.open(output)
    if job.file.growing:
        publication = open_growing(target, output, job.digest)
    try:
        release = name_release(job.digest, 0) if job.file.growing else job.name_releases(fingerprint).find(publication)
        manifest = publication.find(release)
        data = b"" if manifest is None else publication.read_card(release)
        return Card.read(data, "the card").to_dict() if manifest is not None and hashlib.sha256(data).hexdigest() == manifest.card_sha256 else None
    except (InputError, OutputError):
        return None
