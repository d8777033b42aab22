"""Flower as the courier between a consortium's server and its hospitals' gateways.

Needs the extra ``flower``. Nothing else of the library imports it, and nothing is decided here:
bytes go in at one end and come out at the other.
"""

from numpyro_dppvi.flower.courier import client_app, server_app

__all__ = ["client_app", "server_app"]
