#!/usr/bin/env python3
"""Fine-tunes a tiny chat model that transformers has made, and talks to it.

  test_huggingface_chat.py TRIAD     TRIAD: the program

A random Llama with a chat template is imported, trained on conversations, and exported. The greedy answers of `triad chat`, over
several turns, are those of transformers' generate() on apply_chat_template's tokens. Skipped where torch or transformers is missing."""
import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    import transformers
except ImportError as missing:
    print(f"SKIPPED: {missing}")
    sys.exit(4)  # kSkippedCode of tests/support/skip.h

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "io"))
from test_chat_templates import HERE, make_tokenizer  # noqa: E402


def run(triad, *args, text=None):
    done = subprocess.run([triad, *map(str, args)], capture_output=True, text=True, input=text)
    assert done.returncode == 0, f"triad {' '.join(map(str, args))}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def main(triad):
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tokenizer = make_tokenizer(folder / "hf", (HERE / "thoughts.jinja").read_text(), 2)
        stop = tokenizer.convert_tokens_to_ids("<|stop|>")
        config = transformers.LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                          num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
                                          bos_token_id=None, eos_token_id=None, pad_token_id=None)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        model.save_pretrained(folder / "hf")
        chats = [[{"role": "user", "content": f"what is {i}"}, {"role": "assistant", "content": f"{i} is {'even' if i % 2 == 0 else 'odd'}"},
                  {"role": "user", "content": "why"}, {"role": "assistant", "content": "because"}] for i in range(40)]
        (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
        run(triad, "import", folder / "hf", "--out", folder / "base")
        run(triad, "train", folder / "base/config.json", "--set", "train.steps=120", "--set", "train.seq_len=256", "--set", "train.lr=3e-3",
            "--set", "data.kind=text", "--set", f"data.paths={folder}/chats.jsonl", "--set", "runtime.device=cpu", "--set", f"log.out_dir={folder}/run", "--set", "train.save_every=0")
        run(triad, "export", folder / "run", "--dtype", "f32", "--out", folder / "out")
        ours = transformers.AutoTokenizer.from_pretrained(folder / "out")
        trained = transformers.AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32, attn_implementation="eager").eval()
        assert ours.chat_template == tokenizer.chat_template
        eos = trained.generation_config.eos_token_id
        assert stop in (eos if isinstance(eos, list) else [eos]), eos
        questions, messages, answers = ["what is 7", "why", "what is 12"], [], []
        for question in questions:
            messages.append({"role": "user", "content": question})
            inputs = ours.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
            with torch.no_grad():
                out = trained.generate(**inputs, max_new_tokens=30, do_sample=False)[0, inputs["input_ids"].shape[1]:]
            out = [t for t in out.tolist() if t != stop]
            answers.append(ours.decode(out))
            messages.append({"role": "assistant", "content": answers[-1]})
        found = run(triad, "chat", folder / "run", "--temperature", "0", "--tokens", "30", text="\n".join(questions) + "\n")
        assert found == "".join(a + "\n" for a in answers), f"{answers}\n{found!r}"
        print("answers in both:", answers)
        assert "because" in answers[1], answers  # it has learned something


if __name__ == "__main__":
    main(sys.argv[1])
