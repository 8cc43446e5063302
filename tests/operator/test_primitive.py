"""The primitive: its equation, vmap, scan, differentiation, export and the compilation cache."""

import dataclasses
import functools
import itertools
import math
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_patch_embed as ppe
from pallas_patch_embed.backends import triton
from pallas_patch_embed.patch_embedding import request
from tests.operator.bounds import assert_bit_equal, draw_images, draw_params, leaves_with_axis
from tests.short_suite import keep


def make(dtype="int8", seed=0, **options):
    rng = np.random.default_rng(seed)
    shape = dict(patch_size=4, grid=(2, 3), N=10) | options
    params = draw_params(rng, dtype=dtype, **shape)
    return params, ppe.patchify(draw_images(rng, 5, 8, 12, 3), params)


def embed(x, params, e=None):
    return ppe.patch_embed(x, params, position_embedding=e)


def test_the_jaxpr_is_one_equation():
    params, x = make()
    for function in (embed, jax.vmap(embed, (0, None))):
        jaxpr = jax.make_jaxpr(function)(x, params)
        assert [str(eqn.primitive) for eqn in jaxpr.eqns] == ["patch_embed"]


@pytest.mark.parametrize("backend", [None, "xla", "mosaic_sm100"])
@pytest.mark.parametrize("source", [ppe.embed_images, ppe.patch_embed], ids=lambda f: f.__name__)
def test_an_equation_prints_in_one_line(monkeypatch, source, backend):
    monkeypatch.setattr(request, "choose", lambda *_, **__: None)
    params = draw_params(
        np.random.default_rng(0), patch_size=16, grid=(14, 14), N=768, dtype="int8"
    )
    x = jax.ShapeDtypeStruct((4736, 224, 224, 3), "uint8")
    if source is ppe.patch_embed:
        x = jax.ShapeDtypeStruct((4736, 196, 768), params.dtype)
    jaxpr = jax.make_jaxpr(functools.partial(source, params=params, backend=backend))(x)
    (line,) = [line for line in str(jaxpr).splitlines() if "patch_embed" in line]
    assert line.count("[") == line.count("]") and len(line) <= 100


@pytest.mark.parametrize("source", ["patches", "uint8 images", "float images"])
def test_a_jitted_call_runs_no_python(source):
    """JAX dispatches a call in about 10 us from C++, and in about 200 us from Python."""
    params, x = jax.device_put(make())
    function = ppe.patch_embed if source == "patches" else ppe.embed_images
    if source != "patches":
        x = jnp.asarray(draw_images(np.random.default_rng(0), 5, 8, 12, 3))
        x = x / 127.5 - 1 if source == "float images" else x
    jitted, called = jax.jit(function), []
    expected = jitted(x, params)

    def note(frame, event, _):
        if event == "call":
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        y = jitted(x, params)
    finally:
        sys.setprofile(None)
    assert called == []
    assert_bit_equal(y, expected)


def test_without_jit_it_is_the_same():
    params, x = make()
    expected = embed(x, params)
    with jax.disable_jit():
        assert_bit_equal(embed(x, params), expected)
        assert_bit_equal(jax.vmap(embed, (0, None))(x, params), expected)


def test_jax_debug_nans_finds_a_nan():
    params, x = make("float32")
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.jit(embed)(x.at[0, 0, 0].set(jnp.nan), params)


