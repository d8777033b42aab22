"""What a client does, alone or as one of many on the axis of a compiled round.

A request comes in and a release goes out. The functions here are pure, and the compiled round maps
them over the client axis. :class:`Client` is one client with everything that is its own, so that
it can live anywhere: it needs nothing from the server but requests and answers.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_dppvi._typing import Array, Natural, PRNGKey
from numpyro_dppvi.families import factors
from numpyro_dppvi.families.compiled import compiled
from numpyro_dppvi.methods import values
from numpyro_dppvi.methods.visits import ClientParams, Likelihood, OfRecords, Outcome, Visit
from numpyro_dppvi.privacy import (
    ClientPlan,
    Entry,
    Ledger,
    LedgerFile,
    SecretKeys,
    draw_noise,
    noise_laws,
)
from numpyro_dppvi.protocol.messages import Answer, Release, Request
from numpyro_dppvi.protocol.problem import Problem


class ClientState(NamedTuple):
    """What a client keeps from visit to visit; of many clients, on a leading axis.

    Attributes:
        private: The factors of its shards, which never leave it (of virtual clients, or of any
            method that releases changes under a trusted aggregator); ``None`` where there are none.
        pulled: With asynchronous clients, the q that it starts from; else ``None``, for the q of
            the request.
    """

    private: Natural | None = None
    pulled: Natural | None = None


def secret_key_of_visit(
    problem: Problem, round_key: PRNGKey, *, group: Array | int, client: Array | int
) -> PRNGKey:
    """The secret key of one visit, from a round's."""
    # A round whose server takes the steps has one group. In any other a client may be in several,
    # and no two of its visits may share their noise.
    if not problem.method.central:
        round_key = jax.random.fold_in(round_key, group)
    return jax.random.fold_in(round_key, client)


def visit(
    problem: Problem,
    params: ClientParams,
    state: ClientState,
    request: Request,
    likelihood: Likelihood,
    secret_key: PRNGKey,
    drawn: noise_laws.StepNoise | None = None,
) -> Outcome:
    """What comes of a request, whatever stands behind the client's likelihood."""
    own = request.factor if state.private is None else state.private
    if own is None:
        raise ValueError("request must carry the factor of a client that keeps none to itself.")
    asked = Visit(
        family=problem.family,
        layout=problem.layout,
        solver=problem.method.solver(request.learning_rate),
        num_steps=problem.method.num_local_steps,
        # An asynchronous client has worked on what it pulled when it last sent, not on today's q.
        q=request.q if state.pulled is None else state.pulled,
        own=own,
        params=params,
        rng_key=request.rng_key,
        secret_key=secret_key,
        drawn=drawn,
        told=request.told,
    )
    return problem.method.visit(asked, likelihood)


def respond(
    problem: Problem,
    params: ClientParams,
    state: ClientState,
    request: Request,
    records: Mapping[str, Array],
    num_records: Array,
    secret_key: PRNGKey,
    drawn: noise_laws.StepNoise | None = None,
) -> Outcome:
    """What a client makes of a request and its records.

    Records are arrays by argument name, padded, of which ``num_records`` rows count; the other
    arguments are as of :func:`visit`.
    """
    space, family, layout = problem.space, problem.family, problem.layout
    expectation = problem.method.expectation
    likelihood = OfRecords(space, family, expectation, layout, dict(records), num_records, params)
    return visit(problem, params, state, request, likelihood, secret_key, drawn)


def settled(state: ClientState, kept: Natural | None, answer: Answer) -> ClientState:
    """What a client keeps once the server has answered: what it refused did not happen here."""
    # What is kept follows the share of the change that was merged, the damping, so that private
    # factors and the server's stay in step; a refused merge has a share of 0.
    if state.private is not None and kept is not None:
        moved = factors.multiply(state.private, factors.power(kept, answer.share))
        state = state._replace(private=moved)
    if state.pulled is not None:
        state = state._replace(pulled=answer.q)
    return state


_respond = compiled("problem")(respond)
_settled = jax.jit(settled)


