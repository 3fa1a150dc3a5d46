#!/usr/bin/env python3
"""Makes the English corpus of text.md from Debian's packages of documentation, books and texts.

    text_corpus.py FOLDER              FOLDER/deb/*.deb by apt-get, FOLDER/text/PACKAGE.jsonl, FOLDER/sources.json
    text_corpus.py FOLDER --tokenizer  FOLDER/tokenizer.json: a byte-level BPE of 32,000 tokens, trained on FOLDER/text

text_sources.json names packages, their files and licences. A file, novel or dictionary article is a document. Needs apt-get,
dpkg-deb and groff; for --tokenizer the package tokenizers of PyPI.
"""
import argparse
import base64
import collections
import fnmatch
import gzip
import hashlib
import html.parser
import io
import json
import multiprocessing
import pathlib
import re
import struct
import subprocess
import tarfile
import zlib

BLOCKS = set("p div section article h1 h2 h3 h4 h5 h6 li dt dd tr table ul ol dl blockquote title br hr pre item".split())
SKIPPED = set("script style nav head footer form button svg math select noscript info".split())
SKIPPED_CLASSES = set("navheader navfooter sphinxsidebar related toc headerlink header footer sidebar breadcrumb breadcrumbs "
                      "navigation nav toolbar index genindextable tocset tocview navsettop navsetbottom versionbox".split())
VOID = set("br hr img input link meta area base col embed source track wbr".split())
FREQUENT = set("the of and to a in is that it for with as be on you this are or by not can".split())


class PlainText(html.parser.HTMLParser):
    """The paragraphs of an HTML or XML page, without its navigation."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.paragraphs, self.words, self.skipped, self.pre, self.bullet = [], [], [], 0, ""

    def end_paragraph(self):
        text = "".join(self.words)
        text = text.strip("\n").rstrip() if self.pre else " ".join(text.split())
        if text.strip():
            self.paragraphs.append(self.bullet + text)
            self.bullet = ""
        self.words = []

    def handle_starttag(self, tag, attrs):
        names = dict(attrs)
        classes = f"{names.get('class') or ''} {names.get('id') or ''}".lower().split()
        if self.skipped or tag in SKIPPED or SKIPPED_CLASSES.intersection(classes):
            if tag not in VOID:
                self.skipped.append(tag)
            return
        if tag in BLOCKS:
            self.end_paragraph()
            self.bullet = "* " if tag in ("li", "item") else self.bullet
        elif tag in ("td", "th"):
            self.words.append(" ")
        self.pre += tag == "pre"

    def handle_startendtag(self, tag, attrs):
        if tag in BLOCKS and not self.skipped:
            self.end_paragraph()

    def handle_endtag(self, tag):
        if tag in self.skipped:
            while self.skipped.pop() != tag:  # elements within that have no end tag end here, too
                pass
        elif tag in BLOCKS and not self.skipped:
            self.end_paragraph()
            self.pre = max(0, self.pre - (tag == "pre"))
            self.bullet = "" if tag in ("li", "item") else self.bullet

    def handle_data(self, data):
        if not self.skipped:
            self.words.append(data)


def from_markup(data):
    parser = PlainText()
    parser.feed(decode(data))
    parser.close()
    parser.end_paragraph()
    return "\n\n".join(parser.paragraphs)


def decode(data):
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def from_man(data):
    """A man page with one line for a paragraph, without the page's first and last line."""
    printed = subprocess.run(["groff", "-mandoc", "-Tutf8", "-P-cbou", "-rLL=2000n", "-rHY=0", "-dAD=l"], input=data,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
    return "\n".join(line.strip() for line in decode(printed).strip().split("\n")[1:-1])


def from_rdb(data):
    """The texts in a database of an R package: compressed objects, each a vector of lines."""
    at = 0
    while at + 4 < len(data):
        inflate = zlib.decompressobj()
        piece, i, lines = inflate.decompress(data[at + 4:]), 0, []
        at = len(data) - len(inflate.unused_data)
        for line in re.finditer(rb"\x00[\x00-\x04]\x00\x09(....)", piece, re.S):  # a string's type, flags and length
            size = struct.unpack(">i", line[1])[0]
            if line.start() >= i and 0 <= size <= len(piece) - line.end():
                i = line.end() + size
                lines.append(decode(piece[line.end():i]))
        yield "\n".join(lines)


def from_dict(index, data):
    """The articles of a dictd dictionary, whose index has a word, an offset and a size, in digits of base64, in a line."""
    def number(digits):
        return int.from_bytes(base64.b64decode(digits.rjust(8, "A")), "big")
    places = {tuple(map(number, line.split("\t")[1:3])) for line in decode(index).splitlines() if not line.startswith("00")}
    for begin, size in sorted(places):
        lines = [line.strip() for line in decode(data[begin:begin + size]).split("\n")]
        yield "\n".join(line for line in lines if not re.fullmatch(r"\[.*\]", line))  # such as [1913 Webster]


def documents_in(path, data):
    """The documents in a file, as plain text."""
    if path.endswith((".gz", ".dz")):
        path, data = path[:-3], gzip.decompress(data)
    if re.search(r"/man[1-9]/", path):
        return [from_man(data)]
    if path.endswith(".rdb"):
        return from_rdb(data)
    if re.search(r"\.(x?html?|page|xml|utf8)(\.en)?$", path):
        return [from_markup(data)]
    return [decode(data)]


def files_in(deb, patterns):
    """(path, content) of a package's files that a pattern matches and none with a leading ! does, ordered by path."""
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for member in sorted(filter(tarfile.TarInfo.isfile, archive.getmembers()), key=lambda m: m.name):
            path = member.name.removeprefix("./")
            matches = [p for p in patterns if fnmatch.fnmatchcase(path, p.removeprefix("!"))]
            if matches and not any(p.startswith("!") for p in matches):
                yield path, archive.extractfile(member).read()


def documents_of(job):
    """(name, text) of a package's documents, before cleaned()."""
    deb, patterns = job
    files = list(files_in(deb, patterns))
    if any(path.endswith(".dict.dz") for path, _ in files):
        (_, data), (_, index) = files
        return [(f"article {i}", text) for i, text in enumerate(from_dict(index, gzip.decompress(data)))]
    return [(path, text) for path, data in files for text in documents_in(path, data)]


def paragraphs_of(text):
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\u00ad]", "", text.replace("\r\n", "\n"))
    return [p for p in re.split(r"\n(?:\s*\n)+", text.strip()) if p.strip()]


