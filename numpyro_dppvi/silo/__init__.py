"""Hospitals that keep their records: a gateway at each, a server, and messages between them.

Any engine that carries bytes can be the courier between the two sides. It may import ``run`` and
below.
"""
