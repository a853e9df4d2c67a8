"""(step, layer) to KV layer id and back: the only such arithmetic in the package.

SGLang numbers KV layers 0..n-1 in the order in which one plain forward pass writes them. For a looped model
with P prelude layers, C core layers, R recurrences and D coda layers that order is

    prelude layer i         i                      0 <= i < P
    core layer i at step s  P + s*C + i            0 <= s < R, 0 <= i < C
    coda layer j            P + R*C + j            0 <= j < D

A *step* is the 0-based index of one recurrence (depth = step + 1); a *layer* is a physical block inside its
own group. Ouro has P = D = 0 and C = num_hidden_layers. The model object exposes ``start_layer = 0`` and
``end_layer = num_kv_layers``, which is how SGLang sizes its pool; nothing else may multiply by R.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Part = Literal["prelude", "core", "coda"]
PARTS: tuple[Part, ...] = ("prelude", "core", "coda")


class LayerPlace(NamedTuple):
    part: Part
    step: int  # 0-based recurrence; 0 for prelude and coda, which run once
    layer: int  # physical layer inside the part


@dataclass(frozen=True)
class LoopShape:
    """Layer counts of a looped model; `recurrences` is R, the full depth."""

    prelude: int
    core: int
    coda: int
    recurrences: int

    def __post_init__(self) -> None:
        for name, lowest in (("prelude", 0), ("core", 1), ("coda", 0), ("recurrences", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise ValueError(f"{name} is {value!r}, but must be an integer from {lowest} up.")

    @property
    def num_layers(self) -> int:
        """Physical layers, each counted once."""
        return self.prelude + self.core + self.coda

    @property
    def num_kv_layers(self) -> int:
        return self.prelude + self.recurrences * self.core + self.coda

    def prelude_id(self, layer: int) -> int:
        return _checked("prelude layer", layer, self.prelude)

    def core_id(self, step: int, layer: int) -> int:
        _checked("step", step, self.recurrences)
        _checked("core layer", layer, self.core)
        return self.prelude + step * self.core + layer

    def coda_id(self, layer: int) -> int:
        _checked("coda layer", layer, self.coda)
        return self.prelude + self.recurrences * self.core + layer

    def layer_ids(self, part: Part, layer: int) -> list[int]:
        """KV layer ids of one physical layer: one per step for a core layer, else one."""
        if part == "core":
            return [self.core_id(step, layer) for step in range(self.recurrences)]
        return [self.prelude_id(layer) if part == "prelude" else self.coda_id(layer)]

    def place(self, layer_id: int) -> LayerPlace:
        """Inverse of the three functions above."""
        _checked("KV layer id", layer_id, self.num_kv_layers)
        if layer_id < self.prelude:
            return LayerPlace("prelude", 0, layer_id)
        step, layer = divmod(layer_id - self.prelude, self.core)
        if step < self.recurrences:
            return LayerPlace("core", step, layer)
        return LayerPlace("coda", 0, layer_id - self.prelude - self.recurrences * self.core)


def _checked(what: str, value: int, count: int) -> int:
    if not 0 <= value < count:
        accepted = f"0 to {count - 1}" if count else "nothing, as there is none"
        raise IndexError(f"{what} is {value}, but the accepted range is {accepted}.")
    return value
