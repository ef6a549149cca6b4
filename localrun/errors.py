"""The whole exception tree.

Every error that a user can cause or meet is one of these. Each knows its HTTP status and a stable `code`, so that a
route never chooses a status by hand and a script can tell cases apart. The message is one sentence for a person: it
names the field or the thing, the limit, and the way out.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Self


class LocalrunError(Exception):
    """Base of all. `field` names the offending request field, where there is one."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"

    def __init_subclass__(cls, *, status: int | None = None, code: str | None = None) -> None:
        cls.status = cls.status if status is None else status
        cls.code = cls.code if code is None else code

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    @classmethod
    def of(cls, field: str, said: str) -> Self:
        """What is wrong with one field, whose name the message begins with."""
        return cls(f"{field}: {said}", field=field)


class BadRequest(LocalrunError, status=400, code="bad_request"): ...


@contextmanager
def told_of(field: str, *, instead_of: str = "model") -> Iterator[None]:
    """What is wrong with a value that is looked at as the field `instead_of` is told of the field that it came in."""
    try:
        yield
    except BadRequest as error:
        name, dot, part = (error.field or "").partition(".")
        if name == instead_of and not error.message.startswith((f"{field}:", f"{field}.")):
            error.field, error.message = field + dot + part, f"{field}: {error.message.removeprefix(f'{name}: ')}"
        raise


class ContextExceeded(BadRequest, code="context_length_exceeded"):
    """The prompt does not fit the context. Both numbers are in the message and as attributes."""

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            # Editors and agents look for "maximum context length": then they shorten the conversation and try again.
            f"the prompt has {n_prompt} tokens but this model's maximum context length is {n_ctx} tokens here; shorten "
            f"the prompt (if the model was trained for more, localrun serve --kv-cells gives it more)",
            field="messages",
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx

    @classmethod
    def again(cls, message: str) -> ContextExceeded:
        """The error that travelled as its message; another server's has no numbers, which are 0 then."""
        error = cls.__new__(cls)
        LocalrunError.__init__(error, message)
        found = re.search(r"has (\d+) tokens but this model's maximum context length is (\d+) tokens", message)
        error.n_prompt, error.n_ctx = (int(found[1]), int(found[2])) if found else (0, 0)
        return error


class BadTemplate(BadRequest, status=422, code="bad_template"):
    """The model's chat template failed, was refused by the sandbox, or went over its limits."""


class Unauthorized(LocalrunError, status=401, code="unauthorized"): ...


class InvalidKey(Unauthorized, code="invalid_api_key"):
    """No API key, or one that opens nothing."""


class Forbidden(LocalrunError, status=403, code="forbidden"): ...


class NotFound(LocalrunError, status=404, code="not_found"): ...


class ModelNotFound(NotFound, code="model_not_found"):
    """`name` is the one that was asked for; empty in one that travelled with other words than its own. `reason` says
    what keeps a model that is here in part from being used."""

    def __init__(self, name: str, reason: str = "") -> None:
        plainly = f"model '{name}' not found; `localrun list` shows what is here"
        super().__init__(f"model '{name}' not found: {reason}" if reason else plainly, field="model")
        self.name, self.reason = name, reason

    @classmethod
    def again(cls, message: str) -> ModelNotFound:
        """The error that travelled as its message."""
        error = cls.__new__(cls)
        LocalrunError.__init__(error, message)
        found = re.match(r"model '(.+?)' not found(?:: (.*))?", message, re.DOTALL)
        error.name, error.reason = (found[1], found[2] or "") if found else ("", "")
        return error


def meant(word: str, known: Iterable[str]) -> str:
    """A question about a word that is a slip of one of the known ones; "" for others."""
    spelt = {each.lower(): each for each in known}
    alike = difflib.get_close_matches(word.lower(), list(spelt), n=1)
    return f"did you mean '{spelt[alike[0]]}'?" if alike else ""


class MethodNotAllowed(LocalrunError, status=405, code="method_not_allowed"): ...


class NoWebSocket(MethodNotAllowed, status=426, code="no_websocket"):
    """A client offers a WebSocket. After this status Codex goes on without one; after others it tries again."""


class Conflict(LocalrunError, status=409, code="conflict"): ...


class TooLarge(LocalrunError, status=413, code="body_too_large"): ...


class StorageExceeded(LocalrunError, status=413, code="storage_limit_exceeded"):
    """An API key keeps as many bytes of files and batches as it may. No status that clients try again by themselves."""


