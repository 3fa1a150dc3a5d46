#!/usr/bin/env python3
"""Compares `triad data` on conversations with transformers' apply_chat_template: tokens, and what is learned.

  test_chat_templates.py TRIAD [TEMPLATE.jinja ...]     TRIAD: the program

The templates are those of chat_templates/, Triad's ChatML, those given, and those in the folder that TRIAD_CHAT_TEMPLATES names.
For each, 200 random conversations with system turns, tools, thoughts, contents of parts and roles out of order: where
transformers raises, triad has to refuse; else tokens are equal. Masks are transformers' where the template marks what is
generated; elsewhere they are found by rendering prefixes. Skipped where transformers is missing."""
import copy
import json
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile

try:
    import transformers
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
except ImportError as missing:
    print(f"SKIPPED: {missing}")
    sys.exit(4)  # kSkippedCode of tests/support/skip.h

HERE = pathlib.Path(__file__).resolve().parent / "chat_templates"
SEPARATOR = "<|doc|>"
SPECIAL = [SEPARATOR, "<s>", "</s>", "<|head|>", "<|/head|>", "<|stop|>", "<|turn|>", "[Q]", "[/Q]", "<|im_start|>", "<|im_end|>",
           "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "<|eom_id|>", "<|end|>"]
WORDS = ["the", "answer", "is", "42", "why", "naïve", "日本語", "é", "e\u0301", "🙂", "a\u0323\u0307", "don't", "<think>", "\n", "\n\n", "  ", "\t",
         "{x}", "{{ y }}", "\"q\"", "\\", "x^2", "Ünï", "\u00a0", "\u2028", "<b>", "'s", "\u007f", "\u0001"]


def text(rng, least=0):
    words = [rng.choice(WORDS) for _ in range(rng.randrange(least, 12))]
    return rng.choice(["", " ", "\n"]) + rng.choice([" ", ""]).join(words) + rng.choice(["", "", " ", "\n"])


def value(rng, depth=0):
    kind = rng.randrange(8 if depth < 2 else 6)
    return [lambda: text(rng), lambda: rng.randrange(-9, 10**12), lambda: rng.choice([0.5, 1e-7, 1e22, 3.0, -0.0, 12345.678]),
            lambda: True, lambda: False, lambda: None, lambda: [value(rng, depth + 1) for _ in range(rng.randrange(3))],
            lambda: {rng.choice(["b", "a", "items", "é"]) + str(i): value(rng, depth + 1) for i in range(rng.randrange(3))}][kind]()


def call(rng):
    return {"type": "function", "function": {"name": rng.choice(["find", "add"]),
                                             "arguments": {"q" + str(i): value(rng) for i in range(rng.randrange(1, 3))}}}


def conversation(rng):
    messages, tools = [], None
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": text(rng, 1)})
    if rng.random() < 0.3:
        tools = [{"type": "function", "function": {"name": name, "description": text(rng), "parameters": {
            "type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}}} for name in ["find", "add"][:rng.randrange(1, 3)]]
    for _ in range(rng.randrange(1, 4)):
        question = text(rng, 1)
        messages.append({"role": "user", "content": question})
        if rng.random() < 0.1:
            messages[-1]["content"] = [{"type": "text", "text": question}, {"type": "text", "text": text(rng)}]
        if tools and rng.random() < 0.6:
            messages.append({"role": "assistant", "content": rng.choice([None, "", text(rng)]), "tool_calls": [call(rng)]})
            for _ in range(rng.randrange(1, 3)):
                messages.append({"role": "tool", "content": json.dumps(value(rng))})
        if rng.random() < 0.9:
            messages.append({"role": "assistant", "content": text(rng, 1)})
            if rng.random() < 0.3:
                messages[-1]["reasoning_content"] = text(rng)
            elif rng.random() < 0.2:
                messages[-1]["content"] = "<think>\n" + text(rng) + "\n</think>\n\n" + text(rng, 1)
    if rng.random() < 0.05:
        rng.shuffle(messages)
        while messages[0]["role"] == "assistant":
            messages.append(messages.pop(0))
    record = {"messages": messages, "chat_template_kwargs": {"date_string": "26 Jul 2024", "strftime_now": "2024-07-26"}}
    if tools:
        record["tools"] = tools
    if rng.random() < 0.2:
        record["chat_template_kwargs"]["enable_thinking"] = rng.random() < 0.5
    return record


def make_tokenizer(folder, template, number):
    """A byte-level BPE tokenizer with its template in one of the two files that may have it."""
    bpe = Tokenizer(models.BPE())
    if number % 2 == 0:
        bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    rng = random.Random(1)
    bpe.train_from_iterator([text(rng) for _ in range(2000)] + ["system user assistant tool\n"] * 50, trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    if template is None:
        return tokenizer
    tokenizer.chat_template = template
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if number % 3 == 0:
        config["chat_template"] = template
    elif number % 3 == 1:
        config["chat_template"] = [{"name": "other", "template": "x"}, {"name": "default", "template": template}]
    else:
        (folder / "chat_template.jinja").write_text(template, newline="")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def spans_of(apply, record):
    """Where the answers are in the text, by rendering the turns before and up to each; None if that does not tell."""
    whole, spans = apply(record["messages"]), []
    for i, message in enumerate(record["messages"]):
        if message["role"] != "assistant":
            continue
        try:
            before, upto = apply(record["messages"][:i], add_generation_prompt=True), apply(record["messages"][:i + 1])
        except Exception:
            return None
        if not whole.startswith(upto) or not upto.startswith(before):
            return None
        content = message.get("content")
        content = (content if isinstance(content, str) else "").rstrip()
        shown = upto.rstrip()
        end = len(upto) if (content and shown.endswith(content)) or len(shown) <= len(before) else len(shown)
        spans.append((len(before), end))
    return spans


def expected(tokenizer, record):
    """Token ids, and whether each is learned, None if that is not known; None if transformers raises."""
    options = dict(tools=record.get("tools"), **record["chat_template_kwargs"])
    if "strftime_now(" in tokenizer.chat_template:  # transformers keeps only data among the variables, no function
        constant = "'" + options.pop("strftime_now") + "'"
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = re.sub(r"strftime_now\([^)]*\)", constant, tokenizer.chat_template)
    apply = lambda messages, **more: tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=False, **options, **more)
    marked = "generation %}" in tokenizer.chat_template
    try:
        out = tokenizer.apply_chat_template(copy.deepcopy(record["messages"]), return_dict=True,
                                            return_assistant_tokens_mask=marked, **options)
        whole = apply(record["messages"])
    except Exception:
        return None
    ids = out["input_ids"]
    if marked:
        return ids, out["assistant_masks"]
    spans = spans_of(apply, record)
    if spans is None:
        return ids, None
    offsets = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return ids, [int(any(begin < e and end > b for b, e in spans)) for begin, end in offsets]


def documents(folder):
    """Each document's tokens and mask, in the shards of `triad data`."""
    tokens, bits = [], []
    for path in sorted(folder.glob("train_*.bin")):
        data = path.read_bytes()
        assert data[:8] == b"BIN.TOK\n", path
        count = struct.unpack_from("<i", data, 16)[0]
        tokens += struct.unpack_from(f"<{count}I", data, 1024)
        mask = data[1024 + 4 * count:]
        bits += [mask[i // 8] >> (i % 8) & 1 for i in range(count)]
    separator = tokens[0]
    begins = [i for i, token in enumerate(tokens) if token == separator] + [len(tokens)]
    return [(tokens[b + 1:e], bits[b + 1:e]) for b, e in zip(begins, begins[1:])]


def compare(triad, name, template, number, folder, n):
    tokenizer = make_tokenizer(folder / "tokenizer", template, number)
    rng = random.Random(number)
    records = [conversation(rng) for _ in range(n)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(r, ensure_ascii=rng.random() < 0.5) + "\n" for r in records))
    done = subprocess.run([triad, "data", "--tokenizer", folder / "tokenizer", "--separator", SEPARATOR, "--input", folder / "chats.jsonl",
                           "--skip-bad", "--val-fraction", "0", "--out", folder / "shards"], capture_output=True, text=True)
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    if template is None:
        tokenizer.chat_template = json.loads((folder / "shards/manifest.json").read_text())["chat"]["templates"]["default"]
    wanted = [(record, want) for record, want in ((r, expected(tokenizer, r)) for r in records) if want and want[0]]
    found = documents(folder / "shards")
    report = f"{done.stdout}{done.stderr}"
    assert len(found) == len(wanted), f"{name}: {len(found)} documents, not {len(wanted)}: {report}"
    masks = 0
    for (record, (ids, mask)), (tokens, learned) in zip(wanted, found):
        shown = f"{name}: {json.dumps(record)}\n{tokenizer.decode(ids)!r}\n{tokenizer.decode(tokens)!r}"
        assert list(tokens) == list(ids), shown
        if mask is not None:
            masks += 1
            assert list(learned) == list(mask), f"{shown}\n{list(mask)}\n{list(learned)}"
    print(f"{name}: {len(wanted)} of {n} conversations equal, {masks} of their masks; the others are refused by both")
    return len(wanted), masks


def main(triad, paths):
    own = sorted(HERE.glob("*.jinja"))
    more = os.environ.get("TRIAD_CHAT_TEMPLATES")
    paths = own + [pathlib.Path(p) for p in paths] + (sorted(pathlib.Path(more).glob("*.jinja")) if more else [])
    cases = [("ChatML", None)] + [(p.stem, p.read_text()) for p in paths]
    failed = 0
    for number, (name, template) in enumerate(cases):
        with tempfile.TemporaryDirectory() as folder:
            try:
                equal, masks = compare(triad, name, template, number, pathlib.Path(folder), 200)
                if number <= len(own):  # these are written so that most conversations suit them
                    assert equal >= 100 and masks >= 60, f"{name}: too few conversations"
            except AssertionError as error:
                print(error)
                failed += 1
    if failed:
        sys.exit(f"{failed} of {len(cases)} templates differ")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
