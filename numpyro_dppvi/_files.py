"""The file format for posteriors and checkpoints: a zip of ``.npy`` files and ``header.json``.

``numpy.load`` opens the arrays and ``unzip -p`` shows the header. Nothing is pickled, so loading
an untrusted file cannot run code. Writes are atomic: a file is written under a temporary name,
flushed to disk and renamed.

No size that a file declares is trusted before it is checked against the file's actual size.
Members are stored uncompressed, so a file never needs more memory than disk space. The header
holds a hash over all facts and array check sums, so parts of different files cannot be combined.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi import _disk
from numpyro_dppvi._typing import PyTree
from numpyro_dppvi._validate import shown

# Incremented when an older library would misread a newer file.
_VERSION = 1
_HEADER = "header.json"
_LIBRARY = "numpyro_dppvi"

# What zipfile, json and numpy raise on damaged files. (RecursionError and NotImplementedError are
# subclasses of RuntimeError.)
_DAMAGES = (
    zipfile.BadZipFile,
    EOFError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    RuntimeError,
    struct.error,
)
# The most bytes read at once; this also bounds the zip directory, to some 50 000 arrays.
_PIECE = 2**22
# The zip flag for names that are not ASCII; any other flag means compression or encryption.
_UTF8 = 0x800
# Exactly what numpy writes before an array of numbers. Its own reader evaluates the header as a
# Python literal of any kind, so headers are matched first.
_ARRAY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00.."
    rb"{'descr': '([<>|][biufc]\d{1,2})', 'fortran_order': (?:True|False), "
    rb"'shape': \(((?:\d{1,18},? ?)*)\), } *\n",
    re.DOTALL,
)
_ARRAY_HEADER_SIZE = 2**11


class Most(NamedTuple):
    """Size limits of a file: bytes of the header, and of all arrays."""

    facts: int
    arrays: int


# Limits for a saved posterior. A full covariance over 20 000 entries takes 1.6 GB.
MOST = Most(facts=2**24, arrays=2**32)

Kinds = Mapping[str, tuple[type, ...]]
"""The JSON types that each fact may have."""


def write(
    path: str | os.PathLike[str],
    kind: str,
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    *,
    owner_only: bool = False,
) -> None:
    """Writes a file atomically; ``facts`` are values that JSON can hold.

    Only the owner can read it while it is being written, and afterwards, too, with ``owner_only``.
    A second process that writes the same file is refused.
    """
    target = _disk.check_place(path)
    beside = _beside(target)
    header = {"library": _LIBRARY, "version": _VERSION, "kind": kind, **facts}
    # Beside the target, because a rename is atomic only within one file system.
    with _disk.create(beside) as file:
        _write_zip(file, header, arrays)
        file.flush()
        # Before the rename: after a loss of power the name must not lead to an empty file.
        os.fsync(file.fileno())
        if not owner_only and os.chmod in os.supports_fd:
            os.chmod(file.fileno(), 0o666 & ~_umask())
        if not _is_at(beside, file):
            raise RuntimeError(
                f"another process is writing {target} at the same time: pass another path here."
            )
    beside.replace(target)
    flush_folder(target.parent)


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Whether the path still names this open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def discard_partial(path: str | os.PathLike[str]) -> None:
    """Removes the temporary file of a process that was killed while writing."""
    _disk.remove(_beside(Path(path)))


def _write_zip(file: IO[bytes], header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
        check = _check(header, archive.infolist())
        archive.writestr(zipfile.ZipInfo(_HEADER), json.dumps({**header, "check": check}, indent=1))


def _check(header: Mapping[str, Any], members: Iterable[zipfile.ZipInfo]) -> str:
    """A hash over the facts and the check sums that the zip keeps of its arrays."""
    facts = {name: value for name, value in header.items() if name != "check"}
    # CRC and size of each array: the zip has them, so arrays need not be read twice.
    sums = sorted([i.filename, i.file_size, i.CRC] for i in members if i.filename != _HEADER)
    return hashlib.sha256(json.dumps([facts, sums], sort_keys=True).encode()).hexdigest()


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def flush_folder(folder: Path) -> None:
    """Makes a rename durable where the system supports it."""
    with contextlib.suppress(OSError):
        _disk.flush_folder(folder)


class _InPieces(io.FileIO):
    """A file that never returns more than ``_PIECE`` bytes at once, whatever sizes it declares."""

    def read(self, size: int | None = -1, /) -> bytes:
        everything = size is None or size < 0
        data = super().read(_PIECE + 1 if everything else min(size or 0, _PIECE + 1))
        if len(data) > _PIECE:
            raise ValueError("one of its parts is too large")
        return data


def read(
    path: str | os.PathLike[str],
    kind: str,
    *,
    kinds: Kinds | None = None,
    most: Most = MOST,
    owner_only: bool = False,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads the facts and arrays that :func:`write` wrote, within size limits.

    The file must be of this kind and have facts of these ``kinds``. If it was written for its owner
    only, links are not followed. Damaged files are refused, and those of other programs or newer
    versions.
    """
    target = Path(path)
    with _opened(target, kind, most.facts, owner_only) as (archive, header, members):
        # Members are stored and not compressed (_members), so that this is the memory they need.
        size = sum(info.file_size for info in members.values())
        if size > most.arrays + _ARRAY_HEADER_SIZE * len(members):
            raise ValueError(
                f"{target} is damaged or belongs to another run or model: it holds {size} bytes "
                f"of arrays, where at most {most.arrays} are expected; pass another path."
            )
        with _told(target):
            _check_facts(header, members, kinds)
            arrays = {
                name.removesuffix(".npy"): _read_array(archive, info)
                for name, info in members.items()
            }
    return header, arrays


