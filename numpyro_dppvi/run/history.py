"""What a run gives besides its posterior: what happened round by round, and how it ended."""

import enum
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import chi2

from numpyro_dppvi import _html
from numpyro_dppvi._typing import Natural


class History(NamedTuple):
    """What happened round by round; functions of released values only.

    Attributes:
        natural: Natural parameters of q after each round, on a leading axis.
        movement: Jeffreys divergence between q before and after each round, in nats, shape
            ``(num_rounds,)``.
        projected: Entries of the product of the clients' factors that were raised to zero, by
            round.
        rejected: Merges that were refused because q would have left its domain, by round.
        failed: Clients whose solve did not end in finite numbers and so changed nothing, by round;
            always 0 for methods that add noise after the solve, which hides it.
    """

    natural: Natural
    movement: np.ndarray
    projected: np.ndarray
    rejected: np.ndarray
    failed: np.ndarray

    def __repr__(self) -> str:
        """A line, and not a page of arrays."""
        number = len(self.movement)
        said = f"{number} round{'s' * (number != 1)}"
        last = f", the last moved {self.movement[-1]:.3g} nats" if number else ""
        return f"History({said}{last}; fields {', '.join(self._fields)})"


class Outcome(enum.Enum):
    """How a run ended, in a word; the worst that applies."""

    COMPLETED = "completed"
    """All rounds ran, or the posterior has settled before, and nothing had to be mended."""
    PROJECTED = "projected"
    """All rounds ran. Noise took precisions below the prior's, and they were raised back to that,
    which is usual under noise and no reason to worry."""
    NOISY = "noisy"
    """All rounds ran, but noise makes intervals more than 3 times as wide as they would be without
    privacy, as far as the releases of :class:`~numpyro_dppvi.FisherScoring` tell; with any method,
    where the budget allows no less and the posterior is not much narrower than the prior, where it
    is as good as the prior, or where records hardly narrow latents on which others hang."""
    BENT = "bent"
    """All rounds ran, but outcomes lie further out than the model says, so that clips cut more of
    what they say than it expects. Only :class:`~numpyro_dppvi.FisherScoring` knows."""
    UNSETTLED = "unsettled"
    """All rounds ran, and the last one still moved the posterior, by more than 0.4 of its standard
    deviations with noise or 0.1 without. Without noise also where small rounds have more than 0.1
    to go; with :class:`~numpyro_dppvi.FisherScoring` also where releases still pull one way; with
    other methods also where their steps cannot come from as wide a prior as the model has."""
    DIVERGED = "diverged"
    """Some merges were refused, or some clients' solves did not end in finite numbers; without
    privacy, if the posterior has not recovered since."""
    INTERRUPTED = "interrupted"
    """Ctrl-C ended the run before its last round, or the ledger did, because other runs that share
    its file had used up a budget."""


# The last round's movement, in posterior standard deviations, from which a run is called unsettled.
# Under noise every round moves a little: .15 to .35 where the location is found.
_SETTLED_WITH_NOISE, _SETTLED = 0.4, 0.1
# What draws may leave in the posterior where a run ends at its limit: two deviations are 0.05.
_AVERAGED = 0.025
# So many times as wide as without privacy, intervals are mostly noise: eight ninths of a variance,
# and three quarters where what the budget allows at best is all that can be told.
_NOISY, _MOSTLY = 3.0, 2.0
# A posterior so many times as wide as the prior is as good as the prior, or is said to be so wide;
# what is a quarter as wide has learnt something, whatever the budget promises.
_PRIOR, _TOLD, _NARROWED = 0.9, 0.5, 0.25
# A learnt spread gives way to few percent of far outcomes (docs/decisions.md, "Heavy tails").
_UNSEEN = 0.02
# A larger part of the records does not lie far out by itself: the posterior is far from them.
_MANY = 0.2
# So many times as wide as without privacy, intervals miss something if noise is not in them: it is
# as large as what they hold.
_MISSING = 1.5
# Of runs that have arrived, so many have a stronger pull by chance.
_BY_CHANCE = 1e-4


