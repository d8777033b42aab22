"""How files are opened: for their owner alone where they are made, and through no link.

A folder may be shared with others. What they put into it beforehand is neither followed, if it is
a link, nor written into: whoever made a file can read what is written to it later.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# Zero where a system knows nothing of the kind.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # a pipe would wait for its other end
_OWNER_ONLY = 0o600


def check_place(path: str | os.PathLike[str]) -> Path:
    """Returns a path that a file can be written to, or refuses it."""
    target = Path(path)
    with _told(target):
        is_folder, has_folder = target.is_dir(), target.parent.is_dir()
    if is_folder:
        raise IsADirectoryError(
            f"{_named(target)} is a folder: write a file's path, {_named(target / 'run.npz')} say."
        )
    if not has_folder:
        raise FileNotFoundError(f"there is no folder {_named(target.parent)}: create it first.")
    return target


def refuse_link(path: Path) -> None:
    """Refuses a path that is a link, wherever it leads."""
    with _told(path):
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def create(path: Path) -> BinaryIO:
    """Makes a file anew, which its owner alone may read; whatever was there is removed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
    remove(path)
    with _told(path):
        return os.fdopen(os.open(path, flags, _OWNER_ONLY), "wb")


def remove(path: Path) -> None:
    """Removes a file, if there is one; of a link the link, and not what it leads to."""
    with _told(path):
        path.unlink(missing_ok=True)


def open_or_create(path: Path) -> BinaryIO:
    """Opens a file that stays, as a lock or a ledger does; a new one is its owner's alone.

    Raises:
        ValueError: If it is a link or no plain file, or belongs to somebody else.
    """
    flags = os.O_RDWR | os.O_APPEND | _NO_LINK | _NO_WAIT
    with _told(path):
        try:
            number = os.open(path, flags | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
        except FileExistsError:
            number = os.open(path, flags)
    with _closed_on_error(number):
        _check_owner(_plain(number, path), path)
        return os.fdopen(number, "a+b")


def open_to_read(path: Path, *, through_links: bool) -> int:
    """Opens a file, and returns its number.

    Args:
        path: The file.
        through_links: Whether a link is followed.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If it is no plain file.
    """
    with _told(path):
        number = os.open(path, os.O_RDONLY | _NO_WAIT | (0 if through_links else _NO_LINK))
    with _closed_on_error(number):
        _plain(number, path)
    return number


def _plain(number: int, path: Path) -> os.stat_result:
    """The facts of an open file; refuses folders, pipes and devices."""
    facts = os.fstat(number)
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError(f"{_named(path)} is no plain file: write the path of one.")
    return facts


def _check_owner(facts: os.stat_result, path: Path) -> None:
    """Refuses a file that somebody else has put there.

    The folder's owner is trusted: whoever owns a folder can put any file there at any moment.
    """
    if not hasattr(os, "geteuid"):  # Windows
        return
    if facts.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
        raise ValueError(
            f"{_named(path)} belongs to another user, who could change it at any moment: write a "
            "path in a folder of your own."
        )


@contextlib.contextmanager
def _closed_on_error(number: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(number)
        raise


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Says in a sentence why the system does not open a file."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no file {_named(path)}: was it written to another folder?"
        ) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # the latter on FreeBSD
            raise ValueError(
                f"{_named(path)} is a link, which is not followed here: write the path that it "
                "leads to."
            ) from error
        raise type(error)(
            f"{_named(path)} cannot be opened ({error.strerror}): write the path of a file that "
            "you may read and write."
        ) from error


def _named(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 300 else f"{text[:100]}... ({len(text)} characters)"
