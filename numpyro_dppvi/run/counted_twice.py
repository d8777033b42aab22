"""Notices a prior that the same clients' records have shaped, so that they would count twice.

Nothing here is computed from records. A ledger file knows by runs' public names which clients were
charged for an earlier posterior: records on one file are the same by its rules, and such a prior is
refused. Clients' public names say less, because a client may have new records: these are warned of.
"""

import json
import warnings
from collections.abc import Collection, Sequence

from numpyro_dppvi.posterior.prior import Prior, listed
from numpyro_dppvi.privacy import LedgerFile, words

_INSTEAD = (
    "to go on with the same records, continue that run: the same checkpoint=, with a larger "
    "num_rounds and budget"
)


def facts(names: Sequence[str], ledger_run: str, prior: Prior | None) -> dict[str, str]:
    """What a posterior's attributes say of whose records shaped it."""
    # A prior may have begun at a prior: whose records shaped that one goes on with it.
    runs = list(dict.fromkeys([*([ledger_run] if ledger_run else []), *_runs(prior)]))
    earlier = list(dict.fromkeys(_names(prior)))
    said = {"clients": list(names), "prior_clients": earlier, "ledger_runs": runs}
    return {name: json.dumps(each, ensure_ascii=False) for name, each in said.items() if each}


def check(
    prior: Prior | None,
    names: Sequence[str],
    visited: Collection[int],
    ledger_file: LedgerFile | None,
) -> None:
    """Refuses, or warns of, a prior that the records of some of a run's clients have shaped."""
    if prior is None:
        return
    # First by what the ledger file says, which is certain. Names only make it likely, and warn.
    charged = set() if ledger_file is None else ledger_file.charged_by(_runs(prior))
    again = sorted(charged & set(visited))
    if again:
        assert ledger_file is not None
        raise ValueError(
            "prior must come from other records, got the posterior of a run that used those of "
            f"{words.listed(again, names)}, as the ledger file {ledger_file.path} shows: they "
            "would count twice, and intervals would be too narrow. Leave prior out, or, "
            f"{_INSTEAD}; new records of the same clients need a ledger file of their own."
        )
    known = set(_names(prior))
    again = [number for number in sorted(visited) if names and names[number] in known]
    if again:
        warnings.warn(
            f"{words.listed(again, names)} took part in the study whose posterior is the prior: "
            "records that are in both count twice, which makes intervals too narrow. If these are "
            f"new records, all is well; {_INSTEAD}.",
            UserWarning,
            stacklevel=2,
        )


def _runs(prior: Prior | None) -> list[str]:
    return [] if prior is None else listed(prior.attrs, "ledger_runs")


def _names(prior: Prior | None) -> list[str]:
    if prior is None:
        return []
    return [*listed(prior.attrs, "clients"), *listed(prior.attrs, "prior_clients")]
