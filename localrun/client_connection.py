"""The HTTP side of the client: its connections to one daemon, and what its failures mean. Used by `client.py` alone.

Any number of calls may run at once from one event loop. Every failure is one of `errors.py`: what the daemon refused as
the class it was there, a daemon that is not there or goes away as DaemonUnreachable.

Does not: know the daemon's routes, retry, or go through a proxy.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any, TypeVar

import httpx2
import msgspec

from localrun import __version__, errors
from localrun.client_pieces import LineBuffer

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 30.0
# Below the daemon's own keep-alive of 5 s, so that the client is the one that closes an idle connection.
KEEPALIVE_EXPIRY_S = 3.0


class Connection:
    """Open from its first call until `close`. `name` is what the daemon's request table calls this client."""

    def __init__(self, base_url: str, *, name: str) -> None:
        self.base_url = base_url
        headers = {"User-Agent": f"{name}/{__version__}", "X-Localrun-Client": name, "Accept-Encoding": "identity"}
        self._http = httpx2.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=httpx2.Timeout(REPLY_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_EXPIRY_S),
            # A proxy set for the web cannot reach a daemon on this machine.
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        silence_s: float | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        """An answer that comes in pieces, `silence_s` after each other at most. Raises the daemon's refusal, and
        DaemonUnreachable; so do things that go wrong while it is read within this context."""
        timeout = httpx2.Timeout(silence_s, connect=CONNECT_TIMEOUT_S)
        with self._reached():
            async with self._http.stream(
                method, path, content=_encoded(body), headers=_typed(headers, body), timeout=timeout
            ) as response:
                await _raise_refusal(response)
                yield response

    async def json(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, is_patient: bool = False
    ) -> dict[str, Any]:
        """As `call`, for an answer that is an object."""
        return await self.value(dict[str, Any], method, path, body, is_patient=is_patient)

    async def value(
        self, kind: type[T], method: str, path: str, body: dict[str, Any] | None = None, *, is_patient: bool = False
    ) -> T:
        """As `call`, for an answer of this kind."""
        content = await self.call(method, path, body, is_patient=is_patient)
        with self._reached():
            return msgspec.json.decode(content, type=kind)

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, is_patient: bool = False
    ) -> bytes:
        """A whole answer, which may take any time if `is_patient`. Raises as `stream` does."""
        timeout = httpx2.Timeout(None if is_patient else REPLY_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        with self._reached():
            response = await self._http.request(
                method, path, content=_encoded(body), headers=_typed(None, body), timeout=timeout
            )
            await _raise_refusal(response)
            return response.content

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Turns what the transport raises into DaemonUnreachable."""
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            raise errors.DaemonUnreachable(
                f"no daemon answers at {self.base_url}; `localrun serve` starts one"
            ) from None
        except httpx2.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise errors.DaemonUnreachable(f"the daemon at {self.base_url} went away: {reason}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise errors.DaemonUnreachable(
                f"what answers at {self.base_url} is no localrun daemon, or one of another version ({error}); "
                f"`localrun version` shows both, `localrun stop --daemon` ends it"
            ) from None


async def lines_of(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """The lines of a stream, to the end of its body: only then can the connection be used again."""
    lines = LineBuffer()
    async for chunk in response.aiter_raw():
        for line in lines.feed(chunk):
            yield line


async def _raise_refusal(response: httpx2.Response) -> None:
    """Raise the error that a response with an error status carries, as the class it had in the daemon."""
    if response.status_code < 400:
        return
    content = await response.aread()
    try:
        said = msgspec.json.decode(content, type=dict[str, Any]).get("error")
    except msgspec.DecodeError:
        said = None
    message = said.get("message") if isinstance(said, dict) else said
    code = response.headers.get("X-Localrun-Error", "")
    retry_after = response.headers.get("Retry-After", "")
    raise errors.by_code(
        code,
        str(message or f"HTTP status {response.status_code} from {response.url}"),
        retry_after_s=float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None,
    )


def _encoded(body: dict[str, Any] | None) -> bytes | None:
    try:
        return None if body is None else msgspec.json.encode(body)
    except UnicodeEncodeError:
        raise errors.BadRequest("the text contains half of a surrogate pair") from None


def _typed(headers: Mapping[str, str] | None, body: dict[str, Any] | None) -> dict[str, str]:
    return {**(headers or {}), **({} if body is None else {"Content-Type": "application/json"})}
