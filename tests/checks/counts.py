#!/usr/bin/env python3
"""Counts what makes this tree easy or hard to read, prints it, and fails where a limit is passed.

tests/checks/counts.py                       all counts
tests/checks/counts.py --comments SEED [N]   N comments drawn at random (40), each with the code it is about, and the ten longest
                                             lines of help and log
tests/checks/counts.py --words               "of" by file, every trailing comment that begins with a preposition, every name of_x and its_x
"""
import collections
import os
import random
import re
import subprocess
import sys

LIMITS = {
    "sources in one folder": 44,
    "rooms without a README.md": 0,
    "words in one guide, outside tables": 900,
    "lines of guides over 140 columns, outside tables": 0,
    "times in one guide, outside tables": 15,
    "faults in the shape of guides": 0,
    "times in comments": 0,
    "citations of files that do not exist": 0,
    '"of" in 1,000 comment words': 30,
    "trailing comments that begin with a preposition": 15,
    "names of_x and its_x": 5,
    "kernels that share a name": 0,
    "names in unnamed namespaces that files compiled together share": 0,
    "host functions over 80 lines": 5,
    "device functions over 150 lines that do not say why": 0,
    "runs of 8 lines that stand twice": 0,
}
OTHER_HEADINGS = ("README.md", "tools/pytorch/README.md")  # the project's, and the Python package's
APART = ("io/chat", "tests/kernels", "tests/model", "tests/fault_injection")  # folders whose files are compiled one by one
SOURCES = (".h", ".cpp", ".cu", ".cuh")
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")

# Native writers of this field use "of" 12 to 21 times in 1,000 words of comments; a genitive that could be a compound ("query rows")
# is read twice. A trailing comment begins with its noun.
OF = re.compile(r"\bof\b", re.I)
WORD = re.compile(r"[A-Za-z][\w'-]*")
PREPOSITION = re.compile(r"(?:of|for|in|by|with|to|from|on|at|as|over|per|after|before|between|into|without|within|under|behind|during|through|"
                         r"than|until|upon|across)\b", re.I)
GENITIVE_NAME = re.compile(r"\b(?:of|its)_[a-z]\w*")
TIME = re.compile(r"(?<![\w.])\d[\d,.]*\s?(?:us|µs|ms|microseconds?|milliseconds?)\b")
CITATION = re.compile(r"(?<![\w/.*<{-])((?:[\w-]+/)*[\w-]+\.(?:h|cpp|cu|cuh|md|py|sh|js|css|jsonl))(?![\w*])")
# Files that others write, or that a run, a test or another project names.
ELSEWHERE = re.compile(r"^(?:nccl|cublas\w*|cuda\w*|mpi|cblas|pcre2|utf8proc|zstd|zlib|cupti|nvml|nvToolsExt|cub|catch|fmt)\.h(?:pp)?$|"
                       r"^(?:my|runs?|shards|books|crawl)/|^(?:RESULTS|traces?|heartbeats?|heartbeat|diagnostics|a|b|x|train)\.(?:md|jsonl|py)$|"
                       r"^(?:revision|nvToolsExt|sys|unistd|signal)\.h$|^cub\.cuh$|(?:^|/)(?:OP)?_cases\.cpp$|^(?:ROOM/)?OP\.(?:h|cpp|cu)$|^heartbeat_rank\w*\.jsonl$|^(?:samples|eval)\.jsonl$|^prompts?\.jsonl$|^requests?\.jsonl$")


def git_files():
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [f for f in out.split("\n") if f and os.path.exists(os.path.join(ROOT, f))]


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8", errors="replace") as file:
        return file.read()


def split_code(text):
    """The code with comments and the contents of strings blanked, and the comments as (line, text)."""
    code, comments, i, line = [], [], 0, 1
    pattern = re.compile(r'R"(\w*)\((?:.|\n)*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*(?:.|\n)*?\*/')
    for m in pattern.finditer(text):
        code.append(text[i:m.start()])
        found = m.group(0)
        at = text.count("\n", 0, m.start()) + 1
        if found.startswith("//") or found.startswith("/*"):
            comments.append((at, found))
            code.append(re.sub(r"[^\n]", " ", found))
        else:
            code.append('"' + re.sub(r"[^\n]", " ", found[1:-1]) + '"')
        i = m.end()
    code.append(text[i:])
    return "".join(code), comments


