"""A file of facts and arrays that any tool can read: a zip of ``header.json`` and ``.npy`` files.

``numpy.load`` opens the arrays and ``unzip -p`` shows the header. Nothing is pickled, so that a
file from elsewhere can do no harm. A file is replaced whole or not at all: it is written beside
its place, flushed to the disk, and moved.
"""

import contextlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dppvi._typing import PyTree

# Raised where an older library would misread a newer file.
_VERSION = 1
_HEADER = "header.json"
_LIBRARY = "numpyro_dppvi"


def write(
    path: str | os.PathLike[str],
    kind: str,
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    *,
    owner_only: bool = False,
) -> None:
    """Writes a file, so that at any moment either the old or the new one is there.

    Args:
        path: Where to.
        kind: What the file is, in a word.
        facts: What JSON can hold.
        arrays: Numbers by name.
        owner_only: Whether nobody but the owner may read the file. While it is being written
            nobody else may in any case.

    Raises:
        FileNotFoundError: If the folder is missing.
        IsADirectoryError: If the path is a folder.
    """
    target = check_place(path)
    beside = _beside(target)
    header = {"library": _LIBRARY, "version": _VERSION, "kind": kind, **facts}
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        _write_zip(file, header, arrays)
        file.flush()
        os.fsync(file.fileno())
    if not owner_only:
        beside.chmod(0o666 & ~_umask())
    beside.replace(target)
    _flush_folder(target.parent)


def check_place(path: str | os.PathLike[str]) -> Path:
    """Returns a path that a file can be written to, or refuses it."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a folder: write a file's path, {target}/run.npz say.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent}: create it first.")
    return target


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def discard_partial(path: str | os.PathLike[str]) -> None:
    """Removes what a process that was killed while it wrote has left."""
    _beside(Path(path)).unlink(missing_ok=True)


def _write_zip(file: IO[bytes], header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo(_HEADER), json.dumps(header, indent=1))
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _umask() -> int:
    """The process's mask of permissions, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _flush_folder(folder: Path) -> None:
    """Makes a move durable, where the system knows how to."""
    with contextlib.suppress(OSError):  # Windows opens no folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads what :func:`write` wrote.

    Args:
        path: Where from.
        kind: What the file should be.

    Returns:
        The facts and the arrays.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, of another program, kind or newer version.
    """
    target = Path(path)
    if not target.is_file():
        raise FileNotFoundError(f"there is no file {target}: was it written to another folder?")
    try:
        header, arrays = _read_zip(target)
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{target} is damaged or no file of {_LIBRARY}: it may have been cut off while it was "
            "copied, so copy it again."
        ) from error
    if header.get("library") != _LIBRARY:
        raise ValueError(f"{target} was not written by {_LIBRARY}: pass a file that was.")
    if header["version"] > _VERSION:
        raise ValueError(
            f"{target} was written by a newer {_LIBRARY} (format {header['version']}, this one "
            f"reads {_VERSION}): upgrade {_LIBRARY}."
        )
    if header.get("kind") != kind:
        raise ValueError(
            f"{target} is of kind {header.get('kind')!r}, where one of kind {kind!r} is needed: "
            "pass another path."
        )
    return header, arrays


def _read_zip(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays; reading a member checks its sum."""
    with zipfile.ZipFile(path) as archive:
        header = json.loads(archive.read(_HEADER))
        if not isinstance(header, dict) or not isinstance(header.get("version"), int):
            raise ValueError("the header is none of this library")
        arrays = {}
        for name in archive.namelist():
            if name.endswith(".npy"):
                with archive.open(name) as member:
                    array = np.lib.format.read_array(member, allow_pickle=False)
                    member.read()  # to the end, where the check sum is
                arrays[name.removesuffix(".npy")] = array
    return header, arrays


def flatten(tree: PyTree, name: str) -> dict[str, np.ndarray]:
    """A tree's leaves as arrays, named by their place in it; JAX keys as their numbers."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_place(name, path): np.asarray(_numbers(leaf)) for path, leaf in leaves}


def unflatten(arrays: Mapping[str, np.ndarray], name: str, like: PyTree) -> PyTree:
    """Inverse of :func:`flatten`.

    Args:
        arrays: All arrays of a file.
        name: The tree's name.
        like: A tree of the same structure, shapes and dtypes.

    Raises:
        ValueError: If an array is missing, left over or of another shape.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    wanted = {_place(name, path): leaf for path, leaf in leaves}
    found = {key for key in arrays if key == name or key.startswith(f"{name}/")}
    if found != set(wanted):
        odd = sorted(found ^ set(wanted))[0]
        where = "the file has no" if odd in wanted else "nothing here fits the file's"
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
    dtype = jnp.result_type(like)
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    shape = np.shape(_numbers(like)) if is_key else np.shape(like)
    if array.shape != shape:
        raise ValueError(f"array {name!r} has shape {array.shape}, where {shape} belongs")
    if is_key:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    return jnp.asarray(array, dtype)
