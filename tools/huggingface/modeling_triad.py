"""A decoder language model with Native Sparse Attention (NSA, arXiv 2502.11089) in plain PyTorch, for transformers.

It computes what Triad's engine computes, and is written to be read: the attention is in NativeSparseAttention, from
the compressed branch to the gates. Nothing has T x T entries: queries run in chunks, and only selected blocks are
gathered. Where the package triad_nsa is installed (tools/pytorch of Triad), its kernels compute the attention of whole
texts, in training and for prompts; set Attention.use_kernels to False to prevent it.

Shapes: B texts, T new tokens, S tokens so far, H key/value groups, G query heads per group, D width of a head, N keys.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_triad import TriadConfig

try:
    import triad_nsa
except ImportError:
    triad_nsa = None

BRANCHES = ("cmp", "sel", "win")
# What outputs call the cache: transformers renamed it in version 5.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
CHUNK_ELEMENTS = 2**25  # limit on the elements of the largest tensor of a chunk of queries


# ---- positions, and what is kept of earlier tokens ----


class Span:
    """Where the new tokens of a call stand in their texts.

    A token that the attention mask leaves out is treated as if it were absent, so that a padded text gives what it
    gives alone: its position is -1, it sees nothing, and nothing sees it.
    """

    def __init__(self, before, mask):
        """before [B]: number of tokens of each text so far. mask [B, T] bool: which new tokens count."""
        counted = mask.long().cumsum(1)
        self.lengths = before + counted[:, -1]  # [B], with the new tokens
        self.positions = (before[:, None] + counted - 1).masked_fill(~mask, -1)  # [B, T]
        facts = torch.stack([before.min(), self.lengths.min(), self.lengths.max(), mask.all()])
        self.first, self.shortest, self.longest, whole = facts.tolist()  # one copy from the device
        # All texts are equally long and nothing is left out, so that new tokens are appended as they are.
        self.uniform = bool(whole) and self.longest == self.first + mask.size(1) == self.shortest
        self.texts, self.columns = (None, None) if self.uniform else mask.nonzero(as_tuple=True)

    def bounds(self, begin, end):
        """(first, end) of the positions that the queries begin..end of this call can have."""
        return (self.first + begin, self.first + end) if self.uniform else (0, self.longest)


class History:
    """Keys or values by position: rows[b, p - begin] belongs to position p. Shorter texts end in zeros."""

    def __init__(self):
        self.rows, self.begin = None, 0

    def append(self, new, span):
        """new [B, T, H, D]. Returns self."""
        if span.uniform:
            self.rows = new if self.rows is None else torch.cat((self.rows, new), 1)
            return self
        old = new[:, :0] if self.rows is None else self.rows
        old = F.pad(old, (0, 0, 0, 0, 0, span.longest - self.begin - old.size(1)))
        at = span.positions[span.texts, span.columns] - self.begin
        self.rows = old.index_put((span.texts, at), new[span.texts, span.columns])
        return self

    def get(self, begin, end):
        """Returns the positions from begin to end as [B, H, N, D]."""
        return self.rows[:, begin - self.begin : end - self.begin].transpose(1, 2)

    def drop_before(self, position):
        if position > self.begin:
            self.rows, self.begin = self.rows[:, position - self.begin :], position

    def reorder(self, order):
        if self.rows is not None:
            self.rows = self.rows.index_select(0, order)


class LayerCache:
    """What one layer keeps: raw keys and values of the compressed branch only until their blocks are complete, its
    compressed blocks, all keys and values of the selected branch, the last ones of the window branch, and all keys of
    the index, and the queries that select, back to the first of the last `select_every` tokens."""

    def __init__(self):
        self.raw = {"k": History(), "v": History()}
        self.blocks = {"k": History(), "v": History()}
        self.sel = {"k": History(), "v": History()}
        self.win = {"k": History(), "v": History()}
        self.index = {"k": History()}
        self.selecting = {"q": History()}

    def reorder(self, order):
        for histories in (self.raw, self.blocks, self.sel, self.win, self.index, self.selecting):
            for history in histories.values():
                history.reorder(order)


class TriadCache:
    """The cache of `generate`. It can be continued and reordered (beam search), but not shortened."""

    is_compileable = False

    def __init__(self, n_layers):
        self.layers = [LayerCache() for _ in range(n_layers)]
        self.lengths = None  # [B]: tokens of each text so far
        self.seen = 0  # columns of the attention mask so far, which includes tokens that it leaves out

    def get_seq_length(self, layer_idx=0):
        return self.seen

    def reorder_cache(self, beam_idx):
        self.lengths = self.lengths.index_select(0, beam_idx)
        for layer in self.layers:
            layer.reorder(beam_idx)

    def crop(self, *args, **kwargs):
        raise NotImplementedError("a TriadCache cannot be shortened, so assisted generation is not supported")


# ---- rotation of queries and keys ----


def rope_frequencies(width, rope):
    """Returns the angle of each pair per position, f64 [width/2], and the factor on cos and sin."""
    theta, scaling = rope["theta"], rope["scaling"]
    frequency = theta ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
    if scaling == "none":
        return frequency / rope["scale"], 1.0
    factor, old_length = rope["factor"], rope["original_len"]
    if scaling == "llama3":  # high frequencies stay, low ones are divided by factor, with a ramp between them
        turns = old_length * frequency / (2 * math.pi)
        kept = ((turns - rope["low_freq"]) / (rope["high_freq"] - rope["low_freq"])).clamp(0, 1)
        return frequency * kept + frequency / factor * (1 - kept), 1.0

    def pair_that_turns(times):  # yarn: the (fractional) pair that turns so many times over the original length
        return width * math.log(old_length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(rope["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(rope["beta_slow"])), width - 1)
    pair = torch.arange(width // 2, dtype=torch.float64)
    divided = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequency * (1 - divided) + frequency / factor * divided, 0.1 * math.log(factor) + 1.0


class Rotation:
    """Tables of cos and sin by position, computed in f64 when they are first needed."""

    def __init__(self, config):
        self.config, self.tables = config, {}
        layers = [config.nsa_at(i) for i in range(config.num_hidden_layers)]
        self.widths = {config.head_dim} | {nsa["d_index"] for nsa in layers if nsa["selector"] == "index"}

    def at(self, positions, dtype):
        """positions [B, T]; returns by width of the heads cos and sin as [B, T, 1, D/2]."""
        return {width: self.of_width(width, positions, dtype) for width in self.widths}

    def of_width(self, width, positions, dtype):
        dtype = torch.promote_types(dtype, torch.float32)
        key, length = (width, positions.device, dtype), int(positions.max()) + 1
        if key not in self.tables or self.tables[key][0].size(0) < length:
            frequency, factor = rope_frequencies(width, self.config.rope)
            angles = torch.arange(max(2 * length, 1024), dtype=torch.float64, device="cpu")[:, None] * frequency
            self.tables[key] = tuple((factor * x).to(dtype).to(positions.device) for x in (angles.cos(), angles.sin()))
        return tuple(table[positions.clamp(min=0)][:, :, None] for table in self.tables[key])


def rotate(x, cos_sin):
    """x [B, T, heads, D]: rotates the pairs (j, j + D/2). cos_sin: as Rotation.at returns them; None: no rotation."""
    if cos_sin is None:
        return x
    cos, sin = cos_sin[x.size(-1)]
    u, v = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((u * cos - v * sin, v * cos + u * sin), -1).to(x.dtype)


# ---- attention ----


def attend(q, k, v, visible):
    """Softmax attention in f32 or wider. q [B, H, G, T, D]; k and v [B, H, N, D], or [B, H, T, N, D] if each query has
    keys of its own; visible [B or 1, H or 1, 1, T, N] bool. Returns the output [B, H, G, T, Dv] and the probabilities
    [B, H, G, T, N]. Where a query sees nothing, both are 0."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = "bhtnd" if k.dim() == 5 else "bhnd"
    scores = torch.einsum(f"bhgtd,{keys}->bhgtn", q.to(wide), k.to(wide)) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(~visible, torch.finfo(wide).min)
    p = torch.softmax(scores, -1).masked_fill(~visible, 0)
    return torch.einsum(f"bhgtn,{keys}->bhgtd", p, v.to(wide)), p


