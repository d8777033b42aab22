"""The README's picture: what it was drawn from is written into it.

    python -m benchmarks.picture     draws it anew (a minute)

The demonstration draws it. Into the PNG go the settings, a digest of every function that had a
hand in it, and the scores that it shows: `tests/test_readme.py` fails when settings or functions
are others today, or when the scores are not those of the README's table.
"""

import ast
import hashlib
import inspect
import json
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpyro_dppvi as dppvi
from models.evaluation import of_logits
from models.logistic_regression import logistic_regression
from numpyro_dppvi.analysis import plots
from numpyro_dppvi.protocol import planning
from tutorials import demo

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "convergence.png"
DRAWN_BY = (
    demo.main,
    demo.scores,
    demo.write_files,
    logistic_regression,
    of_logits,
    plots.convergence,
    plots._count_rounds,
    plots._movement,
    plots._panels,
)


def origin() -> dict[str, Any]:
    """What a picture drawn today would be drawn from."""
    method, budget = dppvi.DPOptimization(), dppvi.PrivacyBudget(1.0, 1e-5)
    clients, rounds = demo.NUM_CLIENTS, demo.NUM_ROUNDS
    sizes = [demo.CLIENT_SIZE] * clients
    plan = dppvi.plan_privacy(method, budget, num_rounds=rounds, client_sizes=sizes)
    releases = clients * rounds * method.num_local_steps
    run = planning.resolve(
        method, num_clients=clients, schedule=None, num_rounds=rounds, trusted_aggregator=False
    )
    damping = planning.DEFAULT_DAMPING
    return {
        "method": str(method),
        "learning rate": method.learning_rate(releases, damping),
        "damping": damping,
        "schedule": run.schedule.__name__,
        "plan": str(plan).splitlines()[:3],
        "paper": demo.PAPER,
        "functions": {f"{f.__module__}.{f.__name__}": _digest(f) for f in DRAWN_BY},
    }


def _digest(function: Callable[..., Any]) -> str:
    """Of a function's code; its docstring, whole lines of comment and blank lines do not count."""
    source = textwrap.dedent(inspect.getsource(function))
    lines, body = source.splitlines(), ast.parse(source).body[0].body
    if isinstance(body[0], ast.Expr):
        del lines[body[0].lineno - 1 : body[0].end_lineno]
    kept = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def draw(place: Path = PICTURE) -> None:
    """Runs the demonstration, and keeps its picture of convergence with what it is of."""
    from PIL import Image, PngImagePlugin

    with tempfile.TemporaryDirectory() as folder:
        shown = demo.main(Path(folder))
        text = PngImagePlugin.PngInfo()
        text.add_text("origin", json.dumps(origin()))
        text.add_text("scores", json.dumps([[round(x, 4) for x in row] for row in shown]))
        with Image.open(Path(folder) / "convergence.png") as picture:
            picture.save(place, pnginfo=text, optimize=True)


def read(place: Path = PICTURE) -> tuple[dict[str, Any], list[list[float]]]:
    """A picture's origin, and its accuracies and log-likelihoods by round."""
    from PIL import Image

    with Image.open(place) as picture:
        return json.loads(picture.text["origin"]), json.loads(picture.text["scores"])


if __name__ == "__main__":
    draw()
