"""Plans of the CUDA backend: launches, the choice of a kernel, and refusals."""

import dataclasses
import itertools
import re
import subprocess
import sys
import types

import pytest

from pallas_patch_embed.backends import BACKENDS, cuda, explain, tiles
from pallas_patch_embed.base.chips import A100, B200, B300, H200, RTX_5090, Target
from pallas_patch_embed.base.problem import NAMED_SHAPES, named_shape
from tests.kernels.cuda_kernels import CHIPS, LONG, built, configs, expected_launch
from tests.kernels.interpreter import problem_of
from tests.operator.planned import refusal

HOPPER, ULTRA = Target("cuda", H200), Target("cuda", B300)


# Launches.


@built
@pytest.mark.parametrize("capability", CHIPS)
def test_a_launch_equals_an_independent_derivation(capability):
    launched = 0
    of_patches = [c for c in configs(capability=capability) if c.dtype != cuda.IMAGES]
    for config in of_patches:
        for (M, period), N, K in itertools.product(
            [(1, 1), (392, 196), (3 * 729, 729), (5 * 196 + 4, 5 * 196 + 4), (928256, 196)],
            [768, 1024, 1152, 1536],
            [640, 768, 3072],
        ):
            shapes = dict(M=M, N=N, K=K, period=period, workers=7, segments=3)
            expected = expected_launch(config, **shapes)
            short = expected["chunks"] < config.splits
            if short or N % config.tile_n or expected["shared_memory"] > 227 * 1024:
                reasons = r"expected a multiple|shared memory|for each block"
                with pytest.raises(NotImplementedError, match=reasons):
                    cuda.launch(config, **shapes)
                continue
            assert cuda.launch(config, **shapes) == expected
            launched += 1
    assert launched > 20 * len(of_patches)


@built
def test_a_launch_for_images_is_what_is_derived_from_the_shapes():
    found = configs(dtype=cuda.IMAGES)
    for config, (B, height, width), N in itertools.product(
        found,
        [
            (1, 16, 32),
            (3, 224, 224),
            (4736, 224, 224),
            (5, 512, 384),
            (64, 48, 256),
            (2, 240, 240),
            (7, 16, 16),
        ],
        [768, 1024, 1152, 1536],
    ):
        S = height * width // 256
        shapes = dict(M=B * S, N=N, K=768, period=S, workers=7, segments=3, pixels=(height, width))
        if N % config.tile_n:
            with pytest.raises(NotImplementedError, match="expected a multiple"):
                cuda.launch(config, **shapes)
        else:
            assert cuda.launch(config, **shapes) == expected_launch(config, **shapes)
    assert [sum(c.capability == number for c in found) for number in (90, 100)] == [12, 20]


@built
@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize(
    "shapes, reason",
    [
        (
            dict(K=640),
            r"K is 640, expected 768: TMA cuts patches of 16 x 16 pixels\. Leave",
        ),
        (dict(K=3072), "K is 3072, expected 768"),
        (
            dict(pixels=(224, 248)),
            "images have 224 x 248 pixels, expected multiples of 16",
        ),
        (
            dict(pixels=(250, 224)),
            "images have 250 x 224 pixels, expected multiples",
        ),
        (dict(pixels=(0, 0)), "images have 0 x 0 pixels"),
        (dict(pixels=(16, 2**36)), r"rows of patches of less than 2\^40 bytes"),
        (dict(M=195), "y has 195 rows, expected a multiple of the 14 x 14 patches of an image"),
        # The number of patches is 2^64 and would wrap around to 0.
        (dict(M=0, pixels=(2**38, 2**34)), "expected a multiple of the 17179869184 x 1073741824"),
    ],
    ids=str,
)
def test_images_that_cannot_be_cut_are_refused(shapes, reason, capability):
    config = next(c for c in configs(dtype=cuda.IMAGES, capability=capability) if c.tile_n == 64)
    fine = dict(M=392, N=768, K=768, period=196, workers=7, segments=3, pixels=(224, 224))
    cuda.launch(config, **fine)
    with pytest.raises(NotImplementedError, match=reason):
        cuda.launch(config, **(fine | shapes))


