"""What is wrong is said: type and message of every refusal, and what `explain` tells about the choice."""

import contextlib
import dataclasses
import functools
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_flash import (
    Blocks,
    MaskModifier,
    MosaicBlocks,
    MosaicPlan,
    Plan,
    ScoreModifier,
    block_mask,
    dispatch,
    explain,
    flash_attention,
    flash_attention_varlen,
    plan,
)
from pallas_flash.problem import _precision

B, T, S, N, K, H = 2, 4, 6, 4, 2, 8
PLAN = Plan(Blocks(32, 16), Blocks(16, 32), Blocks(32, 32))
TILE = MosaicBlocks(64, 128)
TOGETHER, ALONE = MosaicPlan(TILE, TILE, TILE, TILE), MosaicPlan(TILE, None, TILE, TILE)


def array(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


TENSORS = {"query": array(B, T, N, H), "key": array(B, S, K, H), "value": array(B, S, K, H)}


def shapes(dtype=jnp.float32, t: int = 2048, head_dim: int = 64) -> dict[str, jax.ShapeDtypeStruct]:
    """query, key and value without data."""
    return {name: jax.ShapeDtypeStruct((B, t, N, head_dim), dtype) for name in TENSORS}


@contextlib.contextmanager
def device(kind: str):
    """Compiling for a GPU that is not there."""
    gpu = AbstractDevice(kind, None, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        yield


def diagonal(tile, *operands):
    return tile.q_ids == tile.k_ids


@dataclasses.dataclass
class Unhashable:
    width: int = 0

    def __call__(self, tile):
        return tile.q_ids - tile.k_ids == self.width


def doubled(score, tile, *operands):
    return score + score


def whether(score, tile):
    return score > 0


def of_rows(score, tile):
    return tile.q_ids.astype(score.dtype)


KEEP = jnp.ones((T, S), bool)
IDS = {"query_segment_ids": jnp.zeros((B, T), jnp.int32), "key_value_segment_ids": jnp.zeros((B, S), jnp.int32)}

# What is passed, the error, the argument it names, then what it says was expected, what came, and the remedy.
WRONG = {
    "query_2d": (
        {"query": array(T, H)},
        (ValueError, "query", r"shape \[\*B, T, N, H\]", r"\(4, 8\)", "add the missing axes"),
    ),
    "value_scalar": (
        {"value": array()},
        (ValueError, "value", r"shape \[\*B, S, K, H\]", r"\(\)", "add the missing axes"),
    ),
    "integers": (
        {"query": array(B, T, N, H, dtype=jnp.int32)},
        (TypeError, "query", "dtype one of .*'bfloat16'.*'float32'", "int32", r"\.astype"),
    ),
    "complex": (
        {"key": array(B, S, K, H, dtype=jnp.complex64)},
        (TypeError, "key", "dtype one of", "complex64", r"\.astype"),
    ),
    "mixed_dtypes": (
        {"query": array(B, T, N, H, dtype=jnp.bfloat16)},
        (ValueError, "key", "dtype of query, bfloat16", "float32", "cast query, key and value to one dtype"),
    ),
    "mixed_value": (
        {"value": array(B, S, K, H, dtype=jnp.float16)},
        (ValueError, "value", "dtype of query, float32", "float16", "cast query, key and value to one dtype"),
    ),
    "batch": (
        {"key": array(3, S, K, H)},
        (ValueError, "key", r"batch axes of query, \(2,\)", r"\(3,\)", "broadcast them first"),
    ),
    "batch_rank": (
        {"value": array(1, B, S, K, H)},
        (ValueError, "value", r"batch axes of query, \(2,\)", r"\(1, 2\)", "broadcast them first"),
    ),
    "value_length": (
        {"value": array(B, 5, K, H)},
        (ValueError, "value", r"key's length and heads \(6, 2\)", r"\(5, 2\)", "one entry per position and head"),
    ),
    "value_heads": (
        {"value": array(B, S, 4, H)},
        (ValueError, "value", r"key's length and heads \(6, 2\)", r"\(6, 4\)", "one entry per position and head"),
    ),
    "head_dims": (
        {"key": array(B, S, K, 16)},
        (ValueError, "key", "head dim 8, that of query", "16", "project both to one size"),
    ),
    "no_head_dim": (
        {name: array(B, T, N, 0) for name in TENSORS},
        (ValueError, "query, value", "head dims of at least 1", "0 and 0", "channels"),
    ),
    "no_value_head_dim": (
        {"value": array(B, S, K, 0)},
        (ValueError, "query, value", "head dims of at least 1", "8 and 0", "channels"),
    ),
    "heads_that_do_not_divide": (
        {"key": array(B, S, 3, H), "value": array(B, S, 3, H)},
        (ValueError, "key", "heads that divides the query's 4", "3", r"h // \(N // K\)"),
    ),
    "no_heads": (
        {"key": array(B, S, 0, H), "value": array(B, S, 0, H)},
        (ValueError, "key", "heads that divides the query's 4", "0", r"h // \(N // K\)"),
    ),
    "flag_as_number": (
        {"is_causal": 1},
        (TypeError, "is_causal", "a Python bool", "int 1", "static under jit"),
    ),
    "flag_as_array": (
        {"return_residual": jnp.array(True)},
        (TypeError, "return_residual", "a Python bool", r"array of shape \(\) and dtype bool", "static under jit"),
    ),
    "flag_as_text": (
        {"deterministic": "yes"},
        (TypeError, "deterministic", "a Python bool", "str 'yes'", "static under jit"),
    ),
    "no_flag": (
        {"interpret": None},
        (TypeError, "interpret", "a Python bool", "NoneType None", "static under jit"),
    ),
    "implementation": (
        {"implementation": "cudnn"},
        (
            ValueError,
            "implementation",
            "None or one of .*'mosaic_gpu'.*'triton'.*'xla'",
            "'cudnn'",
            "None picks the fastest",
        ),
    ),
    "plan": (
        {"plan": {"block_q": 64}},
        (
            TypeError,
            "plan",
            r"None, a pallas_flash\.Plan or a MosaicPlan",
            "dict {'block_q': 64}",
            "None picks the block sizes",
        ),
    ),
    "plan_of_blocks": (
        {"plan": Blocks(64, 64)},
        (
            TypeError,
            "plan",
            r"None, a pallas_flash\.Plan or a MosaicPlan",
            r"Blocks Blocks\(",
            "None picks the block sizes",
        ),
    ),
    "scale_infinite": (
        {"scale": float("inf")},
        (ValueError, "scale", "a finite number", "inf", r"1/sqrt\(H\)"),
    ),
    "scale_nan": (
        {"scale": np.float32("nan")},
        (ValueError, "scale", "a finite number", "nan", r"1/sqrt\(H\)"),
    ),
    "scale_vector": (
        {"scale": array(N)},
        (TypeError, "scale", "floating scalar array", r"shape \(4,\) and dtype float32", "multiply the query"),
    ),
    "scale_bool": (
        {"scale": True},
        (TypeError, "scale", "a number or a floating scalar", "bool True", "multiply the query"),
    ),
    "scale_integer_array": (
        {"scale": jnp.array(2)},
        (TypeError, "scale", "floating scalar array", r"shape \(\) and dtype int32", "multiply the query"),
    ),
    "scale_text": (
        {"scale": "0.5"},
        (TypeError, "scale", "a number or a floating scalar", "str '0.5'", "multiply the query"),
    ),
    "scale_complex": (
        {"scale": np.complex64(1)},
        (TypeError, "scale", "a number or a floating scalar", "complex64", "multiply the query"),
    ),
    "float_lengths": (
        {"query_seq_lengths": array(B)},
        (TypeError, "query_seq_lengths", "an integer dtype", "float32", "one int32 per batch entry"),
    ),
    "bool_lengths": (
        {"key_value_seq_lengths": [True, False]},
        (TypeError, "key_value_seq_lengths", "an integer dtype", "bool", "one int32 per batch entry"),
    ),
    "lengths_shape": (
        {"key_value_seq_lengths": jnp.array([1, 2, 3])},
        (ValueError, "key_value_seq_lengths", r"shape \(2,\), the batch axes", r"\(3,\)", "one int32 per batch entry"),
    ),
    "lengths_rank": (
        {"query_seq_lengths": jnp.ones((1, B), jnp.int32)},
        (ValueError, "query_seq_lengths", r"shape \(2,\), the batch axes", r"\(1, 2\)", "one int32 per batch entry"),
    ),
    "offset_float": (
        {"query_offset": 1.0},
        (TypeError, "query_offset", "an integer dtype", "float64", "one int32 per batch entry"),
    ),
    "offset_bool": (
        {"query_offset": True},
        (TypeError, "query_offset", "an integer dtype", "bool", "one int32 per batch entry"),
    ),
    "offset_none": (
        {"query_offset": None},
        (TypeError, "query_offset", "an integer dtype", "object", "one int32 per batch entry"),
    ),
    "offset_shape": (
        {"query_offset": jnp.array([1, 2, 3])},
        (ValueError, "query_offset", r"shape \(2,\), the batch axes", r"\(3,\)", "one int32 per batch entry"),
    ),
    "window_negative": (
        {"local_window_size": -1},
        (ValueError, "local_window_size", r"an int >= 0 or a pair \(left, right\)", "-1", "use None for a side"),
    ),
    "window_negative_side": (
        {"local_window_size": (None, -2)},
        (ValueError, "local_window_size", r"a pair \(left, right\)", r"\(None, -2\)", "use None for a side"),
    ),
    "window_of_three": (
        {"local_window_size": (1, 2, 3)},
        (ValueError, "local_window_size", r"a pair \(left, right\)", r"\(1, 2, 3\)", "use None for a side"),
    ),
    "window_bool": (
        {"local_window_size": True},
        (ValueError, "local_window_size", r"a pair \(left, right\)", "True", "use None for a side"),
    ),
    "window_float": (
        {"local_window_size": (1.5, 0)},
        (ValueError, "local_window_size", r"a pair \(left, right\)", r"\(1\.5, 0\)", "use None for a side"),
    ),
    "mask_of_numbers": (
        {"mask": array(B, 1, T, S)},
        (TypeError, "mask", r"dtype bool \(True = attend\)", "float32", "numbers to add to the scores are a bias"),
    ),
    "mask_of_integers": (
        {"mask": jnp.ones((T, S), jnp.int8)},
        (TypeError, "mask", r"dtype bool \(True = attend\)", "int8", "mask != 0"),
    ),
    "mask_that_is_no_array": (
        {"mask": "causal"},
        (TypeError, "mask", "an array", "str", r"jnp\.asarray"),
    ),
    "mask_shape": (
        {"mask": jnp.ones((B, N, T, 5), bool)},
        (ValueError, "mask", r"broadcasts to \(2, 4, 4, 6\), the axes BNTS", r"\(2, 4, 4, 5\)", "size 1 broadcasts"),
    ),
    "mask_of_key_heads": (
        {"mask": jnp.ones((K, T, S), bool)},
        (ValueError, "mask", r"broadcasts to \(2, 4, 4, 6\), the axes BNTS", r"\(2, 4, 6\)", "size 1 broadcasts"),
    ),
    "mask_rank": (
        {"mask": jnp.ones((1, B, N, T, S), bool)},
        (ValueError, "mask", r"broadcasts to \(2, 4, 4, 6\)", r"\(1, 2, 4, 4, 6\)", "size 1 broadcasts"),
    ),
    "ids_of_queries_alone": (
        {**IDS, "key_value_segment_ids": None},
        (
            ValueError,
            "key_value_segment_ids",
            r"integers \[\*B, S\] beside query_segment_ids",
            "None",
            "pass both, the same for self-attention",
        ),
    ),
    "ids_of_keys_alone": (
        {**IDS, "query_segment_ids": None},
        (
            ValueError,
            "query_segment_ids",
            r"integers \[\*B, T\] beside key_value_segment_ids",
            "None",
            "pass both, the same for self-attention",
        ),
    ),
    "float_ids": (
        {**IDS, "query_segment_ids": array(B, T)},
        (TypeError, "query_segment_ids", "an integer dtype", "float32", "number segments"),
    ),
    "bool_ids": (
        {**IDS, "key_value_segment_ids": jnp.ones((B, S), bool)},
        (TypeError, "key_value_segment_ids", "an integer dtype", "bool", "number segments"),
    ),
    "ids_shape": (
        {**IDS, "key_value_segment_ids": IDS["query_segment_ids"]},
        (ValueError, "key_value_segment_ids", r"broadcasts to \(2, 6\), the axes BS", r"\(2, 4\)", "size 1 broadcasts"),
    ),
    "ids_rank": (
        {**IDS, "query_segment_ids": jnp.zeros((B, 1, T), jnp.int32)},
        (ValueError, "query_segment_ids", r"broadcasts to \(2, 4\), the axes BT", r"\(2, 1, 4\)", "size 1 broadcasts"),
    ),
    "one_modifier": (
        {"mask_modifiers": diagonal},
        (TypeError, "mask_modifiers", "a tuple of functions", "function", r"pass \(function,\)"),
    ),
    "no_modifiers": (
        {"mask_modifiers": None},
        (TypeError, "mask_modifiers", "a tuple of functions", "NoneType None", r"pass \(function,\)"),
    ),
    "unhashable_modifier": (
        {"mask_modifiers": (Unhashable(),)},
        (TypeError, "mask_modifiers", "hashable functions", r"Unhashable\(width=0\)", "`operands`"),
    ),
    "operand_shape": (
        {"mask_modifiers": (diagonal, MaskModifier(diagonal, (array(T), array(B, 5)), ("T", "BS")))},
        (
            ValueError,
            "mask_modifiers: operand 1 of diagonal",
            r"broadcasts to \(2, 6\), the axes BS",
            r"\(2, 5\)",
            "size 1 broadcasts",
        ),
    ),
    "operand_that_is_no_array": (
        {"mask_modifiers": (MaskModifier(diagonal, ("T",), ("T",)),)},
        (TypeError, "mask_modifiers: operand 0 of diagonal", "an array", "str", r"jnp\.asarray"),
    ),
    "block_mask_of_something_else": (
        {"mask": KEEP, "block_mask": KEEP},
        (
            TypeError,
            "block_mask",
            r"what pallas_flash\.block_mask returns",
            r"shape \(4, 6\) and dtype bool",
            "None finds the blocks",
        ),
    ),
    "block_mask_alone": (
        {"block_mask": block_mask(T, S, mask=KEEP)},
        (ValueError, "block_mask", "a mask or mask_modifiers with it", "neither", "pass them too"),
    ),
    "block_mask_of_other_lengths": (
        {"mask": KEEP, "block_mask": block_mask(128, 256, mask=True)},
        (
            ValueError,
            "block_mask",
            "one for 4 queries and 6 keys",
            "one for 128 and 256",
            r"make one for these lengths with pallas_flash\.block_mask",
        ),
    ),
    "block_mask_of_other_heads": (
        {"mask": KEEP, "block_mask": block_mask(T, S, heads=3, mask=np.ones((3, T, S), bool))},
        (ValueError, "block_mask", "1 or 4 along N", "3", "make one for this batch and these heads"),
    ),
    "block_mask_of_another_batch": (
        {"mask": KEEP, "block_mask": block_mask(T, S, batch=(3,), mask=np.ones((3, 1, T, S), bool))},
        (ValueError, "block_mask", "1 or 2 along B", "3", "make one for this batch and these heads"),
    ),
    "bias_of_booleans": (
        {"bias": KEEP},
        (TypeError, "bias", "a floating dtype", "bool", r"pass it as mask \(True = attend\)"),
    ),
    "bias_of_integers": (
        {"bias": jnp.ones((T, S), jnp.int32)},
        (TypeError, "bias", "a floating dtype", "int32", r"\.astype"),
    ),
    "bias_that_is_no_array": (
        {"bias": "alibi"},
        (TypeError, "bias", "an array", "str", r"jnp\.asarray"),
    ),
    "bias_shape": (
        {"bias": array(B, N, S, T)},
        (ValueError, "bias", r"broadcasts to \(2, 4, 4, 6\), the axes BNTS", r"\(2, 4, 6, 4\)", "size 1 broadcasts"),
    ),
    "bias_of_key_heads": (
        {"bias": array(K, T, S)},
        (ValueError, "bias", r"broadcasts to \(2, 4, 4, 6\), the axes BNTS", r"\(2, 4, 6\)", "size 1 broadcasts"),
    ),
    "bias_rank": (
        {"bias": array(1, B, N, T, S)},
        (ValueError, "bias", r"broadcasts to \(2, 4, 4, 6\)", r"\(1, 2, 4, 4, 6\)", "size 1 broadcasts"),
    ),
    "slopes_of_integers": (
        {"alibi_slopes": [1, 2, 3, 4]},
        (TypeError, "alibi_slopes", "a floating dtype", "int32", r"\.astype"),
    ),
    "slopes_shape": (
        {"alibi_slopes": array(B)},
        (ValueError, "alibi_slopes", r"broadcasts to \(2, 4\), the axes BN", r"\(2,\)", "size 1 broadcasts"),
    ),
    "slopes_that_are_no_array": (
        {"alibi_slopes": "geometric"},
        (TypeError, "alibi_slopes", "an array", "str", r"jnp\.asarray"),
    ),
    **{
        f"cap_{value}": (
            {"logits_soft_cap": value},
            (
                ValueError,
                "logits_soft_cap",
                "None or a positive Python number",
                re.escape(repr(value)),
                "None is no cap",
            ),
        )
        for value in (0, 0.0, -30.0, float("inf"), float("nan"), True, "30")
    },
    "cap_array": (
        {"logits_soft_cap": jnp.float32(30)},
        (ValueError, "logits_soft_cap", "a positive Python number", r"shape \(\) and dtype float32", "None is no cap"),
    ),
    "sinks_of_integers": (
        {"sinks": [0, 0, 0, 0]},
        (TypeError, "sinks", "a floating dtype", "int32", r"\.astype"),
    ),
    "sinks_of_key_heads": (
        {"sinks": array(K)},
        (ValueError, "sinks", r"shape \(4,\), one logit for each query head", r"\(2,\)", "broadcast it"),
    ),
    "sinks_of_entries": (
        {"sinks": array(B, N)},
        (ValueError, "sinks", r"shape \(4,\), one logit for each query head", r"\(2, 4\)", "broadcast it"),
    ),
    "one_score_modifier": (
        {"score_modifiers": doubled},
        (TypeError, "score_modifiers", "a tuple of functions", "function", r"pass \(function,\)"),
    ),
    "no_score_modifiers": (
        {"score_modifiers": None},
        (TypeError, "score_modifiers", "a tuple of functions", "NoneType None", r"pass \(function,\)"),
    ),
    "unhashable_score_modifier": (
        {"score_modifiers": (Unhashable(),)},
        (TypeError, "score_modifiers", "hashable functions", r"Unhashable\(width=0\)", "`operands`"),
    ),
    "score_operand_shape": (
        {"score_modifiers": (doubled, ScoreModifier(doubled, (array(T), array(B, 5)), ("T", "BS")))},
        (
            ValueError,
            "score_modifiers: operand 1 of doubled",
            r"broadcasts to \(2, 6\), the axes BS",
            r"\(2, 5\)",
            "size 1 broadcasts",
        ),
    ),
    "score_operand_that_is_no_array": (
        {"score_modifiers": (ScoreModifier(doubled, ("T",), ("T",)),)},
        (TypeError, "score_modifiers: operand 0 of doubled", "an array", "str", r"jnp\.asarray"),
    ),
    "score_of_booleans": (
        {"score_modifiers": (whether,)},
        (
            TypeError,
            "score_modifiers",
            r"whether to return float32 of the score's shape \(16, 16\)",
            r"bool of \(16, 16\)",
            "maps scores to scores",
        ),
    ),
    "score_of_rows": (
        {"score_modifiers": (doubled, of_rows)},
        (
            TypeError,
            "score_modifiers",
            r"of_rows to return float32 of the score's shape \(16, 16\)",
            r"float32 of \(16, 1\)",
            "maps scores to scores",
        ),
    ),
    **{
        f"rate_{value}": (
            {"dropout_rate": value, "dropout_key": jax.random.key(0)},
            (ValueError, "dropout_rate", "a Python number, 0 <= rate < 1", re.escape(repr(value)), "static under jit"),
        )
        for value in (1, 1.0, -0.1, float("nan"), True, None, "0.1")
    },
    "rate_array": (
        {"dropout_rate": jnp.float32(0.1), "dropout_key": jax.random.key(0)},
        (ValueError, "dropout_rate", "a Python number", r"shape \(\) and dtype float32", "static under jit"),
    ),
    "no_key": (
        {"dropout_rate": 0.1},
        (
            ValueError,
            "dropout_key",
            "a key with dropout_rate=0.1",
            "None",
            r"jax\.random\.key\(seed\), .*dropout_rate=0",
        ),
    ),
    "seed_for_a_key": (
        {"dropout_rate": 0.1, "dropout_key": 42},
        (TypeError, "dropout_key", "a key", "int 42", r"jax\.random\.key\(seed\)"),
    ),
    "numbers_for_a_key": (
        {"dropout_key": array(2)},
        (TypeError, "dropout_key", "a key", r"shape \(2,\) and dtype float32", r"jax\.random\.key\(seed\)"),
    ),
    "several_keys": (
        {"dropout_rate": 0.1, "dropout_key": jax.random.split(jax.random.key(0), 3)},
        (ValueError, "dropout_key", "one key", r"\(3,\) of them", r"jax\.vmap"),
    ),
    "precision": (
        {"precision": "best"},
        (ValueError, "precision", "'default', 'high', 'highest'", "'best'", "None follows"),
    ),
    "precision_pair": (
        {"precision": ["high", "high"]},
        (ValueError, "precision", "'default', 'high', 'highest'", r"\['high', 'high'\]", "None follows"),
    ),
}


@pytest.mark.parametrize(("arguments", "error"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("function", [flash_attention, explain], ids=lambda function: function.__name__)
def test_misuse_is_named(function, arguments, error):
    assert_named(function, {**TENSORS, **arguments}, error)


def assert_named(function, arguments, error):
    """What `function` raises with these keywords is what an entry of the tables says."""
    kind, argument, expected, came, remedy = error
    message = rf"^{argument}\b.*: expected.*{expected}.*got.*{came}.*; .*{remedy}"
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        function(**arguments)
    assert raised.type is kind


PACKED = {"query": array(5, N, H), "key": array(7, K, H), "value": array(7, K, H)}
CU_SEQLENS = {"cu_seqlens_q": np.array([0, 2, 5]), "cu_seqlens_k": np.array([0, 0, 7])}
WRONG_PACKED = {
    "batch_axis": (
        {"key": array(1, 7, K, H)},
        (ValueError, "key", r"shape \[total, heads, head dim\]", r"\(1, 7, 2, 8\)", "sequences are packed"),
    ),
    "mixed_dtypes": (
        {"value": array(7, K, H, dtype=jnp.bfloat16)},
        (ValueError, "value", "dtype of query, float32", "bfloat16", "cast query, key and value to one dtype"),
    ),
    "value_length": (
        {"value": array(6, K, H)},
        (ValueError, "value", r"key's length and heads \(7, 2\)", r"\(6, 2\)", "one entry per position and head"),
    ),
    "float_starts": (
        {"cu_seqlens_q": array(3)},
        (TypeError, "cu_seqlens_q", "an integer dtype", "float32", "count tokens"),
    ),
    "starts_by_batch": (
        {"cu_seqlens_k": np.zeros((1, 3), np.int32)},
        (ValueError, "cu_seqlens_k", r"shape \[sequences \+ 1\]", r"\(1, 3\)", r"one sequence is \[0, total\]"),
    ),
    "scalar_starts": (
        {"cu_seqlens_q": np.int32(0)},
        (ValueError, "cu_seqlens_q", r"shape \[sequences \+ 1\]", r"\(\)", r"one sequence is \[0, total\]"),
    ),
    "no_starts": (
        {"cu_seqlens_q": np.zeros(0, np.int32)},
        (ValueError, "cu_seqlens_q", r"shape \[sequences \+ 1\]", r"\(0,\)", r"one sequence is \[0, total\]"),
    ),
    "other_number_of_sequences": (
        {"cu_seqlens_k": np.array([0, 7])},
        (
            ValueError,
            "cu_seqlens_k",
            r"the shape of cu_seqlens_q, \(3,\)",
            r"\(2,\)",
            "a sequence without keys has equal start and end",
        ),
    ),
    "offset_shape": (
        {"query_offset": np.array([1, 2, 3])},
        (ValueError, "query_offset", "one for each of 2 sequences", r"\(3,\)", "one entry more"),
    ),
    "offset_float": (
        {"query_offset": np.float32(1)},
        (TypeError, "query_offset", "an integer dtype", "float32", "one int32 per"),
    ),
    "window": (
        {"local_window_size": (1, -2)},
        (ValueError, "local_window_size", r"a pair \(left, right\)", r"\(1, -2\)", "use None for a side"),
    ),
}


@pytest.mark.parametrize(("arguments", "error"), WRONG_PACKED.values(), ids=WRONG_PACKED)
def test_misuse_of_packed_sequences_is_named(arguments, error):
    def function(*, query, key, value, cu_seqlens_q, cu_seqlens_k, **options):
        return flash_attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, **options)

    assert_named(function, {**PACKED, **CU_SEQLENS, **arguments}, error)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ((array(T, S),), (TypeError, "{argument}", "functions of a tile", "ArrayImpl", "is passed as `{instead}`")),
        ((diagonal, (array(T),)), (ValueError, "axes", "one string for each of 1 operands", r"\(\)", "'BT', 'BS'")),
        ((diagonal, (), ("T",)), (ValueError, "axes", "one string for each of 0 ope", r"\('T',\)", "'BT', 'BS'")),
        *(
            (
                (diagonal, (array(T),), (letters,)),
                (ValueError, "axes", "letters of 'BNTS' in this", repr(letters), "NTS"),
            )
            for letters in ("TB", "TT", "K", "bt", 1)
        ),
    ],
)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (MaskModifier, {"argument": "mask_modifiers", "instead": "mask"}),
        (ScoreModifier, {"argument": "score_modifiers", "instead": "bias"}),
    ],
)
def test_fields_of_modifiers(kind, words, fields, error):
    made = object.__new__(kind)  # the constructor's arguments are refused by the type checker of conftest.py
    vars(made).update(zip(("function", "operands", "axes"), (*fields, *((), ())[len(fields) - 1 :]), strict=True))
    filled = [text.format(**words) if isinstance(text, str) and "{" in text else text for text in error]
    assert_named(lambda: made.__post_init__(), {}, filled)


