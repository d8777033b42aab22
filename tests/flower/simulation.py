"""A study over Flower's simulation; run by test_flower.py.

Usage: python simulation.py FOLDER SCHEDULE
"""

import contextlib
import sys
import threading
from pathlib import Path

from flwr.simulation import run_simulation

from numpyro_dppvi.flower import client_app, server_app
from numpyro_dppvi.silo import settings
from numpyro_dppvi.silo.sockets import listening
from tests.silo import hospitals


def main(folder, schedule):
    _, paths = hospitals.write_consortium(folder, f"{hospitals.QUICK}, schedule={schedule}")
    places = [str(settings.read(path).socket) for path in paths.values()]
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(hospitals.gateways(paths))
        for name, gateway in opened.items():
            place = settings.read(paths[name]).socket
            server = stack.enter_context(listening(place, gateway.handle, gateway.most_bytes))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        run_simulation(
            server_app(
                folder / "study.py",
                lambda result: result.posterior.save(folder / "posterior.npz"),
                checkpoint=folder / "server.npz",
            ),
            client_app(lambda node: places[int(node["partition-id"])]),
            num_supernodes=3,
            backend_config={"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1}},
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
