"""Each word is defined once: columns in the source, all other words on the page."""

import re

from update_docs import DOCS, with_columns

from tammes.lab.report.glossary import COLUMNS, definition

PAGE = (DOCS / "glossary.md").read_text(encoding="utf-8")


def words(table):
    """Words of the first column of a table."""
    cells = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    return {word.strip().lower() for cell in cells for word in cell.split(",")}


def test_the_page_lists_the_columns_as_they_are():
    assert with_columns(PAGE) == PAGE, "run make docs"


def test_no_word_is_defined_twice():
    written, columns = map(words, PAGE.split("## Columns"))
    assert {"prototype", "scale"} <= written
    assert {"class margin", "eer"} <= columns
    assert not written & columns


def test_a_unit_is_no_part_of_the_word():
    assert definition("accuracy %") == COLUMNS["accuracy"]
    assert definition("no such column") == ""


def test_the_columns_of_evaluations_are_defined():
    thresholds = ("for", "threshold", "FAR %", "interval", "TAR %", "interval of TAR")
    open_set = ("known searches", "missed %", "unknown searches", "accepted %")
    pairs = ("same pairs", "rejected %", "different pairs")
    retrieval = ("identity", "queries", "mAP %", "rank-1 %", "most often taken for")
    columns = (*thresholds, *open_set, *pairs, *retrieval, "FPIR %", "interval of TPIR")
    assert not [column for column in columns if not definition(column)]
