"""What goes between the server and a client, and nothing else does."""

from typing import NamedTuple

from numpyro_dppvi._typing import Array, Natural, PRNGKey, PyTree


class Request(NamedTuple):
    """What the server sends to a client. All of it was released before, or is public.

    Attributes:
        q: The current approximation, where the client's solve begins.
        factor: What to divide out of q for the cavity; ``None`` where the client keeps its factors
            to itself.
        rng_key: Key for draws of the latents, no secret.
        learning_rate: For Adam, where the method names no optimiser.
        told: What the method's server tells its clients beside q; ``None`` for nothing.
        round: Number of the round. It and ``group`` tell a client's visits apart, for its ledger
            and its secret keys; the compiled round, which has both elsewhere, leaves them out.
        group: Which of the round's groups the client is visited in.
    """

    q: Natural
    factor: Natural | None
    rng_key: PRNGKey
    learning_rate: Array
    told: PyTree = None
    round: int = 0
    group: int = 0


class Release(NamedTuple):
    """What leaves a client, made by the privacy mechanism and charged before.

    Attributes:
        value: A tree of arrays; what it means is the method's to say (``Method.take``).
        failed: Whether the solve did not end in finite numbers; a function of the released
            gradients, and always false where noise is added after the solve.
    """

    value: PyTree
    failed: Array


class Answer(NamedTuple):
    """What the server says when it has taken a release.

    Attributes:
        share: The share of the change that it accepted: the damping, or 0 for a refused one.
        q: The approximation from here on.
    """

    share: Array
    q: Natural