def stack(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


OPERANDS = ("patches", "weight", "scale", "offset", "table")


@pytest.mark.parametrize(
    "mapped, positions",
    keep(
        [
            (names, positions)
            for positions in (True, False)
            for r in (1, 2, 4, 5)
            for names in itertools.combinations(OPERANDS, r)
        ],
        lambda case: len(case[0]) in (1, len(OPERANDS)),
        "compiles a program for each case; the short suite maps over each operand, and over all",
    ),
    ids=lambda x: "+".join(x) if isinstance(x, tuple) else str(x),
)
def test_vmap_over_any_operand_is_a_loop_over_it(mapped, positions):
    sets = [make(seed=seed, positions=positions) for seed in range(3)]
    mapped = [name for name in mapped if positions or name != "table"] or ["patches"]
    batched = stack(*(params for params, _ in sets))
    fixed = sets[0][0]
    names = ("weight", "scale", "offset", "table")
    params = dataclasses.replace(
        fixed, **{name: getattr(batched, name) for name in names if name in mapped}
    )
    axes = leaves_with_axis(fixed, {name: 0 for name in names if name in mapped})
    x = jnp.stack([x for _, x in sets], axis=1) if "patches" in mapped else sets[0][1]
    y = jax.jit(jax.vmap(embed, (1 if "patches" in mapped else None, axes)))(x, params)
    for i, (its_params, its_x) in enumerate(sets):
        one = dataclasses.replace(
            fixed, **{name: getattr(its_params, name) for name in names if name in mapped}
        )
        assert_bit_equal(y[i], embed(its_x if "patches" in mapped else sets[0][1], one))


def test_vmap_maps_over_positions_and_may_be_nested():
    params, x = make()
    e = np.random.default_rng(1).normal(size=(3, 6, 10)).astype(np.float32)
    wanted = np.stack([[embed(x[i], params, e[j]) for i in range(5)] for j in range(3)])
    over_e = jax.vmap(embed, (None, None, 0))
    assert_bit_equal(over_e(x, params, e), wanted)
    assert_bit_equal(jax.vmap(over_e, (0, None, None))(x, params, e), wanted.swapaxes(0, 1))
    assert_bit_equal(
        jax.vmap(jax.vmap(embed, (None, None, 0), out_axes=1), (0, None, None))(x, params, e),
        wanted.swapaxes(0, 1).swapaxes(1, 2),
    )


def test_vmap_repeats_no_product_and_copies_no_operand():
    params, x = make()
    e = jnp.zeros((7, 6, 10))
    one = jax.jit(embed).lower(x, params, e[0]).compile().cost_analysis()["flops"]
    many = jax.jit(jax.vmap(embed, (None, None, 0))).lower(x, params, e).compile()
    product = 2 * 5 * 6 * 128 * 10
    assert many.cost_analysis()["flops"] - one < product
    for axes in ((0, None), (None, leaves_with_axis(params, dict(weight=0)))):
        y = stack(x, x) if axes[0] == 0 else x
        p = params
        if axes[0] is None:
            p = dataclasses.replace(params, weight=stack(params.weight, params.weight))
        jaxpr = jax.make_jaxpr(jax.vmap(embed, axes))(y, p)
        results: list[Any] = [eqn.outvars[0].aval for eqn in jaxpr.eqns[:-1]]
        largest = max((result.size for result in results), default=0)
        assert largest <= max(y.size, p.weight.size)


def test_scan_and_remat_change_nothing():
    params, x = make()
    wanted = embed(x, params)
    _, y = lax.scan(lambda carry, x: (carry, embed(x, params)), 0, x)
    assert_bit_equal(y, wanted)
    assert_bit_equal(jax.checkpoint(embed)(x, params), wanted)
    assert_bit_equal(jax.jit(jax.checkpoint(jax.jit(embed)))(x, params), wanted)


@pytest.mark.parametrize("positions", [True, False])
def test_it_works_where_jax_refuses_promotion(positions):
    params, x = make(positions=positions)
    e = np.zeros((6, 10), np.float32)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for function in (embed, jax.jit(embed)):
            function(x, params)
            function(x, params, e)
        ppe.embed_images(np.zeros((2, 8, 12, 3), np.uint8), params)


# Differentiation.

FROZEN, FROZEN_X = make("bfloat16")
HEAD = jnp.arange(10.0)


def loss(x, params=FROZEN):
    return (embed(x, params).astype(jnp.float32) * HEAD).sum()


def no_wrap(function):
    return function


@pytest.mark.parametrize("wrap", [no_wrap, jax.jit, jax.checkpoint])
@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f: jax.grad(f)(FROZEN_X),
        lambda f: jax.vmap(jax.grad(f))(FROZEN_X),
        lambda f: jax.jvp(f, (FROZEN_X,), (FROZEN_X,)),
        lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(FROZEN_X),
        lambda f: jax.jacfwd(f)(FROZEN_X),
        lambda f: jax.linearize(f, FROZEN_X)[1](FROZEN_X),
        lambda f: jax.grad(lambda s: f(FROZEN_X, dataclasses.replace(FROZEN, scale=s)))(
            FROZEN.scale
        ),
        lambda f: jax.hessian(f)(FROZEN_X[:1]),
    ],
)
def test_differentiating_is_refused(differentiate, wrap):
    with pytest.raises(TypeError, match=r"inference-only.*stop_gradient"):
        differentiate(wrap(loss))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_differentiating_by_images_is_refused_unless_frozen(dtype):
    params, _ = make(dtype)
    images = jnp.zeros((3, 8, 12, 3))

    def total(images):
        return ppe.embed_images(images, params).astype(jnp.float32).sum()

    for wrap in (no_wrap, jax.jit, jax.checkpoint):
        with pytest.raises(TypeError, match="inference-only"):
            jax.grad(wrap(total))(images)
        frozen = jax.grad(wrap(lambda images: lax.stop_gradient(total(images)) + images.sum()))
        np.testing.assert_array_equal(frozen(images), 1)


@pytest.mark.parametrize("wrap", [no_wrap, jax.jit, jax.checkpoint])
def test_a_frozen_patch_embedding_may_be_inside_a_differentiated_model(wrap):
    stop = lax.stop_gradient
    x = FROZEN_X
    np.testing.assert_array_equal(
        jax.grad(wrap(lambda x: stop(loss(x)) + 2 * x.astype(jnp.float32).sum()))(x), 2
    )
    np.testing.assert_array_equal(jax.grad(wrap(lambda x: loss(stop(x)) * 1.0))(x), 0)
    wanted = np.asarray(embed(x, FROZEN), np.float32).sum((0, 1))
    head = jax.grad(wrap(lambda head: (embed(x, FROZEN).astype(jnp.float32) * head).sum()))(HEAD)
    np.testing.assert_allclose(head, wanted, rtol=1e-5, atol=1e-3)
    both = jax.grad(wrap(lambda p: (stop(embed(x, p[0])) * p[1]).sum().astype(jnp.float32)))
    grads = both((FROZEN, jnp.ones(10, jnp.bfloat16)))
    assert not any(np.asarray(leaf, np.float32).any() for leaf in jax.tree.leaves(grads[0]))
    assert np.asarray(grads[1], np.float32).any()


