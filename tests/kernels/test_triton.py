"""The Triton kernels where there is no GPU: their tests in Triton's interpreter, in a process of their own.

The interpreter has to be chosen before triton is first imported, and other tests import it by way of transformers.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = ("80", "86", "87", "89", "90", "100", "121")


def python(*arguments: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


# promise: kv-cache-layout, logprobs-mode-gpu, gpu-computes-device, quantised-weights-stay
def test_kernels_agree_with_their_twins_in_the_interpreter() -> None:
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/triton", TRITON_INTERPRET="1")
    assert " passed" in said


@pytest.mark.soak
def test_further_cases_agree_in_the_interpreter() -> None:
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "soak", "tests/kernels/triton", TRITON_INTERPRET="1")
    assert " passed" in said


def script(name: str, *arguments: str) -> str:
    """What a script of `bench/` prints in the interpreter."""
    code = f"from tests.support.interpreter import mend\nmend()\nimport runpy, sys\nsys.argv = {[name, *arguments]!r}\n"
    return python("-c", code + f"runpy.run_path('bench/{name}.py', run_name='__main__')", TRITON_INTERPRET="1")


@pytest.mark.soak
def test_the_script_that_times_them_runs_through() -> None:
    said = script("gpu_kernels", "--tiny")
    assert said.count(" ok ") == 17 and "all agree with their twins" in said


@pytest.mark.soak
def test_the_script_that_sweeps_tiles_checks_them_first() -> None:
    assert "2 of 2 right" in script("gpu_prefill", "--tiny")


@pytest.mark.soak
def test_the_script_that_tries_tiles_of_deterministic_kernels_runs_through() -> None:
    assert "all cases were run, 0 with other bits" in script("gpu_invariant", "--tiny")


@pytest.mark.soak
def test_a_layer_of_a_few_rows_agrees_with_the_twins() -> None:
    said = script("gpu_few", "--tiny")
    assert said.count(" ok ") == 2 and "all agree with their twins" in said


@pytest.mark.soak
def test_the_script_that_checks_and_times_sampling_runs_through() -> None:
    said = script("gpu_sampling", "--tiny")
    assert "all agree with their twins" in said and said.count(" us, host ") == 14
    assert script("gpu_sampling", "--tiny", "--sweep").count(" near ties; temperature ") == 2


@pytest.mark.soak
def test_launches_do_not_compare_constants_and_names_stay() -> None:
    code = """
