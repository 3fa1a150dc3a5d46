#!/usr/bin/env python3
"""lm-evaluation-harness on a Triad checkpoint, through the program `triad`; no PyTorch model is loaded.

Takes the options of `lm_eval`, with --model triad:
  lm_eval_triad.py --model triad --model_args checkpoint=runs/mine,program=build/cpu/triad --device cpu --tasks piqa
"""
import json
import subprocess

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model


@register_model("triad")
class TriadLM(LM):
    def __init__(self, checkpoint, program="triad", dtype="f32", seq=0, batch_size=None, device=None, **kwargs):
        """seq: longest window in tokens; 0: the training length. lm_eval sets batch_size, by default to 1, and device.
        Triad chooses the batches unless batch_size is larger; the results do not depend on them."""
        super().__init__()
        self.program, self.seq = program, int(seq)
        several = str(batch_size).isdigit() and int(batch_size) > 1
        self.batch = ["--batch", str(batch_size)] if several else []
        device = "cuda" if str(device).startswith("cuda") else device or "auto"
        self.options = ["--checkpoint", checkpoint, "--device", device, "--dtype", dtype]

    def run(self, verb, *options, text=None):
        command = [self.program, verb, *self.options, *options]
        result = subprocess.run(command, input=text, stdout=subprocess.PIPE, encoding="utf-8")
        # Not splitlines(), which also splits at U+0085, U+2028 and U+2029, as strings of JSON may hold them.
        lines = [json.loads(line) for line in result.stdout.split("\n") if line]
        for line in lines:
            if "error" in line:
                raise ValueError(f"triad {verb}: {line['error']}")
        result.check_returncode()
        return lines

    def score(self, pairs):
        """Returns (log-probability, is greedy) of each (context, continuation)."""
        lines = [json.dumps({"context": a, "continuation": b}) for a, b in pairs if b]
        options = ["--jsonl", "-", "--seq", str(self.seq), *self.batch]
        scored = iter(self.run("score", *options, text="\n".join(lines) + "\n") if lines else [])
        results = ((next(scored) if b else {"logprob": 0.0, "greedy": True}) for _, b in pairs)
        return [(result["logprob"], result["greedy"]) for result in results]

    def loglikelihood(self, requests):
        return self.score([request.args for request in requests])

    def loglikelihood_rolling(self, requests):
        return [logprob for logprob, _ in self.score([("", request.args[0]) for request in requests])]

    def generate_until(self, requests):
        lines = [json.dumps(self.prompt(*request.args)) for request in requests]
        if not lines:
            return []
        options = ["--prompts", "-", "--format", "jsonl", *self.batch]
        return [line["text"] for line in self.run("generate", *options, text="\n".join(lines) + "\n")]

    @staticmethod
    def prompt(context, options):
        until = options.get("until") or []
        sampled = options.get("do_sample", True)
        # With a seed a prompt's random numbers don't depend on its place among the requests.
        return {"prompt": context, "truncate": True, "seed": 1337, "max_tokens": options.get("max_gen_toks", 256),
                "stop": [stop for stop in ([until] if isinstance(until, str) else until) if stop],
                "temperature": options.get("temperature", 0.0) if sampled else 0.0, "top_p": options.get("top_p", 1)}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
