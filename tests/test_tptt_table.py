"""The comparison with TPTT runs, and holds on our side, with or without TPTT."""

import json

import pytest

from tnt_hf.recipes.benchmarks import tptt_table


@pytest.mark.slow
def test_our_side_of_the_table_holds(tmp_path):
    out = tmp_path / "table.json"
    tptt_table.main(["--seeds", "1", "--out", str(out)])  # stops at the first row that misses its target
    rows = json.loads(out.read_text())["rows"]
    assert list(rows) == list(tptt_table.ROWS)
    assert all(len(row["tnt-hf"]) == 1 for row in rows.values())


def test_a_missed_target_stops_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(tptt_table.Ours, "operator", lambda self, q, k, v, beta: v)
    with pytest.raises(SystemExit, match="cosine.*misses its target"):
        tptt_table.main(["--seeds", "1", "--out", str(tmp_path / "table.json")])
    assert not list(tmp_path.iterdir())


def test_a_named_folder_without_tptt_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="--tptt"):
        tptt_table.main(["--tptt", str(tmp_path)])
