"""NSAAttention and decode on the CPU, FSDP, and the wheel."""
import os
import pathlib
import subprocess
import tempfile
import unittest
import zipfile

import torch

import dense_reference
import triad_nsa
from problem import SMALL, Problem, error

SHORT = [0, 3, 33, 70]
LAYERS = {
    "avg": dict(),
    "conv, sigmoid gate": dict(phi="conv", gate="sigmoid", gate_temperature=0.7),
    "mlp, no rotation": dict(phi="mlp", rope_theta=None),
    "shared, no gate, biases and norms": dict(shared_kv=True, gate=None, qkv_bias=True, qk_norm=True),
}


def layer_of(options):
    torch.manual_seed(1)
    layer = triad_nsa.NSAAttention(24, 4, 2, 8, 6, **SMALL, **options, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return layer


class Layer(unittest.TestCase):
    def test_documents_are_separate(self):
        for name, options in LAYERS.items():
            with self.subTest(name):
                layer, x = layer_of(options), torch.randn(70, 24, dtype=torch.float64, requires_grad=True)
                packed = layer(x, torch.tensor(SHORT, dtype=torch.int32))
                alone = torch.cat([layer(x[None, a:b])[0] for a, b in zip(SHORT, SHORT[1:])])
                self.assertLessEqual(error(packed, alone), 1e-12)
                given = list(layer.parameters())
                for a, b in zip(*(torch.autograd.grad(y.sin().sum(), given) for y in (packed, alone))):
                    self.assertLessEqual((a - b).abs().max().item(), 1e-9 * (1 + b.abs().max().item()))

    def test_compile_and_causality(self):
        for name, options in LAYERS.items():
            with self.subTest(name):
                torch._dynamo.reset()
                layer, x = layer_of(options), torch.randn(2, 70, 24, dtype=torch.float64)
                out = layer(x)
                self.assertLessEqual(error(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), out), 1e-14)
                x[:, 40:] += 1
                self.assertTrue(torch.equal(layer(x)[:, :40], out[:, :40]))

    def test_fsdp(self):
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            try:
                layer, x = layer_of({}).float(), torch.randn(2, 70, 24)
                expected = layer(x)
                mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
                sharded = fully_shard(layer, mesh=mesh)
                out = sharded(x)
                out.sum().backward()
                self.assertTrue(torch.equal(out, expected))
                self.assertTrue(all(p.grad is not None for p in sharded.parameters()))
            finally:
                dist.destroy_process_group()

    def test_refused(self):
        for pattern, options in (("n_heads is 3", dict(n_heads=3)), ("phi is 'max'", dict(phi="max")), ("gate is 'relu'", dict(gate="relu"))):
            with self.assertRaisesRegex(ValueError, pattern):
                triad_nsa.NSAAttention(**{**dict(dim=24, n_heads=4, n_kv_groups=2, d_k=8), **options})


    def test_state_dict(self):
        for name, options in LAYERS.items():
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                layer, same = layer_of(options), layer_of(options)
                torch.save(layer.state_dict(), f"{folder}/weights")
                self.assertEqual(str(same.load_state_dict(torch.load(f"{folder}/weights", weights_only=True))),
                                 "<All keys matched successfully>")
                old = {key: w for key, w in layer.state_dict().items() if not key.endswith("_extra_state")}
                self.assertEqual(str(same.load_state_dict(old)), "<All keys matched successfully>")

    def test_state_dict_of_another_layer(self):
        layer = layer_of({})
        others = {"compress": dict(compress=(8, 8)), "block": dict(block=16), "selected": dict(selected=9),
                  "window": dict(window=31), "local_blocks": dict(local_blocks=1), "gate": dict(gate="sigmoid"),
                  "gate_temperature": dict(gate_temperature=2.0), "rope_theta": dict(rope_theta=1e6),
                  "rope_scale": dict(rope_scale=2.0)}
        for key, options in others.items():
            for prefix in ("", "blocks.0."):
                with self.subTest(key + prefix):
                    other = triad_nsa.NSAAttention(24, 4, 2, 8, 6, **{**SMALL, **options}, dtype=torch.float64)
                    module = other if not prefix else torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([other])})
                    before = [p.clone() for p in other.parameters()]
                    with self.assertRaisesRegex(RuntimeError, f"its {key} is .*, that of (this layer|blocks.0) "):
                        module.load_state_dict({prefix + name: w for name, w in layer.state_dict().items()}, strict=False)
                    self.assertTrue(all(torch.equal(a, b) for a, b in zip(before, other.parameters())))


