"""How an output that may hold several releases of one job knows each: by a name that only the holder of a key can compute.

A release is known by its job and its input, so that the same command on the same input finds it. The input's fingerprint depends on private
rows, and the name is published. Without a key, whoever knows all rows but one could compute the name for each possible value of the last one.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from hashlib import blake2b

from dpdask.errors import InputError, OutputError
from dpdask.io.manifest import META, list_manifests
from dpdask.io.private import hide
from dpdask.io.storage import Folder
from dpdask.jobs.publication import Publication
from dpdask.jobs.records import busy
from dpdask.jobs.run_keys import LEDGER, FolderKeys, HostKeys, LedgerKeys, RunKeys, check_run_id, say_place

Name = Callable[[bytes], str]  # of a release, from the key of its run

_FORMAT = 1
_DIGITS = 16  # of a job's digest
_PERSON = b"dpdask names"
_HINT = "restore it from a backup, or choose another output"


class ReleaseNames:
    """The names of a job's releases in one output.

    Parameters
    ----------
    job
        The job's digest.
    fingerprint
        The input's fingerprint; None if the job releases once, and its digest is the name.
    output
        The output.
    ledger_url
        The ledger that the job is charged to, if any: it keeps the key of an output in a store.

    Privacy
    -------
    The key is derived from that of the job's first run, and kept when its release is published: on a file system in a hidden folder beside the
    output (mode 0700), otherwise where run keys are kept. A file in the output tells that there is one, and where, so that a job whose key is
    elsewhere is refused: it would release the same rows again. Whoever has the key and all rows but one can find out the last one from a name.
    """

    def __init__(self, job: str, fingerprint: str | None, output: Folder, ledger_url: str | None) -> None:
        self._job, self._fingerprint, self._output, self._ledger_url = job, fingerprint, output, ledger_url
        self._about = f"{META}/names-{job[:_DIGITS]}.json"
        self._folder = hide(output, f".dpdask-names-{job[:_DIGITS]}")

    def find(self, publication: Publication) -> str:
        """Return the name of the release of this input; empty if the job has released nothing here yet.

        Parameters
        ----------
        publication
            The output: versions before 0.3.0 named releases without a key, and such a release keeps its name.

        Raises
        ------
        InputError, OutputError
            If the key is missing or elsewhere.
        """
        if self._fingerprint is None:
            return self._job
        plain = self._name(b"")
        if publication.find(plain) is not None:
            return plain
        key = self._read()
        return "" if key is None else self._name(key)

    def make(self, run_key: bytes) -> str:
        """Return the name that the release of a new run gets.

        Parameters
        ----------
        run_key
            The key of the run; it decides if the job has released nothing here yet.
        """
        return self._job if self._fingerprint is None else self._name(self._read() or _derive(run_key))

    def keep(self, release: str, run_key: bytes | None) -> None:
        """Keep the key of the names, before a release is published. Doing it twice changes nothing.

        Parameters
        ----------
        release, run_key
            The name of the release, and the key of its run; None if the key is gone.

        Raises
        ------
        TemporaryError
            If another driver has taken the run over, or has released for the first time meanwhile.
        """
        if self._fingerprint is None:
            return
        if run_key is None:
            raise busy(self._output)
        key = self._read()
        if key is None or not self._output.exists(self._about):
            keys, name = self._find_keys(), f"names-{uuid.uuid4().hex}"
            if self._output.is_local:
                self._folder.create()
            keys.write(name, key or _derive(run_key))
            about = {"format": _FORMAT, "id": name, "key": keys.place}
            if not self._output.put_new(self._about, json.dumps(about).encode()) and not self._output.is_local:
                keys.remove(name)  # another driver was faster; beside a local output there is one key, and one driver at a time
        if self._name(self._read() or b"") != release:
            raise busy(self._output)

    def forget(self) -> None:
        """Remove the key and the file that names it."""
        name, place = self._read_about()
        self._find_keys(place).remove(name)  # where the key is elsewhere, it stays
        self._output.remove(self._about)
        self._folder.remove()

    def _name(self, key: bytes) -> str:
        return blake2b(f"{self._job} {self._fingerprint}".encode(), digest_size=16, key=key).hexdigest()

    def _read(self) -> bytes | None:
        """Return the key, or None if the job has released nothing here."""
        if not self._output.exists(self._about):
            return self._find_keys().read("") if self._output.is_local else None  # the file beside the shards may be lost
        name, place = self._read_about()
        keys = self._find_keys(place)
        if keys.place != place:
            raise InputError(f"the key for the names of this job's releases is {say_place(place)}", self._output.url, "run the job there")
        key = keys.read(name)
        if key is None:
            raise InputError("the key for the names of this job's releases is missing", self._output.url, _HINT)
        return key

    def _read_about(self) -> tuple[str, str]:
        """Return the name of the key, and its place."""
        try:
            about = json.loads(self._output.read(self._about))
            if about["format"] != _FORMAT:
                raise ValueError
            return check_run_id(str(about["id"])), str(about["key"])
        except (ValueError, KeyError, TypeError):
            what = "the file that records the place of the key for this job's release names cannot be read"
            raise OutputError(what, f"{self._output.url}/{self._about}", "restore it, or use the dpdask that wrote it") from None

    def _find_keys(self, place: str = LEDGER) -> RunKeys:
        """Return the keys of a place; of a new one, the ledger's if there is one."""
        if self._output.is_local:
            return FolderKeys(self._folder)
        return LedgerKeys(self._ledger_url) if self._ledger_url is not None and place.startswith(LEDGER) else HostKeys()


def forget_unused(output: Folder, ledger_url: str | None) -> None:
    """Remove the keys of jobs that have released nothing in an output.

    Parameters
    ----------
    output
        The output.
    ledger_url
        The ledger that may keep such a key.
    """
    jobs = {found[1] for name in output.child(META).names() if (found := re.fullmatch(r"names-([0-9a-f]{16})\.json", name))}
    released = {manifest.job[:_DIGITS] for manifest in list_manifests(output)} if jobs else set()
    for job in sorted(jobs - released):
        ReleaseNames(job, "", output, ledger_url).forget()


def _derive(run_key: bytes) -> bytes:
    return blake2b(run_key, digest_size=32, person=_PERSON).digest()
