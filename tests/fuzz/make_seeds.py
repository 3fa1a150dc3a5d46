#!/usr/bin/env python3
"""Writes the seeds of the fuzzers' corpora, corpora/READER/seed-NAME: small files of each kind that a reader accepts, and
some that it refuses. Inputs that found a bug, bug-NAME, are not touched."""
import gzip
import json
import pathlib
import struct
import zlib

CORPORA = pathlib.Path(__file__).resolve().parent / "corpora"
CUT = b"\n%%\n"


def put(reader, name, *parts):
    parts = [p.encode() if isinstance(p, str) else p for p in parts]
    folder = CORPORA / reader
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"seed-{name}").write_bytes(CUT.join(parts))


def shards():
    def header(*words):
        return struct.pack("<256i", *words, *[0] * (256 - len(words)))

    u16, u32 = struct.pack("<4H", 50256, 1, 2, 65535), struct.pack("<3I", 128000, 7, 2**31 - 1)
    put("shard", "u16", header(20240520, 1, 4) + u16)
    put("shard", "u32", header(20240801, 7, 3) + u32)
    put("shard", "u32-large", header(20240801, 7, 1) + b"\xff\xff\xff\xff")
    llmq = struct.unpack("<2i", b"BIN.TOK\n")
    put("shard", "llmq", header(*llmq, 2, 4, 3, 128256, 0) + u32)
    put("shard", "llmq-mask", header(*llmq, 2, 4, 3, 128256, 1) + u32 + b"\x07")
    put("shard", "llmq-mask-foreign", header(*llmq, 2, 4, 3, 128256, 1) + u32 + b"\x0f")
    put("shard", "llmq-mask-cut", header(*llmq, 2, 4, 3, 128256, 1) + u32)
    put("shard", "llmq-mask-long", header(*llmq, 2, 4, 2, 128256, 1) + u32 + b"\x03")
    nine = struct.pack("<9I", *range(9))
    put("shard", "llmq-mask-bytes", header(*llmq, 2, 4, 9, 128256, 1) + nine + b"\xa5\x01")
    put("shard", "llmq-mask-flag", header(*llmq, 2, 4, 9, 128256, -1) + nine + b"\xa5\x01")
    put("shard", "nanogpt", u16)
    put("shard", "nanogpt-odd", u16 + b"\x01")
    put("shard", "cut-header", header(20240520, 1, 4)[:40])
    put("shard", "cut-tokens", header(20240520, 1, 5) + u16)
    put("shard", "tail", header(20240801, 7, 2) + u32)
    put("shard", "no-tokens", header(20240520, 1, 0))
    put("shard", "negative-count", header(20240520, 1, -1) + u16)
    put("shard", "most-tokens", header(20240801, 7, 2**31 - 1) + u32)
    put("shard", "version", header(20240520, 7, 4) + u16)
    put("shard", "text", "Once upon a time there was no token.\n")
    put("shard", "empty", b"")


