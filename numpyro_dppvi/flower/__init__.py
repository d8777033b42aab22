"""Flower as the courier between a consortium's server and its hospitals' gateways.

Needs the extra ``flower``. Nothing else of the library imports it, and nothing is decided here:
bytes go in at one end and come out at the other.
"""

from numpyro_dppvi.flower.courier import server_app
from numpyro_dppvi.flower.node import client_app

__all__ = ["client_app", "server_app"]
