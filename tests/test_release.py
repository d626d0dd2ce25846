"""Version, changelog and citation agree, and nothing in the files of a release is made up."""

import re
from pathlib import Path

import pytest
import yaml

import tammes

ROOT = Path(__file__).parents[1]
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
DOCUMENTS = [
    *(ROOT / name for name in ("CITATION.cff", "CODE_OF_CONDUCT.md", "SECURITY.md")),
    *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md")),
]


def headings(level):
    """Headings of a level in the changelog, in order."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.findall(rf"^{'#' * level} (.*)$", text, re.MULTILINE)


def test_the_changelog_keeps_its_form():
    assert headings(1) == ["Changelog"]
    unreleased, *versions = headings(2)
    assert unreleased == "[Unreleased]"
    pattern = r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d|\[\d+\.\d+\.\d+\.dev\d+\]"
    assert all(re.fullmatch(pattern, version) for version in versions), versions
    assert set(headings(3)) <= SECTIONS


def test_changelog_citation_and_package_have_one_version_and_date():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    released = next(each for each in headings(2) if each != "[Unreleased]")
    assert released == f"[{citation['version']}] - {citation['date-released']}"
    assert citation["version"] == tammes.__version__


def test_the_citation_has_what_its_format_asks_for():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    assert citation["license"] == "Apache-2.0"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_document_invents_an_address(document):
    text = document.read_text(encoding="utf-8")
    assert not re.search(r"https?://|www\.|[\w.]+@[\w-]+\.\w|orcid", text)


@pytest.mark.parametrize("template", DOCUMENTS[3:], ids=lambda path: path.name)
def test_a_template_of_issues_has_a_name_and_says_what_it_is_about(template):
    _, front, body = template.read_text(encoding="utf-8").split("---\n", 2)
    assert {"name", "about", "labels"} == set(yaml.safe_load(front))
    assert body.count("**") >= 6