@pytest.mark.parametrize("name", ["scale", "query", "block_mask", "bias"])
def test_block_mask_takes_masks_only(name):
    with pytest.raises(TypeError, match=rf"^block_mask: expected masks, .*got \['{name}'\]; leave .*flash_attention"):
        block_mask(T, S, mask=KEEP, **{name: None})


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_that_is_no_array(name):
    with pytest.raises(TypeError, match=rf"{name}: expected an array, got NoneType; convert it with jnp\.asarray"):
        flash_attention(**{**TENSORS, name: None})


@pytest.mark.parametrize("name", ["is_causal", "return_residual", "deterministic", "interpret"])
def test_traced_flag(name):
    with pytest.raises(TypeError, match=rf"{name}: expected a Python bool, got .*dtype bool; .*static under jit"):
        jax.jit(lambda flag: flash_attention(**TENSORS, **{name: flag}))(True)


@pytest.mark.parametrize("name", ["dropout_rate", "logits_soft_cap"])
def test_traced_number(name):
    """A `float` is what selects code: a traced one is refused by its name."""
    with pytest.raises(ValueError, match=rf"{name}: expected .*Python number.*, got .*dtype float32; "):
        jax.jit(lambda number: flash_attention(**TENSORS, **{name: number}))(0.5)


@pytest.mark.parametrize("name", ["dropout", "attn_mask", "soft_cap", "score_mod"])
@pytest.mark.parametrize("function", [flash_attention, explain], ids=lambda function: function.__name__)
def test_unknown_keyword(function, name):
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'"):
        function(**TENSORS, **{name: None})


