"""Every method on public data sets that bring binary, count, continuous and censored outcomes.

python -m benchmarks.battery run --half chosen --seeds 1 --processes 4
python -m benchmarks.battery table
python -m benchmarks.battery sets

Half of the sets are `chosen`: methods may be tuned on them. The other half is `reported` and must
not be. Which is which was declared before any result was seen. Sets that are `further` were added
later, to look for what these do not show.
"""
