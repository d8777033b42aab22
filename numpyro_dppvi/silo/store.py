"""What a gateway must not forget: its ledger, what it has released, and its private factors.

Reserve, compute, keep, send. A step is *reserved* by one line in the ledger file, which names the
study, the step and the digest of the input, and is on the disk before anything is computed. Its
reply is *kept*, on the disk, before it is sent. So whenever a gateway is killed, a step that was
reserved and not kept has released nothing, and is computed anew under its one charge; a step that
was kept gives the same reply again.

    store/                      0700
      ledger.jsonl              what was charged, in all studies
      .lock                     held by the one gateway that runs
      <digest of the study>/
        step-1.npz, ...         the replies that were kept
        private-7.npz           what shards keep to themselves, as of step 7: guard it like the data
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numpyro_dppvi import _disk, _files
from numpyro_dppvi._typing import PyTree
from numpyro_dppvi.privacy import Ledger, LedgerFile, PrivacyBudget
from numpyro_dppvi.silo import wire

_REPLY, _PRIVATE = "kept reply", "private state of a hospital"
_FACTS = {"step": (int,), "input": (str,)}
_OWNER_ONLY = 0o700


class Reserved(NamedTuple):
    """A step that was charged: its number, and the digest of the visit that it answers."""

    step: int
    answers: str


@dataclass(frozen=True)
class Store:
    """A gateway's folder."""

    folder: Path
    budget: PrivacyBudget

    @property
    def ledger_file(self) -> LedgerFile:
        """Where steps are charged."""
        return LedgerFile(self.folder / "ledger.jsonl")

    def ledger(self) -> Ledger:
        """Everything that was charged."""
        return self.ledger_file.open(Ledger((self.budget,)))

    def reserved(self, study: str) -> dict[int, Reserved]:
        """The steps of a study that were charged, by number."""
        # The run's name in the ledger is the reservation: study, step and the input's digest in one
        # line, written and synced as one charge (`label`).
        parts = (entry.run.split("/") for entry in self.ledger().entries)
        return {
            int(p[1]): Reserved(int(p[1]), p[2]) for p in parts if len(p) == 3 and p[0] == study
        }

    def reply(self, study: str, reserved: Reserved) -> bytes | None:
        """The reply that was kept for a step; ``None`` if it was not computed to its end."""
        path = self._reply(study, reserved.step)
        if not path.exists():
            return None
        most = _files.Most(facts=2**16, arrays=wire.MOST_BYTES)
        facts, arrays = _files.read(path, _REPLY, kinds=_FACTS, most=most, owner_only=True)
        # A file that was copied to another step's name would be sent for an input that it does not
        # answer.
        if (facts["step"], facts["input"]) != reserved:
            raise ValueError(f"{path} is of another step than the ledger says")
        return arrays["reply"].tobytes()

    def released(self, study: str) -> int:
        """The last step whose reply was kept, 0 for none."""
        names = (path.name for path in (self.folder / study).glob("step-*.npz"))
        # Files under temporary names, of a write that was cut off, do not count.
        steps = (re.fullmatch(r"step-(\d+)\.npz", name) for name in names)
        return max((int(step[1]) for step in steps if step), default=0)

    def keep(self, study: str, reserved: Reserved, reply: bytes, private: PyTree) -> None:
        """Keeps a reply and what the shards keep to themselves; on the disk when done."""
        # The private state goes first: it counts once the reply is there.
        folder, step = self.folder / study, reserved.step
        _make(folder)
        facts = {"step": step, "input": reserved.answers}
        if private is not None:
            arrays = _files.flatten(private, "private")
            _files.write(self._private(study, step), _PRIVATE, facts, arrays, owner_only=True)
        arrays = {"reply": np.frombuffer(reply, np.uint8)}
        _files.write(self._reply(study, step), _REPLY, facts, arrays, owner_only=True)
        # After the reply is kept, older private state is of no use, and dangerous to have.
        for path in folder.glob("private-*.npz"):
            if path != self._private(study, step):
                path.unlink(missing_ok=True)

    def private(self, study: str, step: int, like: PyTree) -> Any:
        """What shards kept to themselves with a step's reply."""
        most = _files.Most(facts=2**16, arrays=_files.size(like))
        path = self._private(study, step)
        _, arrays = _files.read(path, _PRIVATE, kinds=_FACTS, most=most, owner_only=True)
        return _files.unflatten(arrays, "private", like)

    def _reply(self, study: str, step: int) -> Path:
        return self.folder / study / f"step-{step}.npz"

    def _private(self, study: str, step: int) -> Path:
        return self.folder / study / f"private-{step}.npz"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the folder where it is missing, and keeps a second gateway away from it."""
        _make(self.folder)
        with _disk.open_or_create(self.folder / ".lock") as file:
            # The lock goes with the process: a gateway that was killed leaves none behind.
            if not _disk.try_lock(file):
                raise RuntimeError(
                    f"another gateway runs on {self.folder}: stop it first, or write another "
                    "store in silo.toml."
                )
            yield


def label(study: str, reserved: Reserved) -> str:
    """How the ledger file names a step: the name of a run of its own."""
    return f"{study}/{reserved.step}/{reserved.answers}"


def _make(folder: Path) -> None:
    """Makes a folder that only its owner can enter, or refuses one that others can."""
    if not folder.exists():
        folder.mkdir(mode=_OWNER_ONLY)
        _files.flush_folder(folder.parent)  # or a loss of power could take kept replies with it
    if folder.is_symlink() or not folder.is_dir():
        raise ValueError(f"{folder} must be a folder, not a link: write another store.")
    if hasattr(os, "geteuid"):
        facts = folder.stat()
        # A folder that others may enter would show private factors, which carry no noise.
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise ValueError(
                f"{folder} must belong to the user who runs the gateway, and be closed to all "
                f"others: write `chmod 700 {folder}`, as that user."
            )