@pytest.mark.parametrize("function", [flash_attention, explain], ids=lambda function: function.__name__)
def test_options_are_keywords_only(function):
    """All after bias and mask, as of jax.nn."""
    with pytest.raises(TypeError, match="positional argument"):
        function(*TENSORS.values(), None, None, None)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        *(("block_q", n, "a power of two from 16 to 1024") for n in (0, 8, 48, 2048, -16)),
        *(("block_k", n, "a power of two from 16 to 1024") for n in (0, 8, 48, 2048, -16)),
        *(("num_warps", n, "a power of two from 1 to 16") for n in (0, 3, 32, -1)),
        *(("num_stages", n, "an int from 1 to 8") for n in (0, 9, -1)),
        *(("head_group", n, "an int from 1 to 1024") for n in (0, 1025, -1)),
    ],
)
def test_blocks_out_of_range(field, value, expected):
    with pytest.raises(ValueError, match=rf"^{field}: expected {expected}, got {value}; plan=None picks one$"):
        Blocks(**{"block_q": 64, "block_k": 64, field: value})


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        *(("block_q", n, r"\(64, 128, 192\)") for n in (0, 32, 96, 256, -64)),
        *(("block_k", n, r"\(64, 128\)") for n in (0, 32, 96, 192, -64)),
        *(("num_stages", n, r"range\(1, 9\)") for n in (0, 9, -1)),
        *(("head_group", n, r"range\(1, 1025\)") for n in (0, 1025, -1)),
    ],
)
def test_mosaic_blocks_out_of_range(field, value, expected):
    with pytest.raises(ValueError, match=rf"^{field}: expected one of {expected}, got {value}; plan=None picks one$"):
        MosaicBlocks(**{"block_q": 64, "block_k": 64, field: value})


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        *itertools.product(("forward", "backward", "dq", "dkv"), (Blocks(64, 64), (64, 64))),
        *((kernel, None) for kernel in ("forward", "dq", "dkv")),
    ],
)
def test_mosaic_plan_of_something_else(kernel, wrong):
    fields = {"forward": TILE, "backward": TILE, "dq": TILE, "dkv": TILE, kernel: wrong}
    made = object.__new__(MosaicPlan)  # the constructor's arguments are refused by the type checker of conftest.py
    vars(made).update(fields)
    with pytest.raises(TypeError, match=rf"^{kernel}: expected a pallas_flash\.MosaicBlocks, got .*; plan=None picks"):
        made.__post_init__()


