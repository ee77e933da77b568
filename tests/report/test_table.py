"""Tables from rows, and the committed tables from the committed rows."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from gtl.report.table import cell, main, markdown, paired, pivot
from gtl.run import Row

RESULTS = Path(__file__).parents[2] / "results"


def row(method: str, value: float, n: int | None = 20, seed: int | None = 0, **changes: object) -> Row:
    fields = {
        "experiment": "markov", "method": method, "n": n, "seed": seed, "metric": "kl", "value": value,
        "seconds": None, "trainable_weights": None, "device": "cpu, 2 threads", "command": "gtl demo",
    }  # fmt: skip
    return Row(**{**fields, **changes})  # type: ignore[arg-type]


def lines(text: str) -> dict[str, list[str]]:
    """The rows of all tables by their first cell."""
    found = {}
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| method"):
            cells = [part.strip() for part in line.strip("|").split("|")]
            found[cells[0]] = cells[1:]
    return found


def test_standard_error_by_hand():
    """1, 2 and 6: mean 3, variance ((4 + 1 + 9) / 2) = 7, standard error sqrt(7 / 3) = 1.5275."""
    assert cell([1.0, 2.0, 6.0]) == "3.000 ± 1.528"
    assert cell([0.1, 0.3]) == "0.2000 ± 0.1000"  # sqrt(0.02 / 2)
    assert cell([0.5]) == "0.5000"
    assert cell([-0.25]) == "-0.2500"
    assert cell([450.0]) == "450"


def test_the_error_is_over_seeds():
    rows = [row("a", value, seed=seed) for seed, value in enumerate((1.0, 2.0, 6.0))] + [row("a", 9.0, n=100)]
    rows += [row("b", 0.5), row("a", 77.0, metric="nll")]
    columns, table = pivot(rows, "kl")
    assert columns == [100, 20]
    assert table == [("a", ["9.000", "3.000 ± 1.528"]), ("b", ["", "0.5000"])]


def test_differences_are_paired_by_seed():
    """b - a by seed: 1, 2, 6 at n = 20 and 0, 0, 0 at n = 100; a seed that b lacks counts nowhere."""
    rows = [row("a", 10.0 * seed, n=n, seed=seed) for n in (100, 20) for seed in range(4)]
    rows += [row("b", 10.0 * seed + gap, seed=seed) for seed, gap in enumerate((1.0, 2.0, 6.0))]
    rows += [row("b", 10.0 * seed, n=100, seed=seed) for seed in range(3)]
    rows += [row("published", 5.0, seed=None), row("c", 1.0, n=None)]
    columns, table = paired(rows, "kl", "a")
    assert columns == [100, 20]
    assert table == [("b", ["0.0000 ± 0.0000", "3.000 ± 1.528", "1.500 ± 0.764"])]


def test_columns_are_sorted_and_rows_without_n_come_last():
    columns, table = pivot([row("a", 1.0, n=None), row("b", 1.0, n=20), row("b", 2.0, n=1000)], "kl")
    assert columns == [1000, 20, None]
    assert [method for method, _ in table] == ["a", "b"]


def test_markdown_holds_everything():
    rows = [
        row("source", 1.2, n=None, seconds=3.0),
        row("vanilla", 0.4, seed=0, trainable_weights=1234, seconds=10.0),
        row("vanilla", 0.6, seed=1, trainable_weights=1234, seconds=20.0),
        row("gtl-direct", 0.3, seed=0, command="gtl reproduce markov --seeds 2", device="NVIDIA H200"),
        row("gtl-direct", 2.0, seed=0, metric="gamma", trainable_weights=20),
        row("gtl-direct", 3.0, seed=1, metric="gamma", trainable_weights=10),
        row("published-gtl", 0.3621, seed=None, device="as published", command="as published"),
    ]
    text = markdown(rows)
    assert text.startswith("# markov\n")
    for part in ("## kl", "## gamma", "n = 20", "vanilla 1,234, gtl-direct 10 or 20.", "vanilla 15", "up to 2 seeds"):
        assert part in text, part
    found = lines(text)
    assert {r.method for r in rows} <= found.keys()
    assert found["vanilla"] == ["0.5000 ± 0.1000", ""]
    assert found["source"] == ["", "1.200"]
    assert "- `gtl demo` on cpu, 2 threads" in text
    assert "- `gtl reproduce markov --seeds 2` on NVIDIA H200" in text
    assert "- as published\n" in text
    assert text.count("`gtl demo`") == 1
    assert "\n\n\n" not in text
    assert text.endswith("\n")


def test_tables_are_well_formed():
    """As many cells in every line as in its head, and a blank line before each table."""
    text = markdown([row("a", 0.1, n=5), row("b", 0.2, n=None), row("b", 0.2, n=5, metric="nll")])
    width = None
    for before, line in zip(["", *text.splitlines()], text.splitlines(), strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert before == ""
            width = line.count("|")
        if line.startswith("|"):
            assert line.count("|") == width


def test_several_experiments():
    text = markdown([row("a", 0.1), row("a", 0.2, experiment="text")])
    assert text.index("# markov") < text.index("# text")


def test_main_writes_beside_the_rows(tmp_path: Path):
    rows = [row("a", 0.1), row("b", 0.2)]
    path = tmp_path / "name.json"
    path.write_text(json.dumps([asdict(r) for r in rows]))
    main([str(path)])
    assert (tmp_path / "name.md").read_text() == markdown(rows)
    (tmp_path / "name.notes.md").write_text("What it means.\n")
    main([str(path)])
    text = (tmp_path / "name.md").read_text()
    assert text == markdown(rows).rstrip("\n") + "\n\nWhat it means.\n"
    main([str(path)])
    assert (tmp_path / "name.md").read_text() == text  # notes are not added twice


def test_rows_of_another_schema_are_refused(tmp_path: Path):
    path = tmp_path / "name.json"
    path.write_text(json.dumps([{"method": "a", "value": 1}]))
    with pytest.raises(ValueError, match=r"name\.json: not a list of result rows"):
        main([str(path)])
    assert not (tmp_path / "name.md").exists()


def test_the_committed_tables_are_those_of_the_committed_rows(tmp_path: Path):
    """Every table in results/ is what `python -m gtl.report.table` writes from the rows beside it."""
    for path in sorted(RESULTS.glob("*.json")):
        shutil.copy(path, tmp_path / path.name)
        notes = path.with_suffix(".notes.md")
        if notes.exists():
            shutil.copy(notes, tmp_path / notes.name)
        main([str(tmp_path / path.name)])
        committed = path.with_suffix(".md")
        assert committed.exists(), f"{committed} is missing: python -m gtl.report.table {path}"
        assert committed.read_text() == (tmp_path / committed.name).read_text(), f"{committed} is out of date"
    for path in sorted(RESULTS.glob("*.md")):
        if path.name != "README.md":
            rows = path.with_name(path.name.removesuffix(".md").removesuffix(".notes") + ".json")
            assert rows.exists(), f"{path} has no rows beside it"