from octavo.worker.kernel_calls import kernel_keys
from octavo.kernels.triton.sampling.draw import gather
gather.cache_key
print(len(gather.used_global_vals) > 9, kernel_keys() == kernel_keys(), len(gather.used_global_vals))
"""
    assert python("-c", code).split() == ["True", "True", "0"]


@pytest.mark.soak
def test_the_script_that_checks_and_times_packed_products_runs_through() -> None:
    said = script("gpu_packed", "--tiny")
    assert "all agree with their twins" in said and "128 -> 48" in said and "4b of 128" in said


@pytest.mark.soak
def test_the_script_that_checks_and_times_gated_delta_net_runs_through() -> None:
    said = script("gpu_hybrid", "--tiny", "--parts", "states,prompt")
    assert said.count("   ok   ") == 3 and said.count(" state update, ") == 2 and "rule / products" in said


@pytest.mark.soak
def test_the_script_that_checks_and_times_latent_attention_runs_through() -> None:
    said = script("gpu_latent", "--tiny", "--parts", "decode,prompt")
    assert said.count(" ok ") == 4 and "WRONG" not in said and "NOT" not in said and said.count(" choices of tiles ran") == 3


@pytest.mark.soak
def test_a_stream_of_packed_layers_runs_through() -> None:
    said = script("gpu_stream", "--tiny")
    assert "all agree with their twins" in said and "a layer took" in said


def compiled(cache: Path, *wanted: str) -> list[list[str]]:
    """Capability, kernel and matrix units of each that was compiled; one that spills or takes too much shared memory fails."""
    said = python("-m", "tests.support.compiled", *wanted, TRITON_CACHE_DIR=str(cache), TRITON_INTERPRET="0")
    return [line.split()[:3] for line in said.splitlines()]


def test_the_documents_name_the_gpus_that_kernels_are_compiled_for() -> None:
    for page, row in (("models.md", r"^\|.*\| ([\d.]+) \| (?:run|kernels compiled)"), ("operations.md", r"^\|.*\| ([\d.]+) \| yes \|")):
        named = re.findall(row, (ROOT / "docs" / page).read_text(), re.MULTILINE)
        assert {number.replace(".", "") for number in named} == {*CAPABILITIES}, page


# promise: kernels-gpus-compute
def test_the_largest_kernels_compile_without_spilling(tmp_path: Path) -> None:
    """Those of Hopper, and the products with 8-bit floats for a newer GPU. All others are compiled by hand, below."""
    taken = compiled(tmp_path, "90:largest,attention,mixture", "100:fp8")
    assert {"prefill_hopper", "packed_gemm", "down_row"} <= {name for capability, name, _ in taken if capability == "90"}
    assert {("90", "multiply_tiles", "wgmma"), ("90", "packed_gemm", "wgmma")} <= set(map(tuple, taken))
    assert {"gemv", "fp8_tiles", "round_row"} <= {name for capability, name, _ in taken if capability == "100"}


@pytest.mark.soak
def test_kernels_compile_without_spilling(tmp_path: Path) -> None:
    """All of them for Hopper; for an older kind the largest, since what fits there and how products are made differs."""
    taken = compiled(tmp_path, "90:every", "86:largest,attention")
    names = {name for capability, name, _ in taken if capability == "90"}
    layers = {"write", "decode", "share_out", "prefill", "prefill_hopper", "copy", "fused_decode", "add_norm", "gate_rows", "scale_tile"}
    products = {"gemv", "merge_gemv", "merge_heads"}
    products |= {"route", "line_up", "gate_up_row", "down_row", "multiply_tiles", "sum_choices"}
    products |= {"round_row", "fp8_tiles"}
    products |= {"gate_up_codes", "down_codes", "multiply_tiles_of_codes"}
    products |= {"packed_gemv", "packed_small_gemm", "packed_gemm", "sum_shares", "unpack_tile"}
    sampling = {"best_of_blocks", "best_of_rows", "find_tops", "survey", "gather", "settle", "weigh", "draw_fallback", "stand", "nearest"}
    assert names == layers | products | sampling | {"lay_out", "edit_rows"}
    units = {(capability, name, units) for capability, name, units in taken if name.startswith(("packed_gemm", "prefill"))}
    hopper = {("90", "packed_gemm", "wgmma"), ("90", "prefill_hopper", "wgmma"), ("90", "prefill", "-")}  # no matrix units for float32
    older = {("86", "packed_gemm", "mma"), ("86", "prefill", "mma")}
    assert units == hopper | older


# promise: kernels-gpus-compute
@pytest.mark.soak
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_kernels_compile_without_spilling(capability: str, tmp_path: Path) -> None:
    taken = compiled(tmp_path, f"{capability}:every,further")
    names = {name for _, name, _ in taken}
    assert {one for one, _, _ in taken} == {capability} and "fp8_tiles" in names and ("round_row" in names) == (int(capability) >= 89)
    assert len(taken) > 50 and ("prefill_hopper" in names) == (capability == "90")
    assert "wgmma" not in {units for _, _, units in taken} or capability == "90"


@pytest.mark.soak
@pytest.mark.parametrize("capability", [one for one in CAPABILITIES if one != "100"])  # `deterministic` is refused there
def test_the_kernels_of_deterministic_compile_without_spilling(capability: str, tmp_path: Path) -> None:
    taken = compiled(tmp_path, f"{capability}:invariant")
    assert {"multiply_in_order", "invariant_prefill", "invariant_decode", "packed_gemm", "fp8_tiles"} <= {name for _, name, _ in taken}
    products = {units for _, name, units in taken if name == "multiply_in_order"}
    assert products == ({"-", "wgmma"} if capability == "90" else {"-", "mma"})


# promise: kernels-gpus-compute
@pytest.mark.soak
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_kernels_of_recurrent_layers_compile(capability: str, tmp_path: Path) -> None:
    taken = compiled(tmp_path, f"{capability}:delta_net")
    assert {name for _, name, _ in taken} == {"recur", "convolve", "within", "across", "norm_and_gate"}


# promise: kernels-gpus-compute
@pytest.mark.parametrize("capability", [one if one == "90" else pytest.param(one, marks=pytest.mark.soak) for one in CAPABILITIES])
def test_the_kernels_of_latents_compile(capability: str, tmp_path: Path) -> None:
    taken = compiled(tmp_path, f"{capability}:latent")
    assert {name for _, name, _ in taken} == {"write_latents", "share_out", "latent_prefill", "latent_decode", "route_in_groups"}
    assert {units for _, name, units in taken if name == "latent_prefill"} == {"-", "wgmma" if capability == "90" else "mma"}


@pytest.mark.soak
@pytest.mark.parametrize("capability", [one for one in CAPABILITIES if one != "100"])
def test_the_kernels_of_deterministic_latents_compile(capability: str, tmp_path: Path) -> None:
    taken = compiled(tmp_path, f"{capability}:alike")
    assert {name for _, name, _ in taken} == {"share_out", "invariant_latent_prefill", "invariant_latent_decode", "multiply_heads"}
    units = {units for _, name, units in taken if name.startswith("invariant_latent")}
    assert units == {"-", "mma"}, "prompts and decode multiply alike"


@pytest.mark.parametrize("capability", ["90", pytest.param("87", marks=pytest.mark.soak), pytest.param("100", marks=pytest.mark.soak)])
def test_an_engine_calls_what_was_compiled_ahead_and_nothing_else(capability: str) -> None:
    assert python("-m", "tests.support.variants", capability, TRITON_INTERPRET="0").splitlines() == []
