"""A client by itself, out of what all clients of a run begin with, for tests."""

import jax


def client_of(assembly, number, state, shards, ledger_file=None):
    """One of the clients, with its own part of the records and of the first state."""
    records, num_records, own = jax.tree.map(
        lambda leaf: leaf[number], (dict(shards.records), shards.num_records, state.clients)
    )
    return assembly.client(number, records, num_records, own, ledger_file)
