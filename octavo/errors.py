"""All exceptions that a user can meet.

They derive from `OctavoError`, so a caller can catch all of them. Each also derives from the built-in exception that a Python
programmer would expect, such as ValueError for a bad value. Messages name the thing, the number and the setting to change.
"""

import difflib
from collections.abc import Collection


class OctavoError(Exception):
    """Any error that Octavo itself reports."""


class ConfigError(OctavoError, ValueError):
    """A setting is wrong or does not fit this machine or model."""


class LoadError(OctavoError, ValueError):
    """A model, tokenizer or template file is missing, damaged or of a kind we do not read."""


class TemplateError(OctavoError, ValueError):
    """A chat template failed on a conversation, or ran past its limits."""


class RequestError(OctavoError, ValueError):
    """A request cannot be served. `param` names the field that is wrong, `code` is for programs."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.index: int | None = None  # of the prompt that is wrong, if a call had several


class EngineError(OctavoError, RuntimeError):
    """The engine failed while it worked on a request. `code` is for programs, such as numerical_error."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class RankLost(OctavoError, RuntimeError):
    """A rank of a model that is split over processes ended, or did not answer. The engine cannot go on."""


class OverloadError(OctavoError, RuntimeError):
    """The queue is full. In `retry_after` seconds there may be room."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(OctavoError, RuntimeError):
    """The engine is loading, draining or dead, or did not begin a request in time. `code` may say which."""

    def __init__(self, message: str, retry_after: float, code: str | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.code = code


class DeadlineError(OctavoError, TimeoutError):
    """A request was not done when its time was up."""

    code = "deadline_exceeded"


class RemoteError(OctavoError, RuntimeError):
    """A server that was asked over HTTP refused or failed. `status` is the HTTP status, None if there was no valid answer."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class VerifyError(OctavoError, AssertionError):
    """A proof failed: the paged cache and the contiguous one differ."""


def nearest(name: str, known: Collection[str]) -> str:
    """Returns the end of a message that suggests the most similar name, or "" if none is similar."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def in_flag(size: int) -> str:
    """Returns a size in the form that flags take, such as 8m, for a message that says what to set."""
    unit, power = next(((unit, power) for unit, power in (("g", 30), ("m", 20), ("k", 10)) if size % 2**power == 0), ("", 0))
    return f"{size >> power}{unit}"
