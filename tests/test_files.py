"""Files of facts and arrays: what goes in comes out, whole or not at all, without a pickle."""

import json
import os
import stat
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from numpyro_dppvi import _files
from numpyro_dppvi.families import NormalNatural

FACTS = {"numbers": [1, 2.5], "text": "ö"}
ARRAYS = {"a/b": np.arange(6.0).reshape(2, 3), "n": np.int32(3), "empty": np.zeros((0, 2))}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.npz"


@pytest.fixture
def written(path):
    _files.write(path, "thing", FACTS, ARRAYS)
    return path


def test_what_goes_in_comes_out(written):
    facts, arrays = _files.read(written, "thing")
    assert {name: facts[name] for name in FACTS} == FACTS
    assert set(arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype


def test_numpy_and_zip_open_it(written):
    with np.load(written, allow_pickle=False) as opened:
        np.testing.assert_array_equal(opened["a/b"], ARRAYS["a/b"])
    with zipfile.ZipFile(written) as archive:
        assert json.loads(archive.read("header.json"))["library"] == "numpyro_dppvi"


def test_the_owner_alone_may_read_what_is_meant_for_the_owner(path):
    _files.write(path, "thing", {}, {}, owner_only=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_others_may_read_what_the_mask_of_permissions_lets_them(path):
    mask = os.umask(0o022)
    try:
        _files.write(path, "thing", {}, {})
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        assert os.umask(0o022) == 0o022  # and the mask is what it was
    finally:
        os.umask(mask)


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_process_that_dies_leaves_the_old_file(written, moment, monkeypatch):
    def die(*args, **kwargs):
        raise KeyboardInterrupt

    before = written.read_bytes()
    monkeypatch.setattr(os if moment == "fsync" else type(written), moment, die)
    with pytest.raises(KeyboardInterrupt):
        _files.write(written, "thing", {"new": 1}, ARRAYS)
    assert written.read_bytes() == before
    _files.discard_partial(written)
    assert list(written.parent.iterdir()) == [written]


def test_the_disk_has_a_file_before_it_is_moved(path, monkeypatch):
    """The order that makes a replacement survive a power cut."""
    calls = []
    fsync, replace = os.fsync, type(path).replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(
        type(path), "replace", lambda *args: (calls.append("replace"), replace(*args))[1]
    )
    _files.write(path, "thing", {}, ARRAYS)
    assert calls == ["fsync", "replace", "fsync"]  # the file, the move, the folder


class TestWhatIsNoSuchFile:
    def test_a_missing_file(self, path):
        with pytest.raises(FileNotFoundError, match=r"there is no file .*some\.npz"):
            _files.read(path, "thing")

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
    def test_a_truncated_file(self, written, share):
        content = written.read_bytes()
        written.write_bytes(content[: int(share * len(content))])
        with pytest.raises(ValueError, match="is damaged or not a file of numpyro_dppvi"):
            _files.read(written, "thing")

    def test_a_file_with_a_bit_turned_over(self, written):
        content = bytearray(written.read_bytes())
        place = content.index(np.float64(5.0).tobytes())
        content[place] ^= 1
        written.write_bytes(bytes(content))
        with pytest.raises(ValueError, match="is damaged"):
            _files.read(written, "thing")

    def test_a_text(self, path):
        path.write_text("hello")
        with pytest.raises(ValueError, match="is damaged or not a file of numpyro_dppvi"):
            _files.read(path, "thing")

    def test_numpys_own(self, path):
        np.savez(path, a=np.zeros(2))
        with pytest.raises(ValueError, match="is damaged or not a file of numpyro_dppvi"):
            _files.read(path, "thing")

    def test_an_array_of_objects(self, written):
        """What would have to be unpickled, and could then do anything."""
        with zipfile.ZipFile(written, "a") as archive, archive.open("o.npy", "w") as member:
            np.lib.format.write_array(member, np.array([{}]), allow_pickle=True)
        with pytest.raises(ValueError, match="is damaged"):
            _files.read(written, "thing")

    @pytest.mark.parametrize(
        ("header", "words"),
        [
            ({"library": "other"}, "was not written by numpyro_dppvi"),
            ({"version": 2}, r"by a newer numpyro_dppvi \(format 2, this one reads 1\): upgrade"),
            ({"version": "new"}, "is damaged"),
            (
                {"kind": "other thing"},
                "must be of kind 'thing', got 'other thing'",
            ),
        ],
    )
    def test_another_header(self, path, header, words):
        _files.write(path, "thing", header, {})
        with pytest.raises(ValueError, match=words):
            _files.read(path, "thing")

    def test_a_folder_cannot_be_written(self, tmp_path):
        with pytest.raises(IsADirectoryError, match=r"is a folder: write the path of a file"):
            _files.write(tmp_path, "thing", {}, {})
        with pytest.raises(FileNotFoundError, match=r"there is no folder .*: create it first"):
            _files.write(tmp_path / "no" / "file", "thing", {}, {})


TREE = {"w": NormalNatural(jnp.arange(3.0), -jnp.ones(3)), "a/b": (jnp.zeros(()), {"c": 1})}


def test_trees_come_back():
    arrays = _files.flatten(TREE, "q")
    assert set(arrays) == {"q/w/linear", "q/w/quadratic", "q/a/b/0", "q/a/b/1/c"}
    back = _files.unflatten({**arrays, "other": np.zeros(1)}, "q", TREE)
    assert jax.tree.structure(back) == jax.tree.structure(TREE)
    jax.tree.map(np.testing.assert_array_equal, back, TREE)


@pytest.mark.slow
@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.int32, np.bool_]), hnp.array_shapes(min_dims=0, min_side=0)
    )
)
def test_any_array_comes_back_bit_by_bit(array):
    back = _files.unflatten(_files.flatten(array, "x"), "x", array)
    assert np.asarray(back).tobytes() == array.tobytes()


def test_keys_come_back():
    tree = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1), 2)}
    back = _files.unflatten(_files.flatten(tree, "x"), "x", tree)
    assert jax.random.key_data(back["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()
    assert back["keys"].shape == (2,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.pop("q/w/linear"), "the file lacks array 'q/w/linear'"),
        (lambda a: a.update({"q/v": np.zeros(1)}), "the file has an unexpected array 'q/v'"),
        (lambda a: a.update({"q/w/linear": np.zeros(2)}), r"has shape \(2,\), where \(3,\) belong"),
    ],
)
def test_arrays_of_another_tree_are_refused(change, words):
    arrays = _files.flatten(TREE, "q")
    change(arrays)
    with pytest.raises(ValueError, match=words):
        _files.unflatten(arrays, "q", TREE)
