"""The library's errors as exceptions."""

from __future__ import annotations


class Error(Exception):
    """Anything that dosa refuses or fails at; the message has the value seen and what is allowed."""


class ArgumentError(Error, ValueError):
    """An array's dtype, shape, strides or place, an option or a workspace is wrong."""


class UnsupportedError(Error):
    """Legal, but not possible here: a shape, a device, or less memory than the smallest workspace."""


class FileError(Error, OSError):
    """A file could not be read or written, or is not what it claims to be."""


class VerificationError(Error):
    """verify_rows found a difference: a bug of dosa."""


_BY_CODE = {
    1: ArgumentError,
    2: UnsupportedError,
    3: UnsupportedError,
    4: ArgumentError,
    5: UnsupportedError,
    6: FileError,
    7: FileError,
    8: VerificationError,
}


def of_code(code: int, message: str) -> Error:
    """The exception for an error code of dosa/result.hpp."""
    return _BY_CODE[code](message)
