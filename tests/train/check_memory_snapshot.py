#!/usr/bin/env python3
# Checks that mem_NAME.{txt,json,pickle} follow the rules of PyTorch's memory viewer, and prints a summary for the test.
# Written from the description of the formats; it imports neither Triad's code nor PyTorch.
#   check_memory_snapshot.py PATH_WITHOUT_SUFFIX [NAME_OF_A_TENSOR ...]   fails if a name does not occur
import json
import pickle
import pickletools
import sys

VIEWER_READS = set("""PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE
SHORT_BINUNICODE EMPTY_LIST APPEND APPENDS LIST EMPTY_DICT SETITEM SETITEMS DICT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET""".split())


def check_opcodes(raw):
    for op, arg, at in pickletools.genops(raw):
        assert op.name in VIEWER_READS, f"{op.name} at {at}"
        if op.name == "PROTO":
            assert 2 <= arg <= 4
        if op.name == "LONG1":
            assert abs(arg) < 1 << 63


def check_segment(segment):
    at = segment["address"]
    active = requested = 0
    for block in segment["blocks"]:  # blocks tile the segment without gaps
        assert block["address"] == at, (block, at)
        assert block["size"] > 0
        at += block["size"]
        assert block["state"] in ("active_allocated", "active_pending_free", "inactive")
        if block["state"] == "active_allocated":
            active += block["size"]
            requested += block["requested_size"]
            assert block["size"] - 2 ** 16 < block["requested_size"] <= block["size"] and block["frames"]
    assert at == segment["address"] + segment["total_size"]
    assert segment["allocated_size"] == segment["active_size"] == active
    assert segment["requested_size"] == requested
    assert segment["segment_type"] in ("small", "large") and segment["segment_pool_id"] == (0, 0)


