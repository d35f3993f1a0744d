"""Fits a mechanism to a pandas frame as the engine does it, with noise from a seed; and a frame of skewed numbers."""

import numpy as np
import pandas as pd
import pyarrow as pa
from e2e.helpers import continuous, discrete

from dpdask.engine.fit import fit
from dpdask.engine.source import FrameSource, find_types
from dpdask.engine.work import load, make_table_work
from dpdask.io.storage import KEY_NAME, Folder
from dpdask.streams import RunKey

KEY = RunKey.insecure(3)
SKEWED = {
    "amount": continuous([0.0, 1e6], type="float64"),
    "visits": continuous([0, 10_000_000], type="int64"),
    "group": discrete([0, 1, 2], type="int64"),
}


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


def skewed_table(n=40_000):
    """Skewed numbers, whose bounds are taken some ten thousand times too wide."""
    rng = np.random.default_rng(3)
    group = rng.integers(0, 3, n)
    amount = np.where(rng.random(n) < 0.4, 0.0, np.round(rng.lognormal(2.0 + group, 0.7, n), 2))
    visits, who = rng.geometric(0.3, n) - 1, np.arange(n) % 997
    return pd.DataFrame({"amount": amount, "visits": visits, "group": group, "who": who})
