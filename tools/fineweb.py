#!/usr/bin/env python3
"""Writes FineWeb-Edu, or any data set with a column of text, as gzipped JSONL to standard output, for `triad data --input -`.

tools/fineweb.py a.parquet b.parquet ...               local files (pip install pyarrow)
tools/fineweb.py --stream sample-10BT [--documents N]  streamed from Hugging Face (pip install datasets)

The reader of a pipe cannot distinguish a writer that has finished from one that was killed. A gzip stream has an end mark:
if it is missing, `triad data` reports a truncated input, and resumes there when the call is repeated.
"""
import argparse
import json
import os
import sys
import zlib


def from_parquet(files, column):
    import pyarrow.parquet

    for name in files:
        table = pyarrow.parquet.ParquetFile(name)
        if column not in table.schema_arrow.names:
            sys.exit(f"{name}: has no column {column}, only {', '.join(table.schema_arrow.names)}")
        for batch in table.iter_batches(batch_size=1024, columns=[column]):
            yield from batch.column(0).to_pylist()


def from_hub(dataset, subset, column):
    import datasets

    for row in datasets.load_dataset(dataset, name=subset, split="train", streaming=True):
        yield row[column]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="parquet files, read in this order")
    parser.add_argument("--stream", metavar="SUBSET", help="stream this subset of --dataset, such as sample-10BT")
    parser.add_argument("--dataset", default="HuggingFaceFW/fineweb-edu", help="name on Hugging Face (default: %(default)s)")
    parser.add_argument("--column", default="text", help="column that holds the text (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=0, help="stop after this many documents; 0: all")
    args = parser.parse_args()
    if bool(args.files) == bool(args.stream):
        parser.error("either parquet files or --stream is needed")
    texts = from_parquet(args.files, args.column) if args.files else from_hub(args.dataset, args.stream, args.column)
    stored_as_gzip = 0, zlib.DEFLATED, zlib.MAX_WBITS + 16
    packer = zlib.compressobj(*stored_as_gzip)
    out = sys.stdout.buffer
    for number, text in enumerate(texts):
        if args.documents and number == args.documents:
            break
        if text:
            out.write(packer.compress((json.dumps({"text": text}, ensure_ascii=False) + "\n").encode()))
    out.write(packer.flush())
    out.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the reader has ended and reports why
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
