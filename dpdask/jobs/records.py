"""What an unfinished run has reached, and which driver may go on with it: a locked file on a file system, numbered records in a store.

A store has neither locks nor renames, but it can create a file only if it does not exist. So each
record of a run is a new file with the next number, and names the driver that wrote it. A driver
whose number is taken has lost the run to another one, and stops.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from dpdask.errors import DpdaskError, InputError, MissingError, OutputError, TemporaryError
from dpdask.io.folders import remove_files
from dpdask.io.storage import LOCK, Folder, PrivateFolder, storage_faults
from dpdask.startup import finish_first, import_locks

fcntl = import_locks()
STATE_FORMAT = 2
RECORD = "run.json"

BEAT_SECONDS = 5.0
LEASE_SECONDS = 30.0

Content = dict[str, Any]


def busy(output: Folder) -> TemporaryError:
    """Return the error of a driver that does not have the run, or has it no more."""
    return TemporaryError("another run is writing this output", output.url, "wait for it to end")


class LockedRecord:
    """One file that is replaced, in a folder whose lock the driver holds."""

    def __init__(self, folder: PrivateFolder, output: Folder) -> None:
        self._folder, self._output = folder, output
        self._locked = False

    def read(self) -> Content | None:
        """Return the record, or None."""
        return _parse(self._folder, RECORD) if self._folder.exists(RECORD) else None

    def write(self, content: Content) -> None:
        """Replace the record."""
        self._folder.write(RECORD, _dump(content), private=True)

    def holds(self) -> bool:
        """Return True: the lock is kept until the process ends."""
        return True

    def is_overtaken(self) -> bool:
        """Return False: nobody else can have the lock."""
        return False

    def begin(self) -> None:
        """Remove what an interrupted removal left: it holds the noise of another key."""
        for name in sorted(self._folder.names(), key=lambda name: name != RECORD):
            if name != LOCK:
                self._folder.child(name).remove()

    def clear(self) -> None:
        """Remove the folder; if this driver has it locked, all that is in it, and the rest with the lock."""
        if self._locked:
            self.begin()
        else:
            self._folder.remove()

    def check(self) -> None:
        """Check that there can be a run, as far as that can be seen without writing."""
        self._check_names(self._folder.names())
        self._folder.check_creatable()

    def _check_names(self, found: Sequence[str]) -> None:
        if found and LOCK not in found:
            what = (
                "this folder has the name of this output's hidden folder, and holds something else"
            )
            raise OutputError(what, self._folder.url, "move it away, or choose another output.path")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other drivers of this file system away from the run, and use the folder by one descriptor."""
        with ExitStack() as opened:
            descriptor = self._folder.open_made()
            opened.callback(os.close, descriptor)
            self._check_names(os.listdir(descriptor))  # noqa: PTH208 - by descriptor
            try:
                with storage_faults(self._folder.url):
                    lock = os.open(
                        LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=descriptor
                    )
            except InputError:
                raise busy(self._output) from None  # it ended, and removed the folder, just now
            opened.callback(os.close, lock)
            if not _lock_file(lock, descriptor):
                raise busy(self._output)
            opened.enter_context(self._folder.hold(descriptor))
            self._locked = True
            try:
                yield
            finally:
                self._locked = False
                with suppress(Exception):  # an empty folder decides nothing
                    if self._folder.names() == [LOCK]:
                        self._folder.remove()


