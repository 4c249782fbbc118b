"""Which primitives does Mosaic know? What it lacks that can be had, and what of users' functions it cannot do."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.ad_util import add_jaxvals_p
from jax._src.custom_derivatives import custom_jvp_call_p
from jax._src.pallas.mosaic_gpu.core import WGxWG_SEMANTICS
from jax._src.pallas.mosaic_gpu.lowering import _resource_estimators, mosaic_lowering_rules
from jax._src.pjit import jit_p

from pallas_flash import tile
from pallas_flash.masks import Both, Mask
from pallas_flash.patterns import Modified, Surveyed
from pallas_flash.problem import Problem
from pallas_flash.score import Term


def _complete(rules: dict) -> None:
    """With what derivatives are made of: another sum, and functions that have their own derivative."""
    if lax.add_p in rules:
        rules[add_jaxvals_p] = rules[lax.add_p]
    if jit_p in rules:
        rules[custom_jvp_call_p] = lambda ctx, *args, call_jaxpr, **_: rules[jit_p](ctx, *args, jaxpr=call_jaxpr)


for _rules in (*mosaic_lowering_rules.values(), _resource_estimators):
    _complete(_rules)


def lacking(problem: Problem) -> str | None:
    """What of the users' functions Mosaic cannot do: the function and the primitive. None: it can do all."""
    where = tile.example()

    def slope(term: Term):
        parts = term.read(where)
        value, pull = jax.vjp(lambda s: term.function(s, where, *parts), jnp.zeros((tile.EXAMPLE, tile.EXAMPLE)))
        return pull(value)

    functions = [(term.function, lambda term=term: slope(term)) for term in problem.score.terms if not term.is_built_in]
    functions += [(mask.function, lambda mask=mask: mask.keep(where)) for mask in _modified(problem.mask)]
    known = mosaic_lowering_rules[WGxWG_SEMANTICS]
    for function, evaluated in functions:
        for primitive in _primitives(jax.make_jaxpr(evaluated)()):
            if primitive not in known:
                return f"{getattr(function, '__name__', function)} uses {primitive}"


def _modified(mask: Mask) -> Iterator[Modified]:
    if isinstance(mask, Both):
        yield from _modified(mask.first)
        yield from _modified(mask.second)
    elif isinstance(mask, Surveyed):
        yield from _modified(mask.mask)
    elif isinstance(mask, Modified):
        yield mask


def _primitives(jaxpr) -> Iterator:
    for equation in jaxpr.eqns:
        yield equation.primitive
        for inner in jax.tree.leaves([*equation.params.values()], is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") and equation.primitive in (jit_p, custom_jvp_call_p):
                yield from _primitives(inner)
