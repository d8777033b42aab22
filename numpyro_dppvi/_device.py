"""What programs run on, where that decides how they are laid out."""

import jax


def on_cpu() -> bool:
    """Whether programs run on a processor."""
    # There, loops are cheap, and arrays should stay in a core's cache. On an accelerator every turn
    # of a loop starts kernels, which take microseconds each, however little there is to do.
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if chosen is None:
        return jax.default_backend() == "cpu"
    return bool(getattr(chosen, "platform", chosen) == "cpu")
