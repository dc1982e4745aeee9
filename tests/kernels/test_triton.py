"""The Triton kernels where there is no GPU: their tests in Triton's interpreter, in a process of their own.

The interpreter has to be chosen before triton is first imported, and other tests import it by way of transformers.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


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


def test_the_script_that_times_them_runs_through() -> None:
    said = script("gpu_kernels", "--tiny")
    assert said.count(" ok ") == 17 and "all agree with their twins" in said


def test_the_script_that_sweeps_tiles_checks_them_first() -> None:
    assert "2 of 2 right" in script("gpu_prefill", "--tiny")


def test_a_layer_of_a_few_rows_agrees_with_the_twins() -> None:
    said = script("gpu_few", "--tiny")
    assert said.count(" ok ") == 2 and "all agree with their twins" in said


def test_the_script_that_checks_and_times_sampling_runs_through() -> None:
    said = script("gpu_sampling", "--tiny")
    assert "all agree with their twins" in said and said.count(" us, host ") == 14
    assert script("gpu_sampling", "--tiny", "--sweep").count(" near ties; temperature ") == 2


def test_launches_do_not_compare_constants_and_names_stay() -> None:
    code = """
from octavo.kernels.triton.ahead import kernel_keys
from octavo.kernels.triton.draw import gather
gather.cache_key
print(len(gather.used_global_vals) > 9, kernel_keys() == kernel_keys(), len(gather.used_global_vals))
"""
    assert python("-c", code).split() == ["True", "True", "0"]


def test_the_script_that_checks_and_times_packed_products_runs_through() -> None:
    said = script("gpu_packed", "--tiny")
    assert "all agree with their twins" in said and "128 -> 48" in said and "4b of 128" in said


def test_a_stream_of_packed_layers_runs_through() -> None:
    said = script("gpu_stream", "--tiny")
    assert "all agree with their twins" in said and "a layer took" in said


def test_kernels_compile_for_hopper_without_spilling(tmp_path: Path) -> None:
    taken = python("-m", "tests.support.hopper", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0").splitlines()
    names = {line.split()[0] for line in taken}
    layers = {"write", "decode", "share_out", "prefill", "prefill_hopper", "copy", "decode_few", "add_norm", "gate_rows"}
    products = {"product_few", "merge_few", "merge_heads"}
    products |= {"packed_one", "packed_few", "packed_tile", "sum_shares", "unpack_tile"}
    sampling = {"best_of_blocks", "best_of_rows", "find_tops", "survey", "gather", "settle", "weigh", "search", "stand", "nearest"}
    assert names == layers | products | sampling | {"lay_out", "adjust_rows"}
    assert {line.split()[1] for line in taken if line.startswith("packed_tile")} == {"wgmma"}
    assert {line.split()[1] for line in taken if line.startswith("prefill")} == {"wgmma", "-"}  # that of float32 has no matrix units


@pytest.mark.soak
def test_further_attention_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    taken = python("-m", "tests.support.hopper", "further", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0").splitlines()
    assert {line.split()[0] for line in taken} == {"decode", "share_out", "prefill", "prefill_hopper"}


def test_an_engine_calls_what_was_compiled_ahead_and_nothing_else() -> None:
    assert python("-m", "tests.support.variants", TRITON_INTERPRET="0").splitlines() == []
