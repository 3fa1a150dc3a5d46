#!/usr/bin/env python3
"""Runs on two hosts, which are network namespaces of this machine (hosts.py), and runs of many processes.

test_hosts.py BUILD [--all] [--only WORD] [--processes N] [--list]

BUILD is a folder that has triad. Without --all only what CI has time for; --only: tests with this word in their name."""
import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import hosts
from hosts import LOCAL, SHARED, Hosts, wait_until

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
TINY = f"{ROOT}/configs/tiny.json"
A, B = "node1", "node2"
TESTS = []  # (function, whether CI has time for it)
LONG = "train.steps=100000 train.allow_unsafe=true train.save_every=4 "


def test(function, in_ci=True):
    TESTS.append((function, in_ci))
    return function


def slow(function):
    return test(function, in_ci=False)


class LeftOut(Exception):
    """A test that this machine cannot run."""


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def command(out, sets="", more="", program=None):
    keys = f"runtime.device=cpu log.out_dir={out} dist.timeout_s=20 {sets}".split()
    return f"exec timeout -s KILL 100 {program or PROGRAM} train {TINY} {' '.join('--set ' + key for key in keys)} {more}"


def torchrun(rank, world=2, local=1, port=29500, master=A, **more):
    """What torchrun gives to its processes."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank % local), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local),
            "MASTER_ADDR": master, "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "night", "TRIAD_SECRET": "a long text", **more}


def srun(rank, nodelist="node[1-2]", **more):
    return {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": nodelist, "SLURM_STEP_NUM_NODES": "2", "TRIAD_SECRET": "a long text", **more}


class Ranks:
    """The processes of a run, one a host, and what they print."""

    def __init__(self, lab, commands, environments, names=(A, B), tag=""):
        self.logs = [f"{SHARED}/log{tag}_{r}" for r in range(len(commands))]
        self.processes = [lab.start(names[r], commands[r], environments[r], self.logs[r]) for r in range(len(commands))]

    def text(self, rank):
        with open(self.logs[rank], errors="replace") as file:
            return file.read()

    def all_text(self):
        return "".join(f"--- rank {r}\n{self.text(r)}" for r in range(len(self.logs)))

    def wait(self, *codes, limit_s=60):
        """Waits for all; their exit codes have to be these, None: any but 0."""
        end = time.monotonic() + limit_s
        for r, code in enumerate(codes):
            try:
                found = self.processes[r].wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {r} still runs after {limit_s} s\n{self.all_text()}") from None
            check(found == code or (code is None and found != 0), f"rank {r} ended with {found}, not {code}\n{self.all_text()}")

    def says(self, rank, *words):
        for word in words:
            check(word in self.text(rank), f"rank {rank} does not say {word!r}\n{self.all_text()}")


def two(lab, out, sets="", more="", environment=torchrun, tag="", **variables):
    return Ranks(lab, [command(out, sets, more)] * 2, [environment(r, **variables) for r in (0, 1)], tag=tag)


def weights(out):
    """The values in the run's final weights, without the header, which names the run."""
    with open(f"{out}/model.safetensors", "rb") as file:
        header = int.from_bytes(file.read(8), "little")
        file.seek(8 + header)
        return file.read()


def reference(steps=20):
    """The weights of a run of two ranks on one host."""
    out = f"/mnt/reference_{steps}"
    if not os.path.exists(f"{out}/model.safetensors"):
        shutil.rmtree(out, ignore_errors=True)
        ranks = [subprocess.Popen(["sh", "-c", command(out, f"train.steps={steps}")], stdout=subprocess.DEVNULL,
                                  env={**hosts.LOGIN, **torchrun(r, local=2, master="127.0.0.1")})
                 for r in (0, 1)]
        check([p.wait() for p in ranks] == [0, 0], "the run on one host failed")
    return weights(out)


def same_as_one_host(out, steps=20):
    check(weights(out) == reference(steps), f"{out}: other weights than on one host")


def rows(out):
    try:
        with open(f"{out}/training.csv") as file:
            return len(file.readlines()) - 1
    except OSError:
        return 0


