"""NumPyro models with data, for tests, tutorials and benchmarks; not installed with the library."""