@dataclass(frozen=True)
class Status:
    """How a run ended; ``str(status)`` says it in sentences.

    Attributes:
        outcome: In a word.
        rounds: Rounds that ran.
        num_rounds: Rounds that were to run; at most so many where the run ends when it has settled.
        projected: Entries that were raised to the prior's precision, in all.
        rejected: Merges that were refused, in all.
        failed: Solves that ended in no finite numbers, in all.
        private: Whether the rounds that ran cost privacy.
        refused: Whether the ledger refused a round.
        moved: How far the last round moved the posterior, in its standard deviations: the root
            mean square over latents.
        left: Without privacy, how far more rounds would still move it, in the same units: the
            largest such distance of an entry, a mean's or that of a standard deviation's logarithm.
            ``None`` where nobody can tell: under noise, and after few rounds.
        until_settled: Whether the run was to end when it has settled.
        alone: Whether each client fitted a posterior of its own, in one round that has no next.
        pull: How strongly the last releases pull the posterior away, in mean squares of what noise
            explains; ``None`` where nobody can tell.
        pulled: Whether that is more than chance.
        widened: How many times as wide as without privacy intervals are, as far as releases tell:
            the median over latents. ``None`` where nobody can tell.
        faint: With privacy, latents with entries of which little was learnt, more than half as
            wide as under the prior: name, how many such entries, of how many. None of those that
            hang on others.
        cut: The fraction of records whose outcomes lie far out, beyond what the model expects, so
            that clips cut what they say; 0 where that may be noise, ``None`` where nobody can tell.
        unseen: The fraction of records of which that may be so without being seen; ``None`` where
            outcomes are few, as yes and no, or nobody can tell.
        noise: Without privacy, how far draws of the latents have moved the posterior from where
            they do on average, in its standard deviations. ``None`` as for ``left``.
        recovered: Without privacy, whether the path has arrived since the last visit that failed
            and the last merge that was refused.
        least: How many times as wide as without privacy intervals must be under the budget, at
            best (:class:`~numpyro_dppvi.privacy.Worth`); ``None`` where nobody can tell.
        narrowed: With privacy, how many times as wide as the prior the posterior is, at least, for
            three quarters of the latents: the lower quartile of ratios of standard deviations, on
            the unconstrained scale. ``None`` with a start of ``init_scale``.
        above: The same of latents that hang on no others, where effects are integrated out; else
            ``None``. Effects are as narrow as these say, whatever was learnt of them.
        untold: With privacy, latents that records hardly narrow, each with those that its prior
            depends on, whose widths cannot be believed. None where effects are integrated out.
        caution: Why the method's steps cannot come from the model's prior; empty if they can.
        noiseless: Whether rounds that cost privacy added no noise, as under an infinite epsilon:
            what is amiss is none of the budget's doing then.
        in_turn: Whether several clients were visited one after the other.
    """

    outcome: Outcome
    rounds: int
    num_rounds: int
    projected: int
    rejected: int
    failed: int
    private: bool
    refused: bool = False
    moved: float = 0.0
    left: float | None = None
    until_settled: bool = False
    alone: bool = False
    pull: float | None = None
    pulled: bool = False
    widened: float | None = None
    faint: tuple[tuple[str, int, int], ...] = ()
    cut: float | None = None
    unseen: float | None = None
    noise: float | None = None
    recovered: bool = False
    least: float | None = None
    narrowed: float | None = None
    above: float | None = None
    untold: tuple[tuple[str, tuple[str, ...]], ...] = ()
    caution: str = ""
    noiseless: bool = False
    in_turn: bool = False

    def __str__(self) -> str:
        """The sentences."""
        return " ".join(self._sentences())

    def _sentences(self) -> list[str]:
        cost = " What those rounds released is charged all the same." if self.private else ""
        if self.outcome is Outcome.INTERRUPTED:
            what = "the posterior after them" if self.rounds else "the prior, because none did"
            used_up = ", because other runs on its ledger file have used up a budget"
            why = used_up if self.refused else ""
            said = [
                f"The run was interrupted{why}: {self.rounds} of {self.num_rounds} rounds ran, and "
                f"this is {what}."
            ]
        elif self._unsettled or self.cut:
            said = [self._why()] if self._unsettled else []
            if self.cut:
                start = "Besides," if said else f"{self._all_ran}, but"
                said.append(f"{start} {self._far}")
            if self._noisy and not self._idle and not self.noiseless:
                said.append(f"Noise makes its intervals {self._times}.{self._of_prior}")
        elif self.untold:
            names = " and ".join(repr(name) for name, _ in self.untold)
            above = sorted({parent for _, parents in self.untold for parent in parents})
            hides = "little was learnt" if self.noiseless else "noise hides what records say"
            said = [
                f"{self._all_ran}, but {hides} of {names}, and so of "
                f"{' and '.join(map(repr, above))} above. Do not believe these: their intervals "
                f"are too narrow. {self._allow}, bring more records, or write the model "
                "decentred (numpyro.infer.reparam.LocScaleReparam)."
            ]
        elif self._noisy:
            # Where noise is not what keeps the posterior so wide, the prior is narrow already.
            priors = "" if self._idle else " or narrower priors"
            said = [
                f"{self._all_ran}, but {self._little}{self._of_prior} {self._allow}, "
                f"bring more records, or write a model of fewer latents{priors}."
            ]
        else:
            # A run that ends early without being stopped has settled.
            all_ran = self._all_ran
            mended = (self.rejected or self.failed) and not self.recovered
            # So has one whose path had arrived when its last round came.
            arrived = self.until_settled and self.noise is not None
            if self.rounds < self.num_rounds or arrived:
                # Visits that change nothing leave the posterior where it is: that settles nothing.
                ended = "The run ended" if mended else "The posterior has settled"
                all_ran = f"{ended} after {self.rounds} rounds"
            clean = not (self.rejected or self.failed)
            said = [f"{all_ran} and every merge was accepted." if clean else f"{all_ran}."]
            if arrived and self.rounds == self.num_rounds and (self.noise or 0.0) > _AVERAGED:
                said.append(
                    "That was the limit: draws of the latents still leave an error of about "
                    f"{self.noise:.1g} of a standard deviation, which more rounds average out "
                    f"(num_rounds={2 * self.num_rounds})."
                )
            # Methods that do not know of noise leave most latents so.
            if self.faint and self.widened is not None:
                said.append(self._little_of)
            if self.unseen is not None and self.unseen > _UNSEEN:
                said.append(self._unnoticed)
            # Much noise, of which the method does not tell.
            if self.widened is None and self.least is not None and self.least > _MISSING:
                said.append(
                    "Its intervals do not know of the noise in them, which makes those that do at "
                    f"least {times(self.least)} as wide as without privacy: see "
                    "dppvi.diagnose(result)."
                )
        if self.recovered:
            refused = (
                f"{_counted(self.rejected, 'merge')} had to be refused" if self.rejected else ""
            )
            failed = f"{_counted(self.failed, 'visit')} failed" if self.failed else ""
            early = " and ".join(filter(None, [refused, failed]))
            return [*said, f"In early rounds {early}; the posterior has recovered since."]
        if self.rejected:
            said.append(
                f"{_counted(self.rejected, 'merge')} would have left the family's domain (numbers "
                "that are not finite, or a precision that is not above 0) and had to be refused, "
                f"so that the last good posterior was kept (see history.rejected).{cost} Use a "
                f"smaller damping{'' if self.noiseless else ', less noise'} or fewer clients a "
                "group."
            )
        if self.failed:
            said.append(
                f"{_counted(self.failed, 'visit')} ended in no finite numbers and changed nothing "
                f"(see history.failed).{cost} Use priors and units under which the records are "
                "likely at the prior's mean; where method= names an optimizer, a smaller learning "
                "rate may do, too."
            )
        return said

    def _repr_html_(self) -> str:
        return _html.paragraph(str(self))

    @property
    def _all_ran(self) -> str:
        return "The one round ran" if self.rounds == 1 else f"All {self.rounds} rounds ran"

    @property
    def _far(self) -> str:
        """How many outcomes lie far out beyond the model, and what to do about it."""
        cut = self.cut or 0.0
        if cut > _MANY:
            return (
                f"{cut:.2g} of the records are further out than the model says, too many to be "
                "outliers: the posterior is still far from the records, or the model does not fit "
                f"them. {self._allow}, bring more records, or write priors and units under which "
                "the records are likely at the prior's mean; if that does not help, write a "
                "likelihood with heavier tails (StudentT in the place of Normal, "
                "NegativeBinomial2 in that of Poisson)."
            )
        return (
            f"outcomes lie further out than the model says: {cut:.2g} of the records "
            "are far out that should not be, and clips cut what they say. This pulls the posterior "
            "away from where all outcomes would put it, and its intervals do not show "
            "it. Write a likelihood with heavier tails (StudentT in the place of Normal, "
            "NegativeBinomial2 in that of Poisson), or transform the outcome. If outcomes are yes "
            "or no, transform columns in which a few records have far larger values than the rest."
        )

    @property
    def _little_of(self) -> str:
        """Of which latents little was learnt, where much was learnt of most."""
        names = [
            repr(name) if number == size else f"{number} of the {size} entries of {name!r}"
            for name, number, size in self.faint
        ]
        return (
            f"Little was learnt of {' and '.join(names)}: intervals are more than half as wide as "
            "under the prior."
        )

    @property
    def _unnoticed(self) -> str:
        """That far outcomes would not have been seen, and how to look for them."""
        share = f"{100 * (self.unseen or 0.0):.2g} %"
        noticed = f"would have been noticed only in more than {share} of the records"
        if self.unseen == 1:
            noticed = "could not have been noticed"
        return (
            "Outcomes further out than the model says pull the posterior away; here they "
            f"{noticed}. dppvi.score on held-back records tells whether predictions are good."
        )

    @property
    def _noisy(self) -> bool:
        return self._hopeless or self._wide or self._idle

    @property
    def _wide(self) -> bool:
        """Whether releases tell of much noise."""
        return self.widened is not None and self.widened > _NOISY

    @property
    def _hopeless(self) -> bool:
        """Whether the budget allows nothing but noise, whatever releases tell of it.

        What the budget allows is not enough: a network's many weights do not have to be known.
        """
        if self.least is None:
            return False
        # The median width is one of effects, which do not show what was learnt.
        if self.above is not None:
            return self.least > _MOSTLY and self.above > _NARROWED
        narrowed = self.narrowed is not None and self.narrowed > _NARROWED
        return narrowed and self.least > max(_NOISY, self.widened or 0.0)

    @property
    def _idle(self) -> bool:
        """Whether the posterior is as good as the prior, for no other reason that is known."""
        as_prior = self.narrowed is not None and self.narrowed > _PRIOR
        return as_prior and not (self._hopeless or self._wide)

    @property
    def _times(self) -> str:
        hopeless = self._hopeless
        how, width = ("at least", self.least) if hopeless else ("about", self.widened)
        return f"{how} {times(width or 0.0)} as wide as they would be without privacy"

    @property
    def _little(self) -> str:
        """What a run of noise has come to."""
        if self._idle:
            return "little was learnt."
        are = "intervals must be" if self._hopeless else "intervals are"
        what = "little was learnt" if self.noiseless else "most of what was released is noise"
        return f"{what}: {are} {self._times}."

    @property
    def _of_prior(self) -> str:
        """How wide the posterior is beside the prior, if little was learnt."""
        if self.narrowed is None or self.narrowed <= _TOLD:
            return ""
        # Down to the percent: what is at least 89.6 % as wide is not at least 90 %.
        share = f"at least {math.floor(100 * self.narrowed)} % as wide as under the prior."
        hardly = self.narrowed > _PRIOR
        start = " The posterior hardly differs from the prior: three" if hardly else " Three"
        return f"{start} quarters of the latents are {share}"

    @property
    def _allow(self) -> str:
        """What gives latents that little was learnt of more to learn from, without more records."""
        more = f"Write num_rounds={2 * self.num_rounds}"
        return more if self.noiseless else "Allow a larger epsilon"

    @property
    def _unsettled(self) -> bool:
        still = self.moved > (_SETTLED_WITH_NOISE if self.private else _SETTLED)
        scattered = self.noise is not None and self.noise > _SETTLED
        found = still or self._creeps or self.pulled or scattered or bool(self.caution)
        return not self.alone and found

    @property
    def _creeps(self) -> bool:
        return self.left is not None and self.left > _SETTLED

    def _why(self) -> str:
        """What still moves, and what to do about it."""
        ran = f"{self._all_ran}, but the posterior has not settled"
        moved = f"the last one still moved it by {self.moved:.2g} of its standard deviations"
        more = f"Write num_rounds={2 * self.num_rounds}"
        # Who runs again at once spends twice, and no statement of one run says so.
        again = " Another run on the same records spends its budget on top of this one's."
        explains = f", {math.sqrt(self.pull or 0.0):.2g} times as strongly as noise explains"
        if self.noiseless:
            again = explains = ""
        # What one client says of its own kind of records alone leads the next ones astray.
        differ = (
            " If clients hold different kinds of records (each one outcome, say), write "
            "schedule=dppvi.synchronous."
            if self.in_turn
            else ""
        )
        if self.pulled:
            return (
                f"{ran}: what clients released last still pulls it away{explains}. Its "
                f"intervals may be far from the truth. {more}, or priors and units under which the "
                "records are likely at the prior's mean (times in years, say, and not in days)."
                f"{differ}{again}"
            )
        if self.caution:
            return f"{self._all_ran}, but the posterior has not arrived: {self.caution}"
        if self.private:
            less = "" if self.noiseless else ", or allow a larger epsilon"
            return f"{ran}: {moved}. {more}{less}.{again}"
        if self.left is None:
            return f"{ran}: {moved}. {more}, or leave it out."
        if not self._creeps:
            about = max(self.moved, self.noise or 0.0)
            rest = "" if self.until_settled else ", and leave num_rounds out"
            return (
                f"{self.rounds} rounds ran, and draws of the latents still move the posterior "
                f"about, by {about:.2g} of its standard deviations. Write "
                f"method=NonPrivate(expectation=MonteCarlo(100)){rest}."
            )
        small = (
            f"{ran}: rounds are small and many, and would still move it by {self.left:.2g} of its "
            "standard deviations or so."
        )
        if not self.until_settled:
            return f"{small} Leave num_rounds out, and the run ends when it has settled."
        return (
            f"{small} That is so where latents depend on each other closely. Write "
            "guide=AutoMultivariateNormal(model), unless you do already; or center the data's "
            "columns, and leave out those that follow from others (one of each set of "
            f"indicators); or write num_rounds={4 * self.num_rounds}."
        )


