"""The configuration of a model that `triad export` wrote as model_type triad; modeling_triad.py computes it.

The names are those of transformers where it has one; the groups `nsa` and `rope` have the keys of Triad's own config.
"""
from transformers import PretrainedConfig

# Key: default of the group `nsa`. `triad export` writes all of them.
NSA_KEYS = {
    "l": 32, "d": 16,  # compression block and stride, tokens
    "l_sel": 64, "n_sel": 16,  # selection block, tokens; number of selected blocks, forced ones included
    "w": 512,  # sliding window, tokens
    "phi": "avg",  # how a block is compressed: avg, conv or mlp
    "gate": "softmax", "gate_temperature": 1.0,  # how the three branches are weighed: softmax or sigmoid
    "init_blocks": 1, "local_blocks": 2,  # first blocks, and current and preceding ones: always selected
    "force_branch": "none", "uniform_gate": False, "stopgrad_gates": False,
    "gate_init": (),  # gates of cmp, sel and win that fresh weights begin with; empty: all equal
    "shared_kv": False,  # k_win_proj and v_win_proj feed all branches
    # or sel: one softmax over the selected blocks, without gates; or win: one over the window
    "branches": "cmp,sel,win",
    "selector": "compressed", "d_index": 64,  # what selects: the compressed branch, or an index of this width
    "index_loss": 1.0,  # how Triad weighs the index's loss; here the index does not learn
    "select_every": 1,  # so many tokens share the blocks that the first of them selects; divides l_sel
    "layers": None,  # layers that differ: a list of {"layers": "0:4,8:12", and keys with other values}
}
# Keys of an entry of `layers`, besides "layers" itself.
LAYER_KEYS = ("branches", "l", "d", "l_sel", "n_sel", "w", "init_blocks", "local_blocks", "selector", "d_index", "select_every")
# Key: default of the group `rope`. scaling: none, llama3 or yarn. scale divides positions, and only with none.
ROPE_KEYS = {
    "theta": 10000.0, "scale": 1.0, "scaling": "none", "factor": 8.0, "original_len": 8192,
    "low_freq": 1.0, "high_freq": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
}


def complete_group(name, defaults, given):
    """The group with its defaults. Raises an error for a key that the group does not have."""
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ValueError(f"the group {name} has no key {unknown[0]}; it has {', '.join(defaults)}")
    return {**defaults, **given}


def numbers_of_layers(ranges):
    """The layers that "0:4,8:12" names: the ends are exclusive."""
    return [i for part in ranges.split(",") for i in range(*map(int, part.split(":")))]


class TriadConfig(PretrainedConfig):
    model_type = "triad"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    def __init__(
        self,
        vocab_size=256,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,  # key/value groups
        head_dim=32,  # width of a query or key head; even
        v_head_dim=None,  # width of a value head; None: head_dim
        mlp="silu",  # silu: fc2(SiLU(fc1 x)); swiglu: down(SiLU(gate x) * up x)
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        qkv_bias=False,
        qk_norm=False,
        dense_layers=(),  # numbers of the layers with plain causal attention; the other layers have NSA
        nope_layers=(),  # numbers of the layers that do not rotate queries and keys
        nsa=None,
        rope=None,
        max_position_embeddings=2048,  # the training length; longer texts are computed too
        tie_word_embeddings=False,
        use_cache=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.mlp = mlp
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.qkv_bias = qkv_bias
        self.qk_norm = qk_norm
        self.dense_layers = list(dense_layers)
        self.nope_layers = list(nope_layers)
        self.nsa = complete_group("nsa", NSA_KEYS, nsa or {})
        self.rope = complete_group("rope", ROPE_KEYS, rope or {})
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        self.check()
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    def nsa_at(self, layer):
        """The options of a layer: the group `nsa`, with the values of the entry of its `layers` that names the layer."""
        for entry in self.nsa["layers"] or ():
            if layer in numbers_of_layers(entry["layers"]):
                return {**self.nsa, **{key: value for key, value in entry.items() if key != "layers"}}
        return self.nsa

    def check(self):
        """Raises an error that names a value which modeling_triad.py cannot compute."""
        def one_of(name, value, words):
            if value not in words:
                raise ValueError(f"{name} is {value!r}: {', '.join(words)} is allowed")

        one_of("mlp", self.mlp, ("silu", "swiglu"))
        one_of("rope.scaling", self.rope["scaling"], ("none", "llama3", "yarn"))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_key_value_heads {self.num_key_value_heads} does not divide num_attention_heads "
                             f"{self.num_attention_heads}")
        for name in ("dense_layers", "nope_layers"):
            for layer in getattr(self, name):
                if layer not in range(self.num_hidden_layers):
                    raise ValueError(f"{name} holds {layer!r}: numbers of {self.num_hidden_layers} layers are allowed, from 0 on")
        for entry in self.nsa["layers"] or ():
            complete_group("nsa.layers", dict.fromkeys(("layers", *LAYER_KEYS)), entry)
        for layer in range(self.num_hidden_layers):
            if layer not in self.dense_layers:
                self.check_layer(self.nsa_at(layer), one_of)

    @staticmethod
    def check_layer(nsa, one_of):
        one_of("nsa.phi", nsa["phi"], ("avg", "conv", "mlp"))
        one_of("nsa.gate", nsa["gate"], ("softmax", "sigmoid"))
        one_of("nsa.force_branch", nsa["force_branch"], ("none", "cmp", "sel", "win"))
        one_of("nsa.branches", nsa["branches"], ("cmp,sel,win", "sel", "win"))
        one_of("nsa.selector", nsa["selector"], ("compressed", "index"))
        if nsa["branches"] == "sel":
            one_of("nsa.selector, with nsa.branches sel,", nsa["selector"], ("index",))
        if nsa["branches"] != "win" and nsa["l_sel"] % nsa["select_every"]:
            raise ValueError("nsa.select_every {select_every} does not divide nsa.l_sel {l_sel}".format(**nsa))
        if nsa["branches"] == "cmp,sel,win" and (nsa["l"] % nsa["d"] or nsa["l_sel"] % nsa["d"]):
            raise ValueError("nsa.d {d} does not divide nsa.l {l} and nsa.l_sel {l_sel}".format(**nsa))
