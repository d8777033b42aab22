"""Tutorials: `make tutorials` runs them in full and writes their pages and notebooks."""

# In the order in which they are read; the last one is a gallery of models.
TUTORIALS = ("hello", "hospitals", "hierarchy", "methods", "network", "practice", "gallery")
