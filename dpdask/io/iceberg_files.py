"""How pyiceberg reads and writes a table's metadata: as all other files, with a job's `storage` options, and again while a store is busy."""

from __future__ import annotations

import io

from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream

from dpdask.io.storage import Folder, absolute_url, call_storage, open_remote


class StoreFile(InputFile):
    """A file to read."""

    def __len__(self) -> int:
        return int(
            call_storage(absolute_url(self.location), lambda fs, path: fs.info(path)["size"])
        )

    def exists(self) -> bool:
        """Return whether the file exists."""
        return call_storage(absolute_url(self.location), lambda fs, path: bool(fs.exists(path)))

    def open(self, seekable: bool = True) -> InputStream:
        """Open the file to read; it is seekable always."""
        del seekable
        return open_remote(absolute_url(self.location))


class NewFile(OutputFile):
    """A file to write."""

    def __len__(self) -> int:
        return len(self.to_input_file())

    def exists(self) -> bool:
        """Return whether the file exists."""
        return self.to_input_file().exists()

    def to_input_file(self) -> StoreFile:
        """Return the file to read."""
        return StoreFile(self.location)

    def create(self, overwrite: bool = False) -> OutputStream:
        """Open the file to write: it appears, whole, when it is closed."""
        return _Writing(self.location, overwrite=overwrite)


class _Writing(io.BytesIO):
    def __init__(self, location: str, *, overwrite: bool) -> None:
        super().__init__()
        self._location, self._overwrite = location, overwrite

    def close(self) -> None:
        if not self.closed:
            folder, name = _split(self._location)
            if folder.is_local:
                folder.create()
            if self._overwrite:
                folder.create()
                folder.write(name, self.getvalue())
            elif not folder.put_new(name, self.getvalue()):
                raise FileExistsError(self._location)
        super().close()


class StoreFiles(FileIO):
    """All files that fsspec can open."""

    def new_input(self, location: str) -> StoreFile:
        """Return a file to read."""
        return StoreFile(location)

    def new_output(self, location: str) -> NewFile:
        """Return a file to write."""
        return NewFile(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Remove a file."""
        folder, name = _split(location if isinstance(location, str) else location.location)
        folder.remove(name)


def _split(location: str) -> tuple[Folder, str]:
    parent, _, name = absolute_url(location).rpartition("/")
    return Folder(parent), name
