"""The commands ``dppvi new-study`` and ``dppvi silo check``, ``run`` and ``digest``."""

import argparse
import bisect
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from numpyro_dppvi.privacy import BudgetExceededError, Entry, Ledger, PrivacyPlan, words
from numpyro_dppvi.privacy.plan import with_worth
from numpyro_dppvi.privacy.worth import of_joining, of_widths
from numpyro_dppvi.protocol import server
from numpyro_dppvi.silo import messages, new_study, settings
from numpyro_dppvi.silo.gateway import OpenStudy, open_gateway, open_studies
from numpyro_dppvi.silo.settings import Settings
from numpyro_dppvi.silo.sockets import listening
from numpyro_dppvi.silo.store import Store
from numpyro_dppvi.silo.study import Prepared, digest_of


def main(arguments: Sequence[str] | None = None) -> int:
    """What the console script ``dppvi`` does: returns 0, or 1 with a sentence on standard error."""
    parsed = _parser().parse_args(arguments)
    try:
        parsed.act(parsed)
    except (ImportError, LookupError, OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"dppvi: {error}\n")
        return 1
    except KeyboardInterrupt:
        # A gateway runs until it is stopped: that is no failure.
        sys.stderr.write("dppvi: stopped\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("dppvi", description="Studies over hospitals' own records.")
    rooms = parser.add_subparsers(required=True, metavar="new-study|silo")
    about = "makes a folder with a study, its server, and a folder for each hospital"
    command = rooms.add_parser("new-study", help=about, description=about)
    command.add_argument("path", metavar="FOLDER", help="a new one")
    command.add_argument("hospitals", metavar="NAME=RECORDS", nargs="+", type=_hospital)
    command.set_defaults(act=_new_study)
    commands = rooms.add_parser("silo", help="a hospital's gateway").add_subparsers(required=True)
    for name, act, argument, about in (
        ("check", _check, "silo.toml", "says what would be released, and at what cost"),
        ("run", _run, "silo.toml", "starts the gateway, which answers until it is stopped"),
        ("digest", _digest, "study.py", "prints the digest that pins a study file"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("path", metavar=argument)
        command.set_defaults(act=act)
    return parser


def _hospital(given: str) -> tuple[str, int]:
    name, _, number = given.partition("=")
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(
            f"must be a hospital's name and its number of records, got {given!r}: write north=600"
        )
    return name, int(number)


def _new_study(parsed: argparse.Namespace) -> None:
    made = new_study.write(parsed.path, dict(parsed.hospitals))
    first = parsed.hospitals[0][0]
    _say(
        f"{made} has a study of a logistic regression, for you to change. Each hospital completes "
        f"load() in hospital.py, and tries it with\n  dppvi silo check {made}/{first}/silo.toml"
    )


def _digest(parsed: argparse.Namespace) -> None:
    _say(digest_of(parsed.path))


def _run(parsed: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("numpyro_dppvi.silo").setLevel(logging.INFO)
    # Stopped by a service manager as by Ctrl-C: with its socket removed and its lock let go.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mine = settings.read(parsed.path)
    with (
        open_gateway(parsed.path) as gateway,
        listening(mine.socket, gateway.handle, gateway.most_bytes, mine.socket_group) as listener,
    ):
        _say(f"{mine.name} listens on {mine.socket}")
        listener.serve_forever()


def _check(parsed: argparse.Namespace) -> None:
    """Everything but the network: reads no message, charges nothing, sends nothing."""
    mine = settings.read(parsed.path)
    opened = open_studies(mine)
    for line in _caps(mine):
        _say(line)
    for allowed, study in zip(mine.studies, opened.values(), strict=True):
        _say(f"\n{allowed.file.name} ({study.prepared.digest})")
        for line in _what_leaves(mine, study):
            _say(line)


def _caps(mine: Settings) -> Iterator[str]:
    budget, caps = mine.caps.budget, mine.caps
    yield f"{mine.name} gives away at most epsilon = {budget.epsilon:g} at delta = {budget.delta:g}"
    yield f"  in {caps.releases} releases, with a noise multiplier of {caps.noise_multiplier:g}"
    if not mine.store.exists():
        yield "  and has released nothing yet"
        return
    ledger = Store(mine.store, budget).ledger()
    yield f"  and has spent {ledger.spent()[0]:.4g} in {len(ledger.entries)} releases"


def _what_leaves(mine: Settings, study: OpenStudy) -> Iterator[str]:
    """What a study asks of the hospital, in lines for its data officer."""
    prepared, plan = study.prepared, study.client.plan
    assert plan is not None, "a study without a plan was opened"
    yield f"In {len(study.steps)} steps of {len(prepared.run.groups)} rounds the study releases:"
    # Read off the form that messages are checked against: this list cannot leave anything out.
    for name, (shape, dtype) in messages.shapes(prepared.form.release).items():
        yield f"  {name}: {dtype} of shape {shape}"
    yield str(PrivacyPlan((plan,), (mine.name,))).partition("\n")[2]  # without the title
    if prepared.run.trusted is not None:
        yield (
            "That holds for sums over hospitals. A release carries a share of the noise: whoever "
            "runs the server can learn more, and must be trusted to look at sums alone."
        )
    yield from _what_it_buys(prepared)
    left, covered = _left_and_covered(mine, study)
    yield f"{left} of these steps have not been released yet; the caps cover {covered} of them."
    before = time.perf_counter()
    _rehearse(study)
    seconds = time.perf_counter() - before
    yield f"One step was computed on the records in {seconds:.1f} s, and thrown away."


def _what_it_buys(prepared: Prepared) -> Iterator[str]:
    """How wide intervals will be at the least, and for which hospital joining cannot pay."""
    if prepared.plan is None:
        return
    bought = with_worth(prepared.plan, prepared.assembly.problem.space.size).worth
    if bought is not None:
        said = of_widths(bought), of_joining(bought, prepared.study.names)
        yield from words.paragraph(" ".join(words.sentence(each) for each in said if each))


def _left_and_covered(mine: Settings, study: OpenStudy) -> tuple[int, int]:
    """How many steps of a study are left, and how many of these the caps cover."""
    plan, caps = study.client.plan, mine.caps
    assert plan is not None
    budget, event = caps.budget, plan.mechanism.dp_event
    spent, left = Ledger((budget,)), len(study.steps)
    if mine.store.exists():
        kept = Store(mine.store, budget)
        spent, left = kept.ledger(), left - len(kept.reserved(study.prepared.digest))

    def too_many(steps: int) -> bool:
        try:
            # A ledger is a value: what charge returns is thrown away, and nothing is written.
            spent.charge([Entry(0, 0, event, steps * plan.releases_per_visit)])
        except BudgetExceededError:
            return True
        return len(spent.entries) + steps > caps.releases

    # too_many is False for the first few and True from then on: the place of the first True among
    # 1, 2, ... is how many steps the caps cover. Accounting is slow: log2 many calls will do.
    return left, bisect.bisect_left(range(1, left + 1), x=True, key=too_many)


def _rehearse(study: OpenStudy) -> None:
    """Computes a first step; nothing is charged, kept or shown."""
    prepared = study.prepared
    assembly, known = prepared.assembly, prepared.first_state().server
    request = server.request(
        assembly.problem,
        assembly.params,
        known,
        known.natural,
        jnp.asarray(study.number),
        prepared.round_key(0),
    )
    # Fresh secret keys, as always: what is thrown away here could not be subtracted from a release.
    jax.block_until_ready(study.client.released(request)[1].value)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
