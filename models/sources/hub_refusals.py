"""What the hub's refusals mean to a person, and the way out of each. Pure.

The hub answers 401 to those without a token whether a repository is private, gated or not there at all; so a message
has to name all that it can be.
"""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import httpx2

from localrun.errors import BadRequest, DownloadFailed, LocalrunError, NotFound, SourceRefused, Unavailable
from localrun.models.download.retry import PASSING_STATUSES

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token from {endpoint}/settings/tokens"


def translated(error: Exception, repo: str, revision: str, endpoint: str, *, has_token: bool) -> LocalrunError:
    """The error of ours for one of huggingface_hub's. Errors of ours, and bugs, come back as they are."""
    from huggingface_hub import errors

    host = urlsplit(endpoint).netloc
    if isinstance(error, LocalrunError):
        return error
    if isinstance(error, errors.GatedRepoError):
        return gated(repo, endpoint, _status(error), has_token=has_token)
    if isinstance(error, errors.RepositoryNotFoundError):
        way_out = "" if has_token else f"; if it is private, {_LOG_IN.format(endpoint=endpoint)}"
        token = " (or your token may not see it)" if has_token else ""
        return NotFound(f"there is no repository '{repo}' at {host}{token}{way_out}", field="model")
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFound(f"'{repo}' has no branch, tag or commit '{revision}'", field="model")
    if isinstance(error, errors.HFValidationError):
        return BadRequest(f"'{repo}' is no name of a repository on the hub", field="model")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return Unavailable("HF_HUB_OFFLINE is set, so the hub cannot be asked; unset it to pull")
    if isinstance(error, errors.HfHubHTTPError):
        return _by_status(_status(error), repo, endpoint, has_token=has_token)
    if isinstance(error, httpx2.TransportError):
        return DownloadFailed(
            f"{host} cannot be reached ({str(error) or type(error).__name__}); check the connection, or set "
            f"HF_ENDPOINT to a mirror"
        )
    if isinstance(error, json.JSONDecodeError | KeyError | TypeError | ValueError):
        return DownloadFailed(f"{host} answered with something that no hub should ({type(error).__name__}: {error})")
    return DownloadFailed(f"{host}: {error}")


def is_passing(error: Exception) -> bool:
    """Whether asking again may help: no connection, or a hub in trouble. Too many requests are not helped by more."""
    return isinstance(error, httpx2.TransportError) or _status(error) in PASSING_STATUSES - {429}


def refused(error: SourceRefused, repo: str, endpoint: str, *, has_token: bool) -> LocalrunError:
    """The refusal of a file's content, with the way out where the status tells it."""
    if error.source_status in (401, 403) and "restricted" in error.message.lower():
        return gated(repo, endpoint, error.source_status, has_token=has_token)
    if error.source_status in (401, 403, 429):
        return _by_status(error.source_status, repo, endpoint, has_token=has_token)
    return error


def gated(repo: str, endpoint: str, status: int, *, has_token: bool) -> SourceRefused:
    """The owner of a repository wants terms to be accepted first."""
    page = f"{endpoint}/{repo}"
    if has_token:
        way_out = f"your token has no access yet: ask for it at {page}, and pull again once it is granted"
    else:
        way_out = f"accept its terms at {page}, then {_LOG_IN.format(endpoint=endpoint)}"
    return SourceRefused(f"'{repo}' is gated; {way_out}", source_status=status)


def _by_status(status: int, repo: str, endpoint: str, *, has_token: bool) -> LocalrunError:
    host = urlsplit(endpoint).netloc
    if status in (401, 403) and has_token:
        return SourceRefused(
            f"{host} refused your token for '{repo}'; check it with `hf auth whoami`, and that it may read gated and "
            f"private repositories",
            source_status=status,
        )
    if status in (401, 403):
        return SourceRefused(
            f"{host} wants to know who asks for '{repo}': {_LOG_IN.format(endpoint=endpoint)}", source_status=status
        )
    if status == 429:
        way_out = "wait some minutes" if has_token else f"wait some minutes, or {_LOG_IN.format(endpoint=endpoint)}"
        return SourceRefused(f"{host} has had too many requests from here; {way_out}", source_status=status)
    if status >= 500:
        return DownloadFailed(f"{host} answered {status}; it is in trouble itself, try again later")
    return SourceRefused(f"{host} answered {status} for '{repo}'", source_status=status)


def _status(error: Exception) -> int:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    return status if isinstance(status, int) else 0