@pytest.mark.parametrize(
    ("kernel", "blocks", "expected"),
    [
        ("backward", MosaicBlocks(192, 128), "block_q 64 or 128 and block_k 128, got 192x128"),
        ("backward", MosaicBlocks(64, 64), "block_q 64 or 128 and block_k 128, got 64x64"),
        ("dkv", MosaicBlocks(192, 64), "block_q 64 or 128, got 192x64"),
    ],
)
def test_mosaic_blocks_that_a_kernel_does_not_take(kernel, blocks, expected):
    with pytest.raises(ValueError, match=f"^{kernel}: expected {expected}"):
        dataclasses.replace(TOGETHER, **{kernel: blocks})


REFUSED = {
    "no_gpu": (
        {"implementation": "triton"},
        "implementation='triton' .*triton: no GPU .*'xla', or 'triton' with interpret=True",
    ),
    "plan_without_gpu": ({"plan": PLAN}, "implementation=None .*triton: no GPU .*xla: .*leave plan=None"),
    "mosaic_plan": (
        {"implementation": "triton", "plan": TOGETHER},
        r"triton: the plan is one of Mosaic-GPU kernels; give a pallas_flash\.Plan, or plan=None",
    ),
    "mosaic_plan_interpreted": (
        {"interpret": True, "plan": TOGETHER},
        r"mosaic_gpu: its kernels do not run in interpret mode; .*triton: the plan is one of Mosaic.*xla: ",
    ),
    "xla_mosaic_plan": ({"implementation": "xla", "plan": ALONE}, "xla: it has no block .*; leave plan=None"),
    "xla_plan": ({"implementation": "xla", "plan": PLAN}, "'xla' refuses .*xla: it has no block .*; leave plan=None"),
    "xla_interpret": ({"implementation": "xla", "interpret": True}, "'xla' refuses .*interpret=True runs Pallas ker"),
    "wide": (
        {"query": array(1, 1, 1, 257), "key": array(1, 1, 1, 257), "value": array(1, 1, 1, 8), "interpret": True},
        "triton: the head dim of query is 257, at most 256 is supported; use more heads or implementation='xla'",
    ),
    "wide_value": (
        {"value": array(B, S, K, 257), "implementation": "triton", "interpret": True},
        "triton: the head dim of value is 257, at most 256 is supported; use more heads or implementation='xla'",
    ),
}