# Replays the trace: the memory allocated at its end must equal the segments' active blocks.
def check_trace(trace, segments):
    taken, last_us, actions = {}, 0, {}
    lost = set()  # addresses of blocks allocated before the trace begins
    pending = None
    for event in trace:
        action = event["action"]
        actions[action] = actions.get(action, 0) + 1
        if action in ("snapshot", "oom"):
            continue
        assert any(s["address"] <= event["addr"] < s["address"] + s["total_size"] for s in segments), event
        assert isinstance(event["category"], str)
        if action == "segment_alloc":
            assert not taken
        elif action == "alloc":
            begin, end = event["addr"], event["addr"] + event["size"]
            assert not any(b < end and begin < b + s for b, s in taken.items()), f"two at one place: {event}"
            taken[begin] = event["size"]
        elif action == "free_requested":
            pending = event["addr"]
        elif action == "free_completed":
            assert pending == event["addr"], "free_completed follows free_requested"
            if event["addr"] in taken:
                assert taken.pop(event["addr"]) == event["size"]
            else:
                lost.add(event["addr"])
        else:
            raise AssertionError(action)
        last_us = max(last_us, event["time_us"])
    blocks = {b["address"]: b["size"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated"}
    assert taken == blocks
    assert trace[-1]["action"] == "snapshot" and trace[-1]["time_us"] >= last_us
    assert any(e.get("category") == "unknown" for e in trace)
    return actions, len(lost)


def cell(value, of_all, units, limit, step, width):
    unit = units[0]
    for larger in units[1:]:
        if of_all < limit:
            break
        unit, value, of_all = larger, value // step, of_all / step
    return f"{value:{width}d} {unit}"


# The table that torch.cuda.memory_summary prints for these statistics.
def summary(stats, device):
    size = lambda v, a: cell(v, a, ["B  ", "KiB", "MiB", "GiB", "TiB", "PiB"], 768 * 1024, 1024, 6)
    count = lambda v, a: cell(v, a, [" ", "K", "M"], 750 * 1000, 1000, 7) + " "
    rule = lambda c: "|" + c * 75 + "|"
    columns = ("current", "peak", "allocated", "freed")
    lines = [rule("="), "|" + " " * 18 + f"PyTorch CUDA memory summary, device ID {device:<17d} |", rule("-"),
             "|  " + " " * 10 + f"CUDA OOMs: {stats['num_ooms']:<12d} | " + " " * 7 +
             f"cudaMalloc retries: {stats['num_alloc_retries']:<8d}  |", rule("="),
             "|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |"]
    for key, name, text in (("allocated_bytes", "Allocated memory", size), ("active_bytes", "Active memory", size),
                            ("requested_bytes", "Requested memory", size),
                            ("reserved_bytes", "GPU reserved memory", size),
                            ("inactive_split_bytes", "Non-releasable memory", size),
                            ("allocation", "Allocations", count), ("active", "Active allocs", count),
                            ("segment", "GPU reserved segments", count),
                            ("inactive_split", "Non-releasable allocs", count)):
        lines.append(rule("-"))
        for pool, label in (("all", name), ("large_pool", "      from large pool"),
                            ("small_pool", "      from small pool")):
            lines.append(f"| {label:<21} | " + " | ".join(
                text(stats[f"{key}.{pool}.{c}"], stats[f"{key}.all.{c}"]) for c in columns) + " |")
    for key, name in (("oversize_allocations", "Oversize allocations"), ("oversize_segments", "Oversize GPU segments")):
        lines.append(rule("-"))
        lines.append(f"| {name:<21} | " + " | ".join(count(stats[f"{key}.{c}"], stats[f"{key}.{c}"])
                                                     for c in columns) + " |")
    return "\n".join(lines + [rule("=")]) + "\n"


def main():
    base, wanted = sys.argv[1], sys.argv[2:]
    raw = open(base + ".pickle", "rb").read()
    check_opcodes(raw)
    snapshot = pickle.loads(raw)
    assert set(snapshot) >= {"segments", "device_traces", "allocator_settings", "external_annotations"}
    device = snapshot["segments"][0]["device"]
    assert len(snapshot["device_traces"]) > device
    for segment in snapshot["segments"]:
        check_segment(segment)
    actions, lost = check_trace(snapshot["device_traces"][device], snapshot["segments"])

    stats = json.load(open(base + ".json"))
    blocks = [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    assert stats["allocated_bytes.all.current"] == stats["active_bytes.all.current"] == sum(b["size"] for b in blocks)
    assert stats["requested_bytes.all.current"] == sum(b["requested_size"] for b in blocks)
    assert stats["allocation.all.current"] == len(blocks)
    assert stats["reserved_bytes.all.current"] == sum(s["total_size"] for s in snapshot["segments"])
    assert stats["inactive_split_bytes.all.current"] == sum(
        b["size"] for s in snapshot["segments"] for b in s["blocks"] if b["state"] == "inactive")
    for key in stats:
        if not key.endswith(".all.current"):
            continue
        stem = key[:-len(".all.current")]
        for column in ("current", "allocated", "freed"):
            assert stats[f"{stem}.all.{column}"] == sum(stats[f"{stem}.{pool}.{column}"]
                                                        for pool in ("large_pool", "small_pool")), (stem, column)
        for pool in ("all", "large_pool", "small_pool"):
            of = lambda column: stats[f"{stem}.{pool}.{column}"]
            assert of("current") == of("allocated") - of("freed") and of("peak") >= of("current") >= 0, (stem, pool)
    text = open(base + ".txt").read()
    assert text.startswith(summary(stats, device)), summary(stats, device)

    ours = stats["triad"]
    assert ours["unaccounted_bytes"] == ours["in_use_bytes"] - sum(ours["category_bytes"].values())
    names = {f["name"]: e["category"] for e in snapshot["device_traces"][device] for f in e.get("frames", [])
             if e["action"] == "alloc"}
    for name in wanted:
        assert name in names, f"{name} is not among {len(names)} tensors"
    print("categories", " ".join(sorted(set(names.values()))))
    print("actions", " ".join(f"{a}={n}" for a, n in sorted(actions.items())), f"lost={lost}")
    print("in_use_mib %.2f unaccounted_mib %.2f" % (ours["in_use_bytes"] / 2 ** 20, ours["unaccounted_bytes"] / 2 ** 20))
    if any(e["action"] == "oom" for e in snapshot["device_traces"][device]):
        print("oom", ours["oom"]["what"].splitlines()[0])
    print("whole")


main()
