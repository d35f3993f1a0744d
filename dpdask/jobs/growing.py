"""The state and the publication of a growing table: its first release like any other's, each later one as further shards in place."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dpdask.engine.work import RELEASE_NAME
from dpdask.engine.write import Staging
from dpdask.errors import InputError, OutputError
from dpdask.io.faults import storage_faults
from dpdask.io.fragments import InputTable, discover
from dpdask.io.manifest import CARD_NAME, META, SUCCESS_NAME, Manifest
from dpdask.io.storage import Folder
from dpdask.jobs.records import busy
from dpdask.jobs.series import Kept, KeptFolder, Size, choose_new, count_manifests, name_manifest, select
from dpdask.jobs.series_card import describe_release, describe_series, sum_series
from dpdask.jobs.spec import Job
from dpdask.jobs.state import Progressed, RunState
from dpdask.jobs.tables import JobTable, check_apart, open_table
from dpdask.mechanisms.card import Card
from dpdask.privacy.series import Series, derive_salt, name_series

SUMMARY_NAME = f"{META}/series.json"


class GrowingState(RunState):
    """The hidden folder of a growing output's unfinished run, and what the series keeps.

    Parameters
    ----------
    output, ledger_url
        As for `RunState`.
    """

    def __init__(self, output: Folder, ledger_url: str | None = None) -> None:
        super().__init__(output, ledger_url)
        self.kept = KeptFolder(output, ledger_url)
        self._next: Kept | None = None
        self._epsilon: float | None = None

    @property
    def number(self) -> int:
        """The number of the next release: how many there are."""
        return count_manifests(self.output)

    def is_released(self) -> bool:
        """Return whether the unfinished run has published its release; without one, whether there is a release."""
        content = self._records.read()
        return self.number > (0 if content is None else int(content.get("number", 0)))

    def check_output(self, job: Job) -> None:
        """Check that the output is this job's.

        Raises
        ------
        OutputError
            If it is something else.
        """
        manifest = Manifest.read(self.output)
        if manifest is None and not self.is_free():
            raise OutputError("this output exists and is not this run's", job.file.output.path, "choose another output.path, or remove it")
        if manifest is not None and manifest.job != job.digest:
            what = "this output holds another job's release; a growing table keeps its input, schema, privacy and mechanism"
            raise OutputError(what, job.file.output.path, "start a new output: choose another output.path")

    def read_kept(self) -> Kept | None:
        """Return the record of the newest release; None before the first.

        Raises
        ------
        InputError
            If it is missing, or its key is elsewhere.
        """
        number = self.number
        return self.kept.read(self.output.read(name_manifest(number - 1)), number - 1) if number else None

    def find_fitted(self) -> bytes | None:
        """Return the fitted release of the series; None before the first release."""
        kept = self.read_kept()
        return None if kept is None else self.kept.load_release(kept)

    def choose(self, table: InputTable, unfinished: Progressed | None) -> InputTable:
        """Return the part of the table that the next release holds.

        Parameters
        ----------
        table
            The whole table.
        unfinished
            The unfinished release, if any: it goes on with the files that it began with.

        Raises
        ------
        InputError
            If a released file is gone, rewritten or copied, or a file of the unfinished release changed.
        """
        if unfinished is not None:
            return select(table, unfinished.fragments)
        kept = self.read_kept()
        return table if kept is None else choose_new(table, kept)

    def extend(self, job: Job, table: InputTable) -> Job:
        """Return the job of the next release; before the first release, the job itself.

        Parameters
        ----------
        job
            The job.
        table
            What is released.
        """
        kept = self.read_kept()
        if kept is None:
            return job
        return job.extend(Series(id=kept.id, release=kept.release, previous=kept.head, head=kept.add(table.fragments).head))

    def place(self, job: Job, reached: Progressed, table: InputTable) -> Job:
        """Return the job of a release that has begun, with its place in the series; prepare the record that it will leave.

        Parameters
        ----------
        job
            The job.
        reached
            The run of the release.
        table
            What is released.
        """
        kept = self.read_kept()
        if kept is None:
            key = self.keys.read(reached.run_id)
            assert key is not None
            kept = Kept(id=name_series(job.digest, reached.run_id), salt=derive_salt(key).hex(), release="", files=(), sizes=())
            job = job.extend(Series(id=kept.id, head=kept.add(table.fragments).head), continued=False)
        else:
            job = self.extend(job, table)
        self._epsilon, self._next = job.epsilon, kept.add(table.fragments)
        return job

    def describe(self, job: Job, card: Card) -> Card:
        """Return the card of a release with its place in the series.

        Parameters
        ----------
        job
            The job of the release.
        card
            The card as any job has it.
        """
        assert self._next is not None
        costs = [*(size.epsilon for size in self._next.sizes), self._epsilon]
        return card.model_copy(update={"series": describe_release(len(costs) - 1, costs, job.file.privacy)})

    def staging(self, run_id: str) -> Staging:
        """Return where a run stages its shards; those of later releases have the release's number in their names."""
        staging = super().staging(run_id)
        number = self.number
        return replace(staging, run=_name_release(number)) if self.output.is_local and number else staging

    def publish(self, reached: Progressed, manifest: Manifest, card: bytes) -> None:
        """Make a release appear; see `RunState.publish`. A later one appears by renames on a file system, and in place in a store."""
        assert self._next is not None
        size = Size(n_rows=manifest.n_rows, n_shards=len(manifest.shards), epsilon=self._epsilon)
        kept = replace(self._next, release=reached.release_sha256, sizes=(*self._next.sizes, size))
        if reached.number == 0:
            key = self.keys.read(reached.run_id)
            assert key is not None
            self.kept.begin(key, kept.id, self.secrets(reached.run_id).read(RELEASE_NAME))
        self.kept.write(kept, manifest.to_bytes())
        if not self.holds_run():
            raise busy(self.output)  # another driver has taken the run over, and perhaps removed it
        if reached.number == 0:
            super().publish(reached, manifest, card)
        else:
            self._publish_later(reached, manifest, card)
        self.finish()

    def _publish_later(self, reached: Progressed, manifest: Manifest, card: bytes) -> None:
        staged = self.staging(reached.run_id).shards
        if self.output.is_local:
            self.write(replace(reached, stage="staged"))
            staged.level_times()
            with storage_faults(self.output.url, writing=True):
                for shard in manifest.shards:
                    (staged.local_path / shard.name).replace(self.output.local_path / shard.name)
        self.output.write(_name_card(reached.number), card)
        if not self.output.put_new(name_manifest(reached.number), manifest.to_bytes()):
            raise OutputError("another run has released these rows into this output", self.output.url, "run the job again")
        self.output.write(SUCCESS_NAME, b"")

    def finish(self) -> None:
        """Write what an interrupted publication left out after its manifest: `_SUCCESS` and the card that sums up the series."""
        super().finish()
        number = self.number
        if not number or self._read_summary() == number:
            return
        manifest = self.output.read(name_manifest(number - 1))
        kept = self.kept.read(manifest, number - 1)
        first = Card.read(self.output.read(CARD_NAME), CARD_NAME)
        self.output.write(SUCCESS_NAME, b"")
        self.output.write(SUMMARY_NAME, first.model_copy(update={"series": describe_series(kept.sizes, first)}).to_bytes())
        self.kept.sweep(manifest, number - 1)

    def _read_summary(self) -> int | None:
        """Return how many releases the summary knows; None if there is none."""
        if not self.output.exists(SUMMARY_NAME):
            return None
        with suppress(ValueError, KeyError, TypeError):
            return int(json.loads(self.output.read(SUMMARY_NAME))["series"]["releases"])
        return None

    def remove(self) -> None:
        """Remove the run, and what it has put into the output unless that is released; see `RunState.remove`."""
        if not self.holds_run():
            return  # it is another driver's now
        number, released = self.number, self.is_released()
        if not released and number:
            self._withdraw(number)
        super().remove()
        if not released and not number:
            self.kept.remove()

    def _withdraw(self, number: int) -> None:
        if self.output.is_local:
            for name in self.output.names():
                if name.endswith(f"-{_name_release(number)}.parquet"):
                    self.output.remove(name)
        self.output.remove(_name_card(number))