@pytest.mark.parametrize(("arguments", "reason"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("function", [flash_attention, explain], ids=lambda function: function.__name__)
def test_refusal_says_why(function, arguments, reason):
    with pytest.raises(NotImplementedError, match=reason):
        function(**{**TENSORS, **arguments})


WIDE = shapes(jnp.bfloat16, head_dim=192)
FLOAT16 = shapes(jnp.float16)
REFUSED_BY_MOSAIC = {
    "interpret": (FLOAT16, {"interpret": True}, "do not run in interpret mode; use implementation='triton'"),
    "triton_plan": (FLOAT16, {"plan": PLAN}, r"one of Triton kernels; give a pallas_flash\.MosaicPlan, or plan=None"),
    "float32": (shapes(), {}, "float32 is not supported, only bfloat16 and float16; .*='triton' or 'xla'"),
    "wide": (shapes(jnp.bfloat16, head_dim=257), {}, "head dim of query is 257, at most 256 .*; use more heads"),
    "wide_value": (FLOAT16 | {"value": shapes(jnp.float16, head_dim=264)["value"]}, {}, "dim of value is 264, at most"),
    "scale": (WIDE, {"scale": jnp.float32(1)}, "have none for a traced scale; use implementation='triton'"),
    "scale_and_plan": (FLOAT16, {"scale": jnp.float32(1), "plan": ALONE}, "have none for a traced scale"),
    "wide_together": (WIDE, {"plan": TOGETHER}, "takes head dims up to 128, got 192; use a plan with backward=None"),
    "wide_tall": (
        shapes(jnp.bfloat16, head_dim=200),
        {"plan": MosaicPlan(MosaicBlocks(192, 64), None, TILE, TILE)},
        "with block_q=192 the forward kernel sums head dims up to 192, got 200; use 128",
    ),
    "shared_memory": (
        FLOAT16,
        {"plan": MosaicPlan(MosaicBlocks(192, 128, 8), None, TILE, TILE)},
        r"the forward kernel needs \d+ bytes of shared memory, the device has \d+; use smaller blocks, fewer stages",
    ),
}


@pytest.mark.parametrize(("tensors", "options", "reason"), REFUSED_BY_MOSAIC.values(), ids=REFUSED_BY_MOSAIC)
def test_mosaic_refusal_says_why(tensors, options, reason):
    options = options | {"implementation": "mosaic_gpu"}
    for function in (explain, functools.partial(jax.eval_shape, functools.partial(flash_attention, **options))):
        with (
            device("NVIDIA H200"),
            pytest.raises(NotImplementedError, match=f"'mosaic_gpu' refuses this call: mosaic_gpu: .*{reason}"),
        ):
            function(*tensors.values(), **(options if function is explain else {}))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("NVIDIA A100-SXM4-80GB", r"the GPU has compute capability 8\.0, 9\.0 \(Hopper\) is required; use .*'triton'"),
        ("NVIDIA B200", r"the GPU has compute capability 10\.0, 9\.0 \(Hopper\) is required; use .*'triton'"),
        ("NVIDIA Abacus", "unknown GPU .*Abacus"),
        (None, "no GPU to compile for; use implementation='xla'"),
    ],
)
def test_mosaic_is_for_hopper(kind, reason):
    with device(kind) if kind else contextlib.nullcontext():
        assert re.search(reason, explain(**FLOAT16).refusals["mosaic_gpu"])