def safetensors():
    def file(header, data=b"", pad=b""):
        text = (header if isinstance(header, str) else json.dumps(header, separators=(",", ":"))).encode() + pad
        return struct.pack("<Q", len(text)) + text + data

    def tensor(dtype, shape, begin, end):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    data = bytes(range(24))
    crc = f"{zlib.crc32(data[:16]):08x}"
    put("safetensors", "two", file({"__metadata__": {"format": "pt", "crc32/a": crc}, "a": tensor("F32", [2, 2], 0, 16),
                                    "b": tensor("BF16", [4], 16, 24)}, data, b"  "))
    put("safetensors", "damaged", file({"__metadata__": {"crc32/a": "00000000"}, "a": tensor("U8", [3], 0, 3)}, b"abc"))
    put("safetensors", "types", file({"a": tensor("F64", [1], 0, 8), "b": tensor("I64", [1], 8, 16),
                                      "c": tensor("I32", [1], 16, 20), "d": tensor("F16", [2], 20, 24)}, data))
    put("safetensors", "small-types", file({"a": tensor("F4", [2, 3], 0, 3), "b": tensor("F6_E2M3", [4], 3, 6),
                                            "c": tensor("F6_E3M2", [4], 6, 9), "d": tensor("F8_E8M0", [1], 9, 10),
                                            "e": tensor("F8_E4M3FNUZ", [1], 10, 11), "f": tensor("F8_E5M2FNUZ", [1], 11, 12),
                                            "g": tensor("C64", [1], 12, 20)}, data[:20]))
    put("safetensors", "half-byte", file({"a": tensor("F4", [3], 0, 2)}, b"ab"))
    put("safetensors", "zero", file({"a": tensor("F32", [], 0, 4), "b": tensor("F32", [0, 1 << 40], 4, 4)}, b"\0\0\0\0"))
    put("safetensors", "rank6", file({"a": tensor("U8", [1, 1, 1, 1, 1, 2], 0, 2)}, b"ab"))
    for name, header in {  # tests/fuzz/safetensors.cpp writes the header's length
            "two-parts": {"__metadata__": {"format": "pt"}, "a": tensor("F32", [2, 2], 0, 16),
                          "b": tensor("BF16", [4], 16, 24)},
            "checked-parts": {"__metadata__": {"crc32/a": crc, "x": "\u00e9"}, "a": tensor("I32", [4], 0, 16),
                              "b": tensor("U8", [2, 1, 4], 16, 24), "c": tensor("F16", [0], 24, 24)}}.items():
        put("safetensors", name, json.dumps(header, separators=(",", ":")), data)
    put("safetensors", "none", file({}))
    put("safetensors", "hole", file({"a": tensor("U8", [1], 0, 1), "b": tensor("U8", [1], 2, 3)}, b"abc"))
    put("safetensors", "overlap", file({"a": tensor("U8", [2], 0, 2), "b": tensor("U8", [2], 1, 3)}, b"abc"))
    put("safetensors", "tail", file({"a": tensor("U8", [2], 0, 2)}, b"abc"))
    put("safetensors", "cut", file({"a": tensor("U8", [4], 0, 4)}, b"abc"))
    put("safetensors", "product", file({"a": tensor("F32", [1 << 62, 4], 0, 4)}, b"abcd"))
    put("safetensors", "negative", file({"a": tensor("U8", [-1], 4, 3)}, b"abcd"))
    put("safetensors", "twice", file('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                                     '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a"))
    put("safetensors", "deep", file('{"a":' + "[" * 80 + "]" * 80 + "}"))
    put("safetensors", "long-header", struct.pack("<Q", 1 << 63) + b"{}")


TEXT = "Hello  world,\n it's 2024: \u65e5\u672c \U0001f600 caf\u00e9 ab abab aq<|endoftext|>x\t "
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
END = {"id": 300, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
       "normalized": False, "special": True}

NANOCHAT = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|"
            r"\s+")


def tokenizers():
    alphabet = {"%ALPHABET%": 0}

    def file(merges=(), more=(), added=(END,), pre=None, **rest):
        vocab = dict(alphabet, ab=256, abab=257, **dict(more))
        root = {"version": "1.0", "added_tokens": list(added), **rest.pop("root", {}),
                "pre_tokenizer": pre or {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
                "decoder": {"type": "ByteLevel"},
                "model": {"type": "BPE", "vocab": vocab, "merges": list(merges), **rest}}
        return json.dumps(root, ensure_ascii=False, separators=(",", ":")).replace('"%ALPHABET%":0', "%ALPHABET%")

    def split(pattern, behavior="Isolated", invert=False):
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        one = {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}
        return {"type": "Sequence", "pretokenizers": [one, byte_level]}

    text = TEXT.encode() + b"\xff\xe2\x82 \x00"
    put("tokenizer_json", "gpt2", file(["a b", "ab ab"]), text)
    put("tokenizer_json", "pairs", file([["a", "b"], ["ab", "ab"]], ignore_merges=True), text)
    put("tokenizer_json", "llama3", file(["a b"], pre=split({"Regex": LLAMA3})), text)
    put("tokenizer_json", "nanochat", file(["a b"], pre=split({"Regex": NANOCHAT}), byte_fallback=True, added=[
        {"id": 258 + i, "content": name, "special": True} for i, name in enumerate(("<|bos|>", "<|user_start|>"))]), text)
    for name, pattern in (("fold-ss", "(?i:ss)"), ("fold-class", "(?i:[\u00c0-\u00ff]|\\x{fb01})"), ("empty-match", "a*|(?=b)"),
                          ("fold-group", "(?i)s(?:a|(i)b{2}[^k])+\\p{N}|[a-]")):
        put("tokenizer_json", name, file(["a b"], pre=split({"Regex": pattern})), text)
    put("tokenizer_json", "string", file(["a b"], pre=split({"String": " "}, "MergedWithNext")), text)
    put("tokenizer_json", "removed", file(["a b"], pre=split({"Regex": r"\s+"}, "Removed")), text)
    put("tokenizer_json", "contiguous", file(["a b"], pre=split({"Regex": r"[a-c]|\d"}, "Contiguous", True)), text)
    put("tokenizer_json", "previous", file(["a b"], pre=split({"Regex": r"(?<=a)b|\u00e9{1,2}"}, "MergedWithPrevious")),
        text)
    put("tokenizer_json", "prefix", file(["a b"], pre={"type": "ByteLevel"}), text)
    digits = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                    {"type": "ByteLevel", "add_prefix_space": False}]}
    put("tokenizer_json", "digits", file(["a b"], pre=digits), text)
    put("tokenizer_json", "nfc", file(["a b"], root={"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "NFD"}, {"type": "NFKC"}]}}), TEXT.encode() + "e\u0301\ufb01".encode())
    word = {"id": 301, "content": "caf\u00e9", "single_word": True, "lstrip": True, "rstrip": True, "normalized": True}
    put("tokenizer_json", "added", file(["a b"], added=[END, word]), text)
    put("tokenizer_json", "no-eot", file(["a b"], added=[]), text)
    put("tokenizer_json", "known-added", file(["a b"], added=[END, {"id": 256, "content": "ab"}]), text)
    put("tokenizer_json", "no-alphabet", '{"model":{"type":"BPE","vocab":{"a":0},"merges":[]}}')
    put("tokenizer_json", "unigram", '{"model":{"type":"Unigram","vocab":[]}}')
    put("tokenizer_json", "merge-unknown", file(["a q"]), text)
    put("tokenizer_json", "far-id", file(["a b"], more={"q": (1 << 24) - 1}), text)
    put("tokenizer_json", "deep", '{"model":' + "[" * 80 + "]" * 80 + "}")

    pair = '{%ALPHABET%,"ab":256,"abab":257,"\u0120a":258,"<|endoftext|>":259}'
    put("tokenizer_pair", "gpt2", pair, "#version: 0.2\na b\nab ab\n\u0120 a\n", text)
    put("tokenizer_pair", "crlf", pair, "a b\r\nab ab\r\n", text)
    put("tokenizer_pair", "unknown", pair, "a q\n", text)
    put("tokenizer_pair", "three", pair, "a b c\n", text)
    put("tokenizer_pair", "no-utf8", pair, b"\xff \xfe\n", text)
    put("tokenizer_pair", "no-end", "{%ALPHABET%}", "", text)
    put("tokenizer_pair", "list", "[1,2]", "", text)


def configs():
    model = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8, "vocab_size": 256}
    nsa = {"l": 4, "d": 2, "l_sel": 8, "n_sel": 4, "w": 8}
    root = {"model": model, "nsa": nsa, "data": {"kind": "synthetic"},
            "train": {"steps": 5, "seq_len": 32, "micro_batch_size": 2}, "log": {"out_dir": "runs/x"}}

    def text(**groups):
        return json.dumps({k: {**root.get(k, {}), **groups.get(k, {})} for k in {**root, **groups}}, indent=1)

    put("config", "small", "// small\n" + text())
    put("config", "dense", text(model={"attention": "dense", "mlp": "swiglu"}))
    put("config", "every-group", text(
        nsa={"phi": "mlp", "gate": "sigmoid", "gate_temperature": 0.5, "init_blocks": 1, "local_blocks": 2,
             "uniform_gate": True, "stopgrad_gates": True},
        data={"kind": "text", "paths": "a*.txt", "val_paths": ["b", "c"], "tokenizer": "byte", "seed": -1},
        train={"lr": 1e-3, "min_lr_fraction": 0.1, "on_nonfinite": "skip", "seed": 9007199254740991},
        runtime={"device": "cpu", "precision": "bf16", "kernels": {"sel": "fused"}, "recompute": "0:1=block,1:2=mlp"},
        dist={"backend": "mpi", "bucket_mb": 0.5, "zero": 1}, log={"diagnostics": ["ledger", "buckets"]}))
    put("config", "sets", text(), 'train.lr=0.5\nruntime.kernels=general\nlog.diagnostics=["backward"]\ndata.tokenizer=x')
    put("config", "set-unknown", text(), "train.lrr=1")
    put("config", "set-no-group", text(), "lr=1")
    put("config", "set-no-utf8", text(), b"log.out_dir=\xff")
    put("config", "lacks", '{"model":{"dim":8}}')
    put("config", "uneven", text(model={"n_kv_groups": 3}))
    put("config", "ranges", text(runtime={"recompute": "0:3=mlp"}))
    put("config", "large", text(train={"steps": 1e300}))
    put("config", "larger", text(train={"steps": 18446744073709551615}))
    put("config", "large-dim", text(model={"dim": 1 << 40}))
    put("config", "list", "[1, 2]")
    put("config", "twice", '{"train":{"steps":1},"train":{"steps":2}}')
    put("config", "cut", text()[:99])
    put("config", "empty", "")
    put("config", "deep", '{"model":' + "[" * 80 + "]" * 80 + "}")


def handshakes():
    def hello(port, rank, world, has_secret, run_id, pad=b""):
        return (b"triadhi\n" + struct.pack("<HII?", port, rank, world, has_secret) + bytes(range(32))
                + struct.pack("<B", len(run_id)) + (run_id + pad).ljust(255, b"\0"))

    put("handshake", "hello", hello(29500, 1, 2, False, b"night"))
    put("handshake", "hello-secret", hello(65535, 1048575, 1048576, True, b"x" * 255))
    put("handshake", "hello-rank-0", hello(29500, 0, 2, False, b""))
    put("handshake", "hello-world", hello(29500, 1, 2**32 - 1, False, b""))
    put("handshake", "hello-padded", hello(29500, 1, 2, False, b"night", b"\0x"))
    put("handshake", "reply", b"triadre\n" + struct.pack("<BI", 1, 2) + bytes(32))
    put("handshake", "reply-unknown", b"triadre\n" + struct.pack("<BI", 200, 2) + bytes(32))
    put("handshake", "empty", b"")


def documents():
    def bounds(name, *values):
        put("documents", name, struct.pack(f"<{len(values)}i", *values))

    bounds("one", 0, 127)
    bounds("single-tokens", 0, 1, 2, 3)
    bounds("mixed", 0, 33, 64, 65, 127)
    bounds("two-rows", 0, 5, 8, 9, 16)
    bounds("blocks", *range(0, 65 * 8, 8))
    bounds("first", 1, 64)
    bounds("equal", 0, 8, 8, 64)
    bounds("descending", 0, 33, 32, 64)
    bounds("negative", 0, -8, 64)
    bounds("beyond", 0, 65, 64)
    bounds("largest", 0, 2**31 - 1)
    bounds("alone", 0)
    put("documents", "cut", struct.pack("<2i", 0, 64)[:7])
    put("documents", "empty", b"")


def huggingface():
    llama = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 256}
    index = {"metadata": {"total_size": 8}, "weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors",
                                                           "model.norm.weight": "model-00002-of-00002.safetensors"}}

    def seed(name, config, map_=index):
        put("huggingface", name, config if isinstance(config, str) else json.dumps(config), json.dumps(map_))

    def rope(name, key="rope_scaling", **values):
        seed(f"rope-{name}", llama | {key: values, "rope_theta": 500000.0})

    seed("llama", llama)
    seed("eos", llama | {"eos_token_id": [2, 3], "tie_word_embeddings": True, "head_dim": None, "rope_scaling": None})
    seed("eos-text", llama | {"eos_token_id": "</s>"})
    seed("mistral", llama | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "head_dim": 32})
    seed("window", llama | {"architectures": ["MistralForCausalLM"], "sliding_window": 128})
    seed("qwen2", llama | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 2})
    seed("qwen3", llama | {"architectures": None, "model_type": "qwen3", "layer_types": ["full_attention"] * 2})
    seed("smollm3", llama | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0], "no_rope_layer_interval": 4})
    seed("layer-types", llama | {"layer_types": ["full_attention", "sliding_attention"]})
    seed("other", llama | {"architectures": ["MixtralForCausalLM"]})
    seed("bias", llama | {"attention_bias": True})
    seed("act", llama | {"hidden_act": "gelu"})
    seed("uneven", llama | {"num_key_value_heads": 3})
    seed("large", llama | {"vocab_size": 2**63, "hidden_size": -1})
    rope("linear", type="linear", factor=4)
    rope("llama3", rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
         original_max_position_embeddings=128)
    rope("yarn", "rope_parameters", rope_type="yarn", factor=4.0, rope_theta=1e6, original_max_position_embeddings=64,
         attention_factor=1.1386294361119891, beta_fast=None)
    rope("mscale", rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0)
    rope("dynamic", rope_type="dynamic", factor=2.0)
    rope("nested", "rope_parameters", full_attention={"rope_type": "default"})
    seed("index-path", llama, {"weight_map": {"a": "../b"}})
    seed("index-number", llama, {"weight_map": {"a": 1}})
    seed("index-empty", llama, {"weight_map": {}})
    seed("cut", json.dumps(llama)[:60], [])


