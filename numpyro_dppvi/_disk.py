"""Opening, locking and flushing files, safely in a folder that others may write to.

New files are readable by their owner only. Symbolic links are not followed, and files that another
user created beforehand are not written to, because that user could read them later.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows, where processes do not lock each other out
    fcntl = None  # type: ignore[assignment]

# Zero on systems without these flags.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # opening a pipe would otherwise block
_OWNER_ONLY = 0o600
# Seconds between two attempts to get a lock.
_PAUSE = 0.2


def check_place(path: str | os.PathLike[str]) -> Path:
    """Returns the path if a file can be written there; raises otherwise."""
    target = Path(path)
    with _told(target):
        is_folder, has_folder = target.is_dir(), target.parent.is_dir()
    if is_folder:
        raise IsADirectoryError(
            f"{_named(target)} is a folder: write the path of a file, such as "
            f"{_named(target / 'run.npz')}."
        )
    if not has_folder:
        raise FileNotFoundError(f"there is no folder {_named(target.parent)}: create it first.")
    return target


def refuse_link(path: Path) -> None:
    """Refuses a path that is a symbolic link."""
    with _told(path):
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def create(path: Path) -> BinaryIO:
    """Replaces whatever is at the path by a new, empty file that only its owner can read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
    # O_EXCL below then fails if somebody puts a file or a link there in between.
    remove(path)
    with _told(path):
        return os.fdopen(os.open(path, flags, _OWNER_ONLY), "wb")


def remove(path: Path) -> None:
    """Removes a file if there is one. A link is removed, not its target."""
    with _told(path):
        path.unlink(missing_ok=True)


def open_or_create(path: Path) -> BinaryIO:
    """Opens a lock or ledger file for appending; a new one is readable by its owner only.

    Links are refused, and what is no regular file or owned by somebody else.
    """
    flags = os.O_RDWR | os.O_APPEND | _NO_LINK | _NO_WAIT
    with _told(path):
        try:
            # Create or open, and never truncate: what is in a ledger is not ours to lose.
            number = os.open(path, flags | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
        except FileExistsError:
            number = os.open(path, flags)
    with _closed_on_error(number):
        _check_owner(_plain(number, path), path)
        return os.fdopen(number, "a+b")


def open_to_read(path: Path, *, through_links: bool) -> int:
    """Opens a regular file and returns its descriptor; follows links only if told to."""
    with _told(path):
        number = os.open(path, os.O_RDONLY | _NO_WAIT | (0 if through_links else _NO_LINK))
    with _closed_on_error(number):
        _plain(number, path)
    return number


def lock(file: BinaryIO, *, shared: bool = False) -> None:
    """Waits for the lock of an open file, and holds it until the file is closed."""
    # Held by the open file and not by a name on the disk: a killed process leaves no lock behind.
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def try_lock(file: BinaryIO, patience: float = 0.0) -> bool:
    """Takes an open file's lock until it is closed, if it can in some seconds; says whether."""
    end = time.monotonic() + patience
    while fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(min(_PAUSE, patience))
        else:
            break
    return True


def flush_folder(folder: Path) -> None:
    """Makes a new or renamed file's entry in its folder durable."""
    if os.name != "posix":  # Windows cannot open folders
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _plain(number: int, path: Path) -> os.stat_result:
    """The status of an open file; refuses folders, pipes and devices."""
    facts = os.fstat(number)
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError(f"{_named(path)} is not a regular file: write the path of one.")
    return facts


def _check_owner(facts: os.stat_result, path: Path) -> None:
    """Refuses a file that another user created."""
    # The folder's owner is trusted, since they can replace any file in it anyway.
    if not hasattr(os, "geteuid"):  # Windows
        return
    if facts.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
        raise ValueError(
            f"{_named(path)} belongs to another user, who could change it: write a path in a "
            "folder of your own."
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
    """Turns errors of the operating system into messages that say what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no file {_named(path)}: check the path and the working directory."
        ) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):  # the latter on FreeBSD
            raise ValueError(
                f"{_named(path)} is a symbolic link, which is not followed here: write the path "
                "that it points to."
            ) from error
        raise type(error)(
            f"{_named(path)} cannot be opened ({error.strerror}): write the path of a file that "
            "you may read and write."
        ) from error


def _named(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 300 else f"{text[:100]}... ({len(text)} characters)"
