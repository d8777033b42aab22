"""A client by itself, out of what all clients of a run begin with, for tests."""

import jax


def client_of(assembly, number, state, shards):
    """One of the clients, with its own part of the records and of the first state."""
    records, num_records = shards.of_client(number)
    own = jax.tree.map(lambda leaf: leaf[number], state.clients)
    return assembly.client(number, records, num_records, own)
