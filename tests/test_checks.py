"""The comparison of all tests catches what it should: faults of one block or one key, in bfloat16, in one tensor."""

import dataclasses
import functools

import checks
import jax
import jax.numpy as jnp
import pytest
from cases import Case

from pallas_flash import ScoreModifier, flash_attention

CASE = Case("checked", B=1, T=256, N=2, H=32, dtype="bfloat16", is_causal=True)
attend = functools.partial(flash_attention, return_residual=True, implementation="xla")


def without_gradient(x, rows):
    """`x`, through which no gradient flows for some rows."""
    return x.at[:, rows].set(jax.lax.stop_gradient(x[:, rows]))


FAULTS = {
    "band shifted by one": lambda q, k, v: attend(q, k, v, is_causal=True, query_offset=1),
    "last keys dropped": lambda q, k, v: attend(q, k, v, is_causal=True, key_value_seq_lengths=jnp.array([240])),
    "no dv for a block": lambda q, k, v: attend(q, k, without_gradient(v, slice(192, 224)), is_causal=True),
    "no dk for a block": lambda q, k, v: attend(q, without_gradient(k, slice(192, 224)), v, is_causal=True),
    "no dq for a block": lambda q, k, v: attend(without_gradient(q, slice(224, 256)), k, v, is_causal=True),
    "a wrong scale": lambda q, k, v: attend(q, k, v, is_causal=True, scale=1.05 / 32**0.5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault):
    with pytest.raises(AssertionError):
        checks.check(CASE, FAULTS[fault])


SCORED = Case(
    "checked_scores",
    B=1,
    T=128,
    N=2,
    H=32,
    dtype="bfloat16",
    is_causal=True,
    bias="of_heads",
    alibi="heads",
    soft_cap=4.0,
    scores=("key_weight",),
    sinks=True,
    dropout=0.2,
)


def without_gradient_of(name):
    return lambda given: {name: jax.lax.stop_gradient(given[name])}


FAULTS_OF_SCORES = {
    "no gradient of the bias for a block": lambda given: {"bias": without_gradient(given["bias"], slice(96, 128))},
    "no gradient of the slopes": without_gradient_of("alibi_slopes"),
    "no gradient of the sinks": without_gradient_of("sinks"),
    "no gradient of an operand": lambda given: {
        "score_modifiers": jax.tree.map(
            lambda f: dataclasses.replace(f, operands=tuple(map(jax.lax.stop_gradient, f.operands))),
            given["score_modifiers"],
            is_leaf=lambda x: isinstance(x, ScoreModifier),
        )
    },
    "another cap": lambda given: {"logits_soft_cap": 4.3},
    "another key": lambda given: {"dropout_key": jax.random.key(100)},
    "another rate": lambda given: {"dropout_rate": 0.25},
    "slopes of other heads": lambda given: {"alibi_slopes": given["alibi_slopes"][::-1]},
    "no sinks": lambda given: {"sinks": None},
}


@pytest.mark.parametrize("fault", FAULTS_OF_SCORES)
def test_fault_of_scores_is_caught(fault):
    def attention(q, k, v, **given):
        given = SCORED.options() | given
        return attend(q, k, v, **(given | FAULTS_OF_SCORES[fault](given)))

    with pytest.raises(AssertionError):
        checks.check(SCORED, attention)


def test_nan_is_caught():
    def attention(q, k, v):
        out, residual = attend(q, k, v, is_causal=True)
        return out.at[0, 3].set(jnp.nan), residual

    with pytest.raises(AssertionError):
        checks.check(CASE, attention)


def test_right_attention_passes():
    for case in (CASE, SCORED):
        checks.check(case, functools.partial(attend, **case.options()))