@built
def test_a_kernels_name_tells_its_config():
    for config in configs():
        kind = "table" if config.has_table else "offset"
        way = "streamed" if config.stream_weight else "stationary"
        # Hopper has no pairs, so there b2 is a split of K.
        split = config.splits > 1 and config.capability != 90
        sharing = f"{'split' if split else 'b'}{config.blocks}"
        sharing = "cooperative" if config.cooperative else sharing
        assert config.name == (
            f"patch_embed_sm{config.capability}_{config.dtype}_{config.out_dtype}_{kind}_"
            f"{config.tile_n}x{config.rows}_{sharing}_s{config.slots}_{way}"
        )
    assert len({config.name for config in configs()}) == len(configs()) > 0


@built
def test_the_configs_that_split_K_have_one_kernel_for_all_numbers_of_blocks():
    found = [config for config in configs() if config.splits > 1]
    for capability in CHIPS:
        own = [config for config in found if config.capability == capability]
        assert sorted({config.blocks for config in own}) == [2, 4, 8]
    assert all(config.splits == config.blocks for config in found)
    assert {config.symbol for config in found} == {
        f"patch_embed_{kernel}_stationary".format(f"{dtype}_{out_dtype}_{kind}")
        for kernel in ("sm90_{}_64x64_split_s8", "sm100_{}_64x128_split_s4")
        for dtype in ("e4m3", "i8", "bf16")
        for out_dtype in ("bf16", "f32")
        for kind in ("table", "offset")
    }
    others = [config for config in configs() if config not in found]
    assert all(config.symbol == config.name for config in others)
    assert all(config.blocks <= (2 if config.capability == 100 else 1) for config in others)


@built
def test_all_kernels_are_built():
    assert not configs(built=False)


@built
def test_the_library_contains_the_built_kernels():
    library = cuda.LIBRARY.read_bytes()
    # A fatbin begins with this word, whether it is compressed or not.
    images = {(c.capability, c.dtype) for c in configs(built=True)}
    assert library.count(b"\x50\xed\x55\xba") >= len(images) > 0


@built
def test_the_library_needs_neither_driver_nor_runtime_nor_python_to_load():
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"
    command = [sys.executable, "-c", code, cuda.LIBRARY]
    maps = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "libpatch_embed" in maps.stdout
    assert not re.search(r"libcuda|libcudart|libnv|libstdc\+\+|xla", maps.stdout)


@built
@pytest.mark.parametrize(
    "shapes, reason",
    [
        (dict(N=100), "N is 100, expected a multiple of the kernel's 64 columns"),
        (dict(N=0), "N is 0, expected a multiple"),
        (dict(K=588), "K is 588, expected a multiple of 128 bytes"),
        (dict(K=0), "K is 0, expected a multiple of 128 bytes"),
        (dict(K=6144), "K = 6144 needs .* bytes of shared memory, expected at most 232448"),
        (dict(M=2**31), "M = 2147483648 rows, expected fewer"),
        (dict(M=-1), "M = -1 rows, expected fewer"),
        (dict(workers=0), "0 workers with 3 segments each"),
        (dict(segments=0), "7 workers with 0 segments each"),
        (dict(period=0), "the table has 0 rows"),
        (dict(workers=2**31), "2\\^31 or more"),
        (dict(N=2**31), "2\\^31 or more"),
        (dict(N=2**27), "eight rows of y"),
    ],
    ids=str,
)
def test_shapes_that_cannot_be_launched_are_refused(shapes, reason):
    (config, *_) = configs(capability=90, dtype="i8", tile_n=64, blocks=1, stream_weight=False)
    fine = dict(M=392, N=768, K=768, period=196, workers=7, segments=3)
    cuda.launch(config, **fine)
    with pytest.raises(NotImplementedError, match=reason):
        cuda.launch(config, **(fine | shapes))


