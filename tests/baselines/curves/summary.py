#!/usr/bin/env python3
"""Prints the runs of run.sh as a table: summary.py OUT T ... [--keep FOLDER]  (T, or T_from_F)

--keep copies the runs' val.csv and training.csv to FOLDER/<run>_val.csv and FOLDER/<run>_training.csv.
"""
import csv, json, pathlib, shutil, sys


def rows(path):
    return list(csv.DictReader(path.open())) if path.exists() else []


def share(values, part):
    values = sorted(values)
    return values[int(part * (len(values) - 1))] if values else float("nan")


def summary(run):
    beats = []
    for line in (run / "heartbeat_rank0.jsonl").open():
        beat = json.loads(line)
        if beat["msg"] == "step_end":
            beats.append(beat)
    later = beats[min(10, len(beats) // 2):]  # without the first steps, in which the device warms up and the first batch is loaded
    fetch = [b["fetch_ms"] for b in later]
    steps_ms = [b["step_ms"] for b in later]
    power = [b["power_w"] for b in later if b["power_w"] is not None]
    val = rows(run / "val.csv")
    return {
        "steps": len(beats),
        "train_loss_last_200": sum(b["loss"] for b in beats[-200:]) / max(1, len(beats[-200:])),
        "val": {int(r["step"]): float(r["val_loss"]) for r in val},
        "step_ms_median": share(steps_ms, 0.5),
        "step_ms_p95": share(steps_ms, 0.95),
        "fetch_p50_us": share(fetch, 0.5) * 1e3,
        "fetch_p95_us": share(fetch, 0.95) * 1e3,
        "fetch_max_ms": max(fetch, default=0),
        "fetch_percent": 100 * sum(fetch) / max(1e-9, sum(steps_ms)),
        "fallbacks": beats[-1]["fb_total"] if beats else -1,
        "nonfinite": sum(b.get("grads_not_finite", 0) for b in beats),
        "power_w": share(power, 0.5),
        "peak_mib": max((b.get("gpu_mem_reserved_mib", 0) for b in beats), default=0),
    }


def main():
    arguments = sys.argv[1:]
    keep = None
    if "--keep" in arguments:
        at = arguments.index("--keep")
        keep = pathlib.Path(arguments[at + 1])
        del arguments[at:at + 2]
    out, lengths = pathlib.Path(arguments[0]), arguments[1:]
    print(f"{'run':<21} {'steps':>5} {'val loss':>9} {'train':>7} {'ms/step':>8} {'p95':>7} {'fetch p50':>10} {'p95':>9} "
          f"{'max':>8} {'share':>8} {'fallbacks':>9} {'MiB':>7} {'W':>5}")
    for t in lengths:
        found = {}
        for attention in ("nsa", "dense"):
            run = out / f"{attention}_{t}"
            if not (run / "heartbeat_rank0.jsonl").exists():
                print(f"{run.name:<21} did not run")
                continue
            s = found[attention] = summary(run)
            last = list(s["val"].values())[-1:] or [float("nan")]
            print(f"{run.name:<21} {s['steps']:>5} {last[0]:>9.5f} {s['train_loss_last_200']:>7.4f} {s['step_ms_median']:>8.2f} "
                  f"{s['step_ms_p95']:>7.2f} {s['fetch_p50_us']:>7.1f} us {s['fetch_p95_us']:>6.1f} us {s['fetch_max_ms']:>5.2f} ms "
                  f"{s['fetch_percent']:>7.4f}% {s['fallbacks']:>9} {s['peak_mib']:>7.0f} {s['power_w']:>5.0f}")
            if keep:
                for name in ("val.csv", "training.csv"):
                    shutil.copyfile(run / name, keep / f"{run.name}_{name}")
        if len(found) == 2:
            a, b = found["nsa"]["val"], found["dense"]["val"]
            print(f"T={t}: NSA - dense at step " + ", ".join(f"{step}: {a[step] - b[step]:+.4f}" for step in a if step in b))


main()