def times(factor: float) -> str:
    """A factor in words: two digits, but no exponent."""
    return f"{factor:.0f} times" if 99 < factor < 1e6 else f"{factor:.2g} times"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def status_of(
    history: History,
    num_rounds: int,
    private: bool,
    interrupted: bool,
    *,
    num_latents: int = 1,
    arrived_since: int | None = None,
    **told: Any,
) -> Status:
    """How a run with this history ended.

    ``arrived_since`` is the first round of the path that says that it has arrived; ``None`` if it
    has not, or nobody can tell. ``told`` are fields of :class:`Status` that do not follow from the
    history.
    """
    projected, rejected, failed = (
        int(np.sum(counts)) for counts in (history.projected, history.rejected, history.failed)
    )
    # Of normals that differ in location only, the Jeffreys divergence is the squared distance in
    # standard deviations.
    last = history.movement[-1] if len(history.movement) else 0.0
    rounds, pull = len(history.movement), told.get("pull")
    status = Status(
        Outcome.PROJECTED if projected else Outcome.COMPLETED,
        rounds,
        num_rounds,
        projected,
        rejected,
        failed,
        private,
        # Rounding can take a divergence of next to nothing below 0.
        moved=math.sqrt(max(float(last), 0.0) / num_latents),
        # Of noise alone, the squares add up to a chi-squared number.
        pulled=pull is not None and bool(pull > chi2.isf(_BY_CHANCE, num_latents) / num_latents),
        recovered=arrived_since is not None
        and bool(rejected or failed)
        and not np.any(history.rejected[arrived_since:])
        and not np.any(history.failed[arrived_since:]),
        **told,
    )
    # From mild to bad: what is set last is the worst that applies.
    if status._noisy or status.untold:
        status = replace(status, outcome=Outcome.NOISY)
    if status.cut:
        status = replace(status, outcome=Outcome.BENT)
    if status._unsettled:
        status = replace(status, outcome=Outcome.UNSETTLED)
    if (rejected or failed) and not status.recovered:
        status = replace(status, outcome=Outcome.DIVERGED)
    if (interrupted or status.refused) and rounds < num_rounds:
        status = replace(status, outcome=Outcome.INTERRUPTED)
    return status