def open_next(job: Job, state: GrowingState, unfinished: Progressed | None) -> JobTable:
    """Return what the next release holds, with the mechanism that releases it; a table without fragments if nothing is new.

    Parameters
    ----------
    job
        The job.
    state
        Its state.
    unfinished
        The unfinished release, if any.
    """
    continued = state.number > 0
    versions: set[str] = set()

    def choose(table: InputTable) -> InputTable:
        chosen = state.choose(table, unfinished)
        versions.update(fragment.version for fragment in chosen.fragments)
        return chosen

    opened = open_table(job.extend(None) if continued else job, state.folder, choose)
    if continued and job.mechanism.public_path is not None and versions:
        with suppress(InputError):  # the public table was read by the first release, and may be gone
            check_apart(discover(job.mechanism.public_path, job.schema), versions)
    return opened


def open_growing(job: Job) -> tuple[Job, JobTable, dict[str, Any]]:
    """Return the next release of a growing table for its plan: its job, what it holds, and what `Plan.series` says.

    Raises
    ------
    OutputError
        If the output is another job's.
    """
    state = GrowingState(Folder(job.output_url), None if job.ledger is None else job.ledger.url)
    state.check_output(job)
    reached = state.read()
    opened = open_next(job, state, reached if reached is not None and not state.is_released() else None)
    kept, following = state.read_kept(), state.extend(job, opened.table)
    sizes = () if kept is None else kept.sizes
    unit = "row" if job.file.privacy is None else job.file.privacy.unit
    told: dict[str, Any] = {
        "releases": len(sizes),
        "released_rows": sum(size.n_rows for size in sizes),
        "released_files": 0 if kept is None else len(kept.files),
        "new_files": len({fragment.url for fragment in opened.table.fragments}),
        "new_rows": opened.table.n_rows,
        "epsilon": following.epsilon,
        "series_epsilon": sum_series([*(size.epsilon for size in sizes), following.epsilon], unit),
    }
    return following, opened, told


def _name_release(number: int) -> str:
    return f"r{number:05d}"  # the first release's shards end in plain numbers


def _name_card(number: int) -> str:
    return CARD_NAME if number == 0 else f"{META}/release-{number:05d}.json"


def open_state(output: Folder, ledger_url: str | None = None, *, growing: bool | None = None) -> RunState:
    """Return the state of an output.

    Parameters
    ----------
    output
        The output.
    ledger_url
        The ledger that its job is charged to, if it is known.
    growing
        Whether the table grows; None if only the output can tell.
    """
    if growing is None:
        growing = KeptFolder(output, ledger_url).exists()
    return (GrowingState if growing else RunState)(output, ledger_url)