def _lock_file(lock: int, folder: int) -> bool:
    """Lock a file and return whether that worked, and the file is still in its folder: a run that ends removes it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), os.stat(LOCK, dir_fd=folder))
    except (BlockingIOError, FileNotFoundError):
        return False


class _Newest(NamedTuple):
    """The newest record of a chain: its number, the chain's name, the driver that wrote it (None: it let go), and the run's content."""

    number: int
    chain: str
    owner: Content | None
    content: Content | None


class NumberedRecords:
    """A chain of files in a store, each created once; the first is `run.json`, and its number is 0.

    A driver has the run from the record in which it says so, as long as it shows a sign of life: a
    file that it writes again every few seconds. Another driver takes the run over by the next
    record, after it has seen no sign for `LEASE_SECONDS`, or at once if the owner was a process of
    its own machine that has ended.
    """

    def __init__(self, folder: Folder, output: Folder) -> None:
        self._folder, self._output = folder, output
        self._me = {"id": uuid.uuid4().hex, **_identify_process()}
        self._held: _Newest | None = None
        self._lost = False  # whether another driver was seen to have taken the run

    def read(self) -> Content | None:
        """Return the content of the newest record that has one; or None."""
        newest = self._find_newest()
        return None if newest is None else newest.content

    def write(self, content: Content) -> None:
        """Create the next record; `TemporaryError` if another driver has the run."""
        self._append(content, self._me)

    def holds(self) -> bool:
        """Return whether the newest record is still this driver's; False also if a store does not answer."""
        held, newest = self._held, None
        with suppress(DpdaskError):
            newest = self._find_newest()
        return (
            held is not None
            and newest is not None
            and (newest.chain, newest.number) == (held.chain, held.number)
        )

    def is_overtaken(self) -> bool:
        """Return whether another driver has taken the run over, or has ended it; False if the store does not answer."""
        with suppress(DpdaskError):
            newest = None if self._held is None else self._find_newest()
            self._lost |= self._held is not None and (
                newest is None
                or (newest.chain, newest.number) != (self._held.chain, self._held.number)
            )
        return self._lost

    def begin(self) -> None:
        """Remove what an interrupted removal left: it holds the noise of another key."""
        if self._held is None:
            self._acquire()  # an earlier run was removed within this lock
        elif not self.holds():
            raise busy(self._output)
        self._remove_all_but_chain(_parse(self._folder, RECORD))

    def check(self) -> None:
        """Check that files can be created once here; only a write shows what else a store allows."""
        self._folder.check_creatable()

    @finish_first()  # a run whose records are half removed has an owner that nobody takes away
    def clear(self) -> None:
        """Remove all files, `run.json` last: until then no other driver can begin. Files of a run that began since are left alone."""
        first = _parse(self._folder, RECORD)
        if first is None or (self._held is not None and first.get("chain") != self._held.chain):
            return
        self._held = None
        self._remove_all_but_chain(first)
        mine = (f"run-{first.get('chain')}-", "beat-")
        remove_files(self._folder, [each for each in self._folder.names() if each.startswith(mine)])
        again = _parse(self._folder, RECORD)
        if again is not None and again.get("chain") == first.get("chain"):
            remove_files(self._folder, [RECORD])

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Have the run, and show signs of life, until the block ends."""
        ended = threading.Event()
        beat = threading.Thread(target=self._beat, args=(ended,), daemon=True, name="dpdask-beat")
        try:
            self._acquire()
            beat.start()
            yield
        finally:
            ended.set()
            with finish_first():
                if self._held is not None:  # let the next driver go on at once, or it waits
                    with suppress(Exception):
                        self._append(self._held.content, None)
                self._held = None
                if beat.ident is not None:
                    beat.join()
                    with suppress(Exception):
                        remove_files(self._folder, [f"beat-{self._me['id']}"])

    def _acquire(self) -> None:
        newest = self._find_newest()
        if newest is None:
            self._begin_chain()
            return
        owner = newest.owner
        if owner is not None and not _has_ended(owner) and self._is_alive(str(owner["id"])):
            raise busy(self._output)
        self._held = newest
        self._append(newest.content, self._me)

    @finish_first()
    def _begin_chain(self) -> None:
        chain = uuid.uuid4().hex
        record = {"format": STATE_FORMAT, "chain": chain, "owner": self._me, "run": None}
        if not self._folder.put_new(RECORD, _dump(record)):
            raise busy(self._output)
        self._held = _Newest(number=0, chain=chain, owner=self._me, content=None)

    def _is_alive(self, owner: str) -> bool:
        """Return whether a driver shows a sign of life, as soon as it does, or not at all for `LEASE_SECONDS`."""
        before, deadline = self._read_beat(owner), time.monotonic() + LEASE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 5)
            now = self._read_beat(owner)
            if now != before:
                return (
                    True  # or it ended and removed the file: then running again finds what it left
                )
        newest = self._find_newest()
        # another driver was faster
        return newest is None or newest.owner is None or newest.owner["id"] != owner

    def _read_beat(self, owner: str) -> bytes | None:
        try:
            return self._folder.read(f"beat-{owner}", replaced=True)
        except MissingError:
            return None

    def _beat(self, ended: threading.Event) -> None:
        number = 0
        while not ended.is_set():
            # a sign that is missed does no harm unless many are; a run that is lost is noticed
            # when it is written
            with suppress(Exception):
                self._folder.write(f"beat-{self._me['id']}", str(number).encode())
            number += 1
            ended.wait(BEAT_SECONDS)

    @finish_first()
    def _append(self, content: Content | None, owner: Content | None) -> None:
        held = self._held
        if held is None:
            raise busy(self._output)
        number = held.number + 1
        record = {"format": STATE_FORMAT, "chain": held.chain, "owner": owner, "run": content}
        if not self._folder.put_new(_record_name(held.chain, number), _dump(record)):
            self._held, self._lost = None, True
            raise busy(self._output)
        first = _parse(self._folder, RECORD)
        # it was removed, and perhaps begun anew, while this driver slept
        if first is None or first.get("chain") != held.chain:
            self._held, self._lost = None, True
            self._folder.remove(_record_name(held.chain, number))
            raise busy(self._output)
        self._held = _Newest(number=number, chain=held.chain, owner=owner, content=content)

    def _find_newest(self) -> _Newest | None:
        first = _parse(self._folder, RECORD)
        if first is None:
            return None
        chain, held = str(first.get("chain")), self._held
        if held is not None and held.chain == chain:  # no record before this one counts
            number, newest = held.number, {"owner": held.owner, "run": held.content}
        elif (listed := self._list_newest(chain, first)) is None:
            return None
        else:
            number, newest = listed
        # the listing was an earlier one
        while (later := _parse(self._folder, _record_name(chain, number + 1))) is not None:
            number, newest = number + 1, later
        return _Newest(
            number=number, chain=chain, owner=newest.get("owner"), content=newest.get("run")
        )

    def _list_newest(self, chain: str, first: Content) -> tuple[int, Content] | None:
        """Return the number of the newest record that a listing has, and the record; None if it is gone."""
        found = (
            re.fullmatch(rf"run-{re.escape(chain)}-(\d{{6,9}})\.json", name)
            for name in self._folder.names()
        )
        number = max((int(match[1]) for match in found if match), default=0)
        newest = first if number == 0 else _parse(self._folder, _record_name(chain, number))
        return None if newest is None else (number, newest)

    def _remove_all_but_chain(self, first: Content | None) -> None:
        chain = None if first is None else f"run-{first.get('chain')}-"
        kept = {RECORD, f"beat-{self._me['id']}"}
        for name in self._folder.names():
            if name not in kept and (chain is None or not name.startswith(chain)):
                self._folder.child(name).remove()


RunRecords = LockedRecord | NumberedRecords


def is_left_over(name: str) -> bool:
    """Return whether a file of a hidden folder without a run tells of no driver that is about to begin one."""
    return name not in (LOCK, RECORD) and not name.startswith(("run-", "beat-"))


def _record_name(chain: str, number: int) -> str:
    return f"run-{chain}-{number:06d}.json"


def _dump(content: Content) -> bytes:
    return json.dumps(content).encode()


def _parse(folder: Folder, name: str) -> dict[str, Any] | None:
    """Return a record, or None if there is none: a run that was just now committed or aborted elsewhere has none."""
    try:
        content = json.loads(folder.read(name))
        if not isinstance(content, dict) or content.get("format") != STATE_FORMAT:
            raise ValueError
    except MissingError:
        return None
    except ValueError:
        raise unreadable(folder) from None
    return content


def unreadable(folder: Folder) -> OutputError:
    """Return the error for a run whose record is of another version, or broken."""
    return OutputError(
        "the state of an unfinished run cannot be read",
        folder.url,
        "`dpdask abort` it and run again",
    )


def _identify_process() -> dict[str, Any]:
    """Return what tells this process from all others, where the system tells: the machine's start, its process space, number and start."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # the user too, since a hardened system tells nothing of another user's processes
        place = f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
        return {
            "machine": blake2b(place.encode(), digest_size=16).hexdigest(),
            "pid": os.getpid(),
            "started": _read_stat(os.getpid())[19],
        }
    except OSError:
        return {"machine": None}


def _read_stat(pid: int) -> list[str]:
    """Return what the system tells of a process: first its state, and 19 fields later its start."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _has_ended(owner: Content) -> bool:
    """Return whether a driver was a process of this user on this machine and has ended; False if that cannot be told."""
    mine = _identify_process()
    if mine["machine"] is None or owner.get("machine") != mine["machine"]:
        return False
    try:
        stat = _read_stat(int(owner["pid"]))
        return stat[19] != owner["started"] or stat[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError, KeyError, IndexError):
        return False
