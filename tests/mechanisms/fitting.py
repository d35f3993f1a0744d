"""Fits a mechanism to a pandas frame as the engine does it, with noise from a seed."""

import pyarrow as pa

from dpdask.engine.fit import fit
from dpdask.engine.source import FrameSource, find_types
from dpdask.engine.work import load, make_table_work
from dpdask.io.storage import KEY_NAME, Folder
from dpdask.streams import RunKey

KEY = RunKey.insecure(3)


def fit_frame(mechanism, frame, folder, charge=lambda: None):
    """What the barrier left, and the release as a worker reads it."""
    folder.mkdir(exist_ok=True)
    secrets = Folder(str(folder))
    secrets.write(KEY_NAME, KEY.reveal(), private=True)
    fixed = mechanism.with_rows(lambda: len(frame))
    work = make_table_work(fixed, find_types(frame), secrets)
    fitted, _ = fit(fixed, FrameSource(frame, "frame"), work, charge, insecure=True)
    return fitted, load(secrets, fitted.release_sha256, mechanism.release_type)


def records_of(release, *sizes):
    """The records of neighbouring parts of these sizes."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    parts = [
        release.batches(start, size, sum(sizes), KEY, str(part))
        for part, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    return pa.Table.from_batches([batch for part in parts for batch in part], release.types)
