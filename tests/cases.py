"""One list of named cases, for tests, lowering facts and benchmarks.

A case is a problem with its sizes and options, and knows how to draw its inputs. `SMALL` is sized for interpret mode
and for float64 loops, and combines the features; `LARGE` is the same kind of thing at real sizes, for a GPU;
`BENCHMARK` is what `benchmarks/run.py` times. Sizes are chosen so that small tiles (16 to 64) give several blocks,
ragged edges and empty tiles.
"""

import dataclasses
from typing import Any

import ml_dtypes  # noqa: F401  (so that NumPy knows bfloat16)
import numpy as np

from tests import recipes
from tests.oracle import ScoreFunction


def keep_mask(key, rate: float, B: int, N: int, T: int, S: int) -> np.ndarray:
    """Which probabilities dropout keeps, bool [B, N, T, S]: by the library's own function, of all indices at once."""
    import jax.numpy as jnp  # here, so that reading cases does not import jax

    from pallas_flash.dropout import Dropout
    from pallas_flash.tile import Tile

    return np.asarray(Dropout.of(key, rate, B, N).sieve(Tile.at(0, T, 0, S))(jnp.ones((B, N, T, S), bool)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem in jax.nn's letters; `S`, `K` and `Hv` default to `T`, `N` and `H`. Lengths are per batch entry.

    `mask`, `segments`, `modifiers`, `bias`, `alibi` and `scores` name recipes of recipes.py.
    """

    name: str
    B: int = 2
    T: int = 64
    S: int = -1
    N: int = 2
    K: int = -1
    H: int = 32
    Hv: int = -1
    dtype: str = "float32"
    scale: float | None = None
    is_causal: bool = False
    local_window_size: int | tuple[int | None, int | None] | None = None
    query_offset: int | tuple[int, ...] = 0
    query_seq_lengths: tuple[int, ...] | None = None
    key_value_seq_lengths: tuple[int, ...] | None = None
    magnitude: float = 1.0
    mask: str | None = None
    segments: str | None = None
    modifiers: tuple[str, ...] = ()
    bias: str | None = None
    bias_dtype: str = "float32"
    alibi: str | None = None
    logits_scale: bool = False
    soft_cap: float | None = None
    scores: tuple[str, ...] = ()
    sinks: bool = False
    dropout: float = 0.0

    def __post_init__(self):
        for field, default in (("S", self.T), ("K", self.N), ("Hv", self.H)):
            if getattr(self, field) < 0:
                object.__setattr__(self, field, default)

    def __str__(self) -> str:
        return self.name

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        """float32 standard normal query (times `magnitude`), key, value and the cotangents of output and residual."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        shapes = {
            "query": (self.B, self.T, self.N, self.H),
            "key": (self.B, self.S, self.K, self.H),
            "value": (self.B, self.S, self.K, self.Hv),
            "d_out": (self.B, self.T, self.N, self.Hv),
            "d_residual": (self.B, self.T, self.N),
        }
        drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        drawn["query"] *= self.magnitude
        return drawn

    def options(self, for_oracle: bool = False) -> dict[str, Any]:
        """The keywords of `flash_attention` that differ from their defaults; or those of `oracle.attend`.

        What is an array is one of NumPy.
        """
        names = (
            "scale",
            "is_causal",
            "local_window_size",
            "query_offset",
            "query_seq_lengths",
            "key_value_seq_lengths",
        )
        given = {n: v for n in names if (v := getattr(self, n)) != Case.__dataclass_fields__[n].default}
        per_batch = {"query_offset", "query_seq_lengths", "key_value_seq_lengths"}
        given = {n: np.asarray(v, np.int32) if n in per_batch and isinstance(v, tuple) else v for n, v in given.items()}
        if self.soft_cap is not None:
            given["logits_soft_cap"] = self.soft_cap
        given |= self._read(for_oracle) | self._dropped(for_oracle)
        return given | self.scored(self.differentiable(), for_oracle)

    def differentiable(self) -> dict[str, np.ndarray]:
        """The arrays, beside query, key and value, by which there is a gradient: bias, slopes, sinks, operands."""
        found = {}
        if self.bias is not None:
            bias = recipes.BIASES[self.bias](self._draw("bias"), self.B, self.N, self.T, self.S)
            found["bias"] = bias.astype(self.bias_dtype)
        if self.logits_scale:
            found["logits_scale"] = recipes.sinks(self._draw("logits_scale"), self.N)
        if self.alibi is not None:
            found["alibi_slopes"] = recipes.SLOPES[self.alibi](self._draw("alibi"), self.B, self.N)
        if self.sinks:
            found["sinks"] = recipes.sinks(self._draw("sinks"), self.N) * self.magnitude
        for name in self.scores:
            operands = enumerate(self._operands(name))
            found |= {f"{name} {i}": x for i, x in operands if np.issubdtype(x.dtype, np.floating)}
        return found

    def scored(self, arrays: dict[str, Any], for_oracle: bool = False) -> dict[str, Any]:
        """The keywords that these arrays, named as those of `differentiable`, or others in their place, go into."""
        found = {name: x for name, x in arrays.items() if name in ("logits_scale", "bias", "alibi_slopes", "sinks")}
        if not self.scores:
            return found
        functions = []
        for name in self.scores:
            modifier = recipes.SCORES[name]
            operands = tuple(arrays.get(f"{name} {i}", x) for i, x in enumerate(self._operands(name)))
            if for_oracle:
                functions.append(ScoreFunction(modifier.formula, operands, modifier.axes))
            else:
                from pallas_flash import ScoreModifier  # here, so that reading cases does not import jax

                made = ScoreModifier(modifier.function, operands, modifier.axes)
                functions.append(made if operands else modifier.function)
        return found | {"score_functions" if for_oracle else "score_modifiers": tuple(functions)}

    def _operands(self, name: str) -> tuple[np.ndarray, ...]:
        return recipes.SCORES[name].operands(self._draw(name), self.B, self.N, self.T, self.S)

    def _dropped(self, for_oracle: bool) -> dict[str, Any]:
        """The options of dropout."""
        if not self.dropout:
            return {}
        import jax  # here, so that reading cases does not

        key = jax.random.key(len(self.name))
        if not for_oracle:
            return {"dropout_rate": self.dropout, "dropout_key": key}
        keep = keep_mask(key, self.dropout, self.B, self.N, self.T, self.S)
        return {"dropout_rate": self.dropout, "dropout_keep": keep}

    def _read(self, for_oracle: bool) -> dict[str, Any]:
        """The options that are arrays or functions."""
        found: dict[str, Any] = {}
        if self.mask is not None:
            found["mask"] = recipes.MASKS[self.mask](self._draw("mask"), self.B, self.N, self.T, self.S)
        if self.segments is not None:
            ids = recipes.SEGMENTS[self.segments](self._draw("segments"), self.B, self.T, self.S)
            found |= zip(("query_segment_ids", "key_value_segment_ids"), ids, strict=True)
        if self.modifiers:
            functions = tuple(self._modifier(name, for_oracle) for name in self.modifiers)
            found["mask_functions" if for_oracle else "mask_modifiers"] = functions
        return found

    def _modifier(self, name: str, for_oracle: bool) -> Any:
        modifier = recipes.MODIFIERS[name]
        operands = modifier.operands(self._draw(name), self.B, self.N, self.T, self.S)
        if for_oracle:
            return lambda b, n, t, s: modifier.formula(b, n, t, s, *operands)
        from pallas_flash import MaskModifier  # here, so that reading cases does not import jax

        return MaskModifier(modifier.function, operands, modifier.axes) if operands else modifier.function

    def _draw(self, what: str) -> np.random.Generator:
        return np.random.default_rng([*what.encode(), *self.name.encode()])


_SCORES: dict[str, Any] = {
    "logits_scale": True,
    "bias": "of_entries",
    "alibi": "entries",
    "soft_cap": 3.0,
    "scores": ("head_gain", "key_weight", "placed"),
    "sinks": True,
    "dropout": 0.25,
}
"""Every feature of scores."""

SMALL = [
    Case("plain"),
    Case("causal", is_causal=True),
    Case("causal_ragged", T=77, N=2, K=1, is_causal=True),
    Case("cross", T=33, S=90, H=16),
    Case("cross_causal_short_keys", T=70, S=20, H=16, is_causal=True),
    Case("bottom_right", T=20, S=70, H=16, is_causal=True, query_offset=50),
    Case("bottom_right_empty_rows", T=70, S=37, H=16, is_causal=True, query_offset=-33),
    Case("offset_per_batch", T=24, S=80, H=16, is_causal=True, query_offset=(56, 7)),
    Case("window", T=90, local_window_size=(20, 11)),
    Case("window_int", T=70, H=16, local_window_size=9),
    Case("window_causal", T=100, is_causal=True, local_window_size=(17, 40), N=4, K=2),
    Case("window_left_open", T=64, S=80, local_window_size=(None, 5)),
    Case("window_offset", T=40, S=100, local_window_size=(15, 2), query_offset=(60, 0)),
    Case("window_past_keys", T=90, S=32, H=16, local_window_size=9),
    Case("lengths", T=80, S=70, query_seq_lengths=(80, 33), key_value_seq_lengths=(19, 70)),
    Case("lengths_empty", T=40, S=50, query_seq_lengths=(0, 25), key_value_seq_lengths=(50, 0)),
    Case(
        "lengths_causal_gqa", T=75, N=6, K=3, is_causal=True, key_value_seq_lengths=(75, 30), query_seq_lengths=(60, 75)
    ),
    Case("lengths_window", T=90, local_window_size=(13, 13), key_value_seq_lengths=(41, 90), N=4, K=1),
    Case(
        "everything",
        T=61,
        S=93,
        N=6,
        K=2,
        H=24,
        Hv=40,
        scale=0.3,
        is_causal=True,
        local_window_size=(25, 3),
        query_offset=(30, 10),
        query_seq_lengths=(50, 61),
        key_value_seq_lengths=(93, 44),
    ),
    Case("mqa", T=50, N=5, K=1, H=16, is_causal=True),
    Case("odd_group", T=40, N=10, K=2, H=8, is_causal=True),
    Case("value_wider", T=48, H=16, Hv=32, is_causal=True),
    Case("value_narrower", T=48, H=48, Hv=32),
    Case("head_dim_8", T=40, H=8),
    Case("head_dim_40", T=40, H=40, is_causal=True),
    Case("head_dim_80", T=33, H=80, N=1),
    Case("head_dim_96", T=33, H=96, N=1, is_causal=True),
    Case("one_query", T=1, S=97, H=16, N=4, K=2),
    Case("one_key", T=5, S=1, H=16),
    Case("one_token", T=1, H=16),
    Case("negative_scale", T=40, H=16, scale=-0.5, is_causal=True),
    Case("zero_scale", T=40, H=16, scale=0.0, is_causal=True),
    Case("large_logits", T=64, magnitude=40.0, is_causal=True),
    Case("bf16", T=77, N=4, K=2, dtype="bfloat16", is_causal=True),
    Case(
        "bf16_lengths_window", T=90, S=70, dtype="bfloat16", local_window_size=(20, 20), key_value_seq_lengths=(70, 31)
    ),
    Case("bf16_large_logits", T=64, dtype="bfloat16", magnitude=40.0),
    Case("fp16", T=77, H=40, dtype="float16", local_window_size=(30, 0)),
    Case("mask_random", T=70, S=50, N=4, K=2, H=16, mask="random"),
    Case("mask_sparse", T=100, S=90, H=16, mask="sparse"),
    Case("mask_padding", T=50, S=77, H=16, mask="padding"),
    Case("mask_rows_window", T=77, H=16, mask="rows", local_window_size=(20, 5)),
    Case("mask_tril", T=70, H=16, mask="tril"),
    Case("mask_block_holes", T=100, S=128, H=16, mask="block_holes"),
    Case("mask_per_head_gqa_causal", T=66, N=6, K=2, H=16, Hv=24, mask="per_head", is_causal=True),
    Case("mask_heads", T=40, N=4, K=2, H=16, mask="heads"),
    Case("mask_empty_rows", T=70, N=4, K=1, H=16, mask="empty_rows", key_value_seq_lengths=(70, 40)),
    Case("mask_one_entry_empty", T=40, H=16, mask="one_entry_empty", is_causal=True),
    Case("mask_all_true_bf16", T=64, S=96, dtype="bfloat16", mask="all_true", is_causal=True, query_offset=32),
    Case("mask_all_false", T=40, S=33, H=16, mask="all_false"),
    Case("segments_sorted_causal", T=90, N=4, K=2, H=16, segments="sorted", is_causal=True),
    Case("segments_sorted_cross", T=50, S=90, H=16, Hv=8, segments="sorted"),
    Case("segments_unsorted", T=70, H=16, segments="unsorted"),
    Case("segments_repeated_window", T=100, H=16, segments="repeated", local_window_size=30),
    Case("segments_padded", T=80, N=4, K=2, H=16, segments="padded"),
    Case("segments_padded_ragged_bf16", T=75, S=58, dtype="bfloat16", segments="padded", is_causal=True),
    Case("segments_other_ids", T=64, S=90, H=16, segments="cross", query_seq_lengths=(64, 30)),
    Case("segments_blocks", T=96, H=16, segments="blocks", is_causal=True, query_offset=(3, -5)),
    Case("segments_all_padding", T=40, H=16, segments="all_padding"),
    Case("modifier_prefix_lm", T=60, H=16, modifiers=("prefix_lm",)),
    Case("modifier_place", B=3, T=45, S=37, N=4, K=2, H=16, modifiers=("by_place",)),
    Case("modifier_head", T=70, N=4, K=2, H=16, modifiers=("by_head",), is_causal=True),
    Case("modifier_documents_bf16", T=90, H=32, dtype="bfloat16", modifiers=("document_window",)),
    Case("modifier_operands", T=50, S=41, N=3, H=16, modifiers=("important", "table")),
    Case("modifiers_segments", T=80, N=2, K=1, H=16, segments="padded", modifiers=("dilated", "prefix_lm")),
    Case(
        "masks_of_every_kind",
        T=93,
        S=77,
        N=6,
        K=3,
        H=24,
        Hv=40,
        scale=0.3,
        local_window_size=(60, 50),
        query_offset=(3, -4),
        query_seq_lengths=(90, 93),
        key_value_seq_lengths=(77, 60),
        mask="per_head",
        segments="repeated",
        modifiers=("by_place", "important"),
    ),
    Case(
        "masks_of_every_kind_bf16",
        T=64,
        S=96,
        N=4,
        K=2,
        dtype="bfloat16",
        is_causal=True,
        query_offset=32,
        mask="padding",
        segments="padded",
        modifiers=("by_head",),
    ),
    Case("bias_full", T=70, S=50, N=4, K=2, H=16, bias="full"),
    Case("bias_shared_causal_bf16_bias", T=45, H=16, bias="shared", bias_dtype="bfloat16", is_causal=True),
    Case("bias_of_heads_window", T=50, N=4, K=2, H=16, bias="of_heads", local_window_size=(20, 5)),
    Case("bias_of_keys_lengths", T=40, S=50, H=16, bias="of_keys", key_value_seq_lengths=(50, 0)),
    Case("bias_of_rows_cap", T=40, S=37, H=16, bias="of_rows", soft_cap=1.5),
    Case("bias_minus_infinity", T=50, S=70, H=16, bias="minus_infinity"),
    Case("bias_sunk", T=50, S=70, H=16, bias="sunk", is_causal=True, query_offset=20),
    Case("bias_minus_infinity_cap_sinks", T=40, S=37, N=4, K=2, H=16, bias="minus_infinity", soft_cap=2.0, sinks=True),
    Case("alibi_causal", T=70, N=4, K=2, H=16, alibi="heads", is_causal=True),
    Case("alibi_of_entries_offset", T=24, S=50, H=16, alibi="entries", is_causal=True, query_offset=(26, 7)),
    Case("alibi_offset_bf16", T=33, S=50, H=16, dtype="bfloat16", alibi="heads", query_offset=17),
    Case("logits_scale", T=64, N=4, K=2, H=16, logits_scale=True, bias="of_heads", is_causal=True),
    Case("logits_scale_bf16", T=50, N=2, H=16, dtype="bfloat16", logits_scale=True),
    Case("soft_cap", T=64, H=16, soft_cap=1.2),
    Case("soft_cap_large_logits_bf16", T=64, dtype="bfloat16", magnitude=20.0, soft_cap=30.0, is_causal=True),
    Case("sinks", T=50, N=4, K=2, H=16, sinks=True),
    Case("sinks_empty_rows_fp16", T=70, S=37, H=16, dtype="float16", sinks=True, is_causal=True, query_offset=-33),
    Case("sinks_window_large_logits", T=50, H=16, sinks=True, magnitude=20.0, local_window_size=(12, 0)),
    Case("score_functions", B=3, T=40, S=37, N=4, K=2, H=16, scores=("relative", "placed", "bent")),
    Case("score_of_keys", T=50, H=16, scores=("key_weight",), mask="random"),
    Case("score_of_heads_causal", T=45, N=4, K=2, H=16, scores=("head_gain",), is_causal=True),
    Case("score_of_cells_bf16", T=40, S=50, N=4, K=2, H=16, dtype="bfloat16", scores=("gated",)),
    Case("score_of_integers_segments", T=50, H=16, scores=("buckets", "bent"), segments="padded"),
    Case("score_of_booleans", T=40, S=50, N=4, K=2, H=16, scores=("bent", "allowed_only"), mask="empty_rows"),
    Case("dropout", T=50, S=70, N=4, K=2, H=16, dropout=0.2),
    Case("dropout_causal_bf16", B=3, T=45, H=32, dtype="bfloat16", dropout=0.5, is_causal=True),
    Case("dropout_lengths_empty", T=40, S=50, H=16, dropout=0.1, query_seq_lengths=(0, 25), sinks=True),
    Case(
        "scores_of_every_kind",
        T=43,
        S=61,
        N=6,
        K=3,
        H=24,
        Hv=40,
        scale=0.3,
        local_window_size=(40, 30),
        query_offset=(3, -4),
        key_value_seq_lengths=(61, 47),
        mask="per_head",
        segments="repeated",
        modifiers=("by_place",),
        **_SCORES,
    ),
    Case(
        "scores_of_every_kind_bf16",
        T=40,
        S=56,
        N=4,
        K=2,
        dtype="bfloat16",
        is_causal=True,
        query_offset=16,
        mask="padding",
        bias="of_heads",
        bias_dtype="bfloat16",
        alibi="heads",
        soft_cap=5.0,
        scores=("gated", "relative"),
        sinks=True,
        dropout=0.1,
    ),
]

_EVERYTHING = Case(
    "everything_bf16",
    T=610,
    S=930,
    N=6,
    K=2,
    H=96,
    Hv=128,
    dtype="bfloat16",
    scale=0.2,
    is_causal=True,
    local_window_size=(250, 30),
    query_offset=(300, 100),
    query_seq_lengths=(500, 610),
    key_value_seq_lengths=(930, 440),
)

LARGE = [
    *(
        Case(f"h{H}_{mask}_{dtype}", B=2, T=1024, N=8, K=K, H=H, dtype=dtype, is_causal=mask == "causal")
        for H, K in ((64, 8), (128, 2), (256, 4))
        for mask in ("full", "causal")
        for dtype in ("bfloat16", "float16")
    ),
    *(
        Case(f"h{H}_ragged_causal_bf16", B=2, T=301, N=4, K=2, H=H, dtype="bfloat16", is_causal=True)
        for H in (8, 16, 24, 40, 72, 80, 96, 160, 192)
    ),
    Case("h192_v128_bf16", T=513, N=4, H=192, Hv=128, dtype="bfloat16", is_causal=True),
    Case("h64_v128_bf16", T=513, N=4, H=64, Hv=128, dtype="bfloat16"),
    Case("fp32_causal", T=515, N=8, K=2, H=64, is_causal=True),
    Case("fp32_ragged", T=1023, S=777, N=3, H=128),
    Case("fp32_h256", T=300, N=2, H=256, is_causal=True),
    Case("heads_24_fp32", B=1, T=4092, N=24, H=32),
    Case("heads_40_over_1", T=200, N=40, K=1, H=64, dtype="bfloat16", is_causal=True),
    Case("heads_17_over_1", T=200, N=17, K=1, H=64, dtype="bfloat16"),
    # So many sequences that a thread block of Mosaic's takes several heads of a group, or all of it.
    Case("groups_divided_bf16", B=64, T=130, N=8, K=2, H=64, dtype="bfloat16", is_causal=True),
    Case(
        "groups_divided_masked_bf16",
        B=64,
        T=130,
        N=8,
        K=2,
        H=64,
        dtype="bfloat16",
        is_causal=True,
        mask="per_head",
        segments="sorted",
        alibi="heads",
        dropout=0.2,
    ),
    Case("groups_divided_h256_bf16", B=64, T=130, N=4, K=1, H=256, dtype="bfloat16"),
    Case("groups_whole_bf16", B=64, T=130, N=8, K=2, H=128, dtype="bfloat16"),
    Case("window_bf16", T=2000, N=4, H=128, dtype="bfloat16", local_window_size=(255, 0)),
    Case("window_past_keys_bf16", T=512, S=128, N=2, H=64, dtype="bfloat16", local_window_size=16),
    Case("window_both_bf16", T=2000, N=4, K=1, H=64, dtype="bfloat16", local_window_size=(100, 70)),
    Case(
        "lengths_bf16",
        T=1500,
        S=1100,
        N=4,
        K=2,
        H=128,
        dtype="bfloat16",
        query_seq_lengths=(1500, 700),
        key_value_seq_lengths=(333, 1100),
    ),
    _EVERYTHING,
    Case("bottom_right_bf16", T=100, S=4000, N=4, H=128, dtype="bfloat16", is_causal=True, query_offset=3900),
    Case("empty_rows_bf16", T=1000, S=400, N=4, H=64, dtype="bfloat16", is_causal=True, query_offset=-600),
    Case("large_logits_bf16", T=512, N=4, H=64, dtype="bfloat16", magnitude=40.0, is_causal=True),
    Case("large_logits_fp32", T=512, N=4, H=64, magnitude=40.0, is_causal=True),
    Case("mask_random_bf16", T=777, S=600, N=4, K=2, H=64, dtype="bfloat16", mask="random"),
    Case("mask_padding_bf16", T=1024, N=8, K=2, H=128, dtype="bfloat16", mask="padding", is_causal=True),
    Case("mask_block_holes_fp16", B=1, T=1000, N=4, H=96, dtype="float16", mask="block_holes"),
    Case("mask_per_head_h256_bf16", T=515, N=4, K=2, H=256, dtype="bfloat16", mask="per_head", is_causal=True),
    Case("mask_empty_rows_fp32", T=700, S=520, N=4, K=1, H=64, mask="empty_rows"),
    Case("segments_sorted_bf16", T=2000, N=4, K=2, H=128, dtype="bfloat16", segments="sorted", is_causal=True),
    Case("segments_unsorted_fp16", T=1024, N=4, H=64, dtype="float16", segments="unsorted"),
    Case("segments_padded_h96_bf16", T=1031, S=900, N=8, K=2, H=96, Hv=128, dtype="bfloat16", segments="padded"),
    Case("segments_other_ids_fp32", T=900, S=1111, N=4, H=64, segments="cross"),
    Case(
        "segments_window_h256_bf16",
        T=1100,
        N=4,
        K=1,
        H=256,
        dtype="bfloat16",
        segments="repeated",
        local_window_size=(200, 100),
    ),
    Case("modifier_prefix_lm_bf16", T=1500, N=4, K=2, H=128, dtype="bfloat16", modifiers=("prefix_lm",)),
    Case("modifier_documents_fp16", T=1024, N=4, H=64, dtype="float16", modifiers=("document_window", "by_head")),
    Case("modifier_operands_bf16", T=600, S=500, N=4, H=64, dtype="bfloat16", modifiers=("important", "table")),
    dataclasses.replace(
        _EVERYTHING,
        name="masks_of_every_kind_large",
        is_causal=False,
        local_window_size=(450, 330),
        mask="per_head",
        segments="repeated",
        modifiers=("by_place", "dilated"),
    ),
    Case("bias_full_bf16", T=600, S=500, N=4, K=2, H=64, dtype="bfloat16", bias="full", is_causal=True),
    Case("bias_of_heads_h128_bf16", T=1024, N=4, H=128, dtype="bfloat16", bias="of_heads", bias_dtype="bfloat16"),
    Case("bias_of_keys_h256_fp16", T=515, N=4, K=2, H=256, dtype="float16", bias="of_keys", mask="random"),
    Case("bias_sunk_fp16", T=512, S=600, N=4, K=2, H=64, dtype="float16", bias="sunk"),
    Case("bias_shared_ragged_fp32", T=333, S=401, N=4, H=64, bias="shared", soft_cap=2.0),
    Case("alibi_h128_bf16", T=1100, N=8, K=2, H=128, dtype="bfloat16", alibi="heads", is_causal=True),
    Case("soft_cap_h64_bf16", T=1024, N=4, H=64, dtype="bfloat16", soft_cap=5.0, is_causal=True),
    Case("soft_cap_window_h256_bf16", T=1000, N=4, K=2, H=256, dtype="bfloat16", soft_cap=50.0, local_window_size=400),
    Case("soft_cap_large_logits_fp16", T=512, N=4, H=128, dtype="float16", soft_cap=30.0, magnitude=20.0),
    Case("sinks_window_h64_bf16", T=1100, N=8, K=1, H=64, dtype="bfloat16", sinks=True, local_window_size=(127, 0)),
    Case("score_of_keys_h128_bf16", T=777, N=4, H=128, dtype="bfloat16", scores=("key_weight", "head_gain")),
    Case("score_of_cells_fp16", T=400, S=333, N=4, K=2, H=64, dtype="float16", scores=("gated", "bent")),
    Case("score_of_integers_h256_bf16", T=512, N=2, H=256, dtype="bfloat16", scores=("buckets", "allowed_only")),
    Case("dropout_h64_bf16", T=1024, N=4, K=2, H=64, dtype="bfloat16", dropout=0.1, is_causal=True),
    Case("dropout_ragged_h128_bf16", T=601, S=1100, N=4, H=128, dtype="bfloat16", dropout=0.5, segments="padded"),
    dataclasses.replace(
        _EVERYTHING,
        name="scores_of_every_kind_large",
        is_causal=False,
        local_window_size=(450, 330),
        mask="per_head",
        segments="repeated",
        **_SCORES,
    ),
    Case(
        "scores_of_every_kind_h256_fp16",
        T=300,
        S=500,
        N=4,
        K=2,
        H=256,
        dtype="float16",
        is_causal=True,
        query_offset=(200, 0),
        bias="full",
        alibi="heads",
        soft_cap=10.0,
        scores=("gated", "relative"),
        sinks=True,
        dropout=0.1,
    ),
]

HALF = [
    *(case for case in LARGE if case.dtype != "float32"),
    *(case if case.dtype != "float32" else dataclasses.replace(case, dtype="bfloat16") for case in SMALL),
]
"""In 2-byte dtypes, which the Mosaic-GPU kernels take."""


def _benchmark(T: int, H: int, is_causal: bool, tokens: int = 16_384, width: int = 2_048) -> Case:
    mask = "causal" if is_causal else "full"
    return Case(f"h{H}_{mask}_t{T}", B=tokens // T, T=T, N=width // H, H=H, dtype="bfloat16", is_causal=is_causal)


BENCHMARK = [
    *(
        _benchmark(T, H, c)
        for T in (512, 1024, 2048, 4096, 8192, 16_384)
        for H in (64, 128, 256)
        for c in (False, True)
    ),
    *(
        dataclasses.replace(_benchmark(T, H, True, tokens=T), name=f"h{H}_causal_one_t{T}")
        for T in (16, 128, 512)
        for H in (64, 128)
    ),
    *(
        dataclasses.replace(case, name=case.name.replace("_t", "_gqa8_t"), K=case.N // 8)
        for case in (_benchmark(T, H, c) for T in (1024, 8192, 16_384) for H in (64, 128, 256) for c in (False, True))
    ),
    dataclasses.replace(_benchmark(16_384, 128, True), name="h128_window1023_t16384", local_window_size=(1023, 0)),
    *(
        dataclasses.replace(_benchmark(8192, 128, c), name=f"h128_{mask}_t8191", T=8191, S=8191)
        for c, mask in ((False, "full"), (True, "causal"))
    ),
    dataclasses.replace(_benchmark(8192, 128, True), name="h128_causal_fp16_t8192", dtype="float16"),
]