class IndexedLayer(unittest.TestCase):
    """NSAAttention(selector="index"), with one softmax and with three branches."""
    KINDS = {"one softmax": dict(branches="sel"), "three branches": dict(branches="cmp,sel,win", compress=(8, 4), window=12),
             "three branches, shared, conv": dict(branches="cmp,sel,win", compress=(8, 4), window=12, shared_kv=True, phi="conv")}

    @staticmethod
    def layer(**options):
        torch.manual_seed(1)
        return triad_nsa.NSAAttention(24, 4, 2, 8, 6, **{**dict(selector="index", branches="sel", block=8, selected=3, d_index=4,
                                                                qk_norm=True, qkv_bias=True, init_std=0.3), **options}, dtype=torch.float64)

    def each(self):
        for name, options in self.KINDS.items():
            with self.subTest(name):
                yield self.layer(**options), options

    def test_documents_are_separate(self):
        for layer, _ in self.each():
            x = torch.randn(70, 24, dtype=torch.float64)
            for dense in (False, True):
                packed, packed_loss = layer(x, torch.tensor(SHORT, dtype=torch.int32), dense=dense)
                alone = [layer(x[None, a:b], dense=dense) for a, b in zip(SHORT, SHORT[1:])]
                self.assertLessEqual(error(packed, torch.cat([y[0] for y, _ in alone])), 1e-12)
                losses = sum(loss * (b - a) / 70 for (_, loss), a, b in zip(alone, SHORT, SHORT[1:]))
                self.assertLessEqual(abs((packed_loss - losses).item()), 1e-12)

    def test_the_loss_moves_the_index_alone(self):
        for layer, _ in self.each():
            x = torch.randn(2, 70, 24, dtype=torch.float64, requires_grad=True)
            parameters = dict(layer.named_parameters())
            y, loss = layer(x)
            of_loss = torch.autograd.grad(loss, [x, *parameters.values()], allow_unused=True, retain_graph=True)
            of_output = torch.autograd.grad(y.sum(), [x, *parameters.values()], allow_unused=True)
            self.assertTrue(of_loss[0] is None and of_output[0] is not None)
            for name, a, b in zip(parameters, of_loss[1:], of_output[1:]):
                self.assertEqual((a is not None, b is not None), (name.startswith("index_"), not name.startswith("index_")), name)

    def test_eval_compile_and_causality(self):
        for layer, _ in self.each():
            torch._dynamo.reset()
            x = torch.randn(2, 70, 24, dtype=torch.float64)
            out, loss = layer(x)
            compiled, compiled_loss = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
            self.assertTrue(error(compiled, out) <= 1e-14 and error(compiled_loss, loss) <= 1e-14)
            layer.eval()
            self.assertTrue(torch.equal(layer(x)[0], out) and layer(x)[1] is None)
            x[:, 40:] += 1
            self.assertTrue(torch.equal(layer(x)[0][:, :40], out[:, :40]))
        self.assertLessEqual(error(self.layer(selected=9)(x)[0], self.layer()(x, dense=True)[0]), 1e-12)

    def test_padding(self):
        begins = torch.tensor([60], dtype=torch.int32)
        for layer, _ in self.each():
            x = torch.randn(1, 70, 24, dtype=torch.float64)
            for dense in (False, True):
                (y, loss), (short, expected) = layer(x, dense=dense, padding_begin=begins), layer(x[:, :60], dense=dense)
                self.assertLessEqual(error(y[:, :60], short), 1e-12)
                self.assertLessEqual(abs((loss - expected).item()), 1e-12)
        with self.assertRaisesRegex(ValueError, "padding_begin is for layers with selector 'index'"):
            layer_of({})(x, padding_begin=begins)

    def test_all_blocks_are_those_of_the_compressed_selection(self):
        """Where lists hold all blocks, it does not matter what selects."""
        options = dict(branches="cmp,sel,win", compress=(8, 4), window=12, selected=9)
        layer, other = self.layer(**options), self.layer(**options, selector="compressed")
        other.load_state_dict({name: w for name, w in layer.state_dict().items() if "index_" not in name and "_extra" not in name})
        x = torch.randn(2, 70, 24, dtype=torch.float64)
        self.assertTrue(torch.equal(layer(x)[0], other(x)))

    def test_state_dict_and_refused(self):
        for layer, options in self.each():
            self.layer(**options).load_state_dict(layer.state_dict())
            for key, more in {"selected": dict(selected=4), "local_blocks": dict(local_blocks=1), "rope_theta": dict(rope_theta=1e6)}.items():
                with self.assertRaisesRegex(RuntimeError, f"its {key} is"):
                    self.layer(**options, **more).load_state_dict(layer.state_dict())
            with self.assertRaisesRegex(RuntimeError, "its selector is index, that of this layer None"):
                layer_of({}).load_state_dict(layer.state_dict())
        with self.assertRaisesRegex(RuntimeError, "its branches is sel, that of this layer cmp,sel,win"):
            self.layer(branches="cmp,sel,win").load_state_dict(self.layer().state_dict())
        with self.assertRaisesRegex(ValueError, "selector is 'compressed' and branches 'sel': 'compressed' with"):
            self.layer(selector="compressed")
        with self.assertRaisesRegex(ValueError, "d_index is 7"):
            self.layer(d_index=7)
        with self.assertRaisesRegex(ValueError, "dense=True is for"):
            layer_of({})(torch.randn(1, 9, 24, dtype=torch.float64), dense=True)


