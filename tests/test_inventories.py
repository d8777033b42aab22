"""Other projects' indices: linked to where they answer, left out in silence where they do not."""

import functools
import http.server
import runpy
import threading
import urllib.error
import urllib.request
import zlib
from pathlib import Path

import pytest

pytest.importorskip("sphinx")

CONF = Path(__file__).parents[1] / "docs" / "conf.py"
HEADER = b"# Sphinx inventory version 2\n# Project: jax\n# Version: 1\n# Compressed by zlib.\n"
GOOD = HEADER + zlib.compress(b"jax.Array py:class 1 jax.html#$ -\n")


def conf(monkeypatch):
    """The names of docs/conf.py, run without a network."""

    def refuse(*_args, **_kwargs):
        raise urllib.error.URLError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(urllib.request, "urlopen", refuse)
        return runpy.run_path(str(CONF))


@pytest.fixture
def site(tmp_path):
    """A folder and the address under which it is served."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_without_a_network_there_are_none(monkeypatch):
    assert conf(monkeypatch)["intersphinx_mapping"] == {}


def test_an_index_that_answers_is_used(monkeypatch, site, tmp_path):
    reachable = conf(monkeypatch)["reachable"]
    folder, address = site
    (folder / "objects.inv").write_bytes(GOOD)
    found = reachable({"jax": address, "gone": f"{address}gone/"}, tmp_path / "kept")
    assert found == {"jax": (address, str(tmp_path / "kept" / "jax.inv"))}
    assert (tmp_path / "kept" / "jax.inv").read_bytes() == GOOD


@pytest.mark.parametrize("content", [b"", b"<html>Sign in</html>", GOOD[:-9], GOOD[2:], HEADER])
def test_what_is_no_index_is_left_out(monkeypatch, site, tmp_path, content):
    reachable = conf(monkeypatch)["reachable"]
    folder, address = site
    (folder / "objects.inv").write_bytes(content)
    assert reachable({"jax": address}, tmp_path / "kept") == {}
