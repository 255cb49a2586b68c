"""What an index of packages shows: links that lead somewhere, extras that are explained, versions that are tried."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORKFLOWS = ROOT / ".github" / "workflows"


def test_every_record_has_a_line():
    page = (ROOT / "records" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./*]+)`", "".join(re.findall(r"^\| (.*?) \|", page, re.MULTILINE))))
    stems = {name.removesuffix("*").rstrip(".").removesuffix("/") for name in named if not name.startswith(".")}
    for path in (ROOT / "records").iterdir():
        whole = {path.name, path.name.split(".")[0], path.stem + ".json"}
        assert path.name == "README.md" or whole & (stems | named), path.name


def test_links_of_the_readme_are_absolute_and_name_what_there_is():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 5
    for link in links:
        found = re.fullmatch(re.escape(PROJECT["urls"]["Repository"]) + r"/(blob|tree)/main/(.+)", link)
        assert found, link
        path = ROOT / found[2]
        assert path.is_dir() if found[1] == "tree" else path.is_file(), link


def test_every_link_of_the_project_is_of_its_repository():
    assert {"Documentation", "Repository", "Issues", "Changelog"} <= set(PROJECT["urls"])
    for url in PROJECT["urls"].values():
        assert url.startswith(PROJECT["urls"]["Repository"])


def test_every_extra_is_explained():
    table = README.split("| extra | brings |")[1].split("\n\n")[0]
    assert set(PROJECT["optional-dependencies"]) == set(
        re.findall(r"`([\w-]+)`", "".join(re.findall(r"\n\| (.*?) \|", table)))
    )


def test_versions_of_python_that_are_named_are_tried():
    named = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    tried = {
        version
        for text in re.findall(r"python: \[(.*)\]", (WORKFLOWS / "ci.yml").read_text())
        for version in re.findall(r"[\d.]+", text)
    }
    assert named == tried
    assert f">={min(named, key=lambda version: int(version.split('.')[1]))}" == PROJECT["requires-python"]


def test_releases_are_published_without_a_token_and_with_attestations():
    text = (WORKFLOWS / "publish.yml").read_text(encoding="utf-8")
    assert "id-token: write" in text
    assert "attestations: true" in text
    assert "secrets." not in text
