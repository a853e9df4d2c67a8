"""Layer ids against the order in which a plain forward pass writes KV."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_trunc.models.layer_ids import LayerPlace, LoopShape

SHAPES = st.builds(
    LoopShape,
    prelude=st.integers(0, 5),
    core=st.integers(1, 5),
    coda=st.integers(0, 5),
    recurrences=st.integers(1, 6),
)


def plain_order(shape: LoopShape) -> list[LayerPlace]:
    order = [LayerPlace("prelude", 0, i) for i in range(shape.prelude)]
    order += [LayerPlace("core", s, i) for s in range(shape.recurrences) for i in range(shape.core)]
    return order + [LayerPlace("coda", 0, i) for i in range(shape.coda)]


@given(SHAPES)
def test_ids_count_up_in_forward_order_and_back(shape):
    order = plain_order(shape)
    assert shape.num_kv_layers == len(order)
    assert [shape.place(layer_id) for layer_id in range(shape.num_kv_layers)] == order
    for layer_id, (part, step, layer) in enumerate(order):
        named = {"prelude": shape.prelude_id, "coda": shape.coda_id}
        got = shape.core_id(step, layer) if part == "core" else named[part](layer)
        assert got == layer_id


def test_published_models():
    assert LoopShape(0, 24, 0, 4).num_kv_layers == 96
    huginn = LoopShape(2, 4, 2, 32)
    assert (huginn.num_kv_layers, huginn.num_layers) == (132, 8)
    assert (huginn.core_id(0, 0), huginn.core_id(31, 3), huginn.coda_id(0)) == (2, 129, 130)
    assert LoopShape(4, 6, 4, 32).num_kv_layers == 200


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("core_id", (4, 0), "step is 4, but the accepted range is 0 to 3."),
        ("core_id", (0, -1), "core layer is -1"),
        ("prelude_id", (0,), "prelude layer is 0, but the accepted range is nothing, as there is none."),
        ("coda_id", (1,), "coda layer is 1"),
        ("place", (9,), "KV layer id is 9"),
    ],
)
def test_ids_out_of_range_are_refused(call, arguments, message):
    with pytest.raises(IndexError) as caught:
        getattr(LoopShape(0, 2, 1, 4), call)(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("field", ["prelude", "core", "coda", "recurrences"])
@pytest.mark.parametrize("value", [-1, 1.0, True, None])
def test_shape_fields_are_checked(field, value):
    counts = {"prelude": 1, "core": 1, "coda": 1, "recurrences": 1, field: value}
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        LoopShape(**counts)