def test_mosaic_takes_reproducible_gradients():
    """With any plan, and with a traced scale where all gradients come from one kernel."""
    with device("NVIDIA H200"):
        for options in ({}, {"plan": TOGETHER}, {"plan": ALONE}, {"scale": jnp.float32(1)}):
            found = [explain(**FLOAT16, **options, deterministic=flag) for flag in (False, True)]
            assert found[0].implementation == "mosaic_gpu" and found[0] == found[1]


@pytest.mark.parametrize("function", [flash_attention, explain], ids=lambda function: function.__name__)
def test_float64_is_not_for_kernels(function):
    with jax.enable_x64(True):
        tensors = {name: jnp.asarray(x, jnp.float64) for name, x in TENSORS.items()}
        with pytest.raises(NotImplementedError, match=r"triton: float64 is not supported; .*implementation='xla'"):
            function(**tensors, interpret=True)
        assert explain(**tensors).implementation == "xla"


def test_too_old_a_gpu():
    with device("Tesla T4"):
        with pytest.raises(NotImplementedError, match=r"capability 7\.5, 8\.0 \(Ampere\) or later is required"):
            flash_attention(**TENSORS, implementation="triton")
        assert explain(**shapes()).implementation == "xla"


def test_unknown_gpu():
    with device("NVIDIA Abacus"):
        choice = explain(**shapes())
    assert choice.implementation == "xla"
    assert "unknown GPU" in choice.refusals["triton"] and "Abacus" in choice.refusals["triton"]


def test_explain_without_a_gpu():
    choice = explain(**TENSORS, is_causal=True, return_residual=True)
    assert (choice.implementation, choice.plan, list(choice.refusals)) == ("xla", None, ["mosaic_gpu", "triton"])
    header, mosaic, triton, xla = str(choice).splitlines()
    assert header.split() == ["implementation", "why"]
    assert mosaic == f"mosaic_gpu              {choice.refusals['mosaic_gpu']}"
    assert triton == f"triton                  {choice.refusals['triton']}" and "no GPU" in triton
    assert xla == "xla             chosen  accepts"
    assert header.index("why") == triton.index("no GPU") == xla.index("accepts")