def read_facts(
    path: str | os.PathLike[str], kind: str, *, kinds: Kinds | None = None, owner_only: bool = False
) -> dict[str, Any]:
    """Like :func:`read`, but returns the facts only and reads no array."""
    target = Path(path)
    with _opened(target, kind, MOST.facts, owner_only) as (_, header, members), _told(target):
        _check_facts(header, members, kinds)
    return header


_Members = dict[str, zipfile.ZipInfo]


@contextlib.contextmanager
def _opened(
    target: Path, kind: str, most_facts: int, owner_only: bool
) -> Iterator[tuple[zipfile.ZipFile, dict[str, Any], _Members]]:
    """An open archive, its header, and its other members by name."""
    with _InPieces(_disk.open_to_read(target, through_links=not owner_only)) as file:
        with _told(target):
            archive = zipfile.ZipFile(file)
            members = _members(archive)
            header = _read_header(archive, members.pop(_HEADER), most_facts)
        _check_header(target, header, kind)
        yield archive, header, members


def _check_facts(header: dict[str, Any], members: _Members, kinds: Kinds | None) -> None:
    """Refuses facts that do not belong to these arrays or have the wrong type."""
    # A hash against mistakes, such as parts of two files in one; who can write the file can write
    # the hash.
    if header.pop("check") != _check(header, members.values()):
        raise ValueError("it is made of parts that do not belong together")
    for name, allowed in (kinds or {}).items():
        if type(header[name]) not in allowed:
            raise ValueError(f"the fact {name!r} has the wrong type")


@contextlib.contextmanager
def _told(target: Path) -> Iterator[None]:
    """Reports any error of parsing as a damaged file."""
    try:
        yield
    except _DAMAGES as error:
        raise ValueError(
            f"{target} is damaged or not a file of {_LIBRARY}: copy it again, in case the copy "
            "was incomplete."
        ) from error


