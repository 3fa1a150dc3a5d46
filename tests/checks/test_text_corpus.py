#!/usr/bin/env python3
"""Tests text_corpus.py on made-up files: what becomes of markup, of a dictionary and of an R package's texts, and what is left out."""
import gzip
import pathlib
import struct
import sys
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "baselines" / "curves"))
import text_corpus

failures = 0
PROSE = "It is the length of a text that decides, and the words in it: most of them are to be found in any book. " * 5


def check(what, got, expected):
    global failures
    if got != expected:
        failures += 1
        print(f"{what}: {got!r} instead of {expected!r}")


def texts(files):
    text_corpus.files_in = lambda deb, patterns: files
    return [text for _, text in text_corpus.documents_of(("a.deb", []))]


def main():
    page = b"""<html><head><title>no</title></head><body><div class="navheader"><p>up</div><h1>A
 title</h1><script>no</script><p>Text &amp; <b>more</b><br>text<ul><li><p>one</p><li>two</ul>
<pre>a
  b</pre><nav>no</nav></body></html>"""
    check("a page", texts([("a.html", page)]), ["A title\n\nText & more\n\ntext\n\n* one\n\n* two\n\na\n  b"])
    check("a compressed file", texts([("a.txt.gz", gzip.compress("caf\u00e9".encode("latin-1")))]), ["caf\u00e9"])

    articles = [b"00-database\nno\n", b"Word\n  A sign.\n  [1913 Webster]\n", b"Other\n  Not the same.\n"]
    index = b"00-database\tA\tP\nother\tv\tW\nword\tP\tg\n"  # offsets and sizes in digits of base64: 0, 15; 47, 22; 15, 32
    check("a dictionary", texts([("d.dict.dz", gzip.compress(b"".join(articles))), ("d.index", index)]),
          ["Word\nA sign.\n", "Other\nNot the same.\n"])

    lines = [b"PERSUASION", b"", b"by Jane Austen"]
    vector = b"X\n\x00\x00\x00\x10" + b"".join(b"\x00\x04\x00\x09" + struct.pack(">i", len(x)) + x for x in lines)
    stored = zlib.compress(vector)
    check("novels", texts([("Rdata.rdb", (struct.pack(">i", len(vector)) + stored) * 2)]), ["PERSUASION\n\nby Jane Austen"] * 2)

    check("prose", text_corpus.is_prose(PROSE), True)
    check("short prose", text_corpus.is_prose(PROSE[:300]), False)
    check("code", text_corpus.is_prose("for (int i = 0; i < n; ++i) sum += a[i] * b[i];\n" * 20), False)
    check("a table", text_corpus.is_prose("the 12345 of 12345 in 12345\n" * 30), False)
    check("German", text_corpus.is_prose("Es kommt in der Tat auf die Laenge an, und darauf, welche Woerter darin stehen. " * 10), False)

    seen = set()
    own = [f"{PROSE}Of these there is number {i}." for i in range(8)]
    first = dict(text_corpus.cleaned([(str(i), f"Contents of the book\n\n{text}") for i, text in enumerate(own)], seen))
    check("navigation", first, {str(i): text + "\n" for i, text in enumerate(own)})
    second = dict(text_corpus.cleaned([("9", f"{own[3]}\n\n{PROSE}new"), ("10", own[5])], seen))
    check("paragraphs of an earlier document", second, {"9": f"{PROSE}new\n"})
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
