"""Writes tokens computed by the `tokenizers` library (pip install tokenizers), to compare io/tokenizer with.

make_tokens.py known FILE      small tokenizers, texts and their tokens: tests/io/known_tokens.json
make_tokens.py compare FOLDER  10 MB of text, tokenizers trained on it, and their tokens, for test_tokenizers.cpp
"""
import array
import glob
import json
import os
import random
import struct
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+")
TRICKY = [
    "", " ", "  ", "\n", "a", "Hello, world!", "I'll we've they're 'S DON'T it's 'ſ 'K\u212a 'LL'll\u2019s",
    "1234567 89,000.5 ½ Ⅷ ٣٤٥", "  two  spaces \n\n  and\tlines \r\n \u180e \u3000\u2003 \x85\xa0\u200b.",
    "日本語と中文，混在。", "مرحبا بالعالم، كيف؟", "👍🏽👩\u200d👩\u200d👧 ❤\ufe0f", "e\u0301 \u212b \ufb01 ﬃ Å ｶﾞ \u1e9b\u0323",
    "<|endoftext|> x <|endoftext|><|pad|>  <mask>\n if iffy <|endoftext|", "a<mask>  <mask>b<|pad|> \t x  if", "\x00\x01\x7f\xff",
    "for (int i = 0; i < n; ++i) {\n    x[i] = y[i] * 0x1F;\t// comment\n}\n", "\U0002ebf0\U00010d40\u1c89 \u1c8a",
]


def words(rng, alphabet, count, low, high):
    return " ".join("".join(rng.choices(alphabet, k=rng.randint(low, high))) for _ in range(count))


def mixed_text(size, seed):
    """Documents that mix English, code, Chinese, Arabic, emoji, random bytes and random characters."""
    rng = random.Random(seed)
    sources = sorted(glob.glob(os.path.dirname(os.__file__) + "/*.py"))[:150]
    code = "".join(open(f, encoding="utf-8", errors="replace").read() for f in sources)
    han = [chr(c) for c in range(0x4E00, 0x9FA5)]
    rng.shuffle(han)
    han_weights = [1 / (i + 5) for i in range(len(han))]
    arabic = [chr(c) for c in [*range(0x621, 0x64B), *range(0x64B, 0x650)]]
    emoji = [chr(c) for c in [*range(0x1F300, 0x1F650), *range(0x1F900, 0x1F9FF), 0x200D, 0xFE0F, 0x1F3FD]]
    spaces = " \t\n\r\x0b\x0c\x85\xa0\u1680\u180e\u2003\u2028\u3000\u200b  \n  aZ1.'"
    documents, total = [], 0
    while total < size:
        at = rng.randrange(len(code) - 8000)
        document = "".join([
            code[at:at + 6000], "".join(rng.choices(han + list("，。！？、\n") * 30, han_weights + [0.004] * 180, k=1500)),
            words(rng, arabic, 250, 2, 8), words(rng, emoji, 150, 1, 3), rng.randbytes(1000).decode("latin-1"),
            rng.randbytes(1500).decode("utf-8", "replace"), "".join(rng.choices(spaces, k=400)),
            "".join(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(300)),
            rng.choice(TRICKY),
        ])
        documents.append(document)
        total += len(document.encode())
    return documents


def tokenizers(documents, scale):
    """Pairs of name and trained tokenizer, one for each feature of tokenizer.json."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = lambda pattern, behavior="isolated", invert=False: pre_tokenizers.Split(Regex(pattern), behavior, invert)
    flags = [AddedToken("<mask>", lstrip=True, special=True), AddedToken("<|pad|>", rstrip=True),
             AddedToken("if", single_word=True), AddedToken(" x ", normalized=False)]
    kinds = [
        ("gpt2", 30, False, None, pre_tokenizers.ByteLevel(add_prefix_space=False), []),
        ("llama3", 40, True, None, pre_tokenizers.Sequence([split(LLAMA3), byte_level]), []),
        ("o200k", 8, False, normalizers.NFC(), pre_tokenizers.Sequence([split(O200K, "removed", True), byte_level]), []),
        ("flags", 4, False, normalizers.Sequence([normalizers.NFKC()]), pre_tokenizers.ByteLevel(), flags),
        ("deepseek", 4, False, None, pre_tokenizers.Sequence(
            [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK), byte_level]), []),
        ("splits", 2, False, normalizers.NFD(), pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Split(" ", "merged_with_next"),
             pre_tokenizers.Split(".", "merged_with_previous"), split("[a-z]", "contiguous"),
             pre_tokenizers.ByteLevel(add_prefix_space=False)]), []),
    ]
    for name, size, ignore_merges, normalizer, pre_tokenizer, added in kinds:
        tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
        tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.decoder = decoders.ByteLevel()
        if normalizer:
            tokenizer.normalizer = normalizer
        tokenizer.train_from_iterator(documents, trainers.BpeTrainer(
            vocab_size=256 + size * scale, special_tokens=["<|endoftext|>"], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
        tokenizer.add_tokens(added)
        yield name, tokenizer


def known(path):
    documents = mixed_text(200_000, seed=7)
    cases = []
    for name, tokenizer in tokenizers(documents, scale=6):
        texts = [t for t in TRICKY if t or name != "flags"]
        ids = [tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
        cases.append({"name": name, "tokenizer": json.loads(tokenizer.to_str()), "texts": texts, "ids": ids})
    with open(path, "w", encoding="ascii") as out:
        out.write("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


def write_records(path, records):
    with open(path, "wb") as out:
        for record in records:
            out.write(struct.pack("<I", len(record)) + record)


def compare(folder):
    documents = mixed_text(10_000_000, seed=1)
    write_records(f"{folder}/documents", [d.encode() for d in documents])
    for name, tokenizer in tokenizers(documents[:60], scale=1000):
        tokenizer.save(f"{folder}/{name}.json")
        encodings = tokenizer.encode_batch(documents, add_special_tokens=False)
        write_records(f"{folder}/{name}.ids", [array.array("i", e.ids).tobytes() for e in encodings])


if __name__ == "__main__":
    {"known": known, "compare": compare}[sys.argv[1]](sys.argv[2])