# Export and compilation.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_xla_writes_no_broadcast_table_and_no_copy_of_the_patches(dtype):
    params, x = make(dtype, N=24)
    hlo = jax.jit(embed).lower(x, params).compile().as_text()
    written = []
    for line in hlo[hlo.index("ENTRY") :].splitlines()[1:]:
        shape = re.search(r" = \w+\[([\d,]*)\]\S* (\S+)\(", line)
        if shape and shape[2] not in ("parameter", "bitcast", "get-tuple-element", "tuple"):
            written.append(math.prod(map(int, shape[1].split(","))))
    # Only the accumulator and the result are written.
    assert written == [5 * 6 * 24] * 2, hlo


@pytest.mark.parametrize("platforms", [["cpu"], ["cuda"], ["cpu", "cuda"]], ids="+".join)
@pytest.mark.parametrize("backend", [None, "xla"])
def test_export_round_trips(platforms, backend):
    params, x = make()

    def function(x, params):
        return ppe.patch_embed(x, params, backend=backend)

    exported = jax.export.export(jax.jit(function), platforms=platforms)(x, params)
    restored = jax.export.deserialize(exported.serialize())
    assert restored.platforms == tuple(platforms)
    assert restored.in_tree == jax.tree.structure(((x, params), {}))
    if "cpu" in platforms:
        assert_bit_equal(restored.call(x, params), embed(x, params))


def test_export_with_a_symbolic_batch():
    params, x = make()
    (b,) = jax.export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype)
    exported = jax.export.export(jax.jit(embed))(shape, params)
    restored = jax.export.deserialize(exported.serialize())
    for B in (1, 5):
        assert_bit_equal(restored.call(x[:B], params), embed(x[:B], params))


def test_an_export_without_flatbuffers_names_the_extra(monkeypatch):
    params, x = make()
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(ImportError, match=r"pip install 'pallas_patch_embed\[export\]'"):
        jax.export.export(jax.jit(embed))(x, params)


@pytest.mark.parametrize("backend", ["mosaic_sm90", "triton"])
@pytest.mark.parametrize("what", ["several platforms", "known sizes"])
def test_an_export_that_a_named_backend_cannot_serve_is_refused(what, backend):
    if backend == "triton" and triton.missing():
        pytest.skip(triton.missing())
    params = draw_params(np.random.default_rng(0), patch_size=16, grid=(4, 4), N=64, dtype="int8")
    batch, platforms = 2, ("cpu", "cuda")
    if what == "known sizes":
        (batch,), platforms = jax.export.symbolic_shape("b"), ("cuda",)
    for shape, embed in (((16, 768), ppe.patch_embed), ((64, 64, 3), ppe.embed_images)):
        dtype = jnp.int8 if embed is ppe.patch_embed else jnp.uint8
        x = jax.ShapeDtypeStruct((batch, *shape), dtype)
        export = jax.export.export(
            jax.jit(functools.partial(embed, backend=backend)), platforms=platforms
        )
        with pytest.raises(NotImplementedError, match=f"{backend}.*{what}"):
            export(x, params)


CACHED = """
import sys, jax, numpy as np, pallas_patch_embed as ppe
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
rng = np.random.default_rng(0)
params = ppe.pack(rng.normal(size=(16, 16, 3, 8)), None, None, patch_size=16, dtype="int8")
hits.clear()
jax.jit(ppe.embed_images)(np.zeros((1, 16, 16, 3), np.uint8), params).block_until_ready()
print(sum("cache_hits" in e for e in hits), sum("cache_misses" in e for e in hits))
"""


def test_a_second_process_hits_the_compilation_cache(tmp_path):
    def run():
        command = [sys.executable, "-c", CACHED, str(tmp_path)]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        return result.stdout.split()

    assert run() == ["0", "1"]
    assert run() == ["1", "0"]


@pytest.mark.parametrize("backend", ["mosaic_sm90", "mosaic_sm100"])
def test_positions_with_a_batch_that_patches_lack_are_left_to_xla(backend):
    params = draw_params(np.random.default_rng(0), patch_size=16, grid=(4, 4), N=64, dtype="int8")
    x = ppe.patchify(np.zeros((1, 64, 64, 3), np.uint8), params)[0]
    positions = np.ones((1, 16, 64), np.float32)

    def embed(q, backend=None):
        return ppe.patch_embed(x, params, position_embedding=q, backend=backend)

    assert jax.vmap(embed)(positions).shape == (1, 16, 64)
    mapped = jax.jit(jax.vmap(functools.partial(embed, backend=backend)))
    with pytest.raises(NotImplementedError, match="with the last leading axes"):
        mapped.trace(positions).lower(lowering_platforms=("cuda",))
