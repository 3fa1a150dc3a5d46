#!/usr/bin/env python3
"""Compares training speed on the CPU: Triad (NSA and dense) and PyTorch eager, at the shape of a config.

    tests/baselines/cpu_quickstart.py [--triad build/cpu/triad] [--config configs/quickstart.json] [--threads N]

The PyTorch model (peers/decoder.py) has the config's dimensions: RMSNorm, rotary embedding, grouped causal attention
(scaled_dot_product_attention), the same MLP, gradient clipping and fused AdamW, in fp32. The three programs run
alternately, one process each, for several rounds; a row is the median over all steps except the first WARM_UP of each
process. There is one run at the config's length and one at T = 512, with the same number of tokens a step.
The script needs torch; if this interpreter lacks it, a virtual environment is made and torch installed there.
"""
import argparse
import csv
import json
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time

WARM_UP = 3  # steps of each process that are not measured
ROOT = pathlib.Path(__file__).resolve().parents[2]


def read_config(path):
    """Parses a config file: JSON with // comments on separate lines."""
    return json.loads(re.sub(r"^\s*//.*$", "", pathlib.Path(path).read_text(), flags=re.M))


def usable_threads():
    """The number of physical cores that this process may use."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return len(cores)


def train_pytorch(config, batch, length, steps, threads):
    """Trains on random tokens; returns wall and CPU seconds of each step."""
    import torch
    from peers import decoder

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    t, sizes = config["train"], decoder.Sizes.of_config(config["model"])
    model = decoder.Decoder(sizes, length, decoder.DenseOnCpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=t["lr"], betas=(0.9, 0.95),
                                  weight_decay=t.get("weight_decay", 0.1), fused=True)
    walls, cpus = [], []
    for _ in range(steps):
        tokens = torch.randint(0, sizes.vocab, (batch, length + 1))
        begin, cpu = time.perf_counter(), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        decoder.training_step(model, optimizer, tokens[:, :-1], tokens[:, 1:]).item()
        walls.append(time.perf_counter() - begin)
        cpus.append(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - cpu)
    return {"version": torch.__version__, "parameters": decoder.count(model), "wall": walls, "cpu": cpus}


def run_pytorch(args, batch, length):
    words = [args.python, __file__, "--only-pytorch", json.dumps([batch, length]), "--config", args.config, "--steps",
             str(args.steps), "--threads", str(args.threads)]
    run = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    args.pytorch_version = run["version"]
    return run["wall"][WARM_UP:], statistics.mean(run["cpu"][WARM_UP:])


def run_triad(args, attention, batch, length):
    """Returns the steps' wall seconds, from training.csv, and the CPU seconds a step: a long run minus a short one."""

    def train(steps):
        with tempfile.TemporaryDirectory() as folder:
            sets = [f"model.attention={attention}", f"train.micro_batch_size={batch}", f"train.seq_len={length}",
                    f"train.steps={steps}", f"log.out_dir={folder}/run", "data.kind=synthetic", "data.paths=[]",
                    "data.val_fraction=0", "train.eval_every=0", "train.save_every=0", "log.every=1",
                    "runtime.device=cpu", "runtime.precision=fp32"]
            words = [args.triad, "train", args.config] + [word for s in sets for word in ("--set", s)]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            result = subprocess.run(words, capture_output=True, text=True,
                                    env={**os.environ, "OMP_NUM_THREADS": str(args.threads)})
            if result.returncode != 0:
                sys.exit(f"triad failed:\n{result.stdout}{result.stderr}")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            with open(f"{folder}/run/training.csv") as rows:
                walls = [float(row["step_ms"]) / 1000 for row in csv.DictReader(rows)]
            return walls, sum(after[:2]) - sum(before[:2])

    _, short = train(WARM_UP)
    walls, long = train(args.steps)
    return walls[WARM_UP:], (long - short) / (args.steps - WARM_UP)


def measure(args, batch, length):
    programs = {"Triad, NSA": lambda: run_triad(args, "nsa", batch, length),
                "Triad, dense": lambda: run_triad(args, "dense", batch, length),
                "PyTorch, dense": lambda: run_pytorch(args, batch, length)}
    walls, cpus = {name: [] for name in programs}, {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, run in programs.items():
            wall, cpu = run()
            walls[name] += wall
            cpus[name].append(cpu)
    tokens = batch * length
    rows = []
    for name in programs:
        wall, cpu = statistics.median(walls[name]), statistics.median(cpus[name])
        rows.append({"program": name, "batch": batch, "T": length, "tokens_per_s": tokens / wall,
                     "step_ms": wall * 1000, "cpu_ms_per_step": cpu * 1000})
    torch, dense = rows[2], rows[1]
    for row in rows:
        row["of_pytorch"] = row["tokens_per_s"] / torch["tokens_per_s"]
        row["of_pytorch_by_cpu_time"] = torch["cpu_ms_per_step"] / row["cpu_ms_per_step"]
        row["of_dense"] = row["tokens_per_s"] / dense["tokens_per_s"]
        row["of_dense_by_cpu_time"] = dense["cpu_ms_per_step"] / row["cpu_ms_per_step"]
    return rows


def python_with_torch():
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0:
        return sys.executable
    folder = pathlib.Path(tempfile.gettempdir()) / "triad_pytorch_venv"
    python = folder / "bin/python"
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode != 0 if python.exists() else True:
        print(f"installing torch in {folder} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "torch", "numpy"], check=True)
    return str(python)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--triad", default=str(ROOT / "build/cpu/triad"))
    parser.add_argument("--config", default=str(ROOT / "configs/quickstart.json"))
    parser.add_argument("--python", help="a Python interpreter that has torch")
    parser.add_argument("--threads", type=int, default=usable_threads(), help="of each program")
    parser.add_argument("--steps", type=int, default=15, help="of each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="append the rows to this file, one a line")
    parser.add_argument("--only-pytorch", help=argparse.SUPPRESS)
    args = parser.parse_args()
    config = read_config(args.config)
    if args.only_pytorch:
        batch, length = json.loads(args.only_pytorch)
        print(json.dumps(train_pytorch(config, batch, length, args.steps, args.threads)))
        return
    args.python = args.python or python_with_torch()
    batch, length = config["train"]["micro_batch_size"], config["train"]["seq_len"]
    shapes = [(batch, length)] + ([] if length == 512 else [(max(1, batch * length // 512), 512)])
    rows = [row for shape in shapes for row in measure(args, *shape)]
    print(f"PyTorch {args.pytorch_version}, {args.threads} threads, load {os.getloadavg()[0]:.1f}")
    print(f"{'':16}{'B x T':>10}{'tokens/s':>10}{'ms/step':>9}{'CPU ms/step':>13}{'of PyTorch':>12}{'(CPU time)':>11}"
          f"{'of dense':>10}{'(CPU time)':>11}")
    for r in rows:
        print(f"{r['program']:16}{r['batch']:>4} x {r['T']:<4}{r['tokens_per_s']:>9.0f}{r['step_ms']:>9.1f}"
              f"{r['cpu_ms_per_step']:>13.1f}{r['of_pytorch']:>12.2f}{r['of_pytorch_by_cpu_time']:>11.2f}"
              f"{r['of_dense']:>10.2f}{r['of_dense_by_cpu_time']:>11.2f}")
    if args.json:
        with open(args.json, "a") as file:
            for row in rows:
                print(json.dumps({**row, "threads": args.threads, "pytorch": args.pytorch_version}), file=file)


if __name__ == "__main__":
    main()
