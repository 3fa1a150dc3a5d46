#!/usr/bin/env python3
# Reads TensorBoard's event files in a folder and prints one JSON object: scalars {tag: [[step, value], ...]},
# histograms {tag: [[step, {...}], ...]}, texts {tag: [[step, text], ...]}, hparams {name: value}, ended (the run's final
# status in hparams) and restarts [step, ...]. Written from the description of the format, without TensorBoard's code.
import glob
import json
import struct
import sys


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(raw):
    at = 0
    while at < len(raw):
        length, crc = struct.unpack_from("<QI", raw, at)
        assert crc == masked(raw[at:at + 8]), f"length at {at}"
        data = raw[at + 12:at + 12 + length]
        assert len(data) == length
        assert struct.unpack_from("<I", raw, at + 12 + length)[0] == masked(data), f"data at {at}"
        yield data
        at += 16 + length


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not data[at - 1] & 0x80:
            return value, at


def fields(data):
    at, found = 0, {}
    while at < len(data):
        key, at = varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = varint(data, at)
        elif wire == 2:
            length, at = varint(data, at)
            value, at = data[at:at + length], at + length
        else:
            size, form = {1: (8, "<d"), 5: (4, "<f")}[wire]
            value, at = struct.unpack_from(form, data, at)[0], at + size
        found.setdefault(key >> 3, []).append(value)
    return found


def doubles(packed):
    return list(struct.unpack(f"<{len(packed) // 8}d", packed))


def plugin(tag, step, tensor, metadata):
    data = fields(metadata[1][0])
    assert metadata[4] == [2], "not of the class of tensors"
    if data[1] == [b"text"]:
        assert tensor[1] == [7] and fields(fields(tensor[2][0])[2][0]) == {1: [1]}
        out["texts"].setdefault(tag, []).append([step, tensor[8][0].decode()])
        return
    assert data[1] == [b"hparams"]
    content = fields(data[2][0])
    if tag == "_hparams_/session_start_info":
        for entry in map(fields, fields(content[3][0])[1]):
            (kind, (value,)), = fields(entry[2][0]).items()
            out["hparams"][entry[1][0].decode()] = {2: float, 3: lambda b: b.decode(), 4: bool}[kind](value)
    else:
        assert tag == "_hparams_/session_end_info"
        out["ended"] = fields(content[4][0])[1][0]


out = {"scalars": {}, "histograms": {}, "texts": {}, "hparams": {}, "ended": 0, "restarts": []}
for path in sorted(glob.glob(sys.argv[1] + "/*tfevents*")):
    for number, record in enumerate(records(open(path, "rb").read())):
        event = fields(record)
        step = event.get(2, [0])[0]
        assert (event.get(3) == [b"brain.Event:2"]) == (number == 0)
        if 7 in event:
            assert fields(event[7][0]) == {1: [1]}
            out["restarts"].append(step)
        for summary in event.get(5, []):
            for value in map(fields, fields(summary)[1]):
                tag = value[1][0].decode()
                if 2 in value:
                    out["scalars"].setdefault(tag, []).append([step, value[2][0]])
                if 8 in value:
                    plugin(tag, step, fields(value[8][0]), fields(value[9][0]))
                if 5 in value:
                    h = fields(value[5][0])
                    limits, counts = doubles(h[6][0]), doubles(h[7][0])
                    assert len(limits) == len(counts) and limits == sorted(limits) and sum(counts) == h[3][0]
                    out["histograms"].setdefault(tag, []).append(
                        [step, {"min": h[1][0], "max": h[2][0], "num": h[3][0], "sum": h[4][0], "squares": h[5][0],
                                "limits": limits, "counts": counts}])
print(json.dumps(out))
