import csv

import numpy as np
import pytest

from models import mimic3

CHANNELS = (
    *("Capillary refill rate", "Diastolic blood pressure", "Fraction inspired oxygen"),
    *("Glascow coma scale eye opening", "Glascow coma scale motor response"),
    *("Glascow coma scale total", "Glascow coma scale verbal response", "Glucose", "Heart Rate"),
    *("Height", "Mean blood pressure", "Oxygen saturation", "Respiratory rate"),
    *("Systolic blood pressure", "Temperature", "Weight", "pH"),
)


def episode(folder, name, lines):
    """Writes one time series: a mapping from column to entry for each line."""
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, ("Hours", *CHANNELS), restval="")
        writer.writeheader()
        writer.writerows(lines)


def listfile(folder, labels):
    with (folder / "listfile.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("stay", "y_true"))
        writer.writerows(labels.items())


@pytest.fixture
def task(tmp_path):
    """Seven stays, two of which end in death; a heart rate tells them apart."""
    for part, numbers in (("train", range(5)), ("test", range(5, 7))):
        folder = tmp_path / part
        folder.mkdir()
        labels = {f"{n}_episode1_timeseries.csv": int(n in (1, 6)) for n in numbers}
        listfile(folder, labels)
        for n, name in zip(numbers, labels, strict=True):
            episode(folder, name, [{"Hours": "0.5", "Heart Rate": str(67 + 6 * n)}])
    return tmp_path


def features(folder, lines):
    """The features of one episode, by name."""
    for part in ("train", "test"):
        (folder / part).mkdir(exist_ok=True)
        listfile(folder / part, {f"{part}{label}.csv": label for label in (0, 1)})
        for label in (0, 1):
            episode(folder / part, f"{part}{label}.csv", lines)
    data = mimic3.load(folder)
    return dict(zip(data.feature_names, data.X_train[0], strict=True))


def test_labels_are_balanced_and_parts_joined(task):
    data = mimic3.load(task)
    labels = np.concatenate([data.y_train, data.y_test])
    assert sorted(labels) == [0, 0, 1, 1]
    assert (len(data.y_train), len(data.y_test)) == (3, 1)
    rate = list(data.feature_names).index("Heart Rate: mean")
    dead = np.concatenate([data.X_train, data.X_test])[labels == 1, rate]
    np.testing.assert_allclose(sorted(dead), [(67 + 6 - 85) / 18, (67 + 36 - 85) / 18], rtol=1e-6)


def test_the_same_rows_come_every_time(task):
    for one, other in zip(mimic3.load(task)[:4], mimic3.load(task)[:4], strict=True):
        np.testing.assert_array_equal(one, other)


def test_each_measurement_is_summed_up(tmp_path):
    lines = [
        {"Hours": "30.0", "Heart Rate": "103"},
        {"Hours": "1.0", "Heart Rate": "85.0"},
        {"Hours": "2.0", "Glucose": "180"},
        {"Hours": "47.9", "Heart Rate": "67"},
    ]
    row = features(tmp_path, lines)
    assert len(row) == 1 + 5 * 17
    assert row["bias"] == 1
    heart = {name: row[f"Heart Rate: {name}"] for name in ("mean", "lowest", "highest", "last")}
    assert heart == {"mean": 0, "lowest": -1, "highest": 1, "last": -1}
    assert (row["Heart Rate: measured"], row["pH: measured"], row["pH: mean"]) == (1, 0, 0)
    assert row["Glucose: last"] == 1


def test_what_comes_after_two_days_is_not_known(tmp_path):
    lines = [{"Hours": "1", "Heart Rate": "85"}, {"Hours": "48.5", "Heart Rate": "0"}]
    row = features(tmp_path, lines)
    assert row["Heart Rate: lowest"] == 0


@pytest.mark.parametrize(
    ("channel", "entry", "value"),
    [
        ("Glascow coma scale eye opening", "To Pain", (2 - 4) / 1),
        ("Glascow coma scale eye opening", "2 To pain", (2 - 4) / 1),
        ("Glascow coma scale eye opening", "None", (1 - 4) / 1),
        ("Glascow coma scale motor response", "Abnormal extension", (2 - 6) / 1.5),
        ("Glascow coma scale verbal response", "1.0 ET/Trach", (1 - 5) / 2),
        ("Glascow coma scale verbal response", "No Response-ETT", (1 - 5) / 2),
        ("Glascow coma scale total", "11", -1),
        ("Temperature", "99", 4),
    ],
)
def test_words_and_wild_values_become_numbers(tmp_path, channel, entry, value):
    row = features(tmp_path, [{"Hours": "3", channel: entry}])
    assert row[f"{channel}: mean"] == pytest.approx(value, rel=1e-6)


class TestRefusals:
    def test_another_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="pass the folder that mimic3-benchmarks wrote"):
            mimic3.load(tmp_path)

    def test_a_missing_episode(self, task):
        (task / "test" / "5_episode1_timeseries.csv").unlink()
        with pytest.raises(FileNotFoundError, match="5_episode1_timeseries"):
            mimic3.load(task)

    def test_the_list_of_another_task(self, task):
        (task / "train" / "listfile.csv").write_text("stay,period_length,y_true\na.csv,2.5,3\n")
        with pytest.raises(ValueError, match="must say 0 or 1 for y_true, got '3'"):
            mimic3.load(task)

    def test_a_list_without_labels(self, task):
        (task / "train" / "listfile.csv").write_text("stay\na.csv\n")
        with pytest.raises(ValueError, match="columns stay and y_true"):
            mimic3.load(task)

    def test_a_series_without_a_column(self, task):
        (task / "train" / "0_episode1_timeseries.csv").write_text("Hours,pH\n1,7.4\n")
        with pytest.raises(ValueError, match="must have the column 'Capillary refill rate'"):
            mimic3.load(task)

    def test_an_unknown_word(self, task):
        episode(task / "train", "0_episode1_timeseries.csv", [{"Hours": "1", "pH": "sour"}])
        with pytest.raises(ValueError, match="'sour' under 'pH'"):
            mimic3.load(task)
