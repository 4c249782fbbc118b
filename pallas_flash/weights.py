"""How do scores become weights, and cotangents return? Mask, score and dropout of a tile together."""

from collections.abc import Callable
from typing import NamedTuple

from jax import Array
from jax.typing import ArrayLike

from pallas_flash import softmax
from pallas_flash.masks import Mask
from pallas_flash.problem import Problem
from pallas_flash.score import Located
from pallas_flash.tile import Tile


class Weigher(NamedTuple):
    """What happens to the scores of one tile; made before they are there, so that it is computed under products.

    Attributes:
        score: The terms of the logits; None: there are none.
        keep: Which scores count; None: all.
        drop: Of probabilities, or their cotangents: 0 where they are dropped; a pytree.
        gain: What the others count for.
        guarded: Whether cotangents may be NaN where a score does not count.
        tile: Where they are.
    """

    score: Located | None
    keep: Array | None
    drop: Callable[[Array], Array]
    gain: float
    guarded: bool
    tile: Tile

    @classmethod
    def at(cls, problem: Problem, mask: Mask, tile: Tile, edge: bool) -> "Weigher":
        """For a tile, of which some scores may not count if it is an `edge`."""
        scale = softmax.base2(problem.any_scale)[1] * softmax.LN2
        score = problem.score.at(tile, scale) if problem.score.terms else None
        keep = mask.keep(tile) if edge else None
        return cls(score, keep, problem.drop(tile), problem.gain, edge and mask.reads, tile)

    def logits(self, s: Array, c: ArrayLike) -> tuple[Array, ArrayLike, Callable[[Array], Array]]:
        """Logits, -inf where they do not count, as scores of which some factor times is base 2.

        Args:
            s: Raw scores.
            c: scale·log2(e).

        Returns:
            The scores and the factor (`s` and `c` if there are no terms), and the map from the logits' cotangent to
            that of the scaled scores.
        """
        if self.score is None:
            return softmax.masked(s, self.keep), c, lambda ds: ds
        value, pull = self.score.linear(self.score.scaled(s), self.keep)
        return softmax.masked(value, self.keep), self.score.gain * softmax.LOG2E, pull

    def recompute(self, s: Array, c: ArrayLike, lse2: Array) -> tuple[Array, Callable[[Array, Array], Array]]:
        """Probabilities of raw scores, and dp, delta ↦ ds: the cotangent of the scaled scores (eqs. 12, 16)."""
        logits, factor, pull = self.logits(s, c)
        p = softmax.recompute(logits, factor, lse2, self.tile.fast)
        return p, lambda dp, delta: pull(self.d_logit(p, dp, delta))

    def d_logit(self, p: Array, dp: Array, delta: Array) -> Array:
        """Cotangent of the logits, from that of the dropped probabilities."""
        dp = self.drop(dp)
        return softmax.d_score(p, dp if self.gain == 1 else dp * self.gain, delta, self.guarded)