@dataclass(frozen=True)
class Client:
    """One client, wherever it lives. Sensitive: it holds the data, and keys that protect it.

    A value: :meth:`respond` and :meth:`settle` return the client to go on with, and whoever
    responds twice from the same one has released twice. With a ledger file the second charge is
    added to the first.

    Attributes:
        number: Which of the clients it is.
        problem: What is compiled in; public.
        params: The numbers of its mechanism; public.
        records: Its records, arrays by argument name, padded.
        num_records: How many rows count.
        secret_keys: Where its noise and batches come from.
        plan: Its privacy plan; ``None`` without privacy.
        ledger: What it has released, and its budget; it is number 0 of this ledger.
        ledger_file: Where it is charged on disk, too.
        state: What it keeps from visit to visit.
        unanswered: What it will keep of its last release, which the server has not answered yet.
    """

    number: int
    problem: Problem
    params: ClientParams
    records: Mapping[str, Array] = dataclasses.field(repr=False)
    num_records: Array
    secret_keys: SecretKeys = dataclasses.field(repr=False)
    plan: ClientPlan | None = None
    ledger: Ledger = dataclasses.field(default_factory=Ledger)
    ledger_file: LedgerFile | None = None
    state: ClientState = dataclasses.field(default=ClientState(), repr=False)
    unanswered: Natural | None = dataclasses.field(default=None, repr=False)

    def respond(self, request: Request) -> "tuple[Client, Release]":
        """Charges its ledger, computes, and releases.

        Returns:
            The client to go on with, and what leaves it.

        Raises:
            BudgetExceededError: If its budget does not cover the release. Nothing is computed.
        """
        return self.charged(request).released(request)

    def charged(self, request: Request) -> "Client":
        """The client once its ledger has been charged for a request; nothing is computed.

        Raises:
            BudgetExceededError: If its budget does not cover the release.
        """
        # Apart from `released`, so that a gateway can write the charge down before it computes.
        return dataclasses.replace(self, ledger=self._charged(int(request.round)))

    def released(self, request: Request) -> "tuple[Client, Release]":
        """What comes of a request that has been charged.

        Returns:
            The client to go on with, and what leaves it.
        """
        number, group = int(request.round), int(request.group)
        # From the operating system at every call: a client that releases twice for one request,
        # after a crash, say, adds noise of another draw the second time.
        round_key = self.secret_keys.round_key(number)
        outcome = _respond(
            self.problem,
            self.params,
            self.state,
            # The secret key is made of them, and the program reads neither.
            request._replace(round=0, group=0),
            self.records,
            self.num_records,
            secret_key_of_visit(self.problem, round_key, group=group, client=self.number),
            self._drawn(request),
        )
        after = dataclasses.replace(self, unanswered=outcome.kept)
        return after, Release(outcome.release, outcome.failed)

    def settle(self, answer: Answer) -> "Client":
        """Follows what the server has accepted of its last release."""
        state = _settled(self.state, self.unanswered, answer)
        return dataclasses.replace(self, state=state, unanswered=None)

    def _charged(self, round_number: int) -> Ledger:
        if self.plan is None:
            return self.ledger
        event, count = self.plan.mechanism.dp_event, self.plan.releases_per_visit
        # In its own ledger a client is number 0, whatever its number among the clients.
        entry = Entry(round_number, 0, event, count, self.ledger.run)
        if self.ledger_file is None:
            return self.ledger.charge([entry])
        return self.ledger_file.charge(self.ledger, [entry])

    def _drawn(self, request: Request) -> Any:
        """Noise that is drawn on the host; ``None`` where it comes from the secret key."""
        if self.plan is None or not values.draws_exactly(self.problem.method):
            return None
        size = sum(leaf.size for leaf in jax.tree.leaves(request.q))
        # One visit of the only mechanism: a scalar, so that its noise has no leading axis.
        return draw_noise([self.plan.mechanism], np.asarray(0), size)


def settle_many(
    state: ClientState, clients: Array, kept: Natural | None, answer: Answer
) -> ClientState:
    """:func:`settled` for some of many clients; numbers out of range are dropped."""
    if not jax.tree.leaves(state):
        return state
    # Only those that were visited: the others neither moved nor pulled a new q.
    # Read at a number out of range, JAX gives the last client's; written there, it is dropped.
    after = jax.vmap(settled, (0, 0, None))(factors.picked(state, clients), kept, answer)
    return factors.replaced(state, clients, after)
