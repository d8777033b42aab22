"""Tutorials: `make tutorials` runs them in full and writes their pages into docs/tutorials."""

TUTORIALS = ("hello", "hospitals", "hierarchy", "methods", "network", "practice")
