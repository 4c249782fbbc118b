"""What do users write themselves? Functions of a tile, for masks and for scores, with the arrays that they need."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jax import Array


@dataclasses.dataclass(frozen=True)
class Modifier:
    """A user's function and its arrays; see `MaskModifier` and `ScoreModifier`."""

    function: Callable[..., Array]
    operands: tuple[Any, ...] = ()
    axes: tuple[str, ...] = ()

    argument: ClassVar[str]
    instead: ClassVar[str]

    def __post_init__(self):
        if not callable(self.function):
            raise TypeError(
                f"{self.argument}: expected functions of a tile or {type(self).__name__}s, got "
                f"{type(self.function).__name__}; an array is passed as `{self.instead}`"
            )
        try:
            hash(self.function)
        except TypeError:
            raise TypeError(
                f"{self.argument}: expected hashable functions, got {self.name}; keep its arrays in `operands`, "
                "its numbers in a frozen dataclass"
            ) from None
        if isinstance(self.axes, str) or len(self.axes) != len(self.operands):
            raise ValueError(
                f"axes: expected one string for each of {len(self.operands)} operands, got {self.axes!r}; "
                "e.g. ('BT', 'BS')"
            )
        for letters in self.axes:
            if not isinstance(letters, str) or [*letters] != [x for x in "BNTS" if x in letters]:
                raise ValueError(f"axes: expected letters of 'BNTS' in this order, got {letters!r}; e.g. 'BT' or 'NTS'")

    @property
    def name(self) -> str:
        """What messages call it."""
        return getattr(self.function, "__name__", None) or repr(self.function)

    def operand(self, i: int) -> str:
        """What messages call one of the operands."""
        return f"{self.argument}: operand {i} of {self.name}"


class MaskModifier(Modifier):
    """Your own mask: a function of a tile, and the arrays that it needs.

    Attributes:
        function: `function(tile, *operands)` → bool, broadcastable to the tile; True = attend. `tile.q_ids` and
            `tile.k_ids` are int32 indices that broadcast to the tile (of any orientation), `tile.batch` (all batch axes
            folded into one) and `tile.head` likewise. It is traced into every kernel, so it must be made of elementwise
            jnp operations, and hashable: define it once, since a new function compiles anew.
        operands: Arrays that it gets the tile's part of, broadcastable to the tile. They have no gradient.
        axes: For each operand the letters of its axes, in the order of "BNTS": B batch axes, N query heads, T queries,
            S keys. Size 1 broadcasts an axis.

    Raises:
        TypeError, ValueError: A field is not as described.
    """

    argument = "mask_modifiers"
    instead = "mask"


class ScoreModifier(Modifier):
    """Your own scores: a function of scores and their tile, and the arrays that it needs, with gradients for all.

    Attributes:
        function: `function(score, tile, *operands)` → the new score, float32, the shape of `score`. `tile` is as for
            `MaskModifier`, and has `tile.fast.tanh`, the GPU's own. It is traced into every kernel, forward and
            backward, where JAX differentiates it: it must be made of elementwise jnp operations, and be hashable:
            define it once, since a new function compiles anew. -inf is a score that does not count;
            functions after it must leave it so.
        operands: Arrays that it gets the tile's part of, broadcastable to the tile; floating ones in float32.
        axes: For each operand the letters of its axes, as for `MaskModifier`.

    Raises:
        TypeError, ValueError: A field is not as described.
    """

    argument = "score_modifiers"
    instead = "bias"