def newest(out):
    try:
        return max((int(name[5:]) for name in os.listdir(f"{out}/checkpoints") if re.fullmatch(r"step_\d+", name)), default=-1)
    except OSError:
        return -1


# ---- starting ----

@test
def torchrun_trains_on_two_hosts_to_the_bits_of_one():
    with Hosts([A, B]) as lab:
        ranks = two(lab, f"{SHARED}/run")
        ranks.wait(0, 0)
        ranks.says(0, "2 ranks on 2 hosts, host memory over TCP")
        same_as_one_host(f"{SHARED}/run")


@test
def srun_without_MPI_finds_rank_0_by_the_list_of_hosts():
    with Hosts([A, B]) as lab:
        two(lab, f"{SHARED}/run", environment=srun).wait(0, 0)
        same_as_one_host(f"{SHARED}/run")


@test
def mpirun_starts_both_hosts():
    if shutil.which("mpirun") is None or not os.path.exists(f"{os.path.dirname(PROGRAM)}/libtriad_mpi.so"):
        raise LeftOut("no MPI")
    with Hosts([A, B]) as lab:
        mpirun = (f"exec timeout -s KILL 100 mpirun --allow-run-as-root --mca plm_rsh_agent {SHARED}/agent -np 2 --host {A}:1,{B}:1 --bind-to none "
                  f"-x PATH -x OMP_NUM_THREADS=1 triad train {TINY} --set runtime.device=cpu --set log.out_dir={SHARED}/run")
        ranks = Ranks(lab, [mpirun], [{"PATH": f"{os.path.dirname(PROGRAM)}:{hosts.PATH}"}])
        ranks.wait(0)
        ranks.says(0, "2 ranks on 2 hosts, host memory over Open MPI")
        same_as_one_host(f"{SHARED}/run")


# ---- mistakes ----

@test
def a_folder_that_is_not_shared_is_named_with_its_host():
    with Hosts([A, B]) as lab:
        cases = [("true", f"host {B} has no such folder"), (f"mkdir -p {LOCAL}/runs/x", f"host {B} has another folder of that name")]
        for i, (before, words) in enumerate(cases):
            out = f"{LOCAL}/runs/x"
            lab.root(B, before)
            began = time.monotonic()
            ranks = two(lab, out, tag=str(i))
            ranks.wait(1, 1, limit_s=15)
            check(time.monotonic() - began < 15, "late")
            for r in (0, 1):
                ranks.says(r, f"log.out_dir {out} has to be the same folder on every host", f"on host {A}, but", words, f"rank {r} (host ")
            lab.root(A, f"test -z \"$(ls -A {out})\"")  # nothing is left in it


@test
def another_config_build_or_data_is_named_with_its_host():
    with Hosts([A, B]) as lab:
        env = [torchrun(0), torchrun(1)]
        ranks = Ranks(lab, [command(f"{SHARED}/a"), command(f"{SHARED}/a", "train.lr=0.5")], env)
        ranks.wait(2, 2)
        ranks.says(0, f"the config of rank 1 (host {B}) differs from rank 0's: train.lr")
        # Another build: the same program with another commit in it.
        with open(PROGRAM, "rb") as file:
            program = file.read()
        version = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout
        commit = re.search(r"\((\w{7,})", version).group(1).encode()
        check(commit in program, "the program does not hold its commit")
        other = f"{SHARED}/triad"
        with open(other, "wb") as file:
            file.write(program.replace(commit, commit[::-1] if commit != commit[::-1] else b"0" * len(commit)))
        os.chmod(other, 0o755)
        ranks = Ranks(lab, [command(f"{SHARED}/b"), command(f"{SHARED}/b", program=other)], env)
        ranks.wait(1, 1)
        ranks.says(0, "the program is triad", f"on rank 0 (host {A}), but", f"on rank 1 (host {B}): ranks of two builds")
        for name, letter in ((A, "x"), (B, "y")):
            lab.root(name, f"for i in 1 2 3 4; do printf '%0999d{letter}' $i; done > {LOCAL}/text.txt")
        keys = f"data.kind=text data.paths={LOCAL}/text.txt"
        ranks = two(lab, f"{SHARED}/c", keys)
        ranks.wait(1, 1)
        ranks.says(0, "the checksum of the tokens to train on is", f"on rank 1 (host {B}): do they see the same files?")
        lab.root(B, f"rm {LOCAL}/text.txt")
        ranks = two(lab, f"{SHARED}/d", keys)
        ranks.wait(1, 1)
        ranks.says(1, f"rank 1 (host {B}): ", f"{LOCAL}/text.txt")
        ranks.says(0, f"the connection to rank 1 (host {B}) is lost")


