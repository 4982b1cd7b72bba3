"""A file's cells are the text that stands there, or one line says why not."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from sapo.core.own_code import Missing
from sapo.tasks.row_files import cell_texts, read_table

WRITTEN = (
    "007",
    "1.50",
    "true",
    "NA",
    "null",
    "nan",
    "1e5",
    "0x1F",
    "+5",
    "12:30",
    "2024-01-05T10:00:00Z",
    "9" * 30,
)


def answers(file: Path, data: bytes) -> list[str]:
    file.write_bytes(data)
    return cell_texts(read_table(file), "answer")


@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_cells_of_a_csv_file_stay_as_written(quote: str, end: str, tmp_path: Path) -> None:
    lines = [f"q{number},{quote}{cell}{quote}" for number, cell in enumerate(WRITTEN)]
    data = end.join(["\ufeffquestion,answer", *lines, ""]).encode()
    assert answers(tmp_path / "a.csv", data) == list(WRITTEN)


def test_a_quoted_cell_has_lines_commas_and_quotes(tmp_path: Path) -> None:
    found = answers(tmp_path / "a.csv", b'question,answer\nq,"a\nb, ""c"""\n\n')
    assert found == ['a\nb, "c"']


@pytest.mark.parametrize("token", ["1.50", "1e5", "-0", "9" * 5000, "true", "false"])
def test_values_of_json_lines_stay_as_written(token: str, tmp_path: Path) -> None:
    assert answers(tmp_path / "a.jsonl", f'{{"question": "q", "answer": {token}}}\n'.encode()) == [token]


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("a.csv", b"question,answer\nq,b\nq2,\xe4\n", "is not UTF-8: line 3 has the byte 0xe4"),
        ("a.csv", "question,answer\nq,a\n".encode("utf-16"), "is not UTF-8: line 1"),
        ("a.csv", "question,answer\nq,a\n".encode("utf-16-le"), "NUL"),
        ("a.csv", b"question,answer\nq,a,b\n", "line 2 has 3 cells for 2 columns"),
        ("a.csv", b'question,answer\nq,"a\n', "line 2: unexpected end of data"),
        ("a.csv", b"question,answer,answer\nq,a,b\n", "there are 2 columns answer"),
        ("a.csv", b"question,answer\n", "has 0 rows"),
        ("a.csv", b"", "has 0 rows"),
        ("a.jsonl", b'{"answer": 1}\n{"answer": [1]}\n', "column answer holds a list in row 1"),
        ("a.jsonl", b'{"answer": 1, "answer": 2}\n', "line 1: the name 'answer' stands twice"),
        ("a.jsonl", b'{"answer": NaN}\n', "NaN is not JSON"),
        ("a.jsonl", b'{"answer": null}\n', "column answer is empty in row 0"),
        ("a.jsonl", b"[1]\n", "line 1 is no JSON object"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(
    name: str, data: bytes, problem: str, tmp_path: Path
) -> None:
    with pytest.raises((Missing, ValueError)) as raised:
        answers(tmp_path / name, data)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_parquet_column_without_one_text_for_its_values_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    made = {"bytes": [b"a"], "day": pa.array([1], pa.date32()), "truth": [True], "number": [7]}
    parquet.write_table(pa.table(made), file)
    table = read_table(file, list(made))
    assert (cell_texts(table, "truth"), cell_texts(table, "number")) == (["true"], ["7"])
    for name in ("bytes", "day"):
        with pytest.raises(ValueError, match="write it as text"):
            cell_texts(table, name)
