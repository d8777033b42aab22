"""How a run ended, as a sentence for people."""

import enum


class Status(enum.Enum):
    """How a run ended; ``str(status)`` is a sentence."""

    COMPLETED = "All rounds ran and every merge was accepted."
    PROJECTED = (
        "All rounds ran. Where noise took a precision of the posterior below the prior's, it was "
        "raised back to that (see history.projected)."
    )
    REJECTED = (
        "All rounds ran, but some merges would have left the family's domain and were refused "
        "(see history.rejected): use a smaller damping, less noise or fewer clients a group."
    )

    def __str__(self) -> str:
        """The sentence."""
        return str(self.value)
