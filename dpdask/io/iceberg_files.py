"""How pyiceberg reads a table's metadata: as all other files are read, with a job's `storage` options, and again while a store is busy."""

from __future__ import annotations

from typing import NoReturn

from pyiceberg.io import FileIO, InputFile, InputStream

from dpdask.io.filesystems import call_storage
from dpdask.io.remote import open_remote
from dpdask.io.storage import absolute_url


class StoreFile(InputFile):
    """A file to read.

    Parameters
    ----------
    location
        Its URL or path.
    """

    def __len__(self) -> int:
        return int(call_storage(absolute_url(self.location), lambda fs, path: fs.info(path)["size"]))

    def exists(self) -> bool:
        """Return whether the file exists."""
        return call_storage(absolute_url(self.location), lambda fs, path: bool(fs.exists(path)))

    def open(self, seekable: bool = True) -> InputStream:
        """Open the file to read; it is seekable always."""
        del seekable
        return open_remote(absolute_url(self.location))


class StoreFiles(FileIO):
    """All files that fsspec can open; they are only read."""

    def new_input(self, location: str) -> StoreFile:
        """Return a file to read."""
        return StoreFile(location)

    def new_output(self, location: str) -> NoReturn:
        """Refuse to write."""
        raise NotImplementedError(location)

    def delete(self, location: object) -> NoReturn:
        """Refuse to remove a file."""
        raise NotImplementedError(location)