@built
@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize(
    "blocks, K, reason",
    [
        (8, 896, "K is 896, expected at least 1024 bytes, 128 for each block. Use a kernel with"),
        (2, 3200, "K = 3200 needs 238592 bytes of shared memory"),
        (4, 384, "K is 384, expected at least 512 bytes"),
    ],
)
def test_a_K_that_cannot_be_split_is_refused(capability, blocks, K, reason):
    fine = dict(M=64, N=768, K=1024, period=64, workers=1, segments=1)
    config = next(c for c in configs(capability=capability, dtype="i8") if c.splits == blocks)
    assert cuda.launch(config, **fine)["cluster"] == blocks
    with pytest.raises(NotImplementedError, match=reason):
        cuda.launch(config, **(fine | dict(K=K)))


@built
def test_a_kernel_that_does_not_exist_is_refused():
    config = dataclasses.replace(configs()[0], name="patch_embed_sm90")
    with pytest.raises(NotImplementedError, match="no kernel of this name"):
        cuda.launch(config, M=1, N=64, K=128, period=1, workers=1, segments=1)


# The choice of a kernel.


@built
@pytest.mark.parametrize("capability", CHIPS)
def test_every_named_shape_has_a_kernel(all_built, capability):
    for shape, dtype, out_dtype, B in itertools.product(
        NAMED_SHAPES, tiles.DTYPES, ("bfloat16", "float32"), (1, 64, 4736)
    ):
        problem = problem_of(shape, dtype, B, out_dtype)
        chip = CHIPS[capability]
        config = cuda.choose_config(problem, capability, chip)
        config.check(problem, chip)
        assert (LONG[config.dtype], LONG[config.out_dtype]) == (dtype, out_dtype)
        tiling = config.tiling(problem, chip)
        assert tiling.workers == 1 or tiling.thread_blocks <= chip.multiprocessors
        assert refusal(cuda, problem, Target("cuda", chip)) is None


@built
@pytest.mark.parametrize(
    "name, B, dtype, capability, chosen",
    [
        ("B/16 224", 4736, "float8_e4m3fn", 90, "192x64_b1_s10_stationary"),
        ("B/16 224", 4736, "bfloat16", 90, "192x128_b1_s5_streamed"),
        ("B/16 224", 1, "int8", 90, "64x64_cooperative_s8_stationary"),
        ("L/16 256", 512, "int8", 90, "128x64_b1_s8_stationary"),
        ("B/32 256", 4736, "int8", 90, "192x128_b1_s5_streamed"),
        ("B/32 256", 1, "int8", 90, "64x64_b8_s8_stationary"),
        ("B/32 256", 1, "bfloat16", 90, "64x64_b8_s8_stationary"),
        ("B/32 256", 8, "int8", 90, "64x64_b2_s8_stationary"),
        ("B/32 256", 8, "bfloat16", 90, "64x64_b4_s8_stationary"),
        ("B/16 224", 1, "bfloat16", 90, "64x64_cooperative_s8_stationary"),
        ("So400m/16 512", 1, "bfloat16", 90, "96x64_cooperative_s5_stationary"),
        ("So400m/14 384", 16, "bfloat16", 90, "128x64_b1_s8_stationary"),
        ("So400m/14 384", 512, "float8_e4m3fn", 90, "192x64_b1_s10_stationary"),
        ("B/16 224", 4736, "float8_e4m3fn", 100, "256x128_b2_s6_stationary"),
        ("B/16 224", 4736, "bfloat16", 100, "256x128_b2_s5_streamed"),
        ("B/16 224", 1, "int8", 100, "64x128_b1_s7_stationary"),
        ("So400m/16 256", 4736, "int8", 100, "192x128_b2_s7_stationary"),
        ("B/32 256", 1, "int8", 100, "64x128_split8_s4_stationary"),
        ("B/32 256", 4, "bfloat16", 100, "64x128_split4_s4_stationary"),
        ("B/32 256", 8, "float8_e4m3fn", 100, "64x128_split2_s4_stationary"),
        ("B/32 256", 32, "float8_e4m3fn", 100, "128x128_b2_s6_streamed"),
    ],
)
def test_the_kernel_with_the_smallest_estimated_time_is_chosen(
    all_built, name, B, dtype, capability, chosen
):
    problem = problem_of(named_shape(name), dtype, B)
    config = cuda.choose_config(problem, capability, CHIPS[capability])
    assert config.name.endswith(chosen)


