#!/usr/bin/env python3
"""Compares `triad tokenizer train` with the `tokenizers` library: vocabulary and merges, and the ids of other texts.

  test_tokenizer_train.py TRIAD                     TRIAD: the program; made-up corpora, skipped where a package is missing
  test_tokenizer_train.py TRIAD CORPUS.jsonl HELD_OUT.jsonl [VOCABULARY]    a corpus of your own, and the time of both

The library gets each record's text as one sequence (train_from_iterator), because that is how a tokenizer later sees it."""
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

try:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer
except ImportError as missing:
    print(f"SKIPPED: {missing}")
    sys.exit(4)  # kSkippedCode of tests/support/skip.h

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "io"))
from make_tokens import LLAMA3, mixed_text  # noqa: E402

PATTERNS = {"gpt4": LLAMA3, "qwen": LLAMA3.replace("{1,3}", "")}  # Llama 3 has GPT-4's pattern
SPECIAL = ["<|endoftext|>", "<|user|>", "the"]


def library(texts, split, vocabulary, special=SPECIAL, **options):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "gpt2")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = byte_level
    if split != "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERNS[split]), "isolated"), byte_level])
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        **options), length=len(texts))
    return tokenizer


def triad(program, corpus, out, split, vocabulary, special=SPECIAL, *more):
    subprocess.run([program, "tokenizer", "train", "--input", corpus, "--out", out, "--split", split, "--vocab-size", str(vocabulary),
                    "--special", *special, *map(str, more)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return Tokenizer.from_file(f"{out}/tokenizer.json")


def compare(ours, theirs, texts, what):
    a, b = (json.loads(t.to_str()) for t in (ours, theirs))
    assert a["model"]["vocab"] == b["model"]["vocab"], f"{what}: the vocabularies differ"
    assert a["model"]["merges"] == b["model"]["merges"], f"{what}: the merges differ"
    assert a["added_tokens"] == b["added_tokens"], f"{what}: the special tokens differ"
    for mine, other in zip(ours.encode_batch(texts), theirs.encode_batch(texts)):
        assert mine.ids == other.ids, f"{what}: ids differ"


def write(path, texts):
    with open(path, "w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def made_up(program, folder):
    documents = mixed_text(1_500_000, seed=3)
    held_out = documents[::9]
    texts = [text for i, text in enumerate(documents) if i % 9]
    write(folder / "mixed.jsonl", texts)
    for split in ("gpt2", "gpt4", "qwen"):
        out = folder / split
        compare(triad(program, folder / "mixed.jsonl", out, split, 6000), library(texts, split, 6000), held_out, split)
        loaded = AutoTokenizer.from_pretrained(str(out))
        assert len(loaded) == 6000 and loaded.eos_token == "<|endoftext|>", (len(loaded), loaded.eos_token)
        assert loaded.decode(loaded(held_out[0])["input_ids"]) == held_out[0]
    # Few letters: runs of one, ties, limits, special tokens that merges make.
    for seed in range(60):
        rng = random.Random(seed)
        letters = rng.choice(["ab", "aab\n ", "the qu'sS12  \n\t.é日", "<|endoftext|> the"])
        texts = ["".join(rng.choices(letters, k=rng.randint(1, rng.choice([30, 300, 3000])))) for _ in range(rng.randint(1, 30))]
        split, vocabulary = rng.choice(["gpt2", "gpt4", "qwen"]), rng.choice([300, 400, 1000])
        special = rng.choice([["<|endoftext|>"], ["<|endoftext|>", "the", "abab"], ["<|endoftext|>", "aaa", "ba", "ab"]])
        frequency, longest = rng.choice([1, 2, 5]), rng.choice([100, 2, 3, 8])
        write(folder / "few.jsonl", texts)
        ours = triad(program, folder / "few.jsonl", folder / f"few{seed}", split, vocabulary, special,
                     "--min-frequency", frequency, "--max-token-bytes", longest)
        theirs = library(texts, split, vocabulary, special, min_frequency=frequency, max_token_length=longest + 1)
        compare(ours, theirs, texts, f"seed {seed}")


def own_corpus(program, folder, corpus, held_out, vocabulary=32000):
    read = lambda path: [json.loads(line)["text"] for line in open(path, encoding="utf-8")]
    texts = read(corpus)
    for split in ("gpt2", "gpt4", "qwen"):
        began = time.perf_counter()
        theirs = library(texts, split, int(vocabulary))
        half = time.perf_counter()
        ours = triad(program, corpus, folder / split, split, int(vocabulary))
        end = time.perf_counter()
        compare(ours, theirs, read(held_out), split)
        print(f"{corpus}, {split}: equal; tokenizers {half - began:.1f} s without reading the file, triad {end - half:.1f} s with it")


with tempfile.TemporaryDirectory() as temporary:
    if len(sys.argv) > 2:
        own_corpus(sys.argv[1], pathlib.Path(temporary), *sys.argv[2:])
    else:
        made_up(sys.argv[1], pathlib.Path(temporary))