def key_of(paragraph):
    return hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=12).digest()


def is_prose(text):
    """Whether a text is long enough, and English prose rather than code, tables or another language."""
    words = re.findall(r"[A-Za-z']+", text)
    letters, frequent = sum(map(len, words)), sum(word.lower() in FREQUENT for word in words)
    return len(text) >= 400 and letters > 0.65 * len(text) and frequent > 0.22 * len(words)


def cleaned(documents, seen):
    """The documents that are prose, without a package's navigation (paragraphs that more than four and 2% of its documents
    have) and without paragraphs of 80 characters or more that an earlier document has. Adds theirs to `seen`."""
    split = [(name, [(p, key_of(p)) for p in paragraphs_of(text)]) for name, text in documents]
    count = collections.Counter(key for _, paragraphs in split for key in {key for _, key in paragraphs})
    most = max(4, len(split) / 50)
    for name, paragraphs in split:
        kept = [(p, key) for p, key in paragraphs if count[key] <= most and not (len(p) >= 80 and key in seen)]
        text = "\n\n".join(p.rstrip() for p, _ in kept) + "\n"
        if is_prose(text):
            seen.update(key for _, key in kept)
            yield name, text


def download(package, folder):
    if not list(folder.glob(f"{package}_*.deb")):
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return str(max(folder.glob(f"{package}_*.deb")))


def make(folder):
    for name in ("deb", "text"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    sources = json.loads((pathlib.Path(__file__).parent / "text_sources.json").read_text())
    debs = [download(package, folder / "deb") for package in sources]
    jobs = [(deb, source["files"]) for deb, source in zip(debs, sources.values())]
    seen, table = set(), []
    with multiprocessing.Pool() as pool:
        for package, deb, documents in zip(sources, debs, pool.imap(documents_of, jobs)):
            kept = list(cleaned(documents, seen))
            lines = (json.dumps({"name": name, "text": text}, ensure_ascii=False) + "\n" for name, text in kept)
            (folder / "text" / f"{package}.jsonl").write_text("".join(lines), encoding="utf-8")
            row = {"package": package, "version": pathlib.Path(deb).name.split("_")[1].replace("%3a", ":"),
                   "licence": sources[package]["licence"], "files": len(documents), "documents": len(kept),
                   "bytes": sum(len(text.encode()) for _, text in kept)}
            table.append(row)
            print("{package} {version}: {documents} of {files} documents, {bytes} bytes".format(**row), flush=True)
    (folder / "sources.json").write_text(json.dumps(table, indent=1) + "\n")
    print(f"{sum(t['documents'] for t in table)} documents, {sum(t['bytes'] for t in table)} bytes")


def train_tokenizer(folder):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=32000, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    files = sorted((folder / "text").glob("*.jsonl"))
    model.train_from_iterator((json.loads(line)["text"] for f in files for line in f.open(encoding="utf-8")), trainer)
    model.save(str(folder / "tokenizer.json"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--tokenizer", action="store_true")
    options = parser.parse_args()
    (train_tokenizer if options.tokenizer else make)(options.folder)


if __name__ == "__main__":
    main()