class UnsupportedMediaType(LocalrunError, status=415, code="unsupported_media_type"): ...


class BadModelFile(LocalrunError, status=422, code="bad_model_file"):
    """A GGUF that is damaged, truncated, hostile, or of a kind that llama.cpp cannot run."""


class NoNumbers(BadModelFile, code="no_numbers"):
    """What the model computes for a request are no numbers (NaN or infinite)."""


class QueueFull(LocalrunError, status=429, code="queue_full"):
    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(QueueFull, code="rate_limit_exceeded"):
    """An API key has used what it may for now. `kind` is what of: requests, tokens, prompt_tokens, output_tokens."""

    def __init__(self, message: str, *, retry_after_s: float, kind: str = "requests") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.kind = kind


class TooManyFailures(QueueFull, code="too_many_failures"):
    """Somebody shows many wrong API keys."""


class Cancelled(LocalrunError, status=499, code="cancelled"): ...


class EngineFailed(LocalrunError, code="engine_failed"):
    """The engine could not load the model, or refused one request. Other requests go on."""


class EngineDied(EngineFailed, code="engine_died"):
    """The engine process is gone. Its streams end with this; the next request starts a new one."""


class UnknownToken(EngineFailed, code="unknown_token"):
    """llama.cpp chose a token for a request that the model does not have."""


class NotSupported(LocalrunError, status=501, code="not_supported"):
    """A route of an API that this build does not serve yet."""


class Unavailable(LocalrunError, status=503, code="unavailable"):
    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, field=field)
        self.retry_after_s = retry_after_s


class DeviceLost(Unavailable, code="device_lost"):
    """A GPU that was there, or that a driver announces, does not answer any more."""


class DownloadFailed(LocalrunError, status=502, code="download_failed"):
    """A file could not be fetched. What was transferred is kept; the next pull goes on from there."""


class DigestMismatch(DownloadFailed, code="digest_mismatch"):
    """Every byte came, and they are not those that the source promised. Nothing of them is kept."""


class SourceChanged(DownloadFailed, code="source_changed"):
    """The file on the server is another than it was when the download was planned."""


class SourceRefused(DownloadFailed, code="source_refused"):
    """The server answered with a status that trying again does not change. `source_status` is its; 0 if not known."""

    def __init__(self, message: str, *, source_status: int = 0) -> None:
        super().__init__(message)
        self.source_status = source_status


class DiskFull(DownloadFailed, status=507, code="disk_full"): ...


class DiskRefused(LocalrunError, code="disk_refused"):
    """The operating system refused to write, rename or delete a file of ours."""


_REFUSALS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG})


def of_disk(error: OSError) -> LocalrunError | None:
    """The error of ours for a disk that is full or refuses; None for what is no matter of a disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" of {error.filename}" if error.filename else ""
        return DiskFull(f"the disk{where} is full; make room (localrun rm, localrun gc) and try again")
    if error.errno not in _REFUSALS:
        return None
    return DiskRefused(f"the disk refused {error.filename or 'to write'}: {error.strerror}; nothing was changed")


class CannotFit(LocalrunError, status=507, code="cannot_fit"):
    """The estimate says that the model does not fit this machine's memory."""


class PortBusy(LocalrunError, code="port_busy"): ...


class DaemonUnreachable(LocalrunError, code="daemon_unreachable"): ...


class UntrustedCertificate(DaemonUnreachable, code="untrusted_certificate"):
    """Somebody answers, whose certificate nobody trusts."""


class ServiceFailed(LocalrunError, code="service_failed"):
    """The system's service manager refused a command."""


def kinds() -> list[type[LocalrunError]]:
    """All errors there are, each code once."""
    found: list[type[LocalrunError]] = [LocalrunError]
    for kind in found:
        found += kind.__subclasses__()
    return list({kind.code: kind for kind in reversed(found)}.values())


def by_code(code: str, message: str, *, retry_after_s: float | None = None) -> LocalrunError:
    """The error that travelled as `code` and `message` over a pipe or over HTTP, as an exception again.

    `retry_after_s` is a QueueFull's; one second if it did not travel along.
    """
    if code == ContextExceeded.code:
        return ContextExceeded.again(message)
    if code == ModelNotFound.code:
        return ModelNotFound.again(message)
    for kind in (QueueFull, RateLimited, TooManyFailures):
        if code == kind.code:
            return kind(message, retry_after_s=1.0 if retry_after_s is None else retry_after_s)
    return next((kind for kind in kinds() if kind.code == code), LocalrunError)(message)
