#!/usr/bin/env python3
"""Measures what one GPU reaches in PyTorch: copies, matrix products, and dense attention.

    tests/baselines/peers/ceilings.py             medians of single calls, with a flushed L2 cache
    tests/baselines/peers/ceilings.py --energy    sustained rates, power and energy, fp8 products included

--energy repeats each call for some seconds under the card's own power limit (no setting is changed), and tells what a
FLOP or a byte costs in joules: at the limit, energy decides how long a training step takes. Prints rows of rows.jsonl.
"""
import argparse
import sys

from measure import Clock, Failures, Missing, PowerMeter, Rows, add_options, need_torch

# Products y = a b^T as rows x terms x columns: a large one, and linear layers of M7C, Llama 1B and Llama 8B.
PRODUCTS = [(8192, 8192, 8192), (32768, 768, 768), (32768, 768, 3072), (32768, 3072, 768), (32768, 2048, 16384),
            (32768, 8192, 2048), (16384, 32768, 2048), (16384, 4096, 28672)]
COPY_BYTES = 1 << 30
DENSE = (4, 8192, 32, 8, 64)  # BxTxHqxHkvxd


class Call:
    """One measurement. `make` allocates the tensors and returns the function to call; it does `work` units."""

    def __init__(self, op, case, way, work, unit, make, dtype="bf16"):
        self.op, self.case, self.way, self.work, self.unit, self.make = op, case, way, work, unit, make
        self.dtype = dtype

    def __str__(self):
        return f"{self.op} {self.case} {self.way}, {self.dtype}"


def product(rows, terms, columns):
    def make(torch):
        a, b = normal(torch, rows, terms), normal(torch, columns, terms)
        return lambda: a @ b.t()
    return Call("matmul", f"{rows}x{terms}x{columns}", "forward", 2 * rows * terms * columns, "flop", make)


def fp8_product(rows, terms, columns, scales, fast=True):
    """scales: one a tensor, or one a row. fast: sums in the tensor cores' own precision."""

    def make(torch):
        a, b = (normal(torch, n, terms).to(torch.float8_e4m3fn) for n in (rows, columns))
        shapes = {"tensor": ((), ()), "row": ((rows, 1), (1, columns))}[scales]
        scale_a, scale_b = (torch.ones(shape, device="cuda") for shape in shapes)
        return lambda: torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16,
                                        use_fast_accum=fast)
    case = f"{rows}x{terms}x{columns}, a scale a {scales}" + ("" if fast else ", fp32 sums")
    return Call("matmul", case, "forward", 2 * rows * terms * columns, "flop", make, dtype="fp8")


def copy():
    def make(torch):
        source = normal(torch, COPY_BYTES // 2)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    return Call("copy", "1 GiB", "forward", 2 * COPY_BYTES, "byte", make)


def dense(way):
    """cuDNN's causal attention, whose backward has five products where forward has two."""
    sequences, tokens, heads, groups, width = DENSE
    flops = 4 * sequences * heads * width * tokens * (tokens + 1) // 2

    def make(torch):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        q, k, v = (normal(torch, sequences, h, tokens, width).requires_grad_(way == "backward")
                   for h in (heads, groups, groups))

        def forward():
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if way == "forward":
            return forward
        out = forward()
        dout = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    work = flops if way == "forward" else 5 * flops // 2
    return Call("dense", f"{'x'.join(map(str, DENSE))} randn", way, work, "flop", make)


def normal(torch, *shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def calls(energy):
    found = [copy(), *(product(*sizes) for sizes in PRODUCTS), dense("forward"), dense("backward")]
    if energy:
        for sizes in PRODUCTS[2:]:
            found += [fp8_product(*sizes, "tensor"), fp8_product(*sizes, "tensor", fast=False),
                      fp8_product(*sizes, "row")]
    return found


def rates(call, ms):
    per_second = 1000 * call.work / ms
    return {"tflop_per_s": per_second / 1e12} if call.unit == "flop" else {"gb_per_s": per_second / 1e9}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--energy", action="store_true", help="sustained rates and energy; 4 s a call by default")
    add_options(parser, seconds=0.2)
    parser.set_defaults(seconds=None)
    args = parser.parse_args()
    seconds = args.seconds or (4 if args.energy else 0.2)
    if args.dry_run:
        print("\n".join(map(str, calls(args.energy))))
        return
    torch = need_torch()
    torch.manual_seed(0)
    rows, failures, clock, meter = Rows(torch), Failures(), None, None
    try:
        if args.energy:
            meter = PowerMeter(torch)
        else:
            clock = Clock(torch, seconds=seconds)
    except Missing as error:
        sys.exit(str(error))
    for call in calls(args.energy):
        try:
            function = call.make(torch)
            if args.energy:
                ms, power = meter.sustained(torch, function, seconds, warm_up=1.5)
                figures = {"power": power, f"pj_per_{call.unit}": 1e12 * power["joules"] / call.work}
            else:
                ms, figures = clock.median_ms(function), {}
        except Exception as error:  # a kind of product that this card or this PyTorch lacks
            failures.add(str(call), error)
            continue
        finally:
            function = None
            torch.cuda.empty_cache()
        program = "cuDNN" if call.op == "dense" else rows.torch
        case = call.case + (", sustained" if args.energy else "")
        rows.add(program, call.op, case, call.way, {"ms": ms, **rates(call, ms), **figures}, dtype=call.dtype)
    failures.leave()


if __name__ == "__main__":
    main()