def test_explain_on_a_gpu():
    with device("NVIDIA H200"):
        choice = explain(**shapes(jnp.bfloat16))
        named = explain(**shapes(jnp.bfloat16), implementation="xla")
        planned = explain(**shapes(jnp.bfloat16), plan=PLAN)
        tiled = explain(**shapes(jnp.bfloat16), plan=ALONE)
    assert (choice.implementation, dict(choice.refusals)) == ("mosaic_gpu", {})
    _, mosaic, origin, triton, xla = str(choice).splitlines()
    assert mosaic == f"mosaic_gpu      chosen  {choice.plan}"
    assert origin == f"{'':24}from the tuned table nvidia-h200.json"
    assert dict(planned.origins) == dict.fromkeys(("forward", "dq", "dkv"), "the argument plan")
    assert (triton.split(), xla.split()) == (["triton", "accepts"], ["xla", "accepts"])
    assert (named.implementation, named.plan, dict(named.refusals)) == ("xla", None, {})
    assert (planned.implementation, planned.plan, list(planned.refusals)) == ("triton", PLAN, ["mosaic_gpu", "xla"])
    assert (tiled.implementation, tiled.plan, list(tiled.refusals)) == ("mosaic_gpu", ALONE, ["triton", "xla"])
    assert str(tiled.plan) == "forward 64x128 s2 g1, dq 64x128 s2 g1, dk and dv 64x128 s2 g1"


def test_explain_interpreted():
    choice = explain(**TENSORS, interpret=True)
    assert (choice.implementation, list(choice.refusals)) == ("triton", ["mosaic_gpu", "xla"])
    assert explain(**TENSORS, interpret=True, plan=PLAN).plan == PLAN


GPUS = {
    "NVIDIA A100-SXM4-80GB": 80,
    "NVIDIA L4": 89,
    "NVIDIA GeForce RTX 4090": 89,
    "NVIDIA H200": 90,
    "NVIDIA B200": 100,
}
DOTS = [(jnp.bfloat16, None, "half"), (jnp.float16, None, "half"),
        (jnp.float32, None, "tf32"), (jnp.float32, "highest", "tf32x3")]  # fmt: skip


@pytest.mark.parametrize("kind", GPUS)
def test_plans_leave_room_for_what_scores_read(kind):
    """A float32 bias and a mask: five bytes a score."""
    read = {"bias": np.zeros((1, 1, 512, 512), np.float32), "mask": np.ones((1, 1, 512, 512), bool)}
    for head_dim, (dtype, precision, dots) in itertools.product((64, 128, 256), DOTS[::2]):
        with device(kind):
            choice = explain(**shapes(dtype, 512, head_dim), **read, precision=precision, implementation="triton")
        sizes = plan.Sizes(512, 512, head_dim, head_dim, dots, read=5)
        assert plan.shortage(choice.plan, GPUS[kind], sizes) is None


@pytest.mark.parametrize("kind", GPUS)
def test_plans_fit_the_gpu(kind):
    available = 1024 * plan.SHARED_MEMORY[GPUS[kind]]
    for head_dim, (dtype, precision, dots), is_causal, t in itertools.product(
        (16, 64, 80, 128, 192, 256), DOTS, (False, True), (1, 100, 4096)
    ):
        too_wide = dots == "tf32x3" and head_dim > 128 and available < 131072  # 16 rows of q, k, v and do, in two parts
        named = {} if too_wide else {"implementation": "triton"}
        with device(kind):
            choice = explain(**shapes(dtype, t, head_dim), is_causal=is_causal, precision=precision, **named)
        if too_wide:
            assert f"dq kernel needs 131072 bytes of shared memory, the device has {available};" in str(choice)
            continue
        assert choice.implementation == "triton" and choice.refusals.keys() <= {"mosaic_gpu"}
        sizes = plan.Sizes(t, t, head_dim, head_dim, dots)
        for kernel in ("forward", "dq", "dkv"):
            blocks = getattr(choice.plan, kernel)
            assert plan.shared_memory(kernel, blocks, sizes) <= available, (head_dim, dots, kernel)
            assert max(blocks.block_q, blocks.block_k) <= max(128, t)


@pytest.mark.parametrize("deterministic", [False, True])
def test_mosaic_takes_any_head_dim(deterministic):
    widths = (1, 64, 65, 128, 129, 192, 193, 256)
    for width, width_v, is_causal, t in itertools.product(widths, widths, (False, True), (1, 100, 4096)):
        tensors = shapes(jnp.bfloat16, t, width) | {"value": shapes(jnp.bfloat16, t, width_v)["value"]}
        with device("NVIDIA H200"):
            choice = explain(**tensors, is_causal=is_causal, deterministic=deterministic, implementation="mosaic_gpu")
        assert (choice.implementation, dict(choice.refusals)) == ("mosaic_gpu", {})
        assert (choice.plan.backward is None) == (max(width, width_v) > 128)


def test_small_problems_get_small_tiles():
    with device("NVIDIA H200"):
        choice = explain(**shapes(jnp.bfloat16, t=20), implementation="triton")
        mosaic = explain(**shapes(jnp.bfloat16, t=20), implementation="mosaic_gpu")
    for blocks in (choice.plan.forward, choice.plan.dq, choice.plan.dkv):
        assert max(blocks.block_q, blocks.block_k) <= 32
    assert mosaic.implementation == "mosaic_gpu"
    assert mosaic.plan.forward.block_q == mosaic.plan.dq.block_q == 64


@pytest.mark.parametrize("implementation", [None, "mosaic_gpu", "triton"])
def test_no_queries_on_a_gpu(implementation):
    with device("NVIDIA H200"):
        assert explain(**shapes(jnp.bfloat16, t=0), implementation=implementation).implementation != "xla"


@pytest.mark.parametrize("t,best", [(1023, "triton"), (1024, "mosaic_gpu"), (1032, "mosaic_gpu"), (1033, "mosaic_gpu")])
def test_short_ragged_sequences_go_to_triton(t, best):
    with device("NVIDIA H200"):
        choice = explain(**shapes(jnp.bfloat16, t))
        named = explain(**shapes(jnp.bfloat16, t), implementation="mosaic_gpu")
        planned = explain(**shapes(jnp.bfloat16, t), plan=ALONE)
    assert (choice.implementation, named.implementation, planned.implementation) == (best, *["mosaic_gpu"] * 2)
    assert (best == "triton") == ("no multiple of 8" in choice.refusals.get("mosaic_gpu", ""))


