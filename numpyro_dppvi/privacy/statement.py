"""The privacy statement: what was promised, released and spent, for people and for machines."""

import importlib.metadata
import json
from dataclasses import dataclass
from typing import Any

from numpyro_dppvi.privacy import accounting
from numpyro_dppvi.privacy.ledger import Ledger
from numpyro_dppvi.privacy.plan import PrivacyPlan

NOT_COVERED = (
    "choices made by looking at the data: tuning, preprocessing, choice of model, stopping",
    "a person who appears in more than one record, or at more than one client",
    "floating-point effects: noise is drawn in finite precision from a non-cryptographic generator",
    "side channels such as timing, and everything that a client shows outside this run",
)


@dataclass(frozen=True)
class PrivacyStatement:
    """What a run cost. ``print`` it, or take ``to_json()``.

    Attributes:
        method: Name of the method.
        plan: The plan it ran under; ``None`` for a run without privacy.
        ledger: What was charged.
        insecure_seed: Whether noise came from a known seed, so that it can be removed.
    """

    method: str
    plan: PrivacyPlan | None
    ledger: Ledger
    insecure_seed: bool

    def as_dict(self) -> dict[str, Any]:
        """The statement as plain values."""
        private = self.plan is not None
        return {
            "schema": "numpyro_dppvi/privacy-statement/1",
            "private": private,
            "method": self.method,
            "unit": "one record",
            "noise": self._noise(),
            "clients": self._clients(),
            "max_epsilon": max((c["epsilon_spent"] for c in self._clients()), default=None),
            "not_covered": list(NOT_COVERED) if private else ["everything: no noise was added"],
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("numpyro-dppvi", "dp-accounting", "jax", "numpyro")
            },
        }

    def to_json(self) -> str:
        """The statement as JSON; an infinite epsilon is written as ``Infinity``."""
        return json.dumps(self.as_dict(), indent=2)

    def _noise(self) -> str:
        if self.plan is None:
            return "none"
        if self.insecure_seed:
            return "from a known seed: whoever knows it can remove the noise"
        return "keys from the operating system's entropy"

    def _clients(self) -> list[dict[str, Any]]:
        if self.plan is None:
            return []
        spent = self.ledger.spent()
        rows = []
        for number, client in enumerate(self.plan.clients):
            mechanism, budget = client.mechanism, client.budget
            composition = self.ledger.composition(number)
            rows.append(
                {
                    "client": number,
                    "records": mechanism.num_records,
                    "relation": budget.relation,
                    "mechanism": mechanism.name,
                    "batch": mechanism.batch,
                    "clip_norm": mechanism.clip_norm,
                    "sensitivity": mechanism.sensitivity(budget.relation),
                    "noise_multiplier": mechanism.noise_multiplier,
                    "noise_std": mechanism.noise_std,
                    "own_noise_std": mechanism.share_std,
                    "noise_shared_by": mechanism.num_shares,
                    "releases": sum(count for _, count in composition),
                    "epsilon_spent": float(spent[number]),
                    "epsilon_budget": budget.epsilon,
                    "delta": budget.delta,
                    "accountant": accounting.describe(composition),
                }
            )
        return rows

    def __str__(self) -> str:
        """The statement as text, equal clients on one line."""
        if self.plan is None:
            return (
                f"Privacy statement\n  {self.method} adds no noise: this run gives no "
                "differential privacy, and whatever it shows may reveal records."
            )
        facts = self.as_dict()
        lines = [
            "Privacy statement",
            f"  method       {self.method}",
            f"  unit         one record; neighbours by {_words(facts, 'relation')}",
            f"  mechanism    {_words(facts, 'mechanism')}",
            f"  accountant   {_words(facts, 'accountant')} "
            f"(dp-accounting {facts['versions']['dp-accounting']})",
            f"  noise        {facts['noise']}",
            f"  {'clients':<11}  {'records':>8} {'releases':>9} {'clip':>7} {'noise std':>10} "
            f"{'epsilon spent':>14} {'of budget':>10} {'delta':>8}",
        ]
        lines += [f"  {line}" for line in _client_lines(facts["clients"])]
        lines.append(
            f"  Each client's records are protected by its own line; any record of the whole by "
            f"epsilon = {facts['max_epsilon']:.4f}."
        )
        lines.append("  Not covered:")
        lines += [f"    - {item}" for item in facts["not_covered"]]
        return "\n".join(lines)


def _words(facts: dict[str, Any], name: str) -> str:
    return ", ".join(sorted({client[name] for client in facts["clients"]}))


def _client_lines(clients: list[dict[str, Any]]) -> list[str]:
    """One line for every run of clients that differ in nothing but their number."""
    lines: list[str] = []
    start = 0
    for number, client in enumerate(clients):
        following = clients[number + 1] if number + 1 < len(clients) else {}
        if {**following, "client": 0} == {**client, "client": 0}:
            continue
        name = str(number) if number == start else f"{start}-{number}"
        lines.append(
            f"{name:<11}  {client['records']:>8} {client['releases']:>9} {client['clip_norm']:>7g} "
            f"{client['noise_std']:>10.4g} {client['epsilon_spent']:>14.4f} "
            f"{client['epsilon_budget']:>10g} {client['delta']:>8g}"
        )
        start = number + 1
    return lines
