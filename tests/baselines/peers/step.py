#!/usr/bin/env python3
"""Times training steps of PyTorch on one GPU, at the sizes of one of Triad's configs.

    tests/baselines/peers/step.py configs/m7c_125m.json [--batch 16] [--length 2048] [--attention dense|flash_nsa]

The model has bf16 weights, a tied head and a vocabulary that is a multiple of 64, whatever the config says: both are in
PyTorch's favour. It is compiled by torch.compile; AdamW is the fused one; tokens are random. A step is forward,
backward, clipping by the norm and update. Prints one row of rows.jsonl.
"""
import argparse
import contextlib
import pathlib
import statistics
import sys

from measure import LEAST_RUNS, Clock, Missing, Rows, add_options, need_torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from cpu_quickstart import read_config

BACKENDS = {"cudnn": ("CUDNN_ATTENTION", "cuDNN attention"), "flash": ("FLASH_ATTENTION", "FlashAttention-2")}


def flash_nsa_attention(torch):
    """The attention class of decoder.Decoder that calls flash_nsa, with gates from the layer's input."""
    from attention import flash_nsa_core

    class FlashNsa(torch.nn.Module):
        def __init__(self, sizes):
            super().__init__()
            self.core = flash_nsa_core(torch, sizes.heads, sizes.groups, sizes.width)
            self.gate = torch.nn.Linear(sizes.dim, 3 * sizes.heads, bias=False)

        def forward(self, h, q, k, v):
            gates = self.gate(h).unflatten(-1, (-1, 3))
            return self.attend(*(x.contiguous() for x in (q, k, v, gates)))

        @torch.compiler.disable
        def attend(self, q, k, v, gates):
            batch, length = q.shape[:2]
            bounds = torch.arange(0, batch * length + 1, length, device=q.device, dtype=torch.int32)
            return self.core(*(x.flatten(0, 1) for x in (q, k, v, gates)), bounds).unflatten(0, (batch, length))
    return FlashNsa


def kernel_choice(args):
    """The context in which a step runs: it restricts scaled_dot_product_attention to one kernel."""
    if args.device == "cpu" or args.attention != "dense":
        return contextlib.nullcontext
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return lambda: sdpa_kernel([getattr(SDPBackend, BACKENDS[args.backend][0])])


def measure(torch, args, config, batch, length):
    import decoder
    torch.manual_seed(0)
    sizes = decoder.Sizes.of_config(config["model"], tied=True, vocab=-(-config["model"]["vocab_size"] // 64) * 64)
    kind = decoder.Dense if args.attention == "dense" else flash_nsa_attention(torch)
    model = decoder.Decoder(sizes, length, kind).to(args.device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model) if args.compile else model
    tokens, targets = torch.randint(sizes.vocab, (2, batch, length), device=args.device)
    choice, losses = kernel_choice(args), []

    def step():
        with choice():
            losses.append(decoder.training_step(compiled, optimizer, tokens, targets).detach())
    clock, rows = Clock(torch, args.device, args.seconds), Rows(torch, args.device)
    for _ in range(args.warm_up):
        one = clock.host_ms(step)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # A step is far longer than what L2 could change, so it is not flushed.
    times = clock.times_ms(step, max(LEAST_RUNS, int(1000 * args.seconds / one)), flushes=False)
    median = statistics.median(times)
    figures = {"ms": round(median, 3), "runs": len(times), "fastest_ms": round(min(times), 3),
               "slowest_ms": round(max(times), 3), "tokens_per_s": round(1000 * batch * length / median),
               "parameters": decoder.count(model), "loss": round(losses[-1].item(), 3)}
    if args.device == "cuda":
        figures["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    dense = args.attention == "dense"
    said = [rows.torch, "tied head", "torch.compile" if args.compile else "eager", "fused AdamW",
            BACKENDS[args.backend][1] if dense else "flash_nsa"]
    rows.add(rows.torch if dense else f"{rows.torch}, flash_nsa", "step",
             f"{pathlib.Path(args.config).stem} {batch}x{length} {'dense' if dense else 'nsa'}", "step", figures,
             version=", ".join(said))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a config of Triad, for the sizes of the model and of a step")
    parser.add_argument("--batch", type=int, help="sequences a step (the config's train.micro_batch_size)")
    parser.add_argument("--length", type=int, help="tokens a sequence (the config's train.seq_len)")
    parser.add_argument("--attention", choices=("dense", "flash_nsa"), default="dense")
    parser.add_argument("--backend", choices=BACKENDS, default="cudnn", help="the kernel of dense attention (cudnn)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="run without torch.compile")
    parser.add_argument("--warm-up", type=int, default=5, help="steps that are not timed (5)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the script out")
    add_options(parser, seconds=5)
    args = parser.parse_args()
    if args.warm_up < 1:
        parser.error(f"--warm-up {args.warm_up}: at least 1, since the first step compiles")
    try:
        config = read_config(args.config)
        batch = args.batch or config["train"]["micro_batch_size"]
        length = args.length or config["train"]["seq_len"]
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{args.config}: {type(error).__name__}: {error}")
    if args.dry_run:
        print(f"PyTorch, {args.attention}: step of {pathlib.Path(args.config).stem} {batch}x{length}")
        return
    torch = need_torch(args.device)
    try:
        measure(torch, args, config, batch, length)
    except Missing as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
