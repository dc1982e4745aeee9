"""The settings of the engine. They are frozen: what the start finds out is returned, never written into them.

`EngineConfig` is what a user sets: each field is a flag and a keyword of `LLM`. `Debug` is what a test switches on
through `OCTAVO_DEBUG`. A model's own numbers are in `model_config.py`. Environment variables are read here and nowhere else.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from octavo.errors import ConfigError
from octavo.model_config import is_json_object
from octavo.vllm_names import SETTINGS, names_explained

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
KVCacheLayout = Literal["auto", "nhd", "hnd"]
MambaSSMCacheDtype = Literal["auto", "float32"]
Device = Literal["auto", "cpu", "cuda"]
CpuIsa = Literal["auto", "portable", "avx2", "avx512", "avx512bf16", "amx", "neon", "i8mm"]
Quantization = Literal["auto", "none", "int8", "int4"]
SchedulingPolicy = Literal["fcfs", "priority"]
LogprobsMode = Literal["raw", "processed"]
DistributedExecutorBackend = Literal["mp", "ray"]
AttentionBackendName = Literal["auto", "cpu", "triton", "flashinfer", "contiguous"]


def _flag(default: Any, text: str, choices_because: str = "") -> Any:
    """Returns a field with the help text of its flag. `choices_because`: why there are no other choices."""
    return field(default=default, metadata={"help": text, "because": choices_because})


@names_explained(SETTINGS)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What a user sets. Each field is also a flag, with the same help, type and default."""

    model: str | None = _flag(
        None, "a folder, a .gguf file, owner/name[@revision][:QUANT] on the hub, or SmolLM2-135M-Instruct, the default model"
    )
    revision: str | None = _flag(None, "branch, tag or commit of a model on the hub")
    hf_overrides: dict[str, Any] | None = _flag(None, "values that replace those in the model's config.json, as a JSON object")
    dtype: Dtype = _flag("auto", "data type to compute in; auto: the fastest on this CPU, on a GPU that of the model")
    quantization: Quantization = _flag(
        "auto", "auto: keep weights as they are stored; none: dequantise them; int8, int4: quantise float weights at load",
        "auto reads what the file holds (awq, gptq, fp8, gguf)",
    )  # fmt: skip
    device: Device = _flag(
        "auto", "where to compute; auto: an NVIDIA GPU if there is one, else the CPU", "Octavo runs on a CPU or an NVIDIA GPU"
    )
    load_format: Literal["auto", "dummy"] = _flag("auto", "dummy: random weights, to try out the shape of a model")
    max_model_len: int | None = _flag(None, "context length: maximum number of tokens of a prompt and its answer (4096, 32k, auto)")
    block_size: int = _flag(16, "tokens per block, a power of two from 1 to 256")
    kv_cache_dtype: KVCacheDtype = _flag("auto", "data type of the KV cache; auto: as --dtype; int8: about half the size, on a CPU only")
    kv_cache_layout: KVCacheLayout = _flag("auto", "on a GPU: order in a block, by token (nhd) or by head (hnd); auto: nhd")
    kv_cache_memory_bytes: int | None = _flag(
        None, "size of the KV cache (512m, 4g); default: a quarter of memory, at most 4 GiB; on a GPU, what is left of its memory"
    )
    gpu_memory_utilization: float = _flag(0.9, "share of a GPU's memory that may be in use, other processes included")
    state_cache_share: float = _flag(0.2, "share of the KV cache for states of recurrent layers that later prompts continue from")
    mamba_ssm_cache_dtype: MambaSSMCacheDtype = _flag(
        "auto", "data type of the states of recurrent layers; auto: float32", "rounding errors of a state would add up with every token"
    )
    num_gpu_blocks_override: int | None = _flag(None, "exact number of blocks in the KV cache, on a CPU too")
    tensor_parallel_size: int = _flag(1, "number of processes that split every layer; each has a part of the weights and of the KV cache")
    pipeline_parallel_size: int = _flag(1, "number of stages, each with some of the layers and with --tensor-parallel-size processes")
    distributed_executor_backend: DistributedExecutorBackend = _flag(
        "mp", "where the processes and engines run; mp: on this host; ray: on the nodes of a Ray cluster"
    )
    decode_context_parallel_size: int = _flag(
        1, "number of tensor-parallel processes that hold the same KV heads, each for some of the tokens"
    )
    enable_expert_parallel: bool = _flag(False, "with --tensor-parallel-size: each process has whole experts, not a part of every expert")
    max_num_seqs: int | None = _flag(None, "maximum number of sequences that run at the same time; default: 256, on a GPU 512")
    max_num_batched_tokens: int | None = _flag(None, "maximum number of tokens in one step; default: 2048, on a GPU 8192")
    enable_prefix_caching: bool = _flag(True, "reuse cached blocks of earlier prompts and answers")
    max_pinned_blocks: int | None = _flag(None, "maximum number of blocks for pinned prefixes; default: a quarter of the KV cache")
    scheduling_policy: SchedulingPolicy = _flag("fcfs", "order of requests: fcfs: by arrival; priority: lowest number first")
    attention_backend: AttentionBackendName = _flag(
        "auto", "attention of all layers; auto: for each kind of layer the first that supports it; flashinfer must be installed; "
        "contiguous: the reference without paging"
    )  # fmt: skip
    enforce_eager: bool = _flag(False, "on a GPU: do not use CUDA graphs")
    deterministic: bool = _flag(False, "on a GPU: equal tokens and logprobs under every schedule; native CPU kernels always do so")
    native: bool = _flag(True, "use the native CPU kernels; --no-native: torch computes")
    cpu_isa: CpuIsa = _flag("auto", "instruction set of the native kernels; auto: the best that this CPU has")
    pipeline_depth: int | None = _flag(None, "steps in flight, 1 or 2; default: 1, on a GPU 2")
    max_logprobs: int = _flag(20, "maximum number of logprobs per token in a request")
    logprobs_mode: LogprobsMode = _flag(
        "raw", "raw: logprobs of the model's own output; processed: after bias, penalties, temperature and top-k/top-p/min-p"
    )
    generation_config: Literal["auto", "none"] = _flag("auto", "none: ignore the sampling values that the model recommends")
    chat_template: str | None = _flag(None, "a .jinja file to use instead of the model's chat template")
    skip_tokenizer_init: bool = _flag(False, "load no tokenizer: prompts and outputs are token ids")
    trace: str | None = _flag(None, "write every step to this file, for ui.perfetto.dev or chrome://tracing")
    seed: int = _flag(0, "seed of requests without their own, and of dummy weights")

    def __post_init__(self) -> None:
        for each in fields(self):
            check_setting(each.name, getattr(self, each.name))
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {tokens}, which is less than max_num_seqs ({seqs}): "
                "a step must hold one token of every running sequence; raise the first or lower the second"
            )
        ranks, context = self.tensor_parallel_size, self.decode_context_parallel_size
        if ranks % context:
            raise ConfigError(
                f"decode_context_parallel_size is {context}, which does not divide tensor_parallel_size ({ranks}): "
                f"it shares out the context among those ranks; set tensor_parallel_size to a multiple of {context}"
            )

    @property
    def num_ranks(self) -> int:
        """The processes of a model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def expert_ranks(self) -> int:
        """The processes that have whole experts each."""
        return self.tensor_parallel_size if self.enable_expert_parallel else 1

    @property
    def wants_native(self) -> bool:
        """Whether the native kernels are to be used, unless the machine lacks them."""
        return self.native and self.attention_backend == "auto" and self.device != "cuda"

    @property
    def block_tokens(self) -> int:
        """The tokens that a block covers. With decode context parallel, each rank of a group keeps `block_size` of them."""
        return self.block_size * self.decode_context_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An `EngineConfig` with values for all settings that depend on device and model. `sizing/auto.py` makes it."""

    device: Literal["cpu", "cuda"]
    kv_cache_layout: Literal["nhd", "hnd"]
    max_num_seqs: int
    max_num_batched_tokens: int
    pipeline_depth: int


