#!/usr/bin/env python3
"""FineWeb-Edu, or any data set with a column of text, as JSONL on standard output, for `triad data --input -`.

tools/fineweb.py a.parquet b.parquet ...             files at hand (pip install pyarrow)
tools/fineweb.py --stream sample-10BT [--documents N]  from Hugging Face, as it comes (pip install datasets)
"""
import argparse
import json
import os
import sys


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
    parser.add_argument("--stream", metavar="SUBSET", help="of --dataset, such as sample-10BT")
    parser.add_argument("--dataset", default="HuggingFaceFW/fineweb-edu")
    parser.add_argument("--column", default="text")
    parser.add_argument("--documents", type=int, default=0, help="stop after so many; 0: all")
    args = parser.parse_args()
    if bool(args.files) == bool(args.stream):
        parser.error("either parquet files or --stream is needed")
    texts = from_parquet(args.files, args.column) if args.files else from_hub(args.dataset, args.stream, args.column)
    for number, text in enumerate(texts):
        if args.documents and number == args.documents:
            break
        if text:
            sys.stdout.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", errors="strict")
    try:
        main()
    except BrokenPipeError:  # whoever reads has ended, and says why
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