@test
def a_wrong_MASTER_ADDR_ends_in_time():
    with Hosts([A, B]) as lab:
        for i, (master, words) in enumerate([("10.77.0.99", "found no rank 0"), ("no-such-host", "found no rank 0")]):
            ranks = Ranks(lab, [command(f"{SHARED}/run", "dist.timeout_s=2")] * 2, [torchrun(r, master=master) for r in (0, 1)], tag=str(i))
            ranks.wait(1, 1, limit_s=30)
            ranks.says(0, f"MASTER_ADDR \"{master}\"", "1 of 2 ranks did not come")
            ranks.says(1, words, master)
            check(not os.path.exists(f"{SHARED}/run"), "a folder was made")


@test
def two_jobs_may_have_one_port():
    with Hosts([A, B]) as lab:
        jobs = [two(lab, f"{SHARED}/run{j}", tag=f"job{j}", TORCHELASTIC_RUN_ID=f"job{j}") for j in (0, 1)]
        for j, job in enumerate(jobs):
            job.wait(0, 0)
            same_as_one_host(f"{SHARED}/run{j}")


# ---- networks ----

@test
def a_link_that_flaps_or_is_slow_changes_no_bit():
    with Hosts([A, B], rate="100mbit") as lab:
        ranks = two(lab, f"{SHARED}/run", "train.steps=40")
        for _ in range(2):
            done = rows(f"{SHARED}/run")
            wait_until(lambda: rows(f"{SHARED}/run") > done or ranks.processes[0].poll() is not None, "a step")
            lab.link(B, "down")
            time.sleep(0.5)
            lab.link(B, "up")
        ranks.wait(0, 0, limit_s=90)
        same_as_one_host(f"{SHARED}/run", 40)


@test
def packets_that_are_lost_or_late_change_no_bit():
    with Hosts([A, B], delay_s=0.01, loss=0.01) as lab:
        two(lab, f"{SHARED}/run", "train.steps=10").wait(0, 0, limit_s=90)
        same_as_one_host(f"{SHARED}/run", 10)


@slow
def packets_of_which_one_percent_is_lost_after_100_ms_change_no_bit():
    with Hosts([A, B], delay_s=0.1, loss=0.01) as lab:
        two(lab, f"{SHARED}/run", "dist.timeout_s=120").wait(0, 0, limit_s=400)
        same_as_one_host(f"{SHARED}/run")


@slow
def mpirun_with_a_slow_and_lossy_link():
    if shutil.which("mpirun") is None:
        raise LeftOut("no MPI")
    with Hosts([A, B], delay_s=0.02, loss=0.01) as lab:
        mpirun = (f"exec timeout -s KILL 300 mpirun --allow-run-as-root --mca plm_rsh_agent {SHARED}/agent -np 2 --host {A}:1,{B}:1 --bind-to none "
                  f"{PROGRAM} train {TINY} --set runtime.device=cpu --set log.out_dir={SHARED}/run")
        Ranks(lab, [mpirun], [{}]).wait(0, limit_s=400)
        same_as_one_host(f"{SHARED}/run")


