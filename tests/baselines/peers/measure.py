"""What the scripts of this folder share: imports that fail with one line, times, energy, and rows.

Nothing here imports torch by itself, so that --help and --dry-run work without it.
"""
import ctypes
import datetime
import importlib
import json
import pathlib
import statistics
import subprocess
import sys
import time

FLUSH_BYTES = 256 << 20  # written before each timed call: more than the L2 of any GPU
LEAST_RUNS, MOST_RUNS = 7, 1000
ROOT = pathlib.Path(__file__).resolve().parents[3]


class Missing(Exception):
    """A peer cannot be measured here. The text says what is missing, and where to get it."""


def need_torch(device="cuda"):
    try:
        import torch
    except ImportError as error:
        sys.exit(f"this script needs PyTorch ({error}): pip install torch")
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"PyTorch {torch.__version__} finds no CUDA device")
    return torch


def need(module, source):
    """Imports a peer's module. `source` says where the peer can be found."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"{error} ({source})") from error


def add_options(parser, seconds):
    """Adds the options of every script."""
    parser.add_argument("--seconds", type=float, default=seconds,
                        help=f"how long each measurement runs, after its warm-up ({seconds})")
    parser.add_argument("--dry-run", action="store_true", help="list the measurements, and run none")


class Clock:
    """Times calls on one device: by CUDA events with a flushed L2 cache, or on a CPU by the wall clock."""

    def __init__(self, torch, device="cuda", seconds=0.2):
        self.torch, self.seconds, self.is_cuda = torch, seconds, device == "cuda"
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if self.is_cuda else None

    def times_ms(self, call, runs, flushes=True):
        """The times of `runs` calls. All are queued before the first one is read, so the host does not wait between."""
        if not self.is_cuda:
            return [self.host_ms(call) for _ in range(runs)]
        events = [[self.torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for begin, end in events:
            if flushes:
                self.flush.zero_()
            begin.record()
            call()
            end.record()
        self.torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in events]

    def host_ms(self, call):
        """The wall time of one call and the GPU's work for it."""
        begin = time.perf_counter()
        call()
        if self.is_cuda:
            self.torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - begin)

    def median_ms(self, call):
        """The median of as many calls as fit the seconds."""
        for _ in range(3):  # compiles, chooses algorithms, fills caches
            self.host_ms(call)
        runs = int(1000 * self.seconds / max(self.host_ms(call), 1e-3))
        return statistics.median(self.times_ms(call, min(max(runs, LEAST_RUNS), MOST_RUNS)))


class PowerMeter:
    """Energy, clock and power limit of the GPU that torch uses, by NVML. It changes no setting."""

    SM_CLOCK = 1  # NVML_CLOCK_SM

    def __init__(self, torch):
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise Missing(f"NVML, which is part of NVIDIA's driver: {error}") from error
        self.device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self.ask("nvmlInit_v2")
        self.ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self.device))

    def ask(self, function, *arguments):
        status = getattr(self.nvml, function)(*arguments)
        if status != 0:
            raise Missing(f"{function} fails with status {status}")

    def number(self, function, kind, *arguments):
        value = kind()
        self.ask(function, self.device, *arguments, ctypes.byref(value))
        return value.value

    def joules(self):
        """The energy since the driver was loaded. The driver renews it every 20 to 100 ms."""
        return self.number("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1000

    def clock_mhz(self):
        return self.number("nvmlDeviceGetClockInfo", ctypes.c_uint, self.SM_CLOCK)

    def limit_watts(self):
        return self.number("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint) / 1000

    def sustained(self, torch, call, seconds, warm_up):
        """Repeats a call without pause. Returns the mean time of a call in ms, and figures of power for its row."""
        per_round = max(1, int(0.2 / self.seconds_of_call(torch, call, warm_up)))
        calls, clocks, begin, energy = 0, [], time.perf_counter(), self.joules()
        while time.perf_counter() - begin < seconds:
            for _ in range(per_round):
                call()
            clocks.append(self.clock_mhz())  # read while the GPU works
            torch.cuda.synchronize()
            calls += per_round
        wall, energy = time.perf_counter() - begin, self.joules() - energy
        power = {"joules": energy / calls, "watts": energy / wall, "limit_w": self.limit_watts(),
                 "clock_mhz": statistics.mean(clocks)}
        return 1000 * wall / calls, power

    def seconds_of_call(self, torch, call, warm_up):
        calls, begin = 0, time.perf_counter()
        while calls == 0 or time.perf_counter() - begin < warm_up:
            call()
            torch.cuda.synchronize()
            calls += 1
        return (time.perf_counter() - begin) / calls


class Rows:
    """Prints measurements as rows of tests/baselines/rows.jsonl, one JSON object a line."""

    def __init__(self, torch, device="cuda"):
        gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        self.common = {"commit": commit(), "date": datetime.date.today().isoformat(), "gpu": gpu}
        self.command = " ".join([str(pathlib.Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]])
        self.kept = []
        self.torch = f"PyTorch {'.'.join(torch.__version__.split('.')[:2])}"

    def add(self, program, op, case, way, figures, dtype="bf16", version=""):
        source = f"{version or self.torch}; {self.command}"
        self.kept.append({**self.common, "dtype": dtype, "what": "peer", "program": program, "op": op, "case": case,
                          "pass": way, **figures, "source": source})
        print(json.dumps(self.kept[-1]), flush=True)


class Failures:
    """What could not be measured: one line each on stderr, and the exit code."""

    def __init__(self):
        self.count = 0

    def add(self, name, error):
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        kind = "" if isinstance(error, Missing) else f"{type(error).__name__}: "
        print(f"{name}: not measured: {kind}{first_line}", file=sys.stderr, flush=True)
        self.count += 1

    def leave(self):
        sys.exit(1 if self.count else 0)


def commit():
    """The commit of this checkout: rows belong next to the engine's own of the same commit."""
    git = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip() if git.returncode == 0 else "unknown"