class Decode(unittest.TestCase):
    def test_last_row(self):
        """The newest token of sequences of several lengths, against attention over each of them alone."""
        for case in (dict(), dict(shared=True, gate=None), dict(gate="head", init_blocks=0), dict(learned=True)):
            for paged in (False, True):
                with self.subTest(f"{case}, paged {paged}"):
                    self.check(Problem(B=5, T=96, **case), torch.tensor([1, 7, 33, 64, 95]), paged)

    def check(self, p, lengths, paged):
        B, rows = lengths.numel(), torch.arange(lengths.numel())
        learned = p.k_cmp is not None
        expected = []
        for b, n in enumerate(lengths.tolist()):
            cut = lambda x: x[b:b + 1, :n].detach()  # noqa: E731
            blocks = max(0, (n - 8) // 4 + 1)
            kc, vc = (x[b:b + 1, :blocks].detach() if learned else None for x in (p.k_cmp, p.v_cmp))
            out, *_ = dense_reference.attention(cut(p.q), [cut(x) for x in p.k * (3 // len(p.k))], [cut(x) for x in p.v * (3 // len(p.v))],
                                                None if p.gate is None else cut(p.gate), k_cmp=kc, v_cmp=vc, **p.options)
            expected.append(out[0, -1])
        # What no token has written is NaN.
        caches, table, cmp_table = [], None, None
        for x in (*p.k, *p.v):
            unwritten = torch.arange(96)[None] >= lengths[:, None]
            caches.append(x.detach().masked_fill(unwritten[..., None, None], torch.nan))
        if paged:  # the pages of all sequences in a random order
            order = torch.randperm(B * 12)
            table = order.argsort().view(B, 12).to(torch.int32)
            caches = [x.reshape(B * 12, 8, *x.shape[2:])[order] for x in caches]
        k, v = caches[:len(p.k)], caches[len(p.k):]
        k, v = (x[0] if len(x) == 1 else x for x in (k, v))
        gate = None if p.gate is None else p.gate[rows, lengths - 1]
        out = triad_nsa.decode(p.q[rows, lengths - 1], k, v, gate, lengths=lengths, block_table=table, k_cmp=p.k_cmp,
                               v_cmp=p.v_cmp, **p.options)
        self.assertLessEqual(error(out, torch.stack(expected)), 1e-12)
        again = triad_nsa.decode(p.q[rows, lengths - 1][:, None], k, v, gate, lengths=lengths, block_table=table, k_cmp=p.k_cmp,
                                 v_cmp=p.v_cmp, **p.options)
        self.assertTrue(torch.equal(again[:, 0], out))

    def test_refused(self):
        p = Problem(B=2, T=32)
        q = p.q[:, -1]
        lengths = torch.tensor([32, 32])
        for pattern, call in (("one new token", lambda: triad_nsa.decode(p.q, p.k, p.v, lengths=lengths, **SMALL)),
                              (r"lengths is \[3\]", lambda: triad_nsa.decode(q, p.k, p.v, lengths=torch.ones(3), **SMALL)),
                              (r"gate is \[2, 3, 3\]", lambda: triad_nsa.decode(q, p.k, p.v, torch.rand(2, 3, 3), lengths=lengths, **SMALL))):
            with self.assertRaisesRegex(ValueError, pattern):
                call()


class Wheel(unittest.TestCase):
    def test_content(self):
        path = os.environ.get("TRIAD_NSA_WHEEL")
        if not path:
            self.skipTest("the package is an installed one")
        self.assertRegex(path, r"triad_nsa-[\d.]+-py3-none-linux_x86_64\.whl$")
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            self.assertIn("triad_nsa/libtriad_nsa.so", names)
            self.assertFalse([n for n in names if n.endswith(".so") and "libtriad_nsa" not in n])
            library = wheel.read("triad_nsa/libtriad_nsa.so")
        for name in (b"libtorch", b"libc10", b"libpython"):
            self.assertNotIn(name, library)

    def test_missing_library(self):
        import sys

        environment = {**os.environ, "TRIAD_NSA_LIBRARY": "/nowhere/libtriad_nsa.so",
                       "PYTHONPATH": str(pathlib.Path(triad_nsa.__file__).parents[1])}
        done = subprocess.run([sys.executable, "-c", "import triad_nsa"], env=environment, capture_output=True, text=True)
        self.assertIn("/nowhere/libtriad_nsa.so is missing", done.stderr)
