"""The page's files: small, complete wherever the package is, and with nothing from elsewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from router.ui_pages import HEADERS, files

ROOT = Path(__file__).parent.parent.parent
NAMESPACE = "http://www.w3.org/2000/svg"


def test_the_files_are_where_an_installed_package_has_them() -> None:
    found = files()
    kept = {path.name: path.read_bytes() for path in (ROOT / "router" / "ui").iterdir()}
    assert found == kept and "index.html" in found
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "router" in packages["packages"] and "ui/*" in packages["package-data"]["router"]


def test_all_of_it_is_small() -> None:
    assert sum(map(len, files().values())) < 40 << 10


def test_whatever_the_page_asks_for_is_there_and_nothing_comes_from_elsewhere() -> None:
    found = {name: content.decode() for name, content in files().items()}
    asked = set(re.findall(r'(?:src|href)="([^"#]+)"', found["index.html"]))
    for text in found.values():
        asked |= {name.removeprefix("./") for name in re.findall(r'from "([^"]+)"', text)}
        assert set(re.findall(r"\b(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)) <= {NAMESPACE}
        assert "@import" not in text and "url(" not in text
    assert asked == set(found) - {"index.html"}


def test_the_policy_of_the_page_allows_no_inline_script_or_style_and_it_has_none() -> None:
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert "unsafe" not in str(policy)
    page = files()["index.html"].decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
    for name, text in files().items():
        if name.endswith(".js"):
            assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
