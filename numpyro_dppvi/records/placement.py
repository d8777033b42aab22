"""Records of all clients over several devices, each of which holds some clients'."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from numpyro_dppvi import _validate
from numpyro_dppvi._typing import PyTree
from numpyro_dppvi.records.shards import Shards, end_to_end

AXIS = "clients"


class SpreadShards(NamedTuple):
    """Records of all clients, equally many clients on each device; the last ones may be empty.

    Sensitive: this is the data itself.

    Attributes:
        shards: On each device, those of its clients. Of a place without a client there are 0
            records.
        sizes: Records of the clients that there are; public.
    """

    shards: Shards
    sizes: tuple[int, ...]

    @property
    def records(self) -> dict[str, jax.Array]:
        """Arrays of shape ``(num_blocks, capacity, ...)`` by name, over the devices."""
        return self.shards.records

    @property
    def num_records(self) -> jax.Array:
        """Records of each client, shape ``(num_places,)``."""
        return self.shards.num_records

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        sharding = self.num_records.sharding
        assert isinstance(sharding, NamedSharding)  # spread has made it
        return sharding.mesh  # type: ignore[return-value]

    @property
    def clients_each(self) -> int:
        """How many clients' places a device has; client m is on device ``m // clients_each``."""
        return self.num_records.shape[0] // self.mesh.size


def spread(shards: Shards) -> SpreadShards | Shards:
    """Spreads clients over all devices; ``Shards`` as they are if there is but one.

    Each client's records are on one device, and what is computed from them is computed there.
    Devices work side by side on the clients of a group: where clients are visited one after the
    other, nothing is gained, and they are best left on one device. Under ``jax.distributed`` every
    process calls this with the same clients, and keeps those of its own devices.
    ``jax.default_device`` names one device, and so turns this off.

    Args:
        shards: What ``stack`` or ``stack_clients`` returned.

    Returns:
        What ``step`` takes in its place.

    Raises:
        TypeError: If it is anything else.
    """
    _validate.instance("shards", shards, Shards, "stack_clients(data_per_client)")
    devices = _devices(len(shards.num_records))
    if len(devices) == 1:
        return shards
    sizes = tuple(np.asarray(shards.num_records).tolist())
    mesh = Mesh(np.array(devices), (AXIS,))
    if shards.starts is not None:
        shards = _apart(shards, mesh.size)
    return SpreadShards(on_devices(mesh, padded(mesh, shards)), sizes)


def _apart(shards: Shards, num_devices: int) -> Shards:
    """Records that lie end to end, so that each device's are in as many blocks of its own."""
    assert shards.starts is not None
    capacity, num_clients = shards.capacity, len(shards.num_records)
    places = np.zeros((2, -(-num_clients // num_devices) * num_devices), np.int32)
    places[:, :num_clients] = shards.num_records, shards.starts
    sizes, starts = places.reshape(2, num_devices, -1)
    found = [end_to_end(each, capacity) for each in sizes]
    num_blocks = max(blocks for blocks, _ in found)
    own = np.stack([mine for _, mine in found]).astype(np.int32)
    first_rows = own + np.arange(num_devices)[:, None] * num_blocks * capacity

    def moved(leaf: jax.Array) -> Any:
        rows = np.asarray(leaf).reshape(-1, *leaf.shape[2:])
        new = np.zeros((num_devices * num_blocks * capacity, *rows.shape[1:]), rows.dtype)
        for to, start, size in zip(first_rows.flat, starts.flat, sizes.flat, strict=True):
            new[to : to + size] = rows[start : start + size]
        return new.reshape(-1, capacity, *rows.shape[1:])

    records = {name: moved(leaf) for name, leaf in shards.records.items()}
    return Shards(records, *map(jnp.asarray, (sizes.ravel(), own.ravel())))


def _devices(num_clients: int) -> list[jax.Device]:
    """As few devices as hold no more clients each than all of them would."""
    if jax.process_count() > 1:  # all take part; the first of each process come first
        everywhere = jax.devices()
        of_process = {process: jax.local_devices(process) for process in range(jax.process_count())}
        return sorted(
            everywhere,
            key=lambda one: (of_process[one.process_index].index(one), one.process_index),
        )
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if chosen is not None:
        return [chosen]
    # Rounded up twice. Ten clients on four devices are three each: the fourth device has one. Nine
    # are three each on three devices, and the fourth would hold nothing but padding.
    each = -(-num_clients // len(jax.devices()))
    return jax.devices()[: -(-num_clients // each)]


def padded(mesh: Mesh, tree: PyTree) -> PyTree:
    """Arrays with clients on the leading axis, with zeros after the last of them."""

    def longer(leaf: Any) -> Any:
        missing = -leaf.shape[0] % mesh.size
        if not missing:
            return leaf
        # On the host, where it needs no program of its own for every shape.
        return np.pad(np.asarray(leaf), [(0, missing)] + [(0, 0)] * (leaf.ndim - 1))

    return jax.tree.map(longer, tree)


def on_devices(mesh: Mesh, tree: PyTree) -> PyTree:
    """Arrays whose leading axis is cut into as many pieces as there are devices."""
    # A process hands over the pieces of its own devices alone; what others have in theirs, it does
    # not see.
    sharding = NamedSharding(mesh, P(AXIS))
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def of_mine(leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            # The callback below cuts NumPy arrays, which keys become as plain numbers.
            data = of_mine(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda piece: host[piece])

    return jax.tree.map(of_mine, tree)