def _check_header(target: Path, header: Mapping[str, Any], kind: str) -> None:
    # In this order: a foreign file, a newer one, and another kind are three different mistakes.
    if header.get("library") != _LIBRARY:
        raise ValueError(f"{target} was not written by {_LIBRARY}: pass a file that was.")
    if header["version"] > _VERSION:
        raise ValueError(
            f"{target} was written by a newer {_LIBRARY} (format {shown(header['version'])}, this "
            f"one reads {_VERSION}): upgrade {_LIBRARY}."
        )
    if header.get("kind") != kind:
        raise ValueError(
            f"{target} must be of kind {kind!r}, got {shown(header.get('kind'))}: pass another "
            "path."
        )


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The members by name; refuses what :func:`write` does not write."""
    members = {info.filename: info for info in archive.infolist()}
    if len(members) < len(archive.infolist()):
        raise ValueError("two members have the same name")
    for name, info in members.items():
        if name != _HEADER and not name.endswith(".npy"):
            raise ValueError("a member is not an array")
        stored = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
        if not stored or info.flag_bits & ~_UTF8:
            raise ValueError("a member is compressed or encrypted")
    return members


def _read_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> dict[str, Any]:
    if info.file_size > most:
        raise ValueError("the header is too large")
    with archive.open(info) as member:  # zipfile verifies the check sum at the end
        header = json.loads(b"".join(iter(lambda: member.read(_PIECE), b"")))
    if not isinstance(header, dict) or type(header.get("version")) is not int:
        raise ValueError("the header is not from this library")
    return header


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """An array, after checking that its declared size is the size of its member."""
    with archive.open(info) as member:
        found = _ARRAY_HEADER.match(member.read(_ARRAY_HEADER_SIZE))
        if found is None:
            raise ValueError("an array does not hold numbers")
        dtype = np.dtype(found[1].decode())
        shape = [int(n) for n in found[2].split(b",") if n.strip()]
        if math.prod(shape) * dtype.itemsize != info.file_size - found.end():
            raise ValueError("an array does not have the size that it declares")
        member.seek(0)
        # By now the header is one that NumPy itself would have written: nothing is evaluated.
        array: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
        member.read(1)  # the end of the member, where zipfile verifies its check sum
    return array


def size(tree: PyTree) -> int:
    """The bytes that a tree's arrays take in a file."""
    return sum(np.asarray(_numbers(leaf)).nbytes for leaf in jax.tree.leaves(tree))


def flatten(tree: PyTree, name: str) -> dict[str, np.ndarray]:
    """A tree's leaves as arrays, named by their path; JAX keys become their key data."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_place(name, path): np.asarray(_numbers(leaf)) for path, leaf in leaves}


def parts(arrays: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """The arrays of one tree among all of a file."""
    return {key: x for key, x in arrays.items() if key == name or key.startswith(f"{name}/")}


def unflatten(arrays: Mapping[str, np.ndarray], name: str, like: PyTree) -> PyTree:
    """Inverse of :func:`flatten`; refuses arrays of another structure, shape or kind."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    wanted = {_place(name, path): leaf for path, leaf in leaves}
    found = set(parts(arrays, name))
    if found != set(wanted):
        odd = sorted(found ^ set(wanted))[0]
        where = "the file lacks" if odd in wanted else "the file has an unexpected"
        raise ValueError(f"{where} array {odd!r}")
    restored = [_leaf(key, arrays[key], leaf) for key, leaf in wanted.items()]
    return jax.tree.unflatten(treedef, restored)


def _place(name: str, path: Any) -> str:
    inner = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"{name}/{inner}" if inner else name


def _numbers(leaf: Any) -> Any:
    is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _leaf(name: str, array: np.ndarray, like: Any) -> Any:
    dtype = like.dtype if hasattr(like, "dtype") else jnp.result_type(like)
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    shape = np.shape(_numbers(like)) if is_key else np.shape(like)
    if array.shape != shape:
        raise ValueError(f"array {name!r} has shape {array.shape}, where {shape} belongs")
    kind = np.uint32 if is_key else dtype
    if array.dtype.kind != np.dtype(kind).kind:
        raise ValueError(f"array {name!r} holds {array.dtype}, where {np.dtype(kind)} belongs")
    if is_key:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    # JAX would make 32 bits of what the server adds up in 64.
    with jax.enable_x64(True) if dtype == np.float64 else contextlib.nullcontext():
        return jnp.asarray(array, dtype)
