"""The contents of uploaded files and of batches' results: one blob each in a folder of the data folder, named by its
id.

A blob appears under its name whole or not at all (`stored`), so one that is there was written to its end; who
refers to it is in the store, and one that nobody refers to is from a write that was not finished. Uploads are
`multipart/form-data`, parsed as they come: what is in memory is one piece, whatever the file's size.

Used by the daemon's threads. Does not: know what a file is for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from localrun import stored
from localrun.errors import BadRequest, NotFound, TooLarge, UnsupportedMediaType
from localrun.models.storage.blobs import check_room

# As OpenAI has it.
MAX_FILE_BYTES = 512 * 1024 * 1024
PIECE_BYTES = 1024 * 1024
_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 1024
_MAX_NAME_CHARACTERS = 255
# What a form has besides its file, generously.
MAX_FORM_BYTES = 2 * _MAX_FIELDS * _MAX_FIELD_BYTES


class Blobs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, blob_id: str) -> Path:
        return self.folder / blob_id

    @contextmanager
    def writing(self, blob_id: str) -> Iterator[BinaryIO]:
        """A file to write, which is the blob when the block ends without an exception. Raises OSError."""
        with stored.replacing(self.path(blob_id)) as file:
            yield file

    def delete(self, blob_ids: Iterable[str]) -> None:
        for blob_id in blob_ids:
            self.path(blob_id).unlink(missing_ok=True)

    def sweep(self, known: set[str]) -> None:
        """Deletes what a daemon that was killed left unfinished. Before anything is written."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in self.folder.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    def read_at(self, blob_id: str, offset: int, n_bytes: int) -> bytes:
        """A part of a blob. Raises NotFound for one that is gone or shorter."""
        try:
            with self.path(blob_id).open("rb") as file:
                file.seek(offset)
                content = file.read(n_bytes)
        except FileNotFoundError:
            content = b""
        if len(content) != n_bytes:
            raise NotFound(f"the content of '{blob_id}' is no longer there; upload the file again")
        return content

    async def pieces(self, blob_id: str) -> tuple[int, AsyncIterator[bytes]]:
        """A blob's size, and its bytes. Raises NotFound for one that is gone."""
        try:
            file = await asyncio.to_thread(self.path(blob_id).open, "rb")
        except FileNotFoundError:
            raise NotFound(f"the content of '{blob_id}' is no longer there") from None
        return os.fstat(file.fileno()).st_size, _read(file)

    def check_room(self, n_bytes: int) -> None:
        """Raises DiskFull."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_room(self.folder, n_bytes, instead="delete files (DELETE /v1/files/ID)")


async def _read(file: BinaryIO) -> AsyncIterator[bytes]:
    try:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
    finally:
        file.close()


class Upload:
    """A form with one file, which goes to the disk as it comes: `write` takes pieces of the body, `finish` its end.
    A context manager; without `finish` nothing is left."""

    def __init__(self, blobs: Blobs, blob_id: str, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise UnsupportedMediaType(
                f"the Content-Type is {content_type[:80]!r}; send the file as 'multipart/form-data' with a boundary"
            )
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.size_bytes = 0
        self._blobs = blobs
        self._blob_id = blob_id
        self._stack = ExitStack()
        self._file: BinaryIO | None = None
        self._has_ended = False
        self._n_parts = 0
        self._header, self._value, self._field = b"", b"", ""
        self._headers: dict[bytes, bytes] = {}
        self._is_file = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._take_header,
                    "on_header_value": self._take_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise BadRequest(f"the form cannot be read: {error}") from None

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._stack.close()

    def write(self, piece: bytes) -> None:
        """Raises BadRequest for what is no form, TooLarge, DiskFull and OSError."""
        self._blobs.check_room(len(piece))
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise BadRequest(f"the form cannot be read: {error}") from None

    def finish(self) -> None:
        """The file is a blob from now on. Raises BadRequest for a form that broke off or has no file."""
        if not self._has_ended:
            raise BadRequest("the form broke off before its end")
        if self._file is None:
            raise BadRequest("file is required: a part of the form named 'file', with a filename", field="file")
        self._file.close()
        stored.publish(self._path, self._blobs.path(self._blob_id))

    # --- told by the parser --------------------------------------------------------------------------------------

    def _begin_part(self) -> None:
        self._n_parts += 1
        if self._n_parts > _MAX_FIELDS:
            raise BadRequest(f"the form has more than {_MAX_FIELDS} parts")
        self._headers = {}

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._field = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._field == "file" and b"filename" in options
        if not self._is_file:
            self.fields[self._field] = ""
        elif self._file is not None:
            raise BadRequest.of("file", "one file at a time")
        else:
            name = options[b"filename"].decode(errors="replace").replace("\\", "/").rpartition("/")[2]
            self.filename = name[:_MAX_NAME_CHARACTERS] or "file"
            self._path = self._stack.enter_context(stored.temporary(self._blobs.folder))
            self._file = self._path.open("xb")

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            text = self.fields[self._field] + data[start:end].decode(errors="replace")
            if len(text) > _MAX_FIELD_BYTES:
                raise BadRequest(f"{self._field[:40]}: longer than {_MAX_FIELD_BYTES} characters", field=self._field)
            self.fields[self._field] = text
            return
        assert self._file is not None
        self.size_bytes += end - start
        if self.size_bytes > MAX_FILE_BYTES:
            raise TooLarge(f"the file is larger than {MAX_FILE_BYTES} bytes; send it in several")
        self._file.write(data[start:end])

    def _end(self) -> None:
        self._has_ended = True