def records():
    def record(name, value):
        put("record", name, value if isinstance(value, str) else json.dumps(value))

    record("text", {"text": "Once \u00e9", "id": 7})
    record("pair", {"prompt": "2+2=", "completion": "4"})
    record("messages", {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U\nV"},
                                     {"role": "assistant", "content": "A"}, {"role": "assistant", "content": ""}]})
    record("both", {"prompt": "a", "completion": "b", "messages": []})
    record("half", {"prompt": "a"})
    record("number", {"text": 7})
    record("list", "[1]")
    record("role", {"messages": [{"role": "a\nb", "content": "x"}]})
    record("content", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]})
    record("twice", '{"text":"a","text":"b"}')
    record("deep", '{"messages":' + "[" * 80 + "]" * 80 + "}")
    record("cut", '{"text":"a')
    record("nan", '{"a":[NaN,{"b":-Infinity}],"text":"c","d":1e400}')
    record("nan-text", '{"text":NaN}')
    record("surrogate", '{"a":"\\ud800","text":"b"}')
    record("weight", {"messages": [{"role": "assistant", "content": "A", "weight": 0},
                                   {"role": "assistant", "content": "B", "train": True}]})
    record("tools", {"tools": [{"name": "f"}], "messages": [{"role": "user", "content": "x"}]})
    put("record", "no-utf8", b'{"text":"\xff"}')
    put("record", "empty", b"")


