"""Builds the site into build/docs/site. Run by `make docs`.

Pages are copied into build/docs/pages first. README.md becomes the start page; the other pages of the root come
along. A link to a source file becomes a link to a page that shows that file, so that the site is whole by itself. A
link that leads nowhere fails the build, and so does a built page that would load anything from another server.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BUILD = ROOT / "build" / "docs"
PAGES, SITE = BUILD / "pages", BUILD / "site"
FROM_ROOT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "vulnerabilities.md",
}

_LINK = re.compile(r"(!?\[(?:[^\]\\]|\\.)*\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_OPTIONAL = re.compile(r'^ *\{ ".*" = "(.*)" \}, # optional\n', re.MULTILINE)
_LANGUAGES = {".py": "python", ".lua": "lua", ".yaml": "yaml", ".toml": "toml", ".json": "json", ".sh": "bash"}


# -- pages ----------------------------------------------------------------------------------------------------------


class Pages:
    """The pages of the site: file of the repository -> page; source files as they are linked to."""

    def __init__(self) -> None:
        self._pages = {name: page for name, page in FROM_ROOT.items() if (ROOT / name).exists()}
        for path in sorted(DOCS.rglob("*.md")):
            self._pages[path.relative_to(ROOT).as_posix()] = path.relative_to(DOCS).as_posix()
        self._linked: list[str] = []

    def write(self) -> None:
        """Write all of them. Raises SystemExit for a link to a file that is not there."""
        shutil.rmtree(BUILD, ignore_errors=True)
        PAGES.mkdir(parents=True)
        for folder in ("images", "assets"):
            shutil.copytree(DOCS / folder, PAGES / folder)
        for name, page in list(self._pages.items()):
            self._write(page, self._with_links(name, page, (ROOT / name).read_text()))
        for name in self._linked:  # a folder's page adds the files that are in it
            self._write(self._pages[name], self._source(name))

    def _write(self, page: str, text: str) -> None:
        path = PAGES / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _with_links(self, name: str, page: str, text: str) -> str:
        """The text of a file, with links to pages in place of links to files; code stays as it is."""

        def link(found: re.Match[str]) -> str:
            return found[1] + self._target(name, page, found[2]) + found[3]

        parts = _FENCE.split(text)
        return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)

    def _target(self, name: str, page: str, link: str) -> str:
        path, _, anchor = link.partition("#")
        if not path or urlsplit(link).scheme:
            return link
        meant = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        to = meant.removeprefix("docs/") if meant.startswith("docs/images/") else self._page_of(name, meant)
        relative = posixpath.relpath(to, posixpath.dirname(page) or ".")
        return f"{relative}#{anchor}" if anchor else relative

    def _page_of(self, name: str, meant: str) -> str:
        if meant not in self._pages:
            if not (ROOT / meant).exists():
                raise SystemExit(f"{name}: there is no {meant}")
            self._pages[meant] = f"source/{meant}/index.md" if (ROOT / meant).is_dir() else f"source/{meant}.md"
            self._linked.append(meant)
        return self._pages[meant]

    def _source(self, name: str) -> str:
        """The page of a source file, or of a folder of them."""
        path, page = ROOT / name, self._pages[name]
        begin = f"---\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n\n# {name}\n\n"
        if not path.is_dir():
            return f"{begin}````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"
        inside = [each for each in sorted(path.iterdir()) if each.is_file() and each.suffix in _LANGUAGES]
        lines = [f"- [{each.name}]({self._target(name + '/', page, each.name)})" for each in inside]
        return begin + "\n".join(lines) + "\n"


def configuration() -> str:
    """docs/zensical.toml, without the optional pages that are not there."""
    text = (DOCS / "zensical.toml").read_text()
    return _OPTIONAL.sub(lambda line: line[0] if (DOCS / line[1]).exists() else "", text)


# -- what was built -------------------------------------------------------------------------------------------------


class Built(HTMLParser):
    """A built page: where its links lead, which anchors it has, and what it loads from other servers."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.foreign: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        link = values.get("href") if tag in ("a", "link") else values.get("src")
        if not link or link.startswith(("data:", "mailto:", "javascript:")):
            return
        if urlsplit(link).scheme or link.startswith("//"):
            loads = tag != "a" and values.get("rel") not in ("canonical", "next", "prev")
            self.foreign += [link] if loads else []
        else:
            self.links.append(link)


def broken() -> list[str]:
    """What is wrong with the built pages, a line each."""
    built = {path: Built(path) for path in sorted(SITE.rglob("*.html")) if path.name != "404.html"}
    wrong = []
    for path, page in built.items():
        here = path.relative_to(SITE)
        wrong += [f"{here}: loads {link}" for link in page.foreign]
        for link in page.links:
            file, _, anchor = link.partition("#")
            target = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                wrong.append(f"{here}: {link} leads nowhere")
            elif anchor and target in built and unquote(anchor) not in built[target].anchors:
                wrong.append(f"{here}: {link}: there is no such heading")
    return wrong


def main() -> None:
    Pages().write()
    (BUILD / "zensical.toml").write_text(configuration())
    zensical = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(BUILD / "zensical.toml")]
    if subprocess.run(zensical, cwd=BUILD).returncode:
        raise SystemExit("the site could not be built")
    if wrong := broken():
        raise SystemExit("\n".join(wrong))
    print(f"open {(SITE / 'index.html').relative_to(ROOT)}")


if __name__ == "__main__":
    main()