class Compression(nn.Module):
    """phi: maps each block of l tokens, one every d tokens, to one key or value."""

    def __init__(self, nsa, width):
        super().__init__()
        self.kind, self.l, self.d = nsa["phi"], nsa["l"], nsa["d"]
        if self.kind == "conv":  # a learned weight per channel and position in the block
            self.weight = nn.Parameter(torch.full((self.l, width), 1 / self.l))
        if self.kind == "mlp":  # the paper's map
            self.pos = nn.Parameter(torch.zeros(self.l, width))
            self.fc1 = nn.Linear(self.l * width, 2 * width, bias=False)
            self.fc2 = nn.Linear(2 * width, width, bias=False)

    def count(self, tokens):
        """Number of complete blocks in so many tokens."""
        return max(0, (tokens - self.l) // self.d + 1)

    def forward(self, tokens):
        """[B, N, H, D] -> [B, blocks, H, D]"""
        if tokens.size(1) < self.l:
            return tokens[:, :0]
        blocks = tokens.unfold(1, self.l, self.d).transpose(-1, -2)  # [B, blocks, H, l, D]
        if self.kind == "avg":
            return blocks.mean(-2)
        if self.kind == "conv":
            return (blocks * self.weight).sum(-2)
        return self.fc2(F.silu(self.fc1((blocks + self.pos).flatten(-2))))


def importance(p, blocks, nsa):
    """Scores of the selection blocks [B, H, T, blocks] from the probabilities of the compressed ones [B, H, G, T, Tc]."""
    l, d, l_sel = nsa["l"], nsa["d"], nsa["l_sel"]
    # Importance of block j: the sum over compressed blocks c of p[c] times the share of c that is in j. In units of d,
    # such a c begins at offset -(l/d - 1) .. l_sel/d - 1 from the beginning of j.
    before, inside = l // d - 1, l_sel // d
    begin = torch.arange(-before, inside, device=p.device) * d
    share = (torch.clamp(begin + l, max=l_sel) - torch.clamp(begin, min=0)).to(p.dtype) / l
    p = p.detach().sum(2)
    p = F.pad(p, (before, blocks * inside - p.size(-1)))  # negative: cuts blocks that nobody sees
    return (p.unfold(-1, before + inside, inside) * share).sum(-1)


def index_scores(q, k, t, blocks, l_sel):
    """The same by an index, whose best token is a block's score: q [B, T, H, D] and k [B, 1, N, D] of it."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bthd,bnd->bhtn", q.detach().to(wide), k[:, 0].detach().to(wide)) / math.sqrt(q.size(-1))
    n = torch.arange(k.size(2), device=q.device)
    scores = scores.masked_fill((n > t[..., None])[:, None], -math.inf)
    return F.pad(scores, (0, blocks * l_sel - k.size(2)), value=-math.inf).unflatten(-1, (blocks, l_sel)).amax(-1)


def select_blocks(score, t, nsa):
    """Chooses the selection blocks of each query, the same ones for all heads of a group. No gradient flows here.

    score [B, H, T, blocks]; t [B, T]: positions of the queries. Returns block numbers [B, H, T, n], ascending; the
    number `blocks` fills up lists of fewer than n.
    """
    blocks, l_sel = score.size(-1), nsa["l_sel"]
    j = torch.arange(blocks, device=score.device)
    t = t[:, None, :, None]
    current = t.div(l_sel, rounding_mode="floor")
    forced = (j <= current) & ((j < nsa["init_blocks"]) | (j > current - nsa["local_blocks"]))
    complete = (j + 1) * l_sel <= t + 1
    score = score.masked_fill(~complete, -math.inf).masked_fill(forced, math.inf)
    best = score.sort(dim=-1, descending=True, stable=True)  # stable: of equal scores the smaller number is first
    best_score, number = best.values[..., : nsa["n_sel"]], best.indices[..., : nsa["n_sel"]]
    return number.masked_fill(best_score == -math.inf, blocks).sort(-1).values


def attend_selected(q, chosen, k, v, t, l_sel):
    """Attention to the tokens of the chosen blocks [B, H, T, n]: q [B, H, G, T, D], k and v [B, N, H, D]."""
    token = (chosen[..., None] * l_sel + torch.arange(l_sel, device=q.device)).flatten(-2)
    inside = token.clamp(max=k.size(1) - 1)  # the current block may be incomplete, and `blocks` fills lists
    b = torch.arange(q.size(0), device=q.device)[:, None, None, None]
    h = torch.arange(q.size(1), device=q.device)[:, None, None]
    return attend(q, k[b, inside, h], v[b, inside, h], (token <= t[:, None, :, None])[:, :, None])[0]


class Gate(nn.Module):
    """One weight per branch, query and group, from the mean of the group's rotated queries."""

    def __init__(self, config):
        super().__init__()
        self.nsa = config.nsa
        self.fc1 = nn.Linear(config.head_dim, config.head_dim // 2)
        self.fc2 = nn.Linear(config.head_dim // 2, 3)
        self.fc2.init_scale = 0.0
        if self.nsa["gate_init"]:
            g = torch.tensor(self.nsa["gate_init"], dtype=torch.float64, device="cpu")
            z = g.logit() if self.nsa["gate"] == "sigmoid" else g.log()
            self.fc2.init_bias = (z * self.nsa["gate_temperature"]).tolist()

    def forward(self, q):
        """q [B, T, H, G, D] -> [B, T, H, 3]"""
        shape = q.shape[:3] + (3,)
        if self.nsa["force_branch"] != "none":
            return F.one_hot(torch.tensor(BRANCHES.index(self.nsa["force_branch"]), device=q.device), 3).expand(shape)
        if self.nsa["uniform_gate"]:
            return torch.full(shape, 1 / 3, device=q.device)
        z = self.fc2(F.silu(self.fc1(q.mean(3)))).to(torch.promote_types(q.dtype, torch.float32))
        z = z / self.nsa["gate_temperature"]
        g = torch.sigmoid(z) if self.nsa["gate"] == "sigmoid" else torch.softmax(z, -1)
        return g.detach() if self.nsa["stopgrad_gates"] else g


def residual_linear(config, width):
    """A linear layer whose output is added to the residual stream; its initial values are smaller."""
    linear = nn.Linear(width, config.hidden_size, bias=False)
    linear.init_scale = 1 / math.sqrt(2 * config.num_hidden_layers)
    return linear


class Attention(nn.Module):
    """Projections and rotation, which dense and sparse layers share; `attend_chunk` differs."""

    use_kernels = triad_nsa is not None

    def __init__(self, config, branches):
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.width_k, self.width_v = config.head_dim, config.v_head_dim

        def linear(out):
            return nn.Linear(config.hidden_size, out, bias=config.qkv_bias)

        self.q_proj = linear(self.heads * self.width_k)
        for branch in branches:
            setattr(self, f"k_{branch}_proj", linear(self.groups * self.width_k))
            setattr(self, f"v_{branch}_proj", linear(self.groups * self.width_v))
        self.qk_norm = config.qk_norm
        if self.qk_norm:
            for name in ("q", *(f"k_{branch}" for branch in branches)):
                setattr(self, f"{name}_norm", RMSNorm(self.width_k, config.rms_norm_eps))
        self.out_proj = residual_linear(config, self.heads * self.width_v)

    def add_index(self, config):
        """A small head of its own, with one key for all groups, that selects. It learns in Triad alone."""
        width = self.nsa["d_index"]
        self.index_q_proj = nn.Linear(config.hidden_size, self.groups * width, bias=False)
        self.index_k_proj = nn.Linear(config.hidden_size, width, bias=False)
        if self.qk_norm:
            self.index_q_norm = RMSNorm(width, config.rms_norm_eps)
            self.index_k_norm = RMSNorm(width, config.rms_norm_eps)

    def index_queries(self, x, span, cache, cos_sin):
        """Appends to the index's keys; returns its queries [B, T, H, D]."""
        width = self.index_k_proj.out_features
        cache.index["k"].append(self.rotated(x, "index_k", cos_sin, width), span)
        return self.rotated(x, "index_q", cos_sin, width)

    def rotated(self, x, name, cos_sin, width=None):
        y = getattr(self, f"{name}_proj")(x).unflatten(-1, (-1, width or self.width_k))
        return rotate(getattr(self, f"{name}_norm")(y) if self.qk_norm else y, cos_sin)

    def selecting(self, q, span, cache):
        """Queries [B, T, ..] and positions [B, T] that select for the tokens of this call: their own, or those of the first of
        every `select_every` tokens of a text."""
        every, kept = self.nsa["select_every"], cache.selecting["q"]
        if every == 1:
            return q, span.positions
        kept.append(q.flatten(2)[:, :, None], span)
        positions = span.positions.clamp(min=0).div(every, rounding_mode="floor") * every
        rows = (positions - kept.begin)[..., None].expand(-1, -1, kept.rows.size(-1))
        found = kept.rows[:, :, 0].gather(1, rows).view(q.shape)
        kept.drop_before(span.shortest // every * every)
        return found, positions.where(span.positions >= 0, span.positions)

    def kernels_fit(self, q, span):
        """Whether triad_nsa computes all queries at once: texts without padding that begin here."""
        return self.nsa["select_every"] == 1 and self.use_kernels and span.uniform and span.first == 0 and triad_nsa.supports(q)

    def lists_by_kernels(self, index_q, cache):
        nsa = self.nsa
        return triad_nsa.select(index_q, cache.index["k"].rows, block=nsa["l_sel"], selected=nsa["n_sel"],
                                init_blocks=nsa["init_blocks"], local_blocks=nsa["local_blocks"])

    def keys_and_values(self, x, branch, cos_sin):
        v = getattr(self, f"v_{branch}_proj")(x).unflatten(-1, (-1, self.width_v))
        return self.rotated(x, f"k_{branch}", cos_sin), v

    def in_chunks(self, q, span, chunk, attend_chunk, *more):
        """Calls attend_chunk(q, positions, bounds, *more) for chunks of queries; q [B, T, H, G, D]. When training, a chunk is
        computed again in backward, so that only one chunk's keys exist at a time."""
        T, outputs = q.size(1), []
        for begin in range(0, T, chunk):
            end = min(T, begin + chunk)
            inputs = (q[:, begin:end], span.positions[:, begin:end], span.bounds(begin, end),
                      *(x[:, begin:end] for x in more))
            again = torch.is_grad_enabled() and chunk < T
            outputs.append(checkpoint(attend_chunk, *inputs, use_reentrant=False) if again else attend_chunk(*inputs))
        return torch.cat(outputs, 1)

    def forward(self, x, span, cache, cos_sin):
        q = self.rotated(x, "q", cos_sin).unflatten(2, (self.groups, -1))  # [B, T, H, G, D]
        o = self.branches(x, q, span, cache, cos_sin)  # [B, T, H, G, Dv]
        return self.out_proj(o.flatten(2).to(x.dtype))


class DenseAttention(Attention):
    """Plain causal attention, with the names of the window branch."""

    window = None  # a query sees so many tokens up to itself; None: all

    def __init__(self, config):
        super().__init__(config, ("win",))

    def branches(self, x, q, span, cache, cos_sin):
        for name, new in zip("kv", self.keys_and_values(x, "win", cos_sin)):
            cache.win[name].append(new, span)
        # The closure below holds these tensors, which drop_before() replaces in the cache.
        (k, begin), (v, _) = ((cache.win[name].rows, cache.win[name].begin) for name in "kv")

        def attend_chunk(q, t, bounds):
            low, end = begin if self.window is None else max(bounds[0] - self.window + 1, begin), bounds[1]
            n = torch.arange(low, end, device=q.device)
            at = t[..., None]
            visible = n <= at if self.window is None else (n <= at) & (n > at - self.window)
            keys, values = (rows[:, low - begin : end - begin].transpose(1, 2) for rows in (k, v))
            o, _ = attend(q.permute(0, 2, 3, 1, 4), keys, values, visible[:, None, None])
            return o.permute(0, 3, 1, 2, 4)

        o = self.in_chunks(q, span, max(1, CHUNK_ELEMENTS // (q.size(0) * self.heads * span.longest)), attend_chunk)
        for name in "kv" if self.window else "":
            cache.win[name].drop_before(span.shortest - self.window + 1)
        return o


class WindowAttention(DenseAttention):
    """One softmax over a sliding window (nsa.branches win)."""

    def __init__(self, config, nsa):
        super().__init__(config)
        self.window = nsa["w"]


class SelectedAttention(Attention):
    """One softmax over the blocks that the index selects (nsa.branches sel), with the names of the window branch."""

    def __init__(self, config, nsa):
        super().__init__(config, ("win",))
        self.nsa = nsa
        self.add_index(config)

    def branches(self, x, q, span, cache, cos_sin):
        index_q = self.index_queries(x, span, cache, cos_sin)
        for name, new in zip("kv", self.keys_and_values(x, "win", cos_sin)):
            cache.sel[name].append(new, span)
        k, v, keys, l_sel = cache.sel["k"].rows, cache.sel["v"].rows, cache.index["k"], self.nsa["l_sel"]
        if self.kernels_fit(q, span):
            lists = self.lists_by_kernels(index_q, cache)
            return triad_nsa.block_sparse_attention(q.flatten(2, 3), k, v, lists, block=l_sel).unflatten(2, (self.groups, -1))

        index_q, selecting = self.selecting(index_q, span, cache)

        def attend_chunk(q, t, bounds, index_q, at):
            blocks = -(-bounds[1] // l_sel)
            chosen = select_blocks(index_scores(index_q, keys.get(0, bounds[1]), at, blocks, l_sel), at, self.nsa)
            return attend_selected(q.permute(0, 2, 3, 1, 4), chosen, k, v, t, l_sel).permute(0, 3, 1, 2, 4)

        per_query = self.groups * (self.nsa["n_sel"] * l_sel * (self.width_k + self.width_v) + span.longest)
        return self.in_chunks(q, span, max(1, CHUNK_ELEMENTS // (q.size(0) * per_query)), attend_chunk, index_q, selecting)


class NativeSparseAttention(Attention):
    """Three branches: compressed blocks of the whole past, a few selected blocks in full, a sliding window; the gate
    weighs their outputs."""

    def __init__(self, config, nsa):
        self.shared = nsa["shared_kv"]
        super().__init__(config, ("win",) if self.shared else BRANCHES)
        self.nsa = nsa
        self.phi_k = Compression(nsa, self.width_k)
        self.phi_v = Compression(nsa, self.width_v)
        self.gate = Gate(config)
        self.taught = self.nsa["selector"] == "index"
        if self.taught:
            self.add_index(config)

    def branches(self, x, q, span, cache, cos_sin):
        index_q = (self.index_queries(x, span, cache, cos_sin),) if self.taught else ()
        new = {b: self.keys_and_values(x, b, cos_sin) for b in (("win",) if self.shared else BRANCHES)}
        for name, i in (("k", 0), ("v", 1)):
            cache.raw[name].append(new["win" if self.shared else "cmp"][i], span)
            cache.sel[name].append(new["win" if self.shared else "sel"][i], span)
            cache.win[name].append(new["win"][i], span)
        k_cmp, v_cmp = self.compressed(cache, span, "k", self.phi_k), self.compressed(cache, span, "v", self.phi_v)
        if self.kernels_fit(q, span):
            lists = self.lists_by_kernels(*index_q, cache) if self.taught else None
            o = self.attend_by_kernels(q, new, k_cmp.transpose(1, 2), v_cmp.transpose(1, 2), lists)
            for name in "kv":
                cache.win[name].drop_before(span.shortest - self.nsa["w"] + 1)
            return o
        k_sel, v_sel = cache.sel["k"].rows, cache.sel["v"].rows
        # The closures below hold these tensors, which drop_before() replaces in the cache.
        win = {name: (cache.win[name].rows, cache.win[name].begin) for name in "kv"}

        keys = cache.index["k"]
        selecting, at = self.selecting(*index_q or (q,), span, cache)

        def attend_chunk(q, t, bounds, selecting, at):
            index = (selecting, keys.get(0, bounds[1])) if self.taught else None
            return self.attend_chunk(q, t, bounds, (k_cmp, v_cmp), (k_sel, v_sel), win, index, selecting, at)

        per_query = self.groups * self.nsa["n_sel"] * self.nsa["l_sel"] * (self.width_k + self.width_v)
        per_query += self.heads * min(span.longest, self.nsa["w"]) + self.taught * self.groups * span.longest
        o = self.in_chunks(q, span, max(1, CHUNK_ELEMENTS // (q.size(0) * per_query)), attend_chunk, selecting, at)
        for name in "kv":
            cache.win[name].drop_before(span.shortest - self.nsa["w"] + 1)
        return o

    def attend_by_kernels(self, q, new, k_cmp, v_cmp, lists):
        """All queries: q [B, T, H, G, D], k_cmp and v_cmp [B, Tc, H, D]. lists: of the index, if it selects."""
        nsa = self.nsa
        gate = self.gate(q).to(torch.promote_types(q.dtype, torch.float32))
        k, v = (new["win"][i] if self.shared else [new[b][i] for b in BRANCHES] for i in (0, 1))
        o = triad_nsa.attention(q.flatten(2, 3), k, v, gate, compress=(nsa["l"], nsa["d"]), block=nsa["l_sel"],
                                selected=nsa["n_sel"], window=nsa["w"], init_blocks=nsa["init_blocks"],
                                local_blocks=nsa["local_blocks"], k_cmp=k_cmp, v_cmp=v_cmp,
                                **({} if lists is None else {"lists": lists}))
        return o.unflatten(2, (self.groups, -1))

    def compressed(self, cache, span, name, phi):
        """Returns all blocks [B, H, Tc, D]. A block that is complete in every text is kept, and its raw tokens go."""
        raw, kept = cache.raw[name], cache.blocks[name]
        blocks = phi(raw.rows)
        if kept.rows is not None:
            blocks = torch.cat((kept.rows, blocks), 1)
        done = phi.count(span.shortest)
        kept.rows = blocks[:, :done]
        raw.drop_before(done * phi.d)
        return blocks.transpose(1, 2)

    def attend_chunk(self, q, t, bounds, cmp, sel, win, index, selecting, select_at):
        """The three branches and their gated sum for one chunk: q [B, T, H, G, D] -> [B, T, H, G, Dv]. index: queries
        and keys of the index, if it selects. selecting, select_at: queries and positions that select."""
        nsa, (first, end) = self.nsa, bounds
        gates = self.gate(q).permute(3, 0, 2, 1)[:, :, :, None, :, None]  # [3, B, H, 1, T, 1]
        q = q.permute(0, 2, 3, 1, 4)  # [B, H, G, T, D]
        at = t[:, None, None, :, None]  # [B, 1, 1, T, 1]

        Tc = self.phi_k.count(end)
        c = torch.arange(Tc, device=q.device)
        o_cmp, p = attend(q, cmp[0][:, :, :Tc], cmp[1][:, :, :Tc], c * nsa["d"] + nsa["l"] <= at + 1)
        if nsa["select_every"] > 1 and not index:
            seen = c * nsa["d"] + nsa["l"] <= select_at[:, None, None, :, None] + 1
            _, p = attend(selecting.detach().permute(0, 2, 3, 1, 4), cmp[0][:, :, :Tc].detach(), cmp[1][:, :, :Tc].detach(), seen)

        blocks = -(-end // nsa["l_sel"])
        score = index_scores(*index, select_at, blocks, nsa["l_sel"]) if index else importance(p, blocks, nsa)
        o_sel = attend_selected(q, select_blocks(score, select_at, nsa), *sel, t, nsa["l_sel"])

        low = max(first - nsa["w"] + 1, 0)
        k_win, v_win = (rows[:, max(low - begin, 0) : end - begin].transpose(1, 2) for rows, begin in win.values())
        n = torch.arange(end - k_win.size(2), end, device=q.device)
        o_win, _ = attend(q, k_win, v_win, (n <= at) & (n > at - nsa["w"]))

        o = gates[0] * o_cmp + gates[1] * o_sel + gates[2] * o_win
        return o.permute(0, 3, 1, 2, 4)


# ---- the model around it ----


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.to(wide.dtype)).to(x.dtype)


class SiluMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.fc2 = residual_linear(config, config.intermediate_size)

    def forward(self, x):
        return self.fc2(F.silu(self.fc1(x)))


class SwigluMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = residual_linear(config, config.intermediate_size)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TriadBlock(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        nsa = config.nsa_at(layer)
        sparse = {"sel": SelectedAttention, "win": WindowAttention}.get(nsa["branches"], NativeSparseAttention)
        self.attn = DenseAttention(config) if layer in config.dense_layers else sparse(config, nsa)
        self.rotates = layer not in config.nope_layers
        self.norm2 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwigluMLP(config) if config.mlp == "swiglu" else SiluMLP(config)

    def forward(self, x, span, cache, cos_sin):
        x = x + self.attn(self.norm1(x), span, cache, cos_sin if self.rotates else None)
        return x + self.mlp(self.norm2(x))


class TriadPreTrainedModel(PreTrainedModel):
    config_class = TriadConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TriadBlock"]

    @torch.no_grad()
    def _init_weights(self, module):
        """Fresh weights as `triad init` draws them: N(0, std), smaller where a sum is added to the residual stream."""
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std * getattr(module, "init_scale", 1.0))
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
                module.bias += torch.tensor(getattr(module, "init_bias", 0.0), device=module.bias.device)
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Compression):
            if module.kind == "conv":
                nn.init.constant_(module.weight, 1 / module.l)
            if module.kind == "mlp":
                nn.init.normal_(module.pos, std=std)


class TriadModel(TriadPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(TriadBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotation = Rotation(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def set_input_embeddings(self, value):
        self.embed = value

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, inputs_embeds=None, use_cache=None,
                output_hidden_states=None, return_dict=None, cache=None, **kwargs):
        """attention_mask [B, tokens so far and new ones], or of the new ones only: 0 leaves a token out."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("either input_ids or inputs_embeds is needed, and not both")
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        cache = past_key_values if cache is None else cache
        if cache is None or (not isinstance(cache, TriadCache) and cache.get_seq_length() == 0):
            cache = TriadCache(self.config.num_hidden_layers)
        if not isinstance(cache, TriadCache):
            raise ValueError(f"the cache is a {type(cache).__name__}: a TriadCache is needed, with three branches")
        span = self.span_of(x, attention_mask, cache, kwargs.get("position_ids"))
        cos_sin = self.rotation.at(span.positions, x.dtype)
        hidden = []
        for block, layer_cache in zip(self.blocks, cache.layers):
            hidden.append(x)
            if self.gradient_checkpointing and self.training:
                # Backward runs the block again, so its cache has to be a fresh one each time.
                if cache.seen:
                    raise ValueError("gradient checkpointing cannot continue a cache")
                x = self._gradient_checkpointing_func(lambda y, b=block: b(y, span, LayerCache(), cos_sin), x)
            else:
                x = block(x, span, layer_cache, cos_sin)
        cache.lengths, cache.seen = span.lengths, cache.seen + x.size(1)
        x = self.norm_f(x)
        kept = cache if use_cache and not (self.gradient_checkpointing and self.training) else None
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = BaseModelOutputWithPast(last_hidden_state=x, hidden_states=(*hidden, x) if wanted else None,
                                         **{CACHE: kept})
        return output if return_dict is not False else output.to_tuple()

    @staticmethod
    def span_of(x, attention_mask, cache, position_ids):
        B, T = x.shape[:2]
        before = torch.zeros(B, dtype=torch.long, device=x.device) if cache.lengths is None else cache.lengths
        if attention_mask is None:
            mask = torch.ones(B, T, dtype=torch.bool, device=x.device)
        else:
            if attention_mask.dim() != 2 or attention_mask.size(1) not in (T, cache.seen + T):
                raise ValueError(f"attention_mask is {list(attention_mask.shape)}: [{B}, {cache.seen + T}] is needed, "
                                 "1 for each token that counts; NSA makes its own causal masks")
            mask = attention_mask[:, -T:].to(x.device) != 0
        span = Span(before, mask)
        if position_ids is not None:
            given = position_ids.expand(B, T).to(x.device)
            if not torch.equal(given[mask], span.positions[mask]):
                raise ValueError("position_ids other than 0, 1, 2, ... are not supported, nor documents packed by them")
        return span


class TriadForCausalLM(TriadPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # older versions read the keys only

    def __init__(self, config):
        super().__init__(config)
        self.model = TriadModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed

    def set_input_embeddings(self, value):
        self.model.embed = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, inputs_embeds=None, labels=None,
                use_cache=None, output_hidden_states=None, return_dict=None, logits_to_keep=0, cache=None, **kwargs):
        """labels [B, T]: usually input_ids; they are shifted here, and -100 has no loss. logits_to_keep: logits of that
        many last tokens only; 0: of all."""
        items = kwargs.pop("num_items_in_batch", None)  # the Trainer's number of labels in all micro-batches
        out = self.model(input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, output_hidden_states,
                         True, cache, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        kept = kept if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            wide = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
            targets = labels[:, 1:].flatten().to(wide.device)
            loss = F.cross_entropy(wide.flatten(0, 1), targets, reduction="sum")
            # At least 1: rows without a label have the loss 0, as in `triad train`.
            items = (targets != -100).sum() if items is None else torch.as_tensor(items, device=wide.device)
            loss = loss / items.clamp(min=1)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=out.hidden_states,
                                        **{CACHE: out.get(CACHE)})
        return output if return_dict is not False else output.to_tuple()

    # Generation: no DynamicCache, because a TriadCache is made here.
    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, cache=None,
                                      use_cache=True, **kwargs):
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = TriadCache(self.config.num_hidden_layers)
        new = input_ids[:, cache.get_seq_length() :] if use_cache else input_ids
        inputs = {"input_ids": new, "attention_mask": attention_mask, "past_key_values": cache if use_cache else None,
                  "use_cache": use_cache}
        for key in ("logits_to_keep", "output_hidden_states", "return_dict"):
            if key in kwargs:
                inputs[key] = kwargs[key]
        return inputs
