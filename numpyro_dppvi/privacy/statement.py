"""The privacy statement: what was promised, released and spent, as text, Markdown and JSON."""

import functools
import importlib.metadata
import importlib.resources
import itertools
import json
from dataclasses import dataclass
from typing import Any

from numpyro_dppvi import _html, _validate
from numpyro_dppvi.privacy import accounting, units, words
from numpyro_dppvi.privacy.ledger import Ledger
from numpyro_dppvi.privacy.meaning import best_attack
from numpyro_dppvi.privacy.noise_laws import DiscreteGaussian
from numpyro_dppvi.privacy.plan import PrivacyPlan, cautions

NOT_COVERED = (
    "choices made by looking at the data: tuning, preprocessing, choice of model, stopping",
    "a person with more records than the unit says, or with records at several clients",
    "floating-point effects: 64-bit noise rounded to a grid is not an exact discrete mechanism",
    "side channels such as timing, and anything a client reveals outside this run",
)
_NOT_COVERED_EXACT = (
    *NOT_COVERED[:2],
    "faults of OpenDP, which draws the noise, or of the operating system's random numbers",
    NOT_COVERED[3],
)
_COUNT_NOT_COVERED = (
    "how many records a client holds: add_or_remove_one would usually protect that, but here it is "
    "public (it appears in this statement, in the result and in checkpoints)"
)
_PACKAGES = ("numpyro-dppvi", "dp-accounting", "jax", "numpyro")