def check_setting(name: str, value: object) -> None:
    """Checks the value of one field. Rules about two fields are checked in `EngineConfig`."""
    if name == "model" and not isinstance(value, (str, os.PathLike, type(None))):
        raise ConfigError(f"model must be a path or a name, got {value!r}")
    if name == "trace" and not (value is None or (isinstance(value, str) and value)):
        raise ConfigError(f"trace must be the name of a file, got {value!r}")
    if name == "revision" and not isinstance(value, (str, type(None))):
        raise ConfigError(f"revision must be a branch, a tag or a commit, got {value!r}")
    if name == "hf_overrides" and not (value is None or is_json_object(value)):
        raise ConfigError(f"hf_overrides must be a JSON object, got {value!r}")
    if name in _INTEGERS and not (value is None and EngineConfig.__dataclass_fields__[name].default is None):
        low, high = _INTEGERS[name]
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")
        if name == "block_size" and value & (value - 1):
            raise ConfigError(f"block_size must be a power of two from 1 to 256, got {value}")
    if name in _SHARES:
        fits, wanted = _SHARES[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or not fits(value):
            raise ConfigError(f"{name} must be a number {wanted}, got {value!r}")
    if name in _CHOICES and not any(type(value) is type(choice) and value == choice for choice in _CHOICES[name]):
        because = EngineConfig.__dataclass_fields__[name].metadata["because"]
        choices = ", ".join(map(str, _CHOICES[name]))
        raise ConfigError(f"{name} must be one of {choices}, got {value!r}" + (f": {because}" if because else ""))


_MANY = 2**31 - 1
_INTEGERS = {  # name -> the least and the greatest value
    "max_model_len": (2, _MANY),
    "block_size": (1, 256),
    "kv_cache_memory_bytes": (1, 2**63 - 1),
    "num_gpu_blocks_override": (2, _MANY),  # block 0 is the null block
    "tensor_parallel_size": (1, 1024),
    "pipeline_parallel_size": (1, 1024),
    "decode_context_parallel_size": (1, 1024),
    "max_num_seqs": (1, _MANY),
    "max_num_batched_tokens": (1, _MANY),
    "max_pinned_blocks": (0, _MANY),
    "pipeline_depth": (1, 2),
    "max_logprobs": (0, _MANY),
    "seed": (0, 2**64 - 1),
}
_SHARES: dict[str, tuple[Callable[[float], bool], str]] = {
    "gpu_memory_utilization": (lambda share: 0 < share <= 1, "above 0 and at most 1"),
    "state_cache_share": (lambda share: 0 <= share <= 0.9, "from 0 to 0.9"),
}
_CHOICES: dict[str, tuple[str | bool, ...]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "quantization": ("auto", "none", "int8", "int4"),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "float16", "int8"),
    "kv_cache_layout": ("auto", "nhd", "hnd"),
    "mamba_ssm_cache_dtype": ("auto", "float32"),
    "device": ("auto", "cpu", "cuda"),
    "load_format": ("auto", "dummy"),
    "generation_config": ("auto", "none"),
    "logprobs_mode": ("raw", "processed"),
    "distributed_executor_backend": ("mp", "ray"),
    "attention_backend": ("auto", "cpu", "triton", "flashinfer", "contiguous"),
    "cpu_isa": ("auto", "portable", "avx2", "avx512", "avx512bf16", "amx", "neon", "i8mm"),
    "scheduling_policy": ("fcfs", "priority"),
    **{one.name: (True, False) for one in fields(EngineConfig) if isinstance(one.default, bool)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Debug:
    """Switches for tests, from `OCTAVO_DEBUG=isa=avx2,check=1,preempt.every=3,forward.raise@7`."""

    check: bool = False  # assert every invariant after every step, fill free blocks with NaN
    runner: Literal["model", "fake", "device"] = "model"  # fake: FakeKV instead of a model; device: as on a GPU, on the CPU
    isa: CpuIsa = "auto"  # instruction set of the native kernels, whatever cpu_isa says
    comm: Literal["auto", "gloo", "nccl"] = "auto"  # on a GPU. gloo: ranks share the first one; nccl: one rank calls NCCL too
    native: Literal["on", "off"] = "on"  # off: torch computes, whatever `native` says
    preempt_every: int = 0  # preempt the last running sequence every k steps
    forward_raise: int = 0  # raise in forward at this step
    forward_sleep: int = 0  # milliseconds by which every forward takes longer
    forward_nan: int = 0  # make the first planned row of this step not finite
    sample_bad_id: int = 0  # sample an id outside the vocabulary at this step
    cache_force_miss: bool = False  # every prefix lookup misses
    ipc_drop: int = 0  # the frame with this number that an engine process sends is lost
    ipc_truncate: int = 0  # half of this frame is lost
    ipc_garbage: int = 0  # the bytes of this frame are changed
    exit_sigkill: int = 0  # an engine process is killed at this step
    grammar_timeout: bool = False  # every grammar takes too long to compile
    loop_slow: int = 0  # milliseconds of CPU time after which a turn of an API process's event loop is reported
    step_slow: int = 0  # the same for a turn of an engine process's loop, which makes one step

    @property
    def switched_on(self) -> list[str]:
        """Returns the switches that are set, for the log."""
        return [f"{f.name}={value}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]

    def overrule(self, config: EngineConfig) -> EngineConfig:
        """Returns the config with what these switches change in it."""
        return replace(config, native=config.native and self.native == "on", cpu_isa=config.cpu_isa if self.isa == "auto" else self.isa)

    @staticmethod
    def parse(text: str) -> "Debug":
        """Reads the value of OCTAVO_DEBUG."""
        known = {f.name: f for f in fields(Debug)}
        values: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, _, value = re.sub("@", "=", item, count=1).partition("=")
            name = key.replace(".", "_")
            if name not in known:
                raise ConfigError(f"OCTAVO_DEBUG has no switch {key!r}; known: {', '.join(sorted(known))}")
            values[name] = _debug_value(name, value)
        return Debug(**values)


def _debug_value(name: str, value: str) -> bool | int | str:
    known = {"runner": ("model", "fake", "device"), "comm": ("auto", "gloo", "nccl"), "native": ("on", "off"), "isa": _CHOICES["cpu_isa"]}
    choices = known.get(name)
    if choices is not None:
        if value not in choices:
            raise ConfigError(f"OCTAVO_DEBUG {name} must be one of {', '.join(map(str, choices))}, got {value!r}")
        return value
    if not value.isdigit():
        raise ConfigError(f"OCTAVO_DEBUG {name} must be a number, got {value!r}")
    return bool(int(value)) if name in ("check", "cache_force_miss", "grammar_timeout") else int(value)


def debug_from_environment() -> Debug:
    return Debug.parse(os.environ.get("OCTAVO_DEBUG", ""))


def api_key() -> str | None:
    """Returns OCTAVO_API_KEY, if it is set. Unlike a flag, it does not show in the list of processes."""
    return os.environ.get("OCTAVO_API_KEY") or None


def spans_wanted() -> bool:
    """Whether an address for OpenTelemetry spans is set. OpenTelemetry reads the rest itself."""
    return any(os.environ.get(name) for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"))


def ray_address() -> str | None:
    """Returns RAY_ADDRESS, the address of a Ray cluster's head node, if it is set."""
    return os.environ.get("RAY_ADDRESS") or None


def visible_gpus() -> str | None:
    """Returns CUDA_VISIBLE_DEVICES, if it is set. CUDA hides all other GPUs from this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def show_gpus(names: list[str]) -> None:
    """Hides all other GPUs from this process. It must be called before CUDA starts."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def log_level(default: str) -> str:
    """Returns OCTAVO_LOG_LEVEL, or the default."""
    level = os.environ.get("OCTAVO_LOG_LEVEL", default).upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(f"OCTAVO_LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR, got {level!r}")
    return level


# Environment variables that have an effect: read here, or by a library that Octavo uses.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "NO_COLOR", "OCTAVO_API_KEY",
    "OCTAVO_DEBUG", "OCTAVO_LOG_LEVEL", "OMP_NUM_THREADS", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
    "XDG_CACHE_HOME",
)  # fmt: skip


def environment() -> dict[str, str]:
    """Returns the variables above that are set, and all others named OCTAVO_*, without secrets."""
    names = sorted({*VARIABLES, *(name for name in os.environ if name.startswith("OCTAVO_"))})
    return {name: _shown(name, value) for name in names if (value := os.environ.get(name))}


def _shown(name: str, value: str) -> str:
    """Returns a value in one line. It hides tokens, passwords in addresses, and values of unknown variables."""
    if name not in VARIABLES or name in ("HF_TOKEN", "OCTAVO_API_KEY", "RAY_AUTH_TOKEN"):
        return "(set)"
    return re.sub(r"//[^/]*@", "//(set)@", " ".join(value.split()))[:200]


def thread_limit() -> int | None:
    """Returns OMP_NUM_THREADS, if it is set to a number."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) > 0 else None


def allow_threads(count: int) -> None:
    """Lets this process use so many threads, whatever the process that started it has set."""
    os.environ["OMP_NUM_THREADS"] = str(count)


PASSED_ON = ("OCTAVO_DEBUG", "OMP_NUM_THREADS", "RAY_ADDRESS")


def passed_on() -> dict[str, str]:
    """Returns the variables of this process that also hold for its engines on other hosts."""
    return {name: value for name in PASSED_ON if (value := os.environ.get(name))}


def environment_with(given: dict[str, str]) -> dict[str, str]:
    """Returns the variables of this process, but those that are passed on as another one has them."""
    return {name: value for name, value in os.environ.items() if name not in PASSED_ON} | {
        name: value for name, value in given.items() if name in PASSED_ON
    }


def calm_torch() -> None:
    """Tells torch to hold neither cores nor memory that it does not use. It must be called before torch is imported.

    A thread that spins at a barrier takes a core from the one it waits for. On ARM torch's allocator would keep back what was freed.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")
    os.environ.setdefault("MIMALLOC_ARENA_EAGER_COMMIT", "0")


def no_color() -> bool:
    return bool(os.environ.get("NO_COLOR"))