def chats():
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U \u00e9"}, {"role": "assistant", "content": "A"}]

    def chat(name, template, messages=turns, **more):
        put("chat", name, template + "\n%%\n" + json.dumps({"messages": messages, **more}))

    folder = pathlib.Path(__file__).resolve().parents[1] / "io/chat_templates"
    for path in sorted(folder.glob("*.jinja")):
        chat(path.stem, path.read_text())
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, None, True]}}}
    chat("tools", "{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}", tools=[tool])
    chat("generation", "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    chat("expressions", "{{ (1 + 2) * 3 // 2 ** 2 % 5 }}{{ 'a' ~ 1.5 }}{{ [1, 2][-1] }}{{ 'abc'[::-1] }}{{ {'a': (1,)} }}{{ 1 < 2 < 3 and not none }}")
    chat("filters", "{{ messages | map(attribute='role') | join(', ') | upper }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}")
    chat("strings", "{% set s = ' a,b ' %}{{ s.strip().split(',') }}{{ s.replace('a', 'b') }}{{ s | trim(' a') }}{{ s.find('b') }}")
    chat("loops", "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}")
    chat("doubles", "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}")
    chat("nests", "{% set n = namespace(s=[]) %}{% for i in range(9999) %}{% set n.s = [n.s] %}{% endfor %}{{ n.s }}")
    chat("recurses", "{% macro f(x) %}{{ f(x + 1) }}{% endmacro %}{{ f(0) }}")
    chat("deep", "{{ " + "(" * 999 + "1" + ")" * 999 + " }}")
    chat("blocks", "{% if 1 %}" * 300 + "{% endif %}" * 300)
    chat("raises", "{{ raise_exception('no \\x07 ' ~ messages[0].content) }}")
    chat("cut", "{% for m in messages %}{{ m.content ")
    put("chat", "empty", b"")


def contents():
    lines = b'{"text":"a"}\n{"text":"b"}\n'
    put("content", "lines", lines)
    put("content", "mark", b"\xef\xbb\xbf" + lines)
    put("content", "array", b"[" + lines.replace(b"\n", b",")[:-1] + b"]")
    put("content", "pretty", b'{\n  "text": "a"\n}\n')
    put("content", "cut", b'{"text":"a\n')
    put("content", "text", "[1] a footnote\n")
    put("content", "gzip", gzip.compress(lines, mtime=0))
    put("content", "utf16", "plain words".encode("utf-16-le"))
    put("content", "pointer", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    put("content", "binary", bytes(range(256)))
    put("content", "empty", b"")


def weight_index():
    def tensor(shape, begin, end):
        return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}

    def seed(name, map_, first, second):
        index = map_ if isinstance(map_, str) else json.dumps({"metadata": {"total_size": 32}, "weight_map": map_})
        put("weight_index", name, index, json.dumps(first), json.dumps(second))

    one, two = "moments-00001-of-00002.safetensors", "moments-00002-of-00002.safetensors"
    pair, single = {"a": tensor([2], 0, 8), "b": tensor([2], 8, 16)}, {"c": tensor([4], 0, 16)}
    seed("two", {"a": one, "b": one, "c": two}, pair, single)
    seed("one", {"c": two}, pair, single)
    seed("lacks", {"a": one, "b": one, "c": two, "d": two}, pair, single)
    seed("unnamed", {"a": one, "c": two}, pair, single)
    seed("twice", {"a": one, "b": one, "c": two}, pair, {"a": tensor([4], 0, 16)})
    seed("missing", {"a": one, "b": one, "c": "moments-00003-of-00003.safetensors"}, pair, single)
    seed("above", {"a": one, "b": one, "c": "../" + two}, pair, single)
    seed("itself", {"a": "moments.safetensors.index.json"}, pair, single)
    seed("short", {"a": one, "b": one, "c": two}, pair, {"c": tensor([5], 0, 20)})
    seed("checksum", {"a": one, "b": one, "c": two}, pair, {"__metadata__": {"crc32/c": "00000000"}, **single})
    seed("no-map", "{}", pair, single)


def manifest_files():
    def shard(name, **more):
        return {"file": name, "tokens": 3, "bytes": 1030, "crc32": "0123abcd", **more}

    def seed(name, manifest, files="[]"):
        put("manifest_file", name, manifest if isinstance(manifest, str) else json.dumps(manifest), files)

    def manifest(train, val=(), **more):
        return {"format": "llm.c u16", "tokenizer": "byte", "vocab_size": 256, "eot": 0,
                "train": {"documents": 2, "tokens": 3, "shards": train}, "val": {"shards": list(val)}, **more}

    one, two = shard("train_000000.bin"), shard("val_000000.bin", learned=2)
    seed("byte", manifest([one], [two]), json.dumps(["0123abcd 1030 train_000000.bin", "00000000 0 a b"]))
    seed("bpe", manifest([one], tokenizer="gpt2", eot_position="last",
                         tokenizer_files=[{"file": "tokenizer.json", "bytes": 3, "crc32": "01234567"}]))
    seed("above", manifest([shard("../train_000000.bin")]), json.dumps(["0123abcd -1 a"]))
    seed("absolute", manifest([shard("/train_000000.bin")]), json.dumps(["0123abcd 1"]))
    seed("twice", manifest([one], [one]), json.dumps([3]))
    seed("checksum", manifest([shard("a", crc32="-1234567")]), "{}")
    seed("tokens", manifest([shard("a", tokens=1e300)]), '["')
    seed("foreign", '{"name": "an app"}')


shards()
safetensors()
tokenizers()
configs()
handshakes()
documents()
huggingface()
records()
chats()
contents()
weight_index()
manifest_files()