def blocks_of(comments, text):
    """(line, text) of each comment: neighbouring // lines are one comment. A comment after code is its own, with the lines aligned under it;
    so is a heading (---- like this ----)."""
    lines, blocks = text.split("\n"), []
    for at, found in comments:
        body = re.sub(r"^///?\s?|^/\*|\*/$", "", found)
        column = lines[at - 1].rfind(found.split("\n")[0])
        after_code = bool(lines[at - 1][:column].strip())
        if blocks and blocks[-1][1] + 1 == at and blocks[-1][2] == column and found.startswith("//") and not after_code and not blocks[-1][3][0].startswith("----"):
            blocks[-1][1] = at
            blocks[-1][3].append(body)
        else:
            blocks.append([at, at, column if found.startswith("//") else None, [body]])
    return [(first, " ".join(body)) for first, _, _, body in blocks]


def code_of(text, line):
    """The code that the comment which begins on this line is about: the code before it, or the next line of code."""
    lines = text.split("\n")
    before = lines[line - 1].split("//")[0].strip()
    after = (l.strip() for l in lines[line:] if l.strip() and not l.strip().startswith("//"))
    return before or next(after, "")


def functions_of(code):
    """(lines, name, first line, is_device) of each function with a body; lambdas count as part of theirs."""
    found, depth, start = [], 0, 0
    opened = []  # per brace: None, or (first line, name, device)
    inside = 0
    for m in re.finditer(r"[{};]|^#[^\n]*(?:\\\n[^\n]*)*", code, re.M):
        char = m.group(0)
        if char.startswith("#"):
            start = m.end()
            continue
        if char == "{":
            head = code[start:m.start()]
            flat = re.sub(r"\s+", " ", head).strip()
            entry = None
            if not inside and ")" in flat and not re.match(r"(?:inline |constexpr |static |const )*(?:namespace|struct|class|enum|union)\b(?!.*\))", flat) \
                    and not flat.endswith("=") and not re.search(r"=\s*$|\breturn\b", flat):
                name = re.search(r"([~\w:]+(?:operator[^(]*)?)\s*\(", re.sub(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)|template\s*<[^{]*?>\s*(?=[\w_])|decltype\(auto\)", " ", flat))
                if name:
                    lead = len(head) - len(head.lstrip())
                    entry = (code.count("\n", 0, start + lead) + 1, name.group(1), "__global__" in flat or "__device__" in flat)
            opened.append(entry)
            if entry:
                inside += 1
        elif char == "}":
            if opened:
                entry = opened.pop()
                if entry:
                    inside -= 1
                    last = code.count("\n", 0, m.start()) + 1
                    found.append((last - entry[0] + 1, entry[1], entry[0], entry[2]))
        start = m.end()
    return found


def unnamed_names(text):
    """Names that a source defines in its unnamed namespaces, without aliases: those that differ are compile errors."""
    inside = False
    for line in text.split("\n"):
        if line == "namespace {" or line == "}  // namespace":
            inside = line == "namespace {"
        elif inside and (m := re.match(r"(?:struct|class|enum class|enum) (\w+)|(?!template|using|namespace)"
                                       r"[A-Za-z][\w:<>,&* ]*[ &*](\w+)(?:\(| = |[\[{;])", line)):
            yield m.group(1) or m.group(2)


def says_why_long(where):
    """Whether the comment above a function (FILE:LINE NAME) gives the reason for its length: a sentence with "one function"."""
    path, line = re.match(r"(\S+):(\d+) ", where).groups()
    lines, at, comment = read(path).split("\n"), int(line) - 2, []
    while at >= 0 and (lines[at].startswith("//") or lines[at].startswith("template")):
        comment.insert(0, lines[at])
        at -= 1
    return re.search(r"\bone function\b", re.sub(r"\s*\n//\s*", " ", "\n".join(comment))) is not None


def prose_of(text):
    """A guide without its code blocks and generated parts; tables apart."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    text = re.sub(r"<!-- generated.*?<!-- end -->", "", text, flags=re.S)
    lines = text.split("\n")
    return "\n".join(l for l in lines if not l.lstrip().startswith("|"))


def shape_faults(guide, text):
    """What a formatter for code does to a guide, and what a table with a forgotten cell shows: `FILE:LINE: what`. A guide begins with
    `# FOLDER/`, and all rows of a table have as many cells as its header."""
    lines = re.sub(r"```.*?```", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.S).split("\n")
    folder = os.path.dirname(guide)
    faults = []
    if guide in OTHER_HEADINGS:
        if not lines[0].startswith("# "):
            faults.append(f"{guide}:1: no heading: {lines[0]}")
    elif not re.match(rf"# {re.escape(folder)}/(?=:|$)", lines[0]):
        faults.append(f"{guide}:1: the heading does not begin with `# {folder}/`: {lines[0]}")
    header = None  # of the table that this line continues: its number of cells
    for at, line in enumerate(lines, 1):
        if not line.startswith("|"):
            header = None
            continue
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1
        if header is None:
            header = cells
            if not re.match(r"\|(?: *:?-+:? *\|)+$", lines[at]):
                faults.append(f"{guide}:{at + 1}: a table's second line is not |---|: {lines[at]}")
        if cells != header or not line.endswith("|"):
            faults.append(f"{guide}:{at}: {cells} cells of {header}: {line[:60]}")
    return faults


def main():
    files = git_files()
    sources = [f for f in files if f.endswith(SOURCES) and not f.startswith("tests/fuzz/corpora")]
    guides = [f for f in files if f.endswith("README.md") and not f.startswith("tests/baselines/")]
    parsed = {f: split_code(read(f)) for f in sources}

    if "--comments" in sys.argv:
        at = sys.argv.index("--comments")
        seed, count = int(sys.argv[at + 1]), int((sys.argv[at + 2:] or ["40"])[0])
        everything = [(f, line, text) for f in sources for line, text in blocks_of(parsed[f][1], read(f))
                      if len(text.split()) >= 4 and not text.startswith("namespace ")]
        for f, line, text in random.Random(seed).sample(sorted(everything), count):
            print(f"{f}:{line}: {text.strip()}\n    | {code_of(read(f), line)}")
        strings = []
        for f in sources:
            if f.startswith("tests/"):
                continue
            for m in re.finditer(r'"((?:\\.|[^"\\\n])*)"(?:\s*\n\s*"((?:\\.|[^"\\\n])*)")*', read(f)):
                text = "".join(re.findall(r'"((?:\\.|[^"\\\n])*)"', m.group(0)))
                if text.count(" ") > 5:
                    strings.append((len(text), f, text))
        print("\nthe ten longest lines of help and log:")
        for _, f, text in sorted(strings, reverse=True)[:10]:
            print(f"{f}: {text}")
        return 0

    totals, lists = collections.OrderedDict(), collections.defaultdict(list)

    print("files and lines by folder:")
    rooms = collections.defaultdict(lambda: [0, 0])
    for f in sources:
        rooms[os.path.dirname(f)][0] += 1
        rooms[os.path.dirname(f)][1] += read(f).count("\n")
    for room in sorted(rooms):
        print(f"  {room:24} {rooms[room][0]:4} files {rooms[room][1]:6} lines")
    most = max(rooms, key=lambda r: rooms[r][0])
    totals["sources in one folder"] = rooms[most][0]
    lists["sources in one folder"] = [most]
    if any(os.path.dirname(f) == "kernels" for f in sources):
        lists["sources in one folder"].append("kernels/ itself holds sources")
        totals["sources in one folder"] = max(totals["sources in one folder"], 1000)

    lists["rooms without a README.md"] = [room for room in rooms if room + "/README.md" not in guides and not room.startswith("tests/")]
    totals["rooms without a README.md"] = len(lists["rooms without a README.md"])

    words = {f: len(prose_of(read(f)).split()) for f in guides}
    totals["words in one guide, outside tables"] = max(words.values())
    lists["words in one guide, outside tables"] = [f"{f}: {n}" for f, n in words.items() if n > 900]
    lists["lines of guides over 140 columns, outside tables"] = [
        f"{f}: {line}" for f in guides for line in prose_of(read(f)).split("\n") if len(line) > 140]
    totals["lines of guides over 140 columns, outside tables"] = len(lists["lines of guides over 140 columns, outside tables"])
    times = {f: len(TIME.findall(prose_of(read(f)))) for f in guides}
    totals["times in one guide, outside tables"] = max(times.values())
    lists["times in one guide, outside tables"] = [f"{f}: {n}" for f, n in times.items() if n > 15]

    lists["faults in the shape of guides"] = [fault for f in guides for fault in shape_faults(f, read(f))]
    totals["faults in the shape of guides"] = len(lists["faults in the shape of guides"])

    for f in sources:
        for at, text in parsed[f][1]:
            if not f.startswith("tests/"):
                for m in TIME.finditer(text):
                    lists["times in comments"].append(f"{f}:{at}: {m.group(0)}")
    totals["times in comments"] = len(lists["times in comments"])

    known, names = set(files), {os.path.basename(f) for f in files}
    tails = {"/".join(f.split("/")[i:]) for f in files for i in range(f.count("/") + 1)}
    for f in sources + guides:
        texts = parsed[f][1] if f in parsed else enumerate(re.sub(r"```.*?```", "", read(f), flags=re.S).split("\n"), 1)
        for at, text in texts:
            for m in CITATION.finditer(text):
                cited = m.group(1)
                local = os.path.normpath(os.path.join(os.path.dirname(f), cited))
                if cited in tails or local in known or ELSEWHERE.search(cited):
                    continue
                lists["citations of files that do not exist"].append(f"{f}:{at}: {cited}")
    totals["citations of files that do not exist"] = len(lists["citations of files that do not exist"])

    trailing, names = "trailing comments that begin with a preposition", "names of_x and its_x"
    all_words, all_ofs, ofs, known_names = 0, 0, collections.Counter(), collections.Counter()
    for f in sources:
        text = read(f)
        for at, block in blocks_of(parsed[f][1], text):
            all_words += len(WORD.findall(block))
            ofs[f] += len(OF.findall(block))
            line = text.split("\n")[at - 1]
            if "//" in line and line.split("//")[0].strip() and PREPOSITION.match(block.strip()):
                lists[trailing].append(f"{f}:{at}: {line.strip()}")
        known_names.update(GENITIVE_NAME.findall(parsed[f][0]))
    all_ofs = sum(ofs.values())
    totals['"of" in 1,000 comment words'] = round(1000 * all_ofs / max(1, all_words), 1)
    lists['"of" in 1,000 comment words'] = [f"{f}: {n}" for f, n in ofs.most_common(40)]
    totals[trailing] = len(lists[trailing])
    lists[names] = [f"{name}: {n} times" for name, n in known_names.most_common()]
    totals[names] = len(known_names)

    functions, kernels = [], collections.defaultdict(set)
    for f in sources:
        code = parsed[f][0]
        functions += [(lines, f"{f}:{at} {name}", device) for lines, name, at, device in functions_of(code)]
        flat = re.sub(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)", " ", code)
        for m in re.finditer(r"__global__\s+(?:void|static|inline|\s)+(\w+)\s*\(", flat):
            kernels[m.group(1)].add(f)
    for device, limit, title in ((False, 80, "host functions over 80 lines"), (True, 150, "device functions over 150 lines that do not say why")):
        mine = sorted((x for x in functions if x[2] == device and not (not device and x[1].startswith("tests/"))), reverse=True)
        print(f"the ten longest {'device' if device else 'host'} functions:")
        for lines, where, _ in mine[:10]:
            print(f"  {lines:4} {where}")
        lists[title] = [f"{where}: {lines}" for lines, where, _ in mine if lines > limit and not (device and says_why_long(where))]
        totals[title] = len(lists[title])
    lists["kernels that share a name"] = [f"{k}: {', '.join(sorted(v))}" for k, v in kernels.items() if len(v) > 1]
    totals["kernels that share a name"] = len(lists["kernels that share a name"])
    together = "names in unnamed namespaces that files compiled together share"  # as triad_unite (cmake/flags.cmake) does
    definitions = collections.defaultdict(set)
    for f in sources:
        folder = os.path.dirname(f)
        if re.match(r"(?:io|train|tools|tests)\b", f) and f.endswith(".cpp") and folder not in APART:
            for name in unnamed_names(read(f)):
                definitions[folder, name].add(f)
    lists[together] = [f"{name}: {', '.join(sorted(v))}" for (_, name), v in definitions.items() if len(v) > 1]
    totals[together] = len(lists[together])

    # A line counts by its code; tables of cases and includes say the same by nature.
    windows = collections.defaultdict(list)
    for f in sources:
        if f.endswith("_cases.cpp"):
            continue
        code = parsed[f][0].split("\n")
        raw = read(f).split("\n")
        lines = [(i, re.sub(r"\s+", " ", re.sub(r"//.*", "", raw[i])).strip()) for i, c in enumerate(code) if c.strip()]
        lines = [(i + 1, l) for i, l in lines if l and not l.startswith(("#include", "#pragma", "namespace", "}  // namespace", "using "))]
        for k in range(len(lines) - 7):
            windows[tuple(l for _, l in lines[k:k + 8])].append((f, lines[k][0]))
    twice, last = [], None
    for places in sorted(p for p in windows.values() if len(p) > 1):
        first = places[0]
        if last is None or first[0] != last[0] or first[1] > last[1] + 12:
            twice.append(" = ".join(f"{f}:{at}" for f, at in places))
        last = first
    lists["runs of 8 lines that stand twice"] = twice
    totals["runs of 8 lines that stand twice"] = len(twice)

    status = 0
    print("counts, and their limits:")
    for title, limit in LIMITS.items():
        over = totals[title] > limit
        print(f"  {totals[title]:8} of {limit:4}  {title}{'   <-- over' if over else ''}")
        status |= over
    for title in LIMITS:
        if totals[title] > LIMITS[title] or (title in ('"of" in 1,000 comment words', trailing, names) and "--words" in sys.argv):
            print(f"{title}:")
            for line in lists[title]:
                print(f"  {line}")
    return status


if __name__ == "__main__":
    sys.exit(main())