@test
def clocks_a_day_apart_do_not_matter():
    faketime = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"
    if not os.path.exists(faketime):
        raise LeftOut("faketime is not installed")
    with Hosts([A, B]) as lab:
        out = f"{SHARED}/run"
        late, early = ({"LD_PRELOAD": faketime, "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"} for shift in ("+1d", "-1d"))

        def train(steps, first, other):
            Ranks(lab, [command(out, f"train.steps={steps}", "--resume auto")] * 2, [torchrun(0, **first), torchrun(1, **other)]).wait(0, 0)

        train(20, {}, late)
        same_as_one_host(out)
        beats = []
        for r in (0, 1):
            with open(f"{out}/heartbeat_rank{r}.jsonl") as file:
                beats.append(json.loads(file.readline()))
        times = [next(v for k, v in beat.items() if isinstance(v, (int, float)) and v > 1e9) for beat in beats]
        check(times[1] - times[0] > 80_000, f"the clocks agree: {beats}")
        train(24, early, late)  # each later than the files that it reads, or earlier
        check(rows(out) == 24 and newest(out) == 24, "the run did not go on")


# ---- failures, and going on ----

def fails_and_goes_on(lab, fail, environment, **variables):
    """A run fails by fail() after its second checkpoint; the same command goes on to the bits of a run without a failure."""
    out, steps = f"{SHARED}/run", 400
    sets = f"train.steps={steps} train.save_every=4 dist.timeout_s=4"
    ranks = two(lab, out, sets, "--resume auto", environment)
    wait_until(lambda: newest(out) >= 8, "a checkpoint", 60)
    fail(ranks)
    ranks.wait(None, None, limit_s=40)
    step = newest(out)
    check(8 <= step < steps, f"checkpoint of step {step}")
    again = two(lab, out, sets, "--resume auto", environment, tag="again", **variables)
    again.wait(0, 0, limit_s=100)
    first = re.search(r"^step (\d+)/", again.text(0), re.M)
    check(first and int(first.group(1)) == step + 1, f"not from step {step} on\n{again.text(0)[:3000]}")
    check(rows(out) == steps, f"{rows(out)} rows in training.csv")
    same_as_one_host(out, steps)
    return ranks


@test
def torchrun_restarts_go_on_after_a_killed_rank():
    with Hosts([A, B]) as lab:
        ranks = fails_and_goes_on(lab, lambda r: lab.kill_program(B), torchrun, TORCHELASTIC_RESTART_COUNT="1")
        text = ranks.text(0)
        check(re.search(rf"rank 0 \(host {A}\): the connection to rank 1 \(host {B}\) is lost", text), text)
        check(re.search(rf"rank 0 \(host {A}\): (\d+ steps are|1 step is|no step is) lost since the checkpoint of step \d+\. To go on, under the "
                        rf"same launcher: \S*triad train --resume {SHARED}/run", text), text)


@test
def a_requeued_Slurm_job_goes_on_after_a_host_lost_power():
    with Hosts([A, B]) as lab:
        def fail(ranks):
            lab.lose_power(B)
            wait_until(lambda: ranks.processes[0].poll() is not None, "rank 0's end", 40)
            lab.link(B, "up")
        ranks = fails_and_goes_on(lab, fail, srun, SLURM_RESTART_COUNT="1")
        ranks.says(0, "was not finished within dist.timeout_s = 4 s", "lost since the checkpoint of step")


@test
def without_a_checkpoint_the_same_command_begins_again():
    with Hosts([A, B]) as lab:
        out = f"{SHARED}/run"
        ranks = two(lab, out, "train.steps=100000 train.allow_unsafe=true train.save_every=0", "--resume auto")
        wait_until(lambda: rows(out) > 3, "steps")
        lab.kill_program(B)
        ranks.wait(None, None)
        ranks.says(0, "steps are lost, because there is no checkpoint: the same command begins again")
        two(lab, out, more="--resume auto").wait(0, 0)
        same_as_one_host(out)
        ranks = two(lab, out, more="--resume auto")
        ranks.wait(0, 0)
        ranks.says(0, "nothing is left to train")


# ---- many processes ----