def statement_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of what :meth:`PrivacyStatement.to_json` writes."""
    text = importlib.resources.files(__package__).joinpath("statement.schema.json").read_text()
    return dict(json.loads(text))


@dataclass(frozen=True)
class PrivacyStatement:
    """What a run released and what that cost. Print it, or use ``to_markdown`` or ``to_json``.

    Attributes:
        method: The name of the method.
        plan: The plan; ``None`` for a run without privacy.
        ledger: What was charged.
        insecure_seed: Whether noise came from a known seed and can be removed.

    Raises:
        TypeError: If a field has the wrong type.

    Example:
        >>> import numpyro_dppvi as dppvi
        >>> method, budget = dppvi.DPOptimization(), dppvi.PrivacyBudget(epsilon=1.0)
        >>> plan = dppvi.plan_privacy(method, budget, num_rounds=10, client_sizes=[900, 600])
        >>> statement = PrivacyStatement("DPOptimization", plan, plan.ledger(), insecure_seed=False)
        >>> statement.as_dict()["max_epsilon"]  # nothing has been released yet
        0.0
        >>> print(statement)
        Privacy statement
          method ...
    """

    method: str
    plan: PrivacyPlan | None
    ledger: Ledger
    insecure_seed: bool

    def __post_init__(self) -> None:
        """Checks the fields; ``insecure_seed`` is a flag, because 0 is a seed, too."""
        _validate.instance("method", self.method, str, "'DPOptimization'")
        if self.plan is not None:
            _validate.instance("plan", self.plan, PrivacyPlan, "plan_privacy(...)")
        _validate.instance("ledger", self.ledger, Ledger, "plan.ledger()")
        _validate.flag("insecure_seed", self.insecure_seed)

    def as_dict(self) -> dict[str, Any]:
        """The statement as plain values."""
        packages = (*_PACKAGES, *["opendp"] * self._drawn_exactly)
        return {
            "schema": "numpyro_dppvi/privacy-statement/1",
            "private": self.plan is not None,
            "method": self.method,
            "unit": "one record" if self.plan is None else self.plan.unit,
            "given": words.GIVEN,
            "noise": self._noise(),
            "clients": self._clients,
            # Clients hold disjoint people, so that nobody is in two of these sums: the whole run
            # costs a person what the client that holds their records has spent.
            "max_epsilon": self._largest("epsilon_spent"),
            "max_epsilon_to_participant": self._largest("epsilon_to_participant"),
            "max_delta": self._largest("delta"),
            **({"cautions": self._cautions} if self._cautions else {}),
            "not_covered": list(self._not_covered),
            "versions": {name: importlib.metadata.version(name) for name in packages},
        }

    def to_json(self) -> str:
        """The statement as JSON, following :func:`statement_schema`.

        JSON has no infinite numbers, so an infinite epsilon is the string ``"infinity"``.
        """
        return json.dumps(words.finite(self.as_dict()), indent=2, allow_nan=False)

    @property
    def _names(self) -> tuple[str, ...]:
        """The clients' names, as the plan or the ledger has them."""
        return self.plan.names or self.ledger.client_names if self.plan else ()

    def _largest(self, name: str) -> Any:
        """The largest value of a field over clients; ``None`` without privacy."""
        return max((client[name] for client in self._clients), default=None)

    def _noise(self) -> str:
        if self.plan is None:
            return "none"
        if self.insecure_seed:
            return "from a known seed: anyone who knows it can remove the noise"
        if self._drawn_exactly:
            return "integers drawn exactly by OpenDP, from the operating system's entropy"
        return "keys from the operating system's entropy"

    @property
    def _drawn_exactly(self) -> bool:
        """Whether all noise is discrete."""
        clients = self.plan.clients if self.plan else ()
        noise = [getattr(client.mechanism, "noise", None) for client in clients]
        return bool(noise) and all(isinstance(law, DiscreteGaussian) for law in noise)

    @property
    def _not_covered(self) -> tuple[str, ...]:
        if self.plan is None:
            return ("everything: no noise was added",)
        items = _NOT_COVERED_EXACT if self._drawn_exactly else NOT_COVERED
        counted = any(client["relation"] == "add_or_remove_one" for client in self._clients)
        return (*items, _COUNT_NOT_COVERED) if counted else items

    @functools.cached_property
    def _clients(self) -> list[dict[str, Any]]:
        if self.plan is None:
            return []
        spent = self.ledger.spent()
        rows = []
        for number, client in enumerate(self.plan.clients):
            mechanism, budget = client.mechanism, client.budget
            # Of what was charged and not of what was planned: a run may have been interrupted.
            composition = self.ledger.composition(number)
            attack = best_attack(composition, budget.relation)
            rows.append(
                {
                    "client": number,
                    **({"name": self._names[number]} if self._names else {}),
                    "records": mechanism.num_records,
                    "relation": budget.relation,
                    "unit": f"one {units.in_words(budget)}",
                    "mechanism": mechanism.name,
                    "batch": mechanism.batch,
                    "clip_norm": mechanism.clip_norm,
                    "contributions": mechanism.contributions,
                    "sensitivity": mechanism.sensitivity(budget.relation),
                    "noise_multiplier": mechanism.noise_multiplier,
                    "noise_std": mechanism.noise_std,
                    "own_noise_std": mechanism.share_std,
                    "noise_shared_by": mechanism.num_shares,
                    "releases": sum(count for _, count in composition),
                    "epsilon_spent": float(spent[number]),
                    "epsilon_to_participant": accounting.epsilon_to_participant(
                        composition, budget.delta, budget.relation, mechanism.num_shares
                    ),
                    "epsilon_spent_before": client.epsilon_before,
                    **({"earlier_rounds": self._earlier(number)} if self.plan.continues else {}),
                    "epsilon_budget": budget.epsilon,
                    "delta": budget.delta,
                    "accountant": accounting.describe(composition),
                    "best_attack": attack._asdict(),
                }
            )
        return rows

    def _earlier(self, number: int) -> list[dict[str, Any]]:
        """A client's rounds before the run was continued, part by part."""
        parts = self.plan.parts if self.plan else ()
        earlier = []
        for part, after in itertools.pairwise(parts):
            client = part.clients[number]
            earlier.append(
                {
                    "first_round": part.first_round + 1,
                    "last_round": after.first_round,
                    "releases": client.num_releases,
                    "noise_multiplier": client.mechanism.noise_multiplier,
                    "noise_std": client.mechanism.noise_std,
                    "epsilon_budget": client.budget.epsilon,
                    "delta": client.budget.delta,
                }
            )
        return earlier

    def __str__(self) -> str:
        """The statement as text, with equal clients on one line."""
        if self.plan is None:
            return f"Privacy statement\n  {self._nothing_promised()}"
        lines = [f"  {name:<12} {fact}" for name, fact in self._facts().items()]
        table = self._table()
        first_width = max(12, *(len(first) for first, *_ in table))
        for first, *others in table:
            widths = (8, 9, 7, 10, 14, 10, 8, 17)
            padded = (f"{cell:>{width}}" for cell, width in zip(others, widths, strict=False))
            lines.append(f"  {first:<{first_width}} {' '.join(padded)}")
        lines += [line for sentence in self._sentences() for line in words.paragraph(sentence)]
        lines += ["  Not covered:", *(f"    - {item}" for item in self._not_covered)]
        return "\n".join(["Privacy statement", *lines])

    def _repr_html_(self) -> str:
        """The statement for notebooks, with equal clients on one line."""
        title = _html.heading("Privacy statement")
        if self.plan is None:
            return title + _html.paragraph(self._nothing_promised())
        header, *rows = self._table()
        parts = [_html.facts(self._facts().items()), _html.table(header, rows)]
        parts += [_html.paragraph(sentence) for sentence in self._sentences()]
        return "".join(
            [title, *parts, _html.folded("Not covered", _html.bullets(self._not_covered))]
        )

    def to_markdown(self) -> str:
        """The statement as Markdown, with equal clients on one line."""
        if self.plan is None:
            return f"# Privacy statement\n\n{self._nothing_promised()}\n"
        header, *rows = self._table()
        rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        rows = [header, ["---"] * len(header), *rows]
        parts = [
            "# Privacy statement",
            "\n".join(f"- **{name}**: {fact}" for name, fact in self._facts().items()),
            "\n".join(f"| {' | '.join(row)} |" for row in rows),
            *self._sentences(),
            "## Not covered",
            "\n".join(f"- {item}" for item in self._not_covered),
        ]
        return "\n\n".join(parts) + "\n"

    def _table(self) -> list[list[str]]:
        """The header, and a row for every group of clients that differ in names alone."""
        shared = self._num_shares > 1
        header = ["clients", "records", "releases", "clip", "noise std", "epsilon spent"]
        rows = [header + ["of budget", "delta"] + ["to participants"] * shared]
        for first, last in words.alike({**c, "client": 0, "name": ""} for c in self._clients):
            client = self._clients[first]
            rows.append(
                [
                    words.clients(first, last, self._names),
                    str(client["records"]),
                    str(client["releases"]),
                    f"{client['clip_norm']:g}",
                    f"{client['noise_std']:.4g}",
                    words.rounded_up(client["epsilon_spent"]),
                    f"{client['epsilon_budget']:.10g}",
                    f"{client['delta']:.10g}",
                    *[words.rounded_up(client["epsilon_to_participant"])] * shared,
                ]
            )
        return rows

    @property
    def _num_shares(self) -> int:
        """How many clients' noise adds up to that of a sum; the same number for all clients."""
        return max(client["noise_shared_by"] for client in self._clients)

    @property
    def _cautions(self) -> list[str]:
        if self.plan is None:
            return []
        return cautions(self.plan, [client["epsilon_spent"] for client in self._clients])

    def _nothing_promised(self) -> str:
        return (
            f"{self.method} adds no noise: this run gives no differential privacy, and its results "
            "may reveal records."
        )

    def _facts(self) -> dict[str, str]:
        """Facts that hold for all clients, by name."""
        facts = self.as_dict()
        return {
            "method": self.method,
            "unit": f"{facts['unit']}; {words.neighbours(c['relation'] for c in self._clients)}",
            "mechanism": self._each("mechanism"),
            "batches": self._each("batch"),
            "accountant": f"{self._each('accountant')} "
            f"(dp-accounting {facts['versions']['dp-accounting']})",
            "noise": facts["noise"],
        }

    def _each(self, name: str) -> str:
        """The distinct values of a field over clients, or the first few of many."""
        values = sorted({str(client[name]) for client in self._clients})
        more = [f"and {len(values) - 3} others"] if len(values) > 4 else []
        return ", ".join([*(values[:3] if more else values), *more])

    def _sentences(self) -> list[str]:
        """Sentences about the run as a whole."""
        if self.plan is None:
            return []
        facts, clients = self.as_dict(), self._clients
        # Explained for the client whose releases reveal most; the others are better off.
        worst = max(clients, key=lambda c: c["best_attack"]["true_positive_rate"])["client"]
        budget = self.plan.clients[worst].budget
        attack = best_attack(self.ledger.composition(worst), budget.relation)
        shares, most = self._num_shares, facts["max_epsilon_to_participant"]
        to_others = words.to_participants(facts["unit"], shares, most, facts["max_delta"])
        return [
            f"Each line is one client's own cost; over all clients, {facts['unit']} is protected "
            f"by epsilon = {words.rounded_up(facts['max_epsilon'])} at delta = "
            f"{facts['max_delta']:.10g}.",
            *[to_others] * (shares > 1),
            *self._cautions,
            *filter(None, [self.plan.continued_in_words, self.plan.before_in_words]),
            words.in_other_words(words.client(worst, self._names), budget, attack),
        ]
