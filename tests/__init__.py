"""Tests of the library, and scripts that they start.

A package, because a data package of the battery installs one of this name.
"""