def many(count):
    """Runs `count` processes on this machine over TCP, and kills one of another run."""
    out = f"{SHARED}/many"
    limit_s = 20 + 5 * count

    def start(steps):
        shutil.rmtree(out, ignore_errors=True)
        made = []
        for r in range(count):
            with open(f"{SHARED}/many_{r}.log", "w") as log:
                made.append(subprocess.Popen(command(out, f"train.steps={steps} dist.timeout_s=100 train.allow_unsafe=true").replace("exec timeout -s KILL 100", "timeout -s KILL 900").split(),
                                             stdout=log, stderr=log, env={**os.environ, **torchrun(r, count, count, master="127.0.0.1"), "OMP_NUM_THREADS": "1"}))
        return made

    def text(rank):
        with open(f"{SHARED}/many_{rank}.log") as file:
            return file.read()

    def most_kb(pid):
        with open(f"/proc/{pid}/status") as file:
            return int(re.search(r"VmHWM:\s+(\d+)", file.read()).group(1))

    processes = start(20)
    began, memory = time.monotonic(), [0] * count
    pids = {}
    while any(p.poll() is None for p in processes):
        check(time.monotonic() - began < limit_s, f"{count} processes take longer than {limit_s} s\n{text(0)}")
        for r in (0, 1):
            try:
                if r not in pids:
                    with open(f"{out}/heartbeat_rank{r}.jsonl") as file:
                        pids[r] = json.loads(file.readline())["pid"]
                memory[r] = max(memory[r], most_kb(pids[r]))
            except (OSError, AttributeError, ValueError):
                pass
        time.sleep(0.05)
    check([p.returncode for p in processes] == [0] * count, f"exit codes {[p.returncode for p in processes]}\n{text(0)}")
    start_s = float(re.search(r"start +([\d.]+) s", text(0)).group(1))
    print(f"    {count} processes: start {start_s} s, 20 steps {time.monotonic() - began:.1f} s with it, "
          f"memory of ranks 0 and 1: {memory[0] / 1000:.0f} and {memory[1] / 1000:.0f} MB")
    check(0 < memory[1] and memory[0] - memory[1] <= 200_000, f"rank 0 has {memory[0]} kB, rank 1 {memory[1]}")
    processes = start(100000)
    wait_until(lambda: rows(out) >= 2, "steps", limit_s)
    with open(f"{out}/heartbeat_rank{count // 2}.jsonl") as file:
        os.kill(json.loads(file.readline())["pid"], signal.SIGKILL)
    began = time.monotonic()
    for p in processes:
        check(p.wait(60) != 0, "a rank goes on without another")
    print(f"    a killed rank ends all in {time.monotonic() - began:.1f} s")
    check(f"rank {count // 2} (pid" in text(0) or f"the connection to rank {count // 2} is lost" in text(0), text(0))
    check(sum("To go on" in text(r) or "begins again" in text(r) for r in range(count)) >= 1, "no rank says how to go on")
    return start_s


@test
def sixteen_processes_on_this_machine():
    many(16)


@slow
def sixty_four_processes_on_this_machine():
    start_s = many(64)
    check(start_s <= 20, f"they take {start_s} s to start")


def main():
    global PROGRAM
    parser = argparse.ArgumentParser()
    parser.add_argument("build")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    chosen = [f for f, in_ci in TESTS if (in_ci or args.all or args.only) and args.only in f.__name__]
    if args.list:
        return print("\n".join(f"{f.__name__}{'' if in_ci else '  (--all)'}" for f, in_ci in TESTS))
    hosts.enter()
    PROGRAM = os.path.abspath(f"{args.build}/triad")
    os.chdir(ROOT)
    failed = 0
    for function in chosen:
        began = time.monotonic()
        name = function.__name__.replace("_", " ")
        try:
            function()
            print(f"passed: {name}, {time.monotonic() - began:.1f} s", flush=True)
        except LeftOut as why:
            print(f"left out: {name}: {why}", flush=True)
        except (AssertionError, RuntimeError, OSError) as why:
            failed += 1
            print(f"FAILED: {name}: {why}", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
