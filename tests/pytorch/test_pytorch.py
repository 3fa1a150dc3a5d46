#!/usr/bin/env python3
"""Tests of the Python package triad_nsa (tools/pytorch).

  test_pytorch.py [--library FILE] [--program TRIAD] [TEST ...]

--library: builds the wheel of this libtriad_nsa.so and tests what is in it; otherwise the installed package is tested.
--program: also trains a model of 4 layers with PyTorch and with this `triad`. TEST: names such as attention_tests.Values.
Skipped where Python lacks torch. The tests of a GPU are skipped without one."""
import argparse
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library")
    parser.add_argument("--program")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("tests", nargs="*", default=[])
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("SKIPPED: Python has no torch")
        return 4  # kSkippedCode of tests/support/skip.h
    with tempfile.TemporaryDirectory() as folder:
        if options.library:
            environment = {**os.environ, "TRIAD_NSA_LIBRARY": str(pathlib.Path(options.library).resolve())}
            built = subprocess.run([sys.executable, ROOT / "tools/pytorch/build_wheel.py", folder], env=environment, check=True,
                                   stdout=subprocess.PIPE, text=True)
            os.environ["TRIAD_NSA_WHEEL"] = built.stdout.strip()
            os.environ.pop("TRIAD_NSA_LIBRARY", None)
            with zipfile.ZipFile(built.stdout.strip()) as wheel:
                wheel.extractall(f"{folder}/wheel")
            sys.path.insert(0, f"{folder}/wheel")
        if options.program:
            os.environ["TRIAD_PROGRAM"] = str(pathlib.Path(options.program).resolve())
        sys.path.insert(0, str(HERE))
        import torch

        import triad_nsa

        torch.set_num_threads(1)  # the problems are small, and other tests run at the same time
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}; "
              f"triad_nsa {triad_nsa.build_info()} in {pathlib.Path(triad_nsa.__file__).parent}", flush=True)
        modules = ["attention_tests", "block_sparse_tests", "given_lists_tests", "layer_tests", "training_tests", "huggingface_tests", "transformers_tests", "megatron_tests", "gpu_tests", "block_sparse_gpu_tests"]
        suite = unittest.defaultTestLoader.loadTestsFromNames(options.tests or modules)
        result = unittest.TextTestRunner(verbosity=2 if options.verbose else 1).run(suite)
        return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