# Refusals.


@built
@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(dtype="float32"), "it multiplies float8_e4m3fn, bfloat16, int8, not float32"),
        (dict(weight=(100, 768), scale=(100,), table=(196, 100)), "N is 100, expected a multiple"),
        (dict(patches=(8, 196, 588), weight=(768, 588)), "K is 588, expected a multiple of 128"),
        (dict(weight=(2, 768, 768)), "it multiplies by one weight"),
        (dict(table_dtype="float32"), "it adds a bfloat16 table"),
        (dict(table=(4, 196, 768)), "with the last leading axes of the patches"),
        (
            dict(patches=(2**24, 196, 768)),
            "the call has 3288334336 rows, expected at most 2147483392.",
        ),
    ],
    ids=str,
)
def test_a_problem_that_it_cannot_serve_is_refused_with_the_reason(change, reason):
    fine = problem_of(named_shape("B/16 224"), "int8")
    assert refusal(cuda, fine, HOPPER) is None
    assert refusal(cuda, fine) is None
    for target in (None, HOPPER):
        assert reason in refusal(cuda, dataclasses.replace(fine, **change), target)


@built
def test_chips_without_kernels_are_refused_with_the_reason(all_built, monkeypatch):
    int8, float8 = (problem_of(named_shape("B/16 224"), d) for d in ("int8", "float8_e4m3fn"))
    for target in (Target("cpu"), Target("rocm"), Target("cuda")):
        assert refusal(cuda, int8, target) == f"it needs an NVIDIA GPU; the target is {target}."
    for target in (Target("cuda", A100), Target("cuda", RTX_5090)):
        assert refusal(cuda, int8, target).startswith("it needs compute capability 9.0, 10.0 or")
    assert "10.3 has no int8 tensor cores" in refusal(cuda, int8, ULTRA)
    assert refusal(cuda, float8, ULTRA) is None
    hopper = tuple(c for c in cuda.configs() if c.capability == 90)
    monkeypatch.setattr(cuda, "configs", lambda: hopper)
    assert "no kernels for these dtypes on sm_100" in refusal(cuda, float8, Target("cuda", B200))
    assert refusal(cuda, float8) is None


@built
def test_a_config_for_another_problem_is_refused():
    problem = problem_of(named_shape("B/16 224"), "int8")
    for other in (
        dict(dtype="bf16"),
        dict(out_dtype="f32"),
        dict(has_table=False),
        dict(built=False),
    ):
        config = cuda.choose_config(problem, 90, H200)
        with pytest.raises(
            NotImplementedError, match="is for other dtypes or another kind of table"
        ):
            dataclasses.replace(config, **other).check(problem, H200)


@built
def test_it_runs_where_the_Pallas_kernels_cannot(monkeypatch):
    def refuses(problem, target):
        raise NotImplementedError("not today.")

    for name in ("mosaic_sm90", "mosaic_sm100"):
        monkeypatch.setitem(BACKENDS, name, types.SimpleNamespace(plan=refuses))
    assert explain(problem_of(named_shape("B/16 224"), "int8"), HOPPER).chosen == "cuda"
