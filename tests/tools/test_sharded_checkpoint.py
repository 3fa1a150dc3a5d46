#!/usr/bin/env python3
"""Loads a checkpoint that two ranks have written with Python's readers of several safetensors files.

  test_sharded_checkpoint.py TRIAD     TRIAD: the program

The weights by safetensors, huggingface_hub, accelerate and transformers' trainer, into a module whose parameters have the
names and shapes of the index, and the moments by safetensors: each equal to the whole file that `triad export --format
triad` makes, or to those that one rank saves of the same state. Skipped where a package or mpirun is missing."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

try:
    import accelerate
    import torch
    from huggingface_hub import load_torch_model
    from safetensors import safe_open
    from safetensors.torch import load_file
    from transformers.trainer_utils import load_sharded_checkpoint
except ImportError as missing:
    print(f"SKIPPED: {missing}")
    sys.exit(4)  # kSkippedCode of tests/support/skip.h
if shutil.which("mpirun") is None:
    print("SKIPPED: no mpirun")
    sys.exit(4)

SOURCE = pathlib.Path(__file__).resolve().parents[2]
TRAIN = ["train", SOURCE / "configs/tiny.json", "--set", "runtime.device=cpu", "--set", "train.steps=4", "--set",
         "train.save_every=4"]
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2"]


def run(*args):
    environment = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
                                "OMPI_MCA_plm_rsh_agent": "/bin/false"}
    done = subprocess.run([*map(str, args)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{' '.join(map(str, args))}: exit code {done.returncode}\n{done.stdout}{done.stderr}"


def read_index(folder, stem):
    """All tensors, each from the file that the index names."""
    index = json.loads((folder / f"{stem}.safetensors.index.json").read_text())
    tensors = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as opened:
            tensors[name] = opened.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    return tensors


def module_of(tensors):
    """A module with a zero parameter of each name and shape; the parts of a name are nested modules."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        module, *parts = root, *name.split(".")
        for part in parts[:-1]:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        module.register_parameter(parts[-1], torch.nn.Parameter(torch.zeros_like(tensor)))
    return root


def compare(what, found, expected):
    assert found.keys() == expected.keys(), f"{what}: {sorted(found.keys() ^ expected.keys())}"
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{what}: {name}"
    print(f"{what}: {len(expected)} tensors are equal")


def main(triad):
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        run(*MPIRUN, triad, *TRAIN, "--set", f"log.out_dir={out}/run", "--set", "dist.zero=1")
        step = out / "run/checkpoints/step_4"
        assert len(list(step.glob("model-*.safetensors"))) == 2 and not (step / "model.safetensors").exists()
        run(triad, "export", step, "--format", "triad", "--out", out / "whole")
        expected = load_file(out / "whole/model.safetensors")
        compare("safetensors", read_index(step, "model"), expected)
        for what, load in {"huggingface_hub": load_torch_model, "accelerate": accelerate.load_checkpoint_in_model,
                           "transformers": load_sharded_checkpoint}.items():
            # Each of these takes a folder of weights alone.
            weights = out / what
            weights.mkdir()
            for path in [*step.glob("model-*"), step / "model.safetensors.index.json"]:
                shutil.copy(path, weights)
            model = module_of(expected)
            load(model, str(weights))
            compare(what, dict(model.named_parameters()), expected)
        run(triad, *TRAIN, "--set", f"log.out_dir={out}/one", "--resume", step)
        one = out / "one/checkpoints/step_4"
        compare("moments", read_index(step, "optimizer"), load_file(one / "optimizer.safetensors"))


main(pathlib.Path(sys.argv[1]).resolve())