# What must not be taken for misuse.


def test_explain_takes_what_the_call_takes():
    """Lists and NumPy's float64, which JAX reads as float32."""
    expected = explain(**TENSORS)
    assert explain(**{name: np.zeros(x.shape) for name, x in TENSORS.items()}) == expected
    assert explain(**{name: np.zeros(x.shape).tolist() for name, x in TENSORS.items()}) == expected


def test_numpy_scalars_are_numbers():
    options = dict(is_causal=np.True_, scale=np.float32(0.5), local_window_size=np.int64(3), query_offset=np.int32(2))
    lengths = dict(query_seq_lengths=[3, 4], key_value_seq_lengths=np.int64(2))
    assert explain(**TENSORS, **options, **lengths) == explain(**TENSORS)
    assert explain(**TENSORS, scale=np.array(0.5)) == explain(**TENSORS)
    scores = dict(logits_soft_cap=np.float32(30), dropout_rate=np.float64(0.1), dropout_key=jax.random.key(0))
    assert explain(**TENSORS, **scores, alibi_slopes=[0.1] * N, sinks=np.zeros(N)) == explain(**TENSORS)


@pytest.mark.parametrize(
    "scale", [None, 0.5, jnp.float32(0.5), np.array(0.5)], ids=["none", "static", "single", "double"]
)
@pytest.mark.parametrize(
    ("implementation", "dtype"), [("xla", "float32"), ("triton", "float32"), ("mosaic_gpu", "bfloat16")]
)
def test_inputs_stay_as_they_are_under_enable_x64(implementation, dtype, scale):
    def attend(query, key, value):
        return flash_attention(query, key, value, implementation=implementation, scale=scale, return_residual=True)

    with jax.enable_x64(True), device("NVIDIA H200"):
        (out, residual), vjp = jax.eval_shape(functools.partial(jax.vjp, attend), *shapes(dtype).values())
        gradients = jax.eval_shape(vjp, (out, residual))
    assert {x.dtype for x in (out, *gradients)} == {jnp.dtype(dtype)} and residual.dtype == np.float32


@pytest.mark.parametrize("keys", [0, S])
def test_residual_of_float64_is_float64(keys):
    with jax.enable_x64(True):
        query, key = jnp.ones((B, T, N, H), jnp.float64), jnp.ones((B, keys, K, H), jnp.float64)
        out, residual = flash_attention(query, key, key, return_residual=True)
    assert (out.dtype, residual.dtype) == (np.float64, np.float64)


@pytest.mark.parametrize(
    "setting,precision",
    [
        ("bfloat16", "DEFAULT"),
        ("tensorfloat32", "HIGH"),
        ("float32", "HIGHEST"),
        ("BF16_BF16_F32_X3", "HIGHEST"),
        ("TF32_TF32_F32", "DEFAULT"),
    ],
)
def test_any_default_matmul_precision_is_followed(setting, precision):
    """As `jax.lax.Precision` names it, where it does; and as the keyword of the same name."""
    with jax.default_matmul_precision(setting):
        assert _precision(None) is jax.lax.Precision[precision]
    if "_" not in setting:
        assert _precision(setting) is jax.lax.Precision[precision]


def attended(**options) -> np.ndarray:
    """Which key each query attends to, read off an output: bool [T, S]."""
    value = jnp.eye(S).reshape(1, S, 1, S)
    query = key = jnp.zeros((1, S, 1, 1))
    return np.asarray(flash_attention(query[:, :T], key, value, **options))[0, :, 0] > 0


@pytest.mark.parametrize("bound", [2**31 - 1, 2**31, 2**40])
def test_a_window_may_be_as_wide_as_one_likes(bound):
    np.testing.assert_array_equal(attended(local_window_size=(bound, 0)), np.tri(T, S) > 0)
    np.testing.assert_array_equal(attended(local_window_size=(0, bound)), np.tri(T, S, -1) == 0)


@pytest.mark.parametrize("form", [int, jnp.int32])
def test_offsets_are_any_int32(form):
    assert attended(query_offset=form(2**31 - 1), is_causal=True).all()
    assert not attended(query_offset=form(-(2**31)), is_causal=True).any()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_lengths_of_any_integer_dtype(dtype):
    """Also where the limit, 300, does not fit into the dtype."""
    query = jnp.ones((1, 300, 1, 1))
    for module in (np, jnp) if np.dtype(dtype).itemsize <= 4 else (np,):
        lengths = module.array([100], dtype)
        out = flash_attention(query, query, query, query_seq_lengths=lengths)
        assert int((out > 0).sum()) == 100


@pytest.mark.parametrize("offset", [np.uint8(1), np.uint32(1), jnp.uint32(1), np.uint64(1), np.int64(1), jnp.int8(1)])
def test_offsets_of_any_integer_dtype(offset):
    np.testing.assert_array_equal(attended(is_causal=True, query_offset=offset), np.tri(T, S, 1) > 0)


def test_integers_beyond_int32_are_clipped_not_wrapped():
    assert attended(is_causal=True, query_offset=np.array(2**31)).all()
    assert attended(key_value_seq_lengths=np.array([2**32 + 1])).all()
    assert not attended(query_offset=2**30, local_window_size=(2**29 + 10, None)).any()


def test_traced_values_in_a_list_are_named():
    def run(x):
        return flash_attention(**TENSORS, query_seq_lengths=[x])

    with pytest.raises(TypeError, match="query_seq_lengths: expected integers"):
        jax.jit(run)(jnp.int32(1))


def test_xla_runs_without_the_kernels(monkeypatch):
    """Where the lowering of one or both cannot be imported, it is refused with that reason and the rest goes on."""
    monkeypatch.setitem(sys.modules, "pallas_flash.kernels.mosaic_gpu", None)
    dispatch.implementations.cache_clear()
    try:
        with device("NVIDIA H200"):
            choice = explain(**FLOAT16)
        assert choice.implementation == "triton" and "cannot be imported" in choice.refusals["mosaic_gpu"]
        monkeypatch.setitem(sys.modules, "pallas_flash.kernels.triton", None)
        dispatch.implementations.cache_clear()
        choice = explain(**TENSORS)
        assert choice.implementation == "xla" and "cannot be imported" in choice.refusals["triton"]
    finally:
        dispatch.implementations.cache_clear()


def test_interpret_mode_under_x64_is_refused():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="jax_enable_x64"):
        flash_attention(**TENSORS, interpret=True)
